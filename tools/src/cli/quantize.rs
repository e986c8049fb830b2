//! `myq quantize`: flags, plan and report.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use clap::ValueEnum;
use myq_blocks::encode::Method as Scales;
use myq_tools::calibration::{self, Samples, Wanted};
use myq_tools::job::{self, Job};
use myq_tools::model::Model;
use myq_tools::recipe::{Mix, Override, Recipe, Step};
use myq_tools::selfcheck::{self, SelfCheck, Weights};
use myq_tools::walk::Outcome;
use myq_tools::{ToolError, inspect, quantize, sensitivity, walk};
use serde_json::json;

use super::{Order, named, refuse_source, say};

/// Flags of `quantize`.
#[derive(clap::Args)]
pub(crate) struct Quantize {
    /// GGUF or .myq file, or model-hub directory
    model: PathBuf,
    /// Width class: 2, 3, 4, 5 or 6
    #[arg(long, short)]
    bits: Option<u8>,
    /// Recipe by name: uniform, s, m or l with the width class, as in m-3
    #[arg(long, conflicts_with = "bits")]
    recipe: Option<String>,
    /// Bits a weight on average, scales, embedding and output included; each matrix gets the
    /// width at which all together lose least. Measures first how much each one matters, which
    /// takes about as long as quantising
    #[arg(long, value_name = "BITS", conflicts_with_all = ["bits", "recipe"], requires = "calibration")]
    target_bpw: Option<f64>,
    /// The same for a file of so many megabytes (10^6 bytes) at most
    #[arg(
        long,
        value_name = "MB",
        conflicts_with_all = ["bits", "recipe", "target_bpw"],
        requires = "calibration"
    )]
    target_mb: Option<f64>,
    /// Where these measurements are kept, for other targets of the same model
    /// [default: the source's name with .sensitivity.json, in this directory]
    #[arg(long, value_name = "FILE")]
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
    /// Print the summary and the self-check as a JSON object
    #[arg(long)]
    json: bool,
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
        let targeted = self.target_bpw.is_some() || self.target_mb.is_some();
        let mut recipe = match (&self.recipe, self.bits) {
            (Some(name), _) => Recipe::from_name(name, scales)?,
            (None, Some(bits)) => Recipe::uniform(bits, scales)?,
            (None, None) if targeted => Recipe::uniform(3, scales)?,
            (None, None) => {
                return Err(ToolError::Setting(
                    "say how small: --bits 3, --recipe m-3, or, with --calibration, --target-bpw 3.5 or --target-mb 700".into(),
                ));
            }
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
        recipe.target = match (self.target_bpw, self.target_mb) {
            (Some(bits), _) => Some(format!("{bits}bpw")),
            (_, Some(mb)) => Some(format!("{mb}MB")),
            _ => None,
        };
        recipe.embedding_bits = self.embedding_bits.unwrap_or(recipe.embedding_bits);
        recipe.overrides = self.tensor.clone();
        recipe.requantize = self.requantize;
        Ok(recipe)
    }

    /// How the result's name ends.
    fn end(&self, recipe: &Recipe) -> String {
        match &recipe.target {
            Some(target) => format!("-{target}.myq"),
            None if recipe.mix == Mix::Uniform => format!("-{}bit.myq", recipe.bits),
            None => format!("-{}.myq", recipe.name()),
        }
    }

    /// Bytes that all tensors may take.
    fn target(&self, model: &Model, steps: &[Step]) -> Option<u64> {
        let weights = quantize::forecast(model, steps).weights;
        let bits = self.target_bpw.map(|b| (b * weights as f64 / 8.0) as u64);
        // Beside tensors the file holds the tokenizer, and names and places of tensors.
        let other = model.tokenizer.to_bytes().len() + 512 * (steps.len() + 8);
        bits.or_else(|| Some(((self.target_mb? * 1e6) as u64).saturating_sub(other as u64)))
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
        let tokens: usize = samples.tokens.iter().map(Vec::len).sum();
        let layers = model.tensors.iter().filter(|t| t.name.starts_with("blk."));
        let widest = layers.filter(|t| t.is_matrix()).map(|t| t.cols()).max();
        if let Some(widest) = widest.filter(|w| tokens < *w) {
            eprintln!(
                "warning: {tokens} calibration tokens are fewer than the {widest} inputs of the widest matrix, and guide its compensation badly; take more texts, or more and longer samples"
            );
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
    let target = options.target(&model, &steps);
    if let (Some(target), Some(samples)) = (target, &samples) {
        let Some((_, method)) = &recipe.calibrated else {
            return Err(ToolError::Setting(
                "widths are chosen by the errors of a calibrated method; leave out --method round"
                    .into(),
            ));
        };
        let file = options
            .sensitivity
            .clone()
            .unwrap_or_else(|| named(&options.model, ".sensitivity.json"));
        let costs = sensitivity::load_or_measure(&model, samples, method, &file)?;
        let loss = sensitivity::apply(&model, &mut steps, &costs, target, recipe.requantize)?;
        eprintln!("expected divergence from the source, by its second order: {loss:.4} nats");
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
    let weights = match &recipe.calibrated {
        Some((_, method)) if method.awq => Weights::Folded,
        Some((_, method)) if method.effort != walk::Method::plain(false).effort => {
            Weights::Compensated
        }
        _ => Weights::Nearest,
    };
    let checked = selfcheck::check(&model, &out, weights)?;
    for note in grouped(&summary.notes) {
        eprintln!("note: {note}");
    }
    if options.json {
        let bits = summary.bits_per_weight();
        let json = json!({ "file": out, "bits_per_weight": bits, "summary": summary, "self_check": checked });
        say!("{json:#}");
        return Ok(());
    }
    print_outcomes(&summary.outcomes)?;
    print_checks(&checked)?;
    say!(
        "{}: {:.1} MB of tensors, {:.3} bits a weight, blake3 {}",
        out.display(),
        summary.bytes as f64 / 1e6,
        summary.bits_per_weight(),
        summary.hash
    );
    Ok(())
}

/// Notes that say the same of many tensors as one, with the first of them.
fn grouped(notes: &[String]) -> Vec<String> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for note in notes {
        let (name, what) = note.split_once(": ").unwrap_or(("", note));
        match groups.iter_mut().find(|g| g.0 == what) {
            Some(group) => group.1.push(name),
            None => groups.push((what, vec![name])),
        }
    }
    let each = groups.iter().map(|(what, names)| match names.as_slice() {
        [one] => format!("{one}: {what}"),
        many => format!("{} and {} more: {what}", many[0], many.len() - 1),
    });
    each.collect()
}

/// What calibration did, by kind of matrix.
fn print_outcomes(outcomes: &[Outcome]) -> Result<(), ToolError> {
    if outcomes.is_empty() {
        return Ok(());
    }
    let mut kinds: BTreeMap<String, Vec<&Outcome>> = BTreeMap::new();
    for o in outcomes {
        kinds.entry(inspect::role(&o.name)).or_default().push(o);
    }
    say!(
        "{:<14} {:>8}  {:<16} {:>9} {:>12} {:>12}  in",
        "matrices",
        "number",
        "types",
        "tokens",
        "mean error",
        "largest"
    );
    for (kind, all) in kinds {
        let types: BTreeSet<&str> = all.iter().map(|o| o.dtype.as_str()).collect();
        let types: Vec<&str> = types.into_iter().collect();
        let tokens = all.iter().map(|o| o.tokens).min().unwrap_or(0);
        let mean = all.iter().map(|o| o.error).sum::<f64>() / all.len() as f64;
        let worst = all.iter().max_by(|a, b| a.error.total_cmp(&b.error));
        let (largest, name) = worst.map_or((0.0, ""), |o| (o.error, &o.name));
        say!(
            "{kind:<14} {:>8}  {:<16} {tokens:>9} {:>10.3} % {:>10.3} %  {name}",
            all.len(),
            types.join(" "),
            100.0 * mean,
            100.0 * largest
        );
    }
    Ok(())
}

fn print_checks(checked: &SelfCheck) -> Result<(), ToolError> {
    for c in &checked.checks {
        let mark = match c.holds {
            Some(true) => "ok",
            Some(false) => "FAILS",
            None => "-",
        };
        say!("{mark:<5} {:<12} {}", c.what, c.found);
    }
    let failed: Vec<&str> = checked
        .checks
        .iter()
        .filter(|c| c.holds == Some(false))
        .map(|c| c.what)
        .collect();
    if !failed.is_empty() {
        eprintln!(
            "warning: the self-check of {} fails, which at 5 and 6 bits it should not; `myq compare` and `myq eval` tell more",
            failed.join(", ")
        );
    }
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
