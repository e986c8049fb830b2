//! The vectors of AVX-512: two panels, and what tiles need besides.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of one loop that needs its instruction set and checked lengths"
)]

use super::isa::{Avx512, Isa};
use std::arch::x86_64::*;

impl Avx512 {
    /// Products of both halves.
    #[inline(always)]
    unsafe fn sums(codes: &[__m512i; 8], q: *const u8, start: [i32; 2]) -> [__m512i; 2] {
        let mut sums = start.map(|v| _mm512_set1_epi32(v));
        let mut t = 0;
        while t < 4 {
            sums[0] = _mm512_dpbusd_epi32(sums[0], codes[t], Self::all(q.add(4 * t)));
            sums[1] = _mm512_dpbusd_epi32(sums[1], codes[t + 4], Self::all(q.add(4 * t + 16)));
            t += 1;
        }
        sums
    }

    /// Sixteen i32.
    #[inline(always)]
    pub(super) unsafe fn load_sums(p: *const u8) -> __m512i {
        _mm512_loadu_si512(p.cast())
    }

    /// One fp32 for each row.
    #[inline(always)]
    pub(super) unsafe fn load_floats(p: *const f32) -> __m512 {
        _mm512_loadu_ps(p)
    }

    /// 64 bytes.
    #[inline(always)]
    pub(super) unsafe fn store_bytes(v: __m512i, p: *mut u8) {
        _mm512_storeu_si512(p.cast(), v);
    }

    #[inline(always)]
    pub(super) unsafe fn sub_bytes(a: __m512i, b: __m512i) -> __m512i {
        _mm512_sub_epi8(a, b)
    }

    /// i16 lanes.
    #[inline(always)]
    pub(super) unsafe fn mul16(a: __m512i, b: __m512i) -> __m512i {
        _mm512_mullo_epi16(a, b)
    }

    /// −(a − fixed) · scale of each byte of `a`, which fits a byte; scales are i16.
    #[inline(always)]
    pub(super) unsafe fn negated_products(a: __m512i, fixed: __m512i, scale: __m512i) -> __m512i {
        let codes = _mm512_sub_epi8(fixed, a);
        let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(codes));
        let even = _mm512_mullo_epi16(even, scale);
        // The odd byte stays where it is, with zeros below.
        let odd = _mm512_andnot_si512(_mm512_set1_epi16(0xff), codes);
        let odd = _mm512_mullo_epi16(odd, scale);
        _mm512_mask_mov_epi8(odd, 0x5555_5555_5555_5555, even)
    }

    /// The lower and the upper i16 of each lane of 32 bits, twice.
    #[inline(always)]
    pub(super) unsafe fn spread(pairs: __m512i) -> (__m512i, __m512i) {
        let low = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff));
        let high = _mm512_srli_epi32::<16>(pairs);
        (
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(low)),
            _mm512_or_si512(high, _mm512_slli_epi32::<16>(high)),
        )
    }
}

impl Isa for Avx512 {
    const PANELS: usize = 2;
    const BLOCKS: usize = 2;
    const SIGNED: bool = false;
    const STARTS: bool = true;
    type I = __m512i;
    type F = __m512;

    #[inline(always)]
    unsafe fn load(p: *const u8, stride: usize) -> __m512i {
        let low = _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()));
        _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(p.add(stride).cast()))
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8, stride: usize) -> __m512i {
        let low = _mm_loadl_epi64(p.cast());
        let high = _mm_loadl_epi64(p.add(stride).cast());
        _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(low, high))
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const u8, stride: usize) -> __m512i {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(p.cast()));
        let both = _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(p.add(stride).cast()));
        _mm512_cvtepi8_epi16(both)
    }
    #[inline(always)]
    unsafe fn load_pairs_unsigned(p: *const u8, stride: usize) -> __m512i {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(p.cast()));
        let both = _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(p.add(stride).cast()));
        _mm512_cvtepu8_epi16(both)
    }
    #[inline(always)]
    unsafe fn load_halves(p: *const u8, stride: usize) -> __m512 {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(p.cast()));
        let both = _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(p.add(stride).cast()));
        _mm512_cvtph_ps(both)
    }
    #[inline(always)]
    unsafe fn all(p: *const u8) -> __m512i {
        _mm512_set1_epi32(p.cast::<i32>().read_unaligned())
    }
    #[inline(always)]
    unsafe fn splat(byte: u8) -> __m512i {
        _mm512_set1_epi8(byte as i8)
    }
    #[inline(always)]
    unsafe fn splat16(v: i16) -> __m512i {
        _mm512_set1_epi16(v)
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        _mm512_and_si512(a, b)
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }
    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        _mm512_xor_si512(a, b)
    }
    #[inline(always)]
    unsafe fn right<const N: u32>(a: __m512i) -> __m512i {
        _mm512_srli_epi16::<N>(a)
    }
    #[inline(always)]
    unsafe fn left<const N: u32>(a: __m512i) -> __m512i {
        _mm512_slli_epi16::<N>(a)
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], codes: __m512i) -> __m512i {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        _mm512_shuffle_epi8(table, codes)
    }
    #[inline(always)]
    unsafe fn madd(a: __m512i, b: __m512i) -> __m512i {
        _mm512_madd_epi16(a, b)
    }
    #[inline(always)]
    unsafe fn dot(codes: &[__m512i; 8], q: *const u8, _: u32) -> __m512i {
        let mut sum = _mm512_setzero_si512();
        let mut t = 0;
        while t < 8 {
            sum = _mm512_dpbusd_epi32(sum, codes[t], Self::all(q.add(4 * t)));
            t += 1;
        }
        sum
    }
    #[inline(always)]
    unsafe fn dot_signed(codes: &[__m512i; 8], q: *const u8) -> __m512i {
        Self::dot(codes, q, 8)
    }
    #[inline(always)]
    unsafe fn dot_pair(
        codes: &[__m512i; 8],
        q: *const u8,
        scales: __m512i,
        start: [i32; 2],
        bits: u32,
    ) -> __m512 {
        if bits <= 3 {
            // As in 256 bits.
            let [a, b] = Self::sums(codes, q, start);
            let both = _mm512_mask_blend_epi16(0xaaaa_aaaa, a, _mm512_slli_epi32::<16>(b));
            return _mm512_cvtepi32_ps(_mm512_madd_epi16(both, scales));
        }
        Self::dot_scaled(codes, q, Self::halves(scales), start)
    }
    #[inline(always)]
    unsafe fn dot_scaled(
        codes: &[__m512i; 8],
        q: *const u8,
        [s0, s1]: [__m512; 2],
        start: [i32; 2],
    ) -> __m512 {
        let [a, b] = Self::sums(codes, q, start).map(|v| _mm512_cvtepi32_ps(v));
        _mm512_fmadd_ps(a, s0, _mm512_mul_ps(b, s1))
    }
    #[inline(always)]
    unsafe fn halves(pairs: __m512i) -> [__m512; 2] {
        let low = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pairs));
        [low, _mm512_srai_epi32::<16>(pairs)].map(|v| _mm512_cvtepi32_ps(v))
    }
    #[inline(always)]
    unsafe fn float(v: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(v)
    }
    #[inline(always)]
    unsafe fn zero() -> __m512 {
        _mm512_setzero_ps()
    }
    #[inline(always)]
    unsafe fn splat_f(v: f32) -> __m512 {
        _mm512_set1_ps(v)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fnmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn store(v: __m512, to: *mut f32) {
        _mm512_storeu_ps(to, v)
    }
}
