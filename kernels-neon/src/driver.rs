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

use myq_blocks::{Column, DType, Rows, tail};

use crate::dot::{Codes, Dot};
use crate::simd::*;

/// 128 activations.
#[derive(Clone, Copy)]
pub(crate) struct Acts<'a> {
    /// Codes.
    pub(crate) q: &'a [i8; 128],
    /// Scale of each 32.
    pub(crate) d: &'a [f32; 4],
    /// Sum of each 16.
    pub(crate) sums: &'a [i16; 8],
}

impl Acts<'_> {
    /// Scales of the four groups.
    #[inline(always)]
    pub(crate) fn scales(&self) -> float32x4_t {
        load_f32(self.d)
    }

    /// Sums of the four groups.
    #[inline(always)]
    pub(crate) fn group_sums(&self) -> int32x4_t {
        vpaddlq_s16(load_s16(self.sums))
    }
}

/// A running total of one row and column.
pub(crate) trait Total: Copy {
    /// The start.
    fn zero() -> Self;
    /// The end.
    fn value(self) -> f32;
}

impl Total for float32x4_t {
    #[inline(always)]
    fn zero() -> float32x4_t {
        vdupq_n_f32(0.0)
    }

    #[inline(always)]
    fn value(self) -> f32 {
        vaddvq_f32(self)
    }
}

/// How one format is stored and added up.
pub(crate) trait Format: Copy {
    /// Units of 128 weights in a step.
    const UNITS: usize;
    /// A view of one step of a row.
    type Step<'a>: Copy;
    /// Owns the padded step that ends a row.
    type Tail;
    /// What all units of a step need: decoded scales.
    type Head;
    /// See [`Total`].
    type Sum: Total;

    /// Step `i` of a row.
    fn step<'a>(&self, row: &'a [u8], cols: usize, i: usize) -> Self::Step<'a>;
    /// The incomplete step `i` of a row, padded.
    fn tail(&self, row: &[u8], cols: usize, i: usize) -> Self::Tail;
    /// The view of a padded step.
    fn view(tail: &Self::Tail) -> Self::Step<'_>;
    /// Decodes scales.
    fn head(step: Self::Step<'_>) -> Self::Head;
    /// Unpacks the codes of a unit.
    fn codes(step: Self::Step<'_>, unit: usize) -> Codes;
    /// Adds a unit.
    fn add<D: Dot>(head: &Self::Head, unit: usize, w: &Codes, x: Acts<'_>, sum: Self::Sum) -> Self::Sum;
}

/// The part of [`Format`] that is the same for all formats whose blocks follow each other:
/// `stored!(format, bytes of a step, weights of a step)`.
macro_rules! stored {
    ($dtype:expr, $bytes:expr, $weights:literal) => {
        const UNITS: usize = $weights / 128;
        type Step<'a> = &'a [u8; $bytes];
        type Tail = [u8; $bytes];

        #[inline(always)]
        fn step<'a>(&self, row: &'a [u8], _: usize, i: usize) -> Self::Step<'a> {
            $crate::simd::part(row, i * $bytes)
        }

        fn tail(&self, row: &[u8], cols: usize, i: usize) -> Self::Tail {
            let mut out = [0; $bytes];
            $crate::driver::pad($dtype, &row[i * $bytes..], cols % $weights, &mut out);
            out
        }

        #[inline(always)]
        fn view(tail: &Self::Tail) -> Self::Step<'_> {
            tail
        }
    };
}
pub(crate) use stored;

/// Makes a whole step of the `n` weights that end a row; `out` is zero.
pub(crate) fn pad(dtype: DType, rest: &[u8], n: usize, out: &mut [u8]) {
    if dtype.is_super() {
        tail::expand(dtype, rest, n, out);
    } else {
        out[..rest.len()].copy_from_slice(rest);
    }
}

/// Dot products of some rows and some columns.
pub(crate) trait Tile {
    /// `result[r][c] = rows[r] · columns[c]`.
    fn run<const R: usize, const C: usize>(&self, rows: [&[u8]; R], columns: &[Column<'_>; C]) -> [[f32; C]; R];
}

/// Covers `w · columns` with tiles.
#[inline(always)]
pub(crate) fn sweep<T: Tile>(tile: &T, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
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
    fn run<const R: usize, const C: usize>(&self, rows: [&[u8]; R], columns: &[Column<'_>; C]) -> [[f32; C]; R] {
        let cols = columns[0].x.len();
        let whole = cols / (128 * F::UNITS);
        let tails = (!cols.is_multiple_of(128 * F::UNITS)).then(|| rows.map(|row| self.0.tail(row, cols, whole)));
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
            let x = Acts { q: part(column.q, 128 * at), d: part(column.d, 4 * at), sums: part(column.sums, 8 * at) };
            sums[r][c] = F::add::<D>(&heads[r], unit, &w, x, sums[r][c]);
        }
    }
}
