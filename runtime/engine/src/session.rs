//! An open model: prompt in, logits out, one sequence.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use myq_blocks::scalar::{Exact, Scalar};
use myq_blocks::{Kernels, Layout};
use myq_format::{Kind, myq::Myq};
use myq_model::weights::Store;
use myq_model::{
    Activations, Batch, CacheType, Config, Plan, Source, Weights, forward, rope::RopeTable,
};

use crate::cpu::Cpu;
use crate::map::Mapped;
use crate::place::{MOST_THREADS, Seat};
use crate::pool::Pool;
use crate::prewarm::{self, Progress};
use crate::repack::{self, Packed, Repack};
use crate::topology::Placement;
use crate::{EngineError, KernelChoice, memory, select};

/// How to open a model.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads; the default is what `runner tune` measured for this model, or else
    /// [`crate::default_threads`].
    pub threads: Option<usize>,
    /// Time that a thread without work spins before it sleeps; the default is what
    /// `runner tune` measured, or else 100 µs.
    pub spin: Option<Duration>,
    /// Keep each thread on a CPU of its own, where there is one for each. That includes the
    /// thread that calls the engine, from its first pass until the engine is dropped, and is
    /// inherited by threads that it starts in that time.
    pub pin: bool,
    /// Drop the file's pages from memory first, so that they are read again: into the node of
    /// the threads, and into large pages where the file system has them.
    pub renew_pages: bool,
    /// Tokens of context; the default is 4,096, or what the model or half of the available
    /// memory holds.
    pub context: Option<usize>,
    /// How keys and values are stored.
    pub cache: CacheType,
    /// Tokens of a prompt that pass through the model together.
    pub batch: usize,
    /// Most tokens of a pass that get logits.
    pub logit_rows: usize,
    /// Kernels.
    pub kernels: KernelChoice,
    /// Read the file into the page cache first.
    pub prewarm: bool,
    /// Compare every tensor of a `.myq` file with its checksum first.
    pub verify: bool,
    /// Lock the file in memory, or the copy in another layout that takes its place.
    pub lock: bool,
    /// Copy matrices into the layout of the kernels where the file has another.
    pub repack: Repack,
    /// How inputs of matrices are rounded.
    pub activations: Activations,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            threads: None,
            spin: None,
            pin: true,
            renew_pages: false,
            context: None,
            cache: CacheType::F16,
            batch: 256,
            logit_rows: 1,
            kernels: KernelChoice::Auto,
            prewarm: true,
            verify: true,
            lock: false,
            repack: Repack::Auto,
            activations: Activations::Int8,
        }
    }
}

/// A model, mapped and ready.
pub struct Engine {
    // Declared before `source` and `file`, which it borrows: fields drop in this order.
    decoder: Box<dyn Decoder>,
    source: Arc<Source>,
    file: Box<Mapped>,
    packed: Option<Box<Packed>>,
    weights: Weights,
    repack: Option<repack::Report>,
    plan: Plan,
    position: usize,
    prewarm: Option<prewarm::Report>,
    load_time: Duration,
    seat: Seat,
}

impl Engine {
    /// Maps, checks, prewarms and allocates. `progress` hears of the two passes over the file.
    pub fn open(
        path: &Path,
        options: &Options,
        progress: Progress<'_>,
    ) -> Result<Engine, EngineError> {
        let start = Instant::now();
        let file = Box::new(Mapped::open(path)?);
        let fail = |error| EngineError::Model {
            path: path.to_owned(),
            error,
        };
        let source = Arc::new(Source::open(file.bytes()).map_err(fail)?);
        let seat = Seat::choose(&file, options);
        let plan = plan(&source.config, options, seat.placement.threads)?;
        // Before the passes over the file: kernels that cannot run are told at once.
        let mut decoder = decoder(options.kernels, &file, &source, &plan, &seat)?;
        let config = &source.config;
        let reserved = (plan.kv_bytes(config) + plan.buffer_bytes(config)) as u64;
        let prewarm = options
            .prewarm
            .then(|| prewarm::prewarm(&file, plan.threads, reserved, progress));
        let partial = prewarm.as_ref().is_some_and(|r| r.partial);
        if options.verify && source.kind == Kind::Myq {
            if partial {
                log::warn!(
                    "checksums are not compared: the file is larger than the available memory, and reading all of it would push out what was read ahead; `myq verify` compares them"
                );
            } else {
                let check = Myq::parse(file.bytes())
                    .and_then(|m| prewarm::verify(&m, plan.threads, progress));
                check.map_err(|e| fail(e.into()))?;
            }
        }
        let mut weights = source.weights.clone();
        let (packed, repack) = repacked(
            &mut weights,
            &file,
            decoder.layout(),
            options.repack,
            (plan.threads, reserved),
            progress,
        )?;
        if let Some(packed) = &packed {
            // SAFETY: the copy is in a box in the same `Engine` as the decoder, which is dropped
            // before it; it neither moves nor changes.
            decoder.set_packed(unsafe {
                std::slice::from_raw_parts(packed.bytes().as_ptr(), packed.bytes().len())
            });
        }
        match &packed {
            _ if !options.lock => {}
            Some(packed) => packed.lock()?,
            None => file.lock()?,
        }
        // A copy was made by the threads, on their node.
        if packed.is_none() {
            seat.check_pages(&file);
        }
        Ok(Engine {
            decoder,
            source,
            file,
            packed,
            weights,
            repack,
            plan,
            position: 0,
            prewarm,
            load_time: start.elapsed(),
            seat,
        })
    }

    /// Passes `tokens` through the model after those already there; gives the logits of the
    /// last `rows` of the last pass (`rows` at most [`Options::logit_rows`] and at most the
    /// tokens of that pass), `rows` × vocab.
    pub fn feed(&mut self, tokens: &[u32], rows: usize) -> Result<&[f32], EngineError> {
        self.fits(tokens)?;
        let mut passes = tokens.chunks(self.plan.batch).peekable();
        while let Some(tokens) = passes.next() {
            let last = passes.peek().is_none();
            let logits = if last {
                rows.min(tokens.len()).min(self.plan.logit_rows)
            } else {
                0
            };
            self.decoder.run(
                &self.weights,
                &Batch {
                    tokens,
                    position: self.position,
                    logits,
                },
            );
            self.position += tokens.len();
        }
        Ok(self.decoder.logits())
    }

    /// Logits after one more token.
    pub fn step(&mut self, token: u32) -> Result<&[f32], EngineError> {
        self.feed(&[token], 1)
    }

    /// Whether the tokens fit after those already there, and are of the vocabulary.
    pub fn fits(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let (wanted, context, vocab) = (
            self.position + tokens.len(),
            self.plan.context,
            self.source.config.vocab,
        );
        if wanted > context {
            return Err(EngineError::Context { wanted, context });
        }
        match tokens.iter().find(|&&t| t as usize >= vocab) {
            Some(&token) => Err(EngineError::Token { token, vocab }),
            None => Ok(()),
        }
    }

    /// Forgets all tokens after the first `position`.
    pub fn rewind(&mut self, position: usize) {
        self.position = self.position.min(position);
    }

    /// Tokens in the cache.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Configuration, tokenizer and template.
    pub fn source(&self) -> &Arc<Source> {
        &self.source
    }

    /// The mapped file.
    pub fn file(&self) -> &Mapped {
        &self.file
    }

    /// Sizes that were planned.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Name of the kernels chosen.
    pub fn kernels(&self) -> &'static str {
        self.decoder.name()
    }

    /// What the prewarm found and did, unless it was turned off.
    pub fn prewarm(&self) -> Option<&prewarm::Report> {
        self.prewarm.as_ref()
    }

    /// The CPUs of the threads, and why these.
    pub fn placement(&self) -> &Placement {
        &self.seat.placement
    }

    /// What became of matrices that are not in the layout of the kernels; `None` if there are
    /// none.
    pub fn repack(&self) -> Option<&repack::Report> {
        self.repack.as_ref()
    }

    /// Bytes of matrices copied into another layout.
    pub fn packed_bytes(&self) -> usize {
        self.packed.as_ref().map_or(0, |p| p.bytes().len())
    }

    /// Share of the weights that lies in large pages, 0 to 1, of what is in memory; `None` where
    /// the system does not say.
    pub fn in_large_pages(&self) -> Option<f64> {
        memory::in_large_pages(
            self.packed
                .as_ref()
                .map_or(self.file.bytes(), |p| p.bytes()),
        )
    }

    /// Time that [`Engine::open`] took.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }
}

fn plan(config: &Config, options: &Options, threads: usize) -> Result<Plan, EngineError> {
    let at_least_one = |value: usize, name: &str| match value {
        0 => Err(EngineError::Setting(format!(
            "{name} is 0; it must be at least 1"
        ))),
        n => Ok(n),
    };
    let asked = at_least_one(options.threads.unwrap_or(threads), "the number of threads")?;
    if asked > MOST_THREADS {
        return Err(EngineError::Setting(format!(
            "{asked} threads are more than any machine runs well; ask for at most {MOST_THREADS}"
        )));
    }
    let available = memory::available().unwrap_or(u64::MAX);
    let asked = at_least_one(options.context.unwrap_or(4096), "the context")?;
    if options.context.is_some() && asked > config.context {
        log::warn!(
            "context shortened from {asked} to {} tokens: the model was made for no more",
            config.context
        );
    }
    let wanted = asked.min(config.context);
    let context = Plan::fit_context(config, options.cache, wanted, available);
    if context < wanted {
        log::warn!(
            "context shortened from {wanted} to {context} tokens, to fit half of the available memory"
        );
    }
    let context = context.min(config.context);
    Ok(Plan {
        context,
        cache: options.cache,
        // Larger batches cost memory and bring no speed.
        batch: at_least_one(options.batch, "the batch")?
            .min(context)
            .min(2048),
        logit_rows: at_least_one(options.logit_rows, "the number of logit rows")?.min(context),
        threads,
        activations: options.activations,
    })
}

/// Brings matrices into `layout` if that is wanted and there is room (see [`Repack`]).
fn repacked(
    weights: &mut Weights,
    file: &Mapped,
    layout: Layout,
    choice: Repack,
    (threads, reserved): (usize, u64),
    progress: Progress<'_>,
) -> Result<(Option<Box<Packed>>, Option<repack::Report>), EngineError> {
    let mut report = repack::Report {
        bytes: repack::needed(weights, layout),
        time: None,
        available: None,
    };
    if report.bytes == 0 {
        return Ok((None, None));
    }
    let left = memory::available().map(|a| a.saturating_sub(reserved));
    report.available = match choice {
        Repack::Always => None,
        Repack::Never => return Ok((None, Some(report))),
        Repack::Auto => left.filter(|left| report.bytes > left / 5 * 4),
    };
    if report.available.is_some() {
        return Ok((None, Some(report)));
    }
    let (packed, time) = repack::repack(weights, file.bytes(), layout, threads, progress)?;
    // The file's matrices are not read again: their pages need not stay mapped.
    file.release();
    report.time = Some(time);
    Ok((Some(Box::new(packed)), Some(report)))
}

/// One call per pass hides which kernels run.
trait Decoder {
    fn layout(&self) -> Layout;
    fn set_packed(&mut self, packed: &'static [u8]);
    fn run(&mut self, weights: &Weights, batch: &Batch<'_>);
    fn logits(&self) -> &[f32];
    fn name(&self) -> &'static str;
}

impl<K: Kernels> Decoder for Cpu<'static, K> {
    fn layout(&self) -> Layout {
        Cpu::layout(self)
    }

    fn set_packed(&mut self, packed: &'static [u8]) {
        Cpu::set_packed(self, packed);
    }

    fn run(&mut self, weights: &Weights, batch: &Batch<'_>) {
        forward(self, weights, batch);
    }

    fn logits(&self) -> &[f32] {
        Cpu::logits(self)
    }

    fn name(&self) -> &'static str {
        self.kernel_name()
    }
}

fn decoder(
    choice: KernelChoice,
    file: &Mapped,
    source: &Source,
    plan: &Plan,
    seat: &Seat,
) -> Result<Box<dyn Decoder>, EngineError> {
    // SAFETY: `file` is in a box and `source` in an `Arc`, both in the same `Engine` as the
    // decoder, which is declared, and so dropped, before them; neither moves nor changes.
    let (bytes, config, rope): (&'static [u8], &'static Config, &'static RopeTable) = unsafe {
        let extend = |b: &[u8]| std::slice::from_raw_parts(b.as_ptr(), b.len());
        (
            extend(file.bytes()),
            &*std::ptr::from_ref(&source.config),
            &*std::ptr::from_ref(&source.rope),
        )
    };
    macro_rules! on {
        ($kernels:expr) => {
            match Pool::with(&seat.placement, seat.settings) {
                Ok(pool) => Ok(Box::new(Cpu::new(
                    $kernels,
                    Store::of_file(bytes),
                    config,
                    rope,
                    plan,
                    pool,
                ))),
                Err(error) => Err(EngineError::Threads(plan.threads, error)),
            }
        };
    }
    let (avx2, neon) = (select::avx2(choice), select::neon(choice));
    match (choice, avx2, neon) {
        (_, Some(k), _) => on!(k),
        (_, _, Some(k)) => on!(k),
        (KernelChoice::Auto | KernelChoice::Scalar, _, _) => on!(Scalar),
        (KernelChoice::Exact, _, _) => on!(Exact),
        (other, _, _) => Err(EngineError::Kernels(
            other.name().to_owned(),
            crate::available_kernels().join(", "),
        )),
    }
}
