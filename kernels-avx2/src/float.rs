//! Rows of fp32, fp16 and bf16 times fp32 columns.
//!
//! ```text
//! for each two rows, for each tile of columns: total[column] += widen(weights) · values
//! ```
//!
//! Deviations:
//! 1. One column keeps four partial sums of eight, to hide the latency of the addition; more
//!    columns have one each, four columns at a time.

use crate::format::{load_f32, load16, load32};
use crate::rows::sum;
use myq_blocks::{Column, Rows};
use std::arch::x86_64::*;

/// A float format whose weights take `B` bytes. The method needs AVX2, FMA and F16C.
pub(crate) trait Float<const B: usize> {
    /// Eight weights from weight `at` on.
    unsafe fn eight(row: &[u8], at: usize) -> __m256;
}

/// fp32.
pub(crate) enum F32 {}
/// fp16.
pub(crate) enum F16 {}
/// bf16.
pub(crate) enum Bf16 {}

impl Float<4> for F32 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(row: &[u8], at: usize) -> __m256 {
        _mm256_castsi256_ps(load32(row, 4 * at))
    }
}

impl Float<2> for F16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(row: &[u8], at: usize) -> __m256 {
        _mm256_cvtph_ps(load16(row, 2 * at))
    }
}

impl Float<2> for Bf16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(row: &[u8], at: usize) -> __m256 {
        let v = _mm256_cvtepu16_epi32(load16(row, 2 * at));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v))
    }
}

/// Products of all rows with all columns.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn matmul<F: Float<B>, const B: usize>(
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    assert!(columns.len() == out.len(), "columns of a call");
    let even = w.rows() / 2 * 2;
    for r in (0..even).step_by(2) {
        some_rows::<F, B, 2>([w.row(r), w.row(r + 1)], columns, r, out);
    }
    if even < w.rows() {
        some_rows::<F, B, 1>([w.row(even)], columns, even, out);
    }
}

/// Rows `at ..` of the result.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn some_rows<F: Float<B>, const B: usize, const R: usize>(
    rows: [&[u8]; R],
    columns: &[Column<'_>],
    at: usize,
    out: &mut [&mut [f32]],
) {
    let (fours, others) = columns.as_chunks::<4>();
    let (out4, out1) = out.split_at_mut(4 * fours.len());
    for ([c, d, e, f], out) in fours.iter().zip(out4.as_chunks_mut::<4>().0) {
        tile::<F, B, R, 4, 1>(rows, [c.x, d.x, e.x, f.x], at, out);
    }
    for (c, out) in others.iter().zip(out1.as_chunks_mut::<1>().0) {
        tile::<F, B, R, 1, 4>(rows, [c.x], at, out);
    }
}

/// `R` rows with `N` columns, `S` partial sums of eight for each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tile<F: Float<B>, const B: usize, const R: usize, const N: usize, const S: usize>(
    rows: [&[u8]; R],
    x: [&[f32]; N],
    at: usize,
    out: &mut [&mut [f32]; N],
) {
    let cols = x[0].len();
    let mut total = [[[_mm256_setzero_ps(); S]; N]; R];
    let (whole, eights) = (cols / (8 * S), cols / 8);
    for i in 0..whole {
        for s in 0..S {
            step::<F, B, R, N, S>(rows, x, 8 * (S * i + s), s, &mut total);
        }
    }
    for i in S * whole..eights {
        step::<F, B, R, N, S>(rows, x, 8 * i, 0, &mut total);
    }
    for r in 0..R {
        if !cols.is_multiple_of(8) {
            last_few::<F, B, N, S>(rows[r], x, &mut total[r]);
        }
        for n in 0..N {
            let mut all = total[r][n][0];
            for part in &total[r][n][1..] {
                all = _mm256_add_ps(all, *part);
            }
            out[n][at + r] = sum(all);
        }
    }
}

/// Eight weights of each row with eight values of each column.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn step<F: Float<B>, const B: usize, const R: usize, const N: usize, const S: usize>(
    rows: [&[u8]; R],
    x: [&[f32]; N],
    at: usize,
    s: usize,
    total: &mut [[[__m256; S]; N]; R],
) {
    for r in 0..R {
        // SAFETY: this function has the instructions that the method needs.
        let w = unsafe { F::eight(rows[r], at) };
        for n in 0..N {
            total[r][n][s] = _mm256_fmadd_ps(w, load_f32(x[n], at), total[r][n][s]);
        }
    }
}

/// The weights past the last eight, filled up with zeros.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn last_few<F: Float<B>, const B: usize, const N: usize, const S: usize>(
    row: &[u8],
    x: [&[f32]; N],
    total: &mut [[__m256; S]; N],
) {
    let (at, count) = (x[0].len() / 8 * 8, x[0].len() % 8);
    let mut bytes = [0; 32];
    bytes[..count * B].copy_from_slice(&row[at * B..(at + count) * B]);
    // SAFETY: this function has the instructions that the method needs.
    let w = unsafe { F::eight(&bytes, 0) };
    for n in 0..N {
        let mut eight = [0.0; 8];
        eight[..count].copy_from_slice(&x[n][at..]);
        total[n][0] = _mm256_fmadd_ps(w, load_f32(&eight, 0), total[n][0]);
    }
}
