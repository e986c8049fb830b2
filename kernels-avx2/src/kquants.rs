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
//! 2. Codes of 2-bit planes are masked where they stand, that is times 1, 4 or 16, and the
//!    group's scale is divided by that, which is exact; only the topmost are shifted down, as
//!    their products would not fit.
//! 3. Partial superblocks are read in place (see `myq_blocks::tail`), never expanded.

use crate::format::{
    Codes, Format, Head, Rest, bit_stream, bits, bytes_before, first_bytes, half, load_f32, load16,
    load32, partial_nibbles, partial_pairs, short, sub_scales, word,
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
    Head {
        d,
        m: d,
        scales: sub_scales(scales),
        offsets,
    }
}

/// Eight scales and eight minima of one byte each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_pairs(scales: u64, mins: u64, d: f32, dmin: f32) -> Head {
    let (s, m) = (
        _mm_set1_epi64x(scales as i64),
        _mm_cvtsi64_si128(mins as i64),
    );
    Head {
        d: _mm256_set1_ps(d),
        m: _mm256_set1_ps(dmin),
        // Both halves alike: the two sixteens of a group share a scale.
        scales: _mm256_cvtepu8_epi16(s),
        offsets: _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(m, m)),
    }
}

/// The 6-bit fields of Q4_K and Q5_K, four at a time (see `layout::k4_scale_min`).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_k4(chunk: &[u8]) -> Head {
    let (a, b, c) = (word(chunk, 4), word(chunk, 8), word(chunk, 12));
    let (six, four, top) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x3030_3030);
    let eight = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let scales = eight(a & six, (c & four) | ((a >> 2) & top));
    let mins = eight(b & six, ((c >> 4) & four) | ((b >> 2) & top));
    head_pairs(scales, mins, half(chunk, 0), half(chunk, 2))
}

/// The 12-bit fields of a partial Q4_K or Q5_K superblock.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_k4_rest(bytes: &[u8], n: usize) -> Head {
    let (mut s, mut m) = (0, 0);
    for j in 0..n / 32 {
        let v = u64::from(short(bytes, 4 + 12 * j / 8) as u16) >> (12 * j % 8);
        s |= (v & 63) << (8 * j);
        m |= (v >> 6 & 63) << (8 * j);
    }
    head_pairs(s, m, half(bytes, 0), half(bytes, 2))
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

/// Where the codes of group `G` of a 2-bit plane are left standing (deviation 2).
const fn place(g: usize) -> usize {
    [0, 2, 4, 0][g % 4]
}

/// Group `G` of a 2-bit plane that starts at `at`, times two to the [`place`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn pairs<const G: usize>(chunk: &[u8], at: usize) -> __m256i {
    let v = load32(chunk, at + 32 * (G / 4));
    if G % 4 == 3 {
        bits::<6>(v, 3)
    } else {
        bits::<0>(v, 3 << place(G))
    }
}

/// The scale of each group for codes as [`pairs`] leaves them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn placed(head: Head) -> Head {
    const PLACED: [f32; 8] = [1.0, 0.25, 0.0625, 1.0, 1.0, 0.25, 0.0625, 1.0];
    Head {
        d: _mm256_mul_ps(head.d, load_f32(&PLACED, 0)),
        ..head
    }
}

/// Bit `g` of each byte, moved to bit `to`; both are constants where this is used.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn high_bit(v: __m256i, g: usize, to: usize) -> __m256i {
    let v = if to < g {
        _mm256_srl_epi16(v, _mm_cvtsi32_si128((g - to) as i32))
    } else {
        _mm256_sll_epi16(v, _mm_cvtsi32_si128((to - g) as i32))
    };
    _mm256_and_si256(v, _mm256_set1_epi8(1 << to))
}

/// Group `G` of a nibble plane of Q4_K and Q5_K that starts at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibble<const G: usize>(chunk: &[u8], at: usize) -> __m256i {
    let v = load32(chunk, at + 32 * (G / 2));
    if G.is_multiple_of(2) {
        bits::<0>(v, 15)
    } else {
        bits::<4>(v, 15)
    }
}

impl Format<84> for Q2K {
    const SCALED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(self, chunk: &[u8; 84], _: &[u8], _: usize) -> Head {
        placed(head_q2k(load16(chunk, 0), half(chunk, 80), half(chunk, 82)))
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
        // Only the partial superblock of 32 weights is shorter than a load of sixteen bytes.
        let scales = match bytes.len() {
            0..16 => _mm_cvtsi32_si128(i32::from(short(scales, 0)) & 0xffff),
            _ => _mm_and_si128(load16(bytes, 0), first_bytes(n / 16)),
        };
        head_q2k(scales, half(qs, n / 4), half(qs, n / 4 + 2))
    }
}

impl Format<110> for Q3K {
    const SCALED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(self, chunk: &[u8; 110], _: &[u8], _: usize) -> Head {
        placed(head_offset::<2>(scales_q3k(chunk), half(chunk, 108)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const G: usize>(self, chunk: &[u8; 110]) -> __m256i {
        _mm256_or_si256(
            pairs::<G>(chunk, 32),
            high_bit(load32(chunk, 0), G, 2 + place(G)),
        )
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
        // Four 6-bit fields take three bytes; the two bytes behind the fields let a load of
        // four end inside. Fields of missing sub-blocks become zero.
        let mut four = [0i32; 4];
        for (k, four) in four.iter_mut().enumerate().take(n.div_ceil(64)) {
            let v = word(tail, 3 * k);
            *four = (v & 0x3f | v << 2 & 0x3f00 | v << 4 & 0x3f_0000 | v << 6 & 0x3f00_0000) as i32;
        }
        let scales = _mm_sub_epi8(
            _mm_setr_epi32(four[0], four[1], four[2], four[3]),
            _mm_set1_epi8(32),
        );
        let scales = _mm_and_si128(scales, first_bytes(n / 16));
        head_offset::<2>(scales, half(tail, (n / 16 * 6).div_ceil(8)))
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
        _mm256_or_si256(nibble::<G>(chunk, 48), high_bit(load32(chunk, 16), G, 4))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rest(self, rest: Rest<'_>, _: &[u8], codes: &mut Codes) -> Head {
        let n = rest.weights;
        let (high, qs) = rest.bytes[4 + (n / 32 * 12).div_ceil(8)..].split_at(n / 8);
        for (g, c) in codes.iter_mut().enumerate().take(n / 32) {
            *c = _mm256_or_si256(
                partial_nibbles(qs, n, 64, g),
                bit_stream(word(high, 4 * g), 16),
            );
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
        let end = rest.bytes.len() - tail.len() + n / 16;
        for (g, c) in codes.iter_mut().enumerate().take(n / 32) {
            let high = _mm256_slli_epi16::<4>(partial_pairs(qh, n, g));
            *c = _mm256_or_si256(partial_nibbles(ql, n, 128, g), high);
        }
        head_offset::<5>(bytes_before(rest.bytes, end, n / 16), half(rest.bytes, end))
    }
}
