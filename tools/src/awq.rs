//! Scales of channels folded into neighbouring weights (AWQ, arXiv 2306.00978).
//!
//! A channel that carries large inputs is worth finer steps. Multiplying its column by s and
//! dividing what makes it by s changes nothing in exact arithmetic, and lowers its share of the
//! rounding error:
//!
//! ```text
//! norm → query, key, value        norm → gate, up
//! value → attention output        up → down
//! s = (mean |x|)^α, over its geometric mean; α by the least output error of the matrices
//! ```
//!
//! Heads that share a value share its scales.

use myq_blocks::DType;
use myq_blocks::encode::{EncodeError, Method, encode_rows};
use rayon::prelude::*;

use crate::linalg::linear;
use crate::pass::{Block, Part, Pass};

/// Samples that are enough, spread over all.
pub const SAMPLES: usize = 8;
/// Values of α between 0 and 1 that are tried.
const STEPS: usize = 20;
/// Tokens and rows of each matrix that they are tried on.
const TOKENS: usize = 512;
/// See [`TOKENS`].
const ROWS: usize = 256;

/// Folds scales into `block` for the inputs that `states` lead to; `format` tells the type of a
/// matrix, none where it is not quantised. Gives α of each fold.
///
/// # Errors
/// Those of [`encode_rows`].
pub fn fold(
    pass: &Pass<'_>,
    block: &mut Block,
    states: &[Vec<f32>],
    format: &dyn Fn(Part) -> Option<DType>,
) -> Result<[f32; 4], EncodeError> {
    let c = pass.config;
    let (inputs, group) = (Inputs::gather(pass, block, states), c.heads / c.kv_heads);
    let mut alphas = [0.0; 4];
    // `from` is the matrix whose rows are divided, where it is not a norm.
    let fold = |block: &Block, x: &[f32], n: usize, from: Option<Part>, parts: &[Part]| {
        let wanted: Option<Vec<(Part, DType)>> =
            parts.iter().map(|p| Some((*p, format(*p)?))).collect();
        let shared = (parts == [Part::O]).then_some((group, c.head_dim));
        match wanted.filter(|_| from.is_none_or(|p| format(p).is_some())) {
            // A matrix that stays as it is in the source cannot take a scale.
            None => Ok((0.0, vec![1.0; n])),
            Some(wanted) => search(block, x, n, &wanted, shared),
        }
    };
    let (alpha, s) = fold(
        block,
        &inputs.attention,
        c.width,
        None,
        &[Part::Q, Part::K, Part::V],
    )?;
    alphas[0] = alpha;
    divide(&mut block.attn_norm, &s);
    for part in [Part::Q, Part::K, Part::V] {
        scale_columns(&mut block.matrices[part as usize], &s);
    }
    let (alpha, s) = fold(
        block,
        &inputs.output,
        c.q_width(),
        Some(Part::V),
        &[Part::O],
    )?;
    alphas[1] = alpha;
    scale_columns(&mut block.matrices[Part::O as usize], &s);
    // The scales of a key head's queries are the same: its own are the first query's.
    let own: Vec<f32> = s
        .chunks_exact(c.head_dim)
        .step_by(group)
        .flatten()
        .copied()
        .collect();
    divide_rows(&mut block.matrices[Part::V as usize], &own);
    if !block.bias[2].is_empty() {
        divide(&mut block.bias[2], &own);
    }
    let (alpha, s) = fold(block, &inputs.wide, c.width, None, &[Part::Gate, Part::Up])?;
    alphas[2] = alpha;
    divide(&mut block.ffn_norm, &s);
    for part in [Part::Gate, Part::Up] {
        scale_columns(&mut block.matrices[part as usize], &s);
    }
    let (alpha, s) = fold(block, &inputs.active, c.ffn, Some(Part::Up), &[Part::Down])?;
    alphas[3] = alpha;
    scale_columns(&mut block.matrices[Part::Down as usize], &s);
    divide_rows(&mut block.matrices[Part::Up as usize], &s);
    Ok(alphas)
}

fn divide(x: &mut [f32], s: &[f32]) {
    x.iter_mut().zip(s).for_each(|(x, s)| *x /= s);
}

fn divide_rows(w: &mut [f32], s: &[f32]) {
    let cols = w.len() / s.len();
    for (row, s) in w.chunks_exact_mut(cols).zip(s) {
        row.iter_mut().for_each(|w| *w /= s);
    }
}

fn scale_columns(w: &mut [f32], s: &[f32]) {
    for row in w.chunks_exact_mut(s.len()) {
        row.iter_mut().zip(s).for_each(|(w, s)| *w *= s);
    }
}

/// Inputs of a layer's matrices for some tokens, tokens × values each.
struct Inputs {
    attention: Vec<f32>,
    output: Vec<f32>,
    wide: Vec<f32>,
    active: Vec<f32>,
}

impl Inputs {
    /// A few tokens of each sample, spread over it: the first of a text are like no others.
    fn gather(pass: &Pass<'_>, block: &Block, states: &[Vec<f32>]) -> Inputs {
        let c = pass.config;
        let mut all = Inputs {
            attention: Vec::new(),
            output: Vec::new(),
            wide: Vec::new(),
            active: Vec::new(),
        };
        let some = states.len().min(SAMPLES);
        let each = TOKENS / some.max(1);
        for i in 0..some {
            let x = &states[i * states.len() / some];
            let tokens = x.len() / c.width;
            let normed = pass.norm(x, &block.attn_norm);
            let seen = pass.attention(&normed, block);
            let mut after = x.clone();
            pass.add_projected(&mut after, &seen, block.matrix(Part::O));
            let wide = pass.norm(&after, &block.ffn_norm);
            let active = pass.activated(&wide, block);
            let count = each.min(tokens);
            for t in (0..count).map(|k| k * tokens / count) {
                let row = |x: &[f32], n: usize| x[t * n..(t + 1) * n].to_vec();
                all.attention.extend(row(&normed, c.width));
                all.output.extend(row(&seen, c.q_width()));
                all.wide.extend(row(&wide, c.width));
                all.active.extend(row(&active, c.ffn));
            }
        }
        all
    }
}

/// The best α and its scales for matrices that share the input `x`, tokens × n. `shared` heads
/// of so many values have one scale in common.
fn search(
    block: &Block,
    x: &[f32],
    n: usize,
    parts: &[(Part, DType)],
    shared: Option<(usize, usize)>,
) -> Result<(f32, Vec<f32>), EncodeError> {
    let tokens = (x.len() / n).max(1) as f32;
    let mut mean = vec![0.0f32; n];
    let mut square = vec![0.0f32; n];
    for row in x.chunks_exact(n) {
        for ((m, s), x) in mean.iter_mut().zip(&mut square).zip(row) {
            *m += x.abs() / tokens;
            *s += x * x / tokens;
        }
    }
    if let Some((group, head)) = shared {
        for heads in mean.chunks_exact_mut(group * head) {
            for i in 0..head {
                let sum: f32 = (0..group).map(|g| heads[g * head + i]).sum();
                (0..group).for_each(|g| heads[g * head + i] = sum / group as f32);
            }
        }
    }
    let mut best = (f64::INFINITY, 0.0, vec![1.0; n]);
    for step in 0..STEPS {
        let alpha = step as f32 / STEPS as f32;
        let scales = scales(&mean, alpha);
        let mut error = 0.0;
        for &(part, dtype) in parts {
            error += output_error(block.matrix(part), dtype, x, &square, &scales)?;
        }
        if error < best.0 {
            best = (error, alpha, scales);
        }
    }
    Ok((best.1, best.2))
}

/// (mean |x|)^α over its geometric mean, within a factor that fp16 scales bear easily.
fn scales(mean: &[f32], alpha: f32) -> Vec<f32> {
    let floor = mean.iter().sum::<f32>() / mean.len() as f32 * 1e-4;
    let logs: Vec<f32> = mean.iter().map(|m| m.max(floor).max(1e-30).ln()).collect();
    let middle = logs.iter().sum::<f32>() / logs.len() as f32;
    let scale = |log: &f32| (alpha * (log - middle)).exp().clamp(1e-2, 1e2);
    logs.iter().map(scale).collect()
}

/// Squared output error of some rows of `w` when its columns are stored times `scales`.
fn output_error(
    w: &[f32],
    dtype: DType,
    x: &[f32],
    square: &[f32],
    scales: &[f32],
) -> Result<f64, EncodeError> {
    let n = scales.len();
    let rows = w.len() / n;
    let row_bytes = dtype
        .row_bytes(n)
        .ok_or(EncodeError::Columns { dtype, cols: n })?;
    let importance: Vec<f32> = square
        .iter()
        .zip(scales)
        .map(|(q, s)| q / (s * s))
        .collect();
    let count = ROWS.min(rows);
    let mut errors = vec![0.0f32; count * n];
    errors
        .par_chunks_mut(n)
        .enumerate()
        .try_for_each(|(i, error)| {
            let row = &w[i * rows / count * n..][..n];
            let scaled: Vec<f32> = row.iter().zip(scales).map(|(w, s)| w * s).collect();
            let mut bytes = vec![0; row_bytes];
            encode_rows(
                dtype,
                Method::Search,
                n,
                &scaled,
                Some(&importance),
                &mut bytes,
            )?;
            let stored = myq_blocks::Rows::new(dtype, n, &bytes).expect("a row just written");
            stored.dequantize(0, error);
            for ((e, w), s) in error.iter_mut().zip(row).zip(scales) {
                *e = w - *e / s;
            }
            Ok::<(), EncodeError>(())
        })?;
    let tokens = x.len() / n;
    let mut out = vec![0.0; tokens * count];
    linear(x, &errors, n, &mut out);
    let sum: f64 = out.iter().map(|o| f64::from(*o) * f64::from(*o)).sum();
    Ok(sum * rows as f64 / count as f64)
}

#[cfg(test)]
mod tests {
    use myq_model::Config;

    use super::*;
    use crate::testing::{block, config, numbers};

    fn folded(kept: &[Part]) -> (Block, Block, Config, [f32; 4]) {
        let c = config();
        let before = block(&c);
        let mut after = before.clone();
        let states: Vec<Vec<f32>> = (0..3).map(|i| numbers(20 * c.width, 70 + i)).collect();
        let format = |p: Part| (!kept.contains(&p)).then_some(DType::Q3K);
        let pass = Pass::new(&c, None);
        let alphas = fold(&pass, &mut after, &states, &format).expect("finite");
        (before, after, c, alphas)
    }

    #[test]
    fn a_layer_with_folded_scales_computes_the_same() {
        let (before, after, c, alphas) = folded(&[]);
        assert!(alphas[0] > 0.0 && alphas[2] > 0.0, "{alphas:?}");
        let pass = Pass::new(&c, None);
        let start = numbers(20 * c.width, 99);
        let through = |block: &Block| {
            let mut x = start.clone();
            pass.layer(block, &mut x);
            x
        };
        for (a, b) in through(&before).iter().zip(through(&after)) {
            assert!((a - b).abs() < 1e-3 * (1.0 + a.abs()), "{a} {b}");
        }
    }

    /// What the result takes over from the source must be what the fold leaves as it is.
    #[test]
    fn a_matrix_that_stays_as_it_is_takes_part_in_no_fold() {
        for kept in [Part::V, Part::O, Part::Up, Part::Down, Part::Q, Part::Gate] {
            let (before, after, ..) = folded(&[kept]);
            let same = |p: Part| before.matrix(p) == after.matrix(p);
            assert!(same(kept), "{kept:?}");
            match kept {
                Part::V => assert!(same(Part::O) && before.attn_norm == after.attn_norm),
                Part::Up => assert!(same(Part::Down) && before.ffn_norm == after.ffn_norm),
                Part::O => assert_eq!(before.bias[2], after.bias[2]),
                _ => {}
            }
        }
    }
}
