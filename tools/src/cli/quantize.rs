//! `myq quantize`: flags, plan and report.

use std::path::PathBuf;

use clap::ValueEnum;
use myq_blocks::encode::Method as Scales;
use myq_tools::calibration::{self, Samples, Wanted};
use myq_tools::job::{self, Job};
use myq_tools::model::Model;
use myq_tools::recipe::{Mix, Override, Recipe, Step};
use myq_tools::{ToolError, quantize, sensitivity, walk};

use super::{Order, named, refuse_source, say};

/// Flags of `quantize`.
#[derive(clap::Args)]
pub(crate) struct Quantize {
    /// GGUF or .myq file, or model-hub directory
    model: PathBuf,
    /// Width class: 2, 3, 4, 5 or 6
    #[arg(long, short, required_unless_present_any = ["recipe", "target_bpw"])]
    bits: Option<u8>,
    /// Recipe by name: uniform, s, m or l with the width class, as in m-3
    #[arg(long, conflicts_with = "bits")]
    recipe: Option<String>,
    /// Bits a weight on average, scales, embedding and output included; each matrix gets the
    /// width at which all together lose least. Measures first how much each one matters, which
    /// takes as long as quantising, or longer
    #[arg(long, value_name = "BITS", conflicts_with_all = ["bits", "recipe"], requires = "calibration")]
    target_bpw: Option<f64>,
    /// Where these measurements are kept, for other targets of the same model
    /// [default: the source's name with .sensitivity.json, in this directory]
    #[arg(long, value_name = "FILE", requires = "target_bpw")]
    sensitivity: Option<PathBuf>,
    /// Width class of embedding and output [default: 6]
    #[arg(long)]
    embedding_bits: Option<u8>,
    /// Width (2, 3, 4, 5, 6, 8, 16) or type of the matrices whose names fit, as in
    /// 'blk.*.attn_v.weight=5'; may be given several times
    #[arg(long, value_name = "PATTERN=WIDTH")]
    tensor: Vec<Override>,
    /// Texts to calibrate with: JSON lines of {"text": …} or {"messages": […]}, or plain text;
    /// may be given several times
    #[arg(long, value_name = "FILE")]
    calibration: Vec<PathBuf>,
    /// Samples taken from them
    #[arg(long, default_value_t = Wanted::default().samples)]
    samples: usize,
    /// Tokens of a sample
    #[arg(long, default_value_t = Wanted::default().length)]
    length: usize,
    /// How codes and scales are chosen [default: best with --calibration, search without]
    #[arg(long, value_enum)]
    method: Option<MethodName>,
    /// Quantise also what takes no more bytes in the source than it would in the result
    #[arg(long)]
    requantize: bool,
    /// Keep a separate output even where it is a copy of the embedding
    #[arg(long)]
    keep_output: bool,
    /// Where to write [default: the source's name with -3bit.myq, in this directory]
    #[arg(long, short)]
    out: Option<PathBuf>,
    /// Where finished parts are kept until the end, so that a run that was stopped goes on
    /// [default: the result's name with .work]
    #[arg(long, value_name = "FOLDER")]
    work: Option<PathBuf>,
    /// Leave the work folder when the result is written
    #[arg(long)]
    keep_work: bool,
    /// Order of the rows; rows8 is what the AVX2 and NEON kernels read, and a board maps and
    /// runs it as it is, where plain rows are repacked at each start
    #[arg(long, value_enum, default_value_t = Order::Rows8)]
    layout: Order,
    /// Print plan and size, write nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MethodName {
    /// Scales from the range of the weights
    Round,
    /// Scales by the least error, weighted by the inputs where there is calibration
    Search,
    /// Errors of earlier columns are made up for by later ones
    Gptq,
    /// Scales of channels folded into neighbouring weights, then as search
    Awq,
    /// Both
    AwqGptq,
    /// As gptq, then codes and all scales descended together, and each layer mends what the
    /// layers before it lost
    Best,
}

impl MethodName {
    fn name(self) -> &'static str {
        match self {
            MethodName::Round => "round",
            MethodName::Search => "search",
            MethodName::Gptq => "gptq",
            MethodName::Awq => "awq",
            MethodName::AwqGptq => "awq-gptq",
            MethodName::Best => "best",
        }
    }
}

impl Quantize {
    fn recipe(&self) -> Result<Recipe, ToolError> {
        let calibrated = !self.calibration.is_empty();
        let default = if calibrated {
            MethodName::Best
        } else {
            MethodName::Search
        };
        let name = self.method.unwrap_or(default);
        if !matches!(name, MethodName::Round | MethodName::Search) && !calibrated {
            return Err(ToolError::Setting(format!(
                "method {} needs texts; give --calibration FILE",
                name.name()
            )));
        }
        let scales = match name {
            MethodName::Round => Scales::Round,
            _ => Scales::Search,
        };
        let mut recipe = match (&self.recipe, self.bits) {
            (Some(name), _) => Recipe::from_name(name, scales)?,
            (None, bits) => Recipe::uniform(bits.unwrap_or(3), scales)?,
        };
        recipe.calibrated = match name {
            MethodName::Search if calibrated => Some(walk::Method::plain(false)),
            MethodName::Gptq => Some(walk::Method::plain(true)),
            MethodName::Awq => Some(walk::Method {
                awq: true,
                ..walk::Method::plain(false)
            }),
            MethodName::AwqGptq => Some(walk::Method {
                awq: true,
                ..walk::Method::plain(true)
            }),
            MethodName::Best => Some(walk::Method::best()),
            _ => None,
        }
        .map(|method| (name.name(), method));
        recipe.target = self.target_bpw;
        recipe.embedding_bits = self.embedding_bits.unwrap_or(recipe.embedding_bits);
        recipe.overrides = self.tensor.clone();
        recipe.requantize = self.requantize;
        Ok(recipe)
    }

    /// How the result's name ends.
    fn end(&self, recipe: &Recipe) -> String {
        match self.target_bpw {
            Some(target) => format!("-{target}bpw.myq"),
            None if recipe.mix == Mix::Uniform => format!("-{}bit.myq", recipe.bits),
            None => format!("-{}.myq", recipe.name()),
        }
    }

    fn samples(&self, model: &Model) -> Result<Option<Samples>, ToolError> {
        if self.calibration.is_empty() {
            return Ok(None);
        }
        let wanted = Wanted {
            samples: self.samples,
            length: self.length,
        };
        if wanted.samples == 0 || wanted.length < 2 {
            return Err(ToolError::Setting(
                "at least one sample of two tokens is needed".into(),
            ));
        }
        let samples = calibration::load(model, &self.calibration, wanted)?;
        for warning in samples.warnings() {
            eprintln!("warning: {warning}");
        }
        Ok(Some(samples))
    }
}

/// Runs the command.
pub(crate) fn run(options: &Quantize) -> Result<(), ToolError> {
    let recipe = options.recipe()?;
    let model = Model::open(&options.model)?;
    let mut steps = recipe.plan(&model, !options.keep_output)?;
    let samples = options.samples(&model)?;
    if let (Some(target), Some(samples)) = (options.target_bpw, &samples) {
        let file = options
            .sensitivity
            .clone()
            .unwrap_or_else(|| named(&options.model, ".sensitivity.json"));
        let costs = sensitivity::load_or_measure(&model, samples, &file)?;
        let loss = sensitivity::apply(&model, &mut steps, &costs, target)?;
        eprintln!("expected divergence from the source: {loss:.4} nats, before compensation");
    }
    if options.dry_run {
        return print_plan(&model, &steps);
    }
    let out = options
        .out
        .clone()
        .unwrap_or_else(|| named(&options.model, &options.end(&recipe)));
    refuse_source(&model, &out)?;
    let mut work = out.clone().into_os_string();
    work.push(".work");
    let job = Job {
        model: &model,
        recipe: &recipe,
        steps: &steps,
        samples: samples.as_ref(),
        layout: options.layout.layout(),
        work: options.work.clone().unwrap_or_else(|| work.into()),
        keep_work: options.keep_work,
    };
    let summary = job::run(&job, &out)?;
    for note in &summary.notes {
        eprintln!("note: {note}");
    }
    say!(
        "{}: {:.1} MB of tensors, {:.3} bits a weight, blake3 {}",
        out.display(),
        summary.bytes as f64 / 1e6,
        summary.bits_per_weight(),
        summary.hash
    );
    Ok(())
}

fn print_plan(model: &Model, steps: &[Step]) -> Result<(), ToolError> {
    for step in steps {
        let t = &model.tensors[step.source];
        let bytes = quantize::step_bytes(model, step);
        let note = step.note.as_deref().unwrap_or_default();
        say!(
            "{:<30} {:<8} -> {:<8} {bytes:>11} B {:>7.3} {note}",
            step.name,
            t.dtype.name(),
            step.dtype.name(),
            bytes as f64 * 8.0 / t.len() as f64
        );
    }
    let total = quantize::forecast(model, steps);
    say!(
        "{:.1} MB of tensors, {:.3} bits a weight",
        total.bytes as f64 / 1e6,
        total.bits_per_weight()
    );
    Ok(())
}
