//! Norm, activation, exponentials and conversions of fp32.
//!
//! ```text
//! exp(x) = 2^n · p(r), n = round(x / ln 2), r = x − n·ln 2 in two parts, p of degree 6
//! silu(x) = x / (1 + exp(−x))
//! ```
//!
//! Deviation: what does not fill a vector ends in a copy filled up on the stack.

use crate::Level;
use crate::format::load_f32;
use crate::lanes::{Eight, Lanes, Sixteen};
use crate::rows::sum;
use myq_blocks::f16;
use std::arch::x86_64::*;

/// Up to eight values, filled up with `fill`.
#[inline]
fn padded(x: &[f32], fill: f32) -> [f32; 8] {
    std::array::from_fn(|i| x.get(i).copied().unwrap_or(fill))
}

/// See `Kernels::rms_norm`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut squares = [_mm256_setzero_ps(); 4];
    let (whole, rest) = x.as_chunks::<32>();
    for x in whole {
        for (i, squares) in squares.iter_mut().enumerate() {
            let v = load_f32(x, 8 * i);
            *squares = _mm256_fmadd_ps(v, v, *squares);
        }
    }
    let (eights, rest) = rest.as_chunks::<8>();
    for x in eights {
        let v = load_f32(x, 0);
        squares[0] = _mm256_fmadd_ps(v, v, squares[0]);
    }
    if !rest.is_empty() {
        let last = load_f32(&padded(rest, 0.0), 0);
        squares[1] = _mm256_fmadd_ps(last, last, squares[1]);
    }
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
///
/// # Panics
/// If the lengths differ.
pub(crate) fn swiglu(level: Level, gate: &mut [f32], up: &[f32]) {
    assert!(gate.len() == up.len(), "gate and up of one length");
    // SAFETY: a `Level` is made where the processor has its instructions; the lengths are equal.
    unsafe {
        match level {
            Level::Avx512 | Level::Amx => swiglu_512(gate, up),
            _ => swiglu_256(gate, up),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn swiglu_256(gate: &mut [f32], up: &[f32]) {
    // SAFETY: the instructions are this function's; the lengths are the caller's promise.
    unsafe { swiglu_of::<Eight>(gate, up) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn swiglu_512(gate: &mut [f32], up: &[f32]) {
    // SAFETY: as above.
    unsafe { swiglu_of::<Sixteen>(gate, up) }
}

/// # Safety
/// The processor has the instructions; the lengths are equal.
#[inline(always)]
unsafe fn swiglu_of<L: Lanes>(gate: &mut [f32], up: &[f32]) {
    let whole = gate.len() / L::LEN * L::LEN;
    for i in (0..whole).step_by(L::LEN) {
        // SAFETY: i + LEN ≤ the length of both.
        unsafe { silu_times::<L>(gate.as_mut_ptr().add(i), up.as_ptr().add(i)) };
    }
    let (gate, up) = (&mut gate[whole..], &up[whole..]);
    if !gate.is_empty() {
        let (mut g, mut u) = ([0.0; 16], [0.0; 16]);
        g[..gate.len()].copy_from_slice(gate);
        u[..gate.len()].copy_from_slice(up);
        // SAFETY: no vector has more than sixteen values.
        unsafe { silu_times::<L>(g.as_mut_ptr(), u.as_ptr()) };
        gate.copy_from_slice(&g[..gate.len()]);
    }
}

/// # Safety
/// The processor has the instructions; both are a vector.
#[inline(always)]
unsafe fn silu_times<L: Lanes>(gate: *mut f32, up: *const f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let (g, u) = (L::load(gate), L::load(up));
        let e = L::exp(L::sub(L::zero(), g));
        L::store(L::mul(L::div(g, L::add(L::splat(1.0), e)), u), gate);
    }
}

/// See `Kernels::exp_block`.
pub(crate) fn exp_block(level: Level, x: &mut [f32], max: f32) -> (f32, f32) {
    // SAFETY: a `Level` is made where the processor has its instructions.
    unsafe {
        match level {
            Level::Avx512 | Level::Amx => exp_block_512(x, max),
            _ => exp_block_256(x, max),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn exp_block_256(x: &mut [f32], max: f32) -> (f32, f32) {
    // SAFETY: the instructions are this function's.
    unsafe { exp_block_of::<Eight>(x, max) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn exp_block_512(x: &mut [f32], max: f32) -> (f32, f32) {
    // SAFETY: the instructions are this function's.
    unsafe { exp_block_of::<Sixteen>(x, max) }
}

/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn exp_block_of<L: Lanes>(x: &mut [f32], max: f32) -> (f32, f32) {
    let whole = x.len() / L::LEN * L::LEN;
    let rest = x.len() - whole;
    // A copy only where there is a rest: its single stores would stall the load of a vector.
    let mut last = [f32::NEG_INFINITY; 16];
    if rest > 0 {
        last[..rest].copy_from_slice(&x[whole..]);
    }
    let p = x.as_mut_ptr();
    // SAFETY: i + LEN ≤ whole ≤ the length; no vector has more than sixteen values.
    unsafe {
        let mut most = L::splat(max);
        for i in (0..whole).step_by(L::LEN) {
            most = L::max(L::load(p.add(i)), most);
        }
        if rest > 0 {
            most = L::max(L::load(last.as_ptr()), most);
        }
        let max = L::largest(most);
        let most = L::splat(max);
        let mut total = L::zero();
        for i in (0..whole).step_by(L::LEN) {
            let e = L::exp_below(L::sub(L::load(p.add(i)), most));
            total = L::add(total, e);
            L::store(e, p.add(i));
        }
        if rest > 0 {
            let e = L::exp_below(L::sub(L::load(last.as_ptr()), most));
            total = L::add(total, e);
            L::store(e, last.as_mut_ptr());
            x[whole..].copy_from_slice(&last[..rest]);
        }
        (max, L::sum(total))
    }
}

/// See `Kernels::to_f16`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn to_f16(x: &[f32], out: &mut [f16]) {
    let (xs, last) = x.as_chunks::<8>();
    let (outs, last_out) = out.as_chunks_mut::<8>();
    for (x, out) in xs.iter().zip(outs) {
        eight_halves(x, out);
    }
    if !last.is_empty() {
        let mut eight = [f16::ZERO; 8];
        eight_halves(&padded(last, 0.0), &mut eight);
        last_out.iter_mut().zip(eight).for_each(|(o, h)| *o = h);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight_halves(x: &[f32; 8], out: &mut [f16; 8]) {
    let limit = _mm256_set1_ps(65504.0);
    let low = _mm256_sub_ps(_mm256_setzero_ps(), limit);
    let clamped = _mm256_min_ps(_mm256_max_ps(load_f32(x, 0), low), limit);
    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(clamped);
    // SAFETY: eight f16 have room for the sixteen bytes of the store; it needs no alignment.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), halves) };
}
