//! Calibration sets: records of a file into samples of tokens, and what is odd about them.
//!
//! A set is JSON lines, each `{"text": …}` or `{"messages": [{"role": …, "content": …}, …]}`,
//! or plain text (any other file), which is one record. Messages pass through the model's own
//! chat template, so that the quantiser sees what the model will see in use.

pub mod audit;
mod dates;
mod drift;

use std::path::PathBuf;

use myq_model::source;
use myq_model::template::{ChatTemplate, Message};
use myq_model::tokenizer::{Tokenizer, encode_prompt};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ToolError;
use crate::model::Model;

pub use dates::Date;

/// One record of a set.
#[derive(Clone, Debug)]
pub struct Record {
    /// File it is from, as an index into the files read.
    pub file: usize,
    /// Line in the file, from 1.
    pub line: usize,
    /// The line as it is in the file; nothing for plain text.
    pub raw: String,
    /// What it says.
    pub content: Content,
    /// When it was written, where it says so.
    pub date: Option<Date>,
}

/// What a record says.
#[derive(Clone, Debug)]
pub enum Content {
    /// Text, with marks of a template or without.
    Text(String),
    /// Turns of a conversation.
    Messages(Vec<Message>),
}

impl Record {
    /// The record as one line of JSON: as it was read, where it was read so.
    pub fn line_of_json(&self) -> String {
        if self.raw.is_empty() {
            serde_json::json!({ "text": self.words() }).to_string()
        } else {
            self.raw.clone()
        }
    }

    /// The words alone, without any template.
    pub fn words(&self) -> String {
        match &self.content {
            Content::Text(text) => text.clone(),
            Content::Messages(messages) => {
                let contents: Vec<&str> = messages.iter().map(|m| m.content.as_str()).collect();
                contents.join("\n")
            }
        }
    }
}

/// Names under which records carry their date.
const DATES: [&str; 7] = [
    "date",
    "timestamp",
    "created",
    "created_at",
    "published",
    "time",
    "datetime",
];

/// Reads the records of `files`.
///
/// # Errors
/// A file that cannot be read; a line that is not a record, by file and line.
pub fn read(files: &[PathBuf]) -> Result<Vec<Record>, ToolError> {
    let mut records = Vec::new();
    for (file, path) in files.iter().enumerate() {
        let text = std::fs::read_to_string(path).map_err(|error| ToolError::Read {
            path: path.clone(),
            error,
        })?;
        let lines = path
            .extension()
            .is_some_and(|e| e.eq_ignore_ascii_case("jsonl") || e.eq_ignore_ascii_case("ndjson"));
        if !lines {
            records.push(Record {
                file,
                line: 1,
                raw: String::new(),
                content: Content::Text(text),
                date: None,
            });
            continue;
        }
        for (i, line) in text.lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            let (content, date) = record(line).map_err(|problem| {
                ToolError::Setting(format!(
                    "{}, line {}: {problem}; a record is {{\"text\": …}} or {{\"messages\": [{{\"role\": …, \"content\": …}}]}}",
                    path.display(),
                    i + 1
                ))
            })?;
            records.push(Record {
                file,
                line: i + 1,
                raw: line.to_owned(),
                content,
                date,
            });
        }
    }
    Ok(records)
}

#[derive(Deserialize)]
struct Turn {
    role: String,
    content: String,
}

fn record(line: &str) -> Result<(Content, Option<Date>), String> {
    let value: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
    let object = value.as_object().ok_or("it is not an object")?;
    let date = DATES.iter().find_map(|name| match object.get(*name)? {
        Value::String(text) => Date::parse(text),
        Value::Number(seconds) => Date::of_unix(seconds.as_f64()?),
        _ => None,
    });
    let content = match (object.get("text"), object.get("messages")) {
        (Some(Value::String(text)), None) => Content::Text(text.clone()),
        (None, Some(messages)) => {
            let turns = Vec::<Turn>::deserialize(messages).map_err(|e| e.to_string())?;
            if turns.is_empty() {
                return Err("it has no messages".into());
            }
            Content::Messages(
                turns
                    .into_iter()
                    .map(|t| Message::new(t.role, t.content))
                    .collect(),
            )
        }
        (Some(_), Some(_)) => return Err("it has both `text` and `messages`".into()),
        (Some(_), None) => return Err("its `text` is not a string".into()),
        (None, None) => return Err("it has neither `text` nor `messages`".into()),
    };
    Ok((content, date))
}

/// How samples are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Wanted {
    /// Samples.
    pub samples: usize,
    /// Tokens of each, at most.
    pub length: usize,
}

impl Default for Wanted {
    fn default() -> Self {
        Wanted {
            samples: 128,
            length: 2048,
        }
    }
}

/// Samples for calibration.
#[derive(Clone, Debug, Serialize)]
pub struct Samples {
    /// Token ids.
    #[serde(skip)]
    pub tokens: Vec<Vec<u32>>,
    /// How they were wanted.
    pub wanted: Wanted,
    /// Records read.
    pub records: usize,
    /// Tokens of all samples.
    pub total: usize,
    /// Samples with fewer tokens than wanted.
    pub short: usize,
    /// Records with marks of a template other than the model's.
    pub foreign: usize,
    /// Records of messages, which the model's template framed.
    pub framed: usize,
    /// BLAKE3 of the tokens.
    pub hash: String,
}

/// Marks of chat templates, as they stand in text.
const MARKS: [&str; 12] = [
    "<|im_start|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "[INST]",
    "<|user|>",
    "<|system|>",
    "<|assistant|>",
    "### Instruction:",
    "<|begin▁of▁sentence|>",
    "<|User|>",
    "GPT4 Correct User:",
    "<用户>",
];

/// Takes samples from the records, spread evenly over them.
///
/// Records longer than a sample are cut into several; where the records give more samples than
/// wanted, every k-th is taken.
///
/// # Errors
/// A template that fails; messages for a model without one; a set without tokens.
pub fn samples(model: &Model, records: &[Record], wanted: Wanted) -> Result<Samples, ToolError> {
    let tokenizer = &model.tokenizer;
    let template = template(model)?;
    let own = model.chat_template.as_deref().unwrap_or_default();
    let (mut pieces, mut foreign, mut framed) = (Vec::new(), 0, 0);
    for record in records {
        let words = record.words();
        if MARKS.iter().any(|m| words.contains(m) && !own.contains(m)) {
            foreign += 1;
        }
        let tokens = match &record.content {
            Content::Text(text) => encode_prompt(tokenizer, text, text_is_framed(text, own)),
            Content::Messages(messages) => {
                let template = template.as_ref().ok_or_else(|| {
                    ToolError::Setting(format!(
                        "line {} holds messages, and {} has no chat template to frame them with; give texts",
                        record.line,
                        model.path.display()
                    ))
                })?;
                framed += 1;
                let text = template
                    .render(messages, false)
                    .map_err(|e| ToolError::Setting(format!("line {}: {e}", record.line)))?;
                encode_prompt(tokenizer, &text, true)
            }
        };
        cut(&tokens, tokenizer, wanted.length, &mut pieces);
    }
    let count = wanted.samples.min(pieces.len());
    let tokens: Vec<Vec<u32>> = (0..count)
        .map(|i| pieces[i * pieces.len() / count].clone())
        .collect();
    let total: usize = tokens.iter().map(Vec::len).sum();
    if total == 0 {
        return Err(ToolError::Setting(
            "the calibration set has no tokens; give texts of some thousand words".into(),
        ));
    }
    let mut hasher = blake3::Hasher::new();
    for sample in &tokens {
        hasher.update(&(sample.len() as u64).to_le_bytes());
        sample.iter().for_each(|t| {
            hasher.update(&t.to_le_bytes());
        });
    }
    Ok(Samples {
        short: tokens.iter().filter(|t| t.len() < wanted.length).count(),
        tokens,
        wanted,
        records: records.len(),
        total,
        foreign,
        framed,
        hash: hasher.finalize().to_hex().to_string(),
    })
}

/// Whether a text already has the frame of this template.
fn text_is_framed(text: &str, template: &str) -> bool {
    MARKS
        .iter()
        .any(|m| text.contains(m) && template.contains(m))
}

fn template(model: &Model) -> Result<Option<ChatTemplate>, ToolError> {
    let Some(text) = &model.chat_template else {
        return Ok(None);
    };
    let template = source::compile(text, &model.tokenizer);
    Ok(Some(template.map_err(|e| {
        ToolError::Setting(format!("{}: {e}", model.path.display()))
    })?))
}

/// Cuts a record into pieces of `length` tokens, each with the token that begins a text where
/// the model wants one. A last piece shorter than half is left out, unless it is the only one.
fn cut(tokens: &[u32], tokenizer: &Tokenizer, length: usize, pieces: &mut Vec<Vec<u32>>) {
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    let body = match bos {
        Some(bos) if tokens.first() == Some(&bos) => &tokens[1..],
        _ => tokens,
    };
    let step = length.saturating_sub(usize::from(bos.is_some())).max(1);
    for (i, part) in body.chunks(step).enumerate() {
        if i > 0 && part.len() < step / 2 {
            continue;
        }
        pieces.push(bos.into_iter().chain(part.iter().copied()).collect());
    }
}

impl Samples {
    /// What a user should know before hours of work.
    pub fn warnings(&self) -> Vec<String> {
        let mut all = Vec::new();
        let n = self.tokens.len();
        if n < self.wanted.samples {
            all.push(format!(
                "the set gives {n} samples, {} were wanted",
                self.wanted.samples
            ));
        }
        if self.short > 0 {
            all.push(format!(
                "{} of {n} samples are shorter than {} tokens",
                self.short, self.wanted.length
            ));
        }
        if self.foreign > 0 {
            all.push(format!(
                "{} of {} records have marks of a chat template that is not the model's; give them as messages",
                self.foreign, self.records
            ));
        }
        all
    }
}

/// Reads the files and takes samples.
///
/// # Errors
/// Those of [`read`] and [`samples`].
pub fn load(model: &Model, files: &[PathBuf], wanted: Wanted) -> Result<Samples, ToolError> {
    samples(model, &read(files)?, wanted)
}
