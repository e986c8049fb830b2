//! From a matrix and the second moments of its inputs to blocks with the least output error.
//!
//! A row `w` of a matrix meets inputs `x`; storing `ŵ` costs `(w − ŵ)ᵀ H (w − ŵ)` with
//! `H = Σ x·xᵀ`. Rows are independent of each other and share H.
//!
//! 1. *Scales*: every block's scales and minima by weighted search, each column's weight the
//!    curvature that is left when all later columns are free to make up for it.
//! 2. *Compensation* (`order.rs`: GPTQ, arXiv 2210.17323, in the form of LDLQ, arXiv 2307.13304):
//!    column by column, a column's rounding takes up what the errors of the earlier ones ask for.
//! 3. *Descent* (`descend.rs`): codes, sub-scales, minima and super-scales one after the other,
//!    each to its best value while all others stay, on the exact error.

mod descend;
mod order;

use std::ops::Range;

use half::f16;
use myq_blocks::DType;
use myq_blocks::decode::Decoded;
use myq_blocks::encode::{EncodeError, Grid, Method, RowReport, fit_block, store_block};
use myq_blocks::tail;
use rayon::prelude::*;

use crate::linalg::{matrix, matrix_mut, multiply};

pub use order::{Factor, Order};

/// Rows that are solved together in one thread.
const ROWS: usize = 64;

/// How codes are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    /// How scales are chosen at first.
    pub scales: Method,
    /// Whether errors of earlier columns are made up for by later ones.
    pub compensate: bool,
    /// Sweeps of descent over the whole row.
    pub sweeps: usize,
}

/// What the inputs of a matrix tell.
pub struct Curvature<'a> {
    /// Weights in a row.
    pub n: usize,
    /// Second moments `n × n`, symmetric, damped.
    pub h: &'a [f32],
    /// Its factor and the order of columns.
    pub factor: &'a Factor,
    /// What the inputs lack, and which share of it the result makes up for.
    pub pull: Option<(Cross<'a>, f32)>,
}

/// What inputs y lack in comparison to others x.
#[derive(Clone, Copy, Debug)]
pub enum Cross<'a> {
    /// `Σ (x − y)·yᵀ`, n × n.
    Inputs(&'a [f32]),
    /// `Σ W(x − y)·yᵀ`, rows × n, of one matrix W.
    Outputs(&'a [f32]),
}

impl Cross<'_> {
    /// `Σ w·(x − y)·yᵀ` for the rows `w` from row `first` on.
    fn rows(&self, first: usize, w: &[f32], n: usize) -> Vec<f32> {
        match self {
            Cross::Inputs(cross) => {
                let mut asked = vec![0.0; w.len()];
                multiply(matrix_mut(&mut asked, n), matrix(w, n), matrix(cross, n));
                asked
            }
            Cross::Outputs(cross) => cross[first * n..][..w.len()].to_vec(),
        }
    }
}

/// A quantised matrix.
#[derive(Clone, Debug, Default)]
pub struct Solution {
    /// Rows in the format, plain layout.
    pub bytes: Vec<u8>,
    /// Output error `Σ (w − ŵ)ᵀH(w − ŵ)` of each row.
    pub loss: Vec<f64>,
    /// Clipped weights and columns without importance.
    pub report: RowReport,
}

/// Quantises the rows `w` of `n` weights, on all of rayon's threads; `done` hears of rows.
///
/// # Errors
/// Those of [`fit_block`].
pub fn solve(
    dtype: DType,
    effort: Effort,
    curvature: &Curvature<'_>,
    w: &[f32],
    done: &(dyn Fn(usize) + Sync),
) -> Result<Solution, EncodeError> {
    let n = curvature.n;
    let columns = EncodeError::Columns { dtype, cols: n };
    let grid = Grid::of(dtype).ok_or(columns)?;
    let row_bytes = dtype.row_bytes(n).ok_or(columns)?;
    let rows = w.len() / n;
    let mut bytes = vec![0; rows * row_bytes];
    let parts: Vec<(Vec<f64>, RowReport)> = bytes
        .par_chunks_mut(ROWS * row_bytes)
        .zip(w.par_chunks(ROWS * n))
        .enumerate()
        .map(|(i, (out, w))| {
            let pulled = curvature.pull.map(|(cross, share)| {
                let asked = cross.rows(i * ROWS, w, n);
                curvature.factor.pull(w, asked, share)
            });
            let w = pulled.as_deref().unwrap_or(w);
            let mut chunk = Chunk::fit(dtype, grid, effort, curvature, w)?;
            if effort.compensate {
                order::compensate(&mut chunk, curvature);
            }
            let mut gradient = chunk.gradient(curvature.h);
            for _ in 0..effort.sweeps {
                descend::sweep(&mut chunk, curvature.h, &mut gradient);
            }
            chunk.store(out);
            done(w.len() / n);
            Ok((chunk.losses(&gradient), chunk.report))
        })
        .collect::<Result<_, _>>()?;
    let mut solution = Solution {
        bytes,
        ..Solution::default()
    };
    for (loss, report) in parts {
        solution.loss.extend(loss);
        solution.report += report;
    }
    Ok(solution)
}

/// Some rows in work.
struct Chunk<'a> {
    dtype: DType,
    grid: Grid,
    n: usize,
    /// The weights wanted, rows × n.
    w: &'a [f32],
    /// The blocks of all rows.
    blocks: Vec<Decoded>,
    per_row: usize,
    report: RowReport,
}

impl<'a> Chunk<'a> {
    fn fit(
        dtype: DType,
        grid: Grid,
        effort: Effort,
        curvature: &Curvature<'_>,
        w: &'a [f32],
    ) -> Result<Chunk<'a>, EncodeError> {
        let n = curvature.n;
        let block = dtype.block_len();
        let importance = if effort.compensate {
            &curvature.factor.left
        } else {
            &curvature.factor.diagonal
        };
        let mut blocks = Vec::with_capacity(w.len().div_ceil(block));
        let mut report = RowReport::default();
        for row in w.chunks_exact(n) {
            for (x, weight) in row.chunks(block).zip(importance.chunks(block)) {
                let (fitted, r) = fit_block(dtype, effort.scales, x, Some(weight))?;
                blocks.push(fitted);
                report += r;
            }
        }
        Ok(Chunk {
            dtype,
            grid,
            n,
            w,
            blocks,
            per_row: n.div_ceil(block),
            report,
        })
    }

    fn rows(&self) -> usize {
        self.w.len() / self.n
    }

    /// Columns of block `b`.
    fn columns(&self, b: usize) -> Range<usize> {
        let block = self.dtype.block_len();
        b * block..((b + 1) * block).min(self.n)
    }

    /// `w − ŵ`, rows × n.
    fn errors(&self) -> Vec<f32> {
        let mut e = vec![0.0; self.w.len()];
        let rows = e.chunks_exact_mut(self.n).zip(self.w.chunks_exact(self.n));
        for ((e, w), blocks) in rows.zip(self.blocks.chunks_exact(self.per_row)) {
            let parts = e.chunks_mut(self.dtype.block_len());
            for (e, block) in parts.zip(blocks) {
                block.dequantize(e);
            }
            e.iter_mut().zip(w).for_each(|(e, w)| *e = w - *e);
        }
        e
    }

    /// `(w − ŵ)·H`, rows × n: half the fall of the error as a stored weight rises.
    fn gradient(&self, h: &[f32]) -> Vec<f32> {
        let mut g = vec![0.0; self.w.len()];
        let e = self.errors();
        multiply(
            matrix_mut(&mut g, self.n),
            matrix(&e, self.n),
            matrix(h, self.n),
        );
        g
    }

    /// Error of each row.
    fn losses(&self, gradient: &[f32]) -> Vec<f64> {
        let e = self.errors();
        let dot = |(a, b): (&[f32], &[f32])| -> f64 {
            a.iter()
                .zip(b)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum()
        };
        let rows = e.chunks_exact(self.n).zip(gradient.chunks_exact(self.n));
        rows.map(dot).map(|l| l.max(0.0)).collect()
    }

    fn store(&self, out: &mut [u8]) {
        let facts = self.dtype.facts().expect("a block format, by Grid::of");
        let row_bytes = out.len() / self.rows();
        let mut whole = [0; tail::MAX_BLOCK];
        let whole = &mut whole[..facts.bytes];
        let rows = out.chunks_exact_mut(row_bytes);
        for (out, blocks) in rows.zip(self.blocks.chunks_exact(self.per_row)) {
            for (b, (out, block)) in out.chunks_mut(facts.bytes).zip(blocks).enumerate() {
                let len = self.columns(b).len();
                if len == facts.block {
                    store_block(self.dtype, block, out);
                } else {
                    store_block(self.dtype, block, whole);
                    tail::compact(self.dtype, whole, len, out);
                }
            }
        }
    }
}

/// Nearest value that fp16 holds.
fn half(x: f32) -> f32 {
    f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32()
}

#[cfg(test)]
mod tests;
