//! Linear formats: bit streams of 2, 3, 5 or 6 bits with a scale per group.
//!
//! ```text
//! codes 2k of sixteen: two bytes that hold the code, shifted to the top of 16 bits, then down
//! codes 2k + 1:        two bytes that hold the code, shifted to bit 8, masked; or both
//! d[g] = m[g] = scale; offsets = zero-point
//! ```
//!
//! Deviations:
//! 1. Sixteen codes take a whole number of bytes, so every half register uses the same table
//!    of bytes and shifts; a shift by a lane's own distance is a multiplication.
//! 2. Loads near the chunk's end start earlier and move the table, to stay inside the chunk.
//! 3. A row that ends within a chunk has its scales behind the codes, so loads may go on into
//!    those; only a very short end is copied to the stack.

use crate::format::{Codes, Format, Head, Rest, load16, load32};
use myq_blocks::Linear;
use std::arch::x86_64::*;

/// `BITS` bits a weight; chunks of `32·BITS` bytes.
#[derive(Clone, Copy)]
pub(crate) struct Dense<const BITS: usize> {
    linear: Linear,
    code_bytes: usize,
    groups: usize,
}

impl<const BITS: usize> Dense<BITS> {
    /// For rows of `cols` weights; `linear` has `BITS` bits.
    pub(crate) fn new(linear: Linear, cols: usize) -> Dense<BITS> {
        let code_bytes = (cols * BITS).div_ceil(32) * 4;
        Dense {
            linear,
            code_bytes,
            groups: cols.div_ceil(linear.group()),
        }
    }

    /// Bytes of codes 2k (`odd` 0) or 2k + 1 of sixteen, for both halves.
    const fn places(odd: usize) -> [u8; 32] {
        let mut places = [0; 32];
        let mut i = 0;
        while i < 32 {
            let code = i % 16 / 2 * 2 + odd;
            places[i] = (code * BITS / 8 + i % 2) as u8;
            i += 1;
        }
        places
    }

    /// Factors that move the code to `to` (bit 8 or, at the top, bit 16 − BITS), as bytes.
    const fn factors(odd: usize, to: usize) -> [u8; 32] {
        let mut bytes = [0; 32];
        let mut i = 0;
        while i < 16 {
            let code = i % 8 * 2 + odd;
            let factor = 1u16 << (to - code * BITS % 8);
            [bytes[2 * i], bytes[2 * i + 1]] = factor.to_le_bytes();
            i += 1;
        }
        bytes
    }

    const EVEN: [u8; 32] = Self::places(0);
    const ODD: [u8; 32] = Self::places(1);
    const TO_TOP: [u8; 32] = Self::factors(0, 16 - BITS);
    const TO_HIGH: [u8; 32] = Self::factors(1, 8);

    /// The 32 codes of group `g` of at least sixteen bytes, all of which may be read.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unpack(chunk: &[u8], g: usize) -> __m256i {
        let (low, high) = (4 * BITS * g, 4 * BITS * g + 2 * BITS);
        // Deviation 2.
        let last = chunk.len() - 16;
        let (low_at, high_at) = (low.min(last), high.min(last));
        let v = _mm256_set_m128i(load16(chunk, high_at), load16(chunk, low_at));
        let moved = _mm256_set_m128i(
            _mm_set1_epi8((high - high_at) as i8),
            _mm_set1_epi8((low - low_at) as i8),
        );
        let place =
            |table: &[u8; 32]| _mm256_shuffle_epi8(v, _mm256_add_epi8(load32(table, 0), moved));
        let even = _mm256_mullo_epi16(place(&Self::EVEN), load32(&Self::TO_TOP, 0));
        let odd = _mm256_mullo_epi16(place(&Self::ODD), load32(&Self::TO_HIGH, 0));
        let even = match BITS {
            2 => _mm256_srli_epi16::<14>(even),
            3 => _mm256_srli_epi16::<13>(even),
            5 => _mm256_srli_epi16::<11>(even),
            _ => _mm256_srli_epi16::<10>(even),
        };
        let mask = _mm256_set1_epi16(((1 << BITS) - 1) << 8);
        _mm256_or_si256(even, _mm256_and_si256(odd, mask))
    }

    /// Scales and zero-points of eight groups of 32 from weight `256·index` on; groups that
    /// the row does not have get zeros.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn scales(self, side: &[u8], index: usize) -> Head {
        let per = self.linear.group() / 32;
        let (first, count) = (8 / per * index, 8 / per);
        let zeros = &side[2 * self.groups..];
        if first + count <= self.groups {
            return self.spread(per, &side[2 * first..], zeros.get(first..).unwrap_or(&[]));
        }
        let (mut own, mut own_zeros) = ([0; 16], [0; 8]);
        let there = &side[2 * first..2 * self.groups];
        own[..there.len()].copy_from_slice(there);
        if self.linear.asymmetric() {
            let there = &zeros[first..self.groups];
            own_zeros[..there.len()].copy_from_slice(there);
        }
        self.spread(per, &own, &own_zeros)
    }

    /// Scales and zero-points of `8 / per` groups, each for `per` groups of 32.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn spread(self, per: usize, scales: &[u8], zeros: &[u8]) -> Head {
        let asymmetric = self.linear.asymmetric();
        let zeros = if asymmetric {
            zeros
        } else {
            &[1 << (BITS - 1); 8]
        };
        let (scales, zeros) = match per {
            1 => (first::<16>(scales), first::<8>(zeros)),
            2 => (first::<8>(scales), first::<4>(zeros)),
            _ => (first::<4>(scales), first::<2>(zeros)),
        };
        let d = _mm256_cvtph_ps(repeat(scales, per));
        let z = repeat(_mm_cvtepu8_epi16(zeros), per);
        // Each zero-point for both sixteens of its group.
        let offsets = _mm256_set_m128i(_mm_unpackhi_epi16(z, z), _mm_unpacklo_epi16(z, z));
        Head {
            d,
            m: d,
            scales: _mm256_setzero_si256(),
            offsets,
        }
    }
}

/// The first `N` bytes, then zeros.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn first<const N: usize>(bytes: &[u8]) -> __m128i {
    let mut own = [0; 16];
    own[..N].copy_from_slice(&bytes[..N]);
    load16(&own, 0)
}

/// The first `8 / times` of eight 16-bit values, each `times` times: 1, 2 or 4.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn repeat(v: __m128i, times: usize) -> __m128i {
    let two = _mm_unpacklo_epi16(v, v);
    match times {
        1 => v,
        2 => two,
        _ => _mm_unpacklo_epi32(two, two),
    }
}

macro_rules! dense {
    ($bits:literal $bytes:literal) => {
        impl Format<$bytes> for Dense<$bits> {
            fn side(self, row: &[u8]) -> &[u8] {
                &row[self.code_bytes..]
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn head(self, _: &[u8; $bytes], side: &[u8], index: usize) -> Head {
                self.scales(side, index)
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn codes<const G: usize>(self, chunk: &[u8; $bytes]) -> __m256i {
                Self::unpack(chunk, G)
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn rest(self, rest: Rest<'_>, side: &[u8], codes: &mut Codes) -> Head {
                // Deviation 3. Codes past the end meet activations of zero.
                let mut own = [0; 48];
                let bytes = match rest.bytes.len() {
                    n @ 0..48 => {
                        own[..n].copy_from_slice(rest.bytes);
                        &own
                    }
                    _ => rest.bytes,
                };
                for (g, c) in codes.iter_mut().enumerate().take(rest.weights.div_ceil(32)) {
                    *c = Self::unpack(bytes, g);
                }
                self.scales(side, rest.index)
            }
        }
    };
}

dense!(2 64);
dense!(3 96);
dense!(5 160);
dense!(6 192);
