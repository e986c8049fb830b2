//! Panels times three columns and more, the case of prompts.
//!
//! Pseudo-code, a *band* being four columns:
//!
//! ```text
//! for chunks of 256 weights:
//!     weave the bands' activations
//!     for panels:
//!         unpack and weave the codes and scales of eight rows
//!         for bands, groups of 32:
//!             outputs += dot products · row's scale · column's scale (+ minimum · column's sum)
//! ```
//!
//! Operations and their order are those of one column, so that results do not depend on the
//! number of columns. Products of integers that `formats` has in integers are exact in fp32.
//!
//! Deviations:
//!
//! 1. Where each sixteen weights have a scale, their products are added up before the column's
//!    scale.
//! 2. Minima of superblocks are added up by themselves, after all dot products of a chunk.
//! 3. While a panel's chunk is unpacked, that of the next panel is asked for.
//! 4. Codes that take an instruction or two are unpacked for each band anew, in registers. Others
//!    are stored, and so are all that have to be woven.

use myq_blocks::panels::{PANEL, VECTOR};
use myq_blocks::{Column, MAX_COLUMNS, Rows};

use super::formats::{Format, MAGIC, Minima, float, halves};
use super::lanes::{Block, Codes, Lanes, transposed};
use super::{Chunk, quads, tail};
use crate::simd::*;

/// Columns of a band.
const BAND: usize = 4;

/// 256 activations of a band. Parts are groups, or sixteens where these have scales.
struct Band {
    /// Codes of each sixteen, woven, where the level wants them so.
    codes: [[[i8; 16]; 4]; 16],
    /// Scales of each group: [`Lanes::columns`].
    d: [[[f32; 4]; 2]; 8],
    /// Sums of each part, likewise, as minima want them: with the scale or without.
    sums: [[[f32; 4]; 2]; 16],
    /// Where dot products of each part start, one for each column; where codes have offsets.
    start: [[i32; 4]; 16],
}

/// A band, and its columns' codes as they are.
type Acts<'a> = (&'a Band, [&'a [i8; 256]; BAND]);

/// 256 weights of eight rows, unpacked.
struct Unpacked {
    /// Registers of codes, eight for each sixteen weights; none where they stay in registers.
    codes: [[i8; 16]; 128],
    /// Scales of each part: [`Lanes::rows`].
    factor: [[[f32; 4]; 4]; 16],
    /// Minima of each part, likewise.
    minima: [[[f32; 4]; 4]; 16],
    /// Scales of superblocks, likewise: of products, and of minima, negative.
    ends: [[[f32; 4]; 4]; 2],
}

/// The number of columns, up to that of `columns`, that [`sweep`] takes: whole bands, or one
/// less.
pub(super) fn taken(columns: usize) -> usize {
    match columns % BAND {
        3 => columns,
        rest => columns - rest,
    }
}

/// The products of all panels and of `columns`, [`taken`] of them.
pub(super) fn sweep<F: Format, L: Lanes>(
    format: F,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    let (whole, groups) = (w.cols() / 256, w.cols() % 256 / 32);
    let step = super::step(format);
    let mut bands = [const { Band::new() }; MAX_COLUMNS / BAND];
    let bands = &mut bands[..columns.len().div_ceil(BAND)];
    let mut unpacked = Unpacked::new();
    for i in 0..whole + usize::from(groups > 0) {
        for (band, columns) in bands.iter_mut().zip(columns.chunks(BAND)) {
            band.fill::<F, L>(columns, i);
        }
        for p in 0..w.panels() {
            let panel = w.panel(p);
            let mut last = [0; tail::BYTES];
            let (chunk, groups) = if i < whole {
                (&panel[step * i..][..step], 8)
            } else {
                tail::fill(w.dtype(), groups, &panel[whole * step..], &mut last[..step]);
                (&last[..step], groups)
            };
            unpacked.fill::<F, L>(format, chunk, groups, panel.len());
            let planes = &chunk[format.head_bytes()..];
            for (b, band) in bands.iter().enumerate() {
                let x = (band, codes_of(&columns[BAND * b..], i));
                tile::<F, L>(
                    (&unpacked, planes),
                    &x,
                    groups,
                    &mut out[BAND * b..],
                    (i, p),
                );
            }
        }
    }
}

/// Chunk `i` of the first four columns. The last one stands for those that are missing.
#[inline(always)]
fn codes_of<'a>(columns: &[Column<'a>], i: usize) -> [&'a [i8; 256]; BAND] {
    std::array::from_fn(|c| part(columns[c.min(columns.len() - 1)].q, 256 * i))
}

impl Band {
    const fn new() -> Band {
        Band {
            codes: [[[0; 16]; 4]; 16],
            d: [[[0.0; 4]; 2]; 8],
            sums: [[[0.0; 4]; 2]; 16],
            start: [[0; 4]; 16],
        }
    }

    /// Takes chunk `i` of one to four columns. The last one stands for those that are missing.
    #[inline(never)]
    fn fill<F: Format, L: Lanes>(&mut self, columns: &[Column<'_>], i: usize) {
        let x: [&Column<'_>; BAND] = std::array::from_fn(|c| &columns[c.min(columns.len() - 1)]);
        for (s, to) in self.codes.iter_mut().enumerate().filter(|_| L::WOVEN) {
            let codes = L::woven_columns(x.map(|x| load_s8(part(x.q, 256 * i + 16 * s))));
            for (to, v) in to.iter_mut().zip(codes) {
                store_s8(to, v);
            }
        }
        let put = |to: &mut [[[f32; 4]; 2]], from: [float32x4_t; BAND]| {
            let by_part = transposed(from.map(vreinterpretq_s32_f32));
            for (to, v) in to.iter_mut().zip(by_part) {
                let [a, b] = L::columns(vreinterpretq_f32_s32(v));
                store_f32(&mut to[0], a);
                store_f32(&mut to[1], b);
            }
        };
        for u in 0..2 {
            let at = 8 * i + 4 * u;
            put(&mut self.d[4 * u..], x.map(|x| load_f32(part(x.d, at))));
            if scaled::<F>() {
                let scaled = x.map(|x| load_f32(part(x.scaled_sums, at)));
                put(&mut self.sums[4 * u..], scaled);
            }
        }
        let parts = if F::SIXTEENS { 16 } else { 8 };
        for v in (0..parts).step_by(4) {
            let sums = x.map(|x| {
                if F::SIXTEENS {
                    vmovl_s16(load_s16x4(part(x.sums, 16 * i + v)))
                } else {
                    vpaddlq_s16(load_s16(part(x.sums, 16 * i + 2 * v)))
                }
            });
            self.start::<F, L>(v, sums);
            if F::MINIMA != Minima::None && !scaled::<F>() {
                put(&mut self.sums[v..], sums.map(vcvtq_f32_s32));
            }
        }
    }

    /// Takes the sums of four parts, from `at` on, of each column.
    #[inline(always)]
    fn start<F: Format, L: Lanes>(&mut self, at: usize, sums: [int32x4_t; BAND]) {
        if !has_starts::<F, L>() {
            return;
        }
        let offset = vdupq_n_s32(F::OFFSET.into());
        for (to, sums) in self.start[at..].iter_mut().zip(transposed(sums)) {
            store_s32(to, vmlsq_s32(vdupq_n_s32(MAGIC), sums, offset));
        }
    }
}

/// Whether minima want sums with the columns' scales.
const fn scaled<F: Format>() -> bool {
    match F::MINIMA {
        Minima::Scaled => true,
        Minima::Super => !F::SIXTEENS,
        Minima::None | Minima::Zero => false,
    }
}

/// Whether fixed offsets of codes are where dot products start. Woven codes are without them:
/// starts would have to be woven, too.
const fn has_starts<F: Format, L: Lanes>() -> bool {
    F::OFFSET != 0 && !L::WOVEN
}

/// Whether codes are unpacked for each band anew: see deviation 4.
const fn in_registers<F: Format, L: Lanes>() -> bool {
    F::HIGH == 0 && F::CHEAP && !L::WOVEN
}

/// Codes of group `g` of eight rows, both sixteens woven.
#[inline(always)]
fn unpacked<F: Format, L: Lanes>(planes: &[u8]) -> [Codes; 2] {
    let mut w = [quads::<F>(planes, 0), quads::<F>(planes, 16)];
    if F::OFFSET != 0 && !has_starts::<F, L>() {
        let offset = vdupq_n_s8(F::OFFSET as i8);
        for v in w.as_flattened_mut() {
            *v = vsubq_s8(*v, offset);
        }
    }
    let [a, b] = w;
    [
        L::woven_rows([[a[0], a[1], a[2], a[3]], [b[0], b[1], b[2], b[3]]]),
        L::woven_rows([[a[4], a[5], a[6], a[7]], [b[4], b[5], b[6], b[7]]]),
    ]
}

impl Unpacked {
    fn new() -> Unpacked {
        Unpacked {
            codes: [[0; 16]; 128],
            factor: [[[0.0; 4]; 4]; 16],
            minima: [[[0.0; 4]; 4]; 16],
            ends: [[[0.0; 4]; 4]; 2],
        }
    }

    /// Takes a chunk; the next one asked for is `ahead` bytes behind it.
    #[inline(never)]
    fn fill<F: Format, L: Lanes>(&mut self, format: F, chunk: &[u8], groups: usize, ahead: usize) {
        let (head, planes) = chunk.split_at(format.head_bytes());
        let at = Chunk { head, planes, i: 0 };
        for line in (0..chunk.len()).step_by(64) {
            prefetch_far(chunk, ahead + line);
        }
        if F::SUPER {
            let d = [halves(head, 0), halves(head, 8)];
            put::<L>(&mut self.ends[0], d);
        }
        if F::MINIMA == Minima::Super {
            let dmin = [halves(head, 16), halves(head, 24)].map(vnegq_f32);
            put::<L>(&mut self.ends[1], dmin);
        }
        // By twos, so that it is known which half of a vector of scales is meant.
        for g in (0..groups.min(8)).step_by(2) {
            self.group::<F, L>(format, at, g);
            self.group::<F, L>(format, at, g + 1);
        }
    }

    /// Codes of sixteen `K` of group `g`; `planes` are those of the chunk.
    #[inline(always)]
    fn codes<F: Format, L: Lanes, const K: usize>(&self, planes: &[u8], g: usize) -> Codes {
        if in_registers::<F, L>() {
            let bytes = const { VECTOR * (F::LOW + F::HIGH) };
            return unpacked::<F, L>(&planes[bytes * g..][..bytes])[K];
        }
        let from: &[_; 8] = part(&self.codes, 16 * g + 8 * K);
        let mut codes = [vdupq_n_s8(0); 8];
        for (code, from) in codes.iter_mut().zip(from) {
            *code = load_s8(from);
        }
        codes
    }

    #[inline(always)]
    fn group<F: Format, L: Lanes>(&mut self, format: F, at: Chunk<'_>, g: usize) {
        let planes = at.groups::<F>(g, 1);
        if !in_registers::<F, L>() {
            let woven = unpacked::<F, L>(planes);
            if let Some(to) = self.codes[16 * g..].first_chunk_mut::<16>() {
                for r in 0..8 {
                    store_s8(&mut to[r], woven[0][r]);
                    store_s8(&mut to[8 + r], woven[1][r]);
                }
            }
        }
        if !F::FUSED {
            return;
        }
        let scales = F::scales(format.fields(at.head, g / 4, g % 4));
        let parts = if F::SIXTEENS { 2 } else { 1 };
        for k in 0..parts {
            put::<L>(&mut self.factor[parts * g + k], scales.factor[k]);
            if F::MINIMA != Minima::None {
                put::<L>(&mut self.minima[parts * g + k], scales.minima[k]);
            }
        }
    }
}

/// Where dot products of a part start.
#[inline(always)]
fn starts<F: Format, L: Lanes>(x: &Band, part: usize) -> Block<int32x4_t> {
    let mut starts = [vdupq_n_s32(MAGIC); 8];
    if has_starts::<F, L>() {
        let x = load_s32(&x.start[part]);
        for (i, start) in starts.iter_mut().enumerate() {
            *start = L::start(x, i % (8 / L::ROWS));
        }
    }
    starts
}

#[inline(always)]
fn put<L: Lanes>(to: &mut [[f32; 4]; 4], scales: [float32x4_t; 2]) {
    for (to, v) in to[..L::ROWS].iter_mut().zip(L::rows(scales)) {
        store_f32(to, v);
    }
}

/// Chunk `i` of panel `p` times a band: adds to the columns that `out` starts with, up to four.
#[inline(never)]
fn tile<F: Format, L: Lanes>(
    (w, planes): (&Unpacked, &[u8]),
    x: &Acts<'_>,
    groups: usize,
    out: &mut [&mut [f32]],
    (i, p): (usize, usize),
) {
    let mut totals = [vdupq_n_f32(0.0); 8];
    if !F::SUPER {
        totals = before::<L>(out, i, p);
    }
    for g in 0..groups.min(8) {
        totals = if F::SIXTEENS {
            two_parts::<F, L>((w, planes), x, g, totals)
        } else {
            one_part::<F, L>((w, planes), x, g, totals)
        };
    }
    if F::SUPER {
        totals = finished::<F, L>(w, x.0, groups, totals, before::<L>(out, i, p));
    }
    let columns = L::unblock(totals);
    for (out, [a, b]) in out.iter_mut().zip(columns) {
        let (fours, _) = out[PANEL * p..PANEL * (p + 1)].as_chunks_mut();
        if let [low, high] = fours {
            store_f32(low, a);
            store_f32(high, b);
        }
    }
}

/// What the chunks before `i` gave.
#[inline(always)]
fn before<L: Lanes>(out: &[&mut [f32]], i: usize, p: usize) -> Block<float32x4_t> {
    let mut columns = [[vdupq_n_f32(0.0); 2]; BAND];
    if i > 0 {
        for (column, out) in columns.iter_mut().zip(out) {
            let out: &[f32; PANEL] = part(out, PANEL * p);
            *column = [load_f32(part(out, 0)), load_f32(part(out, 4))];
        }
    }
    L::block(columns)
}

/// Adds a chunk's products and minima, times the scales of the superblocks.
#[inline(always)]
fn finished<F: Format, L: Lanes>(
    w: &Unpacked,
    x: &Band,
    groups: usize,
    products: Block<float32x4_t>,
    mut sums: Block<float32x4_t>,
) -> Block<float32x4_t> {
    let n = const { 8 / L::ROWS };
    for i in 0..8 {
        let d = load_f32(&w.ends[0][i / n]);
        sums[i] = if F::FUSED {
            vfmaq_f32(sums[i], products[i], d)
        } else {
            vaddq_f32(sums[i], vmulq_f32(d, products[i]))
        };
    }
    if F::MINIMA != Minima::Super {
        return sums;
    }
    let mut totals = [vdupq_n_f32(0.0); 8];
    for g in 0..groups.min(8) {
        let d = columns(&x.d[g]);
        for (i, total) in totals.iter_mut().enumerate() {
            let minimum = |part: usize| load_f32(&w.minima[part][i / n]);
            *total = if F::SIXTEENS {
                let (a, b) = (columns(&x.sums[2 * g]), columns(&x.sums[2 * g + 1]));
                let minima = L::times(minimum(2 * g), &a, i % n);
                let minima = L::added(minima, minimum(2 * g + 1), &b, i % n);
                L::added(*total, minima, &d, i % n)
            } else {
                L::added(*total, minimum(g), &columns(&x.sums[g]), i % n)
            };
        }
    }
    for i in 0..8 {
        sums[i] = vfmaq_f32(sums[i], totals[i], load_f32(&w.ends[1][i / n]));
    }
    sums
}

/// Sixteen `s` of the codes of a band.
#[inline(always)]
fn sixteen<L: Lanes>((band, codes): &Acts<'_>, s: usize) -> [int8x16_t; 4] {
    let mut x = [vdupq_n_s8(0); 4];
    for (c, x) in x.iter_mut().enumerate() {
        *x = if L::WOVEN {
            load_s8(&band.codes[s][c])
        } else {
            load_s8(part(codes[c], 16 * s))
        };
    }
    x
}

/// Adds group `g`, which has one scale.
#[inline(always)]
fn one_part<F: Format, L: Lanes>(
    (w, planes): (&Unpacked, &[u8]),
    x: &Acts<'_>,
    g: usize,
    mut totals: Block<float32x4_t>,
) -> Block<float32x4_t> {
    let n = const { 8 / L::ROWS };
    let dots = starts::<F, L>(x.0, g);
    let dots = dots_of::<F, L, 0>((w, planes), x, g, dots);
    let dots = dots_of::<F, L, 1>((w, planes), x, g, dots);
    let d = columns(&x.0.d[g]);
    let sums = columns(&x.0.sums[g]);
    for i in 0..8 {
        let mut dots = float(dots[i]);
        if !F::FUSED {
            totals[i] = vaddq_f32(totals[i], L::times(dots, &d, i % n));
            continue;
        }
        let (factor, minima) = (load_f32(&w.factor[g][i / n]), load_f32(&w.minima[g][i / n]));
        if F::SUPER {
            totals[i] = L::added(totals[i], vmulq_f32(dots, factor), &d, i % n);
            continue;
        }
        if F::MINIMA == Minima::Zero {
            dots = L::added(dots, minima, &sums, i % n);
        }
        totals[i] = vfmaq_f32(totals[i], dots, L::times(factor, &d, i % n));
        if F::MINIMA == Minima::Scaled {
            totals[i] = L::added(totals[i], minima, &sums, i % n);
        }
    }
    totals
}

/// Adds the dot products of sixteen `K` of group `g`.
#[inline(always)]
fn dots_of<F: Format, L: Lanes, const K: usize>(
    (w, planes): (&Unpacked, &[u8]),
    x: &Acts<'_>,
    g: usize,
    dots: Block<int32x4_t>,
) -> Block<int32x4_t> {
    let codes = w.codes::<F, L, K>(planes, g);
    L::sixteen::<F>(&codes, &sixteen::<L>(x, 2 * g + K), dots)
}

/// Adds group `g`, whose sixteens have scales.
#[inline(always)]
fn two_parts<F: Format, L: Lanes>(
    w: (&Unpacked, &[u8]),
    x: &Acts<'_>,
    g: usize,
    mut totals: Block<float32x4_t>,
) -> Block<float32x4_t> {
    let mut products = [vdupq_n_f32(0.0); 8];
    scaled_part::<F, L, 0>(w, x, g, &mut products);
    scaled_part::<F, L, 1>(w, x, g, &mut products);
    let d = columns(&x.0.d[g]);
    for i in 0..8 {
        totals[i] = L::added(totals[i], products[i], &d, i % (8 / L::ROWS));
    }
    totals
}

/// Adds the scaled dot products of sixteen `K` of group `g`.
#[inline(always)]
fn scaled_part<F: Format, L: Lanes, const K: usize>(
    w: (&Unpacked, &[u8]),
    x: &Acts<'_>,
    g: usize,
    products: &mut Block<float32x4_t>,
) {
    let (n, p) = (const { 8 / L::ROWS }, 2 * g + K);
    let dots = dots_of::<F, L, K>(w, x, g, starts::<F, L>(x.0, p));
    for i in 0..8 {
        let (dots, factor) = (float(dots[i]), load_f32(&w.0.factor[p][i / n]));
        products[i] = if K == 0 {
            vmulq_f32(dots, factor)
        } else {
            vfmaq_f32(products[i], dots, factor)
        };
    }
}

#[inline(always)]
fn columns(x: &[[f32; 4]; 2]) -> [float32x4_t; 2] {
    [load_f32(&x[0]), load_f32(&x[1])]
}
