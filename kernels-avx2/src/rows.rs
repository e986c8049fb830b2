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
//! Bounds: codes are at most 63, so a pair of products is at most 2·63·127 = 16,002; signed
//! codes are at most 128, a pair 2·128·127 = 32,512: both fit an i16. With sub-scales of at
//! most 128 a sum of two is below 2^22, exact in fp32. Offsets are at most 4,096 (Q6_K) and
//! sums of 16 codes at most 2,032: below 2^24.
//!
//! Deviations:
//! 1. *One column* (decode): codes go from memory to the product in registers, two rows at a
//!    time, so that one load of the activations serves both and two chains of additions run.
//! 2. *More columns* (prompt): the codes of two rows are unpacked once to the stack and serve
//!    every column; columns go four at a time.
//! 3. Signed codes: AVX2 multiplies unsigned by signed bytes only, so the sign of the code
//!    moves to the activation.
//! 4. What follows the last whole chunk is unpacked to the stack in both cases.

use crate::format::{Codes, Format, Head, Rest, load_f32, load32, pair_scales, store_f32};
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
    Acts { q: &column.q.as_chunks().0[i], d: &column.d.as_chunks().0[i], sums: &column.sums.as_chunks().0[i] }
}

/// A chunk unpacked.
struct Unpacked {
    head: Head,
    codes: Codes,
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
    let rest = (weights > 0).then_some(Rest { bytes: &row[whole * B..], weights, index: whole });
    Row { chunks, rest, side: f.side(row) }
}

/// Products of all rows with all columns.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn matmul<F: Format<B>, const B: usize>(f: F, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    assert!(columns.len() <= MAX_COLUMNS && columns.len() == out.len(), "columns of a call");
    let (pairs, cols) = (w.rows() / 2, w.cols());
    let row = |r: usize| take_apart(f, w.row(r), cols);
    for r in (0..2 * pairs).step_by(2) {
        some_rows(f, [row(r), row(r + 1)], columns, r, out);
    }
    if w.rows() % 2 == 1 {
        some_rows(f, [row(2 * pairs)], columns, 2 * pairs, out);
    }
}

/// Rows `at ..` of the result.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn some_rows<F: Format<B>, const B: usize, const R: usize>(
    f: F,
    rows: [Row<'_, B>; R],
    columns: &[Column<'_>],
    at: usize,
    out: &mut [&mut [f32]],
) {
    if let [column] = columns {
        for (r, v) in one_column(f, rows, column).into_iter().enumerate() {
            out[0][at + r] = sum(v);
        }
        return;
    }
    let mut total = [[_mm256_setzero_ps(); R]; MAX_COLUMNS];
    many_columns(f, rows, columns, &mut total);
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
) -> [__m256; R] {
    let mut total = [_mm256_setzero_ps(); R];
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
        let chunks: [&[u8; B]; R] = std::array::from_fn(|r| &rows[r].chunks[i]);
        macro_rules! groups {
            ($($g:literal)*) => { $(
                let q = load_q(a.q, $g);
                for r in 0..R {
                    // SAFETY: this function has the instructions that the method needs.
                    let codes = unsafe { f.codes::<$g>(chunks[r]) };
                    let s = scale_pairs::<F, B>(scales[r], $g);
                    let v = products::<F, B>(codes, q, s);
                    total[r] = _mm256_fmadd_ps(v, _mm256_set1_ps(w[r][$g]), total[r]);
                }
            )* };
        }
        groups!(0 1 2 3 4 5 6 7);
    }
    for (r, row) in rows.iter().enumerate() {
        if let Some(rest) = row.rest {
            let last = unpack_rest(f, rest, row.side);
            let a = acts(column, rest.index);
            [[total[r]]] = tile::<F, B, 1, 1>([&last], rest.weights.div_ceil(32), [a], [[total[r]]]);
        }
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
    total: &mut [[__m256; R]; MAX_COLUMNS],
) {
    for i in 0..rows[0].chunks.len() {
        let unpacked: [Unpacked; R] = std::array::from_fn(|r| unpack(f, &rows[r].chunks[i], rows[r].side, i));
        all_columns::<F, B, R>(unpacked.each_ref(), 8, columns, i, total);
    }
    if let Some(rest) = rows[0].rest {
        let unpacked: [Unpacked; R] = std::array::from_fn(|r| {
            let rest = rows[r].rest.unwrap_or(rest);
            unpack_rest(f, rest, rows[r].side)
        });
        all_columns::<F, B, R>(unpacked.each_ref(), rest.weights.div_ceil(32), columns, rest.index, total);
    }
}

/// One unpacked chunk of `R` rows with every column.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn all_columns<F: Format<B>, const B: usize, const R: usize>(
    rows: [&Unpacked; R],
    groups: usize,
    columns: &[Column<'_>],
    i: usize,
    total: &mut [[__m256; R]; MAX_COLUMNS],
) {
    let (fours, others) = columns.as_chunks::<4>();
    let (total4, total1) = total.as_chunks_mut::<4>().0.split_at_mut(fours.len());
    for (c, t) in fours.iter().zip(total4) {
        *t = tile::<F, B, R, 4>(rows, groups, c.each_ref().map(|c| acts(c, i)), *t);
    }
    for (c, t) in others.iter().zip(total1.as_flattened_mut()) {
        [*t] = tile::<F, B, R, 1>(rows, groups, [acts(c, i)], [*t]);
    }
}

/// One unpacked chunk of `R` rows with `N` columns, added to `total[column][row]`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tile<F: Format<B>, const B: usize, const R: usize, const N: usize>(
    rows: [&Unpacked; R],
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
    for g in 0..groups.min(8) {
        for r in 0..R {
            let codes = rows[r].codes[g];
            let s = scale_pairs::<F, B>(rows[r].head.scales, g);
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
fn begin<F: Format<B>, const B: usize>(head: &Head, a: Acts<'_>, w: &mut [f32; 8], total: __m256) -> __m256 {
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

/// Sub-scales of group `g`, or ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scale_pairs<F: Format<B>, const B: usize>(scales: __m256i, g: usize) -> __m256i {
    if F::SCALED { pair_scales(scales, g) } else { _mm256_set1_epi16(1) }
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
fn unpack<F: Format<B>, const B: usize>(f: F, chunk: &[u8; B], side: &[u8], i: usize) -> Unpacked {
    // SAFETY: this function has the instructions that the methods need.
    unsafe {
        let head = f.head(chunk, side, i);
        let codes = [
            f.codes::<0>(chunk),
            f.codes::<1>(chunk),
            f.codes::<2>(chunk),
            f.codes::<3>(chunk),
            f.codes::<4>(chunk),
            f.codes::<5>(chunk),
            f.codes::<6>(chunk),
            f.codes::<7>(chunk),
        ];
        Unpacked { head, codes }
    }
}

/// Deviation 4.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack_rest<F: Format<B>, const B: usize>(f: F, rest: Rest<'_>, side: &[u8]) -> Unpacked {
    let mut codes = [_mm256_setzero_si256(); 8];
    // SAFETY: this function has the instructions that the method needs.
    let head = unsafe { f.rest(rest, side, &mut codes) };
    Unpacked { head, codes }
}

/// Sum of eight.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn sum(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// Codes that lie in bytes, group by group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn codes_from_bytes(bytes: &[u8; 256], codes: &mut Codes) {
    for (g, c) in codes.iter_mut().enumerate() {
        *c = load32(bytes, 32 * g);
    }
}
