//! `myq compare`: two models on one prompt, layer by layer, and which matrix breaks the first
//! layer that is off.
//!
//! Both run in fp32 with their weights as they are stored, so that only the weights differ. Of
//! each token the hidden states behind a layer are compared by the cosine of their angle; the
//! first token is left out of the mean, as many models park enormous values there, next to which
//! nothing else counts.

use serde::Serialize;

use crate::ToolError;
use crate::linalg::linear;
use crate::model::Model;
use crate::pass::{Block, Embedding, Part, Pass, checked, finite_rows, tensor};
use crate::progress;

/// Under this a layer is broken.
pub const BROKEN: f64 = 0.95;
/// Rows of the output that are unpacked at once.
const ROWS: usize = 8192;

/// How alike two models are behind a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Likeness {
    /// The layer, or `logits`.
    pub place: String,
    /// Mean cosine over the tokens.
    pub cosine: f64,
    /// The least, and its token.
    pub least: f64,
    /// See `least`.
    pub least_token: usize,
}

/// A layer that is off.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Broken {
    /// Its number.
    pub layer: usize,
    /// Its cosine.
    pub cosine: f64,
    /// For each of its matrices the cosine if that one were the first model's.
    pub mended: Vec<(String, f64)>,
}

/// The comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Layer by layer, and the logits.
    pub layers: Vec<Likeness>,
    /// Cosine of the logits behind the last token, those of the first token of an answer.
    pub first_answer: f64,
    /// The first layer under [`BROKEN`].
    pub broken: Option<Broken>,
    /// Those logits, of both.
    #[serde(skip)]
    pub logits: [Vec<f32>; 2],
}

impl Broken {
    /// The matrix that mends the layer best, and the cosine with it.
    pub fn best(&self) -> Option<&(String, f64)> {
        self.mended.iter().max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// Compares `b` to `a` on `tokens`.
///
/// # Errors
/// Models of different sizes; damaged tensors; a prompt of fewer than two tokens.
pub fn compare(a: &Model, b: &Model, tokens: &[u32]) -> Result<Comparison, ToolError> {
    let sizes = |m: &Model| {
        let c = &m.config;
        (
            c.layers, c.width, c.ffn, c.heads, c.kv_heads, c.head_dim, c.vocab,
        )
    };
    if sizes(a) != sizes(b) {
        return Err(ToolError::Setting(format!(
            "{} and {} are not of one shape: layers, width, ffn, heads, kv heads, head size and vocabulary are {:?} and {:?}",
            a.path.display(),
            b.path.display(),
            sizes(a),
            sizes(b)
        )));
    }
    if tokens.len() < 2 {
        return Err(ToolError::Setting(
            "the prompt has fewer than two tokens; give a longer one".into(),
        ));
    }
    let (pass_a, pass_b) = (Pass::of(a)?, Pass::of(b)?);
    let (mut x, mut y) = (
        Embedding::of(a)?.rows(tokens)?,
        Embedding::of(b)?.rows(tokens)?,
    );
    let width = a.config.width;
    let bar = progress::bar(a.config.layers as u64, "comparing layers");
    let mut layers = vec![likeness("embedding".into(), &x, &y, width)];
    let mut broken = None;
    for layer in 0..a.config.layers {
        let (block_a, block_b) = (Block::read(a, layer)?, Block::read(b, layer)?);
        let before = (broken.is_none()).then(|| (x.clone(), y.clone()));
        pass_a.layer(&block_a, &mut x);
        pass_b.layer(&block_b, &mut y);
        let found = likeness(layer.to_string(), &x, &y, width);
        if let Some((_, before)) = before.filter(|_| found.cosine < BROKEN) {
            let mended = Part::ALL.map(|part| {
                let mut block = block_b.clone();
                block.matrices[part as usize].clone_from(&block_a.matrices[part as usize]);
                let mut state = before.clone();
                pass_b.layer(&block, &mut state);
                let cosine = likeness(String::new(), &x, &state, width).cosine;
                (part.tensor(layer), cosine)
            });
            broken = Some(Broken {
                layer,
                cosine: found.cosine,
                mended: mended.to_vec(),
            });
        }
        layers.push(found);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let (x, y) = (logits(a, &pass_a, &x)?, logits(b, &pass_b, &y)?);
    let vocab = a.config.vocab;
    layers.push(likeness("logits".into(), &x, &y, vocab));
    let last = x.len() - vocab;
    Ok(Comparison {
        tokens: tokens.len(),
        layers,
        first_answer: cosine(&x[last..], &y[last..]),
        broken,
        logits: [x[last..].to_vec(), y[last..].to_vec()],
    })
}

fn logits(model: &Model, pass: &Pass<'_>, x: &[f32]) -> Result<Vec<f32>, ToolError> {
    let normed = pass.norm(x, &tensor(model, "output_norm.weight")?);
    let output = checked(model, model.output_name())?;
    let (width, vocab) = (model.config.width, model.config.vocab);
    let mut out = vec![0.0; x.len() / width * vocab];
    // The largest matrix of the model, some rows at a time.
    for first in (0..vocab).step_by(ROWS) {
        let rows = first..(first + ROWS).min(vocab);
        let weights = finite_rows(model, output, rows.clone())?;
        let mut part = vec![0.0; x.len() / width * rows.len()];
        linear(&normed, &weights, width, &mut part);
        let each = out
            .chunks_exact_mut(vocab)
            .zip(part.chunks_exact(rows.len()));
        each.for_each(|(out, part)| out[rows.clone()].copy_from_slice(part));
    }
    Ok(out)
}

fn likeness(place: String, x: &[f32], y: &[f32], width: usize) -> Likeness {
    let each = x.chunks_exact(width).zip(y.chunks_exact(width)).skip(1);
    let cosines: Vec<f64> = each.map(|(x, y)| cosine(x, y)).collect();
    let least = cosines
        .iter()
        .enumerate()
        .min_by(|a, b| a.1.total_cmp(b.1))
        .map_or((0, 0.0), |(i, c)| (i + 1, *c));
    Likeness {
        place,
        cosine: cosines.iter().sum::<f64>() / cosines.len() as f64,
        least: least.1,
        least_token: least.0,
    }
}

/// Cosine of the angle between two vectors.
pub(crate) fn cosine(x: &[f32], y: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| -> f64 {
        x.iter()
            .zip(y)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum()
    };
    let norms = (dot(x, x) * dot(y, y)).sqrt();
    if norms == 0.0 {
        f64::from(u8::from(x == y))
    } else {
        dot(x, y) / norms
    }
}
