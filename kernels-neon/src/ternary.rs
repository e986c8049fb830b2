//! TQ1_0 and TQ2_0: weights −1, 0 and 1 without a multiplication by the weight.
//!
//! Pseudo-code for each superblock, groups g of 32:
//!
//! ```text
//! scaled = Σ x.d[g] · (Σ [t > 0] x.q + Σ [t > 1] x.q − Σ x.q)      t = w + 1
//! sum   += d · scaled
//! ```
//!
//! Deviations:
//!
//! 1. A condition is a byte mask: masked activations are added pairwise into 16 bits, where
//!    a group of 32 (at most 3·127·4 a lane) fits.
//! 2. TQ2_0 adds bit 1 of its code twice and bit 0 once, so that the code 3, which no
//!    quantiser writes, means 2 as in the reference.
//! 3. A TQ1_0 byte times a power of three has the wanted digit on top: it is above 0 from
//!    86 on and above 1 from 171 on, as 3·v ≥ 256 and 3·v ≥ 512.
//! 4. Floats are multiplied and added one by one in the order of the reference, not fused
//!    and not in lanes: results equal the scalar kernel's to the bit.

use myq_blocks::DType;

use crate::dot::{Codes, Dot};
use crate::format::{Acts, Format, Total, stored};
use crate::simd::*;

/// A total in the reference's order of additions.
#[derive(Clone, Copy)]
pub(crate) struct Ordered {
    /// Of the superblock so far.
    scaled: f32,
    /// Of the row.
    sum: f32,
}

impl Total for Ordered {
    #[inline(always)]
    fn zero() -> Ordered {
        Ordered {
            scaled: 0.0,
            sum: 0.0,
        }
    }

    #[inline(always)]
    fn value(self) -> f32 {
        self.sum
    }
}

impl Ordered {
    /// Adds unit `u`, whose four groups are `t`: eight partial sums each, Σ x.q still in them.
    #[inline(always)]
    fn add(mut self, t: [int16x8_t; 4], x: Acts<'_>, u: usize, d: f32) -> Ordered {
        let t = vpaddlq_s16(vpaddq_s16(vpaddq_s16(t[0], t[1]), vpaddq_s16(t[2], t[3])));
        let dots = vcvtq_f32_s32(vsubq_s32(t, x.group_sums()));
        let mut products = [0.0; 4];
        store_f32(&mut products, vmulq_f32(x.scales(), dots));
        for p in products {
            self.scaled += p;
        }
        if u == 1 {
            self.sum += d * self.scaled;
            self.scaled = 0.0;
        }
        self
    }
}

/// Register `j` of the activations where `mask` is set.
#[inline(always)]
fn masked(x: &[i8; 128], j: usize, mask: uint8x16_t) -> int8x16_t {
    vandq_s8(load_s8(part(x, 16 * j)), vreinterpretq_s8_u8(mask))
}

/// See [`DType::Tq2_0`].
#[derive(Clone, Copy)]
pub(crate) struct Tq2_0;

impl Format for Tq2_0 {
    stored!(DType::Tq2_0, 66, 256);
    type Head = f32;
    type Sum = Ordered;

    #[inline(always)]
    fn head(b: Self::Step<'_>) -> f32 {
        half(b, 64)
    }

    /// Bytes whose lowest two bits are the codes.
    #[inline(always)]
    fn codes(b: Self::Step<'_>, u: usize) -> Codes {
        let (lo, hi) = (bytes(b, 32 * u), bytes(b, 32 * u + 16));
        [
            lo,
            hi,
            vshrq_n_u8::<2>(lo),
            vshrq_n_u8::<2>(hi),
            vshrq_n_u8::<4>(lo),
            vshrq_n_u8::<4>(hi),
            vshrq_n_u8::<6>(lo),
            vshrq_n_u8::<6>(hi),
        ]
        .map(vreinterpretq_s8_u8)
    }

    #[inline(always)]
    fn add<D: Dot>(d: &f32, u: usize, w: &Codes, x: Acts<'_>, sum: Ordered) -> Ordered {
        let with =
            |j: usize, bit| masked(x.q, j, vtstq_u8(vreinterpretq_u8_s8(w[j]), vdupq_n_u8(bit)));
        let group = |g: usize| {
            let twos = vpadalq_s8(vpaddlq_s8(with(2 * g, 2)), with(2 * g + 1, 2));
            let t = vpadalq_s8(vaddq_s16(twos, twos), with(2 * g, 1));
            vpadalq_s8(t, with(2 * g + 1, 1))
        };
        sum.add([group(0), group(1), group(2), group(3)], x, u, *d)
    }
}

/// See [`DType::Tq1_0`].
#[derive(Clone, Copy)]
pub(crate) struct Tq1_0;

impl Format for Tq1_0 {
    stored!(DType::Tq1_0, 54, 256);
    type Head = f32;
    type Sum = Ordered;

    #[inline(always)]
    fn head(b: Self::Step<'_>) -> f32 {
        half(b, 52)
    }

    /// Bytes with the digit on top.
    #[inline(always)]
    fn codes(b: Self::Step<'_>, u: usize) -> Codes {
        const LAST: [u8; 16] = [1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27];
        let (q0, q1) = (bytes(b, 0), bytes(b, 16));
        let times = |v, power: u8| vmulq_u8(v, vdupq_n_u8(power));
        let codes = if u == 0 {
            [
                q0,
                q1,
                times(q0, 3),
                times(q1, 3),
                times(q0, 9),
                times(q1, 9),
                times(q0, 27),
                times(q1, 27),
            ]
        } else {
            let q2 = bytes(b, 32);
            let last = vreinterpretq_u8_u32(vdupq_n_u32(u32::from_le_bytes(*part(b, 48))));
            [
                times(q0, 81),
                times(q1, 81),
                q2,
                times(q2, 3),
                times(q2, 9),
                times(q2, 27),
                times(q2, 81),
                vmulq_u8(last, load_u8(&LAST)),
            ]
        };
        codes.map(vreinterpretq_s8_u8)
    }

    #[inline(always)]
    fn add<D: Dot>(d: &f32, u: usize, w: &Codes, x: Acts<'_>, sum: Ordered) -> Ordered {
        let from = |j: usize, least| {
            masked(
                x.q,
                j,
                vcgeq_u8(vreinterpretq_u8_s8(w[j]), vdupq_n_u8(least)),
            )
        };
        let group = |g: usize| {
            let t = vpadalq_s8(vpaddlq_s8(from(2 * g, 86)), from(2 * g, 171));
            vpadalq_s8(vpadalq_s8(t, from(2 * g + 1, 86)), from(2 * g + 1, 171))
        };
        sum.add([group(0), group(1), group(2), group(3)], x, u, *d)
    }
}
