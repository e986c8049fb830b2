//! Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL: blocks of 32 weights.
//!
//! Pseudo-code for each block:
//!
//! ```text
//! sum += d · x.d · (w · x.q − offset · Σ x.q) + m · x.d · Σ x.q
//! ```
//!
//! Deviations:
//!
//! 1. Four blocks are one step, and lane k of each vector belongs to block k.
//! 2. Codes stay unsigned; the offset (8 or 16) is taken off with the activations' sums.

use myq_blocks::DType;
use myq_blocks::layout::IQ4NL_LEVELS;

use crate::dot::{Codes, Dot};
use crate::format::{Acts, Format, stored};
use crate::simd::*;

/// The fp16 numbers at `at` of four blocks of `size` bytes.
#[inline(always)]
fn four_halves(b: &[u8], size: usize, at: usize) -> float32x4_t {
    let bits = |k: usize| u16::from_le_bytes(*part(b, k * size + at));
    widen_half(&[bits(0), bits(1), bits(2), bits(3)])
}

/// Eight registers from the two of each block.
#[inline(always)]
fn registers(two: impl Fn(usize) -> [uint8x16_t; 2]) -> [uint8x16_t; 8] {
    let [[a, b], [c, d], [e, f], [g, h]] = [two(0), two(1), two(2), two(3)];
    [a, b, c, d, e, f, g, h]
}

/// Low and high nibbles of the 16 bytes at `at`.
#[inline(always)]
fn nibbles(b: &[u8], at: usize) -> [uint8x16_t; 2] {
    let q = bytes(b, at);
    [vandq_u8(q, vdupq_n_u8(15)), vshrq_n_u8::<4>(q)]
}

/// Nibbles at `at + 4` with the 32 high bits at `at`.
#[inline(always)]
fn five_bits(b: &[u8], at: usize) -> [uint8x16_t; 2] {
    const BIT: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
    let [low, high] = nibbles(b, at + 4);
    let fifth = |i: usize| {
        let spread = vcombine_u8(vdup_n_u8(b[at + 2 * i]), vdup_n_u8(b[at + 2 * i + 1]));
        vandq_u8(vtstq_u8(spread, load_u8(&BIT)), vdupq_n_u8(16))
    };
    [vorrq_u8(low, fifth(0)), vorrq_u8(high, fifth(1))]
}

/// `sum + d · x.d · dots`, d of each block.
#[inline(always)]
fn scaled(sum: float32x4_t, dots: int32x4_t, x: Acts<'_>, d: float32x4_t) -> float32x4_t {
    vfmaq_f32(sum, vcvtq_f32_s32(dots), vmulq_f32(x.scales(), d))
}

/// `dots − offset · Σ x.q`.
#[inline(always)]
fn centred(dots: int32x4_t, x: Acts<'_>, offset: i32) -> int32x4_t {
    vmlsq_s32(dots, x.group_sums(), vdupq_n_s32(offset))
}

/// A format with one scale: name, block bytes, codes of block `k`, dot products.
macro_rules! one_scale {
    ($name:ident, $bytes:literal, |$b:ident, $at:ident| $codes:expr, |$w:ident, $x:ident, $d:ident| $dots:expr) => {
        #[doc = concat!("See [`DType::", stringify!($name), "`].")]
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Format for $name {
            stored!(DType::$name, 4 * $bytes, 128);
            type Head = float32x4_t;
            type Sum = float32x4_t;

            #[inline(always)]
            fn head(b: Self::Step<'_>) -> float32x4_t {
                four_halves(b, $bytes, 0)
            }

            #[inline(always)]
            fn codes($b: Self::Step<'_>, _: usize) -> Codes {
                registers(|k| {
                    let $at = k * $bytes + 2;
                    $codes
                })
                .map(vreinterpretq_s8_u8)
            }

            #[inline(always)]
            fn add<$d: Dot>(
                d: &float32x4_t,
                _: usize,
                $w: &Codes,
                $x: Acts<'_>,
                sum: float32x4_t,
            ) -> float32x4_t {
                scaled(sum, $dots, $x, *d)
            }
        }
    };
}

one_scale!(Q4_0, 18, |b, at| nibbles(b, at), |w, x, D| centred(
    D::groups::<15>(w, x.q),
    x,
    8
));
one_scale!(Q5_0, 22, |b, at| five_bits(b, at), |w, x, D| centred(
    D::groups::<31>(w, x.q),
    x,
    16
));
one_scale!(
    Q8_0,
    34,
    |b, at| [bytes(b, at), bytes(b, at + 16)],
    |w, x, D| D::groups::<128>(w, x.q)
);
one_scale!(
    Iq4Nl,
    18,
    |b, at| {
        let levels = load_s8(&IQ4NL_LEVELS);
        nibbles(b, at).map(|q| vreinterpretq_u8_s8(vqtbl1q_s8(levels, q)))
    },
    |w, x, D| D::groups::<127>(w, x.q)
);

/// A format with scale and minimum.
macro_rules! scale_and_minimum {
    ($name:ident, $bytes:literal, $max:literal, |$b:ident, $at:ident| $codes:expr) => {
        #[doc = concat!("See [`DType::", stringify!($name), "`].")]
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Format for $name {
            stored!(DType::$name, 4 * $bytes, 128);
            type Head = [float32x4_t; 2];
            type Sum = float32x4_t;

            #[inline(always)]
            fn head(b: Self::Step<'_>) -> [float32x4_t; 2] {
                [four_halves(b, $bytes, 0), four_halves(b, $bytes, 2)]
            }

            #[inline(always)]
            fn codes($b: Self::Step<'_>, _: usize) -> Codes {
                registers(|k| {
                    let $at = k * $bytes + 4;
                    $codes
                })
                .map(vreinterpretq_s8_u8)
            }

            #[inline(always)]
            fn add<D: Dot>(
                head: &Self::Head,
                _: usize,
                w: &Codes,
                x: Acts<'_>,
                sum: float32x4_t,
            ) -> float32x4_t {
                let sum = scaled(sum, D::groups::<$max>(w, x.q), x, head[0]);
                scaled(sum, x.group_sums(), x, head[1])
            }
        }
    };
}

scale_and_minimum!(Q4_1, 20, 15, |b, at| nibbles(b, at));
scale_and_minimum!(Q5_1, 24, 31, |b, at| five_bits(b, at));
