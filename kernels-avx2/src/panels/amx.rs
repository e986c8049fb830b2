//! Panels of eight rows times many columns on tiles (AMX).
//!
//! ```text
//! for each part of the rows' length:
//!     scales and sums of the columns, those of 16 columns side by side
//!     for each two panels, for each chunk of the part:
//!         for each group of 32 weights:
//!             B[group] = the eight quads as unpacked: 8 tile rows of 16 rows × 4 weights
//!         for each 16 columns:
//!             for each group:
//!                 A = 32 activations of each of the columns
//!                 C[group] = A · B[group]            16 columns × 16 rows, exact in i32
//!             for each group, for each column:
//!                 total[column] += activation scale · scale · fp32(C[group][column]) − offset · sums
//! ```
//!
//! A quad of two panels is just what a tile of the second factor wants: 64 bytes, four
//! consecutive weights of each of sixteen rows. Tiles multiply signed bytes, so a fixed offset
//! is taken off the codes. Sub-scales of sixteen are multiplied in before: those of Q2_K and Q3_K
//! leave a byte (3 · 15, and −4 … 3 times −32 … 31 if it is negated). Those of Q6_K do not, and a
//! tile of sums for each half of a group was slower than AVX-512.
//!
//! The loops are apart because a tile cannot take what is still on its way to memory, nor a
//! register what a tile still writes: group by group it was slower than AVX-512. In the last one
//! the totals stay in registers, and all that differs by column is a broadcast from memory.
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

/// Tiles 0 to 3 are sums, 4 and 5 activations of `tokens` columns, 6 and 7 weights of a group.
fn configuration(tokens: usize) -> Configuration {
    let n = tokens as u8;
    Configuration::new([n, n, n, n, n, n, 8, 8], [64, 64, 64, 64, 32, 32, 64, 64])
}

/// 64-byte aligned room.
#[repr(align(64))]
struct Aligned<const N: usize>([u8; N]);

/// What goes through memory.
struct Room {
    /// Activations of a chunk, where columns are not evenly spaced.
    acts: Aligned<4096>,
    /// Eight groups of eight quads.
    weights: Aligned<4096>,
    /// Sums of eight groups for sixteen columns.
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
    /// Only where offsets have no scale of their own.
    scaled_sums: [[f32; TOKENS]; 8],
    /// Of both halves of each group; only where offsets have a scale of their own.
    scaled_halves: [[f32; TOKENS]; 16],
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
    /// `None` where columns are not evenly spaced in memory.
    fn evenly(columns: &[Column<'_>]) -> Option<Codes> {
        let at = |c: &Column<'_>| c.q.as_ptr() as usize;
        let stride = at(&columns[1]).wrapping_sub(at(&columns[0]));
        let even = columns
            .windows(2)
            .all(|c| at(&c[1]).wrapping_sub(at(&c[0])) == stride);
        even.then_some(Codes {
            start: columns[0].q.as_ptr().cast(),
            stride,
        })
    }
}

/// All pairs of panels with sixteens of columns, or with fewer than sixteen but at least
/// [`FEWEST`], if the format suits tiles. Returns the number of panels done.
#[inline(always)]
pub(super) unsafe fn pairs<F: Format>(
    f: F,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) -> usize {
    if F::SIXTEENS && !F::OWN_MINIMA && !negated::<F>() {
        return 0;
    }
    let configuration = configuration(columns.len().min(TOKENS));
    asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly));
    let done = w.panels() / 2 * 2;
    let mut room = Room {
        acts: Aligned([0; 4096]),
        weights: Aligned([0; 4096]),
        sums: Aligned([0; 8192]),
        // Filled chunk by chunk before they are read.
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
            let factors = Some(&sixteens.scales);
            unpack(f, codes, stride, groups, factors, &mut room.weights);
        } else {
            f.thirties(at, stride, groups, &mut thirties);
            unpack(f, codes, stride, groups, None, &mut room.weights);
        }
        let blocks = total.as_chunks_mut::<TOKENS>().0.iter_mut();
        let factors = &room.factors[i - part.start];
        for (b, (total, factors)) in blocks.zip(factors).enumerate() {
            if TOKENS * b >= columns.len() {
                break;
            }
            let factors = factors.assume_init_ref();
            let codes = codes_at((columns, even), TOKENS * b, 8 * i, &mut room.acts);
            for g in 4 * b..4 * b + 4 {
                ahead::<S, 1>(at, stride, g, step / 8);
            }
            multiply(codes, &room.weights, groups, &mut room.sums);
            if F::SIXTEENS {
                scale_16::<F>(&sixteens, factors, groups, &room.sums, total);
            } else {
                scale_32::<F>(&thirties, factors, groups, &room.sums, total);
            }
        }
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
                to.copy_from_slice(core::slice::from_raw_parts(from, 256));
            }
            Codes {
                start: room.0.as_ptr(),
                stride: 256,
            }
        }
    }
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
            S::store_bytes(quad, to.as_mut_ptr());
        }
    }
}

/// One tile of sums.
macro_rules! product {
    ($sums:tt, $acts:tt, $weights:tt, $q:expr, $stride:expr, $w:expr, $to:expr) => {
        asm!(
            concat!("tilezero ", $sums),
            concat!("tileloadd ", $acts, ", [{q} + {s}*1]"),
            concat!("tileloadd ", $weights, ", [{w} + {b}*1]"),
            concat!("tdpbssd ", $sums, ", ", $acts, ", ", $weights),
            concat!("tilestored [{to} + {b}*1], ", $sums),
            q = in(reg) $q,
            s = in(reg) $stride,
            w = in(reg) $w,
            b = in(reg) 64usize,
            to = in(reg) $to,
            out($sums) _,
            out($acts) _,
            out($weights) _,
            options(nostack)
        )
    };
}

/// Sums of `groups`, rounded up to fours: `weights` and the activations are there for eight, also
/// where a chunk has fewer.
#[inline(always)]
unsafe fn multiply(codes: Codes, weights: &Aligned<4096>, groups: usize, sums: &mut Aligned<8192>) {
    let (q, w, to) = (codes.start, weights.0.as_ptr(), sums.0.as_mut_ptr());
    for i in (0..groups).step_by(4) {
        macro_rules! part {
            ($i:literal, $sums:tt, $acts:tt, $weights:tt) => {
                product!(
                    $sums,
                    $acts,
                    $weights,
                    q.add(32 * (i + $i)),
                    codes.stride,
                    w.add(512 * (i + $i)),
                    to.add(1024 * (i + $i))
                );
            };
        }
        part!(0, "tmm0", "tmm4", "tmm6");
        part!(1, "tmm1", "tmm5", "tmm7");
        part!(2, "tmm2", "tmm4", "tmm6");
        part!(3, "tmm3", "tmm5", "tmm7");
    }
}

/// Adds the sums of a chunk with a scale for each group.
#[inline(always)]
unsafe fn scale_32<F: Format>(
    scales: &Thirties<S>,
    x: &Factors,
    groups: usize,
    sums: &Aligned<8192>,
    total: &mut [__m512; TOKENS],
) {
    let mut t = *total;
    for (g, sums) in sums.0.chunks_exact(1024).enumerate().take(groups) {
        let (scale, offset) = (scales.scales[g], scales.offsets[g]);
        for (i, t) in t.iter_mut().enumerate() {
            let dot = S::float(S::load_sums(sums.as_ptr().add(64 * i)));
            *t = S::fma(S::mul(dot, scale), S::splat_f(x.d[g][i]), *t);
            if F::FIXED == 0 {
                *t = S::fnma(offset, S::splat_f(x.scaled_sums[g][i]), *t);
            }
        }
    }
    *total = t;
}

/// Adds the sums of a chunk with sub-scales of sixteen, which are multiplied in.
#[inline(always)]
unsafe fn scale_16<F: Format>(
    scales: &Sixteens<S>,
    x: &Factors,
    groups: usize,
    sums: &Aligned<8192>,
    total: &mut [__m512; TOKENS],
) {
    // Eight columns at a time: they may need two registers each.
    for (half, total) in total.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (mut d, mut m) = ([S::zero(); 8], [S::zero(); 8]);
        for (g, sums) in sums.0.chunks_exact(1024).enumerate().take(groups) {
            let [o0, o1] = S::halves(scales.offsets[g]);
            for i in 0..8 {
                let c = 8 * half + i;
                let scale = S::splat_f(x.d[g][c]);
                let dot = S::float(S::load_sums(sums.as_ptr().add(64 * c)));
                if negated::<F>() {
                    d[i] = S::fnma(dot, scale, d[i]);
                } else {
                    d[i] = S::fma(dot, scale, d[i]);
                    m[i] = S::fma(o0, S::splat_f(x.scaled_halves[2 * g][c]), m[i]);
                    m[i] = S::fma(o1, S::splat_f(x.scaled_halves[2 * g + 1][c]), m[i]);
                }
            }
        }
        for i in 0..8 {
            total[i] = S::fma(scales.d, d[i], total[i]);
            if F::OWN_MINIMA {
                total[i] = S::fnma(scales.m, m[i], total[i]);
            }
        }
    }
}
