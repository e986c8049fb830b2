//! How much each matrix matters, and the best widths under a budget of bytes.
//!
//! ```text
//! some samples:    second moments H of each input; rows of each matrix quantised at each width
//!                  as they will be, by the method that will be used
//! other samples:   ℓ = e·H·e of their errors e, tokens and rows weighted by crate::guide
//! loss(matrix, width) = ½ · mean ℓ:  the divergence of predictions, by its second order
//! from the lowest width up: the step with the most loss removed for each byte, while it fits
//! ```
//!
//! Errors are measured on texts that the method has not seen: it makes up for errors along the
//! inputs of its own texts, all the better the fewer there are. Losses of different matrices add
//! up while they are small; at two bits they only order the matrices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use myq_blocks::encode::EncodeError;
use myq_blocks::{DType, Rows};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::calibration::Samples;
use crate::guide::Guide;
use crate::linalg::{add_gram, linear, mirror};
use crate::model::Model;
use crate::pass::{Block, Embedding, Part, Pass};
use crate::recipe::Step;
use crate::solve::{self, Curvature, Factor};
use crate::walk::Method;
use crate::{ToolError, progress, quantize, vector};

/// Widths that are chosen from, lowest first.
pub const WIDTHS: [DType; 5] = [DType::Q2K, DType::Q3K, DType::Q4K, DType::Q5K, DType::Q6K];
/// Rows of a matrix that stand for all.
const SOME: usize = 64;

/// What widths cost one matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Tensor.
    pub name: String,
    /// Weights.
    pub weights: u64,
    /// Bytes at each of [`WIDTHS`].
    pub bytes: [u64; 5],
    /// Expected divergence of the whole model's predictions, nats a token, at each.
    pub loss: [f64; 5],
}

/// Measures all matrices of the layers: quantised by `method` on the samples `seen`, judged on
/// the samples `other`.
///
/// # Errors
/// A damaged source; a matrix that no input reaches.
pub fn measure(
    model: &Model,
    method: &Method,
    seen: &[Vec<u32>],
    other: &[Vec<u32>],
) -> Result<Vec<Cost>, ToolError> {
    let c = &model.config;
    let guide = Guide::measure(model, other)?;
    let pass = Pass::of(model)?;
    let all = seen.iter().chain(other);
    let embedding = Embedding::of(model)?;
    let embedded = all.map(|s| embedding.rows(s));
    let mut states = embedded.collect::<Result<Vec<_>, _>>()?;
    let bar = progress::bar(7 * c.layers as u64, "measuring sensitivity");
    let mut costs = Vec::new();
    for layer in 0..c.layers {
        let block = Block::read(model, layer)?;
        for (input, group) in Part::GROUPS.into_iter().enumerate() {
            let n = model
                .tensor(&group[0].tensor(layer))
                .map_or(0, |t| t.cols());
            let (mut h, mut judge) = (vec![0.0; n * n], vec![0.0; n * n]);
            let mut tokens = 0;
            for (i, x) in states.iter_mut().enumerate() {
                let x = step(&pass, &block, input, x);
                if i < seen.len() {
                    add_gram(&x, n, &mut h);
                } else {
                    let weights = &guide.tokens[layer][input][tokens..];
                    add_gram(&vector::scale_rows(&x, n, weights), n, &mut judge);
                    tokens += x.len() / n;
                }
            }
            mirror(&mut h, n);
            mirror(&mut judge, n);
            judge.iter_mut().for_each(|h| *h /= tokens as f32);
            let factor = Factor::new(&mut h, n, method.damping, method.order);
            let factor = factor.ok_or_else(|| {
                ToolError::Setting(format!(
                    "{}: the texts give it no finite input that is not zero; calibrate with others",
                    group[0].tensor(layer)
                ))
            })?;
            let curvature = Curvature {
                n,
                h: &h,
                factor: &factor,
                pull: None,
            };
            for &part in group {
                let name = part.tensor(layer);
                let rows = &guide.rows[layer][part as usize];
                let w = block.matrix(part);
                let fail = |error| ToolError::encode(&model.path, &name, error);
                let loss = losses(w, rows, method, &curvature, &judge).map_err(fail)?;
                costs.push(Cost {
                    weights: w.len() as u64,
                    bytes: WIDTHS
                        .map(|d| d.row_bytes(n).map_or(u64::MAX, |b| (b * rows.len()) as u64)),
                    loss,
                    name,
                });
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    Ok(costs)
}

/// The input of a group for one sequence; the state `x` moves on where one half of the layer ends.
fn step(pass: &Pass<'_>, block: &Block, input: usize, x: &mut [f32]) -> Vec<f32> {
    match input {
        0 => pass.norm(x, &block.attn_norm),
        1 => {
            let seen = pass.attention(&pass.norm(x, &block.attn_norm), block);
            pass.add_projected(x, &seen, block.matrix(Part::O));
            seen
        }
        2 => pass.norm(x, &block.ffn_norm),
        _ => {
            let active = pass.activated(&pass.norm(x, &block.ffn_norm), block);
            pass.add_projected(x, &active, block.matrix(Part::Down));
            active
        }
    }
}

/// Loss at each of [`WIDTHS`] of a matrix whose rows have the weights `rows`, by some of them.
fn losses(
    w: &[f32],
    rows: &[f32],
    method: &Method,
    curvature: &Curvature<'_>,
    judge: &[f32],
) -> Result<[f64; 5], EncodeError> {
    let n = curvature.n;
    let count = SOME.min(rows.len());
    let chosen: Vec<usize> = (0..count).map(|i| i * rows.len() / count).collect();
    let some: Vec<f32> = chosen
        .iter()
        .flat_map(|r| &w[r * n..(r + 1) * n])
        .copied()
        .collect();
    let sum = |all: &mut dyn Iterator<Item = f32>| all.map(f64::from).sum::<f64>();
    let weight =
        sum(&mut rows.iter().copied()) / sum(&mut chosen.iter().map(|r| rows[*r])).max(1e-300);
    let each: Vec<f64> = WIDTHS
        .par_iter()
        .map(|&dtype| {
            let solution = solve::solve(dtype, method.effort, curvature, &some, &|_| {})?;
            let stored = Rows::new(dtype, n, &solution.bytes).expect("rows that were just written");
            let mut errors = vec![0.0; some.len()];
            for (r, (e, w)) in errors
                .chunks_exact_mut(n)
                .zip(some.chunks_exact(n))
                .enumerate()
            {
                stored.dequantize(r, e);
                e.iter_mut().zip(w).for_each(|(e, w)| *e = w - *e);
            }
            let mut asked = vec![0.0; some.len()];
            linear(&errors, judge, n, &mut asked);
            let each = errors.chunks_exact(n).zip(asked.chunks_exact(n));
            let sum: f64 = each
                .zip(&chosen)
                .map(|((e, a), r)| {
                    let terms = e.iter().zip(a);
                    let error: f64 = terms.map(|(e, a)| f64::from(*e) * f64::from(*a)).sum();
                    f64::from(rows[*r]) * error
                })
                .sum();
            Ok(0.5 * weight * sum.max(0.0))
        })
        .collect::<Result<_, EncodeError>>()?;
    Ok(std::array::from_fn(|i| each[i]))
}

/// The widths with the least expected loss whose bytes are at most `budget`; an index into
/// [`WIDTHS`] for each matrix. `None` where even the lowest widths take more.
pub fn choose(costs: &[Cost], budget: u64) -> Option<Vec<usize>> {
    let mut chosen = vec![0; costs.len()];
    let mut spent: u64 = costs.iter().map(|c| c.bytes[0]).sum();
    if spent > budget {
        return None;
    }
    // Steps may skip a width: the hull of loss over bytes, so that the next is never better.
    loop {
        let mut best: Option<(f64, usize, usize, u64)> = None;
        for (i, (c, &now)) in costs.iter().zip(&chosen).enumerate() {
            for next in now + 1..WIDTHS.len() {
                let more = c.bytes[next] - c.bytes[now];
                let gain = (c.loss[now] - c.loss[next]) / more as f64;
                if spent + more <= budget && best.is_none_or(|b| gain > b.0) && gain > 0.0 {
                    best = Some((gain, i, next, more));
                }
            }
        }
        match best {
            Some((_, i, next, more)) => {
                chosen[i] = next;
                spent += more;
            }
            None => return Some(chosen),
        }
    }
}

/// What a file of measurements holds.
#[derive(Serialize, Deserialize)]
struct Kept {
    sources: Vec<String>,
    samples: String,
    method: Value,
    costs: Vec<Cost>,
}

/// Most samples that are measured with, and the tokens of each that are.
const SAMPLES: (usize, usize) = (16, 512);
/// One in so many judges the errors.
const JUDGES: usize = 4;

/// Measurements of this model, these samples and this method: from `file`, or made and kept
/// there.
///
/// # Errors
/// Those of [`measure`]; a file that cannot be written.
pub fn load_or_measure(
    model: &Model,
    samples: &Samples,
    method: &Method,
    file: &Path,
) -> Result<Vec<Cost>, ToolError> {
    let sources: Vec<String> = model.hashes().into_iter().map(|h| h.blake3).collect();
    let same = |k: &Kept| {
        k.sources == sources && k.samples == samples.hash && k.method == method.as_json()
    };
    let kept = std::fs::read(file).ok();
    let kept = kept.and_then(|bytes| serde_json::from_slice::<Kept>(&bytes).ok());
    if let Some(kept) = kept.filter(same) {
        return Ok(kept.costs);
    }
    let all = &samples.tokens;
    let count = SAMPLES.0.min(all.len());
    let (mut seen, mut other) = (Vec::new(), Vec::new());
    for i in 0..count {
        let sample = &all[i * all.len() / count];
        let sample = sample[..sample.len().min(SAMPLES.1)].to_vec();
        if i % JUDGES == JUDGES - 1 {
            &mut other
        } else {
            &mut seen
        }
        .push(sample);
    }
    if other.is_empty() {
        return Err(ToolError::Setting(format!(
            "{count} samples are too few to measure what widths cost: {JUDGES} are needed"
        )));
    }
    let kept = Kept {
        costs: measure(model, method, &seen, &other)?,
        sources,
        samples: samples.hash.clone(),
        method: method.as_json(),
    };
    let text = serde_json::to_vec_pretty(&kept).unwrap_or_default();
    crate::write_whole(file, &text)?;
    Ok(kept.costs)
}

/// Gives the matrices of `steps` that are measured, and that no pattern of the recipe names, the
/// widths with the least loss at `target` bytes of all tensors; tells the expected loss. A matrix
/// whose source takes no more bytes than a width stays as it is there, and loses nothing, unless
/// `requantize`.
///
/// # Errors
/// A target that the lowest widths exceed.
pub fn apply(
    model: &Model,
    steps: &mut [Step],
    costs: &[Cost],
    target: u64,
    requantize: bool,
) -> Result<f64, ToolError> {
    let of = |s: &Step| &model.tensors[s.source];
    let is_free = |s: &&Step| !s.fixed && of(s).is_matrix();
    let free: BTreeSet<&str> = steps
        .iter()
        .filter(is_free)
        .map(|s| of(s).name.as_str())
        .collect();
    let found = costs.iter().filter(|c| free.contains(c.name.as_str()));
    let (costs, widths): (Vec<Cost>, Vec<[DType; 5]>) = found
        .map(|c| {
            let mut c = c.clone();
            let mut widths = WIDTHS;
            let source = model.tensor(&c.name).filter(|_| !requantize);
            let bytes = source.map_or(u64::MAX, |t| (t.row_bytes() * t.rows()) as u64);
            for (i, width) in widths.iter_mut().enumerate() {
                if let Some(t) = source.filter(|_| c.bytes[i] >= bytes) {
                    (c.bytes[i], c.loss[i], *width) = (bytes, 0.0, t.dtype);
                }
            }
            (c, widths)
        })
        .unzip();
    let names: BTreeSet<&str> = costs.iter().map(|c| c.name.as_str()).collect();
    let fixed: u64 = steps
        .iter()
        .filter(|s| !names.contains(of(s).name.as_str()))
        .map(|s| quantize::step_bytes(model, s))
        .sum();
    let lowest: u64 = costs.iter().map(|c| c.bytes[0]).sum();
    let chosen = target.checked_sub(fixed).and_then(|b| choose(&costs, b));
    let Some(chosen) = chosen else {
        let weights: u64 = steps.iter().map(|s| of(s).len() as u64).sum();
        return Err(ToolError::Setting(format!(
            "{:.2} MB are too few: with all matrices at the lowest width it takes {:.2} MB, {:.3} bits a weight; what is not chosen, as embedding and output, takes {:.2} MB (--embedding-bits makes them smaller)",
            target as f64 / 1e6,
            (fixed + lowest) as f64 / 1e6,
            (fixed + lowest) as f64 * 8.0 / weights as f64,
            fixed as f64 / 1e6
        )));
    };
    let each = costs.iter().zip(&widths).zip(&chosen);
    let widths: BTreeMap<&str, DType> = each.map(|((c, w), i)| (c.name.as_str(), w[*i])).collect();
    for step in steps.iter_mut() {
        if let Some(dtype) = widths.get(model.tensors[step.source].name.as_str()) {
            step.dtype = *dtype;
            step.note = None;
        }
    }
    Ok(expected_loss(&costs, &chosen))
}

/// Expected loss of a choice, nats.
pub fn expected_loss(costs: &[Cost], chosen: &[usize]) -> f64 {
    costs.iter().zip(chosen).map(|(c, i)| c.loss[*i]).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(name: &str, weights: u64, unit: f64) -> Cost {
        Cost {
            name: name.into(),
            weights,
            bytes: [2625, 3438, 4500, 5500, 6563].map(|b| b * weights / 8000),
            loss: [1.0, 0.25, 0.0625, 0.0156, 0.0039].map(|l| l * unit),
        }
    }

    #[test]
    fn the_choice_is_as_good_as_any_within_the_budget() {
        let costs = [
            cost("a", 800_000, 1.0),
            cost("b", 400_000, 0.02),
            cost("c", 1_600_000, 0.3),
            cost("d", 200_000, 2.0),
        ];
        let lowest: u64 = costs.iter().map(|c| c.bytes[0]).sum();
        assert_eq!(choose(&costs, lowest - 1), None);
        assert_eq!(choose(&costs, lowest), Some(vec![0; 4]));
        assert_eq!(choose(&costs, u64::MAX), Some(vec![4; 4]));
        for share in [110, 125, 150, 180] {
            let budget = lowest * share / 100;
            let chosen = choose(&costs, budget).expect("enough");
            let spent: u64 = costs.iter().zip(&chosen).map(|(c, i)| c.bytes[*i]).sum();
            assert!(spent <= budget);
            // All combinations.
            let best = (0..5usize.pow(4))
                .map(|k| [k % 5, k / 5 % 5, k / 25 % 5, k / 125])
                .filter(|w| costs.iter().zip(w).map(|(c, i)| c.bytes[*i]).sum::<u64>() <= budget)
                .map(|w| expected_loss(&costs, &w))
                .fold(f64::INFINITY, f64::min);
            let got = expected_loss(&costs, &chosen);
            // Greedy steps may leave less than one step of the budget unused.
            assert!(got <= 1.6 * best, "{share}: {got} {best}");
        }
    }
}
