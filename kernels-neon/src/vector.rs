//! Quantising activations, norms and pointwise functions.
//!
//! The pseudo-code is that of `myq_blocks::scalar`. Deviations:
//!
//! 1. Four lanes; what ends a vector is padded to a whole one, or left to the reference
//!    where results must equal it to the bit.
//! 2. The exponential is a polynomial, see [`exp`]; below exp(−87.3), where fp32 leaves the
//!    normal numbers, softmax gives zero.

use myq_blocks::{ColumnMut, scalar};

use crate::floats::{add, total};
use crate::simd::*;

/// See `Kernels::quantize`. Every operation is that of the reference: the same division,
/// products rounded to the nearest code with ties to even, maxima that ignore NaN.
pub(crate) fn quantize(x: &[f32], out: ColumnMut<'_>) {
    let (groups, rest) = x.as_chunks::<32>();
    let n = groups.len();
    let (q, q_rest) = out.q.split_at_mut(32 * n);
    let (d, d_rest) = out.d.split_at_mut(n);
    let (sums, sums_rest) = out.sums.split_at_mut(2 * n);
    for (g, x) in groups.iter().enumerate() {
        let v: [float32x4_t; 8] = std::array::from_fn(|i| load_f32(part(x, 4 * i)));
        let size = v.map(|v| vabsq_f32(v));
        let max = size.into_iter().fold(vdupq_n_f32(0.0), vmaxnmq_f32);
        let scale = vmaxnmvq_f32(max) / 127.0;
        let inverse = if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
        d[g] = if inverse == 0.0 { 0.0 } else { scale };
        for h in 0..2 {
            let codes = sixteen_codes([v[4 * h], v[4 * h + 1], v[4 * h + 2], v[4 * h + 3]], inverse);
            sums[2 * g + h] = vaddlvq_s8(codes);
            let at = 32 * g + 16 * h;
            if let Some(q) = q[at..].first_chunk_mut() {
                store_s8(q, codes);
            }
        }
    }
    scalar::quantize(rest, ColumnMut { q: q_rest, d: d_rest, sums: sums_rest });
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

/// See `Kernels::rms_norm`.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let (sixteens, rest) = x.as_chunks::<16>();
    let mut sums = [vdupq_n_f32(0.0); 4];
    for x in sixteens {
        add(&mut sums, &std::array::from_fn(|k| load_f32(part(x, 4 * k))), x);
    }
    let squares = total(sums) + rest.iter().map(|x| x * x).sum::<f32>();
    let scale = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    let n = x.len() / 4 * 4;
    for (out, (x, w)) in
        out.as_chunks_mut::<4>().0.iter_mut().zip(x.as_chunks::<4>().0.iter().zip(weight.as_chunks::<4>().0))
    {
        store_f32(out, vmulq_f32(vmulq_n_f32(load_f32(x), scale), load_f32(w)));
    }
    for ((out, x), w) in out[n..].iter_mut().zip(&x[n..]).zip(&weight[n..]) {
        *out = x * scale * w;
    }
}

/// exp, within about two units in the last place from [`LOWEST`] to [`HIGHEST`], to which
/// values outside are clamped; NaN stays.
///
/// x = n·ln 2 + r with |r| ≤ ln(2)/2; the series of exp(r) to its seventh power leaves out
/// 0.347⁸/8! = 5e-9 of the result. ln 2 is taken off in two parts, the first of so few bits
/// that its products with n are exact.
#[inline(always)]
fn exp(x: float32x4_t) -> float32x4_t {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const TERMS: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let x = vminq_f32(vmaxq_f32(x, vdupq_n_f32(LOWEST)), vdupq_n_f32(HIGHEST));
    let n = vrndnq_f32(vmulq_n_f32(x, std::f32::consts::LOG2_E));
    let r = vfmsq_f32(x, n, vdupq_n_f32(LN2_HIGH));
    let r = vfmsq_f32(r, n, vdupq_n_f32(LN2_LOW));
    let mut p = vdupq_n_f32(1.0 / 5040.0);
    for t in TERMS {
        p = vfmaq_f32(vdupq_n_f32(t), p, r);
    }
    let exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
    vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
}

/// Least argument of [`exp`].
const LOWEST: f32 = -87.3;
/// Largest argument of [`exp`].
const HIGHEST: f32 = 88.3;

#[inline(always)]
fn zero_where(v: float32x4_t, mask: uint32x4_t) -> float32x4_t {
    vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), mask))
}

/// exp, and zero below [`LOWEST`].
#[inline(always)]
fn exp_or_zero(x: float32x4_t) -> float32x4_t {
    zero_where(exp(x), vcltq_f32(x, vdupq_n_f32(LOWEST)))
}

/// g / (1 + exp(−g)) · u; zero where exp(−g) would be clamped, as it is there but for 4e-37.
#[inline(always)]
fn silu(g: float32x4_t, u: float32x4_t) -> float32x4_t {
    let e = exp(vnegq_f32(g));
    let v = vmulq_f32(vdivq_f32(g, vaddq_f32(e, vdupq_n_f32(1.0))), u);
    zero_where(v, vcltq_f32(g, vdupq_n_f32(-HIGHEST)))
}

/// See `Kernels::swiglu`.
pub(crate) fn swiglu(gate: &mut [f32], up: &[f32]) {
    let (fours, rest) = gate.as_chunks_mut::<4>();
    let (up_fours, up_rest) = up.as_chunks::<4>();
    for (g, u) in fours.iter_mut().zip(up_fours) {
        let v = silu(load_f32(g), load_f32(u));
        store_f32(g, v);
    }
    let (mut g, mut u) = ([0.0; 4], [0.0; 4]);
    g[..rest.len()].copy_from_slice(rest);
    u[..rest.len()].copy_from_slice(&up_rest[..rest.len()]);
    let v = silu(load_f32(&g), load_f32(&u));
    store_f32(&mut g, v);
    rest.copy_from_slice(&g[..rest.len()]);
}

/// See `Kernels::softmax`.
pub(crate) fn softmax(x: &mut [f32]) {
    let (fours, rest) = x.as_chunks_mut::<4>();
    let mut last = [f32::NEG_INFINITY; 4];
    last[..rest.len()].copy_from_slice(rest);
    let max = fours.iter().fold(load_f32(&last), |m, v| vmaxnmq_f32(m, load_f32(v)));
    let max = vdupq_n_f32(vmaxnmvq_f32(max));
    let mut sum = vdupq_n_f32(0.0);
    for v in fours.iter_mut().chain([&mut last]) {
        let e = exp_or_zero(vsubq_f32(load_f32(v), max));
        sum = vaddq_f32(sum, e);
        store_f32(v, e);
    }
    let inverse = 1.0 / vaddvq_f32(sum);
    for v in fours.iter_mut().chain([&mut last]) {
        let scaled = vmulq_n_f32(load_f32(v), inverse);
        store_f32(v, scaled);
    }
    rest.copy_from_slice(&last[..rest.len()]);
}
