//! Rows times columns for every integer format.
//!
//! ```text
//! for each chunk of 256 weights, for each column:
//!     w[g] = d[g] · activation scale[g]                        eight fp32 at once
//!     total −= m[g] · activation scale[g] · Σ offsets · sums   eight groups at once
//!     for each group g of 32:
//!         products = codes · activations                       u8 × i8, pairs added: i16
//!         sums     = products · sub-scales                     pairs added: i32
//!         total   += w[g] · fp32(sums)                         eight partial sums
//! ```
//!
//! Bounds: unsigned codes are at most 112 (Q3_K, times 16), signed ones at most 128, so a
//! pair of products is at most 2·128·127 = 32,512 and fits an i16. With their sub-scales
//! (Q6_K: 2·63·127 times 128) a sum of two pairs is below 2^22, exact in fp32. Offsets are at
//! most 4,096 (Q6_K) and sums of 16 codes at most 2,032: two products are below 2^24.
//!
//! Deviations:
//! 1. *One column* (decode): codes go from memory to the product in registers, two rows at a
//!    time, so that one load of the activations serves both and two chains of additions run.
//! 2. *More columns* (prompt): the codes of two rows are unpacked once to the stack and serve
//!    every column; columns go four at a time.
//! 3. Signed codes: AVX2 multiplies unsigned by signed bytes only, so the sign of the code
//!    moves to the activation.
//! 4. The tables of shuffles and the weights w are hidden from the optimiser where codes go
//!    through registers: it would replace a load by two or three shuffles, of which the
//!    processor does one a cycle (Q2_K with one column: 30 against 36 billion products a second).
//! 5. What follows the last whole chunk is unpacked to the stack in both cases.

use crate::format::{Codes, Format, Head, PLACES, Rest, load_f32, pair_scales, store_f32};
use myq_blocks::{Column, MAX_COLUMNS, Rows};
use std::arch::x86_64::*;

/// The activations that one chunk meets.
#[derive(Clone, Copy)]
struct Acts<'a> {
    q: &'a [i8; 256],
    d: &'a [f32; 8],
    sums: &'a [i16; 16],
}

/// Chunk `i` of a column.
#[inline]
fn acts<'a>(column: &Column<'a>, i: usize) -> Acts<'a> {
    Acts {
        q: &column.q.as_chunks().0[i],
        d: &column.d.as_chunks().0[i],
        sums: &column.sums.as_chunks().0[i],
    }
}

/// A chunk unpacked.
#[derive(Clone, Copy)]
struct Unpacked {
    head: Head,
    codes: Codes,
}

impl Unpacked {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn zero() -> Unpacked {
        let (d, zero) = (_mm256_setzero_ps(), _mm256_setzero_si256());
        Unpacked {
            head: Head {
                d,
                m: d,
                scales: zero,
                offsets: zero,
            },
            codes: [zero; 8],
        }
    }
}

/// A row taken apart.
#[derive(Clone, Copy)]
struct Row<'a, const B: usize> {
    chunks: &'a [[u8; B]],
    rest: Option<Rest<'a>>,
    side: &'a [u8],
}

#[inline]
fn take_apart<F: Format<B>, const B: usize>(f: F, row: &[u8], cols: usize) -> Row<'_, B> {
    let (whole, weights) = (cols / 256, cols % 256);
    let chunks = &row.as_chunks().0[..whole];
    let rest = (weights > 0).then_some(Rest {
        bytes: &row[whole * B..],
        weights,
        index: whole,
    });
    Row {
        chunks,
        rest,
        side: f.side(row),
    }
}

/// Products of all rows with all columns.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn matmul<F: Format<B>, const B: usize>(
    f: F,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    assert!(
        columns.len() <= MAX_COLUMNS && columns.len() == out.len(),
        "columns of a call"
    );
    let (pairs, cols) = (w.rows() / 2, w.cols());
    let row = |r: usize| take_apart(f, w.row(r), cols);
    let mut room = [Unpacked::zero(); 2];
    for r in (0..2 * pairs).step_by(2) {
        some_rows(f, [row(r), row(r + 1)], columns, r, out, &mut room);
    }
    if w.rows() % 2 == 1 {
        some_rows(f, [row(2 * pairs)], columns, 2 * pairs, out, &mut room);
    }
}

/// Rows `at ..` of the result; `room` is for chunks unpacked.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn some_rows<F: Format<B>, const B: usize, const R: usize>(
    f: F,
    rows: [Row<'_, B>; R],
    columns: &[Column<'_>],
    at: usize,
    out: &mut [&mut [f32]],
    room: &mut [Unpacked; 2],
) {
    let room = &mut room.as_chunks_mut::<R>().0[0];
    if let [column] = columns {
        for (r, v) in one_column(f, rows, column, room).into_iter().enumerate() {
            out[0][at + r] = sum(v);
        }
        return;
    }
    let mut total = [[_mm256_setzero_ps(); R]; MAX_COLUMNS];
    many_columns(f, rows, columns, room, &mut total);
    for (out, total) in out.iter_mut().zip(&total) {
        for (r, v) in total.iter().enumerate() {
            out[at + r] = sum(*v);
        }
    }
}

/// Deviation 1.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn one_column<F: Format<B>, const B: usize, const R: usize>(
    f: F,
    rows: [Row<'_, B>; R],
    column: &Column<'_>,
    room: &mut [Unpacked; R],
) -> [__m256; R] {
    let mut total = [_mm256_setzero_ps(); R];
    // Deviation 4.
    let places = std::hint::black_box(&PLACES);
    for i in 0..rows[0].chunks.len() {
        let a = acts(column, i);
        let mut w = [[0.0f32; 8]; R];
        let mut scales = [_mm256_setzero_si256(); R];
        for r in 0..R {
            // SAFETY: this function has the instructions that the method needs.
            let head = unsafe { f.head(&rows[r].chunks[i], rows[r].side, i) };
            scales[r] = head.scales;
            total[r] = begin::<F, B>(&head, a, &mut w[r], total[r]);
        }
        // Deviation 4.
        let w = std::hint::black_box(&w);
        let chunks: [&[u8; B]; R] = std::array::from_fn(|r| &rows[r].chunks[i]);
        macro_rules! groups {
            ($($g:literal)*) => { $(
                let q = load_q(a.q, $g);
                for r in 0..R {
                    // SAFETY: this function has the instructions that the method needs.
                    let codes = unsafe { f.codes::<$g>(chunks[r]) };
                    let s = scale_pairs::<F, B>(scales[r], &places[$g]);
                    let v = products::<F, B>(codes, q, s);
                    total[r] = _mm256_fmadd_ps(v, _mm256_set1_ps(w[r][$g]), total[r]);
                }
            )* };
        }
        groups!(0 1 2 3 4 5 6 7);
    }
    if let Some(groups) = unpack_rests(f, rows, room) {
        let a = acts(column, rows[0].chunks.len());
        [total] = tile::<F, B, R, 1>(room, groups, [a], [total]);
    }
    total
}

/// Deviation 2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn many_columns<F: Format<B>, const B: usize, const R: usize>(
    f: F,
    rows: [Row<'_, B>; R],
    columns: &[Column<'_>],
    room: &mut [Unpacked; R],
    total: &mut [[__m256; R]; MAX_COLUMNS],
) {
    for i in 0..rows[0].chunks.len() {
        // Filled in place: a chunk unpacked is 384 bytes, too much to move about.
        for (u, row) in room.iter_mut().zip(&rows) {
            unpack(f, &row.chunks[i], row.side, i, u);
        }
        all_columns::<F, B, R>(room, 8, columns, i, total);
    }
    if let Some(groups) = unpack_rests(f, rows, room) {
        all_columns::<F, B, R>(room, groups, columns, rows[0].chunks.len(), total);
    }
}

/// One unpacked chunk of `R` rows with every column.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn all_columns<F: Format<B>, const B: usize, const R: usize>(
    rows: &[Unpacked; R],
    groups: usize,
    columns: &[Column<'_>],
    i: usize,
    total: &mut [[__m256; R]; MAX_COLUMNS],
) {
    let (fours, others) = columns.as_chunks::<4>();
    let (total4, total1) = total.as_chunks_mut::<4>().0.split_at_mut(fours.len());
    for ([c, d, e, f], t) in fours.iter().zip(total4) {
        let a = [acts(c, i), acts(d, i), acts(e, i), acts(f, i)];
        *t = tile::<F, B, R, 4>(rows, groups, a, *t);
    }
    for (c, t) in others.iter().zip(total1.as_flattened_mut()) {
        [*t] = tile::<F, B, R, 1>(rows, groups, [acts(c, i)], [*t]);
    }
}

/// One unpacked chunk of `R` rows with `N` columns, added to `total[column][row]`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tile<F: Format<B>, const B: usize, const R: usize, const N: usize>(
    rows: &[Unpacked; R],
    groups: usize,
    acts: [Acts<'_>; N],
    mut total: [[__m256; R]; N],
) -> [[__m256; R]; N] {
    let mut w = [[[0.0f32; 8]; R]; N];
    for n in 0..N {
        for r in 0..R {
            total[n][r] = begin::<F, B>(&rows[r].head, acts[n], &mut w[n][r], total[n][r]);
        }
    }
    for (g, place) in PLACES.iter().enumerate().take(groups) {
        for r in 0..R {
            let codes = rows[r].codes[g];
            let s = scale_pairs::<F, B>(rows[r].head.scales, place);
            for n in 0..N {
                let v = products::<F, B>(codes, load_q(acts[n].q, g), s);
                total[n][r] = _mm256_fmadd_ps(v, _mm256_set1_ps(w[n][r][g]), total[n][r]);
            }
        }
    }
    total
}

/// Weights of the groups into `w`, offsets of the chunk taken off `total`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn begin<F: Format<B>, const B: usize>(
    head: &Head,
    a: Acts<'_>,
    w: &mut [f32; 8],
    total: __m256,
) -> __m256 {
    let d = load_f32(a.d, 0);
    store_f32(w, 0, _mm256_mul_ps(head.d, d));
    if !F::OFFSET {
        return total;
    }
    // SAFETY: sixteen i16 are the 32 bytes that the load reads; it needs no alignment.
    let sums = unsafe { _mm256_loadu_si256(a.sums.as_ptr().cast()) };
    let offsets = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, head.offsets));
    _mm256_fnmadd_ps(offsets, _mm256_mul_ps(head.m, d), total)
}

/// Sub-scales of the group with that place, or ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scale_pairs<F: Format<B>, const B: usize>(scales: __m256i, place: &[u8; 32]) -> __m256i {
    if F::SCALED {
        pair_scales(scales, place)
    } else {
        _mm256_set1_epi16(1)
    }
}

/// Eight sums of four scaled products of a group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn products<F: Format<B>, const B: usize>(codes: __m256i, q: __m256i, scales: __m256i) -> __m256 {
    let pairs = if F::SIGNED {
        // Deviation 3.
        _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(q, codes))
    } else {
        _mm256_maddubs_epi16(codes, q)
    };
    _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, scales))
}

/// The 32 activation codes of group `g`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_q(q: &[i8; 256], g: usize) -> __m256i {
    let q = &q[32 * g..32 * g + 32];
    // SAFETY: `q` has the 32 bytes that the load reads; it needs no alignment.
    unsafe { _mm256_loadu_si256(q.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack<F: Format<B>, const B: usize>(
    f: F,
    chunk: &[u8; B],
    side: &[u8],
    i: usize,
    to: &mut Unpacked,
) {
    // SAFETY: this function has the instructions that the methods need.
    unsafe {
        to.head = f.head(chunk, side, i);
        to.codes[0] = f.codes::<0>(chunk);
        to.codes[1] = f.codes::<1>(chunk);
        to.codes[2] = f.codes::<2>(chunk);
        to.codes[3] = f.codes::<3>(chunk);
        to.codes[4] = f.codes::<4>(chunk);
        to.codes[5] = f.codes::<5>(chunk);
        to.codes[6] = f.codes::<6>(chunk);
        to.codes[7] = f.codes::<7>(chunk);
    }
}

/// Deviation 5: what follows the chunks of each row, and how many groups it has, if any.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack_rests<F: Format<B>, const B: usize, const R: usize>(
    f: F,
    rows: [Row<'_, B>; R],
    room: &mut [Unpacked; R],
) -> Option<usize> {
    for (to, row) in room.iter_mut().zip(&rows) {
        // SAFETY: this function has the instructions that the method needs.
        to.head = unsafe { f.rest(row.rest?, row.side, &mut to.codes) };
    }
    Some(rows[0].rest?.weights.div_ceil(32))
}

/// Sum of eight.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn sum(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}
