//! Norm, activation, softmax, and attention over keys and values in fp16.
//!
//! ```text
//! exp(x) = 2^n · p(r), n = round(x / ln 2), r = x − n·ln 2 in two parts, p of degree 6
//! silu(x) = x / (1 + exp(−x)); softmax: exp(x − max) / Σ exp(x − max)
//! scores: q · key of each position; mix: Σ p · value over the positions
//! ```
//!
//! Deviations:
//! 1. Vectors whose length is not a multiple of eight end in a copy filled up on the stack.
//! 2. Scores take four keys at a time (one load of q serves four), mixes 64 values at a time
//!    in registers over all positions.

use crate::format::{load_f32, store_f32};
use crate::rows::sum;
use myq_blocks::f16;
use std::arch::x86_64::*;

/// Smallest argument whose exponential is a normal number; below, [`exp`] gives zero.
const LOWEST: f32 = -87.336_54;
/// Largest argument; above, [`exp`] gives infinity.
const HIGHEST: f32 = 88.376_26;

/// Exponential of eight numbers, within 2 units of the last place (tested below).
///
/// The polynomial interpolates at Chebyshev points of |r| ≤ ln 2 / 2 and is off by 2.6e-9 of
/// the value; what remains is rounding.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn exp(x: __m256) -> __m256 {
    const P: [f32; 7] = [
        1.0,
        1.000_000_04,
        0.5,
        0.166_664_15,
        0.041_666_35,
        0.008_375_135,
        0.001_394_111_9,
    ];
    let set = |v| _mm256_set1_ps(v);
    let clamped = _mm256_min_ps(_mm256_max_ps(x, set(LOWEST)), set(HIGHEST));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        clamped,
        set(std::f32::consts::LOG2_E),
    ));
    // ln 2 = 355/512 − 2.12194440e-4: the first product is exact.
    let r = _mm256_fnmadd_ps(n, set(0.693_359_4), clamped);
    let r = _mm256_fnmadd_ps(n, set(-2.121_944_4e-4), r);
    let mut p = set(P[6]);
    for c in P[..6].iter().rev() {
        p = _mm256_fmadd_ps(p, r, set(*c));
    }
    let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(
        _mm256_cvtps_epi32(n),
        _mm256_set1_epi32(127),
    ));
    let y = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
    let y = _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, set(LOWEST)), y);
    let above = _mm256_cmp_ps::<_CMP_GT_OQ>(x, set(HIGHEST));
    _mm256_blendv_ps(y, set(f32::INFINITY), above)
}

/// Up to eight values, filled up with `fill`.
#[inline]
fn padded(x: &[f32], fill: f32) -> [f32; 8] {
    std::array::from_fn(|i| x.get(i).copied().unwrap_or(fill))
}

/// See `Kernels::rms_norm`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut squares = [_mm256_setzero_ps(); 4];
    let (whole, rest) = x.as_chunks::<8>();
    for (i, v) in whole.iter().enumerate() {
        let v = load_f32(v, 0);
        squares[i % 4] = _mm256_fmadd_ps(v, v, squares[i % 4]);
    }
    let last = load_f32(&padded(rest, 0.0), 0);
    squares[0] = _mm256_fmadd_ps(last, last, squares[0]);
    let total = _mm256_add_ps(
        _mm256_add_ps(squares[0], squares[1]),
        _mm256_add_ps(squares[2], squares[3]),
    );
    let scale = 1.0 / (sum(total) / x.len() as f32 + eps).sqrt();
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * scale * w;
    }
}

/// See `Kernels::swiglu`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn swiglu(gate: &mut [f32], up: &[f32]) {
    let (gates, last) = gate.as_chunks_mut::<8>();
    let (ups, last_up) = up.as_chunks::<8>();
    for (g, u) in gates.iter_mut().zip(ups) {
        let v = silu_times(load_f32(g, 0), load_f32(u, 0));
        store_f32(g, 0, v);
    }
    let mut eight = padded(last, 0.0);
    let v = silu_times(load_f32(&eight, 0), load_f32(&padded(last_up, 0.0), 0));
    store_f32(&mut eight, 0, v);
    last.copy_from_slice(&eight[..last.len()]);
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn silu_times(g: __m256, u: __m256) -> __m256 {
    let e = exp(_mm256_xor_ps(g, _mm256_set1_ps(-0.0)));
    let silu = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0), e));
    _mm256_mul_ps(silu, u)
}

/// See `Kernels::softmax`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn softmax(x: &mut [f32]) {
    let (eights, rest) = x.as_chunks_mut::<8>();
    let mut last = padded(rest, f32::NEG_INFINITY);
    let mut max = load_f32(&last, 0);
    for v in eights.iter() {
        max = _mm256_max_ps(max, load_f32(v, 0));
    }
    let max = _mm256_set1_ps(largest(max));
    let mut total = _mm256_setzero_ps();
    for v in eights.iter_mut().chain([&mut last]) {
        let e = exp(_mm256_sub_ps(load_f32(v, 0), max));
        total = _mm256_add_ps(total, e);
        store_f32(v, 0, e);
    }
    let inverse = 1.0 / sum(total);
    rest.copy_from_slice(&last[..rest.len()]);
    for v in x {
        *v *= inverse;
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn largest(v: __m256) -> f32 {
    let m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)))
}

/// See `Kernels::exp_block`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn exp_block(x: &mut [f32], max: f32) -> (f32, f32) {
    let (eights, rest) = x.as_chunks_mut::<8>();
    let mut last = padded(rest, f32::NEG_INFINITY);
    let mut most = _mm256_max_ps(_mm256_set1_ps(max), load_f32(&last, 0));
    for v in eights.iter() {
        most = _mm256_max_ps(most, load_f32(v, 0));
    }
    let max = largest(most);
    let most = _mm256_set1_ps(max);
    let mut total = _mm256_setzero_ps();
    for v in eights.iter_mut() {
        let e = exp(_mm256_sub_ps(load_f32(v, 0), most));
        total = _mm256_add_ps(total, e);
        store_f32(v, 0, e);
    }
    if !rest.is_empty() {
        let e = exp(_mm256_sub_ps(load_f32(&last, 0), most));
        total = _mm256_add_ps(total, e);
        store_f32(&mut last, 0, e);
        rest.copy_from_slice(&last[..rest.len()]);
    }
    (max, sum(total))
}

/// Eight fp16 numbers from `at` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_half(values: &[f16], at: usize) -> __m256 {
    let part = &values[at..at + 8];
    // SAFETY: `part` has the sixteen bytes that the load reads; it needs no alignment.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(part.as_ptr().cast()) })
}

/// See `Kernels::scores`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn scores(q: &[f32], keys: &[f16], scale: f32, out: &mut [f32]) {
    let dim = q.len();
    let (fours, others) = out.as_chunks_mut::<4>();
    for (out, keys) in fours.iter_mut().zip(keys.chunks_exact(4 * dim)) {
        let (ab, cd) = keys.split_at(2 * dim);
        let ((a, b), (c, d)) = (ab.split_at(dim), cd.split_at(dim));
        *out = dots(q, [a, b, c, d]);
        for v in out {
            *v *= scale;
        }
    }
    for (out, key) in others
        .iter_mut()
        .zip(keys[4 * dim * fours.len()..].chunks_exact(dim))
    {
        *out = scale * dots(q, [key])[0];
    }
}

/// q times each of `K` keys.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots<const K: usize>(q: &[f32], keys: [&[f16]; K]) -> [f32; K] {
    let mut total = [_mm256_setzero_ps(); K];
    let (eights, rest) = q.as_chunks::<8>();
    for (i, q) in eights.iter().enumerate() {
        let q = load_f32(q, 0);
        for k in 0..K {
            total[k] = _mm256_fmadd_ps(q, load_half(keys[k], 8 * i), total[k]);
        }
    }
    if !rest.is_empty() {
        let q = load_f32(&padded(rest, 0.0), 0);
        for k in 0..K {
            let mut key = [f16::ZERO; 8];
            key[..rest.len()].copy_from_slice(&keys[k][8 * eights.len()..]);
            total[k] = _mm256_fmadd_ps(q, load_half(&key, 0), total[k]);
        }
    }
    let mut out = [0.0; K];
    for (out, v) in out.iter_mut().zip(total) {
        *out = sum(v);
    }
    out
}

/// See `Kernels::mix`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn mix(p: &[f32], values: &[f16], out: &mut [f32]) {
    let dim = out.len();
    let mut at = 0;
    while dim - at >= 64 {
        mix_part::<8>(p, values, at, out);
        at += 64;
    }
    while dim - at >= 16 {
        mix_part::<2>(p, values, at, out);
        at += 16;
    }
    if dim - at >= 8 {
        mix_part::<1>(p, values, at, out);
        at += 8;
    }
    let last = &mut out[at..];
    if !last.is_empty() {
        let mut total = _mm256_setzero_ps();
        for (p, value) in p.iter().zip(values.chunks_exact(dim)) {
            let mut eight = [f16::ZERO; 8];
            eight[..last.len()].copy_from_slice(&value[at..]);
            total = _mm256_fmadd_ps(_mm256_set1_ps(*p), load_half(&eight, 0), total);
        }
        let mut eight = [0.0; 8];
        store_f32(&mut eight, 0, total);
        last.copy_from_slice(&eight[..last.len()]);
    }
}

/// Values `at .. at + 8·N` of the mix.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn mix_part<const N: usize>(p: &[f32], values: &[f16], at: usize, out: &mut [f32]) {
    let mut total = [_mm256_setzero_ps(); N];
    for (p, value) in p.iter().zip(values.chunks_exact(out.len())) {
        let p = _mm256_set1_ps(*p);
        let value = &value[at..at + 8 * N];
        for (n, t) in total.iter_mut().enumerate() {
            *t = _mm256_fmadd_ps(p, load_half(value, 8 * n), *t);
        }
    }
    for (n, t) in total.into_iter().enumerate() {
        store_f32(out, at + 8 * n, t);
    }
}

/// See `Kernels::to_f16`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn to_f16(x: &[f32], out: &mut [f16]) {
    let (xs, last) = x.as_chunks::<8>();
    let (outs, last_out) = out.as_chunks_mut::<8>();
    for (x, out) in xs.iter().zip(outs) {
        *out = eight_halves(load_f32(x, 0));
    }
    let eight = eight_halves(load_f32(&padded(last, 0.0), 0));
    last_out.iter_mut().zip(eight).for_each(|(o, h)| *o = h);
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight_halves(x: __m256) -> [f16; 8] {
    let limit = _mm256_set1_ps(65504.0);
    let low = _mm256_sub_ps(_mm256_setzero_ps(), limit);
    let clamped = _mm256_min_ps(_mm256_max_ps(x, low), limit);
    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(clamped);
    let mut out = [f16::ZERO; 8];
    // SAFETY: eight f16 have room for the sixteen bytes of the store; it needs no alignment.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), halves) };
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_within_two_units() {
        if crate::Avx2::new().is_none() {
            return;
        }
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x: [f32; 8] = std::array::from_fn(|j| {
                LOWEST + (HIGHEST - LOWEST) * (8 * i + j) as f32 / 1_600_000.0
            });
            let mut y = [0.0; 8];
            // SAFETY: a kernel value exists, so the processor has the instructions.
            unsafe { store_f32(&mut y, 0, exp(load_f32(&x, 0))) };
            for (x, y) in x.iter().zip(y) {
                let want = f64::from(*x).exp();
                worst = worst.max((f64::from(y) - want).abs() / want);
            }
        }
        println!("largest relative error of exp: {worst:e}");
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
    }
}
