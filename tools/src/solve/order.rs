//! Compensation column by column: the factor of the second moments, and the rounding.
//!
//! ```text
//! H = (U + 1)·D·(U + 1)ᵀ, U strictly upper, columns in the order of work
//! for k in order:  ŵₖ = nearest(wₖ + Σ_{j before k} (wⱼ − ŵⱼ)·Uⱼₖ)
//! error = Σₖ Dₖ·(target of k − ŵₖ)²
//! ```
//!
//! This equals GPTQ with the Cholesky factor of the inverse (arXiv 2307.13304, theorem 6), and
//! needs no inverse: reversed in both directions, H has the ordinary lower factor L.
//!
//! 1. *Order*: the columns with the largest inputs first (act-order), as they find the most
//!    others free to make up for them. Scales are fixed before, so results lie in the stored
//!    order.
//! 2. *Blocks*: errors of finished blocks reach a new one by one product of matrices.
//! 3. *Damping*: a share of the mean diagonal is added, ten times as much each time that the
//!    factor fails, and reported.

use faer::Par;
use faer::linalg::triangular_solve::{
    solve_unit_lower_triangular_in_place, solve_unit_upper_triangular_in_place,
};
use faer::reborrow::ReborrowMut;

use super::{Chunk, Curvature};
use crate::linalg::{self, matrix, matrix_mut, multiply};
use crate::vector;

/// Columns that are finished together.
const WIDE: usize = 128;
/// Times that damping rises before the matrix is given up.
const TRIES: i32 = 7;

/// In which order columns are rounded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// As stored.
    Stored,
    /// By falling diagonal of H.
    Activation,
}

/// The factor of one H, in the order of work.
#[derive(Clone, Debug)]
pub struct Factor {
    /// Column of each step.
    pub order: Vec<usize>,
    /// U, steps × steps.
    unit: Vec<f32>,
    /// D by column: the curvature left when the later columns make up for a change.
    pub left: Vec<f32>,
    /// The diagonal of H by column.
    pub diagonal: Vec<f32>,
    /// What was added to the diagonal, as a share of its mean.
    pub damping: f32,
    /// Columns that no input reached.
    pub dead: usize,
}

impl Factor {
    /// Damps `h` (n × n) in place, by `damping` of its mean diagonal at least, and factors it.
    ///
    /// Dead columns, which no input reaches, get the mean as their diagonal, so that they are
    /// rounded by themselves. `None` where nothing but zeros reached the matrix, or no damping
    /// helps, as with numbers that are not finite.
    pub fn new(h: &mut [f32], n: usize, damping: f32, order: Order) -> Option<Factor> {
        let mean = (0..n).map(|i| f64::from(h[i * n + i])).sum::<f64>() / n as f64;
        let mean = mean as f32;
        if !(mean.is_finite() && mean > 0.0) {
            return None;
        }
        let mut dead = 0;
        for i in 0..n {
            if h[i * n + i] <= 0.0 {
                h[i * n + i] = mean;
                dead += 1;
            }
        }
        let mut steps: Vec<usize> = (0..n).collect();
        if order == Order::Activation {
            // Stable, so that equal columns stay in order.
            steps.sort_by(|a, b| h[b * n + b].total_cmp(&h[a * n + a]));
        }
        let mut added = 0.0;
        for attempt in 0..TRIES {
            let share = damping * 10f32.powi(attempt);
            for i in 0..n {
                h[i * n + i] += share * mean - added;
            }
            added = share * mean;
            if let Some(mut factor) = Factor::of(h, n, &steps) {
                (factor.damping, factor.dead) = (share, dead);
                return Some(factor);
            }
        }
        None
    }

    fn of(h: &[f32], n: usize, order: &[usize]) -> Option<Factor> {
        // Reversed, lower triangle.
        let mut l = vec![0.0; n * n];
        for (a, row) in l.chunks_exact_mut(n).enumerate() {
            let from = &h[order[n - 1 - a] * n..][..n];
            for (b, x) in row[..=a].iter_mut().enumerate() {
                *x = from[order[n - 1 - b]];
            }
        }
        if !linalg::cholesky(&mut l, n) {
            return None;
        }
        let mut left = vec![0.0; n];
        let mut diagonal = vec![0.0; n];
        for (step, &column) in order.iter().enumerate() {
            let d = l[(n - 1 - step) * (n + 1)];
            left[column] = d * d;
            diagonal[column] = h[column * (n + 1)];
        }
        // U[a][b] = L[n−1−a][n−1−b] / L[n−1−b][n−1−b]: both rows and columns turned round.
        l.reverse();
        let pivots: Vec<f32> = (0..n).map(|b| 1.0 / l[b * (n + 1)]).collect();
        for (a, row) in l.chunks_exact_mut(n).enumerate() {
            row[..=a].fill(0.0);
            for (x, pivot) in row[a + 1..].iter_mut().zip(&pivots[a + 1..]) {
                *x *= pivot;
            }
        }
        Some(Factor {
            order: order.to_vec(),
            unit: l,
            left,
            diagonal,
            damping: 0.0,
            dead: 0,
        })
    }
}

impl Factor {
    /// `w + share·asked·H⁻¹`, rows × n: weights that make of the inputs of H what `w` makes of
    /// inputs x that differ from them, where `asked` is `Σ w·(x − y)·yᵀ`.
    pub(super) fn pull(&self, w: &[f32], mut asked: Vec<f32>, share: f32) -> Vec<f32> {
        let n = self.order.len();
        let mut out = vec![0.0; w.len()];
        for (to, from) in out.chunks_exact_mut(n).zip(asked.chunks_exact(n)) {
            for (to, &column) in to.iter_mut().zip(&self.order) {
                *to = from[column];
            }
        }
        self.solve(&mut out);
        let rows = out.chunks_exact_mut(n).zip(w.chunks_exact(n));
        for ((out, w), x) in rows.zip(asked.chunks_exact_mut(n)) {
            x.copy_from_slice(out);
            for (x, &column) in x.iter().zip(&self.order) {
                out[column] = w[column] + share * x;
            }
        }
        out
    }

    /// `x = x·H⁻¹` for rows in the order of work.
    pub(super) fn solve(&self, x: &mut [f32]) {
        let n = self.order.len();
        let unit = matrix(&self.unit, n);
        let mut columns = matrix_mut(x, n).transpose_mut();
        solve_unit_upper_triangular_in_place(unit, columns.rb_mut(), Par::Seq);
        for row in x.chunks_exact_mut(n) {
            for (x, &column) in row.iter_mut().zip(&self.order) {
                *x /= self.left[column];
            }
        }
        let columns = matrix_mut(x, n).transpose_mut();
        solve_unit_lower_triangular_in_place(unit.transpose(), columns, Par::Seq);
    }
}

/// Rounds every row anew on the grids that its blocks have.
pub(super) fn compensate(chunk: &mut Chunk<'_>, curvature: &Curvature<'_>) {
    let (n, rows, f) = (chunk.n, chunk.rows(), curvature.factor);
    let mut errors = vec![0.0f32; rows * n];
    let mut asked = vec![0.0f32; rows * WIDE];
    let unit = matrix(&f.unit, n);
    for first in (0..n).step_by(WIDE) {
        let wide = WIDE.min(n - first);
        let asked = &mut asked[..rows * wide];
        if first == 0 {
            asked.fill(0.0);
        } else {
            multiply(
                matrix_mut(asked, wide),
                matrix(&errors, n).subcols(0, first),
                unit.submatrix(0, first, first, wide),
            );
        }
        for (r, asked) in asked.chunks_exact_mut(wide).enumerate() {
            let errors = &mut errors[r * n..][first..first + wide];
            vector::wide(
                #[inline(always)]
                || round_steps(chunk, f, (r, first), asked, errors),
            );
        }
    }
}

/// The steps from `first` on of row `r`; `asked` is what earlier errors add to the targets.
#[inline(always)]
fn round_steps(
    chunk: &mut Chunk<'_>,
    f: &Factor,
    (r, first): (usize, usize),
    asked: &mut [f32],
    errors: &mut [f32],
) {
    let (n, block) = (chunk.n, chunk.dtype.block_len());
    let (lo, hi) = chunk.grid.codes;
    let (w, blocks) = (
        &chunk.w[r * n..][..n],
        &mut chunk.blocks[r * chunk.per_row..][..chunk.per_row],
    );
    for k in 0..asked.len() {
        let column = f.order[first + k];
        let b = &mut blocks[column / block];
        let at = column % block;
        let step = b.d * f32::from(b.scale[at / 16]);
        let min = b.dmin * f32::from(b.min[at / 16]);
        let target = w[column] + asked[k];
        let code = if step == 0.0 {
            f32::from(b.q[at])
        } else {
            ((target + min) / step)
                .round_ties_even()
                .clamp(f32::from(lo), f32::from(hi))
        };
        b.q[at] = code as i8;
        let error = w[column] - (step * code - min);
        errors[k] = error;
        let later = &f.unit[(first + k) * n + first..][k + 1..asked.len()];
        for (asked, u) in asked[k + 1..].iter_mut().zip(later) {
            *asked += error * u;
        }
    }
}
