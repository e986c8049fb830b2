//! Attention over keys and values in fp16.
//!
//! The pseudo-code is that of `myq_blocks::scalar`. Deviations:
//!
//! 1. `scores` sums a key in sixteen lanes.
//! 2. `mix` keeps 32 outputs (64 bytes of each value, a cache line) in registers over all
//!    positions, then four, then one.

use myq_blocks::f16;

use crate::floats::{add, total};
use crate::simd::*;

/// Four fp16 numbers.
#[inline(always)]
fn widen(v: &[f16], at: usize) -> float32x4_t {
    let v: &[f16; 4] = part(v, at);
    widen_half(&v.map(f16::to_bits))
}

/// A number by itself, with the same instruction.
#[inline(always)]
fn widen_one(v: f16) -> f32 {
    half(&v.to_le_bytes(), 0)
}

/// See `Kernels::scores`.
pub(crate) fn scores(q: &[f32], keys: &[f16], scale: f32, out: &mut [f32]) {
    let (q_sixteens, q_rest) = q.as_chunks::<16>();
    for (out, key) in out.iter_mut().zip(keys.chunks_exact(q.len())) {
        let (sixteens, rest) = key.as_chunks::<16>();
        let mut sums = [vdupq_n_f32(0.0); 4];
        for (q, k) in q_sixteens.iter().zip(sixteens) {
            add(&mut sums, &[widen(k, 0), widen(k, 4), widen(k, 8), widen(k, 12)], q);
        }
        let last: f32 = q_rest.iter().zip(rest).map(|(q, k)| q * widen_one(*k)).sum();
        *out = scale * (total(sums) + last);
    }
}

/// See `Kernels::mix`.
pub(crate) fn mix(p: &[f32], values: &[f16], out: &mut [f32]) {
    let dim = out.len();
    let (lines, rest) = out.as_chunks_mut::<32>();
    let mut at = 0;
    for out in lines {
        let sums = mix_vectors::<8>(p, values, dim, at);
        for (i, v) in sums.into_iter().enumerate() {
            if let Some(out) = out[4 * i..].first_chunk_mut() {
                store_f32(out, v);
            }
        }
        at += 32;
    }
    let (fours, rest) = rest.as_chunks_mut::<4>();
    for out in fours {
        let [v] = mix_vectors::<1>(p, values, dim, at);
        store_f32(out, v);
        at += 4;
    }
    for out in rest {
        *out = p.iter().zip(values.chunks_exact(dim)).map(|(p, v)| p * widen_one(v[at])).sum();
        at += 1;
    }
}

/// Outputs `at .. at + 4·N`.
#[inline(always)]
fn mix_vectors<const N: usize>(p: &[f32], values: &[f16], dim: usize, at: usize) -> [float32x4_t; N] {
    let mut sums = [vdupq_n_f32(0.0); N];
    for (p, value) in p.iter().zip(values.chunks_exact(dim)) {
        let value = &value[at..at + 4 * N];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = vfmaq_n_f32(*sum, widen(value, 4 * i), *p);
        }
    }
    sums
}

/// See `Kernels::to_f16`; NaN stays NaN, as in the reference.
pub(crate) fn to_f16(x: &[f32], out: &mut [f16]) {
    let four = |x: &[f32; 4]| {
        const LARGEST: f32 = 65504.0;
        let v = vminq_f32(vmaxq_f32(load_f32(x), vdupq_n_f32(-LARGEST)), vdupq_n_f32(LARGEST));
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
    out_rest.iter_mut().zip(four(&last)).for_each(|(out, v)| *out = v);
}
