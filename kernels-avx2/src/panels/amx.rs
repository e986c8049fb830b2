//! Panels of eight rows times many columns on tiles (AMX).
//!
//! ```text
//! for each two panels, for each chunk:
//!     for each group of 32 weights:
//!         B[group] = the eight quads as unpacked: 8 tile rows of 16 rows × 4 weights
//!     for each group:
//!         A = 32 activations of each of up to 16 columns
//!         C[group] = A · B[group]                16 columns × 16 rows, exact in i32
//!     for each group, for each column:
//!         total[column] += activation scale · scale · fp32(C[group][column]) − offset · sums
//! ```
//!
//! A quad of two panels is just what a tile of the second factor wants: 64 bytes, four
//! consecutive weights of each of sixteen rows. Tiles multiply signed bytes, so a fixed offset
//! is taken off the codes. Sub-scales of sixteen need a tile of sums for each half of a group,
//! but those of Q2_K and Q3_K: codes times sub-scales fit a byte (3 · 15, and −4 … 3 times −32 …
//! 31 if it is negated), so that is what tiles multiply.
//!
//! Where there are more than 16 columns, the second and third loop are done again for the next 16,
//! and weights are unpacked once for all.
//!
//! The three loops are apart because a tile cannot take what is still on its way to memory, nor
//! a register what a tile still writes: group by group it was slower than AVX-512.
//!
//! Source: Intel, Architecture Instruction Set Extensions, chapter on AMX.
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of one loop that needs its instruction set and checked lengths"
)]

use super::formats::{Format, Sixteens, Thirties};
use super::isa::{Avx512 as S, Isa};
use super::{Acts, ahead};
use core::arch::asm;
use core::arch::x86_64::{__m512, __m512i};
use myq_blocks::panels::{PANEL, chunk_bytes, head_bytes};
use myq_blocks::{Column, MAX_COLUMNS, Rows};

/// Columns of a tile.
pub(super) const TOKENS: usize = 16;
/// Fewer columns than this are left to AVX-512.
pub(super) const FEWEST: usize = 4;

/// Asks the system for the tile registers; `false` where processor or system lack them.
#[cfg(target_os = "linux")]
pub(crate) fn available() -> bool {
    const TILE_INT8_AND_BF16: u32 = 1 << 24 | 1 << 25 | 1 << 22;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    let has =
        core::arch::x86_64::__cpuid_count(7, 0).edx & TILE_INT8_AND_BF16 == TILE_INT8_AND_BF16;
    // SAFETY: the call takes two numbers; it allows this process to use the tile registers.
    has && unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        ) == 0
    }
}

/// Without a system that we know how to ask, there are no tiles.
#[cfg(not(target_os = "linux"))]
pub(crate) fn available() -> bool {
    false
}

/// Shapes of the tiles: rows, and bytes of a row. Tiles 0 to 3 are sums, 4 and 5 activations, 6
/// and 7 weights, of a group or of half a group.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    fn new(tokens: usize, halves: bool) -> Configuration {
        let n = tokens as u8;
        let (quads, bytes) = if halves { (4, 16) } else { (8, 32) };
        let mut c = Configuration {
            palette: 1,
            start: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        c.rows[..8].copy_from_slice(&[n, n, n, n, n, n, quads, quads]);
        c.row_bytes[..8].copy_from_slice(&[64, 64, 64, 64, bytes, bytes, 64, 64]);
        c
    }
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
    /// Sums of eight groups, or of their sixteen halves, for sixteen columns.
    sums: Aligned<16384>,
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
/// [`FEWEST`]. Returns the number of panels done.
#[inline(always)]
pub(super) unsafe fn pairs<F: Format>(
    f: F,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) -> usize {
    let configuration = Configuration::new(columns.len().min(TOKENS), halves::<F>());
    asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly));
    let done = w.panels() / 2 * 2;
    let mut room = Room {
        acts: Aligned([0; 4096]),
        weights: Aligned([0; 4096]),
        sums: Aligned([0; 16384]),
    };
    for p in (0..done).step_by(2) {
        let mut total = [S::zero(); MAX_COLUMNS];
        if columns.len() >= TOKENS {
            two_panels::<F, TOKENS>(f, w, p, columns, &mut room, &mut total);
        } else {
            two_panels::<F, 0>(f, w, p, columns, &mut room, &mut total);
        }
        let at = PANEL * p;
        for (out, total) in out.iter_mut().zip(&total) {
            S::store(*total, out[at..at + 2 * PANEL].as_mut_ptr());
        }
    }
    asm!("tilerelease", options(nostack, nomem));
    done
}

/// Panels `p` and `p + 1`; `N` is the number of columns of a tile, or 0 if it is not known
/// beforehand.
#[inline(always)]
unsafe fn two_panels<F: Format, const N: usize>(
    f: F,
    w: Rows<'_>,
    p: usize,
    columns: &[Column<'_>],
    room: &mut Room,
    total: &mut [__m512; MAX_COLUMNS],
) {
    let (panel, stride, cols) = (w.panel(p).as_ptr(), PANEL * w.row_bytes(), w.cols());
    let step = chunk_bytes(f.dtype(), 8);
    let (whole, rest) = (cols / 256, cols % 256 / 32);
    let even = Codes::evenly(columns);
    for i in 0..=whole {
        let groups = if i < whole { 8 } else { rest };
        if groups == 0 {
            break;
        }
        let at = panel.add(step * i);
        ahead::<S, 1>(at, stride, step);
        let place = (8 * i, groups);
        if F::SIXTEENS {
            chunk_16::<F, N>(f, at, stride, place, (columns, even), room, total);
        } else {
            chunk_32::<F, N>(f, at, stride, place, (columns, even), room, total);
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

/// Number of columns of a tile, a constant where `N` says it.
#[inline(always)]
fn count<const N: usize>(columns: &[Column<'_>]) -> usize {
    if N > 0 { N } else { columns.len() }
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

/// Sums of `count` parts of a chunk, rounded up to fours: groups, or halves of groups.
///
/// `weights` and the activations are there for eight groups, also where a chunk has fewer.
#[inline(always)]
unsafe fn multiply<const HALVES: bool>(
    codes: Codes,
    weights: &Aligned<4096>,
    count: usize,
    sums: &mut Aligned<16384>,
) {
    let bytes = if HALVES { 16 } else { 32 };
    let (q, w, to) = (codes.start, weights.0.as_ptr(), sums.0.as_mut_ptr());
    for i in (0..count).step_by(4) {
        macro_rules! part {
            ($i:literal, $sums:tt, $acts:tt, $weights:tt) => {
                product!(
                    $sums,
                    $acts,
                    $weights,
                    q.add(bytes * (i + $i)),
                    codes.stride,
                    w.add(16 * bytes * (i + $i)),
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

/// One chunk with a scale for each group; `place` is the number of its first group in the row,
/// and how many it has.
#[inline(always)]
unsafe fn chunk_32<F: Format, const N: usize>(
    f: F,
    p: *const u8,
    stride: usize,
    (first, groups): (usize, usize),
    (columns, even): (&[Column<'_>], Option<Codes>),
    room: &mut Room,
    total: &mut [__m512; MAX_COLUMNS],
) {
    let mut scales = Thirties::<S>::zero();
    f.thirties(p, stride, groups, &mut scales);
    let at = p.add(head_bytes(f.dtype(), groups));
    unpack(f, at, stride, groups, None, &mut room.weights);
    for from in (0..columns.len()).step_by(TOKENS) {
        let codes = codes_at((columns, even), from, first, &mut room.acts);
        multiply::<false>(codes, &room.weights, groups, &mut room.sums);
        let (columns, total) = (&columns[from..], &mut total[from..]);
        for (g, sums) in room.sums.0.chunks_exact(1024).enumerate().take(groups) {
            let (scale, offset) = (scales.scales[g], scales.offsets[g]);
            for t in 0..count::<N>(columns) {
                let a = Acts::new(&columns[t], first + g);
                let dot = S::float(S::load_sums(sums.as_ptr().add(64 * t)));
                total[t] = S::fma(S::mul(dot, scale), S::splat_f(*a.d), total[t]);
                if F::FIXED == 0 {
                    total[t] = S::fnma(offset, S::splat_f(*a.scaled_sums), total[t]);
                }
            }
        }
    }
}

/// One chunk with sub-scales of sixteen; arguments as of `chunk_32`.
#[inline(always)]
unsafe fn chunk_16<F: Format, const N: usize>(
    f: F,
    p: *const u8,
    stride: usize,
    (first, groups): (usize, usize),
    (columns, even): (&[Column<'_>], Option<Codes>),
    room: &mut Room,
    total: &mut [__m512; MAX_COLUMNS],
) {
    let mut scales = Sixteens::<S>::zero();
    f.sixteens(p, stride, groups, &mut scales);
    let at = p.add(head_bytes(f.dtype(), groups));
    let factors = (!halves::<F>()).then_some(&scales.scales);
    unpack(f, at, stride, groups, factors, &mut room.weights);
    for from in (0..columns.len()).step_by(TOKENS) {
        let codes = codes_at((columns, even), from, first, &mut room.acts);
        let (columns, total) = (&columns[from..], &mut total[from..]);
        if halves::<F>() {
            multiply::<true>(codes, &room.weights, 2 * groups, &mut room.sums);
        } else {
            multiply::<false>(codes, &room.weights, groups, &mut room.sums);
        }
        let mut parts = [(S::zero(), S::zero()); TOKENS];
        let bytes = if halves::<F>() { 2048 } else { 1024 };
        for (g, sums) in room.sums.0.chunks_exact(bytes).enumerate().take(groups) {
            let ((_, s0, s1), offsets) = (S::pair(scales.scales[g]), scales.offsets[g]);
            for t in 0..count::<N>(columns) {
                let a = Acts::new(&columns[t], first + g);
                let (scale, (d, m)) = (S::splat_f(*a.d), &mut parts[t]);
                let x = S::float(S::load_sums(sums.as_ptr().add(64 * t)));
                if halves::<F>() {
                    let y = S::float(S::load_sums(sums.as_ptr().add(64 * t + 1024)));
                    *d = S::fma(S::fma(x, s0, S::mul(y, s1)), scale, *d);
                } else if negated::<F>() {
                    *d = S::fnma(x, scale, *d);
                } else {
                    let minima = S::float(S::madd(offsets, S::all(a.sums)));
                    *d = S::fma(x, scale, *d);
                    *m = S::fma(minima, scale, *m);
                }
            }
        }
        for (t, (d, m)) in parts.iter().enumerate().take(count::<N>(columns)) {
            total[t] = S::fma(scales.d, *d, total[t]);
            if F::OWN_MINIMA {
                total[t] = S::fnma(scales.m, *m, total[t]);
            }
        }
    }
}
