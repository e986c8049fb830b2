//! Products of panels (the layout `rows8`): a lane is a row.
//!
//! Pseudo-code:
//!
//! ```text
//! for panels:
//!     for chunks of 256 weights, groups of 32:
//!         unpack 32 codes of each row
//!         totals += dot products · scales
//! ```
//!
//! Deviations:
//!
//! 1. Four columns at a time go another way: see `many`.
//! 2. 128 activations, a *unit*, are prepared at once, and the group in it is a constant.
//! 3. What ends a panel, less than a chunk, is copied into one with zero scales, so that there
//!    is one path for all lengths.
//! 4. Decoding lives on memory: lines are asked for ahead.

mod formats;
mod lanes;
mod linear;
mod many;
mod tail;

use myq_blocks::panels::{PANEL, VECTOR};
use myq_blocks::{Column, DType, Rows};

use crate::simd::*;
use formats::{Format, MAGIC, Totals, Unit, moved};
pub(crate) use lanes::{Base, DotProd, I8mm, Lanes};
use lanes::{Quads, Sums};

/// Bytes between what is used and what is asked for: what a core's share of the memory, 3 to
/// 4 GB/s, brings in a latency of some 150 ns.
const AHEAD: usize = 512;

/// The products of all panels of `w`; rows behind them are left alone.
pub(crate) fn matmul<L: Lanes>(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    match w.dtype() {
        DType::Q4_0 => sweep::<_, L>(formats::Q4_0, w, columns, out),
        DType::Q4_1 => sweep::<_, L>(formats::Q4_1, w, columns, out),
        DType::Q5_0 => sweep::<_, L>(formats::Q5_0, w, columns, out),
        DType::Q5_1 => sweep::<_, L>(formats::Q5_1, w, columns, out),
        DType::Q8_0 => sweep::<_, L>(formats::Q8_0, w, columns, out),
        DType::Iq4Nl => sweep::<_, L>(formats::Iq4Nl, w, columns, out),
        DType::Q2K => sweep::<_, L>(formats::Q2K, w, columns, out),
        DType::Q3K => sweep::<_, L>(formats::Q3K, w, columns, out),
        DType::Q4K => sweep::<_, L>(formats::Pair::<0>, w, columns, out),
        DType::Q5K => sweep::<_, L>(formats::Pair::<1>, w, columns, out),
        DType::Q6K => sweep::<_, L>(formats::Q6K, w, columns, out),
        DType::Tq2_0 => sweep::<_, L>(formats::Tq2_0, w, columns, out),
        DType::Linear(l) => match l.bits() {
            2 => sweep::<_, L>(linear::Dense::<2, 0>(l), w, columns, out),
            3 => sweep::<_, L>(linear::Dense::<2, 1>(l), w, columns, out),
            5 => sweep::<_, L>(linear::Dense::<4, 1>(l), w, columns, out),
            _ => sweep::<_, L>(linear::Dense::<4, 2>(l), w, columns, out),
        },
        // These have no panels.
        DType::F32 | DType::F16 | DType::BF16 | DType::Tq1_0 => {}
    }
}

/// Columns by bands as far as they go, the others one at a time.
fn sweep<F: Format, L: Lanes>(
    format: F,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    let taken = many::taken(columns.len());
    let (bands, rest) = columns.split_at(taken);
    let (out_bands, out) = out.split_at_mut(taken);
    if taken > 0 {
        many::sweep::<F, L>(format, w, bands, out_bands);
    }
    for p in 0..w.panels() {
        for (column, out) in rest.iter().zip(out.iter_mut()) {
            let values = tile::<F, L>(format, w.dtype(), w.panel(p), column);
            out[PANEL * p..PANEL * (p + 1)].copy_from_slice(&values);
        }
    }
}

/// Bytes of a chunk of 256 weights.
#[inline(always)]
fn step<F: Format>(format: F) -> usize {
    format.head_bytes() + 8 * VECTOR * (F::LOW + F::HIGH)
}

/// The activations of a column, by chunk: all slices have the length of the first.
#[derive(Clone, Copy)]
struct Chunks<'a> {
    q: &'a [[i8; 256]],
    d: &'a [[f32; 8]],
    sums: &'a [[i16; 16]],
    scaled: &'a [[f32; 8]],
}

impl<'a> Chunks<'a> {
    #[inline(always)]
    fn new(column: &Column<'a>, n: usize) -> Chunks<'a> {
        Chunks {
            q: &column.q.as_chunks().0[..n],
            d: &column.d.as_chunks().0[..n],
            sums: &column.sums.as_chunks().0[..n],
            scaled: &column.scaled_sums.as_chunks().0[..n],
        }
    }

    /// Unit `u` of chunk `i`.
    #[inline(always)]
    fn unit<F: Format>(&self, i: usize, u: usize) -> Unit {
        let sums = load_s16(part(&self.sums[i], 8 * u));
        let sums = if F::SIXTEENS {
            [vuzp1q_s16(sums, sums), vuzp2q_s16(sums, sums)]
        } else {
            let groups = vpaddq_s16(sums, sums);
            [groups, groups]
        };
        Unit {
            d: load_f32(part(&self.d[i], 4 * u)),
            sums,
            scaled: load_f32(part(&self.scaled[i], 4 * u)),
            start: start::<F>(sums),
        }
    }

    /// Codes of group `g` of chunk `i`.
    #[inline(always)]
    fn codes(&self, i: usize, g: usize) -> &'a [i8; 32] {
        part(&self.q[i], 32 * g)
    }
}

/// Where dot products start, for sums of activations in 16-bit lanes.
#[inline(always)]
fn start<F: Format>(sums: [int16x8_t; 2]) -> [int32x4_t; 2] {
    let zero = vdupq_n_s32(if F::FLOATED { MAGIC } else { 0 });
    let offset = vdup_n_s16(-F::OFFSET);
    [
        vmlal_s16(zero, vget_low_s16(sums[0]), offset),
        vmlal_s16(zero, vget_low_s16(sums[1]), offset),
    ]
}

/// `result[r] = row r of the panel · column`.
#[inline(never)]
fn tile<F: Format, L: Lanes>(
    format: F,
    dtype: DType,
    panel: &[u8],
    column: &Column<'_>,
) -> [f32; PANEL] {
    let cols = column.x.len();
    let (whole, groups) = (cols / 256, cols % 256 / 32);
    let chunks = whole + usize::from(groups > 0);
    let step = step(format);
    let mut last = [0; tail::BYTES];
    if groups > 0 {
        tail::fill(dtype, groups, &panel[whole * step..], &mut last[..step]);
    }
    let x = Chunks::new(column, chunks);
    let mut sums = [vdupq_n_f32(0.0); 2];
    let mut totals = [[vdupq_n_f32(0.0); 2]; 2];
    for i in 0..chunks {
        let chunk = if i == whole {
            &last[..step]
        } else {
            &panel[step * i..][..step]
        };
        let (head, planes) = chunk.split_at(format.head_bytes());
        let at = Chunk { head, planes, i };
        // Written out: a constant unit saves a tenth of the instructions.
        unit::<F, L>(format, at, 0, &x, &mut totals);
        if i < whole || groups > 4 {
            unit::<F, L>(format, at, 1, &x, &mut totals);
        }
        if F::SUPER {
            sums[0] = F::finish::<0>(head, totals[0], sums[0]);
            sums[1] = F::finish::<1>(head, totals[1], sums[1]);
            totals = [[vdupq_n_f32(0.0); 2]; 2];
        }
    }
    let [low, high] = if F::SUPER {
        sums
    } else {
        [totals[0][0], totals[1][0]]
    };
    let mut out = [0.0; PANEL];
    let (a, b) = out.as_mut_slice().split_at_mut(4);
    if let (Some(a), Some(b)) = (a.first_chunk_mut(), b.first_chunk_mut()) {
        store_f32(a, low);
        store_f32(b, high);
    }
    out
}

/// Chunk `i` of a panel.
#[derive(Clone, Copy)]
struct Chunk<'a> {
    head: &'a [u8],
    planes: &'a [u8],
    i: usize,
}

impl<'a> Chunk<'a> {
    /// The planes of `n` groups from `g` on.
    #[inline(always)]
    fn groups<F: Format>(&self, g: usize, n: usize) -> &'a [u8] {
        let bytes = const { VECTOR * (F::LOW + F::HIGH) };
        &self.planes[bytes * g..][..bytes * n]
    }
}

/// Adds 128 weights of one column: groups 4·`u` to 4·`u` + 3.
#[inline(always)]
fn unit<F: Format, L: Lanes>(
    format: F,
    at: Chunk<'_>,
    u: usize,
    x: &Chunks<'_>,
    totals: &mut [Totals; 2],
) {
    let lanes = x.unit::<F>(at.i, u);
    // Written out, so that the lane is a constant in each.
    one::<F, L, 0>(format, at, u, x, &lanes, totals);
    one::<F, L, 1>(format, at, u, x, &lanes, totals);
    one::<F, L, 2>(format, at, u, x, &lanes, totals);
    one::<F, L, 3>(format, at, u, x, &lanes, totals);
}

/// Adds the group in lane `G` of unit `u` of one column: both halves of the rows at once, so
/// that additions to one sum are far from each other.
#[inline(always)]
fn one<F: Format, L: Lanes, const G: i32>(
    format: F,
    at: Chunk<'_>,
    u: usize,
    x: &Chunks<'_>,
    lanes: &Unit,
    totals: &mut [Totals; 2],
) {
    ahead::<F, G>(at.groups::<F>(4 * u, 4));
    let g = 4 * u + G as usize;
    let fields = format.fields(at.head, u, G as usize);
    let planes = at.groups::<F>(g, 1);
    let w = [quads::<F>(planes, 0), quads::<F>(planes, 16)];
    let start = [started::<F, G>(lanes); 2];
    let [a, b] = L::dots::<F>(&w, x.codes(at.i, g), start);
    totals[0] = F::add::<G, 0>(&fields, a, lanes, totals[0]);
    totals[1] = F::add::<G, 1>(&fields, b, lanes, totals[1]);
}

/// Asks for a quarter of the cache lines that a unit takes, which are as many as twice the
/// bits of its codes.
#[inline(always)]
fn ahead<F: Format, const QUARTER: i32>(planes: &[u8]) {
    line::<F, QUARTER, 0>(planes);
    line::<F, QUARTER, 1>(planes);
    line::<F, QUARTER, 2>(planes);
    line::<F, QUARTER, 3>(planes);
}

/// Asks for line `4 · K + QUARTER`.
#[inline(always)]
fn line<F: Format, const QUARTER: i32, const K: usize>(planes: &[u8]) {
    if (4 * K + QUARTER as usize) < 2 * (F::LOW + F::HIGH) {
        prefetch!(planes, AHEAD + 64 * (4 * K + QUARTER as usize));
    }
}

/// Where the dot products of the group in lane `G` start.
#[inline(always)]
fn started<F: Format, const G: i32>(x: &Unit) -> Sums {
    if F::OFFSET == 0 {
        return [vdupq_n_s32(if F::FLOATED { MAGIC } else { 0 }); 2];
    }
    let [a, b] = x.start;
    [vdupq_laneq_s32::<G>(a), vdupq_laneq_s32::<G>(b)]
}

/// The codes of four rows; `at` is 0 or 16.
#[inline(always)]
fn quads<F: Format>(planes: &[u8], at: usize) -> Quads {
    let low = |t: usize| {
        let v = bytes(planes, VECTOR * (t * F::LOW / 8) + at);
        let down = t * F::LOW % 8;
        // The topmost code of a byte needs no mask.
        match F::LOW {
            8 => v,
            n if down + n == 8 => moved_down(v, down),
            n => vandq_u8(moved_down(v, down), vdupq_n_u8((1 << n) - 1)),
        }
    };
    let code = |t: usize| {
        if F::HIGH == 0 {
            return F::codes(low(t));
        }
        let v = bytes(planes, VECTOR * (F::LOW + t * F::HIGH / 8) + at);
        let high = moved(v, F::LOW as i32 - (t * F::HIGH % 8) as i32);
        let mask = ((1 << F::HIGH) - 1) << F::LOW;
        F::codes(insert(low(t), high, vdupq_n_u8(mask)))
    };
    std::array::from_fn(code)
}

#[inline(always)]
fn moved_down(v: uint8x16_t, by: usize) -> uint8x16_t {
    match by {
        2 => vshrq_n_u8::<2>(v),
        4 => vshrq_n_u8::<4>(v),
        6 => vshrq_n_u8::<6>(v),
        _ => v,
    }
}
