//! What a format says about its bytes: the contract between formats and `rows`.
//!
//! A *unit* is 128 weights: eight registers of codes, four groups of 32 that share an
//! activation scale. A *step* is what a format decodes at once: one unit or two.

use myq_blocks::{DType, tail};

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
    fn add<D: Dot>(
        head: &Self::Head,
        unit: usize,
        w: &Codes,
        x: Acts<'_>,
        sum: Self::Sum,
    ) -> Self::Sum;
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
            $crate::format::pad($dtype, &row[i * $bytes..], cols % $weights, &mut out);
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
