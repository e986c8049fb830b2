//! Panels of eight rows times many columns on tiles (AMX).
//!
//! ```text
//! for each part of the rows' length:
//!     scales and sums of the columns, those of 16 columns side by side
//!     for each two panels, for each chunk of the part:
//!         for each group of 32 weights:
//!             B[group] = the eight quads as unpacked: 8 tile rows of 16 rows × 4 weights
//!         for each 16 columns, for each group:
//!             A = 32 activations of each of the columns
//!             C = A · B[group]                       16 columns × 16 rows, exact in i32
//!             for each column, four groups later:
//!                 total[column] += activation scale · scale · fp32(C[column]) − offset · sums
//! ```
//!
//! A quad of two panels is just what a tile of the second factor wants: 64 bytes, four
//! consecutive weights of each of sixteen rows. Tiles multiply signed bytes, so a fixed offset
//! is taken off the codes. Sub-scales of Q2_K and Q3_K are multiplied in before, as that leaves a
//! byte (3 · 15, and −4 … 3 times −32 … 31 if it is negated); Q6_K has a tile of sums for each
//! half of a group.
//!
//! Products run ahead of what is done with them ([`LAG`]): a product takes fifty cycles, but one
//! can start every sixteen, while its predecessors are stored and vectors scale those before. A
//! tile is stored two products late, as storing what is just multiplied holds up the next product
//! (measured: 30 cycles a product instead of 22), and zeroed right before it is written.
//!
//! Source: Intel, Architecture Instruction Set Extensions, chapter on AMX.
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of one loop that needs its instruction set and checked lengths"
)]

use super::chunks::ahead;
use super::formats::{Format, Sixteens, Thirties};
use super::isa::{Avx512 as S, Isa};
use super::soon;
use crate::lanes::transpose;
use crate::tiles::Configuration;
use core::arch::asm;
use core::arch::x86_64::{
    __m512, __m512i, _mm256_loadu_si256, _mm512_cvtepi16_epi32, _mm512_cvtepi32_ps,
    _mm512_maskz_loadu_ps, _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_set_epi32,
    _mm512_setzero_ps, _mm512_storeu_ps,
};
use core::mem::MaybeUninit;
use myq_blocks::panels::{PANEL, chunk_bytes, head_bytes};
use myq_blocks::{Column, MAX_COLUMNS, Rows};

/// Columns of a tile.
pub(super) const TOKENS: usize = 16;
/// Fewer columns than this are left to AVX-512.
pub(super) const FEWEST: usize = 12;

/// Tiles 0 to 3 are sums, 4 and 5 activations of `tokens` columns, 6 and 7 weights of a group or
/// of half a group.
fn configuration(tokens: usize, halves: bool) -> Configuration {
    let n = tokens as u8;
    let (quads, bytes) = if halves { (4, 16) } else { (8, 32) };
    Configuration::new(
        [n, n, n, n, n, n, quads, quads],
        [64, 64, 64, 64, bytes, bytes, 64, 64],
    )
}

/// 64-byte aligned room.
#[repr(align(64))]
struct Aligned<const N: usize>([MaybeUninit<u8>; N]);

impl<const N: usize> Aligned<N> {
    const EMPTY: Self = Aligned([MaybeUninit::uninit(); N]);

    fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }
}

/// What goes through memory; written before it is read.
struct Room {
    /// Activations of a chunk, where columns are not evenly spaced.
    acts: [Aligned<4096>; MAX_COLUMNS / TOKENS],
    /// Eight groups of eight quads.
    weights: Aligned<4096>,
    /// The last eight products, each of sixteen columns.
    sums: Aligned<8192>,
    /// For each chunk of a part, for each 16 columns.
    factors: [[MaybeUninit<Factors>; MAX_COLUMNS / TOKENS]; PART],
}

/// Chunks of a part; their factors take 24 KiB for each 16 columns.
const PART: usize = 16;

/// What a chunk of 16 columns is multiplied by, group by group; zero for columns that are not
/// there.
#[derive(Clone, Copy)]
struct Factors {
    d: [[f32; TOKENS]; 8],
    /// Filled only where offsets have no scale of their own.
    scaled_sums: MaybeUninit<[[f32; TOKENS]; 8]>,
    /// Of both halves of each group; filled only where offsets have a scale of their own.
    scaled_halves: MaybeUninit<[[f32; TOKENS]; 16]>,
}

impl Factors {
    /// Those of chunk `i`, as far as the format wants them.
    #[inline(always)]
    unsafe fn fill<F: Format>(to: &mut MaybeUninit<Factors>, columns: &[Column<'_>], i: usize) {
        /// The first `n` values of each column, side by side.
        #[inline(always)]
        unsafe fn put(from: impl Iterator<Item = __m512>, n: usize, to: *mut f32) {
            let mut v = [_mm512_setzero_ps(); TOKENS];
            for (v, from) in v.iter_mut().zip(from) {
                *v = from;
            }
            transpose(&mut v);
            for (g, v) in v.into_iter().enumerate().take(n) {
                _mm512_storeu_ps(to.add(TOKENS * g), v);
            }
        }
        let eight = |from: &[f32]| _mm512_maskz_loadu_ps(0xff, from[8 * i..].as_ptr());
        let to = to.as_mut_ptr();
        let d = columns.iter().map(|c| eight(c.d));
        put(d, 8, (&raw mut (*to).d).cast());
        if F::OWN_MINIMA {
            let halves = columns.iter().map(|c| {
                let sums = _mm256_loadu_si256(c.sums[16 * i..].as_ptr().cast());
                let sums = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(sums));
                let twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
                _mm512_mul_ps(_mm512_permutexvar_ps(twice, eight(c.d)), sums)
            });
            put(halves, 16, (&raw mut (*to).scaled_halves).cast());
        }
        if !F::SIXTEENS && F::FIXED == 0 {
            let sums = columns.iter().map(|c| eight(c.scaled_sums));
            put(sums, 8, (&raw mut (*to).scaled_sums).cast());
        }
    }
}

/// Where the codes of the columns are: column t at `start + t · stride`.
#[derive(Clone, Copy)]
struct Codes {
    start: *const u8,
    stride: usize,
}

impl Codes {
    const NONE: Codes = Codes {
        start: core::ptr::null(),
        stride: 0,
    };

    /// `None` where columns are not evenly spaced in memory, upwards.
    fn evenly(columns: &[Column<'_>]) -> Option<Codes> {
        let at = |c: &Column<'_>| c.q.as_ptr() as usize;
        let stride = at(&columns[1]).checked_sub(at(&columns[0]))?;
        let even = columns
            .windows(2)
            .all(|c| at(&c[1]).checked_sub(at(&c[0])) == Some(stride));
        even.then_some(Codes {
            start: columns[0].q.as_ptr().cast(),
            stride,
        })
    }
}

/// All pairs of panels with sixteens of columns, or with fewer than sixteen but at least
/// [`FEWEST`]. Returns the number of panels done.
#[inline(always)]
pub(super) unsafe fn pairs<F: Format>(
    f: F,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) -> usize {
    let configuration = configuration(columns.len().min(TOKENS), halves::<F>());
    asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly));
    let done = w.panels() / 2 * 2;
    let mut room = Room {
        acts: [Aligned::EMPTY; MAX_COLUMNS / TOKENS],
        weights: Aligned::EMPTY,
        sums: Aligned::EMPTY,
        factors: [[const { MaybeUninit::uninit() }; MAX_COLUMNS / TOKENS]; PART],
    };
    let chunks = w.cols().div_ceil(256);
    for first in (0..chunks).step_by(PART) {
        let part = first..chunks.min(first + PART);
        for (i, factors) in part.clone().zip(&mut room.factors) {
            for (columns, factors) in columns.chunks(TOKENS).zip(factors) {
                Factors::fill::<F>(factors, columns, i);
            }
        }
        for p in (0..done).step_by(2) {
            let at = PANEL * p..PANEL * (p + 2);
            soon::<S, 1>(out, PANEL * p);
            let mut total = [S::zero(); MAX_COLUMNS];
            if first > 0 {
                for (total, out) in total.iter_mut().zip(out.iter()) {
                    *total = S::load_floats(out[at.clone()].as_ptr());
                }
            }
            two_panels(f, w, p, part.clone(), columns, &mut room, &mut total);
            for (out, total) in out.iter_mut().zip(&total) {
                S::store(*total, out[at.clone()].as_mut_ptr());
            }
        }
    }
    asm!("tilerelease", options(nostack, nomem));
    done
}

/// Some chunks of panels `p` and `p + 1`.
#[inline(always)]
unsafe fn two_panels<F: Format>(
    f: F,
    w: Rows<'_>,
    p: usize,
    part: core::ops::Range<usize>,
    columns: &[Column<'_>],
    room: &mut Room,
    total: &mut [__m512; MAX_COLUMNS],
) {
    let (panel, stride) = (w.panel(p).as_ptr(), PANEL * w.row_bytes());
    let step = chunk_bytes(f.dtype(), 8);
    let even = Codes::evenly(columns);
    for i in part.clone() {
        let groups = (w.cols() / 32 - 8 * i).min(8);
        let at = panel.add(step * i);
        let codes = at.add(head_bytes(f.dtype(), groups));
        let (mut sixteens, mut thirties) = (Sixteens::<S>::zero(), Thirties::<S>::zero());
        if F::SIXTEENS {
            f.sixteens(at, stride, groups, &mut sixteens);
            let factors = (!halves::<F>()).then_some(&sixteens.scales);
            unpack(f, codes, stride, groups, factors, &mut room.weights);
        } else {
            f.thirties(at, stride, groups, &mut thirties);
            unpack(f, codes, stride, groups, None, &mut room.weights);
        }
        for g in 0..groups {
            ahead::<S, 1>(at, stride, g, step / 8);
        }
        let blocks = columns.len().div_ceil(TOKENS);
        let mut acts = [Codes::NONE; MAX_COLUMNS / TOKENS];
        for (b, (codes, room)) in acts.iter_mut().zip(&mut room.acts).take(blocks).enumerate() {
            *codes = codes_at((columns, even), TOKENS * b, 8 * i, room);
        }
        let factors = &room.factors[i - part.start];
        let scales = (&sixteens, &thirties);
        let tiles = (&acts[..blocks], &room.weights);
        products::<F>(tiles, scales, factors, groups, &mut room.sums, total);
    }
}

/// Codes of columns `first ..` from group `group` on; copied to `room` where columns are not
/// evenly spaced.
#[inline(always)]
unsafe fn codes_at(
    (columns, even): (&[Column<'_>], Option<Codes>),
    first: usize,
    group: usize,
    room: &mut Aligned<4096>,
) -> Codes {
    match even {
        Some(c) => Codes {
            start: c.start.add(c.stride * first + 32 * group),
            ..c
        },
        None => {
            for (to, c) in room.0.chunks_exact_mut(256).zip(&columns[first..]) {
                let from = c.q.as_ptr().add(32 * group).cast::<u8>();
                core::ptr::copy_nonoverlapping(from, to.as_mut_ptr().cast(), 256);
            }
            Codes {
                start: room.as_ptr(),
                stride: 256,
            }
        }
    }
}

/// Whether halves of groups are summed apart: there are sub-scales, and codes times sub-scales
/// do not fit a byte.
const fn halves<F: Format>() -> bool {
    F::SIXTEENS && !F::OWN_MINIMA && !negated::<F>()
}

/// Whether codes are multiplied by sub-scales and negated: −4 … 3 by −32 … 31.
const fn negated<F: Format>() -> bool {
    F::SIXTEENS && F::FIXED == 4
}

/// The quads of all groups of a chunk, as rows of tiles, to `room`; with sub-scales multiplied
/// in, if there are `scales`.
#[inline(always)]
unsafe fn unpack<F: Format>(
    f: F,
    codes: *const u8,
    stride: usize,
    groups: usize,
    scales: Option<&[__m512i; 8]>,
    room: &mut Aligned<4096>,
) {
    let group_bytes = 32 * (F::LOW + F::HIGH) as usize;
    let fixed = S::splat(F::FIXED);
    for (g, to) in room.0.chunks_exact_mut(512).enumerate().take(groups) {
        let quads = f.codes::<S>(codes.add(group_bytes * g), stride);
        let (low, high) = match scales {
            Some(s) => S::spread(s[g]),
            None => (fixed, fixed),
        };
        for (t, to) in to.chunks_exact_mut(64).enumerate() {
            let scale = if t < 4 { low } else { high };
            let quad = match scales {
                Some(_) if negated::<F>() => S::negated_products(quads[t], fixed, scale),
                // Two codes to 16 bits; products stay in their bytes.
                Some(_) => S::mul16(quads[t], scale),
                None => S::sub_bytes(quads[t], fixed),
            };
            S::store_bytes(quad, to.as_mut_ptr().cast());
        }
    }
}

/// Products between the start of one and its scaling.
const LAG: usize = 4;

/// Zeroes a tile of sums and starts a product into it.
macro_rules! start {
    ($sums:tt, $acts:tt, $weights:tt, $q:expr, $stride:expr, $w:expr) => {
        asm!(
            concat!("tileloadd ", $acts, ", [{q} + {s}*1]"),
            concat!("tileloadd ", $weights, ", [{w} + {b}*1]"),
            concat!("tilezero ", $sums),
            concat!("tdpbssd ", $sums, ", ", $acts, ", ", $weights),
            q = in(reg) $q,
            s = in(reg) $stride,
            w = in(reg) $w,
            b = in(reg) 64usize,
            out($sums) _,
            out($acts) _,
            out($weights) _,
            options(nostack)
        )
    };
}

/// Stores a tile of sums.
macro_rules! finish {
    ($sums:tt, $to:expr) => {
        asm!(
            concat!("tilestored [{to} + {b}*1], ", $sums),
            to = in(reg) $to,
            b = in(reg) 64usize,
            options(nostack)
        )
    };
}

/// All products of a chunk, and what is done with them.
#[inline(always)]
unsafe fn products<F: Format>(
    (acts, weights): (&[Codes], &Aligned<4096>),
    (sixteens, thirties): (&Sixteens<S>, &Thirties<S>),
    factors: &[MaybeUninit<Factors>; MAX_COLUMNS / TOKENS],
    groups: usize,
    sums: &mut Aligned<8192>,
    total: &mut [__m512; MAX_COLUMNS],
) {
    let (parts, bytes) = if halves::<F>() { (2, 16) } else { (1, 32) };
    // Rounded up to fours, as many as tiles of sums: weights and activations are there for eight
    // groups, also where a chunk has fewer.
    let each = (parts * groups).next_multiple_of(4);
    let count = each * acts.len();
    let to = sums.0.as_mut_ptr().cast::<u8>();
    let slot = |i: usize| to.wrapping_add(1024 * (i % 8));
    // Step i starts product i, which is number j of a block, and stores product i − 2. Tiles keep
    // their values between pieces of assembly: nothing else uses them.
    macro_rules! step {
        ($i:expr, $block:expr, $j:expr, $sums:tt, $acts:tt, $weights:tt, $old:tt) => {
            let i: usize = $i;
            if i < count {
                let codes = *acts.get_unchecked($block);
                let q = codes.start.add(bytes * $j);
                let w = weights.as_ptr().add(16 * bytes * $j);
                start!($sums, $acts, $weights, q, codes.stride, w);
            }
            if i >= 2 && i < count + 2 {
                finish!($old, slot(i - 2));
            }
        };
    }
    macro_rules! four_steps {
        ($i:expr, $block:expr, $j:expr $(, $then:ident)?) => {
            step!($i, $block, $j, "tmm0", "tmm4", "tmm6", "tmm2");
            $($then!(0);)?
            step!($i + 1, $block, $j + 1, "tmm1", "tmm5", "tmm7", "tmm3");
            $($then!(1);)?
            step!($i + 2, $block, $j + 2, "tmm2", "tmm4", "tmm6", "tmm0");
            $($then!(2);)?
            step!($i + 3, $block, $j + 3, "tmm3", "tmm5", "tmm7", "tmm1");
            $($then!(3);)?
        };
    }
    four_steps!(0, 0, 0);
    let blocks = total.as_chunks_mut::<TOKENS>().0.iter_mut().zip(factors);
    for (b, (total, factors)) in blocks.enumerate().take(acts.len()) {
        let factors = factors.assume_init_ref();
        let mut t = *total;
        if negated::<F>() {
            t = [S::zero(); TOKENS];
        }
        for j in (0..each).step_by(4) {
            let (i, first) = (each * b + j, j);
            macro_rules! scaled {
                ($k:literal) => {
                    let g = (first + $k) / parts;
                    if $k % parts == parts - 1 && g < groups {
                        let sums = slot(i + $k + 1 - parts);
                        scale::<F>((sixteens, thirties), factors, g, sums, &mut t);
                    }
                };
            }
            let (block, j) = match j + LAG {
                next if next < each => (b, next),
                _ => (b + 1, 0),
            };
            four_steps!(i + LAG, block, j, scaled);
        }
        if negated::<F>() {
            for (total, t) in total.iter_mut().zip(t) {
                *total = S::fnma(sixteens.d, t, *total);
            }
        } else {
            *total = t;
        }
    }
}

/// Adds the sums of group `g` to the totals of 16 columns.
#[inline(always)]
unsafe fn scale<F: Format>(
    (sixteens, thirties): (&Sixteens<S>, &Thirties<S>),
    x: &Factors,
    g: usize,
    sums: *const u8,
    total: &mut [__m512; TOKENS],
) {
    let dot = |c: usize| S::float(S::load_sums(sums.add(64 * c)));
    if negated::<F>() {
        for (c, t) in total.iter_mut().enumerate() {
            *t = S::fma(dot(c), S::splat_f(x.d[g][c]), *t);
        }
    } else if halves::<F>() {
        let [s0, s1] = S::halves(sixteens.scales[g]).map(|s| S::mul(s, sixteens.d));
        for (c, t) in total.iter_mut().enumerate() {
            let other = S::float(S::load_sums(sums.add(1024 + 64 * c)));
            let dot = S::fma(dot(c), s0, S::mul(other, s1));
            *t = S::fma(dot, S::splat_f(x.d[g][c]), *t);
        }
    } else if F::SIXTEENS {
        let [o0, o1] = S::halves(sixteens.offsets[g]).map(|o| S::mul(o, sixteens.m));
        let halves = x.scaled_halves.assume_init_ref();
        for (c, t) in total.iter_mut().enumerate() {
            *t = S::fma(S::mul(dot(c), sixteens.d), S::splat_f(x.d[g][c]), *t);
            *t = S::fnma(o0, S::splat_f(halves[2 * g][c]), *t);
            *t = S::fnma(o1, S::splat_f(halves[2 * g + 1][c]), *t);
        }
    } else {
        let (scale, offset) = (thirties.scales[g], thirties.offsets[g]);
        for (c, t) in total.iter_mut().enumerate() {
            *t = S::fma(S::mul(dot(c), scale), S::splat_f(x.d[g][c]), *t);
            if F::FIXED == 0 {
                let sum = x.scaled_sums.assume_init_ref()[g][c];
                *t = S::fnma(offset, S::splat_f(sum), *t);
            }
        }
    }
}
