//! Multiple choice: which answer a model finds likeliest behind the question.
//!
//! Each choice is read behind the question, and the logarithms of its tokens' probabilities are
//! added up. `sum` takes the choice with the largest sum, `mean` that with the largest sum for
//! each byte of text, which does not favour short ones (lm-evaluation-harness: `acc`, `acc_norm`).

use std::path::{Path, PathBuf};

use myq_engine::Engine;
use myq_model::tokenizer::encode_prompt;
use serde::{Deserialize, Serialize};

use super::{Setup, open};
use crate::vector::log_sum_exp;
use crate::{ToolError, progress};

/// A question.
#[derive(Clone, Debug, Deserialize)]
pub struct Question {
    /// What is asked, or the beginning of a text.
    pub question: String,
    /// What may follow.
    pub choices: Vec<String>,
    /// Index of the right one.
    pub answer: usize,
}

/// How a model did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choices {
    /// File.
    pub model: PathBuf,
    /// Questions.
    pub questions: usize,
    /// Share right by the sum of logarithms, and its standard error.
    pub sum: f64,
    /// See `sum`.
    pub sum_error: f64,
    /// Share right by the mean for each byte.
    pub mean: f64,
    /// Share that guessing would get.
    pub chance: f64,
    /// Share of questions on which the choice (by the mean) is the source's.
    pub like_source: Option<f64>,
}

/// Reads questions, one JSON object a line.
///
/// # Errors
/// A file that cannot be read; a line that is no question, by its number.
pub fn read(path: &Path) -> Result<Vec<Question>, ToolError> {
    let text = std::fs::read_to_string(path).map_err(|error| ToolError::Read {
        path: path.to_owned(),
        error,
    })?;
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, l)| !l.trim().is_empty());
    lines
        .map(|(i, line)| {
            let bad = |problem: String| {
                ToolError::Setting(format!(
                    "{}, line {}: {problem}; a question is {{\"question\": …, \"choices\": […], \"answer\": index}}",
                    path.display(),
                    i + 1
                ))
            };
            let q: Question = serde_json::from_str(line).map_err(|e| bad(e.to_string()))?;
            if q.choices.len() < 2 || q.answer >= q.choices.len() {
                return Err(bad(format!(
                    "it has {} choices and answer {}",
                    q.choices.len(),
                    q.answer
                )));
            }
            Ok(q)
        })
        .collect()
}

/// Asks each of `models`, and `source` where there is one.
///
/// # Errors
/// A model that cannot be run; a question longer than the context.
pub fn ask(
    models: &[PathBuf],
    source: Option<&Path>,
    questions: &[Question],
    setup: &Setup,
) -> Result<Vec<Choices>, ToolError> {
    let bar = progress::bar(
        (questions.len() * (models.len() + usize::from(source.is_some()))) as u64,
        "asking",
    );
    let mut picked = |path: &Path| -> Result<Vec<(usize, usize)>, ToolError> {
        let mut engine = open(path, setup)?;
        let pick = |q: &Question| {
            bar.inc(1);
            pick(&mut engine, q)
        };
        questions.iter().map(pick).collect()
    };
    let wanted = source.map(&mut picked).transpose()?;
    let n = questions.len().max(1) as f64;
    let chance = questions
        .iter()
        .map(|q| 1.0 / q.choices.len() as f64)
        .sum::<f64>()
        / n;
    let mut all = Vec::new();
    for path in models {
        let picks = picked(path)?;
        let right = |of: fn(&(usize, usize)) -> usize| {
            let each = picks.iter().zip(questions);
            each.filter(|(p, q)| of(p) == q.answer).count() as f64 / n
        };
        let sum = right(|p| p.0);
        all.push(Choices {
            model: path.clone(),
            questions: questions.len(),
            sum,
            sum_error: (sum * (1.0 - sum) / n).sqrt(),
            mean: right(|p| p.1),
            chance,
            like_source: wanted.as_ref().map(|w| {
                let same = w.iter().zip(&picks).filter(|(a, b)| a.1 == b.1);
                same.count() as f64 / n
            }),
        });
    }
    bar.finish_and_clear();
    Ok(all)
}

/// The choice by sum and by mean.
fn pick(engine: &mut Engine, q: &Question) -> Result<(usize, usize), ToolError> {
    let tokenizer = engine.source().tokenizer.clone();
    let vocab = engine.source().config.vocab;
    let prompt = encode_prompt(&tokenizer, q.question.trim_end(), false);
    if prompt.is_empty() {
        return Ok((0, 0));
    }
    engine.rewind(0);
    let first = engine.feed(&prompt, 1)?.to_vec();
    let (mut by_sum, mut by_mean) = ((0, f64::NEG_INFINITY), (0, f64::NEG_INFINITY));
    for (i, choice) in q.choices.iter().enumerate() {
        let text = format!(" {}", choice.trim());
        let tokens = tokenizer.encode(&text, false);
        engine.rewind(prompt.len());
        let mut sum = 0.0;
        let mut last = first.clone();
        for part in tokens.chunks(64) {
            // The first of a part is told by the logits before it.
            sum += told(&last, part[0]);
            let rows = engine.feed(part, part.len())?;
            for (row, next) in rows.chunks_exact(vocab).zip(&part[1..]) {
                sum += told(row, *next);
            }
            last = rows[rows.len() - vocab..].to_vec();
        }
        if sum > by_sum.1 {
            by_sum = (i, sum);
        }
        let mean = sum / text.len() as f64;
        if mean > by_mean.1 {
            by_mean = (i, mean);
        }
    }
    Ok((by_sum.0, by_mean.0))
}

/// ln p of a token by these logits.
fn told(logits: &[f32], token: u32) -> f64 {
    f64::from(logits[token as usize]) - log_sum_exp(logits)
}
