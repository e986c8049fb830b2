//! Codes times activations: what the instruction sets do differently.
//!
//! Pseudo-code, for quads t of four weights:
//!
//! ```text
//! one column:   sums[r] += Σ w[t][4r + j] · x[4t + j]           j in 0..4
//! four columns: sums[r][c] += Σ w[t][4r + j] · x[c][4t + j]
//! ```
//!
//! Deviations:
//!
//! 1. Where one scale serves the whole group, all quads are added to the first sum.
//! 2. `sdot` takes a quad of activations as a lane, for four rows at once.
//! 3. Without it, a quad is repeated four times, and products are added in 16 bits as long as
//!    they fit: a lane gets one product of each quad, so n quads fit while
//!    n · 127 · `MAX` ≤ 32,767.
//! 4. `smmla` multiplies two rows by two columns, eight weights each: codes of two quads, and of
//!    two columns, are woven into one register. A single column uses `sdot`.

use super::formats::Format;
use crate::simd::*;

/// 32 codes of four rows: byte `4 · row + j` of register t is weight `4t + j`.
pub(crate) type Quads = [int8x16_t; 8];

/// Sums of the first and the last sixteen weights, a lane for each row; or of all and nothing.
pub(crate) type Sums = [int32x4_t; 2];

/// Eight rows by four columns. Vector i has rows' scales i / n and columns' scales i % n, where
/// there are n = 8 / [`Lanes::ROWS`] of the latter.
pub(crate) type Block<T> = [T; 8];

/// Sixteen weights of eight rows, woven.
pub(crate) type Codes = [int8x16_t; 8];

/// An instruction set. Columns' codes have |x| ≤ 127.
pub(crate) trait Lanes: Copy + 'static {
    /// Vectors in which scales of eight rows are for a [`Block`].
    const ROWS: usize = 2;
    /// Whether rows and columns are woven.
    const WOVEN: bool = false;

    /// Adds the products of eight rows and one column to the sums of the rows' halves.
    fn dots<F: Format>(w: &[Quads; 2], x: &[i8; 32], sums: [Sums; 2]) -> [Sums; 2];

    /// Sixteen weights of eight rows, from quads 0 to 3 of both halves.
    #[inline(always)]
    fn woven_rows(w: [[int8x16_t; 4]; 2]) -> Codes {
        let [a, b] = w;
        [a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]]
    }

    /// Sixteen weights of four columns.
    #[inline(always)]
    fn woven_columns(x: [int8x16_t; 4]) -> [int8x16_t; 4] {
        x
    }

    /// Adds the products of sixteen weights.
    fn sixteen<F: Format>(
        w: &Codes,
        x: &[int8x16_t; 4],
        sums: Block<int32x4_t>,
    ) -> Block<int32x4_t>;

    /// Scales of eight rows, [`Lanes::ROWS`] vectors.
    #[inline(always)]
    fn rows([a, b]: [float32x4_t; 2]) -> [float32x4_t; 4] {
        [a, b, a, b]
    }

    /// Scales of four columns, for [`Lanes::times`] and [`Lanes::added`].
    #[inline(always)]
    fn columns(x: float32x4_t) -> [float32x4_t; 2] {
        [x, x]
    }

    /// Vector i of a block times columns' scales; `column` is i % n.
    #[inline(always)]
    fn times(v: float32x4_t, x: &[float32x4_t; 2], column: usize) -> float32x4_t {
        match column {
            0 => vmulq_laneq_f32::<0>(v, x[0]),
            1 => vmulq_laneq_f32::<1>(v, x[0]),
            2 => vmulq_laneq_f32::<2>(v, x[0]),
            _ => vmulq_laneq_f32::<3>(v, x[0]),
        }
    }

    /// `total + v · x`, as [`Lanes::times`], rounded once.
    #[inline(always)]
    fn added(
        total: float32x4_t,
        v: float32x4_t,
        x: &[float32x4_t; 2],
        column: usize,
    ) -> float32x4_t {
        match column {
            0 => vfmaq_laneq_f32::<0>(total, v, x[0]),
            1 => vfmaq_laneq_f32::<1>(total, v, x[0]),
            2 => vfmaq_laneq_f32::<2>(total, v, x[0]),
            _ => vfmaq_laneq_f32::<3>(total, v, x[0]),
        }
    }

    /// Where dot products start for vector i, from numbers of four columns; `column` is i % n.
    #[inline(always)]
    fn start(x: int32x4_t, column: usize) -> int32x4_t {
        match column {
            0 => vdupq_laneq_s32::<0>(x),
            1 => vdupq_laneq_s32::<1>(x),
            2 => vdupq_laneq_s32::<2>(x),
            _ => vdupq_laneq_s32::<3>(x),
        }
    }

    /// From columns of eight rows to a block.
    #[inline(always)]
    fn block([a, b, c, d]: [[float32x4_t; 2]; 4]) -> Block<float32x4_t> {
        [a[0], b[0], c[0], d[0], a[1], b[1], c[1], d[1]]
    }

    /// From a block to columns of eight rows.
    #[inline(always)]
    fn unblock([a, b, c, d, e, f, g, h]: Block<float32x4_t>) -> [[float32x4_t; 2]; 4] {
        [[a, e], [b, f], [c, g], [d, h]]
    }
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
    fn dots<F: Format>(w: &[Quads; 2], x: &[i8; 32], sums: [Sums; 2]) -> [Sums; 2] {
        const {
            assert!(fits::<F>(2), "Q8_0's products of -128 are the largest");
            assert!(!F::SIXTEENS || fits::<F>(4), "sixteens are added at once");
        }
        let (a, b) = (
            repeated(load_s8(part(x, 0))),
            repeated(load_s8(part(x, 16))),
        );
        let [first, second] = sums;
        [
            narrow_group::<F>(&w[0], &a, &b, first),
            narrow_group::<F>(&w[1], &a, &b, second),
        ]
    }

    #[inline(always)]
    fn sixteen<F: Format>(
        w: &Codes,
        x: &[int8x16_t; 4],
        mut sums: Block<int32x4_t>,
    ) -> Block<int32x4_t> {
        for c in 0..4 {
            let x = repeated(x[c]);
            for h in 0..2 {
                let w = [w[h], w[h + 2], w[h + 4], w[h + 6]];
                sums[4 * h + c] = narrow_sixteen::<F>(&w, &x, sums[4 * h + c]);
            }
        }
        sums
    }
}

/// Adds four quads, in two steps where they would not fit.
#[inline(always)]
fn narrow_sixteen<F: Format>(w: &[int8x16_t; 4], x: &[int8x16_t; 4], sum: int32x4_t) -> int32x4_t {
    if fits::<F>(4) {
        return narrow::<F, 4>(w, x, sum);
    }
    let mut sums = [vdupq_n_s32(0); 2];
    pairs(&mut sums, products::<2>(&w[..2], &x[..2]));
    pairs(&mut sums, products::<2>(&w[2..], &x[2..]));
    vaddq_s32(sum, vpaddq_s32(sums[0], sums[1]))
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
fn repeated(x: int8x16_t) -> [int8x16_t; 4] {
    let x = vreinterpretq_s32_s8(x);
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
    fn dots<F: Format>(w: &[Quads; 2], x: &[i8; 32], mut sums: [Sums; 2]) -> [Sums; 2] {
        let last = usize::from(F::SIXTEENS);
        four::<0>(w, load_s8(part(x, 0)), 0, &mut sums);
        four::<4>(w, load_s8(part(x, 16)), last, &mut sums);
        sums
    }

    #[inline(always)]
    fn sixteen<F: Format>(
        w: &Codes,
        x: &[int8x16_t; 4],
        mut sums: Block<int32x4_t>,
    ) -> Block<int32x4_t> {
        quads::<0>(w, x, &mut sums);
        quads::<1>(w, x, &mut sums);
        quads::<2>(w, x, &mut sums);
        quads::<3>(w, x, &mut sums);
        sums
    }
}

/// Adds quad `T` of eight rows and four columns.
#[inline(always)]
fn quads<const T: usize>(w: &Codes, x: &[int8x16_t; 4], sums: &mut Block<int32x4_t>) {
    let w = [w[2 * T], w[2 * T + 1]];
    for i in 0..8 {
        sums[i] = sdot_lane::<T>(sums[i], w[i / 4], x[i % 4]);
    }
}

/// Adds the quads `T` … `T + 3` to the k-th sums. Sums take turns: an addition waits for the
/// last one to the same sum, on small cores for four cycles.
#[inline(always)]
fn four<const T: usize>(w: &[Quads; 2], x: int8x16_t, k: usize, sums: &mut [Sums; 2]) {
    quad::<0>(w, T, x, k, sums);
    quad::<1>(w, T + 1, x, k, sums);
    quad::<2>(w, T + 2, x, k, sums);
    quad::<3>(w, T + 3, x, k, sums);
}

/// Adds quad `t`, which is lane `LANE` of the activations.
#[inline(always)]
fn quad<const LANE: usize>(w: &[Quads; 2], t: usize, x: int8x16_t, k: usize, sums: &mut [Sums; 2]) {
    sums[0][k] = sdot_lane::<LANE>(sums[0][k], w[0][t], x);
    sums[1][k] = sdot_lane::<LANE>(sums[1][k], w[1][t], x);
}

/// Element c of vector i becomes element i of vector c.
#[inline(always)]
pub(crate) fn transposed([a, b, c, d]: [int32x4_t; 4]) -> [int32x4_t; 4] {
    let (ac, bd) = (vzip1q_s32(a, c), vzip1q_s32(b, d));
    let (ac2, bd2) = (vzip2q_s32(a, c), vzip2q_s32(b, d));
    [
        vzip1q_s32(ac, bd),
        vzip2q_s32(ac, bd),
        vzip1q_s32(ac2, bd2),
        vzip2q_s32(ac2, bd2),
    ]
}

impl Lanes for I8mm {
    /// A vector is two rows by two columns; its scales, each twice.
    const ROWS: usize = 4;
    const WOVEN: bool = true;

    #[inline(always)]
    fn dots<F: Format>(w: &[Quads; 2], x: &[i8; 32], sums: [Sums; 2]) -> [Sums; 2] {
        DotProd::dots::<F>(w, x, sums)
    }

    /// The first eight weights of rows 0 and 1, 2 and 3, and so on, then the last eight.
    #[inline(always)]
    fn woven_rows([a, b]: [[int8x16_t; 4]; 2]) -> [int8x16_t; 8] {
        let ([p, q], [r, s]) = (woven(a[0], a[1]), woven(b[0], b[1]));
        let ([t, u], [v, w]) = (woven(a[2], a[3]), woven(b[2], b[3]));
        [p, q, r, s, t, u, v, w]
    }

    /// The first eight weights of columns 0 and 1, and of 2 and 3, then the last eight.
    #[inline(always)]
    fn woven_columns(x: [int8x16_t; 4]) -> [int8x16_t; 4] {
        let [a, b, c, d] = x.map(vreinterpretq_s64_s8);
        [
            vtrn1q_s64(a, b),
            vtrn1q_s64(c, d),
            vtrn2q_s64(a, b),
            vtrn2q_s64(c, d),
        ]
        .map(vreinterpretq_s8_s64)
    }

    #[inline(always)]
    fn sixteen<F: Format>(
        w: &Codes,
        x: &[int8x16_t; 4],
        mut sums: Block<int32x4_t>,
    ) -> Block<int32x4_t> {
        for half in 0..2 {
            let x = [x[2 * half], x[2 * half + 1]];
            for p in 0..4 {
                let w = w[4 * half + p];
                sums[2 * p] = smmla(sums[2 * p], w, x[0]);
                sums[2 * p + 1] = smmla(sums[2 * p + 1], w, x[1]);
            }
        }
        sums
    }

    #[inline(always)]
    fn rows([a, b]: [float32x4_t; 2]) -> [float32x4_t; 4] {
        let ([a, b], [c, d]) = (zipped(a, a), zipped(b, b));
        [a, b, c, d]
    }

    #[inline(always)]
    fn columns(x: float32x4_t) -> [float32x4_t; 2] {
        doubled(vreinterpretq_s32_f32(x)).map(vreinterpretq_f32_s32)
    }

    #[inline(always)]
    fn times(v: float32x4_t, x: &[float32x4_t; 2], column: usize) -> float32x4_t {
        vmulq_f32(v, x[column])
    }

    #[inline(always)]
    fn added(
        total: float32x4_t,
        v: float32x4_t,
        x: &[float32x4_t; 2],
        column: usize,
    ) -> float32x4_t {
        vfmaq_f32(total, v, x[column])
    }

    #[inline(always)]
    fn block([a, b, c, d]: [[float32x4_t; 2]; 4]) -> Block<float32x4_t> {
        let ([p, q], [r, s]) = (zipped(a[0], b[0]), zipped(a[1], b[1]));
        let ([t, u], [v, w]) = (zipped(c[0], d[0]), zipped(c[1], d[1]));
        [p, t, q, u, r, v, s, w]
    }

    #[inline(always)]
    fn unblock([p, t, q, u, r, v, s, w]: Block<float32x4_t>) -> [[float32x4_t; 2]; 4] {
        let ([a, b], [c, d]) = (unzipped(p, q), unzipped(t, u));
        let ([e, f], [g, h]) = (unzipped(r, s), unzipped(v, w));
        [[a, e], [b, f], [c, g], [d, h]]
    }
}

/// Eight weights of rows 0 and 1, and of rows 2 and 3, from two quads.
#[inline(always)]
fn woven(a: int8x16_t, b: int8x16_t) -> [int8x16_t; 2] {
    let (a, b) = (vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b));
    let (low, high) = (vzip1q_s32(a, b), vzip2q_s32(a, b));
    [vreinterpretq_s8_s32(low), vreinterpretq_s8_s32(high)]
}

/// Elements 0 and 1, and 2 and 3, twice each.
#[inline(always)]
fn doubled(x: int32x4_t) -> [int32x4_t; 2] {
    let x = vreinterpretq_s64_s32(x);
    [vtrn1q_s64(x, x), vtrn2q_s64(x, x)].map(vreinterpretq_s32_s64)
}

/// Elements of two vectors by turns.
#[inline(always)]
fn zipped(a: float32x4_t, b: float32x4_t) -> [float32x4_t; 2] {
    let (a, b) = (vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b));
    [vzip1q_s32(a, b), vzip2q_s32(a, b)].map(vreinterpretq_f32_s32)
}

/// Undoes [`zipped`].
#[inline(always)]
fn unzipped(a: float32x4_t, b: float32x4_t) -> [float32x4_t; 2] {
    let (a, b) = (vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b));
    [vuzp1q_s32(a, b), vuzp2q_s32(a, b)].map(vreinterpretq_f32_s32)
}
