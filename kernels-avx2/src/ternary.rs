//! The ternary superblock formats TQ1_0 and TQ2_0.
//!
//! ```text
//! TQ2_0: codes as the 2-bit plane of Q2_K, the same way
//! TQ1_0: v = byte · 3^n mod 256 has digit n on top: digit = (v ≥ 86) + (v ≥ 171)
//! ```
//!
//! Deviations:
//! 1. AVX2 compares signed bytes, so TQ1_0 keeps v − 128; as 3·128 = 128 mod 256, three times
//!    that is again the next v, less 128.
//! 2. A partial superblock of TQ1_0 has its digits at odd distances: they go through memory.

use crate::format::{
    Codes, Format, Head, Rest, half, load16, load32, partial_pairs, store32, word,
};
use crate::kquants::{pairs, placed};
use std::arch::x86_64::*;

/// Five weights to a byte.
#[derive(Clone, Copy)]
pub(crate) struct Tq1;
/// Four weights to a byte.
#[derive(Clone, Copy)]
pub(crate) struct Tq2;

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head(bytes: &[u8], at: usize) -> Head {
    let d = _mm256_set1_ps(half(bytes, at));
    Head {
        d,
        m: d,
        scales: _mm256_setzero_si256(),
        offsets: _mm256_set1_epi16(1),
    }
}

impl Format<66> for Tq2 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(self, chunk: &[u8; 66], _: &[u8], _: usize) -> Head {
        placed(head(chunk, 64))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const G: usize>(self, chunk: &[u8; 66]) -> __m256i {
        pairs::<G>(chunk, 0)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rest(self, rest: Rest<'_>, _: &[u8], codes: &mut Codes) -> Head {
        let n = rest.weights;
        for (g, c) in codes.iter_mut().enumerate().take(n / 32) {
            *c = partial_pairs(rest.bytes, n, g);
        }
        head(rest.bytes, n / 4)
    }
}

/// Three times every byte, mod 256.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn triple(v: __m256i) -> __m256i {
    _mm256_add_epi8(_mm256_add_epi8(v, v), v)
}

/// Digit on top of each byte, from the byte less 128.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn digit(v: __m256i) -> __m256i {
    let one = _mm256_cmpgt_epi8(v, _mm256_set1_epi8((85 - 128) as i8));
    let two = _mm256_cmpgt_epi8(v, _mm256_set1_epi8((170 - 128) as i8));
    _mm256_sub_epi8(_mm256_sub_epi8(_mm256_setzero_si256(), one), two)
}

/// `v` tripled `n` times.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn power(mut v: __m256i, n: usize) -> __m256i {
    for _ in 0..n {
        v = triple(v);
    }
    v
}

impl Format<54> for Tq1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(self, chunk: &[u8; 54], _: &[u8], _: usize) -> Head {
        head(chunk, 52)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const G: usize>(self, chunk: &[u8; 54]) -> __m256i {
        let bias = _mm256_set1_epi8(-128);
        if G < 5 {
            return digit(power(_mm256_xor_si256(load32(chunk, 0), bias), G));
        }
        // Sixteen bytes hold 80 weights: digits 0 and 1 side by side, then 2 and 3, then 4.
        let v = _mm256_xor_si256(_mm256_broadcastsi128_si256(load16(chunk, 32)), bias);
        let v = _mm256_blend_epi32::<0xf0>(v, triple(v));
        if G < 7 {
            return digit(power(v, 2 * (G - 5)));
        }
        // Four bytes hold the last sixteen weights.
        let last = _mm256_xor_si256(_mm256_set1_epi32(word(chunk, 48) as i32), bias);
        let (one, two) = (triple(last), power(last, 2));
        let last = _mm256_blend_epi32::<0b1010_1010>(last, one);
        let last = _mm256_blend_epi32::<0b1100_1100>(
            last,
            _mm256_blend_epi32::<0b1010_1010>(two, triple(two)),
        );
        digit(_mm256_blend_epi32::<0xf0>(power(v, 4), last))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rest(self, rest: Rest<'_>, _: &[u8], codes: &mut Codes) -> Head {
        // Digit n of all bytes goes to m·n; what is written past the m-th is written again.
        let m = rest.weights.div_ceil(5);
        let (mut bytes, mut digits) = ([0; 64], [0; 5 * 52 + 64]);
        bytes[..m].copy_from_slice(&rest.bytes[..m]);
        let bias = _mm256_set1_epi8(-128);
        let mut v = [0, 32].map(|at| _mm256_xor_si256(load32(&bytes, at), bias));
        for n in 0..5 {
            store32(&mut digits, m * n, digit(v[0]));
            store32(&mut digits, m * n + 32, digit(v[1]));
            v = [triple(v[0]), triple(v[1])];
        }
        for (g, c) in codes.iter_mut().enumerate().take(rest.weights / 32) {
            *c = load32(&digits, 32 * g);
        }
        head(rest.bytes, m)
    }
}
