//! `myq eval`: flags and table.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use myq_engine::KernelChoice;
use myq_model::Activations;
use myq_tools::ToolError;
use myq_tools::eval::choice::{self, Choices};
use myq_tools::eval::health::{self, Health};
use myq_tools::eval::plot::{self, Point};
use myq_tools::eval::{Figures, Setup, measure};
use serde_json::json;

use super::say;

/// Shown below the help.
pub(crate) const EXAMPLES: &str = "\
Examples:
  myq eval qwen-3bit.myq --text book.txt
  myq eval qwen-2bit.myq qwen-3bit.myq --source qwen.myq --text book.txt --text buch.txt
  myq eval qwen-3bit.myq peer-Q3_K_S.gguf --source qwen.myq --text book.txt --windows 40 --json
  myq eval qwen-*.myq --source qwen.myq --text book.txt --plot quality.svg
  myq eval qwen-3bit.myq --source qwen.myq --choices questions.jsonl --prompts

Perplexity is that of llama.cpp's tool of this name: windows without overlap, of which the second
half counts. KL is how far predictions are from the source's, in nats, 0 where they are the same;
it tells models of one source apart long before perplexity does.";

/// Flags of `eval`.
#[derive(clap::Args)]
pub(crate) struct Eval {
    /// .myq or GGUF files of one family
    #[arg(required = true)]
    models: Vec<PathBuf>,
    /// The model they were made from (.myq or GGUF; `myq import` makes one of a directory)
    #[arg(long)]
    source: Option<PathBuf>,
    /// Text in UTF-8; may be given several times
    #[arg(long, required_unless_present_any = ["choices", "prompts"])]
    text: Vec<PathBuf>,
    /// Multiple choice: JSON lines of {"question": …, "choices": […], "answer": index}; may be
    /// given several times
    #[arg(long, value_name = "FILE")]
    choices: Vec<PathBuf>,
    /// Answer twenty prompts, and look for repetition, another language and garbage
    #[arg(long)]
    prompts: bool,
    /// Tokens of an answer to a prompt
    #[arg(long, default_value_t = 256)]
    answer_tokens: usize,
    /// Draw quality against size, as SVG: KL where there is a source, else perplexity
    #[arg(long, value_name = "FILE", requires = "text")]
    plot: Option<PathBuf>,
    /// Tokens of a window
    #[arg(long, default_value_t = 512)]
    context: usize,
    /// Windows from the start of each text [default: all]
    #[arg(long)]
    windows: Option<usize>,
    /// How inputs are rounded: int8 as in use, or int8x2 for what the weights alone cost
    #[arg(long, default_value = "int8")]
    activations: String,
    /// Kernels, as in `runner`
    #[arg(long, default_value = "auto")]
    kernels: String,
    /// Threads that compute
    #[arg(long, short)]
    threads: Option<usize>,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(options: &Eval) -> Result<(), ToolError> {
    let unknown =
        |what: &str, name: &str| ToolError::Setting(format!("{what} `{name}` are not known"));
    let activations = Activations::from_name(&options.activations)
        .ok_or_else(|| unknown("activations", &options.activations))?;
    let kernels = KernelChoice::from_name(&options.kernels)
        .ok_or_else(|| unknown("kernels", &options.kernels))?;
    if options.context < 4 {
        return Err(ToolError::Setting("a window has 4 tokens or more".into()));
    }
    let setup = Setup {
        text: PathBuf::new(),
        context: options.context,
        windows: options.windows,
        activations,
        kernels,
        threads: options.threads,
    };
    let source = options.source.as_deref();
    let mut all = Vec::new();
    for text in &options.text {
        let setup = Setup {
            text: text.clone(),
            ..setup.clone()
        };
        let figures = measure(&options.models, source, &setup)?;
        if !options.json {
            print(text, &figures)?;
        }
        all.push((text, figures));
    }
    if let Some(out) = &options.plot {
        draw(&all, out)?;
    }
    let mut choices = Vec::new();
    for file in &options.choices {
        let questions = choice::read(file)?;
        let longest = Setup {
            context: setup.context.max(2048),
            ..setup.clone()
        };
        let found = choice::ask(&options.models, source, &questions, &longest)?;
        if !options.json {
            print_choices(file, &found)?;
        }
        choices.push(json!({ "questions": file, "models": found }));
    }
    let mut healths = Vec::new();
    for model in options.models.iter().filter(|_| options.prompts) {
        let found = health::health(model, &[], options.answer_tokens, &setup)?;
        if !options.json {
            print_health(&found)?;
        }
        healths.push(found);
    }
    if options.json {
        let texts: Vec<_> = all
            .iter()
            .map(|(text, figures)| json!({ "text": text, "context": options.context, "models": figures }))
            .collect();
        let all = json!({ "texts": texts, "choices": choices, "prompts": healths });
        say!("{all:#}");
    }
    Ok(())
}

fn draw(all: &[(&PathBuf, Vec<Figures>)], out: &Path) -> Result<(), ToolError> {
    let far = all.iter().flat_map(|a| &a.1).any(|f| f.distance.is_some());
    let (what, title) = match far {
        true => ("KL to the source, nats", "Distance to the source"),
        false => ("perplexity", "Perplexity"),
    };
    let models = all.first().map_or(0, |a| a.1.len());
    // The mean over texts: of the divergence as it is, of perplexity by its logarithm.
    let mean = |i: usize| {
        let each = all.iter().map(|a| &a.1[i]);
        let n = all.len() as f64;
        match far {
            true => each.filter_map(|f| Some(f.distance?.kl)).sum::<f64>() / n,
            false => (each.map(|f| f.perplexity.ln()).sum::<f64>() / n).exp(),
        }
    };
    let points: Vec<Point> = (0..models)
        .map(|i| {
            let f = &all[0].1[i];
            Point {
                label: f
                    .model
                    .file_stem()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
                size: f.file_bytes as f64 / 1e6,
                figure: mean(i),
            }
        })
        .collect();
    plot::plot(&points, title, what, out)
}

fn print_choices(file: &Path, found: &[Choices]) -> Result<(), ToolError> {
    let (n, chance) = found.first().map_or((0, 0.0), |c| (c.questions, c.chance));
    say!(
        "{}, {n} questions, by chance {:.1} %",
        file.display(),
        100.0 * chance
    );
    say!(
        "  {:<40} {:>15} {:>12} {:>12}",
        "model",
        "right",
        "by length",
        "like source"
    );
    for c in found {
        let name = file_name(&c.model);
        let right = format!("{:.1} ± {:.1} %", 100.0 * c.sum, 100.0 * c.sum_error);
        let like = c
            .like_source
            .map_or("–".into(), |l| format!("{:.1} %", 100.0 * l));
        say!(
            "  {name:<40} {right:>15} {:>10.1} % {like:>12}",
            100.0 * c.mean
        );
    }
    Ok(())
}

fn print_health(h: &Health) -> Result<(), ToolError> {
    say!(
        "{}: {} of {} answers without a fault",
        h.model.display(),
        h.healthy(),
        h.answers.len()
    );
    for a in h.answers.iter().filter(|a| !a.faults.is_empty()) {
        for fault in &a.faults {
            say!("  {}: {fault}", a.id);
        }
    }
    Ok(())
}

fn print(text: &Path, figures: &[Figures]) -> Result<(), ToolError> {
    let tokens = figures.first().map_or(0, |f| f.tokens);
    say!("{}, {tokens} predictions", text.display());
    say!(
        "  {:<40} {:>9} {:>7} {:>20} {:>21} {:>7}",
        "model",
        "MB",
        "bits",
        "perplexity",
        "KL to source",
        "top 1"
    );
    for f in figures {
        let name = file_name(&f.model);
        let perplexity = format!("{:.4} ± {:.4}", f.perplexity, f.perplexity_error);
        let (kl, top1) = match &f.distance {
            Some(d) => (
                format!("{:.5} ± {:.5}", d.kl, d.kl_error),
                format!("{:.2} %", 100.0 * d.top1),
            ),
            None => ("–".into(), "–".into()),
        };
        say!(
            "  {name:<40} {:>9.1} {:>7.3} {perplexity:>20} {kl:>21} {top1:>7}",
            f.file_bytes as f64 / 1e6,
            f.bits_per_weight
        );
    }
    Ok(())
}

/// The name that a row of a table begins with.
fn file_name(path: &Path) -> Cow<'_, str> {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
}
