//! `myq compare`: flags and table.

use std::path::PathBuf;

use myq_model::tokenizer::encode_prompt;
use myq_tools::ToolError;
use myq_tools::compare::{BROKEN, Comparison, compare};
use myq_tools::model::Model;
use myq_tools::selfcheck::PROMPT;

use super::say;

/// Flags of `compare`.
#[derive(clap::Args)]
pub(crate) struct Compare {
    /// The model to go by: .myq, GGUF or model-hub directory
    first: PathBuf,
    /// The one that is made from it
    second: PathBuf,
    /// Text that both read
    #[arg(long, default_value = PROMPT)]
    prompt: String,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(options: &Compare) -> Result<(), ToolError> {
    let (a, b) = (Model::open(&options.first)?, Model::open(&options.second)?);
    let tokens = encode_prompt(&a.tokenizer, &options.prompt, false);
    let found = compare(&a, &b, &tokens)?;
    if options.json {
        say!(
            "{}",
            serde_json::to_string_pretty(&found).unwrap_or_default()
        );
        return Ok(());
    }
    print(&found)
}

fn print(found: &Comparison) -> Result<(), ToolError> {
    say!("{:<10} {:>9} {:>9}  token", "layer", "cosine", "least");
    for l in &found.layers {
        say!(
            "{:<10} {:>9.5} {:>9.5}  {}",
            l.place,
            l.cosine,
            l.least,
            l.least_token
        );
    }
    say!(
        "first token of an answer: cosine of the logits {:.5}",
        found.first_answer
    );
    match &found.broken {
        None => say!("no layer under {BROKEN}"),
        Some(b) => {
            say!(
                "layer {} is the first under {BROKEN}: {:.5}",
                b.layer,
                b.cosine
            );
            for (name, cosine) in &b.mended {
                say!("  {cosine:.5} with the first model's {name}");
            }
        }
    }
    Ok(())
}
