//! The formats of 32 weights, eight blocks to a chunk.
//!
//! ```text
//! d[g] = scale of block g; offsets 8 or 16 times d, or the minimum of the block
//! ```
//!
//! Deviations:
//! 1. A row may end within a chunk: blocks it lacks have scales of zero.

use crate::format::{Codes, Format, Head, Rest, bit_stream, load16, load32, nibbles, short, word};
use myq_blocks::layout::IQ4NL_LEVELS;
use std::arch::x86_64::*;

/// Eight fp16 numbers, one of each block of `stride` bytes; zeros past `count` blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halves(blocks: &[u8], stride: usize, at: usize, count: usize) -> __m256 {
    let mut h = [0i16; 8];
    for (g, h) in h.iter_mut().enumerate().take(count) {
        *h = short(blocks, stride * g + at);
    }
    _mm256_cvtph_ps(_mm_setr_epi16(
        h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7],
    ))
}

/// Scales alone, with a fixed offset of the codes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_offset(blocks: &[u8], stride: usize, count: usize, offset: i16) -> Head {
    let d = halves(blocks, stride, 0, count);
    Head {
        d,
        m: d,
        scales: _mm256_setzero_si256(),
        offsets: _mm256_set1_epi16(offset),
    }
}

/// Scales and minima, which are added.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn head_minimum(blocks: &[u8], stride: usize, count: usize) -> Head {
    let d = halves(blocks, stride, 0, count);
    let m = _mm256_xor_ps(halves(blocks, stride, 2, count), _mm256_set1_ps(-0.0));
    Head {
        d,
        m,
        scales: _mm256_setzero_si256(),
        offsets: _mm256_set1_epi16(1),
    }
}

/// One format: name, bytes of a chunk, its constants, head and codes.
macro_rules! flat {
    ($(#[$doc:meta])* $name:ident $bytes:literal { $($constants:tt)* } head $head:expr; codes $codes:expr;) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Format<$bytes> for $name {
            $($constants)*

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn head(self, chunk: &[u8; $bytes], _: &[u8], _: usize) -> Head {
                $head(chunk, $bytes / 8, 8)
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn codes<const G: usize>(self, chunk: &[u8; $bytes]) -> __m256i {
                $codes(chunk, $bytes / 8 * G)
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn rest(self, rest: Rest<'_>, _: &[u8], codes: &mut Codes) -> Head {
                let count = rest.weights / 32;
                for (g, c) in codes.iter_mut().enumerate().take(count) {
                    *c = $codes(rest.bytes, $bytes / 8 * g);
                }
                $head(rest.bytes, $bytes / 8, count)
            }
        }
    };
}

flat! {
    /// 4 bits.
    Q4_0 144 {}
    head |blocks, stride, count| head_offset(blocks, stride, count, 8);
    codes |chunk: &[u8], at| nibbles(load16(chunk, at + 2));
}
flat! {
    /// 4 bits and a minimum.
    Q4_1 160 {}
    head head_minimum;
    codes |chunk: &[u8], at| nibbles(load16(chunk, at + 4));
}
flat! {
    /// 5 bits.
    Q5_0 176 {}
    head |blocks, stride, count| head_offset(blocks, stride, count, 16);
    codes |chunk: &[u8], at| {
        _mm256_or_si256(nibbles(load16(chunk, at + 6)), bit_stream(word(chunk, at + 2), 16))
    };
}
flat! {
    /// 5 bits and a minimum.
    Q5_1 192 {}
    head head_minimum;
    codes |chunk: &[u8], at| {
        _mm256_or_si256(nibbles(load16(chunk, at + 8)), bit_stream(word(chunk, at + 4), 16))
    };
}
flat! {
    /// 8 bits, signed.
    Q8_0 272 { const SIGNED: bool = true; const OFFSET: bool = false; }
    head |blocks, stride, count| head_offset(blocks, stride, count, 0);
    codes |chunk: &[u8], at| load32(chunk, at + 2);
}
flat! {
    /// 4 bits through a table, signed.
    Iq4Nl 144 { const SIGNED: bool = true; const OFFSET: bool = false; }
    head |blocks, stride, count| head_offset(blocks, stride, count, 0);
    codes |chunk: &[u8], at| {
        let levels = _mm256_broadcastsi128_si256(load16(&LEVELS, 0));
        _mm256_shuffle_epi8(levels, nibbles(load16(chunk, at + 2)))
    };
}

const LEVELS: [u8; 16] = {
    let mut bytes = [0; 16];
    let mut i = 0;
    while i < 16 {
        bytes[i] = IQ4NL_LEVELS[i] as u8;
        i += 1;
    }
    bytes
};
