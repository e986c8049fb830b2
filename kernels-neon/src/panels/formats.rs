//! Codes and scales of each format in panels.
//!
//! Pseudo-code for a group g of 32 weights, in a lane for each row:
//!
//! ```text
//! superblocks   total += d · Σ x.d[g] · (scale[j] · dots[j]) − dmin · Σ x.d[g] · (min[j] · x.sums[j])
//! others        total += scale[g] · x.d[g] · (dots − zero · x.sums) + min[g] · x.d[g] · x.sums
//! ```
//!
//! Deviations:
//!
//! 1. Fixed offsets of codes are where the dot products start: −offset · x.sums.
//! 2. Where dot products become fp32 unscaled, they start at the bits of 1.5 · 2^23, so that one
//!    subtraction converts them, exactly: see [`float`].
//! 3. Dot products of sixteen weights with codes of 2 and 3 bits fit 16 bits (16 · 4 · 127),
//!    and so do the sums of activations.

use myq_blocks::DType;
use myq_blocks::layout::IQ4NL_LEVELS;

use super::lanes::Sums;
use crate::simd::*;

/// 128 activations of a column.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    /// Scale of each group of 32.
    pub(crate) d: float32x4_t,
    /// Sums in four lanes, one for each group: of its sixteens 0 and 1, or of all and nothing.
    pub(crate) sums: [int16x8_t; 2],
    /// Sums of the groups, times their scales.
    pub(crate) scaled: float32x4_t,
    /// Where dot products start, in lanes as `sums`.
    pub(crate) start: [int32x4_t; 2],
}

/// What is added beside dot products.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Minima {
    /// Nothing.
    None,
    /// A minimum times the scaled sum of activations.
    Scaled,
    /// A zero-point times the sum of activations, to the dot product.
    Zero,
    /// A minimum with a scale of the superblock.
    Super,
}

/// What eight rows' dot products and sums of activations are multiplied with: of the sixteens 0
/// and 1, or of a whole group and nothing.
#[derive(Clone, Copy)]
pub(crate) struct Scales {
    /// Of dot products.
    pub(crate) factor: [[float32x4_t; 2]; 2],
    /// Of sums of activations: see [`Format::MINIMA`].
    pub(crate) minima: [[float32x4_t; 2]; 2],
}

/// Four rows of a total: of products, and of minima.
pub(crate) type Totals = [float32x4_t; 2];

/// An integer format in panels. Lanes are four rows of a panel, the half `H`.
pub(crate) trait Format: Copy {
    /// Its name in files.
    const DTYPE: DType;
    /// Bits of the low plane.
    const LOW: usize;
    /// Bits of the high plane.
    const HIGH: usize = 0;
    /// Largest |code|, as dot products see it.
    const MAX: i32 = (1 << (Self::LOW + Self::HIGH)) - 1;
    /// What is taken off each code.
    const OFFSET: i16 = 0;
    /// Whether each sixteen weights have a scale.
    const SIXTEENS: bool = false;
    /// Whether dot products start at [`MAGIC`].
    const FLOATED: bool = true;
    /// What else than dot products there is, for several columns.
    const MINIMA: Minima = Minima::None;
    /// Whether products and additions are rounded once, for several columns.
    const FUSED: bool = true;
    /// Whether codes of the low plane take an instruction or two.
    const CHEAP: bool = true;
    /// Whether totals are multiplied at the end of a chunk: see [`Format::finish`].
    const SUPER: bool = true;
    /// Scales of a group.
    type Fields: Copy;

    /// Bytes of the head of a chunk of 256 weights.
    #[inline(always)]
    fn head_bytes(self) -> usize {
        const { myq_blocks::panels::head_bytes(Self::DTYPE, 8) }
    }

    /// Scales of group `g` of unit `u`.
    fn fields(self, head: &[u8], u: usize, g: usize) -> Self::Fields;

    /// Scales of a group, for several columns. Results are to be the same as for one column.
    fn scales(fields: Self::Fields) -> Scales;

    /// From stored codes to factors.
    #[inline(always)]
    fn codes(q: uint8x16_t) -> int8x16_t {
        vreinterpretq_s8_u8(q)
    }

    /// Adds the dot products of group `G` of a unit.
    fn add<const G: i32, const H: usize>(
        fields: &Self::Fields,
        dots: Sums,
        x: &Unit,
        total: Totals,
    ) -> Totals;

    /// Adds a chunk's totals to the sum.
    #[inline(always)]
    fn finish<const H: usize>(_: &[u8], total: Totals, sum: float32x4_t) -> float32x4_t {
        vaddq_f32(sum, total[0])
    }
}

/// The bits of 12,582,912 = 1.5 · 2^23: added to a whole number n, −2^22 ≤ n < 2^22, they are
/// the bits of 12,582,912 + n.
pub(crate) const MAGIC: i32 = 0x4b40_0000;

/// The whole number that was added to [`MAGIC`].
#[inline(always)]
pub(crate) fn float(n: int32x4_t) -> float32x4_t {
    vsubq_f32(vreinterpretq_f32_s32(n), vdupq_n_f32(12_582_912.0))
}

/// Four fp16 numbers at `at`.
#[inline(always)]
pub(super) fn halves(b: &[u8], at: usize) -> float32x4_t {
    let b: &[u8; 8] = part(b, at);
    vcvt_f32_f16(vreinterpret_f16_u8(vcreate_u8(u64::from_le_bytes(*b))))
}

/// Numbers −128 ≤ v < 2^15 − 128 of eight rows as fp32, by deviation 2.
#[inline(always)]
pub(super) fn floats(v: int16x8_t) -> [float32x4_t; 2] {
    let v = vaddq_s16(v, vdupq_n_s16(128));
    let high = vdupq_n_s16(0x4b00);
    [vzip1q_s16(v, high), vzip2q_s16(v, high)]
        .map(|v| vsubq_f32(vreinterpretq_f32_s16(v), vdupq_n_f32(8_388_608.0 + 128.0)))
}

/// Numbers of [`by_halves`]: of the sixteens 0 and 1.
#[inline(always)]
fn floats_by_halves(v: [int16x8_t; 2]) -> [[float32x4_t; 2]; 2] {
    let ([a, b], [c, d]) = (floats(v[0]), floats(v[1]));
    [[a, c], [b, d]]
}

/// The half `H` of eight numbers, widened.
#[inline(always)]
fn wide<const H: usize>(v: int16x8_t) -> int32x4_t {
    if H == 0 {
        vmovl_s16(vget_low_s16(v))
    } else {
        vmovl_high_s16(v)
    }
}

/// Four rows of the first and of the second of two, for [`scaled_sixteens`].
#[inline(always)]
fn by_halves(v: [int16x8_t; 2]) -> [int16x8_t; 2] {
    let (a, b) = (vreinterpretq_s64_s16(v[0]), vreinterpretq_s64_s16(v[1]));
    [
        vreinterpretq_s16_s64(vtrn1q_s64(a, b)),
        vreinterpretq_s16_s64(vtrn2q_s64(a, b)),
    ]
}

/// `dots[0] · scale[0..4] + dots[1] · scale[4..8]`, of dot products that fit 16 bits.
#[inline(always)]
fn scaled_sixteens(dots: Sums, scale: int16x8_t) -> int32x4_t {
    let (a, b) = (
        vreinterpretq_s16_s32(dots[0]),
        vreinterpretq_s16_s32(dots[1]),
    );
    let dots = vuzp1q_s16(a, b);
    let sum = vmull_s16(vget_low_s16(dots), vget_low_s16(scale));
    vmlal_high_s16(sum, dots, scale)
}

/// `sum − m · x[G]`, m the half `H` of eight.
#[inline(always)]
pub(super) fn sub_lane<const G: i32, const H: usize>(
    sum: int32x4_t,
    m: int16x8_t,
    x: int16x8_t,
) -> int32x4_t {
    if H == 0 {
        vmlsl_laneq_s16::<G>(sum, vget_low_s16(m), x)
    } else {
        vmlsl_high_laneq_s16::<G>(sum, m, x)
    }
}

/// Sixteen fields of six bits: nibbles of the bytes at `at`, with the bits from `bit` on of
/// those at `high` above them.
#[inline(always)]
fn sixes(b: &[u8], (at, nibble): (usize, usize), (high, bit): (usize, usize)) -> uint8x16_t {
    let down = |q, by: usize| vshlq_u8(q, vdupq_n_s8(-(by as i8)));
    let low = vandq_u8(down(bytes(b, at), nibble), vdupq_n_u8(15));
    let high = vshlq_u8(bytes(b, high), vdupq_n_s8(4 - bit as i8));
    insert(low, high, vdupq_n_u8(0x30))
}

/// The first or the second eight of sixteen bytes, widened.
#[inline(always)]
fn eight(v: uint8x16_t, half: usize) -> int16x8_t {
    vreinterpretq_s16_u16(if half == 0 {
        vmovl_u8(vget_low_u8(v))
    } else {
        vmovl_high_u8(v)
    })
}

/// Bits moved up by `by`, or down.
#[inline(always)]
pub(crate) fn moved(q: uint8x16_t, by: i32) -> uint8x16_t {
    match by {
        4 => vshlq_n_u8::<4>(q),
        3 => vshlq_n_u8::<3>(q),
        2 => vshlq_n_u8::<2>(q),
        1 => vshlq_n_u8::<1>(q),
        -1 => vshrq_n_u8::<1>(q),
        -2 => vshrq_n_u8::<2>(q),
        -3 => vshrq_n_u8::<3>(q),
        -4 => vshrq_n_u8::<4>(q),
        -5 => vshrq_n_u8::<5>(q),
        _ => q,
    }
}

/// The bytes 2r and 2r + 1 of eight rows r, signed.
#[inline(always)]
fn pairs(v: int16x8_t) -> [int16x8_t; 2] {
    [vshrq_n_s16::<8>(vshlq_n_s16::<8>(v)), vshrq_n_s16::<8>(v)]
}

/// See [`DType::Q2K`].
#[derive(Clone, Copy)]
pub(crate) struct Q2K;

impl Format for Q2K {
    const DTYPE: DType = DType::Q2K;
    const LOW: usize = 2;
    const SIXTEENS: bool = true;
    const FLOATED: bool = false;
    const MINIMA: Minima = Minima::Super;
    /// Scales and minima of the sixteens 0 and 1, in halves.
    type Fields = [[int16x8_t; 2]; 2];

    #[inline(always)]
    fn fields(self, head: &[u8], u: usize, g: usize) -> Self::Fields {
        let v = vreinterpretq_u16_u8(bytes(head, 32 + 16 * (4 * u + g)));
        let four = |v| vreinterpretq_s16_u16(vandq_u16(v, vdupq_n_u16(15)));
        let scale = [four(v), four(vshrq_n_u16::<8>(v))];
        let min = [
            four(vshrq_n_u16::<4>(v)),
            vreinterpretq_s16_u16(vshrq_n_u16::<12>(v)),
        ];
        [by_halves(scale), by_halves(min)]
    }

    #[inline(always)]
    fn scales([scale, min]: Self::Fields) -> Scales {
        Scales {
            factor: floats_by_halves(scale),
            minima: floats_by_halves(min),
        }
    }

    #[inline(always)]
    fn add<const G: i32, const H: usize>(
        [scale, min]: &Self::Fields,
        dots: Sums,
        x: &Unit,
        total: Totals,
    ) -> Totals {
        let sum = vcvtq_f32_s32(scaled_sixteens(dots, scale[H]));
        let minima = vmull_laneq_s16::<G>(vget_low_s16(min[H]), x.sums[0]);
        let minima = vcvtq_f32_s32(vmlal_high_laneq_s16::<G>(minima, min[H], x.sums[1]));
        [
            vfmaq_laneq_f32::<G>(total[0], sum, x.d),
            vfmaq_laneq_f32::<G>(total[1], minima, x.d),
        ]
    }

    #[inline(always)]
    fn finish<const H: usize>(head: &[u8], total: Totals, sum: float32x4_t) -> float32x4_t {
        with_minima::<H>(head, total, sum)
    }
}

/// `sum + d · total − dmin · minima`.
#[inline(always)]
fn with_minima<const H: usize>(head: &[u8], total: Totals, sum: float32x4_t) -> float32x4_t {
    let sum = vfmaq_f32(sum, total[0], halves(head, 8 * H));
    vfmsq_f32(sum, total[1], halves(head, 16 + 8 * H))
}

/// See [`DType::Q3K`].
#[derive(Clone, Copy)]
pub(crate) struct Q3K;

impl Format for Q3K {
    const DTYPE: DType = DType::Q3K;
    const LOW: usize = 2;
    const HIGH: usize = 1;
    const OFFSET: i16 = 4;
    const SIXTEENS: bool = true;
    const FLOATED: bool = false;
    /// Scales of the sixteens 0 and 1, in halves.
    type Fields = [int16x8_t; 2];

    #[inline(always)]
    fn fields(self, head: &[u8], u: usize, g: usize) -> Self::Fields {
        // Sixteen fields to a group; a nibble has four groups, a pair of bits two.
        let v = sixes(
            head,
            (16 + 16 * g, 4 * u),
            (80 + 16 * (g % 2), 4 * u + g / 2 * 2),
        );
        let v = vreinterpretq_s8_u8(v);
        by_halves(pairs(vreinterpretq_s16_s8(vsubq_s8(v, vdupq_n_s8(32)))))
    }

    #[inline(always)]
    fn scales(scale: Self::Fields) -> Scales {
        let factor = floats_by_halves(scale);
        let minima = factor;
        Scales { factor, minima }
    }

    #[inline(always)]
    fn add<const G: i32, const H: usize>(
        scale: &Self::Fields,
        dots: Sums,
        x: &Unit,
        total: Totals,
    ) -> Totals {
        let sum = vcvtq_f32_s32(scaled_sixteens(dots, scale[H]));
        [vfmaq_laneq_f32::<G>(total[0], sum, x.d), total[1]]
    }

    #[inline(always)]
    fn finish<const H: usize>(head: &[u8], total: Totals, sum: float32x4_t) -> float32x4_t {
        vfmaq_f32(sum, total[0], halves(head, 8 * H))
    }
}

/// See [`DType::Q6K`].
#[derive(Clone, Copy)]
pub(crate) struct Q6K;

impl Format for Q6K {
    const DTYPE: DType = DType::Q6K;
    const LOW: usize = 4;
    const HIGH: usize = 2;
    const OFFSET: i16 = 32;
    const SIXTEENS: bool = true;
    const FLOATED: bool = false;
    /// Scales of the sixteens 0 and 1.
    type Fields = [int16x8_t; 2];

    #[inline(always)]
    fn fields(self, head: &[u8], u: usize, g: usize) -> Self::Fields {
        pairs(vreinterpretq_s16_u8(bytes(head, 16 + 16 * (4 * u + g))))
    }

    #[inline(always)]
    fn scales(scale: Self::Fields) -> Scales {
        let factor = [floats(scale[0]), floats(scale[1])];
        let minima = factor;
        Scales { factor, minima }
    }

    #[inline(always)]
    fn add<const G: i32, const H: usize>(
        scale: &Self::Fields,
        dots: Sums,
        x: &Unit,
        total: Totals,
    ) -> Totals {
        let sum = vmulq_s32(dots[0], wide::<H>(scale[0]));
        let sum = vcvtq_f32_s32(vmlaq_s32(sum, dots[1], wide::<H>(scale[1])));
        [vfmaq_laneq_f32::<G>(total[0], sum, x.d), total[1]]
    }

    #[inline(always)]
    fn finish<const H: usize>(head: &[u8], total: Totals, sum: float32x4_t) -> float32x4_t {
        Q3K::finish::<H>(head, total, sum)
    }
}

/// Q4_K and Q5_K, whose high plane has `HIGH` bits.
#[derive(Clone, Copy)]
pub(crate) struct Pair<const HIGH: usize>;

impl<const HIGH: usize> Format for Pair<HIGH> {
    const DTYPE: DType = if HIGH == 0 { DType::Q4K } else { DType::Q5K };
    const LOW: usize = 4;
    const HIGH: usize = HIGH;
    const FLOATED: bool = false;
    const MINIMA: Minima = Minima::Super;
    /// Scale and minimum.
    type Fields = [int16x8_t; 2];

    #[inline(always)]
    fn fields(self, head: &[u8], u: usize, g: usize) -> Self::Fields {
        // Eight fields to a group; scales are in low nibbles and bits, minima in high ones.
        let at = (32 + 16 * (2 * u + g / 2), 96 + 16 * (g / 2));
        let scale = sixes(head, (at.0, 0), (at.1, 2 * u));
        let min = sixes(head, (at.0, 4), (at.1, 4 + 2 * u));
        [eight(scale, g % 2), eight(min, g % 2)]
    }

    #[inline(always)]
    fn scales([scale, min]: Self::Fields) -> Scales {
        Scales {
            factor: [floats(scale); 2],
            minima: [floats(min); 2],
        }
    }

    #[inline(always)]
    fn add<const G: i32, const H: usize>(
        [scale, min]: &Self::Fields,
        dots: Sums,
        x: &Unit,
        total: Totals,
    ) -> Totals {
        let sum = vcvtq_f32_s32(vmulq_s32(dots[0], wide::<H>(*scale)));
        let minima = vcvtq_f32_s32(wide::<H>(*min));
        [
            vfmaq_laneq_f32::<G>(total[0], sum, x.d),
            vfmaq_laneq_f32::<G>(total[1], minima, x.scaled),
        ]
    }

    #[inline(always)]
    fn finish<const H: usize>(head: &[u8], total: Totals, sum: float32x4_t) -> float32x4_t {
        with_minima::<H>(head, total, sum)
    }
}

/// See [`DType::Tq2_0`]. Products and additions are not fused and in the reference's order:
/// results equal the scalar kernel's to the bit.
#[derive(Clone, Copy)]
pub(crate) struct Tq2_0;

impl Format for Tq2_0 {
    const DTYPE: DType = DType::Tq2_0;
    const LOW: usize = 2;
    const OFFSET: i16 = 1;
    const FUSED: bool = false;
    type Fields = ();

    #[inline(always)]
    fn fields(self, _: &[u8], _: usize, _: usize) {}

    #[inline(always)]
    fn scales(_: ()) -> Scales {
        let none = [[vdupq_n_f32(0.0); 2]; 2];
        Scales {
            factor: none,
            minima: none,
        }
    }

    #[inline(always)]
    fn add<const G: i32, const H: usize>(_: &(), dots: Sums, x: &Unit, total: Totals) -> Totals {
        [
            vaddq_f32(total[0], vmulq_laneq_f32::<G>(float(dots[0]), x.d)),
            total[1],
        ]
    }

    #[inline(always)]
    fn finish<const H: usize>(head: &[u8], total: Totals, sum: float32x4_t) -> float32x4_t {
        vaddq_f32(sum, vmulq_f32(halves(head, 8 * H), total[0]))
    }
}

/// A format of 32 weights with one scale, or with scale and minimum.
macro_rules! flat {
    ($name:ident $low:literal $high:literal offset $offset:literal minimum $minimum:literal { $($more:tt)* }) => {
        #[doc = concat!("See [`DType::", stringify!($name), "`].")]
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Format for $name {
            const DTYPE: DType = DType::$name;
            const LOW: usize = $low;
            const HIGH: usize = $high;
            const OFFSET: i16 = $offset;
            const SUPER: bool = false;
            const MINIMA: Minima = if $minimum { Minima::Scaled } else { Minima::None };
            $($more)*
            /// Scales and minima of both halves.
            type Fields = [[float32x4_t; 2]; 2];

            #[inline(always)]
            fn fields(self, head: &[u8], u: usize, g: usize) -> Self::Fields {
                let g = 4 * u + g;
                let two = |at: usize| [halves(head, at), halves(head, at + 8)];
                // Without minima these are scales, and unused.
                [two(16 * g), two(if $minimum { 128 + 16 * g } else { 16 * g })]
            }

            #[inline(always)]
            fn scales([scale, min]: Self::Fields) -> Scales {
                Scales {
                    factor: [scale; 2],
                    minima: [min; 2],
                }
            }

            #[inline(always)]
            fn add<const G: i32, const H: usize>(
                [scale, min]: &Self::Fields,
                dots: Sums,
                x: &Unit,
                mut total: Totals,
            ) -> Totals {
                let factor = vmulq_laneq_f32::<G>(scale[H], x.d);
                total[0] = vfmaq_f32(total[0], float(dots[0]), factor);
                if $minimum {
                    total[0] = vfmaq_laneq_f32::<G>(total[0], min[H], x.scaled);
                }
                total
            }
        }
    };
}

flat!(Q4_0 4 0 offset 8 minimum false {});
flat!(Q4_1 4 0 offset 0 minimum true {});
flat!(Q5_0 4 1 offset 16 minimum false {});
flat!(Q5_1 4 1 offset 0 minimum true {});
flat!(Q8_0 8 0 offset 0 minimum false {
    const MAX: i32 = 128;
});
flat!(Iq4Nl 4 0 offset 0 minimum false {
    const MAX: i32 = 127;
    const CHEAP: bool = false;

    #[inline(always)]
    fn codes(q: uint8x16_t) -> int8x16_t {
        vqtbl1q_s8(load_s8(&IQ4NL_LEVELS), q)
    }
});
