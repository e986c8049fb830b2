//! Activations to their 8-bit form.
//!
//! ```text
//! for each 32 values: d = max|x| / 127; q = round to even(x · (1/d)); two sums of 16
//! ```
//!
//! Equal to `myq_blocks::scalar::quantize` to the bit: the same divisions and the same
//! rounding. Deviations:
//! 1. Eight groups at a time, so that one division serves eight scales and the reductions of
//!    all share their shuffles.
//! 2. First all scales, then all codes: in one pass each eight groups would wait for their
//!    divisions (2.0 against 4 values a cycle).
//! 3. Sizes are compared as integers, which order like the numbers; infinities and what is no
//!    number come out on top, and send the column to the reference.
//! 4. The last 256 values are copied to the stack if they are not whole.

use crate::format::{load_f32, store_f32};
use myq_blocks::ColumnMut;
use std::arch::x86_64::*;

/// What becomes of 256 values.
struct Out<'a> {
    q: &'a mut [i8; 256],
    d: &'a mut [f32; 8],
    sums: &'a mut [i16; 16],
    /// Before the codes are made: the reciprocals of the scales.
    scaled_sums: &'a mut [f32; 8],
}

/// See `Kernels::quantize`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn quantize(x: &[f32], out: ColumnMut<'_>) {
    let (whole, rest) = x.as_chunks::<256>();
    let mut last = [0.0; 256];
    last[..rest.len()].copy_from_slice(rest);
    let mut finite = true;
    let scales = out.d.as_chunks_mut().0.iter_mut();
    for (x, (d, inverses)) in whole
        .iter()
        .chain([&last])
        .zip(scales.zip(out.scaled_sums.as_chunks_mut().0))
    {
        finite &= scales_of(x, d, inverses);
    }
    if !finite {
        return myq_blocks::scalar::quantize(x, out);
    }
    let parts = out
        .q
        .as_chunks_mut()
        .0
        .iter_mut()
        .zip(out.d.as_chunks_mut().0)
        .zip(out.sums.as_chunks_mut().0)
        .zip(out.scaled_sums.as_chunks_mut().0);
    for (i, (((q, d), sums), scaled_sums)) in parts.enumerate() {
        let out = Out {
            q,
            d,
            sums,
            scaled_sums,
        };
        match whole.get(i) {
            Some(x) => codes_of(x, 8, out),
            None => codes_of(&last, rest.len().div_ceil(32), out),
        }
    }
}

/// Scales of eight groups and their reciprocals; false if a value is not finite.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scales_of(x: &[f32; 256], d: &mut [f32; 8], inverses: &mut [f32; 8]) -> bool {
    let max = largest(x);
    let infinite = _mm256_cmpgt_epi32(max, _mm256_set1_epi32(0x7f7f_ffff));
    let scale = _mm256_div_ps(_mm256_castsi256_ps(max), _mm256_set1_ps(127.0));
    // A scale too small to invert stands for zeros.
    let normal = _mm256_cmp_ps::<_CMP_GE_OQ>(scale, _mm256_set1_ps(f32::MIN_POSITIVE));
    let inverse = _mm256_div_ps(_mm256_set1_ps(1.0), scale);
    store_f32(d, 0, _mm256_and_ps(normal, scale));
    store_f32(inverses, 0, _mm256_and_ps(normal, inverse));
    _mm256_movemask_epi8(infinite) == 0
}

/// Codes and sums of the first `groups` groups; the others are zeros.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn codes_of(x: &[f32; 256], groups: usize, out: Out<'_>) {
    let mut sums = [_mm256_setzero_si256(); 8];
    let parts = x.as_chunks().0.iter().zip(out.q.as_chunks_mut().0);
    let inverses = out.scaled_sums.iter();
    for (((x, q), inverse), sums) in parts.zip(inverses).zip(&mut sums).take(groups) {
        *sums = fours(codes(x, *inverse, q));
    }
    out.q[32 * groups..].fill(0);
    let first = pairs_of_eights([sums[0], sums[1], sums[2], sums[3]]);
    let last = pairs_of_eights([sums[4], sums[5], sums[6], sums[7]]);
    // Sums of the first sixteen of each group, and of the second.
    let a = _mm256_permute2x128_si256::<0x20>(first, last);
    let b = _mm256_permute2x128_si256::<0x31>(first, last);
    let low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
    let both = _mm256_or_si256(low, _mm256_slli_epi32::<16>(b));
    let whole = _mm256_cvtepi32_ps(_mm256_add_epi32(a, b));
    let scaled = _mm256_mul_ps(load_f32(out.d, 0), whole);
    store_f32(out.scaled_sums, 0, scaled);
    // SAFETY: the sums have room for the 32 bytes of the store; it needs no alignment.
    unsafe { _mm256_storeu_si256(out.sums.as_mut_ptr().cast(), both) };
}

/// The bits of the largest size of each group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn largest(x: &[f32; 256]) -> __m256i {
    let size = _mm256_set1_epi32(0x7fff_ffff);
    let mut m = [_mm256_setzero_si256(); 8];
    for (m, x) in m.iter_mut().zip(x.as_chunks::<32>().0) {
        for i in 0..4 {
            let v = _mm256_and_si256(_mm256_castps_si256(load_f32(x, 8 * i)), size);
            *m = _mm256_max_epi32(*m, v);
        }
    }
    // The lanes of two vectors beside each other, and the larger ones; then of four, of eight.
    let mut two = [_mm256_setzero_si256(); 4];
    for (two, m) in two.iter_mut().zip(m.as_chunks::<2>().0) {
        let (a, b) = (m[0], m[1]);
        *two = _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    }
    let mut four = [_mm256_setzero_si256(); 2];
    for (four, m) in four.iter_mut().zip(two.as_chunks::<2>().0) {
        let (a, b) = (m[0], m[1]);
        *four = _mm256_max_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    let low = _mm256_permute2x128_si256::<0x20>(four[0], four[1]);
    let high = _mm256_permute2x128_si256::<0x31>(four[0], four[1]);
    _mm256_max_epi32(low, high)
}

/// The codes of 32 numbers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn codes(x: &[f32; 32], inverse: f32, q: &mut [i8; 32]) -> __m256i {
    let inverse = _mm256_set1_ps(inverse);
    let mut c = [_mm256_setzero_si256(); 4];
    for (i, c) in c.iter_mut().enumerate() {
        // Rounds to even, the processor's default.
        *c = _mm256_cvtps_epi32(_mm256_mul_ps(load_f32(x, 8 * i), inverse));
    }
    // Packing works on halves: the order is put right afterwards.
    let ab = _mm256_packs_epi32(c[0], c[1]);
    let cd = _mm256_packs_epi32(c[2], c[3]);
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order);
    // SAFETY: `q` has room for the 32 bytes of the store; it needs no alignment.
    unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), codes) };
    codes
}

/// Sums of four codes each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fours(codes: __m256i) -> __m256i {
    let twos = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    _mm256_madd_epi16(twos, _mm256_set1_epi16(1))
}

/// Sums of each half of four vectors: the low halves' in the low half, the high in the high.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pairs_of_eights(s: [__m256i; 4]) -> __m256i {
    _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]))
}
