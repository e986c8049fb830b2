//! Products of panels (the layout `rows8`): a lane is a row.
//!
//! Pseudo-code:
//!
//! ```text
//! for panels, four columns or one at a time:
//!     for chunks of 256 weights, groups of 32, halves of four rows:
//!         unpack 32 codes of each row
//!         for columns: totals += dot products · scales
//! ```
//!
//! Deviations:
//!
//! 1. 128 activations, a *unit*, are prepared at once; a chunk is one unit or two.
//! 2. What ends a panel, less than a chunk, is copied into one with zero scales, so that there
//!    is one path for all lengths.
//! 3. A single column, the case of decoding, lives on memory: lines are asked for ahead.

mod formats;
mod lanes;
mod tail;

use myq_blocks::panels::{PANEL, VECTOR};
use myq_blocks::{Column, DType, Rows};

use crate::simd::*;
use formats::{Format, MAGIC, Totals, Unit, moved};
use lanes::Quads;
pub(crate) use lanes::{Base, DotProd, I8mm, Lanes};

/// Bytes between what is used and what is asked for: some ten chunks' worth of a core's
/// memory latency at the speed of its share of the bus.
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
            2 => sweep::<_, L>(formats::Dense::<2, 0>(l), w, columns, out),
            3 => sweep::<_, L>(formats::Dense::<2, 1>(l), w, columns, out),
            5 => sweep::<_, L>(formats::Dense::<4, 1>(l), w, columns, out),
            _ => sweep::<_, L>(formats::Dense::<4, 2>(l), w, columns, out),
        },
        // These have no panels.
        DType::F32 | DType::F16 | DType::BF16 | DType::Tq1_0 => {}
    }
}

/// Covers panels and columns with tiles.
fn sweep<F: Format, L: Lanes>(
    format: F,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    for p in 0..w.panels() {
        let mut from = 0;
        let mut put = |values: &[[f32; PANEL]]| {
            for (out, v) in out[from..].iter_mut().zip(values) {
                out[PANEL * p..PANEL * (p + 1)].copy_from_slice(v);
            }
            from += values.len();
        };
        let (fours, rest) = columns.as_chunks::<4>();
        for four in fours {
            put(&tile::<F, L, 4>(format, w.dtype(), w.panel(p), four));
        }
        if let [a, b, c] = rest {
            let [values @ .., _] = tile::<F, L, 4>(format, w.dtype(), w.panel(p), &[*a, *b, *c, *c]);
            put(&values as &[_; 3]);
        } else {
            for one in rest {
                put(&tile::<F, L, 1>(format, w.dtype(), w.panel(p), std::array::from_ref(one)));
            }
        }
    }
}

/// `result[c][r] = row r of the panel · columns[c]`.
#[inline(never)]
fn tile<F: Format, L: Lanes, const C: usize>(
    format: F,
    dtype: DType,
    panel: &[u8],
    columns: &[Column<'_>; C],
) -> [[f32; PANEL]; C] {
    let cols = columns[0].x.len();
    let (whole, groups) = (cols / 256, cols % 256 / 32);
    let step = format.head_bytes() + 8 * VECTOR * (F::LOW + F::HIGH);
    let mut last = [0; tail::BYTES];
    if groups > 0 {
        tail::fill(dtype, groups, &panel[whole * step..], &mut last[..step]);
    }
    let zero = vdupq_n_f32(0.0);
    let mut sums = [[zero; 2]; C];
    let mut totals = [[[zero; 2]; 2]; C];
    for i in 0..whole + usize::from(groups > 0) {
        let chunk = if i == whole { &last[..step] } else { &panel[step * i..][..step] };
        let (head, planes) = chunk.split_at(format.head_bytes());
        let units = if i < whole { 2 } else { groups.div_ceil(4) };
        for u in 0..units {
            let x = columns.each_ref().map(|c| prepared::<F>(c, 2 * i + u));
            unit::<F, L, C>(format, head, planes, u, &x, &mut totals);
        }
        if F::SUPER {
            for (sums, totals) in sums.iter_mut().zip(&mut totals) {
                *sums = [
                    F::finish::<0>(head, totals[0], sums[0]),
                    F::finish::<1>(head, totals[1], sums[1]),
                ];
                *totals = [[zero; 2]; 2];
            }
        }
    }
    let mut out = [[0.0; PANEL]; C];
    for c in 0..C {
        let [low, high] = if F::SUPER { sums[c] } else { totals[c].map(|t| t[0]) };
        let (a, b) = out[c].as_mut_slice().split_at_mut(4);
        if let (Some(a), Some(b)) = (a.first_chunk_mut(), b.first_chunk_mut()) {
            store_f32(a, low);
            store_f32(b, high);
        }
    }
    out
}

/// Adds 128 weights: groups 4·`u` … of a chunk.
#[inline(always)]
fn unit<F: Format, L: Lanes, const C: usize>(
    format: F,
    head: &[u8],
    planes: &[u8],
    u: usize,
    x: &[Unit<'_>; C],
    totals: &mut [[Totals; 2]; C],
) {
    // Written out, so that the group of the unit is a constant in each.
    group::<F, L, C, 0>(format.fields(head, u, 0), planes, u, x, totals);
    group::<F, L, C, 1>(format.fields(head, u, 1), planes, u, x, totals);
    group::<F, L, C, 2>(format.fields(head, u, 2), planes, u, x, totals);
    group::<F, L, C, 3>(format.fields(head, u, 3), planes, u, x, totals);
}

/// Unit `u` of a column.
#[inline(always)]
fn prepared<'a, F: Format>(column: &Column<'a>, u: usize) -> Unit<'a> {
    let sums = load_s16(part(column.sums, 8 * u));
    let sums = if F::SIXTEENS {
        [vuzp1q_s16(sums, sums), vuzp2q_s16(sums, sums)]
    } else {
        let groups = vpaddq_s16(sums, sums);
        [groups, groups]
    };
    let scaled: &[f32; 8] = part(column.scaled_sums, 8 * u);
    let zero = vdupq_n_s32(if F::FLOATED { MAGIC } else { 0 });
    let start = |s: int16x8_t| vmlal_s16(zero, vget_low_s16(s), vdup_n_s16(-F::OFFSET));
    Unit {
        q: part(column.q, 128 * u),
        d: load_f32(part(column.d, 4 * u)),
        sums,
        scaled: vpaddq_f32(load_f32(part(scaled, 0)), load_f32(part(scaled, 4))),
        start: sums.map(start),
    }
}

/// Adds group `G` of unit `u`.
#[inline(always)]
fn group<F: Format, L: Lanes, const C: usize, const G: i32>(
    fields: F::Fields,
    planes: &[u8],
    u: usize,
    x: &[Unit<'_>; C],
    totals: &mut [[Totals; 2]; C],
) {
    let bytes = VECTOR * (F::LOW + F::HIGH);
    let planes = &planes[bytes * (4 * u + G as usize)..][..bytes];
    if C == 1 {
        for line in (0..bytes).step_by(64) {
            prefetch(planes, AHEAD + line);
        }
    }
    half::<F, L, C, G, 0>(&fields, planes, x, totals);
    half::<F, L, C, G, 1>(&fields, planes, x, totals);
}

/// The four rows of half `H`.
#[inline(always)]
fn half<F: Format, L: Lanes, const C: usize, const G: i32, const H: usize>(
    fields: &F::Fields,
    planes: &[u8],
    x: &[Unit<'_>; C],
    totals: &mut [[Totals; 2]; C],
) {
    let w = quads::<F>(planes, 16 * H);
    let codes = x.each_ref().map(|x| part(x.q, 32 * G as usize));
    let start = x.each_ref().map(|x| {
        if F::OFFSET == 0 {
            [vdupq_n_s32(if F::FLOATED { MAGIC } else { 0 }); 2]
        } else {
            x.start.map(vdupq_laneq_s32::<G>)
        }
    });
    let dots = L::dots::<F, C>(&w, &codes, start);
    for c in 0..C {
        totals[c][H] = F::add::<G, H>(fields, dots[c], &x[c], totals[c][H]);
    }
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
        F::codes(vbslq_u8(vdupq_n_u8(mask), high, low(t)))
    };
    [code(0), code(1), code(2), code(3), code(4), code(5), code(6), code(7)]
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
