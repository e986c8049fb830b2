//! `myq calibrate`: flags and report.

use std::collections::BTreeSet;
use std::path::PathBuf;

use myq_tools::calibration::audit::{Audit, Reason, audit};
use myq_tools::calibration::{self, Date, Record, Samples, Wanted};
use myq_tools::model::Model;
use myq_tools::{ToolError, write_whole};

use super::say;

/// Shown below the help.
pub(crate) const EXAMPLES: &str = "\
Examples:
  myq calibrate calib.jsonl --model qwen.myq
  myq calibrate calib.jsonl --audit --cutoff 2024-03-01 --evaluation eval.txt
  myq calibrate calib.jsonl --audit --cutoff 2024-03-01 --drop --out clean.jsonl

A calibration set that speaks of what came after the model's cut-off, or of the texts it will be
judged by, makes figures look better than the model is.";

/// Flags of `calibrate`.
#[derive(clap::Args)]
pub(crate) struct Calibrate {
    /// JSON lines of {"text": …} or {"messages": […]}, with or without dates; or plain text
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Count tokens and frame messages as for this model
    #[arg(long)]
    model: Option<PathBuf>,
    /// Samples wanted
    #[arg(long, default_value_t = Wanted::default().samples)]
    samples: usize,
    /// Tokens of a sample
    #[arg(long, default_value_t = Wanted::default().length)]
    length: usize,
    /// Look for the future, duplicates and evaluation texts
    #[arg(long)]
    audit: bool,
    /// The day that the model knows nothing after, as 2024-03-01
    #[arg(long, requires = "audit", value_parser = day)]
    cutoff: Option<Date>,
    /// Text that the model will be judged by
    #[arg(long, requires = "audit", value_name = "FILE")]
    evaluation: Option<PathBuf>,
    /// Leave doubtful records out of --out
    #[arg(long, requires_all = ["audit", "out"])]
    drop: bool,
    /// Where to write the records
    #[arg(long, short, requires = "drop")]
    out: Option<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

fn day(text: &str) -> Result<Date, String> {
    Date::parse(text).ok_or_else(|| format!("`{text}` is not a day; write it as 2024-03-01"))
}

/// Runs the command.
pub(crate) fn run(options: &Calibrate) -> Result<(), ToolError> {
    let records = calibration::read(&options.files)?;
    let samples = match &options.model {
        Some(path) => {
            let wanted = Wanted {
                samples: options.samples,
                length: options.length.max(2),
            };
            let model = Model::open(path)?;
            Some(calibration::samples(&model, &records, wanted)?)
        }
        None => None,
    };
    let found = match options.audit {
        true => {
            let evaluation = options.evaluation.as_ref().map(|path| {
                std::fs::read_to_string(path).map_err(|error| ToolError::Read {
                    path: path.clone(),
                    error,
                })
            });
            let evaluation = evaluation.transpose()?;
            Some(audit(&records, options.cutoff, evaluation.as_deref()))
        }
        false => None,
    };
    if options.json {
        let json = serde_json::json!({ "records": records.len(), "files": options.files, "samples": samples, "audit": found });
        say!("{json:#}");
    } else {
        say!("{} records", records.len());
        if let Some(samples) = &samples {
            print_samples(samples)?;
        }
        if let Some(found) = &found {
            print_audit(options, found)?;
        }
    }
    match (&options.out, &found) {
        (Some(out), Some(found)) => write_kept(out, &records, &found.doubtful()),
        _ => Ok(()),
    }
}

fn print_samples(s: &Samples) -> Result<(), ToolError> {
    say!(
        "{} samples of up to {} tokens, {} tokens in all; {} records framed by the model's template; blake3 {}",
        s.tokens.len(),
        s.wanted.length,
        s.total,
        s.framed,
        s.hash
    );
    for warning in s.warnings() {
        eprintln!("warning: {warning}");
    }
    Ok(())
}

fn print_audit(options: &Calibrate, found: &Audit) -> Result<(), ToolError> {
    if options.cutoff.is_none() {
        eprintln!("warning: without --cutoff no date is judged");
    }
    let place = |file: usize, line: usize| format!("{}:{line}", options.files[file].display());
    for f in &found.findings {
        let why = match &f.reason {
            Reason::Dated { date } => format!("dated {date}"),
            Reason::Mentions { date } => format!("speaks of {date}"),
            Reason::ForwardLooking { words } => format!("looks ahead: {}", words.join(", ")),
            Reason::Duplicate { file, line } => format!("says what {} says", place(*file, *line)),
            Reason::Overlap { passage } => format!("is in the evaluation text: {passage}"),
        };
        say!("{}: {why}", place(f.file, f.line));
    }
    say!(
        "{} of {} records are doubtful",
        found.doubtful().len(),
        found.records
    );
    for (what, drift) in [
        ("length", &found.length_drift),
        ("vocabulary", &found.vocabulary_drift),
    ] {
        match drift {
            Some(d) => say!(
                "{what} over {} dated records: {} (augmented Dickey-Fuller {:.2}, critical {:.2} at 5 %, {} lags)",
                d.n,
                if d.drifts {
                    "may drift"
                } else {
                    "keeps its level"
                },
                d.statistic,
                d.critical,
                d.lags
            ),
            None => say!(
                "{what}: too few dated records ({}) to tell a drift",
                found.dated
            ),
        }
    }
    Ok(())
}

fn write_kept(
    out: &std::path::Path,
    records: &[Record],
    doubtful: &BTreeSet<(usize, usize)>,
) -> Result<(), ToolError> {
    let mut text = String::new();
    let mut kept = 0;
    for r in records
        .iter()
        .filter(|r| !doubtful.contains(&(r.file, r.line)))
    {
        text.push_str(&r.line_of_json());
        text.push('\n');
        kept += 1;
    }
    write_whole(out, text.as_bytes())?;
    eprintln!(
        "{}: {kept} records kept, {} dropped",
        out.display(),
        records.len() - kept
    );
    Ok(())
}
