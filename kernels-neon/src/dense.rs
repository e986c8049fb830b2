//! Linear formats: bit streams of 2, 3, 5 or 6 bits with a scale per group.
//!
//! Pseudo-code for each 32 weights:
//!
//! ```text
//! sum += scale · x.d · (w · x.q − zero · Σ x.q)
//! ```
//!
//! Deviations:
//!
//! 1. 128 weights are one step: four groups of 32 in four lanes, whatever the group length.
//! 2. Eight codes take exactly `BITS` bytes, so that one table of byte positions serves all
//!    eights: a table look-up brings the two bytes that hold a code into a 16-bit lane, a
//!    shift by lane moves it down. Codes of 2 bits never straddle bytes and need one byte.
//! 3. Loads of 16 bytes that would pass the step's end start earlier.

use myq_blocks::Linear;

use crate::dot::{Codes, Dot};
use crate::format::{Acts, Format};
use crate::simd::*;

/// A linear format and where the parts of a row of some length start.
#[derive(Clone, Copy)]
pub(crate) struct Dense<const BITS: usize> {
    scales: usize,
    groups: usize,
    /// Logarithm of the group length.
    shift: u32,
    asymmetric: bool,
}

impl<const BITS: usize> Dense<BITS> {
    /// For rows of `cols` weights. `l` has `BITS` bits.
    pub(crate) fn new(l: Linear, cols: usize) -> Dense<BITS> {
        Dense {
            scales: (cols * BITS).div_ceil(32) * 4,
            groups: cols.div_ceil(l.group()),
            shift: l.group().trailing_zeros(),
            asymmetric: l.asymmetric(),
        }
    }

    /// Scales and zero-points of the groups of step `i`; zero scales past the row's end.
    #[inline(always)]
    fn scales(&self, row: &[u8], i: usize) -> (float32x4_t, int32x4_t) {
        let (scales, zeros) = row[self.scales..].split_at(2 * self.groups);
        let (mut bits, mut zero) = ([0; 4], [1 << (BITS - 1); 4]);
        for k in 0..4 {
            let g = (128 * i + 32 * k) >> self.shift;
            if g < self.groups {
                bits[k] = u16::from_le_bytes(*part(scales, 2 * g));
                if self.asymmetric {
                    zero[k] = i32::from(zeros[g]);
                }
            }
        }
        (widen_half(&bits), load_s32(&zero))
    }
}

/// 128 codes with their scales.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    codes: &'a [u8],
    scale: float32x4_t,
    zero: int32x4_t,
}

/// A padded step; its codes take the first 16 · `BITS` bytes.
pub(crate) struct Tail {
    codes: [u8; 96],
    scale: float32x4_t,
    zero: int32x4_t,
}

/// Byte positions and shifts of eight codes in 16-bit lanes.
const fn eight(bits: usize) -> ([u8; 16], [i16; 8]) {
    let (mut at, mut shift) = ([0; 16], [0; 8]);
    let mut i = 0;
    while i < 8 {
        at[2 * i] = (i * bits / 8) as u8;
        at[2 * i + 1] = (i * bits / 8 + 1) as u8;
        shift[i] = -((i * bits % 8) as i16);
        i += 1;
    }
    (at, shift)
}

/// Sixteen codes of two bits from bytes 4·`j` … of a step.
#[inline(always)]
fn two_bits(b: &[u8], j: usize) -> uint8x16_t {
    const AT: [u8; 16] = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3];
    const SHIFT: [i8; 16] = [0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6];
    let at = vaddq_u8(load_u8(&AT), vdupq_n_u8(4 * (j as u8 % 4)));
    let spread = vqtbl1q_u8(bytes(b, j / 4 * 16), at);
    vandq_u8(vshlq_u8(spread, load_s8(&SHIFT)), vdupq_n_u8(3))
}

impl<const BITS: usize> Dense<BITS> {
    const EIGHT: ([u8; 16], [i16; 8]) = eight(BITS);

    /// Sixteen codes from bytes 2·`BITS`·`j` … of a step.
    #[inline(always)]
    fn sixteen(b: &[u8], j: usize) -> uint8x16_t {
        if BITS == 2 {
            return two_bits(b, j);
        }
        let start = (2 * BITS * j).min(16 * BITS - 16);
        let q = bytes(b, start);
        let lanes = |skip: usize| {
            let at = vaddq_u8(
                load_u8(&Self::EIGHT.0),
                vdupq_n_u8((2 * BITS * j - start + skip) as u8),
            );
            let windows = vreinterpretq_u16_u8(vqtbl1q_u8(q, at));
            vreinterpretq_u8_u16(vshlq_u16(windows, load_s16(&Self::EIGHT.1)))
        };
        vandq_u8(
            vuzp1q_u8(lanes(0), lanes(BITS)),
            vdupq_n_u8((1 << BITS) - 1),
        )
    }
}

impl<const BITS: usize> Format for Dense<BITS> {
    const UNITS: usize = 1;
    type Step<'a> = Step<'a>;
    type Tail = Tail;
    type Head = (float32x4_t, int32x4_t);
    type Sum = float32x4_t;

    #[inline(always)]
    fn step<'a>(&self, row: &'a [u8], _: usize, i: usize) -> Step<'a> {
        let (scale, zero) = self.scales(row, i);
        Step {
            codes: &row[16 * BITS * i..][..16 * BITS],
            scale,
            zero,
        }
    }

    fn tail(&self, row: &[u8], cols: usize, i: usize) -> Tail {
        let (scale, zero) = self.scales(row, i);
        let mut codes = [0; 96];
        let rest = &row[16 * BITS * i..cols * BITS / 8];
        codes[..rest.len()].copy_from_slice(rest);
        Tail { codes, scale, zero }
    }

    #[inline(always)]
    fn view(tail: &Tail) -> Step<'_> {
        Step {
            codes: &tail.codes,
            scale: tail.scale,
            zero: tail.zero,
        }
    }

    #[inline(always)]
    fn head(step: Step<'_>) -> Self::Head {
        (step.scale, step.zero)
    }

    #[inline(always)]
    fn codes(step: Step<'_>, _: usize) -> Codes {
        let b = &step.codes[..16 * BITS];
        let code = |j| vreinterpretq_s8_u8(Self::sixteen(b, j));
        std::array::from_fn(code)
    }

    #[inline(always)]
    fn add<D: Dot>(
        head: &Self::Head,
        _: usize,
        w: &Codes,
        x: Acts<'_>,
        sum: float32x4_t,
    ) -> float32x4_t {
        let dots = match BITS {
            2 | 3 => D::groups::<7>(w, x.q),
            5 => D::groups::<31>(w, x.q),
            _ => D::groups::<63>(w, x.q),
        };
        let dots = vmlsq_s32(dots, head.1, x.group_sums());
        vfmaq_f32(sum, vcvtq_f32_s32(dots), vmulq_f32(x.scales(), head.0))
    }
}
