//! F32, F16 and BF16 weights times fp32 activations.
//!
//! Pseudo-code: `sum = Σ w[i] · x[i]`.
//!
//! Deviations:
//!
//! 1. Four partial sums of four lanes, so that multiply-adds do not wait for each other.
//! 2. The last weights, fewer than 16, are padded with zeros.

use std::marker::PhantomData;

use myq_blocks::Column;

use crate::rows::Tile;
use crate::simd::*;

/// A stored float type.
pub(crate) trait Element {
    /// Bytes of a value.
    const BYTES: usize;
    /// Sixteen values from `16 · BYTES` bytes.
    fn sixteen(b: &[u8]) -> [float32x4_t; 4];
}

/// IEEE single precision.
pub(crate) struct F32;
/// IEEE half precision.
pub(crate) struct F16;
/// Upper half of single precision.
pub(crate) struct BF16;

impl Element for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    fn sixteen(b: &[u8]) -> [float32x4_t; 4] {
        let four = |i: usize| vreinterpretq_f32_u8(bytes(b, 16 * i));
        [four(0), four(1), four(2), four(3)]
    }
}

/// Sixteen 16-bit values, four to a vector.
#[inline(always)]
fn quarters(b: &[u8]) -> [uint16x4_t; 4] {
    let (lo, hi) = (
        vreinterpretq_u16_u8(bytes(b, 0)),
        vreinterpretq_u16_u8(bytes(b, 16)),
    );
    [
        vget_low_u16(lo),
        vget_high_u16(lo),
        vget_low_u16(hi),
        vget_high_u16(hi),
    ]
}

impl Element for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn sixteen(b: &[u8]) -> [float32x4_t; 4] {
        quarters(b).map(|v| vcvt_f32_f16(vreinterpret_f16_u16(v)))
    }
}

impl Element for BF16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn sixteen(b: &[u8]) -> [float32x4_t; 4] {
        quarters(b).map(|v| vreinterpretq_f32_u32(vshll_n_u16::<16>(v)))
    }
}

/// The tiles of a float format.
pub(crate) struct Floats<E>(pub(crate) PhantomData<E>);

impl<E: Element> Tile for Floats<E> {
    #[inline(always)]
    fn run<const R: usize, const C: usize>(
        &self,
        rows: [&[u8]; R],
        columns: &[Column<'_>; C],
    ) -> [[f32; C]; R] {
        let cols = columns[0].x.len();
        let whole = cols / 16;
        let mut sums = [[[vdupq_n_f32(0.0); 4]; C]; R];
        for i in 0..whole {
            let w = rows.map(|row| E::sixteen(&row[16 * E::BYTES * i..]));
            for c in 0..C {
                let x: &[f32; 16] = part(columns[c].x, 16 * i);
                for r in 0..R {
                    add(&mut sums[r][c], &w[r], x);
                }
            }
        }
        let n = cols % 16;
        if n > 0 {
            for r in 0..R {
                let mut b = [0; 64];
                b[..n * E::BYTES].copy_from_slice(&rows[r][16 * E::BYTES * whole..]);
                let w = E::sixteen(&b);
                for c in 0..C {
                    let mut x = [0.0; 16];
                    x[..n].copy_from_slice(&columns[c].x[16 * whole..]);
                    add(&mut sums[r][c], &w, &x);
                }
            }
        }
        sums.map(|row| row.map(total))
    }
}

/// Adds sixteen products.
#[inline(always)]
pub(crate) fn add(sums: &mut [float32x4_t; 4], w: &[float32x4_t; 4], x: &[f32; 16]) {
    for k in 0..4 {
        sums[k] = vfmaq_f32(sums[k], w[k], load_f32(part(x, 4 * k)));
    }
}

/// The sum of all lanes.
#[inline(always)]
pub(crate) fn total(s: [float32x4_t; 4]) -> f32 {
    vaddvq_f32(vaddq_f32(vaddq_f32(s[0], s[1]), vaddq_f32(s[2], s[3])))
}
