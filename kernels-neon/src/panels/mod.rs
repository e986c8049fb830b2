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
use lanes::{Quads, Sums};
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
    fn unit<F: Format>(&self, i: usize, u: usize) -> Unit<'a> {
        let sums = load_s16(part(&self.sums[i], 8 * u));
        let sums = if F::SIXTEENS {
            [vuzp1q_s16(sums, sums), vuzp2q_s16(sums, sums)]
        } else {
            let groups = vpaddq_s16(sums, sums);
            [groups, groups]
        };
        let zero = vdupq_n_s32(if F::FLOATED { MAGIC } else { 0 });
        let offset = vdup_n_s16(-F::OFFSET);
        Unit {
            q: part(&self.q[i], 128 * u),
            d: load_f32(part(&self.d[i], 4 * u)),
            sums,
            scaled: load_f32(part(&self.scaled[i], 4 * u)),
            start: [
                vmlal_s16(zero, vget_low_s16(sums[0]), offset),
                vmlal_s16(zero, vget_low_s16(sums[1]), offset),
            ],
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
    let chunks = whole + usize::from(groups > 0);
    let step = format.head_bytes() + 8 * VECTOR * (F::LOW + F::HIGH);
    let mut last = [0; tail::BYTES];
    if groups > 0 {
        tail::fill(dtype, groups, &panel[whole * step..], &mut last[..step]);
    }
    let x = columns.each_ref().map(|c| Chunks::new(c, chunks));
    let mut sums = [[vdupq_n_f32(0.0); 2]; C];
    let mut totals = [[[vdupq_n_f32(0.0); 2]; 2]; C];
    for i in 0..chunks {
        let chunk = if i == whole { &last[..step] } else { &panel[step * i..][..step] };
        let (head, planes) = chunk.split_at(format.head_bytes());
        let units = if i < whole || groups > 4 { 2 } else { 1 };
        if C == 1 {
            // Written out: a constant unit saves a tenth of the instructions.
            unit::<F, L, C>(format, head, planes, &x, (i, 0), &mut totals);
            if units == 2 {
                unit::<F, L, C>(format, head, planes, &x, (i, 1), &mut totals);
            }
        } else {
            for u in 0..units {
                unit::<F, L, C>(format, head, planes, &x, (i, u), &mut totals);
            }
        }
        if F::SUPER {
            for c in 0..C {
                sums[c][0] = F::finish::<0>(head, totals[c][0], sums[c][0]);
                sums[c][1] = F::finish::<1>(head, totals[c][1], sums[c][1]);
                totals[c] = [[vdupq_n_f32(0.0); 2]; 2];
            }
        }
    }
    let mut out = [[0.0; PANEL]; C];
    for c in 0..C {
        let [low, high] = if F::SUPER { sums[c] } else { [totals[c][0][0], totals[c][1][0]] };
        let (a, b) = out[c].as_mut_slice().split_at_mut(4);
        if let (Some(a), Some(b)) = (a.first_chunk_mut(), b.first_chunk_mut()) {
            store_f32(a, low);
            store_f32(b, high);
        }
    }
    out
}

/// Adds 128 weights: unit `u` of chunk `i`, its groups 4·u to 4·u + 3.
#[inline(always)]
fn unit<F: Format, L: Lanes, const C: usize>(
    format: F,
    head: &[u8],
    planes: &[u8],
    x: &[Chunks<'_>; C],
    (i, u): (usize, usize),
    totals: &mut [[Totals; 2]; C],
) {
    // The compiler needs to see that there are two units.
    let u = u % 2;
    let mut units = [x[0].unit::<F>(i, u); C];
    for c in 1..C {
        units[c] = x[c].unit::<F>(i, u);
    }
    let bytes = const { 4 * VECTOR * (F::LOW + F::HIGH) };
    let planes = &planes[bytes * u..][..bytes];
    // Written out, so that the group of the unit is a constant in each.
    group::<F, L, C, 0>(format.fields(head, u, 0), planes, &units, totals);
    group::<F, L, C, 1>(format.fields(head, u, 1), planes, &units, totals);
    group::<F, L, C, 2>(format.fields(head, u, 2), planes, &units, totals);
    group::<F, L, C, 3>(format.fields(head, u, 3), planes, &units, totals);
}

/// Adds group `G` of a unit.
#[inline(always)]
fn group<F: Format, L: Lanes, const C: usize, const G: i32>(
    fields: F::Fields,
    planes: &[u8],
    x: &[Unit<'_>; C],
    totals: &mut [[Totals; 2]; C],
) {
    if C == 1 {
        ahead::<F, G, 0>(planes);
        ahead::<F, G, 1>(planes);
        ahead::<F, G, 2>(planes);
        ahead::<F, G, 3>(planes);
    }
    let bytes = const { VECTOR * (F::LOW + F::HIGH) };
    let planes = &planes[bytes * G as usize..][..bytes];
    let low = || quads::<F>(planes, 0);
    let high = || quads::<F>(planes, 16);
    if C == 1 {
        // All at once, so that additions to one sum are far from each other.
        let [a, b] = dots::<F, L, 2, C, G>(&[low(), high()], x);
        add::<F, C, G, 0>(&fields, &a, x, totals);
        add::<F, C, G, 1>(&fields, &b, x, totals);
    } else {
        // One half's codes stay in registers for all columns.
        let [a] = dots::<F, L, 1, C, G>(&[low()], x);
        add::<F, C, G, 0>(&fields, &a, x, totals);
        let [b] = dots::<F, L, 1, C, G>(&[high()], x);
        add::<F, C, G, 1>(&fields, &b, x, totals);
    }
}

/// Asks for the `K`-th of the cache lines that belong to group `G` of a unit: a group has half
/// as many as its codes have bits.
#[inline(always)]
fn ahead<F: Format, const G: i32, const K: usize>(planes: &[u8]) {
    let first = |g: usize| (g * (F::LOW + F::HIGH)).div_ceil(2);
    if first(G as usize) + K < first(G as usize + 1) {
        prefetch!(
            planes,
            AHEAD + 64 * ((G as usize * (F::LOW + F::HIGH)).div_ceil(2) + K)
        );
    }
}

/// Dot products of group `G`, of `R` halves of the rows.
#[inline(always)]
fn dots<F: Format, L: Lanes, const R: usize, const C: usize, const G: i32>(
    w: &[Quads; R],
    x: &[Unit<'_>; C],
) -> [[Sums; C]; R] {
    // Loops, because closures given to `map` stay calls in functions of this size.
    let (mut codes, mut sums) = ([part(x[0].q, 0); C], [[vdupq_n_s32(0); 2]; C]);
    for c in 0..C {
        codes[c] = part(x[c].q, 32 * G as usize);
        sums[c] = start::<F, G>(&x[c]);
    }
    L::dots::<F, R, C>(w, &codes, [sums; R])
}

/// Adds the dot products of half `H`.
#[inline(always)]
fn add<F: Format, const C: usize, const G: i32, const H: usize>(
    fields: &F::Fields,
    dots: &[Sums; C],
    x: &[Unit<'_>; C],
    totals: &mut [[Totals; 2]; C],
) {
    for c in 0..C {
        totals[c][H] = F::add::<G, H>(fields, dots[c], &x[c], totals[c][H]);
    }
}

/// Where the dot products of group `G` start.
#[inline(always)]
fn start<F: Format, const G: i32>(x: &Unit<'_>) -> [int32x4_t; 2] {
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
