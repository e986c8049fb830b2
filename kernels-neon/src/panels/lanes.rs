//! A group of 32 weights of four rows times columns: what the instruction sets do differently.
//!
//! Pseudo-code, for quads t of four weights:
//!
//! ```text
//! sums[c][t / 4][r] += Σ w[t][4r + j] · x[c][4t + j]      j in 0..4
//! ```
//!
//! Deviations:
//!
//! 1. Where one scale serves the whole group, all quads are added to the first sum.
//! 2. `sdot` takes a quad of activations as a lane, for four rows at once.
//! 3. Without it, a quad is repeated four times, and products are added in 16 bits as long as
//!    they fit: a lane gets one product of each quad, so n quads fit while
//!    n · 127 · `MAX` ≤ 32,767.
//! 4. `smmla` multiplies two rows by two columns, eight weights each; two quads are woven into
//!    one register for that. A column without a partner uses `sdot`.

use super::formats::Format;
use crate::simd::*;

/// 32 codes of four rows: byte `4 · row + j` of register t is weight `4t + j`.
pub(crate) type Quads = [int8x16_t; 8];

/// Sums of the first and the last sixteen weights, a lane for each row; or of all and nothing.
pub(crate) type Sums = [int32x4_t; 2];

/// An instruction set. Columns' codes have |x| ≤ 127.
pub(crate) trait Lanes: Copy + 'static {
    /// Adds to the sums of each column.
    fn dots<F: Format, const C: usize>(
        w: &Quads,
        x: &[&[i8; 32]; C],
        sums: [Sums; C],
    ) -> [Sums; C];
}

/// Armv8.0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base;
/// With dot products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DotProd;
/// With matrix products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct I8mm;

impl Lanes for Base {
    #[inline(always)]
    fn dots<F: Format, const C: usize>(
        w: &Quads,
        x: &[&[i8; 32]; C],
        mut sums: [Sums; C],
    ) -> [Sums; C] {
        const {
            assert!(fits::<F>(2), "Q8_0's products of -128 are the largest");
            assert!(!F::SIXTEENS || fits::<F>(4), "sixteens are added at once");
        }
        for (x, sums) in x.iter().zip(&mut sums) {
            let (a, b) = (repeated(part(*x, 0)), repeated(part(*x, 16)));
            let [first, last, ..] = [&w[..4], &w[4..]];
            if F::SIXTEENS {
                *sums = [narrow::<F, 4>(first, &a, sums[0]), narrow::<F, 4>(last, &b, sums[1])];
            } else if fits::<F>(8) {
                let x = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]];
                sums[0] = narrow::<F, 8>(w, &x, sums[0]);
            } else if fits::<F>(4) {
                sums[0] = narrow::<F, 4>(last, &b, narrow::<F, 4>(first, &a, sums[0]));
            } else {
                let two = |w, x, sum| narrow::<F, 2>(w, x, sum);
                let sum = two(&w[2..4], &a[2..], two(&w[..2], &a[..2], sums[0]));
                sums[0] = two(&w[6..], &b[2..], two(&w[4..6], &b[..2], sum));
            }
        }
        sums
    }
}

/// Whether `n` products fit 16 bits: see deviation 3.
const fn fits<F: Format>(n: usize) -> bool {
    n as i32 * 127 * F::MAX <= 32767
}

/// Each quad of sixteen codes, four times.
#[inline(always)]
fn repeated(x: &[i8; 16]) -> [int8x16_t; 4] {
    let x = vreinterpretq_s32_s8(load_s8(x));
    [
        vdupq_laneq_s32::<0>(x),
        vdupq_laneq_s32::<1>(x),
        vdupq_laneq_s32::<2>(x),
        vdupq_laneq_s32::<3>(x),
    ]
    .map(vreinterpretq_s8_s32)
}

/// Adds the products of `N` quads, which fit 16 bits.
#[inline(always)]
fn narrow<F: Format, const N: usize>(w: &[int8x16_t], x: &[int8x16_t], sum: int32x4_t) -> int32x4_t {
    let mut low = vmull_s8(vget_low_s8(w[0]), vget_low_s8(x[0]));
    let mut high = vmull_high_s8(w[0], x[0]);
    for t in 1..N {
        low = vmlal_s8(low, vget_low_s8(w[t]), vget_low_s8(x[t]));
        high = vmlal_high_s8(high, w[t], x[t]);
    }
    if fits::<F>(2 * N) {
        vpadalq_s16(sum, vpaddq_s16(low, high))
    } else {
        vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
    }
}

impl Lanes for DotProd {
    #[inline(always)]
    fn dots<F: Format, const C: usize>(
        w: &Quads,
        x: &[&[i8; 32]; C],
        mut sums: [Sums; C],
    ) -> [Sums; C] {
        for (x, sums) in x.iter().zip(&mut sums) {
            let (a, b) = (load_s8(part(*x, 0)), load_s8(part(*x, 16)));
            let first = four(sums[0], &w[..4], a);
            *sums = if F::SIXTEENS {
                [first, four(sums[1], &w[4..], b)]
            } else {
                [four(first, &w[4..], b), sums[1]]
            };
        }
        sums
    }
}

/// Adds four quads.
#[inline(always)]
fn four(sum: int32x4_t, w: &[int8x16_t], x: int8x16_t) -> int32x4_t {
    let sum = sdot_lane::<0>(sum, w[0], x);
    let sum = sdot_lane::<1>(sum, w[1], x);
    let sum = sdot_lane::<2>(sum, w[2], x);
    sdot_lane::<3>(sum, w[3], x)
}

impl Lanes for I8mm {
    #[inline(always)]
    fn dots<F: Format, const C: usize>(
        w: &Quads,
        x: &[&[i8; 32]; C],
        mut sums: [Sums; C],
    ) -> [Sums; C] {
        if C % 2 == 1 {
            return DotProd::dots::<F, C>(w, x, sums);
        }
        let pairs = [woven(w[0], w[1]), woven(w[2], w[3]), woven(w[4], w[5]), woven(w[6], w[7])];
        for (x, sums) in x.as_chunks::<2>().0.iter().zip(sums.as_chunks_mut::<2>().0) {
            let first = two_columns(&pairs[..2], x, 0, [vdupq_n_s32(0); 2]);
            let last = if F::SIXTEENS {
                two_columns(&pairs[2..], x, 16, [vdupq_n_s32(0); 2])
            } else {
                first
            };
            let add = |sums: &mut [Sums; 2], k: usize, [a, b]: [int32x4_t; 2]| {
                sums[0][k] = vaddq_s32(sums[0][k], vuzp1q_s32(a, b));
                sums[1][k] = vaddq_s32(sums[1][k], vuzp2q_s32(a, b));
            };
            if F::SIXTEENS {
                add(sums, 0, first);
                add(sums, 1, last);
            } else {
                add(sums, 0, two_columns(&pairs[2..], x, 16, first));
            }
        }
        sums
    }
}

/// Eight weights of rows 0 and 1, and of rows 2 and 3, from two quads.
#[inline(always)]
fn woven(a: int8x16_t, b: int8x16_t) -> [int8x16_t; 2] {
    let (a, b) = (vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b));
    [vzip1q_s32(a, b), vzip2q_s32(a, b)].map(vreinterpretq_s8_s32)
}

/// Sixteen weights, from `at` on, of two columns: sums of rows 0 and 1, and of rows 2 and 3,
/// each [row, column] by [row, column].
#[inline(always)]
fn two_columns(
    w: &[[int8x16_t; 2]],
    x: &[&[i8; 32]; 2],
    at: usize,
    sums: [int32x4_t; 2],
) -> [int32x4_t; 2] {
    let [a, b] = x.map(|x| vreinterpretq_s64_s8(load_s8(part(x, at))));
    let [low, high] = [vtrn1q_s64(a, b), vtrn2q_s64(a, b)].map(vreinterpretq_s8_s64);
    let add = |sum, i: usize| smmla(smmla(sum, w[0][i], low), w[1][i], high);
    [add(sums[0], 0), add(sums[1], 1)]
}
