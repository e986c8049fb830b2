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
    /// Adds to the sums of each four rows and column; either may be one.
    fn dots<F: Format, const R: usize, const C: usize>(
        w: &[Quads; R],
        x: &[&[i8; 32]; C],
        sums: [[Sums; C]; R],
    ) -> [[Sums; C]; R];
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
    fn dots<F: Format, const R: usize, const C: usize>(
        w: &[Quads; R],
        x: &[&[i8; 32]; C],
        mut sums: [[Sums; C]; R],
    ) -> [[Sums; C]; R] {
        const {
            assert!(fits::<F>(2), "Q8_0's products of -128 are the largest");
            assert!(!F::SIXTEENS || fits::<F>(4), "sixteens are added at once");
        }
        for c in 0..C {
            let (a, b) = (repeated(part(x[c], 0)), repeated(part(x[c], 16)));
            for r in 0..R {
                sums[r][c] = narrow_group::<F>(&w[r], &a, &b, sums[r][c]);
            }
        }
        sums
    }
}

/// One group of four rows and a column, whose sixteens are `a` and `b`.
#[inline(always)]
fn narrow_group<F: Format>(
    w: &Quads,
    a: &[int8x16_t; 4],
    b: &[int8x16_t; 4],
    [sum, last]: Sums,
) -> Sums {
    if F::SIXTEENS {
        return [
            narrow::<F, 4>(&w[..4], a, sum),
            narrow::<F, 4>(&w[4..], b, last),
        ];
    }
    if fits::<F>(8) {
        let x = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]];
        return [narrow::<F, 8>(w, &x, sum), last];
    }
    let mut sums = [vdupq_n_s32(0); 2];
    if fits::<F>(4) {
        pairs(&mut sums, products::<4>(&w[..4], a));
        pairs(&mut sums, products::<4>(&w[4..], b));
    } else {
        pairs(&mut sums, products::<2>(&w[..2], &a[..2]));
        pairs(&mut sums, products::<2>(&w[2..4], &a[2..]));
        pairs(&mut sums, products::<2>(&w[4..6], &b[..2]));
        pairs(&mut sums, products::<2>(&w[6..], &b[2..]));
    }
    [vaddq_s32(sum, vpaddq_s32(sums[0], sums[1])), last]
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
        vreinterpretq_s8_s32(vdupq_laneq_s32::<0>(x)),
        vreinterpretq_s8_s32(vdupq_laneq_s32::<1>(x)),
        vreinterpretq_s8_s32(vdupq_laneq_s32::<2>(x)),
        vreinterpretq_s8_s32(vdupq_laneq_s32::<3>(x)),
    ]
}

/// The products of `N` quads, which fit 16 bits: of rows 0 and 1, and of rows 2 and 3.
#[inline(always)]
fn products<const N: usize>(w: &[int8x16_t], x: &[int8x16_t]) -> [int16x8_t; 2] {
    let mut low = vmull_s8(vget_low_s8(w[0]), vget_low_s8(x[0]));
    let mut high = vmull_high_s8(w[0], x[0]);
    for t in 1..N {
        low = vmlal_s8(low, vget_low_s8(w[t]), vget_low_s8(x[t]));
        high = vmlal_high_s8(high, w[t], x[t]);
    }
    [low, high]
}

/// Adds neighbours to 32-bit sums.
#[inline(always)]
fn pairs(sums: &mut [int32x4_t; 2], products: [int16x8_t; 2]) {
    sums[0] = vpadalq_s16(sums[0], products[0]);
    sums[1] = vpadalq_s16(sums[1], products[1]);
}

/// Adds the products of `N` quads to the sums of four rows.
#[inline(always)]
fn narrow<F: Format, const N: usize>(
    w: &[int8x16_t],
    x: &[int8x16_t],
    sum: int32x4_t,
) -> int32x4_t {
    let [low, high] = products::<N>(w, x);
    if fits::<F>(2 * N) {
        vpadalq_s16(sum, vpaddq_s16(low, high))
    } else {
        vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
    }
}

impl Lanes for DotProd {
    #[inline(always)]
    fn dots<F: Format, const R: usize, const C: usize>(
        w: &[Quads; R],
        x: &[&[i8; 32]; C],
        mut sums: [[Sums; C]; R],
    ) -> [[Sums; C]; R] {
        let last = usize::from(F::SIXTEENS);
        four::<0, R, C>(w, x, 0, &mut sums);
        four::<4, R, C>(w, x, last, &mut sums);
        sums
    }
}

/// Adds the quads `T` … `T + 3` to the k-th sums. Sums take turns: an addition waits for the
/// last one to the same sum, on small cores for four cycles.
#[inline(always)]
fn four<const T: usize, const R: usize, const C: usize>(
    w: &[Quads; R],
    x: &[&[i8; 32]; C],
    k: usize,
    sums: &mut [[Sums; C]; R],
) {
    let mut codes = [load_s8(part(x[0], 4 * T)); C];
    for c in 1..C {
        codes[c] = load_s8(part(x[c], 4 * T));
    }
    quad::<0, R, C>(w, T, &codes, k, sums);
    quad::<1, R, C>(w, T + 1, &codes, k, sums);
    quad::<2, R, C>(w, T + 2, &codes, k, sums);
    quad::<3, R, C>(w, T + 3, &codes, k, sums);
}

/// Adds quad `t`, which is lane `LANE` of the activations.
#[inline(always)]
fn quad<const LANE: usize, const R: usize, const C: usize>(
    w: &[Quads; R],
    t: usize,
    x: &[int8x16_t; C],
    k: usize,
    sums: &mut [[Sums; C]; R],
) {
    for c in 0..C {
        for r in 0..R {
            sums[r][c][k] = sdot_lane::<LANE>(sums[r][c][k], w[r][t], x[c]);
        }
    }
}

impl Lanes for I8mm {
    #[inline(always)]
    fn dots<F: Format, const R: usize, const C: usize>(
        w: &[Quads; R],
        x: &[&[i8; 32]; C],
        mut sums: [[Sums; C]; R],
    ) -> [[Sums; C]; R] {
        if C % 2 == 1 {
            return DotProd::dots::<F, R, C>(w, x, sums);
        }
        for r in 0..R {
            let pairs = [
                woven(w[r][0], w[r][1]),
                woven(w[r][2], w[r][3]),
                woven(w[r][4], w[r][5]),
                woven(w[r][6], w[r][7]),
            ];
            for (x, sums) in x
                .as_chunks::<2>()
                .0
                .iter()
                .zip(sums[r].as_chunks_mut::<2>().0)
            {
                let zero = [vdupq_n_s32(0); 2];
                let first = two_columns(&pairs[..2], x, 0, zero);
                if F::SIXTEENS {
                    add(sums, 0, first);
                    add(sums, 1, two_columns(&pairs[2..], x, 16, zero));
                } else {
                    add(sums, 0, two_columns(&pairs[2..], x, 16, first));
                }
            }
        }
        sums
    }
}

/// Eight weights of rows 0 and 1, and of rows 2 and 3, from two quads.
#[inline(always)]
fn woven(a: int8x16_t, b: int8x16_t) -> [int8x16_t; 2] {
    let (a, b) = (vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b));
    let (low, high) = (vzip1q_s32(a, b), vzip2q_s32(a, b));
    [vreinterpretq_s8_s32(low), vreinterpretq_s8_s32(high)]
}

/// Adds [row, column] by [row, column] to the k-th sums of two columns.
#[inline(always)]
fn add(sums: &mut [Sums; 2], k: usize, [a, b]: [int32x4_t; 2]) {
    sums[0][k] = vaddq_s32(sums[0][k], vuzp1q_s32(a, b));
    sums[1][k] = vaddq_s32(sums[1][k], vuzp2q_s32(a, b));
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
    let a = vreinterpretq_s64_s8(load_s8(part(x[0], at)));
    let b = vreinterpretq_s64_s8(load_s8(part(x[1], at)));
    let low = vreinterpretq_s8_s64(vtrn1q_s64(a, b));
    let high = vreinterpretq_s8_s64(vtrn2q_s64(a, b));
    [
        smmla(smmla(sums[0], w[0][0], low), w[1][0], high),
        smmla(smmla(sums[1], w[0][1], low), w[1][1], high),
    ]
}
