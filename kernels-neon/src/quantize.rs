//! Activations to their 8-bit form.
//!
//! ```text
//! for each 32 values: d = max|x| / 127; q = round to even(x · (1/d)); two sums of 16
//! ```
//!
//! Deviations:
//!
//! 1. The values that end a vector, fewer than 32, and the padding are left to the reference.

use myq_blocks::{ColumnMut, scalar};

use crate::simd::*;

/// See `Kernels::quantize`. Every operation is that of the reference: the same division,
/// products rounded to the nearest code with ties to even, maxima that ignore NaN.
pub(crate) fn quantize(x: &[f32], out: ColumnMut<'_>) {
    let (groups, rest) = x.as_chunks::<32>();
    let n = groups.len();
    let (q, q_rest) = out.q.split_at_mut(32 * n);
    let (d, d_rest) = out.d.split_at_mut(n);
    let (sums, sums_rest) = out.sums.split_at_mut(2 * n);
    let (scaled_sums, scaled_rest) = out.scaled_sums.split_at_mut(n);
    for (g, x) in groups.iter().enumerate() {
        let v: [float32x4_t; 8] = std::array::from_fn(|i| load_f32(part(x, 4 * i)));
        let size = v.map(vabsq_f32);
        let max = size.into_iter().fold(vdupq_n_f32(0.0), vmaxnmq_f32);
        let scale = vmaxnmvq_f32(max) / 127.0;
        let inverse = if scale >= f32::MIN_POSITIVE {
            1.0 / scale
        } else {
            0.0
        };
        d[g] = if inverse == 0.0 { 0.0 } else { scale };
        for h in 0..2 {
            let codes = sixteen_codes(
                [v[4 * h], v[4 * h + 1], v[4 * h + 2], v[4 * h + 3]],
                inverse,
            );
            sums[2 * g + h] = vaddlvq_s8(codes);
            let at = 32 * g + 16 * h;
            if let Some(q) = q[at..].first_chunk_mut() {
                store_s8(q, codes);
            }
        }
        scaled_sums[g] = d[g] * f32::from(sums[2 * g] + sums[2 * g + 1]);
    }
    scalar::quantize(
        rest,
        ColumnMut {
            q: q_rest,
            d: d_rest,
            sums: sums_rest,
            scaled_sums: scaled_rest,
        },
    );
}

/// Codes of sixteen values. No product passes ±127.5 by more than roundings: the largest
/// value becomes ±127 and a NaN zero.
#[inline(always)]
fn sixteen_codes(v: [float32x4_t; 4], inverse: f32) -> int8x16_t {
    let [a, b, c, d] = v.map(|v| vcvtnq_s32_f32(vmulq_n_f32(v, inverse)));
    let lo = vqmovn_high_s32(vqmovn_s32(a), b);
    let hi = vqmovn_high_s32(vqmovn_s32(c), d);
    vqmovn_high_s16(vqmovn_s16(lo), hi)
}
