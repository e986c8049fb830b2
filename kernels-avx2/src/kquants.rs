//! The superblock formats Q2_K to Q6_K.
//!
//! ```text
//! codes: shift and mask the planes of 2 and 4 bits; or the plane of high bits
//! scales: unpack 4- and 6-bit fields to sixteen bytes, widen to i16
//! offsets: minima as stored; else the code's fixed offset times the sub-scale
//! ```
//!
//! Deviations:
//! 1. Codes stay unsigned (Q3_K 0 … 7, Q6_K 0 … 63); their offsets of 4 and 32 become part of
//!    the offsets, which cost one multiply-add per 256 weights.
//! 2. Partial superblocks are read in place (see `myq_blocks::tail`), never expanded.

use crate::format::{
    Codes, Format, Head, Rest, bit_stream, bits, half, load16, load32, partial_nibbles, partial_pairs, sub_scales, word,
};
use std::arch::x86_64::*;

/// 2 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q2K;
/// 3 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q3K;
/// 4 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q4K;
/// 5 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q5K;
/// 6 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q6K;

/// Sixteen scale bytes of Q2_K: scales in the low nibbles, minima in the high.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_q2k(scales: __m128i, d: f32, dmin: f32) -> Head {
    let low = _mm_set1_epi8(15);
    Head {
        d: _mm256_set1_ps(d),
        m: _mm256_set1_ps(dmin),
        scales: sub_scales(_mm_and_si128(scales, low)),
        offsets: _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(scales), low)),
    }
}

/// Signed sub-scales and codes with a fixed offset.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_offset<const OFFSET_BITS: i32>(scales: __m128i, d: f32) -> Head {
    let d = _mm256_set1_ps(d);
    let offsets = _mm256_slli_epi16::<OFFSET_BITS>(_mm256_cvtepi8_epi16(scales));
    Head { d, m: d, scales: sub_scales(scales), offsets }
}

/// Eight scales and eight minima of one byte each, in two words each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_pairs(scales: [u32; 2], mins: [u32; 2], d: f32, dmin: f32) -> Head {
    let eight = |w: [u32; 2]| _mm_set_epi32(0, 0, w[1] as i32, w[0] as i32);
    let (s, m) = (eight(scales), eight(mins));
    Head {
        d: _mm256_set1_ps(d),
        m: _mm256_set1_ps(dmin),
        // Both halves alike: the two sixteens of a group share a scale.
        scales: _mm256_cvtepu8_epi16(_mm_unpacklo_epi64(s, s)),
        offsets: _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(m, m)),
    }
}

/// The 6-bit fields of Q4_K and Q5_K, four at a time (see `layout::k4_scale_min`).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_k4(chunk: &[u8]) -> Head {
    let (a, b, c) = (word(chunk, 4), word(chunk, 8), word(chunk, 12));
    let (six, four, top) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x3030_3030);
    let scales = [a & six, (c & four) | ((a >> 2) & top)];
    let mins = [b & six, ((c >> 4) & four) | ((b >> 2) & top)];
    head_pairs(scales, mins, half(chunk, 0), half(chunk, 2))
}

/// The 12-bit fields of a partial Q4_K or Q5_K superblock.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_k4_rest(bytes: &[u8], n: usize) -> Head {
    let (mut s, mut m) = ([0u8; 8], [0u8; 8]);
    for j in 0..n / 32 {
        let at = 4 + 12 * j / 8;
        let v = u16::from_le_bytes([bytes[at], bytes[at + 1]]) >> (12 * j % 8);
        (s[j], m[j]) = ((v & 63) as u8, (v >> 6 & 63) as u8);
    }
    head_pairs([word(&s, 0), word(&s, 4)], [word(&m, 0), word(&m, 4)], half(bytes, 0), half(bytes, 2))
}

/// Sixteen 6-bit sub-scales of Q3_K (see `layout::q3k_scales`).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scales_q3k(chunk: &[u8]) -> __m128i {
    let (a, b, c) = (word(chunk, 96), word(chunk, 100), word(chunk, 104));
    let (four, top) = (0x0f0f_0f0f, 0x3030_3030);
    let s = [
        (a & four) | ((c << 4) & top),
        (b & four) | ((c << 2) & top),
        ((a >> 4) & four) | (c & top),
        ((b >> 4) & four) | ((c >> 2) & top),
    ];
    let s = s.map(|s| s as i32);
    _mm_sub_epi8(_mm_set_epi32(s[3], s[2], s[1], s[0]), _mm_set1_epi8(32))
}

/// Group `G` of a 2-bit plane that starts at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pairs<const G: usize>(chunk: &[u8], at: usize) -> __m256i {
    let v = load32(chunk, at + 32 * (G / 4));
    match G % 4 {
        0 => bits::<0>(v, 3),
        1 => bits::<2>(v, 3),
        2 => bits::<4>(v, 3),
        _ => bits::<6>(v, 3),
    }
}

/// Bit `G` of each byte, moved to bit `TO`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn high_bit<const G: usize, const TO: usize>(v: __m256i) -> __m256i {
    let v = match (TO + 8 - G) as i32 {
        // The shifts are constants; a match, as they cannot be computed from a parameter.
        1 => _mm256_srli_epi16::<7>(v),
        2 => _mm256_srli_epi16::<6>(v),
        3 => _mm256_srli_epi16::<5>(v),
        4 => _mm256_srli_epi16::<4>(v),
        5 => _mm256_srli_epi16::<3>(v),
        6 => _mm256_srli_epi16::<2>(v),
        7 => _mm256_srli_epi16::<1>(v),
        8 => v,
        9 => _mm256_slli_epi16::<1>(v),
        10 => _mm256_slli_epi16::<2>(v),
        11 => _mm256_slli_epi16::<3>(v),
        _ => _mm256_slli_epi16::<4>(v),
    };
    _mm256_and_si256(v, _mm256_set1_epi8(1 << TO))
}

/// Group `G` of a nibble plane of Q4_K and Q5_K that starts at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibble<const G: usize>(chunk: &[u8], at: usize) -> __m256i {
    let v = load32(chunk, at + 32 * (G / 2));
    if G.is_multiple_of(2) { bits::<0>(v, 15) } else { bits::<4>(v, 15) }
}

impl Format<84> for Q2K {
    const SCALED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(self, chunk: &[u8; 84], _: &[u8], _: usize) -> Head {
        head_q2k(load16(chunk, 0), half(chunk, 80), half(chunk, 82))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const G: usize>(self, chunk: &[u8; 84]) -> __m256i {
        pairs::<G>(chunk, 16)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rest(self, rest: Rest<'_>, _: &[u8], codes: &mut Codes) -> Head {
        let (n, bytes) = (rest.weights, rest.bytes);
        let (scales, qs) = bytes.split_at(n / 16);
        for (g, c) in codes.iter_mut().enumerate().take(n / 32) {
            *c = partial_pairs(qs, n, g);
        }
        head_q2k(load16(&padded(scales), 0), half(qs, n / 4), half(qs, n / 4 + 2))
    }
}

/// Up to sixteen bytes, the missing ones zero.
#[inline]
fn padded(bytes: &[u8]) -> [u8; 16] {
    std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0))
}

impl Format<110> for Q3K {
    const SCALED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(self, chunk: &[u8; 110], _: &[u8], _: usize) -> Head {
        head_offset::<2>(scales_q3k(chunk), half(chunk, 108))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const G: usize>(self, chunk: &[u8; 110]) -> __m256i {
        _mm256_or_si256(pairs::<G>(chunk, 32), high_bit::<G, 2>(load32(chunk, 0)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rest(self, rest: Rest<'_>, _: &[u8], codes: &mut Codes) -> Head {
        let (n, bytes) = (rest.weights, rest.bytes);
        let (high, tail) = bytes.split_at(n / 8);
        let (qs, tail) = tail.split_at(n / 4);
        for (g, c) in codes.iter_mut().enumerate().take(n / 32) {
            *c = _mm256_or_si256(partial_pairs(qs, n, g), bit_stream(word(high, 4 * g), 4));
        }
        // Four 6-bit fields take three bytes; a stream of two fields ends in the second.
        let field = |j: usize| {
            let at = 6 * j / 8;
            let v = u16::from_le_bytes([tail[at], tail[at + 1]]);
            ((v >> (6 * j % 8)) & 63) as u8 as i8 - 32
        };
        let scales: [u8; 16] = std::array::from_fn(|j| if j < n / 16 { field(j) as u8 } else { 0 });
        head_offset::<2>(load16(&scales, 0), half(tail, (n / 16 * 6).div_ceil(8)))
    }
}

impl Format<144> for Q4K {
    const SCALED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(self, chunk: &[u8; 144], _: &[u8], _: usize) -> Head {
        head_k4(chunk)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const G: usize>(self, chunk: &[u8; 144]) -> __m256i {
        nibble::<G>(chunk, 16)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rest(self, rest: Rest<'_>, _: &[u8], codes: &mut Codes) -> Head {
        let n = rest.weights;
        let qs = &rest.bytes[4 + (n / 32 * 12).div_ceil(8)..];
        for (g, c) in codes.iter_mut().enumerate().take(n / 32) {
            *c = partial_nibbles(qs, n, 64, g);
        }
        head_k4_rest(rest.bytes, n)
    }
}

impl Format<176> for Q5K {
    const SCALED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(self, chunk: &[u8; 176], _: &[u8], _: usize) -> Head {
        head_k4(chunk)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const G: usize>(self, chunk: &[u8; 176]) -> __m256i {
        _mm256_or_si256(nibble::<G>(chunk, 48), high_bit::<G, 4>(load32(chunk, 16)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rest(self, rest: Rest<'_>, _: &[u8], codes: &mut Codes) -> Head {
        let n = rest.weights;
        let (high, qs) = rest.bytes[4 + (n / 32 * 12).div_ceil(8)..].split_at(n / 8);
        for (g, c) in codes.iter_mut().enumerate().take(n / 32) {
            *c = _mm256_or_si256(partial_nibbles(qs, n, 64, g), bit_stream(word(high, 4 * g), 16));
        }
        head_k4_rest(rest.bytes, n)
    }
}

impl Format<210> for Q6K {
    const SCALED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(self, chunk: &[u8; 210], _: &[u8], _: usize) -> Head {
        head_offset::<5>(load16(chunk, 192), half(chunk, 208))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const G: usize>(self, chunk: &[u8; 210]) -> __m256i {
        let low = load32(chunk, 64 * (G / 4) + 32 * (G % 2));
        let high = load32(chunk, 128 + 32 * (G / 4));
        let top = _mm256_set1_epi8(0x30);
        let (low, high) = match G % 4 {
            0 => (bits::<0>(low, 15), _mm256_slli_epi16::<4>(high)),
            1 => (bits::<0>(low, 15), _mm256_slli_epi16::<2>(high)),
            2 => (bits::<4>(low, 15), high),
            _ => (bits::<4>(low, 15), _mm256_srli_epi16::<2>(high)),
        };
        _mm256_or_si256(low, _mm256_and_si256(high, top))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rest(self, rest: Rest<'_>, _: &[u8], codes: &mut Codes) -> Head {
        let n = rest.weights;
        let (ql, tail) = rest.bytes.split_at(n / 2);
        let (qh, tail) = tail.split_at(n / 4);
        for (g, c) in codes.iter_mut().enumerate().take(n / 32) {
            let high = _mm256_slli_epi16::<4>(partial_pairs(qh, n, g));
            *c = _mm256_or_si256(partial_nibbles(ql, n, 128, g), high);
        }
        head_offset::<5>(load16(&padded(&tail[..n / 16]), 0), half(tail, n / 16))
    }
}
