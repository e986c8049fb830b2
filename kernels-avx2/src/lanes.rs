//! Vectors of fp32 in 256 and 512 bits, for loops that are written once for both.
//!
//! All methods are `inline(always)`, so that they end up in the function that enables the
//! instructions.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of a loop that needs its instruction set and checked lengths"
)]

use std::arch::x86_64::*;

/// Vectors of one width.
///
/// # Safety
///
/// Every method needs the instruction set; pointers must be valid for `LEN` values.
pub(crate) trait Lanes: Copy {
    /// Values in a vector.
    const LEN: usize;
    type V: Copy;

    unsafe fn zero() -> Self::V;
    unsafe fn splat(v: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(v: Self::V, p: *mut f32);
    /// fp16, widened.
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// bf16, widened.
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The sums of four vectors.
    unsafe fn sums(v: [Self::V; 4]) -> __m128;
}

/// 256 bits: AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) enum Eight {}

/// 512 bits: AVX-512 F, DQ and VL beside them.
#[derive(Clone, Copy)]
pub(crate) enum Sixteen {}

impl Lanes for Eight {
    const LEN: usize = 8;
    type V = __m256;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        _mm256_setzero_ps()
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> __m256 {
        _mm256_set1_ps(v)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        _mm256_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(v: __m256, p: *mut f32) {
        _mm256_storeu_ps(p, v)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m256 {
        let v = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v))
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn sums(v: [__m256; 4]) -> __m128 {
        let ab = _mm256_hadd_ps(v[0], v[1]);
        let cd = _mm256_hadd_ps(v[2], v[3]);
        let all = _mm256_hadd_ps(ab, cd);
        _mm_add_ps(
            _mm256_castps256_ps128(all),
            _mm256_extractf128_ps::<1>(all),
        )
    }
}

impl Lanes for Sixteen {
    const LEN: usize = 16;
    type V = __m512;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        _mm512_setzero_ps()
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> __m512 {
        _mm512_set1_ps(v)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(v: __m512, p: *mut f32) {
        _mm512_storeu_ps(p, v)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        let v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v))
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn sums(v: [__m512; 4]) -> __m128 {
        Eight::sums(v.map(|v| {
            // SAFETY: the caller has the instructions.
            unsafe {
                _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v))
            }
        }))
    }
}
