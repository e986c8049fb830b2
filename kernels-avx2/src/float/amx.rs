//! Rows of fp16 and bf16 times many columns on tiles (AMX-BF16).
//!
//! The product of two bf16 numbers is exact in fp32. An fp16 number is the sum of two bf16
//! numbers, an fp32 number that of three:
//!
//! ```text
//! w = w0 + w1,  x = x0 + x1 + x2
//! w·x = w0·x0 + w1·x0 + w0·x1 + w1·x1 + w0·x2
//! ```
//!
//! Left out is w1·x2: below 2^-7 · 2^-15 = 2^-22 of the product (as numbers are cut off, not
//! rounded), which is what fp32 loses in four additions.
//!
//! ```text
//! for each part of the columns:
//!     B[block] = the three planes of 32 values of up to 32 columns, as second factors of tiles
//!     for each 16 rows, for each block of the part:
//!         A[next block] = the two planes of the rows
//!         C += A[block] · B[block]                   16 rows × 32 columns, fp32
//! ```
//!
//! A block is split while tiles multiply the one before. Its pair i, which tiles multiply in one
//! step, is values i and i + 16: then a pair is made of two vectors by a shift and an or. Products
//! with x0 have sums of their own, which hides half of the latency.
//!
//! Source: Intel, Architecture Instruction Set Extensions, chapter on AMX; the splitting is that
//! of Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype for
//! Higher-Precision Computations, 2019.

use super::Float;
use crate::lanes::transpose;
use crate::tiles::Configuration;
use core::arch::asm;
use core::arch::x86_64::*;
use myq_blocks::{Column, Rows};

/// Columns of a tile; fewer take as long as these.
const TOKENS: usize = 16;
/// Fewer columns than this are faster without tiles.
pub(super) const FEWEST: usize = 12;
/// Values of a block: what one tile instruction multiplies of each row.
const BLOCK: usize = 32;
/// Blocks of a part: those of the columns take 96 KiB.
const PART: usize = 16;
/// Rows of a step.
const STEP: usize = 16;
/// Bytes of a tile.
const TILE: usize = 1024;
/// Bits of an fp32 number that are those of a bf16 number.
const TOP: i32 = 0xffff_0000_u32 as i32;

/// Tiles 0 and 1 are sums of the products of the first and the last 16 columns with x0, 2 and 3
/// those of the other products, 4 and 5 rows, 6 and 7 columns.
static CONFIGURATION: Configuration = Configuration::new([16; 8], [64; 8]);

/// What goes through memory.
#[repr(C, align(64))]
struct Room {
    /// For each block of a part: the three planes of the first 16 columns, then of the others.
    columns: [[[u8; 3 * TILE]; 2]; PART],
    /// For a block and the next: the two planes of the rows.
    rows: [[u8; 2 * TILE]; 2],
    /// Tiles 0 to 3.
    sums: [u8; 4 * TILE],
}

/// A format that has planes. Pointers must be readable for the weights named.
pub(super) trait Planes: Float {
    /// Whether there is a second plane.
    const TWO: bool;
    /// The planes of a block.
    unsafe fn planes(p: *const u8) -> (__m512i, __m512i);
}

impl Planes for super::F16 {
    const TWO: bool = true;

    #[inline(always)]
    unsafe fn planes(p: *const u8) -> (__m512i, __m512i) {
        let half = |i: usize| _mm512_cvtph_ps(_mm256_loadu_si256(p.add(32 * i).cast()));
        let (a, b) = (half(0), half(1));
        let rest = |v| _mm512_castps_si512(_mm512_sub_ps(v, top(v)));
        (pair(a, b), pair_of_tops(rest(a), rest(b)))
    }
}

impl Planes for super::Bf16 {
    const TWO: bool = false;

    #[inline(always)]
    unsafe fn planes(p: *const u8) -> (__m512i, __m512i) {
        let all = _mm512_loadu_si512(p.cast());
        let half = |v| _mm512_cvtepu16_epi32(v);
        let low = half(_mm512_castsi512_si256(all));
        let high = half(_mm512_extracti64x4_epi64::<1>(all));
        (
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(high)),
            _mm512_setzero_si512(),
        )
    }
}

/// The bf16 number that a value begins with.
#[inline(always)]
unsafe fn top(v: __m512) -> __m512 {
    let bits = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(TOP));
    _mm512_castsi512_ps(bits)
}

/// Pairs of what `a` and `b` begin with.
#[inline(always)]
unsafe fn pair(a: __m512, b: __m512) -> __m512i {
    let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(a));
    // low | (b & TOP)
    _mm512_ternarylogic_epi32::<0xf8>(low, _mm512_castps_si512(b), _mm512_set1_epi32(TOP))
}

/// The same of values that have nothing behind.
#[inline(always)]
unsafe fn pair_of_tops(a: __m512i, b: __m512i) -> __m512i {
    _mm512_or_si512(_mm512_srli_epi32::<16>(a), b)
}

/// Products of all rows with all columns.
///
/// # Safety
/// The processor has AMX-BF16 and AVX-512, the system allows tiles, there are at most 32 columns,
/// each has `w.cols()` values and each output `w.rows()`.
#[inline(always)]
pub(super) unsafe fn matmul<F: Planes>(
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    let mut room = std::mem::MaybeUninit::<Room>::uninit();
    // Every byte is written before it is read.
    let room = room.as_mut_ptr();
    let (few, last) = columns.split_at(columns.len().min(TOKENS));
    asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly));
    for from in (0..w.cols()).step_by(PART * BLOCK) {
        let len = (PART * BLOCK).min(w.cols() - from);
        for block in 0..len.div_ceil(BLOCK) {
            for (half, columns) in [few, last].into_iter().enumerate() {
                let to = (&raw mut (*room).columns[block][half]).cast();
                if !columns.is_empty() {
                    split_columns(columns, from + BLOCK * block, w.cols(), to);
                }
            }
        }
        for first in (0..w.rows()).step_by(STEP) {
            let rows = std::array::from_fn(|r| {
                // Rows that are not there are the last one again; their products are dropped.
                let row = w.row((first + r).min(w.rows() - 1));
                row[2 * from..2 * (from + len)].as_ptr()
            });
            if last.is_empty() {
                step::<F, false>(&rows, len, room);
            } else {
                step::<F, true>(&rows, len, room);
            }
            let place = (first, w.rows());
            store(&raw const (*room).sums, place, from > 0, out);
        }
    }
    asm!("tilerelease", options(nostack, nomem));
}

/// The three planes of values `at ..` of the columns; zero from `end` on.
#[inline(always)]
unsafe fn split_columns(columns: &[Column<'_>], at: usize, end: usize, to: *mut u8) {
    let mut halves = [[_mm512_setzero_ps(); TOKENS]; 2];
    for (h, half) in halves.iter_mut().enumerate() {
        let left = end.saturating_sub(at + 16 * h).min(16);
        let mask = ((1u32 << left) - 1) as __mmask16;
        for (t, v) in half.iter_mut().enumerate() {
            let x = columns[t.min(columns.len() - 1)].x.as_ptr();
            *v = _mm512_maskz_loadu_ps(mask, x.wrapping_add(at + 16 * h));
        }
        transpose(half);
    }
    let [low, high] = halves;
    for (i, (a, b)) in low.into_iter().zip(high).enumerate() {
        let to = to.add(64 * i);
        let rest = |v| _mm512_sub_ps(v, top(v));
        let (a1, b1) = (rest(a), rest(b));
        let last = |v| _mm512_castps_si512(rest(v));
        _mm512_store_si512(to.cast(), pair(a, b));
        _mm512_store_si512(to.add(TILE).cast(), pair(a1, b1));
        _mm512_store_si512(to.add(2 * TILE).cast(), pair_of_tops(last(a1), last(b1)));
    }
}

macro_rules! load {
    ($tile:tt, $from:expr) => {
        asm!(
            concat!("tileloadd ", $tile, ", [{p} + {s}*1]"),
            p = in(reg) $from,
            s = in(reg) 64usize,
            out($tile) _,
            options(nostack, readonly)
        )
    };
}

macro_rules! product {
    ($sums:tt, $rows:tt, $columns:tt) => {
        asm!(
            concat!("tdpbf16ps ", $sums, ", ", $rows, ", ", $columns),
            out($sums) _,
            options(nostack, nomem)
        )
    };
}

/// The sums of 16 rows over `len` values; `MORE` where there are more than 16 columns.
///
/// Sums stay in tiles from one block to the next: nothing between uses tiles.
#[inline(always)]
unsafe fn step<F: Planes, const MORE: bool>(rows: &[*const u8; STEP], len: usize, room: *mut Room) {
    asm!(
        "tilezero tmm0",
        "tilezero tmm1",
        "tilezero tmm2",
        "tilezero tmm3",
        out("tmm0") _,
        out("tmm1") _,
        out("tmm2") _,
        out("tmm3") _,
        options(nostack, nomem)
    );
    let blocks = len.div_ceil(BLOCK);
    split_rows::<F>(rows, 0, len, room);
    for block in 0..blocks {
        if block + 1 < blocks {
            split_rows::<F>(rows, block + 1, len, room);
        }
        let a = (&raw const (*room).rows[block % 2]).cast::<u8>();
        let b = (&raw const (*room).columns[block]).cast::<u8>();
        multiply::<F, MORE>(a, b);
    }
    for (n, to) in (*room).sums.chunks_exact_mut(TILE).enumerate() {
        macro_rules! store {
            ($tile:tt) => {
                asm!(
                    concat!("tilestored [{p} + {s}*1], ", $tile),
                    p = in(reg) to.as_mut_ptr(),
                    s = in(reg) 64usize,
                    options(nostack)
                )
            };
        }
        match n {
            0 => store!("tmm0"),
            1 => store!("tmm1"),
            2 => store!("tmm2"),
            _ => store!("tmm3"),
        }
    }
}

/// The planes of a block of the rows.
#[inline(always)]
unsafe fn split_rows<F: Planes>(
    rows: &[*const u8; STEP],
    block: usize,
    len: usize,
    room: *mut Room,
) {
    let (at, to) = (
        BLOCK * block,
        (&raw mut (*room).rows[block % 2]).cast::<u8>(),
    );
    for (r, row) in rows.iter().enumerate() {
        let planes = if at + BLOCK <= len {
            F::planes(row.add(2 * at))
        } else {
            let mut last = [0; 2 * BLOCK];
            let bytes = std::slice::from_raw_parts(row.add(2 * at), 2 * (len - at));
            last[..bytes.len()].copy_from_slice(bytes);
            F::planes(last.as_ptr())
        };
        _mm512_store_si512(to.add(64 * r).cast(), planes.0);
        if F::TWO {
            _mm512_store_si512(to.add(64 * r + TILE).cast(), planes.1);
        }
    }
}

/// Adds the products of one block: of the rows at `a` and the columns at `b`.
#[inline(always)]
unsafe fn multiply<F: Planes, const MORE: bool>(a: *const u8, b: *const u8) {
    let more = b.add(3 * TILE);
    load!("tmm4", a);
    if F::TWO {
        load!("tmm5", a.add(TILE));
    }
    macro_rules! plane {
        ($n:literal, $first:tt, $second:tt, $low:expr) => {
            load!("tmm6", b.add($n * TILE));
            product!($first, "tmm4", "tmm6");
            if MORE {
                load!("tmm7", more.add($n * TILE));
                product!($second, "tmm4", "tmm7");
            }
            if F::TWO && $low {
                product!($first, "tmm5", "tmm6");
                if MORE {
                    product!($second, "tmm5", "tmm7");
                }
            }
        };
    }
    plane!(0, "tmm0", "tmm1", true);
    plane!(1, "tmm2", "tmm3", true);
    plane!(2, "tmm2", "tmm3", false);
}

/// Writes, or adds, the sums of rows `first ..` of `rows` to the outputs.
#[inline(always)]
unsafe fn store(
    sums: *const [u8; 4 * TILE],
    (first, rows): (usize, usize),
    add: bool,
    out: &mut [&mut [f32]],
) {
    for (half, out) in out.chunks_mut(TOKENS).enumerate() {
        let from = sums.cast::<u8>().add(TILE * half);
        let mut v = [_mm512_setzero_ps(); TOKENS];
        for (r, v) in v.iter_mut().enumerate() {
            let tile = |n: usize| _mm512_load_ps(from.add(n * TILE + 64 * r).cast());
            *v = _mm512_add_ps(tile(0), tile(2));
        }
        transpose(&mut v);
        for (v, out) in v.into_iter().zip(out) {
            let mask = ((1u32 << (rows - first).min(16)) - 1) as __mmask16;
            let to = out.as_mut_ptr().add(first);
            let old = _mm512_maskz_loadu_ps(if add { mask } else { 0 }, to);
            _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(v, old));
        }
    }
}
