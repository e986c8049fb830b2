//! Timing one set-up: prompt, decoding, decoding with a nearly empty cache.

use std::time::{Duration, Instant};

use myq_engine::bandwidth::{Pages, Reading, Seats};
use myq_engine::{Engine, bandwidth};
use myq_model::sample::argmax;

use super::counters::Counters;
use super::verdict::Measured;
use crate::load::Outcome;

/// What to do in each run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) prompt_tokens: usize,
    pub(crate) decode_tokens: usize,
    pub(crate) repeat: usize,
    /// Processors that this process may use; asked before the engine pins the thread to one.
    pub(crate) processors: usize,
}

/// Rates of all runs in tokens a second, and what the system counted while decoding.
pub(crate) struct Runs {
    pub(crate) prompt: Vec<f64>,
    pub(crate) decode: Vec<f64>,
    counters: Counters,
    /// Tokens decoded in the time of the counters.
    counted: usize,
}

/// All runs of `work`; `done` is called after each.
pub(crate) fn runs(engine: &mut Engine, work: &Work, mut done: impl FnMut()) -> Outcome<Runs> {
    let mut runs = Runs {
        prompt: Vec::new(),
        decode: Vec::new(),
        counters: Counters::default(),
        counted: 0,
    };
    for i in 0..work.repeat {
        let (prompt, decode, counters) = once(engine, work)?;
        runs.prompt.push(prompt);
        runs.decode.push(decode);
        runs.counters = if i == 0 {
            counters
        } else {
            runs.counters.plus(&counters)
        };
        runs.counted += work.decode_tokens - 1;
        done();
    }
    Ok(runs)
}

/// Prompt and decode rate of one run, and the counters of its decoding.
fn once(engine: &mut Engine, work: &Work) -> Outcome<(f64, f64, Counters)> {
    // One step unmeasured: threads wake, the first pages come.
    first_step(engine)?;
    engine.rewind(0);
    let vocab = engine.source().config.vocab as u32;
    // Any tokens will do: the work does not depend on them.
    let tokens: Vec<u32> = (0..work.prompt_tokens as u32)
        .map(|i| i.wrapping_mul(7919).wrapping_add(13) % vocab)
        .collect();
    let start = Instant::now();
    let mut token = argmax(engine.feed(&tokens, 1)?);
    let prompt = work.prompt_tokens as f64 / start.elapsed().as_secs_f64();
    // The first step is left out: it may still wait for pages or for threads to wake.
    token = argmax(engine.step(token)?);
    let before = Counters::now();
    let start = Instant::now();
    for _ in 1..work.decode_tokens {
        token = argmax(engine.step(token)?);
    }
    let decode = (work.decode_tokens - 1) as f64 / start.elapsed().as_secs_f64();
    Ok((prompt, decode, Counters::now().since(&before)))
}

/// Time of one step with an empty cache.
pub(crate) fn first_step(engine: &mut Engine) -> Outcome<Duration> {
    engine.rewind(0);
    let start = Instant::now();
    engine.step(0)?;
    Ok(start.elapsed())
}

/// Decode rate behind one token: up to `most` tokens, four at least, and half a second.
pub(crate) fn empty_rate(engine: &mut Engine, most: usize) -> Outcome<f64> {
    first_step(engine)?;
    let room = engine.plan().context - engine.position();
    let most = most.max(4).min(room);
    let start = Instant::now();
    let mut steps = 0;
    while steps < most && (steps < 4 || start.elapsed() < Duration::from_millis(500)) {
        let token = argmax(engine.step(1)?);
        std::hint::black_box(token);
        steps += 1;
    }
    Ok(steps as f64 / start.elapsed().as_secs_f64())
}

/// What the machine reads, at each number of threads.
pub(crate) struct Ceiling {
    pub(crate) pages: Pages,
    pub(crate) last_level_cache: Option<usize>,
    /// From memory: a buffer that no cache holds.
    pub(crate) memory: Vec<Reading>,
    /// A buffer of the bytes that a token reads, where the last cache may hold them.
    pub(crate) model: Option<Vec<Reading>>,
}

impl Ceiling {
    /// Reads with each of `threads` beside a model that reads `bytes_per_token`.
    pub(crate) fn measure(
        bytes_per_token: usize,
        seats: Seats,
        threads: &[usize],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Outcome<Ceiling> {
        let last_level_cache = bandwidth::last_level_cache();
        let fits = last_level_cache.is_some_and(|cache| bytes_per_token <= cache);
        let parts = 1 + u64::from(fits);
        let mut part = 0;
        let mut of_all = |done: u64, of: u64| progress(part * of + done, parts * of);
        let memory = bandwidth::measure(bandwidth::memory_buffer(), seats, threads, &mut of_all)?;
        part = 1;
        let mut of_all = |done: u64, of: u64| progress(part * of + done, parts * of);
        let model = match fits {
            true => Some(bandwidth::measure(
                bytes_per_token,
                seats,
                threads,
                &mut of_all,
            )?),
            false => None,
        };
        Ok(Ceiling {
            pages: seats.pages,
            last_level_cache,
            memory,
            model,
        })
    }

    /// Bytes a second with `threads`, which was measured: at best, and in one stream for each
    /// thread. The faster buffer counts, as a part of a model that almost fits stays in the
    /// cache too.
    pub(crate) fn at(&self, threads: usize) -> (f64, f64) {
        let readings = self.memory.iter().chain(self.model.iter().flatten());
        readings
            .filter(|r| r.threads == threads)
            .map(|r| (r.bytes_per_second, r.one_stream))
            .fold((f64::MIN_POSITIVE, f64::MIN_POSITIVE), |a, b| {
                (a.0.max(b.0), a.1.max(b.1))
            })
    }
}

/// The numbers of the verdict. `empty_rate` and `single_rate` as in [`Measured`].
pub(crate) fn measured(
    engine: &Engine,
    work: &Work,
    runs: &Runs,
    ceiling: &Ceiling,
    (empty_rate, single_rate): (f64, f64),
) -> Measured {
    let (plan, source) = (engine.plan(), engine.source());
    let per_token = |n: Option<u64>| n.unwrap_or(0) as f64 / runs.counted.max(1) as f64;
    let (bandwidth, one_stream) = ceiling.at(plan.threads);
    let position = work.prompt_tokens as f64 + work.decode_tokens as f64 / 2.0;
    Measured {
        threads: plan.threads,
        processors: work.processors,
        weight_bytes: source.weights.bytes_per_token() as f64,
        cache_bytes: plan.kv_bytes(&source.config) as f64 / plan.context as f64 * position,
        bandwidth,
        one_stream,
        rate: median(&runs.decode).0,
        empty_rate,
        single_rate,
        major_faults: per_token(runs.counters.major_faults),
        disk_bytes: per_token(runs.counters.disk_bytes),
        residency: engine.file().residency(),
        small_pages: engine.packed_bytes() == 0
            && engine.in_large_pages().is_some_and(|share| share < 0.5),
        wait_share: runs.counters.wait_share(),
        involuntary_switches: per_token(runs.counters.involuntary_switches),
    }
}

/// Median, and smallest and largest.
pub(crate) fn median(values: &[f64]) -> (f64, [f64; 2]) {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    match (values.first(), values.last()) {
        (Some(&least), Some(&most)) => (values[values.len() / 2], [least, most]),
        _ => (0.0, [0.0; 2]),
    }
}
