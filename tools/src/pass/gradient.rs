//! Backwards through a layer: from the gradient of a loss by its output to those by the outputs
//! of its matrices and by its input.
//!
//! The layer is computed anew on the way, so that of a forward pass only its input need be kept.

use rayon::prelude::*;

use super::{Block, Part, Pass};
use crate::linalg::{linear_back, matrix, matrix_mut, multiply, multiply_add};
use crate::vector;

/// Gradients by the outputs of a layer's matrices, tokens × rows each, indexed by [`Part`].
pub type Gradients = [Vec<f32>; 7];

impl Pass<'_> {
    /// `grad`, tokens × width, turns from the gradient by what the layer gives for the sequence
    /// `x` into that by `x`.
    pub fn layer_back(&self, block: &Block, x: &[f32], grad: &mut [f32]) -> Gradients {
        let c = self.config;
        let mut all = Gradients::default();
        let normed = self.norm(x, &block.attn_norm);
        let [query, key, value] = self.projections(&normed, block);
        let seen = self.attend(&query, &key, &value);
        let mut middle = x.to_vec();
        self.add_projected(&mut middle, &seen, block.matrix(Part::O));
        drop(seen);

        let wide = self.norm(&middle, &block.ffn_norm);
        let [gate, up] = self.gate_and_up(&wide, block);
        all[Part::Down as usize] = grad.to_vec();
        let active = linear_back(grad, block.matrix(Part::Down), c.ffn);
        let (mut by_gate, mut by_up) = (active.clone(), active);
        let rows = by_gate
            .par_chunks_mut(c.ffn)
            .zip(by_up.par_chunks_mut(c.ffn));
        rows.zip(gate.par_chunks(c.ffn).zip(up.par_chunks(c.ffn)))
            .for_each(|((by_gate, by_up), (gate, up))| {
                vector::swiglu_back(gate, up, by_gate, by_up);
            });
        let mut by_wide = linear_back(&by_gate, block.matrix(Part::Gate), c.width);
        vector::add(
            &mut by_wide,
            &linear_back(&by_up, block.matrix(Part::Up), c.width),
        );
        all[Part::Gate as usize] = by_gate;
        all[Part::Up as usize] = by_up;
        self.norm_back(&middle, &block.ffn_norm, &by_wide, grad);

        all[Part::O as usize] = grad.to_vec();
        let by_seen = linear_back(grad, block.matrix(Part::O), c.q_width());
        let [mut by_query, mut by_key, by_value] =
            self.attend_back([&query, &key, &value], &by_seen);
        // The transpose of a rotation is the one back.
        self.turn(&mut by_query, c.q_width(), -1.0);
        self.turn(&mut by_key, c.kv_width(), -1.0);
        let mut by_normed = linear_back(&by_query, block.matrix(Part::Q), c.width);
        for (by, part) in [(&by_key, Part::K), (&by_value, Part::V)] {
            vector::add(
                &mut by_normed,
                &linear_back(by, block.matrix(part), c.width),
            );
        }
        self.norm_back(x, &block.attn_norm, &by_normed, grad);
        all[Part::Q as usize] = by_query;
        all[Part::K as usize] = by_key;
        all[Part::V as usize] = by_value;
        all
    }

    /// `grad +=` the gradient by `x` of what [`Pass::norm`] gives, whose own is `by`.
    pub fn norm_back(&self, x: &[f32], weight: &[f32], by: &[f32], grad: &mut [f32]) {
        let (width, eps) = (weight.len(), self.config.norm_eps);
        grad.par_chunks_mut(width)
            .zip(x.par_chunks(width).zip(by.par_chunks(width)))
            .for_each(|(grad, (x, by))| vector::rms_norm_back(x, weight, eps, by, grad));
    }

    /// Gradients by query, key and value, from that by what attention gives.
    fn attend_back(&self, [query, key, value]: [&[f32]; 3], by: &[f32]) -> [Vec<f32>; 3] {
        let c = self.config;
        let (hd, group) = (c.head_dim, c.heads / c.kv_heads);
        let tokens = query.len() / c.q_width();
        let scale = 1.0 / (hd as f32).sqrt();
        let (q, k, v, by) = (
            matrix(query, c.q_width()),
            matrix(key, c.kv_width()),
            matrix(value, c.kv_width()),
            matrix(by, c.q_width()),
        );
        let each: Vec<[Vec<f32>; 3]> = (0..c.kv_heads)
            .into_par_iter()
            .map(|kv| {
                let mut by_query = vec![0.0; tokens * group * hd];
                let (mut by_key, mut by_value) = (vec![0.0; tokens * hd], vec![0.0; tokens * hd]);
                let (mut scores, mut by_scores) =
                    (vec![0.0; tokens * tokens], vec![0.0; tokens * tokens]);
                let keys = k.submatrix(0, kv * hd, tokens, hd);
                let values = v.submatrix(0, kv * hd, tokens, hd);
                for g in 0..group {
                    let at = (kv * group + g) * hd;
                    let queries = q.submatrix(0, at, tokens, hd);
                    let by = by.submatrix(0, at, tokens, hd);
                    multiply(matrix_mut(&mut scores, tokens), queries, keys.transpose());
                    multiply(matrix_mut(&mut by_scores, tokens), by, values.transpose());
                    let rows = scores.chunks_exact_mut(tokens);
                    for (r, (p, d)) in rows.zip(by_scores.chunks_exact_mut(tokens)).enumerate() {
                        vector::softmax(p, r + 1, scale);
                        vector::softmax_back(p, scale, d);
                    }
                    let p = matrix(&scores, tokens);
                    let d = matrix(&by_scores, tokens);
                    multiply_add(matrix_mut(&mut by_value, hd), p.transpose(), by, 1.0);
                    multiply_add(matrix_mut(&mut by_key, hd), d.transpose(), queries, 1.0);
                    let to = matrix_mut(&mut by_query, group * hd).subcols_mut(g * hd, hd);
                    multiply(to, d, keys);
                }
                [by_query, by_key, by_value]
            })
            .collect();
        // Heads lie side by side in a token's row.
        let join = |which: usize, wide: usize| {
            let mut out = vec![0.0; tokens * wide * c.kv_heads];
            for (t, row) in out.chunks_exact_mut(wide * c.kv_heads).enumerate() {
                for (to, head) in row.chunks_exact_mut(wide).zip(&each) {
                    to.copy_from_slice(&head[which][t * wide..][..wide]);
                }
            }
            out
        };
        [join(0, group * hd), join(1, hd), join(2, hd)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{block, config, numbers};

    /// The slope of a loss against differences of it, by the input and by each matrix.
    #[test]
    fn gradients_are_slopes() {
        let c = config();
        let (layer, pass) = (block(&c), Pass::new(&c, None));
        let tokens = 21;
        let x = numbers(tokens * c.width, 5);
        let along = numbers(tokens * c.width, 6);
        let loss = |layer: &Block, x: &[f32]| -> f64 {
            let mut out = x.to_vec();
            pass.layer(layer, &mut out);
            let terms = out.iter().zip(&along);
            terms.map(|(o, a)| f64::from(*o) * f64::from(*a)).sum()
        };
        let mut grad = along.clone();
        let by = pass.layer_back(&layer, &x, &mut grad);
        let near = |slope: f64, found: f64, what: &str| {
            let off = (slope - found).abs();
            assert!(off < 2e-2 * (0.05 + slope.abs()), "{what}: {slope} {found}");
        };
        for i in [0, 7, 64, 300, 700, 1343] {
            let moved = |by: f32| {
                let mut x = x.clone();
                x[i] += by;
                loss(&layer, &x)
            };
            let slope = (moved(1e-2) - moved(-1e-2)) / 2e-2;
            near(slope, f64::from(grad[i]), &format!("input {i}"));
        }
        // A bias sees the sum over tokens of the gradient by its matrix's output.
        for part in [Part::Q, Part::K, Part::V] {
            let rows = layer.bias[part as usize].len();
            for r in [0, 5, rows - 1] {
                let moved = |by: f32| {
                    let mut layer = layer.clone();
                    layer.bias[part as usize][r] += by;
                    loss(&layer, &x)
                };
                let slope = (moved(1e-2) - moved(-1e-2)) / 2e-2;
                let found = by[part as usize].iter().skip(r).step_by(rows);
                near(slope, found.map(|g| f64::from(*g)).sum(), part.name());
            }
        }
        // A weight sees it times the matrix's input.
        let normed = pass.norm(&x, &layer.attn_norm);
        let seen = pass.attention(&normed, &layer);
        let mut middle = x.clone();
        pass.add_projected(&mut middle, &seen, layer.matrix(Part::O));
        let wide = pass.norm(&middle, &layer.ffn_norm);
        let active = pass.activated(&wide, &layer);
        for part in Part::ALL {
            let input = match part {
                Part::Q | Part::K | Part::V => &normed,
                Part::O => &seen,
                Part::Gate | Part::Up => &wide,
                Part::Down => &active,
            };
            let cols = input.len() / tokens;
            let rows = layer.matrix(part).len() / cols;
            for (r, column) in [(0, 1), (3, cols - 1), (rows - 1, 9)] {
                let moved = |by: f32| {
                    let mut layer = layer.clone();
                    layer.matrices[part as usize][r * cols + column] += by;
                    loss(&layer, &x)
                };
                let slope = (moved(4e-3) - moved(-4e-3)) / 8e-3;
                let each = by[part as usize].chunks_exact(rows);
                let each = each.zip(input.chunks_exact(cols));
                let found = each.map(|(g, x)| f64::from(g[r]) * f64::from(x[column]));
                near(slope, found.sum(), part.name());
            }
        }
    }
}
