//! How good a model is: perplexity, and the distance of its predictions to the source's.

pub mod choice;
pub mod detect;
pub mod health;
pub mod plot;
pub mod score;

use std::path::{Path, PathBuf};

use myq_engine::{Engine, KernelChoice, Options};
use myq_model::{Activations, CacheType, tokenizer::encode_prompt};
use rayon::prelude::*;
use serde::Serialize;

use crate::{ToolError, progress};
use score::{Distance, Scores};

/// What is measured, and how.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Text in UTF-8.
    pub text: PathBuf,
    /// Tokens of a window; the second half of each counts.
    pub context: usize,
    /// Most windows.
    pub windows: Option<usize>,
    /// How inputs of matrices are rounded.
    pub activations: Activations,
    /// Kernels.
    pub kernels: KernelChoice,
    /// Threads that compute.
    pub threads: Option<usize>,
}

/// Figures of one model.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// File.
    pub model: PathBuf,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bits a weight takes on average, all tensors.
    pub bits_per_weight: f64,
    /// Predicted tokens.
    pub tokens: usize,
    /// Perplexity and its standard error.
    pub perplexity: f64,
    /// See `perplexity`.
    pub perplexity_error: f64,
    /// Distance to the source, where one is given.
    #[serde(flatten)]
    pub distance: Option<Distance>,
}

/// Measures `models` on one text, beside `source` where there is one; `progress` hears of windows
/// through a bar.
///
/// As in llama.cpp's `perplexity`: the text is cut into windows without overlap, each starts
/// with the beginning-of-text token where the model wants one, and predictions count from the
/// middle of the window on.
///
/// # Errors
/// A file that cannot be read or run; a text shorter than one window; models whose
/// vocabularies differ.
pub fn measure(
    models: &[PathBuf],
    source: Option<&Path>,
    setup: &Setup,
) -> Result<Vec<Figures>, ToolError> {
    let text = std::fs::read_to_string(&setup.text).map_err(|error| ToolError::Read {
        path: setup.text.clone(),
        error,
    })?;
    let mut engines = models
        .iter()
        .map(|m| open(m, setup))
        .collect::<Result<Vec<_>, _>>()?;
    let mut reference = source.map(|s| open(s, setup)).transpose()?;
    let first = reference.as_ref().or(engines.first());
    let Some(first) = first else {
        return Ok(Vec::new());
    };
    let tokenizer = first.source().tokenizer.clone();
    let vocab = first.source().config.vocab;
    if let Some(other) = engines.iter().find(|e| e.source().config.vocab != vocab) {
        return Err(ToolError::Setting(format!(
            "{} has {} tokens in its vocabulary, the first model {vocab}; compare models of one family",
            other.file().path().display(),
            other.source().config.vocab
        )));
    }
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    let tokens = encode_prompt(&tokenizer, &text, false);
    let whole = tokens.len() / setup.context;
    if whole == 0 {
        return Err(ToolError::Setting(format!(
            "{} has {} tokens, a window {}; take a longer text or a smaller --context",
            setup.text.display(),
            tokens.len(),
            setup.context
        )));
    }
    let windows = setup.windows.unwrap_or(whole).min(whole);
    let bar = progress::bar((windows * engines.len()) as u64, "reading the text");
    let mut all = vec![Scores::default(); engines.len()];
    let mut expected = Vec::new();
    for window in tokens.chunks_exact(setup.context).take(windows) {
        let mut window = window.to_vec();
        if let Some(bos) = bos {
            window[0] = bos;
        }
        if let Some(reference) = &mut reference {
            expected.clear();
            logits(reference, &window, |_, rows| {
                let rows = rows.par_chunks_exact(vocab);
                expected.extend(rows.flat_map_iter(score::log_softmax).collect::<Vec<f32>>());
            })?;
        }
        for (engine, scores) in engines.iter_mut().zip(&mut all) {
            let middle = window.len() / 2;
            logits(engine, &window, |position, rows| {
                let next = &window[position + 1..];
                let at = (position - middle) * vocab;
                let expected = expected.get(at..).unwrap_or_default();
                scores.add(rows, vocab, next, expected);
            })?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let figures = |(engine, scores): (&Engine, &Scores)| {
        let tensors = &engine.source().tensors;
        let bytes: u64 = tensors.iter().map(|t| t.bytes).sum();
        let weights: u64 = tensors
            .iter()
            .map(|t| t.shape.iter().product::<u64>())
            .sum();
        let (perplexity, perplexity_error) = scores.perplexity();
        Figures {
            model: engine.file().path().to_owned(),
            file_bytes: engine.file().bytes().len() as u64,
            bits_per_weight: bytes as f64 * 8.0 / weights as f64,
            tokens: scores.tokens(),
            perplexity,
            perplexity_error,
            distance: scores.distance(),
        }
    };
    Ok(engines.iter().zip(&all).map(figures).collect())
}

/// Opens a model for measurements.
pub(crate) fn open(path: &Path, setup: &Setup) -> Result<Engine, ToolError> {
    // Exact arithmetic keeps exact keys and values too.
    let cache = match setup.kernels {
        KernelChoice::Exact => CacheType::F32,
        _ => CacheType::F16,
    };
    let options = Options {
        cache,
        kernels: setup.kernels,
        threads: setup.threads,
        context: Some(setup.context),
        batch: 128,
        logit_rows: 128,
        activations: setup.activations,
        // Models take turns, and the threads of the others must find a place.
        pin: false,
        ..Options::default()
    };
    Ok(Engine::open(path, &options, &mut |_, _| {})?)
}

/// Hands out the logits of the second half of `window`, but for the last token, with the
/// position of their first row.
fn logits(
    engine: &mut Engine,
    window: &[u32],
    mut take: impl FnMut(usize, &[f32]),
) -> Result<(), ToolError> {
    engine.rewind(0);
    let middle = window.len() / 2;
    engine.feed(&window[..middle], 0)?;
    let mut position = middle;
    for part in window[middle..window.len() - 1].chunks(128) {
        take(position, engine.feed(part, part.len())?);
        position += part.len();
    }
    Ok(())
}
