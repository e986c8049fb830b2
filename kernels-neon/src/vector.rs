//! Norm, activation, exponentials and conversions of fp32.
//!
//! The pseudo-code is that of `myq_blocks::scalar`, with
//!
//! ```text
//! exp(x) = 2^n · p(r), n = round(x / ln 2), r = x − n·ln 2 in two parts, p of degree 7
//! ```
//!
//! Deviations:
//!
//! 1. Four lanes; what ends a vector is padded to a whole one or done by itself.
//! 2. Below exp(−87.3), where fp32 leaves the normal numbers, a softmax gets zero.

use myq_blocks::f16;

use crate::float::{add, total};
use crate::simd::*;

/// See `Kernels::rms_norm`.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let (sixteens, rest) = x.as_chunks::<16>();
    let mut sums = [vdupq_n_f32(0.0); 4];
    for x in sixteens {
        add(
            &mut sums,
            &std::array::from_fn(|k| load_f32(part(x, 4 * k))),
            x,
        );
    }
    let squares = total(sums) + rest.iter().map(|x| x * x).sum::<f32>();
    let scale = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    let n = x.len() / 4 * 4;
    for (out, (x, w)) in out
        .as_chunks_mut::<4>()
        .0
        .iter_mut()
        .zip(x.as_chunks::<4>().0.iter().zip(weight.as_chunks::<4>().0))
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
    const TERMS: [f32; 7] = [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
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

/// See `Kernels::exp_block`.
pub(crate) fn exp_block(x: &mut [f32], max: f32) -> (f32, f32) {
    let (fours, rest) = x.as_chunks_mut::<4>();
    let mut last = [f32::NEG_INFINITY; 4];
    last[..rest.len()].copy_from_slice(rest);
    let most = fours
        .iter()
        .fold(vdupq_n_f32(max), |m, v| vmaxnmq_f32(m, load_f32(v)));
    let max = vmaxnmvq_f32(vmaxnmq_f32(most, load_f32(&last)));
    let most = vdupq_n_f32(max);
    let mut sum = vdupq_n_f32(0.0);
    for v in fours.iter_mut().chain([&mut last]) {
        let e = exp_or_zero(vsubq_f32(load_f32(v), most));
        sum = vaddq_f32(sum, e);
        store_f32(v, e);
    }
    rest.copy_from_slice(&last[..rest.len()]);
    (max, vaddvq_f32(sum))
}

/// Four fp16 numbers.
#[inline(always)]
pub(crate) fn widen(v: &[f16], at: usize) -> float32x4_t {
    let v: &[f16; 4] = part(v, at);
    widen_half(&v.map(f16::to_bits))
}

/// A number by itself, with the same instruction.
#[inline(always)]
pub(crate) fn widen_one(v: f16) -> f32 {
    half(&v.to_le_bytes(), 0)
}

/// See `Kernels::to_f16`; NaN stays NaN, as in the reference.
pub(crate) fn to_f16(x: &[f32], out: &mut [f16]) {
    let four = |x: &[f32; 4]| {
        const LARGEST: f32 = 65504.0;
        let v = vminq_f32(
            vmaxq_f32(load_f32(x), vdupq_n_f32(-LARGEST)),
            vdupq_n_f32(LARGEST),
        );
        let mut bits = [0; 4];
        store_u16x4(&mut bits, vreinterpret_u16_f16(vcvt_f16_f32(v)));
        bits.map(f16::from_bits)
    };
    let (fours, rest) = x.as_chunks::<4>();
    let (out_fours, out_rest) = out.as_chunks_mut::<4>();
    for (x, out) in fours.iter().zip(out_fours) {
        *out = four(x);
    }
    let mut last = [0.0; 4];
    last[..rest.len()].copy_from_slice(rest);
    out_rest
        .iter_mut()
        .zip(four(&last))
        .for_each(|(out, v)| *out = v);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_within_two_units() {
        let steps = 200_000;
        for i in 0..=steps {
            let x = LOWEST + (HIGHEST - LOWEST) * i as f32 / steps as f32;
            let mut got = [0.0; 4];
            store_f32(&mut got, exp(vdupq_n_f32(x)));
            let want = f64::from(x).exp();
            let unit = f64::from((want as f32).next_up() - want as f32);
            let off = (f64::from(got[0]) - want).abs() / unit;
            assert!(off <= 2.0, "exp({x}) = {:e}, off by {off} units", got[0]);
        }
    }
}
