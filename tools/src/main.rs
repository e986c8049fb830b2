//! The host command: turns a model into one compact low-bit file.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use myq_blocks::Layout;
use myq_engine::KernelChoice;
use myq_tools::layout::Census;
use myq_tools::model::Model;
use myq_tools::quickstart::{Quickstart, quickstart};
use myq_tools::{ToolError, import, inspect, logits, relayout, verify};

use cli::{Order, named, refuse_source, say};

mod cli;

const EXAMPLES: &str = "Examples:
  myq quickstart
  myq import ./Qwen2.5-0.5B-Instruct --out qwen.myq
  myq quantize qwen.myq --bits 3 --calibration calib.jsonl
  myq quantize model.gguf --recipe m-2 --dry-run
  myq eval qwen-3bit.myq --source qwen.myq --text book.txt
  myq export qwen-3bit.myq --out qwen-3bit.gguf
  myq relayout old.myq --out new.myq
  myq inspect qwen-3bit.myq --tensors
  myq verify qwen-3bit.myq --source qwen.myq";

const RELAYOUT: &str = "\
The weights, the recipe and all else stay as they are: there and back gives the same bytes. A
file in either layout runs; one that is not in the layout of the kernels is repacked at each
start, which takes time and memory, and its pages are not shared between processes.";

/// Turns a language model into one compact low-bit file.
#[derive(Parser)]
#[command(name = "myq", version, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Say more on standard error
    #[arg(long, short, global = true)]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Turn a GGUF file or a model-hub directory into a .myq file, weights as they are
    Import {
        /// GGUF file, or directory with config.json, tokenizer.json and safetensors
        model: PathBuf,
        /// Where to write [default: the source's name with .myq, in this directory]
        #[arg(long, short)]
        out: Option<PathBuf>,
        /// Order of the rows; plain is what other programs' files have
        #[arg(long, value_enum, default_value_t = Order::Plain)]
        layout: Order,
    },
    /// Quantise a model to 2, 3, 4, 5 or 6 bits a weight
    Quantize(cli::quantize::Quantize),
    /// Look through a calibration set: lengths, template, what it must not hold
    #[command(after_help = cli::calibrate::EXAMPLES)]
    Calibrate(cli::calibrate::Calibrate),
    /// Measure perplexity, and the distance to the source's predictions
    #[command(after_help = cli::eval::EXAMPLES)]
    Eval(cli::eval::Eval),
    /// Compare two models of one shape on a prompt, layer by layer
    Compare(cli::compare::Compare),
    /// Write a model as GGUF, which llama.cpp runs
    Export {
        /// .myq file (or any other source)
        model: PathBuf,
        /// Where to write [default: the source's name with .gguf, in this directory]
        #[arg(long, short)]
        out: Option<PathBuf>,
    },
    /// Write the same model with its rows in another order, so that it runs without repacking
    #[command(after_help = RELAYOUT)]
    Relayout {
        /// .myq or GGUF file (or model-hub directory), which is imported at the same time
        model: PathBuf,
        /// Where to write [default: the source's name with -rows8.myq or -plain.myq, in this
        /// directory]
        #[arg(long, short)]
        out: Option<PathBuf>,
        /// Order of the rows
        #[arg(long, value_enum, default_value_t = Order::Rows8)]
        layout: Order,
    },
    /// Print everything that a model file says of itself
    Inspect {
        /// .myq or GGUF file, or model-hub directory
        model: PathBuf,
        /// A line for each tensor too
        #[arg(long)]
        tensors: bool,
        /// The chat template too
        #[arg(long)]
        template: bool,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Check a file: checksums, every weight finite, packing
    Verify {
        /// .myq or GGUF file
        model: PathBuf,
        /// Compare each matrix with the model it was made from
        #[arg(long)]
        source: Option<PathBuf>,
        /// Print name, type and BLAKE3 of each tensor's weights as fp32, and nothing else
        #[arg(long)]
        dequantised_digest: bool,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Fetch a small model, quantise it, and ask it something
    Quickstart {
        /// Use this model (.gguf, .myq or directory) and fetch nothing
        #[arg(long)]
        model: Option<PathBuf>,
        /// Where the files go
        #[arg(long, default_value = "myq-quickstart")]
        dir: PathBuf,
        /// Width class: 2, 3, 4, 5 or 6
        #[arg(long, default_value_t = 3)]
        bits: u8,
        /// What to ask
        #[arg(long, default_value = "What is the capital of France?")]
        prompt: String,
        /// Most tokens of the answer
        #[arg(long, default_value_t = 48)]
        n_predict: usize,
    },
    /// Write the logits of given tokens, to compare with another program's
    Logits {
        /// .myq or GGUF file
        model: PathBuf,
        /// JSON object of lists of token ids, named en, zh, code
        #[arg(long)]
        tokens: PathBuf,
        /// Where to write: little-endian fp32, positions × vocabulary
        #[arg(long, short)]
        out: PathBuf,
        /// auto, avx2, neon, scalar (8-bit activations) or exact (fp32 activations)
        #[arg(long, default_value = "auto")]
        kernels: String,
        /// Threads that compute
        #[arg(long, short)]
        threads: Option<usize>,
        /// Tokens computed together
        #[arg(long, default_value_t = 64)]
        batch: usize,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let level = if arguments.verbose { "debug" } else { "warn" };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(level))
        .format_timestamp(None)
        .format_target(false)
        .init();
    match run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader went away, as `myq inspect … | head` does.
        Err(ToolError::Output(e)) if e.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(command: Command) -> Result<(), ToolError> {
    match command {
        Command::Import { model, out, layout } => {
            let out = out.unwrap_or_else(|| named(&model, ".myq"));
            let model = Model::open(&model)?;
            refuse_source(&model, &out)?;
            let hash = import::import(&model, layout.layout(), &out)?;
            say!("{}: blake3 {hash}", out.display());
            Ok(())
        }
        Command::Quantize(options) => cli::quantize::run(&options),
        Command::Calibrate(options) => cli::calibrate::run(&options),
        Command::Eval(options) => cli::eval::run(&options),
        Command::Compare(options) => cli::compare::run(&options),
        Command::Export { model, out } => run_export(&model, out),
        Command::Relayout { model, out, layout } => run_relayout(&model, out, layout.layout()),
        Command::Inspect {
            model,
            tensors,
            template,
            json,
        } => {
            let model = Model::open(&model)?;
            if json {
                say!("{:#}", inspect::as_json(&model));
            } else {
                say!("{}", inspect::as_text(&model, tensors, template).trim_end());
            }
            Ok(())
        }
        Command::Verify {
            model,
            source,
            dequantised_digest,
            json,
        } => run_verify(&model, source.as_deref(), dequantised_digest, json),
        Command::Quickstart {
            model,
            dir,
            bits,
            prompt,
            n_predict,
        } => quickstart(&Quickstart {
            model,
            dir,
            bits,
            prompt,
            n_predict,
        }),
        Command::Logits {
            model,
            tokens,
            out,
            kernels,
            threads,
            batch,
        } => {
            let choice = KernelChoice::from_name(&kernels)
                .ok_or_else(|| ToolError::Setting(format!("kernels `{kernels}` are not known")))?;
            refuse_source(&Model::open(&model)?, &out)?;
            let n = logits::logits(&model, &tokens, &out, choice, threads, batch)?;
            say!("{}: {n} positions", out.display());
            Ok(())
        }
    }
}

fn run_relayout(path: &Path, out: Option<PathBuf>, layout: Layout) -> Result<(), ToolError> {
    let out = out.unwrap_or_else(|| named(path, &format!("-{}.myq", layout.name())));
    let model = Model::open(path)?;
    refuse_source(&model, &out)?;
    let hash = relayout::relayout(&model, layout, &out)?;
    say!("{}: blake3 {hash}", out.display());
    say!(
        "  {}",
        Census::of_tensors(layout, &model.tensors).text(layout)
    );
    Ok(())
}

fn run_export(path: &Path, out: Option<PathBuf>) -> Result<(), ToolError> {
    let out = out.unwrap_or_else(|| named(path, ".gguf"));
    let model = Model::open(path)?;
    refuse_source(&model, &out)?;
    let summary = myq_tools::export::export(&model, &out)?;
    for note in &summary.notes {
        eprintln!("note: {note}");
    }
    say!(
        "{}: {:.1} MB of tensors, {:.1} MB in {}",
        out.display(),
        summary.bytes as f64 / 1e6,
        summary.source_bytes as f64 / 1e6,
        path.display()
    );
    Ok(())
}

fn run_verify(
    path: &Path,
    source: Option<&Path>,
    digest: bool,
    json: bool,
) -> Result<(), ToolError> {
    let model = Model::open(path)?;
    if digest {
        for line in verify::digests(&model) {
            say!("{line}");
        }
        return Ok(());
    }
    let source = source.map(Model::open).transpose()?;
    let report = verify::verify(&model, source.as_ref())?;
    if json {
        say!(
            "{}",
            serde_json::to_string_pretty(&report).unwrap_or_default()
        );
        return Ok(());
    }
    say!(
        "{}: {} checksums right, {} tensors unpacked, {} weights finite, {} partial superblocks and {} panels packed back",
        path.display(),
        report.checksums,
        report.tensors,
        report.weights,
        report.partial_blocks,
        report.panels
    );
    for d in report.distances.iter().take(10) {
        say!(
            "  {:<30} {:<8} {:>8.3} % of the source's norm",
            d.name,
            d.dtype,
            100.0 * d.relative_rms
        );
    }
    Ok(())
}
