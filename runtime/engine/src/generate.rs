//! The loop that everybody runs: prompt, then one token after another.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use myq_model::Sampler;

use crate::{Engine, EngineError};

/// Why a generation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// The model gave an end-of-generation token.
    End,
    /// As many tokens as asked for.
    Length,
    /// The context is full.
    Context,
    /// The receiver of the tokens said so.
    Receiver,
}

/// Counts and times of one generation.
#[derive(Clone, Copy, Debug)]
pub struct Stats {
    /// Tokens of the prompt that were computed.
    pub prompt_tokens: usize,
    /// Time until the logits after the prompt.
    pub prompt_time: Duration,
    /// Tokens generated.
    pub tokens: usize,
    /// Time from the first generated token to the last.
    pub decode_time: Duration,
    /// Why it ended.
    pub stop: Stop,
}

impl Stats {
    /// Prompt tokens per second.
    pub fn prompt_rate(&self) -> f64 {
        self.prompt_tokens as f64 / self.prompt_time.as_secs_f64().max(1e-9)
    }

    /// Generated tokens per second, the first left out; `None` for fewer than two.
    pub fn decode_rate(&self) -> Option<f64> {
        (self.tokens > 1)
            .then(|| (self.tokens - 1) as f64 / self.decode_time.as_secs_f64().max(1e-9))
    }
}

/// Feeds `prompt` (at least one token) and hands each new token to `receive` until the model
/// ends, `limit` tokens were made, the context is full or `receive` breaks.
///
/// `stop` is looked at between the passes of a long prompt; set, it ends the call with
/// [`EngineError::Interrupted`]. The end token itself is not handed on. Nothing here allocates.
pub fn generate(
    engine: &mut Engine,
    sampler: &mut Sampler,
    prompt: &[u32],
    limit: usize,
    stop: &AtomicBool,
    mut receive: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Stats, EngineError> {
    if prompt.is_empty() {
        return Err(EngineError::Setting(
            "the prompt is empty; give at least one token of text".into(),
        ));
    }
    engine.fits(prompt)?;
    let start = Instant::now();
    prompt.iter().for_each(|&t| sampler.accept(t));
    // What the context leaves: a prompt that fills it can still give one token.
    let room = engine
        .plan()
        .context
        .saturating_sub(engine.position() + prompt.len())
        + 1;
    let batch = engine.plan().batch;
    let (early, last) = prompt.split_at((prompt.len() - 1) / batch * batch);
    for part in early.chunks(batch) {
        engine.feed(part, 0)?;
        if stop.load(Relaxed) {
            return Err(EngineError::Interrupted);
        }
    }
    let first = engine.feed(last, 1)?;
    let prompt_time = start.elapsed();
    let mut stats = Stats {
        prompt_tokens: prompt.len(),
        prompt_time,
        tokens: 0,
        decode_time: Duration::ZERO,
        stop: Stop::Length,
    };
    if limit == 0 {
        return Ok(stats);
    }
    let mut token = sampler.sample(first).ok_or(EngineError::NotFinite)?;
    let first_token = Instant::now();
    loop {
        if engine.source().tokenizer.eos_ids().contains(&token) {
            stats.stop = Stop::End;
            break;
        }
        stats.tokens += 1;
        stats.decode_time = first_token.elapsed();
        sampler.accept(token);
        if receive(token).is_break() {
            stats.stop = Stop::Receiver;
            break;
        }
        if stats.tokens >= limit {
            break;
        }
        if stats.tokens >= room {
            stats.stop = Stop::Context;
            break;
        }
        token = sampler
            .sample(engine.step(token)?)
            .ok_or(EngineError::NotFinite)?;
    }
    Ok(stats)
}
