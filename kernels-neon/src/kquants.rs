//! Q2_K to Q6_K: superblocks of 256 weights with integer sub-scales.
//!
//! Pseudo-code for each unit of 128 weights, four groups of 32 activations g:
//!
//! ```text
//! sum += d · x.d[g] · Σ scale[j] · (w[j] · x.q[j]) − dmin · x.d[g] · Σ min[j] · x.sums[j]
//! ```
//!
//! with j over the sub-blocks of group g (two of 16 or one of 32 weights).
//!
//! Deviations:
//!
//! 1. The four groups are the four lanes of each vector: sub-scales and minima are widened
//!    to vectors of 32-bit lanes once for each superblock.
//! 2. Products of sub-scales stay integers, as in the reference; floats begin at the group.

use myq_blocks::DType;

use crate::dot::{Codes, Dot};
use crate::format::{Acts, Format, stored};
use crate::simd::*;

/// Scales of 16 weights, or of 32 in the first vector of each unit.
type Scales = [[int32x4_t; 2]; 2];

/// `sum + d · x.d · dots`, by group.
#[inline(always)]
pub(crate) fn scaled(sum: float32x4_t, dots: int32x4_t, x: Acts<'_>, d: f32) -> float32x4_t {
    vfmaq_f32(sum, vcvtq_f32_s32(dots), vmulq_n_f32(x.scales(), d))
}

/// Dot products of each 16, times their scales, summed to groups of 32.
#[inline(always)]
fn scaled_sixteens<D: Dot, const MAX: i32>(
    w: &Codes,
    x: Acts<'_>,
    scale: &[int32x4_t; 2],
) -> int32x4_t {
    let [a, b] = D::sixteens::<MAX>(w, x.q);
    vpaddq_s32(vmulq_s32(a, scale[0]), vmulq_s32(b, scale[1]))
}

/// Four planes of two bits: unit `u` of a 2-bit plane that starts at `at`.
#[inline(always)]
pub(crate) fn pairs(b: &[u8], at: usize, u: usize) -> [uint8x16_t; 8] {
    let (lo, hi) = (bytes(b, at + 32 * u), bytes(b, at + 32 * u + 16));
    let m = vdupq_n_u8(3);
    [
        vandq_u8(lo, m),
        vandq_u8(hi, m),
        vandq_u8(vshrq_n_u8::<2>(lo), m),
        vandq_u8(vshrq_n_u8::<2>(hi), m),
        vandq_u8(vshrq_n_u8::<4>(lo), m),
        vandq_u8(vshrq_n_u8::<4>(hi), m),
        vshrq_n_u8::<6>(lo),
        vshrq_n_u8::<6>(hi),
    ]
}

/// Two chunks of 64 nibbles: unit `u` of a nibble plane of Q4_K and Q5_K.
#[inline(always)]
fn nibbles(b: &[u8], at: usize, u: usize) -> [uint8x16_t; 8] {
    let m = vdupq_n_u8(15);
    let q = |i: usize| bytes(b, at + 64 * u + 16 * i);
    let (low, high) = (|v| vandq_u8(v, m), |v| vshrq_n_u8::<4>(v));
    [
        low(q(0)),
        low(q(1)),
        high(q(0)),
        high(q(1)),
        low(q(2)),
        low(q(3)),
        high(q(2)),
        high(q(3)),
    ]
}

/// Masks of the high bits of unit `u`: weight w is bit w/32 of byte w%32.
#[inline(always)]
fn high_bits(b: &[u8], at: usize, u: usize) -> [uint8x16_t; 8] {
    let (lo, hi) = (bytes(b, at), bytes(b, at + 16));
    let bit = |k: usize| vdupq_n_u8(1 << (4 * u + k));
    [
        vtstq_u8(lo, bit(0)),
        vtstq_u8(hi, bit(0)),
        vtstq_u8(lo, bit(1)),
        vtstq_u8(hi, bit(1)),
        vtstq_u8(lo, bit(2)),
        vtstq_u8(hi, bit(2)),
        vtstq_u8(lo, bit(3)),
        vtstq_u8(hi, bit(3)),
    ]
}

/// See [`DType::Q2K`].
#[derive(Clone, Copy)]
pub(crate) struct Q2K;

/// Decoded scales of Q2_K.
pub(crate) struct Q2KHead {
    d: f32,
    dmin: f32,
    scale: Scales,
    min: [int16x8_t; 2],
}

impl Format for Q2K {
    stored!(DType::Q2K, 84, 256);
    type Head = Q2KHead;
    type Sum = float32x4_t;

    #[inline(always)]
    fn head(b: Self::Step<'_>) -> Q2KHead {
        let s = bytes(b, 0);
        let m = vshrq_n_u8::<4>(s);
        let min = [vmovl_u8(vget_low_u8(m)), vmovl_high_u8(m)].map(vreinterpretq_s16_u16);
        Q2KHead {
            d: half(b, 80),
            dmin: half(b, 82),
            scale: widen_u8(vandq_u8(s, vdupq_n_u8(15))),
            min,
        }
    }

    #[inline(always)]
    fn codes(b: Self::Step<'_>, u: usize) -> Codes {
        pairs(b, 16, u).map(vreinterpretq_s8_u8)
    }

    #[inline(always)]
    fn add<D: Dot>(h: &Q2KHead, u: usize, w: &Codes, x: Acts<'_>, sum: float32x4_t) -> float32x4_t {
        let dots = scaled_sixteens::<D, 3>(w, x, &h.scale[u]);
        let sums = load_s16(x.sums);
        let a = vmull_s16(vget_low_s16(h.min[u]), vget_low_s16(sums));
        let minima = vpaddq_s32(a, vmull_high_s16(h.min[u], sums));
        scaled(scaled(sum, dots, x, h.d), minima, x, -h.dmin)
    }
}

/// See [`DType::Q3K`].
#[derive(Clone, Copy)]
pub(crate) struct Q3K;

/// Decoded scales of Q3_K and Q6_K.
pub(crate) struct SignedHead {
    d: f32,
    scale: Scales,
}

impl Format for Q3K {
    stored!(DType::Q3K, 110, 256);
    type Head = SignedHead;
    type Sum = float32x4_t;

    #[inline(always)]
    fn head(b: Self::Step<'_>) -> SignedHead {
        // Low nibbles of scales 0..8 and 8..16, then two bits more from bytes 8..12, which
        // serve scales j, j+4, j+8 and j+12 from the lowest bits up.
        const SHIFT: [i8; 16] = [0, 0, 0, 0, -2, -2, -2, -2, -4, -4, -4, -4, -6, -6, -6, -6];
        let first = u64::from_le_bytes(*part(b, 96));
        const NIBBLE: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        let low = vcombine_u8(vcreate_u8(first & NIBBLE), vcreate_u8(first >> 4 & NIBBLE));
        let high = vreinterpretq_u8_u32(vdupq_n_u32(u32::from_le_bytes(*part(b, 104))));
        let high = vandq_u8(vshlq_u8(high, load_s8(&SHIFT)), vdupq_n_u8(3));
        let s = vsubq_u8(vorrq_u8(low, vshlq_n_u8::<4>(high)), vdupq_n_u8(32));
        SignedHead {
            d: half(b, 108),
            scale: widen_s8(vreinterpretq_s8_u8(s)),
        }
    }

    #[inline(always)]
    fn codes(b: Self::Step<'_>, u: usize) -> Codes {
        // A set high bit adds 4 and the offset takes 4 off: only a clear one changes anything.
        let (low, mask, four) = (pairs(b, 32, u), high_bits(b, 0, u), vdupq_n_u8(4));
        let code = |i: usize| vreinterpretq_s8_u8(vsubq_u8(low[i], vbicq_u8(four, mask[i])));
        std::array::from_fn(code)
    }

    #[inline(always)]
    fn add<D: Dot>(
        h: &SignedHead,
        u: usize,
        w: &Codes,
        x: Acts<'_>,
        sum: float32x4_t,
    ) -> float32x4_t {
        scaled(sum, scaled_sixteens::<D, 4>(w, x, &h.scale[u]), x, h.d)
    }
}

/// Decoded scales of Q4_K and Q5_K: one vector for each unit.
pub(crate) struct PairHead {
    d: f32,
    dmin: f32,
    scale: [int32x4_t; 2],
    min: [int32x4_t; 2],
}

impl PairHead {
    /// d, dmin and the twelve bytes of six-bit scales and minima that follow.
    #[inline(always)]
    fn read(b: &[u8]) -> PairHead {
        // The words a, b, c of myq_blocks::layout::k4_scale_min, four fields at a time.
        let word = |at| u32::from_le_bytes(*part(b, at));
        let (s, m, c) = (word(4), word(8), word(12));
        const SIX: u32 = 0x3f3f_3f3f;
        const FOUR: u32 = 0x0f0f_0f0f;
        const TOP: u32 = 0x3030_3030;
        let scale = u64::from(s & SIX) | u64::from(c & FOUR | s >> 2 & TOP) << 32;
        let min = u64::from(m & SIX) | u64::from(c >> 4 & FOUR | m >> 2 & TOP) << 32;
        let [scale, min] = widen_u8(vcombine_u8(vcreate_u8(scale), vcreate_u8(min)));
        PairHead {
            d: half(b, 0),
            dmin: half(b, 2),
            scale,
            min,
        }
    }

    #[inline(always)]
    fn add(&self, u: usize, dots: int32x4_t, x: Acts<'_>, sum: float32x4_t) -> float32x4_t {
        let sum = scaled(sum, vmulq_s32(dots, self.scale[u]), x, self.d);
        scaled(sum, vmulq_s32(x.group_sums(), self.min[u]), x, -self.dmin)
    }
}

/// See [`DType::Q4K`].
#[derive(Clone, Copy)]
pub(crate) struct Q4K;

impl Format for Q4K {
    stored!(DType::Q4K, 144, 256);
    type Head = PairHead;
    type Sum = float32x4_t;

    #[inline(always)]
    fn head(b: Self::Step<'_>) -> PairHead {
        PairHead::read(b)
    }

    #[inline(always)]
    fn codes(b: Self::Step<'_>, u: usize) -> Codes {
        nibbles(b, 16, u).map(vreinterpretq_s8_u8)
    }

    #[inline(always)]
    fn add<D: Dot>(
        h: &PairHead,
        u: usize,
        w: &Codes,
        x: Acts<'_>,
        sum: float32x4_t,
    ) -> float32x4_t {
        h.add(u, D::groups::<15>(w, x.q), x, sum)
    }
}

/// See [`DType::Q5K`].
#[derive(Clone, Copy)]
pub(crate) struct Q5K;

impl Format for Q5K {
    stored!(DType::Q5K, 176, 256);
    type Head = PairHead;
    type Sum = float32x4_t;

    #[inline(always)]
    fn head(b: Self::Step<'_>) -> PairHead {
        PairHead::read(b)
    }

    #[inline(always)]
    fn codes(b: Self::Step<'_>, u: usize) -> Codes {
        let (low, mask, bit) = (nibbles(b, 48, u), high_bits(b, 16, u), vdupq_n_u8(16));
        let code = |i: usize| vreinterpretq_s8_u8(vorrq_u8(low[i], vandq_u8(mask[i], bit)));
        std::array::from_fn(code)
    }

    #[inline(always)]
    fn add<D: Dot>(
        h: &PairHead,
        u: usize,
        w: &Codes,
        x: Acts<'_>,
        sum: float32x4_t,
    ) -> float32x4_t {
        h.add(u, D::groups::<31>(w, x.q), x, sum)
    }
}

/// See [`DType::Q6K`].
#[derive(Clone, Copy)]
pub(crate) struct Q6K;

impl Format for Q6K {
    stored!(DType::Q6K, 210, 256);
    type Head = SignedHead;
    type Sum = float32x4_t;

    #[inline(always)]
    fn head(b: Self::Step<'_>) -> SignedHead {
        SignedHead {
            d: half(b, 208),
            scale: widen_s8(vreinterpretq_s8_u8(bytes(b, 192))),
        }
    }

    #[inline(always)]
    fn codes(b: Self::Step<'_>, u: usize) -> Codes {
        let q = |i: usize| bytes(b, 64 * u + 16 * i);
        let (h0, h1) = (bytes(b, 128 + 32 * u), bytes(b, 144 + 32 * u));
        let (m, top, offset) = (vdupq_n_u8(15), vdupq_n_u8(0x30), vdupq_n_u8(32));
        // `high` has the two high bits of the code in bits 4 and 5, among others.
        let code =
            |low, high| vreinterpretq_s8_u8(vsubq_u8(vorrq_u8(low, vandq_u8(high, top)), offset));
        [
            code(vandq_u8(q(0), m), vshlq_n_u8::<4>(h0)),
            code(vandq_u8(q(1), m), vshlq_n_u8::<4>(h1)),
            code(vandq_u8(q(2), m), vshlq_n_u8::<2>(h0)),
            code(vandq_u8(q(3), m), vshlq_n_u8::<2>(h1)),
            code(vshrq_n_u8::<4>(q(0)), h0),
            code(vshrq_n_u8::<4>(q(1)), h1),
            code(vshrq_n_u8::<4>(q(2)), vshrq_n_u8::<2>(h0)),
            code(vshrq_n_u8::<4>(q(3)), vshrq_n_u8::<2>(h1)),
        ]
    }

    #[inline(always)]
    fn add<D: Dot>(
        h: &SignedHead,
        u: usize,
        w: &Codes,
        x: Acts<'_>,
        sum: float32x4_t,
    ) -> float32x4_t {
        scaled(sum, scaled_sixteens::<D, 32>(w, x, &h.scale[u]), x, h.d)
    }
}
