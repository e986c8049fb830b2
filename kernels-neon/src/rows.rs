//! Rows times columns in tiles: what all formats share.
//!
//! Pseudo-code:
//!
//! ```text
//! for rows:
//!     for columns:
//!         for steps of the row (128 or 256 weights):
//!             decode scales
//!             for units of 128 weights:
//!                 unpack codes; total += dot products · scales
//! ```
//!
//! Deviations:
//!
//! 1. Four, two or one column in a tile, so that a unit is unpacked once for all of them.
//! 2. A single column, the case of decoding, takes two rows in a tile, which share the
//!    loads of activations and hide each other's latencies.
//! 3. Totals stay vectors until the row ends.
//! 4. What ends a row is copied into a whole step with zero scales, so that there is one
//!    path for all lengths.

use std::marker::PhantomData;

use myq_blocks::{Column, Rows};

use crate::dot::Dot;
use crate::format::{Acts, Format, Total};
use crate::simd::*;

/// Dot products of some rows and some columns.
pub(crate) trait Tile {
    /// `result[r][c] = rows[r] · columns[c]`.
    fn run<const R: usize, const C: usize>(
        &self,
        rows: [&[u8]; R],
        columns: &[Column<'_>; C],
    ) -> [[f32; C]; R];
}

/// Covers `w · columns` with tiles.
#[inline(always)]
pub(crate) fn sweep<T: Tile>(
    tile: &T,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    if let [column] = columns {
        let column = std::array::from_ref(column);
        let pairs = w.rows() / 2;
        for p in 0..pairs {
            let [a, b] = tile.run([w.row(2 * p), w.row(2 * p + 1)], column);
            out[0][2 * p] = a[0];
            out[0][2 * p + 1] = b[0];
        }
        if w.rows() % 2 == 1 {
            let [last] = tile.run([w.row(2 * pairs)], column);
            out[0][2 * pairs] = last[0];
        }
        return;
    }
    for r in 0..w.rows() {
        let mut from = 0;
        let mut put = |values: &[f32]| {
            for (out, v) in out[from..].iter_mut().zip(values) {
                out[r] = *v;
            }
            from += values.len();
        };
        let (fours, rest) = columns.as_chunks::<4>();
        for four in fours {
            let [values] = tile.run([w.row(r)], four);
            put(&values);
        }
        let (twos, rest) = rest.as_chunks::<2>();
        for two in twos {
            let [values] = tile.run([w.row(r)], two);
            put(&values);
        }
        for one in rest {
            let [values] = tile.run([w.row(r)], std::array::from_ref(one));
            put(&values);
        }
    }
}

/// The tiles of a format with codes, multiplied by `D`.
pub(crate) struct Coded<F, D>(pub(crate) F, pub(crate) PhantomData<D>);

impl<F: Format, D: Dot> Tile for Coded<F, D> {
    #[inline(always)]
    fn run<const R: usize, const C: usize>(
        &self,
        rows: [&[u8]; R],
        columns: &[Column<'_>; C],
    ) -> [[f32; C]; R] {
        let cols = columns[0].x.len();
        let whole = cols / (128 * F::UNITS);
        let tails = (!cols.is_multiple_of(128 * F::UNITS))
            .then(|| rows.map(|row| self.0.tail(row, cols, whole)));
        let mut sums = [[F::Sum::zero(); C]; R];
        for i in 0..whole + usize::from(tails.is_some()) {
            // One copy of the code for both kinds of step.
            let steps = match &tails {
                Some(tails) if i == whole => tails.each_ref().map(F::view),
                _ => rows.map(|row| self.0.step(row, cols, i)),
            };
            let heads = steps.map(F::head);
            // Written out, so that the unit is a constant in each.
            add_unit::<F, D, R, C>(&steps, &heads, columns, (i, 0), &mut sums);
            if F::UNITS == 2 {
                add_unit::<F, D, R, C>(&steps, &heads, columns, (i, 1), &mut sums);
            }
        }
        sums.map(|row| row.map(F::Sum::value))
    }
}

/// Adds unit `unit` of step `step`.
#[inline(always)]
fn add_unit<F: Format, D: Dot, const R: usize, const C: usize>(
    steps: &[F::Step<'_>; R],
    heads: &[F::Head; R],
    columns: &[Column<'_>; C],
    (step, unit): (usize, usize),
    sums: &mut [[F::Sum; C]; R],
) {
    let at = step * F::UNITS + unit;
    for r in 0..R {
        let w = F::codes(steps[r], unit);
        for c in 0..C {
            let column = &columns[c];
            let x = Acts {
                q: part(column.q, 128 * at),
                d: part(column.d, 4 * at),
                sums: part(column.sums, 8 * at),
            };
            sums[r][c] = F::add::<D>(&heads[r], unit, &w, x, sums[r][c]);
        }
    }
}
