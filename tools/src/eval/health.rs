//! Twenty fixed prompts, answered greedily, each looked through for faults.

use std::path::{Path, PathBuf};

use myq_engine::Engine;
use myq_model::sample::argmax;
use myq_model::template::Message;
use myq_model::tokenizer::encode_prompt;
use serde::{Deserialize, Serialize};

use super::detect::{Fault, Script, faults};
use super::{Setup, open};
use crate::{ToolError, progress};

/// A prompt of the repository.
#[derive(Clone, Debug, Deserialize)]
pub struct Prompt {
    /// Short name.
    pub id: String,
    /// `qa`, `code`, `translation` or `continuation`.
    pub kind: String,
    /// What is said to the model.
    pub prompt: String,
    /// Scripts that the answer may be in beside the prompt's.
    #[serde(default)]
    pub wanted: Vec<String>,
}

/// The prompts, English and Chinese, five of each kind.
pub fn prompts() -> Vec<Prompt> {
    serde_json::from_str(include_str!("prompts.json")).expect("a file of this repository")
}

/// An answer.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The prompt's name.
    pub id: String,
    /// What the model said.
    pub answer: String,
    /// What is wrong with it.
    pub faults: Vec<Fault>,
}

/// How a model did.
#[derive(Clone, Debug, Serialize)]
pub struct Health {
    /// File.
    pub model: PathBuf,
    /// Answers.
    pub answers: Vec<Answer>,
}

impl Health {
    /// Answers without a fault.
    pub fn healthy(&self) -> usize {
        self.answers.iter().filter(|a| a.faults.is_empty()).count()
    }
}

/// Lets `model` answer the prompts of these names with up to `tokens` tokens each; all of them
/// where no names are given.
///
/// # Errors
/// A model that cannot be run.
pub fn health(
    model: &Path,
    names: &[&str],
    tokens: usize,
    setup: &Setup,
) -> Result<Health, ToolError> {
    let mut prompts = prompts();
    prompts.retain(|p| names.is_empty() || names.contains(&p.id.as_str()));
    let setup = Setup {
        context: tokens + 256,
        ..setup.clone()
    };
    let mut engine = open(model, &setup)?;
    let bar = progress::bar(prompts.len() as u64, "answering prompts");
    let mut answers = Vec::new();
    for p in &prompts {
        let answer = answer(&mut engine, p, tokens)?;
        let wanted: Vec<Script> = p.wanted.iter().filter_map(|w| Script::named(w)).collect();
        answers.push(Answer {
            id: p.id.clone(),
            faults: faults(&p.prompt, &answer, &wanted),
            answer,
        });
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Health {
        model: model.to_owned(),
        answers,
    })
}

fn answer(engine: &mut Engine, p: &Prompt, most: usize) -> Result<String, ToolError> {
    let source = engine.source().clone();
    // A text to go on with is given as it is.
    let plain = || encode_prompt(&source.tokenizer, &p.prompt, false);
    let ids = match p.kind.as_str() {
        "continuation" => plain(),
        // A base model has no template.
        _ => match source.template() {
            Ok(Some(t)) => source
                .chat_tokens(&t, &[Message::new("user", p.prompt.as_str())])
                .unwrap_or_else(|_| plain()),
            _ => plain(),
        },
    };
    engine.rewind(0);
    let mut token = argmax(engine.feed(&ids, 1)?);
    let mut bytes = Vec::new();
    for _ in 0..most {
        if source.tokenizer.eos_ids().contains(&token) {
            break;
        }
        source.tokenizer.decode_into(token, &mut bytes);
        token = argmax(engine.step(token)?);
    }
    // A character cut at the end is the limit's fault, not the model's.
    let whole = match std::str::from_utf8(&bytes) {
        Ok(_) => bytes.len(),
        Err(e) if e.error_len().is_none() => e.valid_up_to(),
        Err(_) => bytes.len(),
    };
    Ok(String::from_utf8_lossy(&bytes[..whole]).into_owned())
}
