//! Activations to their 8-bit form.
//!
//! ```text
//! for each 32 values: d = max|x| / 127; q = round to even(x · (1/d)); two sums of 16
//! ```
//!
//! Equal to `myq_blocks::scalar::quantize` to the bit: the same divisions and the same
//! rounding. Deviations:
//! 1. Values that are not numbers get the code zero, as a conversion in Rust gives.
//! 2. The last group is copied to the stack if it is not whole.

use crate::format::load_f32;
use myq_blocks::ColumnMut;
use std::arch::x86_64::*;

/// See `Kernels::quantize`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn quantize(x: &[f32], mut out: ColumnMut<'_>) {
    let groups = out
        .q
        .as_chunks_mut::<32>()
        .0
        .iter_mut()
        .zip(out.d.iter_mut())
        .zip(out.sums.as_chunks_mut::<2>().0);
    let (whole, rest) = x.as_chunks::<32>();
    let mut last = [0.0; 32];
    last[..rest.len()].copy_from_slice(rest);
    let zero = [0.0; 32];
    for (g, ((q, d), sums)) in groups.enumerate() {
        let x = match whole.get(g) {
            Some(x) => x,
            None if g == whole.len() => &last,
            None => &zero,
        };
        *d = group(x, q, sums);
    }
    out.scale_sums();
}

/// One group; returns its scale.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn group(x: &[f32; 32], q: &mut [i8; 32], sums: &mut [i16; 2]) -> f32 {
    let v: [__m256; 4] = std::array::from_fn(|i| load_f32(x, 8 * i));
    let max = largest(v);
    let d = max / 127.0;
    let inverse = if d >= f32::MIN_POSITIVE { 1.0 / d } else { 0.0 };
    if inverse == 0.0 {
        (*q, *sums) = ([0; 32], [0; 2]);
        return 0.0;
    }
    let inverse = _mm256_set1_ps(inverse);
    let codes = v.map(|v| {
        let number = _mm256_cmp_ps::<_CMP_ORD_Q>(v, v);
        // Rounds to even, the processor's default.
        let q = _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse));
        _mm256_and_si256(q, _mm256_castps_si256(number))
    });
    // Packing works on halves: the order is put right afterwards.
    let ab = _mm256_packs_epi32(codes[0], codes[1]);
    let cd = _mm256_packs_epi32(codes[2], codes[3]);
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order);
    // SAFETY: `q` has room for the 32 bytes of the store; it needs no alignment.
    unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), codes) };
    *sums = sums_of_16(codes);
    d
}

/// Largest size of 32 values; those that are not numbers do not count.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn largest(v: [__m256; 4]) -> f32 {
    let sign = _mm256_set1_ps(-0.0);
    let mut max = _mm256_setzero_ps();
    for v in v {
        // The second operand is the result where one is not a number.
        max = _mm256_max_ps(_mm256_andnot_ps(sign, v), max);
    }
    let m = _mm_max_ps(_mm256_castps256_ps128(max), _mm256_extractf128_ps::<1>(max));
    let m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sums_of_16(codes: __m256i) -> [i16; 2] {
    let twos = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    let fours = _mm256_madd_epi16(twos, _mm256_set1_epi16(1));
    let eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32::<0b01_00_11_10>(fours));
    let all = _mm256_add_epi32(eights, _mm256_shuffle_epi32::<0b00_00_00_01>(eights));
    [
        _mm256_extract_epi32::<0>(all) as i16,
        _mm256_extract_epi32::<4>(all) as i16,
    ]
}
