//! Vectors of fp32 in 256 and 512 bits, for loops that are written once for both.
//!
//! All methods are `inline(always)`, so that they end up in the function that enables the
//! instructions.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of a loop that needs its instruction set and checked lengths"
)]

use std::arch::x86_64::*;

/// Smallest argument whose exponential is a normal number; below, [`Lanes::exp`] gives zero.
pub(crate) const LOWEST: f32 = -87.336_54;
/// Largest argument whose power of two is a finite number; above, 256 bits give infinity.
pub(crate) const HIGHEST: f32 = 88.376_26;
/// An argument whose exponential is not finite.
const BEYOND: f32 = 89.0;

/// `exp(x)` without the factor 2^n, n the whole number nearest to x / ln 2.
///
/// The polynomial interpolates at Chebyshev points of |r| ≤ ln 2 / 2 and is off by 2.6e-9 of
/// the value; what remains is rounding.
#[inline(always)]
unsafe fn exp_reduced<L: Lanes>(n: L::V, x: L::V) -> L::V {
    const P: [f32; 7] = [
        1.0,
        1.000_000_04,
        0.5,
        0.166_664_15,
        0.041_666_35,
        0.008_375_135,
        0.001_394_111_9,
    ];
    // ln 2 = 355/512 − 2.12194440e-4: the first product is exact.
    let r = L::fma(n, L::splat(-0.693_359_4), x);
    let r = L::fma(n, L::splat(2.121_944_4e-4), r);
    let mut p = L::splat(P[6]);
    for c in P[..6].iter().rev() {
        p = L::fma(p, r, L::splat(*c));
    }
    p
}

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
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Exponential, see `vector`.
    unsafe fn exp(x: Self::V) -> Self::V;
    /// The same where no value is above zero.
    unsafe fn exp_below(x: Self::V) -> Self::V;
    /// The largest value.
    unsafe fn largest(v: Self::V) -> f32;
    /// The sum of the values.
    unsafe fn sum(v: Self::V) -> f32;
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
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn exp(x: __m256) -> __m256 {
        let set = |v| _mm256_set1_ps(v);
        let clamped = _mm256_min_ps(_mm256_max_ps(x, set(LOWEST)), set(HIGHEST));
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        let n = _mm256_mul_ps(clamped, set(std::f32::consts::LOG2_E));
        let n = _mm256_round_ps::<NEAREST>(n);
        let p = exp_reduced::<Self>(n, clamped);
        let one = _mm256_set1_epi32(127);
        let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), one));
        let y = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
        let y = _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, set(LOWEST)), y);
        let above = _mm256_cmp_ps::<_CMP_GT_OQ>(x, set(HIGHEST));
        _mm256_blendv_ps(y, set(f32::INFINITY), above)
    }
    #[inline(always)]
    unsafe fn exp_below(x: __m256) -> __m256 {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        let n = _mm256_mul_ps(x, _mm256_set1_ps(std::f32::consts::LOG2_E));
        let n = _mm256_round_ps::<NEAREST>(n);
        let p = exp_reduced::<Self>(n, x);
        let one = _mm256_set1_epi32(127);
        let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), one));
        let y = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
        // What is too low, and came out as anything, is zero.
        let normal = _mm256_cmp_ps::<_CMP_GE_OQ>(x, _mm256_set1_ps(LOWEST));
        _mm256_and_ps(normal, y)
    }
    #[inline(always)]
    unsafe fn largest(v: __m256) -> f32 {
        let m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let m = _mm_max_ps(m, _mm_movehl_ps(m, m));
        _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)))
    }
    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        crate::rows::sum(v)
    }
    #[inline(always)]
    unsafe fn sums(v: [__m256; 4]) -> __m128 {
        let ab = _mm256_hadd_ps(v[0], v[1]);
        let cd = _mm256_hadd_ps(v[2], v[3]);
        let all = _mm256_hadd_ps(ab, cd);
        _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all))
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
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn exp(x: __m512) -> __m512 {
        let set = |v| _mm512_set1_ps(v);
        let normal = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, set(LOWEST));
        let clamped = _mm512_min_ps(_mm512_max_ps(x, set(LOWEST)), set(BEYOND));
        let n = _mm512_mul_ps(clamped, set(std::f32::consts::LOG2_E));
        let n = _mm512_roundscale_ps::<_MM_FROUND_NO_EXC>(n);
        let p = exp_reduced::<Self>(n, clamped);
        // Overflows to infinity; what is below the normal numbers is zero.
        _mm512_maskz_scalef_ps(normal, p, n)
    }
    #[inline(always)]
    unsafe fn exp_below(x: __m512) -> __m512 {
        let normal = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, _mm512_set1_ps(LOWEST));
        let n = _mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E));
        let n = _mm512_roundscale_ps::<_MM_FROUND_NO_EXC>(n);
        _mm512_maskz_scalef_ps(normal, exp_reduced::<Self>(n, x), n)
    }
    #[inline(always)]
    unsafe fn largest(v: __m512) -> f32 {
        let high = _mm512_extractf32x8_ps::<1>(v);
        Eight::largest(_mm256_max_ps(_mm512_castps512_ps256(v), high))
    }
    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        Eight::sum(fold_512(v))
    }
    #[inline(always)]
    unsafe fn sums(v: [__m512; 4]) -> __m128 {
        let half = [
            fold_512(v[0]),
            fold_512(v[1]),
            fold_512(v[2]),
            fold_512(v[3]),
        ];
        Eight::sums(half)
    }
}

/// The two halves added.
#[inline(always)]
unsafe fn fold_512(v: __m512) -> __m256 {
    _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v))
}

/// Vector i gets lane i of all vectors.
#[inline(always)]
pub(crate) unsafe fn transpose(v: &mut [__m512; 16]) {
    // Fours of vectors first: lane group g of `fours[f][c]` is column 4g + c of vectors 4f ….
    let mut fours = [[_mm512_setzero_ps(); 4]; 4];
    for (v, four) in v.chunks_exact(4).zip(&mut fours) {
        let low = |a, b| _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        let high = |a, b| _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        let (a, b) = (low(v[0], v[1]), low(v[2], v[3]));
        let (c, d) = (high(v[0], v[1]), high(v[2], v[3]));
        *four = [
            _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)),
            _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)),
        ];
    }
    for c in 0..4 {
        let even = |f: usize| _mm512_shuffle_f32x4::<0x88>(fours[f][c], fours[f + 1][c]);
        let odd = |f: usize| _mm512_shuffle_f32x4::<0xdd>(fours[f][c], fours[f + 1][c]);
        let (a, b) = (even(0), even(2));
        let (d, e) = (odd(0), odd(2));
        v[c] = _mm512_shuffle_f32x4::<0x88>(a, b);
        v[8 + c] = _mm512_shuffle_f32x4::<0xdd>(a, b);
        v[4 + c] = _mm512_shuffle_f32x4::<0x88>(d, e);
        v[12 + c] = _mm512_shuffle_f32x4::<0xdd>(d, e);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Avx2, Level};

    #[target_feature(enable = "avx2,fma,f16c")]
    fn exp_256(x: &[f32; 16]) -> [f32; 16] {
        let mut y = [0.0; 16];
        // SAFETY: the instructions are this function's; all are sixteen values.
        unsafe {
            Eight::store(Eight::exp(Eight::load(x.as_ptr())), y.as_mut_ptr());
            let high = Eight::exp(Eight::load(x[8..].as_ptr()));
            Eight::store(high, y[8..].as_mut_ptr());
        }
        y
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    fn exp_512(x: &[f32; 16]) -> [f32; 16] {
        let mut y = [0.0; 16];
        // SAFETY: as above.
        unsafe { Sixteen::store(Sixteen::exp(Sixteen::load(x.as_ptr())), y.as_mut_ptr()) };
        y
    }

    fn check(name: &str, exp: impl Fn(&[f32; 16]) -> [f32; 16]) {
        let step = (HIGHEST - LOWEST) / 1_600_000.0;
        for i in 0..100_000u32 {
            let mut x = [LOWEST; 16];
            for (j, x) in x.iter_mut().enumerate() {
                *x += step * (16 * i + j as u32) as f32;
            }
            for (x, y) in x.into_iter().zip(exp(&x)) {
                let want = f64::from(x).exp();
                let off = (f64::from(y) - want).abs() / want;
                assert!(off < 2.0 * f64::from(f32::EPSILON), "{name}, {x}: {off:e}");
            }
        }
        let mut x = [f32::NEG_INFINITY; 16];
        x[..5].copy_from_slice(&[-88.0, -1e30, f32::INFINITY, 90.0, 1e30]);
        let mut want = [0.0; 16];
        want[2..5].fill(f32::INFINITY);
        assert_eq!(exp(&x), want, "{name}");
    }

    #[test]
    fn exponentials_are_within_two_units() {
        if Avx2::with(Level::Avx2).is_some() {
            // SAFETY: a kernel value of the level exists: the processor has the instructions.
            check("256 bits", |x| unsafe { exp_256(x) });
        }
        if Avx2::with(Level::Avx512).is_some() {
            // SAFETY: as above.
            check("512 bits", |x| unsafe { exp_512(x) });
        }
    }
}
