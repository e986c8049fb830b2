//! How much each matrix matters, and the best widths under a budget of bytes.
//!
//! ```text
//! for each matrix: quantised alone at a low width, how far do predictions move?   KL₀
//! for each width:  output error e(width), by the inputs that calibration gives
//! loss(matrix, width) = KL₀ · e(width) / e(low width)
//! from the lowest width up: the step with the most loss removed for each byte, while it fits
//! ```
//!
//! A small change moves predictions by its square, so the divergence grows as the output error
//! does, and the changes of different matrices add up. All perturbed states walk through the
//! layers together, so that each layer is read once.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use myq_blocks::DType;
use myq_blocks::encode::{EncodeError, Method};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::calibration::Samples;
use crate::linalg::linear;
use crate::model::Model;
use crate::pass::{Block, Part, Pass, tensor};
use crate::recipe::Step;
use crate::{ToolError, progress, quantize, vector};

/// Widths that are chosen from, lowest first.
pub const WIDTHS: [DType; 5] = [DType::Q2K, DType::Q3K, DType::Q4K, DType::Q5K, DType::Q6K];
/// The width at which a matrix's divergence is measured.
const MEASURED: usize = 1;
/// Tokens whose logits are held at once.
const ROWS: usize = 64;

/// What widths cost one matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Tensor.
    pub name: String,
    /// Weights.
    pub weights: u64,
    /// Bytes at each of [`WIDTHS`].
    pub bytes: [u64; 5],
    /// Expected divergence of the whole model's predictions, nats, at each.
    pub loss: [f64; 5],
}

/// Measures all matrices of the layers and the output on `samples`.
///
/// # Errors
/// A damaged source.
pub fn measure(model: &Model, samples: &[Vec<u32>]) -> Result<Vec<Cost>, ToolError> {
    let c = &model.config;
    let pass = Pass::of(model)?;
    let embedding = tensor(model, "token_embd.weight")?;
    let mut base: Vec<Vec<f32>> = samples.iter().map(|s| pass.embed(&embedding, s)).collect();
    drop(embedding);
    let mut found: Vec<Found> = Vec::new();
    // Each matrix once as it arises, and each layer's walk of the states before it.
    let steps = c.layers * 7 + 7 * c.layers * (c.layers + 1) / 2;
    let bar = progress::bar(steps as u64, "measuring sensitivity");
    for layer in 0..c.layers {
        let block = Block::read(model, layer)?;
        for f in &mut found {
            for x in &mut f.states {
                pass.layer(&block, x);
            }
            bar.inc(1);
        }
        let inputs = Inputs::gather(&pass, &block, &base);
        for part in Part::ALL {
            let name = part.tensor(layer);
            let w = block.matrix(part);
            let (n, h) = inputs.of(part, c);
            let errors = errors(model, &name, w, n, h)?;
            let mut other = block.clone();
            other.matrices[part as usize] = errors.stored;
            let mut states = base.clone();
            for x in &mut states {
                pass.layer(&other, x);
            }
            found.push(Found {
                name,
                weights: w.len() as u64,
                n,
                errors: errors.energy,
                states,
            });
            bar.inc(1);
        }
        for x in &mut base {
            pass.layer(&block, x);
        }
        bar.inc(7);
    }
    bar.finish_and_clear();
    let output = Output::of(model, &pass)?;
    let bar = progress::bar(found.len() as u64, "comparing predictions");
    let expected: Vec<Vec<f32>> = base.iter().map(|x| output.log_softmax(x)).collect();
    let mut costs = Vec::with_capacity(found.len());
    for f in found {
        let tokens: usize = samples.iter().map(Vec::len).sum();
        let each = f.states.iter().zip(&expected);
        let sum: f64 = each
            .map(|(x, expected)| output.divergence(x, expected))
            .sum();
        costs.push(f.cost(sum / tokens as f64));
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(costs)
}

/// A matrix on the way through the layers behind it.
struct Found {
    name: String,
    weights: u64,
    n: usize,
    /// Output error at each of [`WIDTHS`].
    errors: [f64; 5],
    /// Hidden states with this matrix quantised.
    states: Vec<Vec<f32>>,
}

impl Found {
    fn cost(self, divergence: f64) -> Cost {
        let unit = divergence / self.errors[MEASURED].max(1e-300);
        let rows = self.weights / self.n as u64;
        Cost {
            name: self.name,
            weights: self.weights,
            bytes: WIDTHS.map(|d| d.row_bytes(self.n).map_or(u64::MAX, |b| b as u64 * rows)),
            loss: self.errors.map(|e| e * unit),
        }
    }
}

/// Diagonals of the second moments of a layer's inputs.
struct Inputs([Vec<f32>; 4]);

impl Inputs {
    fn gather(pass: &Pass<'_>, block: &Block, states: &[Vec<f32>]) -> Inputs {
        let c = pass.config;
        let mut sums = [c.width, c.q_width(), c.width, c.ffn].map(|n| vec![0.0; n]);
        for x in states {
            let normed = pass.norm(x, &block.attn_norm);
            let seen = pass.attention(&normed, block);
            let mut x = x.clone();
            pass.add_projected(&mut x, &seen, block.matrix(Part::O));
            let wide = pass.norm(&x, &block.ffn_norm);
            let active = pass.activated(&wide, block);
            for (sum, x) in sums.iter_mut().zip([&normed, &seen, &wide, &active]) {
                for row in x.chunks_exact(sum.len()) {
                    sum.iter_mut().zip(row).for_each(|(s, x)| *s += x * x);
                }
            }
        }
        Inputs(sums)
    }

    fn of(&self, part: Part, c: &myq_model::Config) -> (usize, &[f32]) {
        let (i, n) = match part {
            Part::Q | Part::K | Part::V => (0, c.width),
            Part::O => (1, c.q_width()),
            Part::Gate | Part::Up => (2, c.width),
            Part::Down => (3, c.ffn),
        };
        (n, &self.0[i])
    }
}

/// Output errors at all widths, and the weights as the measured one stores them.
struct Errors {
    energy: [f64; 5],
    stored: Vec<f32>,
}

fn errors(
    model: &Model,
    name: &str,
    w: &[f32],
    n: usize,
    importance: &[f32],
) -> Result<Errors, ToolError> {
    let mut energy = [0.0; 5];
    let mut stored = Vec::new();
    for (i, dtype) in WIDTHS.into_iter().enumerate() {
        let fail = |error| ToolError::encode(&model.path, name, error);
        let row_bytes = dtype
            .row_bytes(n)
            .ok_or_else(|| fail(EncodeError::Columns { dtype, cols: n }))?;
        let mut out = vec![0.0; w.len()];
        let sums = out
            .par_chunks_mut(16 * n)
            .zip(w.par_chunks(16 * n))
            .map(|(out, w)| -> Result<f64, EncodeError> {
                let mut bytes = vec![0; w.len() / n * row_bytes];
                myq_blocks::encode::encode_rows(
                    dtype,
                    Method::Search,
                    n,
                    w,
                    Some(importance),
                    &mut bytes,
                )?;
                let rows =
                    myq_blocks::Rows::new(dtype, n, &bytes).expect("rows that were just written");
                let mut sum = 0.0;
                for (r, (out, w)) in out.chunks_exact_mut(n).zip(w.chunks_exact(n)).enumerate() {
                    rows.dequantize(r, out);
                    let terms = out.iter().zip(w).zip(importance);
                    sum += terms
                        .map(|((o, w), h)| f64::from((o - w) * (o - w) * h))
                        .sum::<f64>();
                }
                Ok(sum)
            })
            .collect::<Result<Vec<f64>, _>>()
            .map_err(fail)?;
        energy[i] = sums.iter().sum();
        if i == MEASURED {
            stored = out;
        }
    }
    Ok(Errors { energy, stored })
}

/// The last norm and matrix.
struct Output<'a> {
    pass: &'a Pass<'a>,
    norm: Vec<f32>,
    weights: Vec<f32>,
}

impl<'a> Output<'a> {
    fn of(model: &Model, pass: &'a Pass<'a>) -> Result<Output<'a>, ToolError> {
        Ok(Output {
            pass,
            norm: tensor(model, "output_norm.weight")?,
            weights: tensor(model, model.output_name())?,
        })
    }

    /// Logits of some tokens at a time.
    fn each(&self, x: &[f32], mut take: impl FnMut(&[f32])) {
        let (width, vocab) = (self.norm.len(), self.pass.config.vocab);
        let normed = self.pass.norm(x, &self.norm);
        let mut logits = vec![0.0; ROWS * vocab];
        for part in normed.chunks(ROWS * width) {
            let logits = &mut logits[..part.len() / width * vocab];
            linear(part, &self.weights, width, logits);
            take(logits);
        }
    }

    fn log_softmax(&self, x: &[f32]) -> Vec<f32> {
        let vocab = self.pass.config.vocab;
        let mut all = Vec::with_capacity(x.len() / self.norm.len() * vocab);
        self.each(x, |logits| {
            let from = all.len();
            all.extend_from_slice(logits);
            all[from..].par_chunks_exact_mut(vocab).for_each(|row| {
                let sum = vector::log_sum_exp(row) as f32;
                row.iter_mut().for_each(|x| *x -= sum);
            });
        });
        all
    }

    fn divergence(&self, x: &[f32], expected: &[f32]) -> f64 {
        let vocab = self.pass.config.vocab;
        let (mut sum, mut at) = (0.0, 0);
        self.each(x, |logits| {
            let expected = &expected[at..at + logits.len()];
            at += logits.len();
            let rows = logits
                .par_chunks_exact(vocab)
                .zip(expected.par_chunks_exact(vocab));
            let all: Vec<f64> = rows
                .map(|(row, p)| vector::divergence(p, row, vector::log_sum_exp(row)).max(0.0))
                .collect();
            sum += all.iter().sum::<f64>();
        });
        sum
    }
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
    costs: Vec<Cost>,
}

/// Most samples and tokens of each that are measured with: the order of matrices shows early.
const SAMPLES: (usize, usize) = (4, 512);

/// Measurements of this model and these samples: from `file`, or made and kept there.
///
/// # Errors
/// Those of [`measure`]; a file that cannot be written.
pub fn load_or_measure(
    model: &Model,
    samples: &Samples,
    file: &Path,
) -> Result<Vec<Cost>, ToolError> {
    let sources: Vec<String> = model.hashes().into_iter().map(|h| h.blake3).collect();
    let kept = std::fs::read(file).ok();
    let kept = kept.and_then(|bytes| serde_json::from_slice::<Kept>(&bytes).ok());
    if let Some(kept) = kept.filter(|k| k.sources == sources && k.samples == samples.hash) {
        return Ok(kept.costs);
    }
    let all = &samples.tokens;
    let count = SAMPLES.0.min(all.len());
    let some: Vec<Vec<u32>> = (0..count)
        .map(|i| &all[i * all.len() / count])
        .map(|s| s[..s.len().min(SAMPLES.1)].to_vec())
        .collect();
    let kept = Kept {
        costs: measure(model, &some)?,
        sources,
        samples: samples.hash.clone(),
    };
    let text = serde_json::to_vec_pretty(&kept).unwrap_or_default();
    crate::write_whole(file, &text)?;
    Ok(kept.costs)
}

/// Gives the matrices of `steps` that are measured the widths with the least loss at `target`
/// bits a weight over all tensors; tells the expected loss.
///
/// # Errors
/// A target that the lowest widths exceed.
pub fn apply(
    model: &Model,
    steps: &mut [Step],
    costs: &[Cost],
    target: f64,
) -> Result<f64, ToolError> {
    let of = |s: &Step| &model.tensors[s.source];
    let weights: u64 = steps.iter().map(|s| of(s).len() as u64).sum();
    let is_free = |s: &Step| WIDTHS.contains(&s.dtype);
    let free: BTreeMap<&str, &Step> = steps
        .iter()
        .filter(|s| is_free(s))
        .map(|s| (of(s).name.as_str(), s))
        .collect();
    let costs: Vec<Cost> = costs
        .iter()
        .filter(|c| free.contains_key(c.name.as_str()))
        .cloned()
        .collect();
    let names: BTreeSet<&str> = costs.iter().map(|c| c.name.as_str()).collect();
    let fixed: u64 = steps
        .iter()
        .filter(|s| !names.contains(of(s).name.as_str()))
        .map(|s| quantize::step_bytes(model, s))
        .sum();
    let budget = (target * weights as f64 / 8.0) as u64;
    let lowest: u64 = costs.iter().map(|c| c.bytes[0]).sum();
    let chosen = budget.checked_sub(fixed).and_then(|b| choose(&costs, b));
    let Some(chosen) = chosen else {
        return Err(ToolError::Setting(format!(
            "{target} bits a weight are too few: with all matrices at the lowest width it takes {:.3}; embedding and output alone take {:.1} MB (--embedding-bits makes them smaller)",
            (fixed + lowest) as f64 * 8.0 / weights as f64,
            fixed as f64 / 1e6
        )));
    };
    let widths = by_name(&costs, &chosen);
    for step in steps.iter_mut() {
        if let Some(dtype) = widths.get(&model.tensors[step.source].name) {
            step.dtype = *dtype;
        }
    }
    Ok(expected_loss(&costs, &chosen))
}

/// Expected loss of a choice, nats.
pub fn expected_loss(costs: &[Cost], chosen: &[usize]) -> f64 {
    costs.iter().zip(chosen).map(|(c, i)| c.loss[*i]).sum()
}

/// The choice by tensor name.
pub fn by_name(costs: &[Cost], chosen: &[usize]) -> BTreeMap<String, DType> {
    let each = costs.iter().zip(chosen);
    each.map(|(c, i)| (c.name.clone(), WIDTHS[*i])).collect()
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
