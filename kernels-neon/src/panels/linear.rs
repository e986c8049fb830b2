//! Codes and scales of the linear formats in panels: see `formats`.

use myq_blocks::{DType, Linear};

use super::formats::{Format, Minima, Scales, Totals, Unit, float, floats, halves, sub_lane};
use super::lanes::Sums;
use crate::simd::*;

/// A linear format of `LOW + HIGH` bits.
#[derive(Clone, Copy)]
pub(crate) struct Dense<const LOW: usize, const HIGH: usize>(pub(crate) Linear);

impl<const LOW: usize, const HIGH: usize> Format for Dense<LOW, HIGH> {
    // Names no group length; `head_bytes` does.
    const DTYPE: DType = DType::F32;
    const LOW: usize = LOW;
    const HIGH: usize = HIGH;
    const SUPER: bool = false;
    const MINIMA: Minima = Minima::Zero;
    /// Scales of both halves, and zero-points.
    type Fields = ([float32x4_t; 2], int16x8_t);

    #[inline(always)]
    fn head_bytes(self) -> usize {
        myq_blocks::panels::head_bytes(DType::Linear(self.0), 8)
    }

    #[inline(always)]
    fn fields(self, head: &[u8], u: usize, g: usize) -> Self::Fields {
        let shift = self.0.group().trailing_zeros();
        let (s, count) = ((32 * (4 * u + g)) >> shift, 256 >> shift);
        let scale = [halves(head, 16 * s), halves(head, 16 * s + 8)];
        let zero = if self.0.asymmetric() {
            u64::from_le_bytes(*part(head, 16 * count + 8 * s))
        } else {
            0x0101_0101_0101_0101 << (LOW + HIGH - 1)
        };
        (scale, vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(zero))))
    }

    #[inline(always)]
    fn scales((scale, zero): Self::Fields) -> Scales {
        let minima = [floats(zero).map(vnegq_f32); 2];
        let factor = [scale; 2];
        Scales { factor, minima }
    }

    /// Sums: 32 · 63 · 127 + 255 · 32 · 127, below 2^22.
    #[inline(always)]
    fn add<const G: i32, const H: usize>(
        (scale, zero): &Self::Fields,
        dots: Sums,
        x: &Unit,
        total: Totals,
    ) -> Totals {
        let sum = float(sub_lane::<G, H>(dots[0], *zero, x.sums[0]));
        let factor = vmulq_laneq_f32::<G>(scale[H], x.d);
        [vfmaq_f32(total[0], sum, factor), total[1]]
    }
}
