//! Attention in blocks of keys: widening, products of tiles, and a softmax in steps.
//!
//! ```text
//! prompt:  keys, values widened once a block; scores = queries · transposed keys, mix = weights
//!          · values: both the same product of fp32 matrices
//! decode:  the few queries of a head share the load and widening of each key and value
//! ```
//!
//! Deviations:
//! 1. *Product*: tiles of R rows × 2 vectors stay in registers over the whole inner length. A
//!    value of `a` is broadcast by the load unit; none of the sums crosses lanes.
//! 2. *Transposing* is done on fp16, sixteen keys × eight values at once: keys 0–7 in the low
//!    halves, 8–15 in the high, so that a vector ends as one value of sixteen keys.
//! 3. *Decode*: three queries × four keys (or four vectors of values): four widenings for
//!    twelve multiply-adds, which are 12 products a cycle where both take the same ports; six
//!    queries with AVX-512. Keys and values are asked for [`AHEAD`] bytes ahead: blocks of
//!    both alternate, so that the processor's own prefetch starts anew at each of them.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of a loop that needs its instruction set and checked lengths"
)]

use crate::Level;
use crate::lanes::{Eight, Lanes, Sixteen};
use myq_blocks::f16;
use std::arch::x86_64::*;

/// Bytes that decode asks for ahead of its loads.
const AHEAD: usize = 3072;

/// Asks for the `bytes` that lie [`AHEAD`] of `p`, a line at a time; they need not exist.
#[inline(always)]
unsafe fn prefetch(p: *const f16, bytes: usize) {
    let p = p.cast::<i8>().wrapping_add(AHEAD);
    for line in (0..bytes).step_by(64) {
        _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(line));
    }
}

/// See `Kernels::product`.
///
/// # Panics
/// If `a` or `out` is too short.
pub(crate) fn product(level: Level, a: &[f32], b: &[f32], inner: usize, out: &mut [f32]) {
    let (n, m) = (a.len() / inner, b.len() / inner);
    assert!(out.len() >= n * m, "room for a product");
    let shape = Shape { n, m, inner };
    // SAFETY: a `Level` is made where the processor has its instructions; the lengths are those
    // of the shape.
    unsafe {
        match level {
            Level::Avx512 | Level::Amx => product_512(a, b, shape, out),
            _ => product_256(a, b, shape, out),
        }
    }
}

/// `out` is n × m, `a` n × inner, `b` inner × m.
#[derive(Clone, Copy)]
struct Shape {
    n: usize,
    m: usize,
    inner: usize,
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn product_256(a: &[f32], b: &[f32], shape: Shape, out: &mut [f32]) {
    let done = panels::<Eight, 6, 2>(a, b, shape, 0, out);
    let done = panels::<Eight, 6, 1>(a, b, shape, done, out);
    remainder(a, b, shape, done, out);
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn product_512(a: &[f32], b: &[f32], shape: Shape, out: &mut [f32]) {
    let done = panels::<Sixteen, 12, 2>(a, b, shape, 0, out);
    let done = panels::<Sixteen, 12, 1>(a, b, shape, done, out);
    let done = panels::<Eight, 6, 1>(a, b, shape, done, out);
    remainder(a, b, shape, done, out);
}

/// Columns `from ..` of the result in panels of `W` vectors, rows `R` at a time; gives the
/// first column that is left.
#[inline(always)]
unsafe fn panels<L: Lanes, const R: usize, const W: usize>(
    a: &[f32],
    b: &[f32],
    shape: Shape,
    from: usize,
    out: &mut [f32],
) -> usize {
    let mut j = from;
    while j + W * L::LEN <= shape.m {
        let mut i = 0;
        while i + R <= shape.n {
            tile::<L, R, W>(a, b, shape, (i, j), out);
            i += R;
        }
        // What is left of R rows: 6 + 4 + 2 + 1 covers up to 12.
        if R > 6 && i + 6 <= shape.n {
            tile::<L, 6, W>(a, b, shape, (i, j), out);
            i += 6;
        }
        if i + 4 <= shape.n {
            tile::<L, 4, W>(a, b, shape, (i, j), out);
            i += 4;
        }
        if i + 2 <= shape.n {
            tile::<L, 2, W>(a, b, shape, (i, j), out);
            i += 2;
        }
        if i < shape.n {
            tile::<L, 1, W>(a, b, shape, (i, j), out);
        }
        j += W * L::LEN;
    }
    j
}

/// `R` rows × `W` vectors of the result.
#[inline(always)]
unsafe fn tile<L: Lanes, const R: usize, const W: usize>(
    a: &[f32],
    b: &[f32],
    shape: Shape,
    (i, j): (usize, usize),
    out: &mut [f32],
) {
    let Shape { m, inner, .. } = shape;
    debug_assert!((i + R) * inner <= a.len() && j + W * L::LEN <= m && (i + R) * m <= out.len());
    // Within `a`, `b` and `out`: i + R ≤ n rows and j + W·LEN ≤ m columns.
    let (a, mut b) = (a.as_ptr().add(i * inner), b.as_ptr().add(j));
    let out = out.as_mut_ptr().add(i * m + j);
    let mut total = [[L::zero(); W]; R];
    for t in 0..inner {
        let mut v = [L::zero(); W];
        for (w, v) in v.iter_mut().enumerate() {
            *v = L::load(b.add(w * L::LEN));
        }
        for (r, total) in total.iter_mut().enumerate() {
            let x = L::splat(*a.add(r * inner + t));
            for (total, v) in total.iter_mut().zip(v) {
                *total = L::fma(x, v, *total);
            }
        }
        b = b.wrapping_add(m);
    }
    for (r, total) in total.into_iter().enumerate() {
        for (w, total) in total.into_iter().enumerate() {
            let to = out.add(r * m + w * L::LEN);
            L::store(L::add(L::load(to), total), to);
        }
    }
}

/// The columns that do not fill a vector.
#[inline(always)]
fn remainder(a: &[f32], b: &[f32], shape: Shape, from: usize, out: &mut [f32]) {
    let Shape { m, inner, .. } = shape;
    if from == m {
        return;
    }
    for (a, out) in a.chunks_exact(inner).zip(out.chunks_exact_mut(m)) {
        for (a, b) in a.iter().zip(b.chunks_exact(m)) {
            for (o, b) in out[from..].iter_mut().zip(&b[from..]) {
                *o += a * b;
            }
        }
    }
}

/// See `Kernels::to_f32`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn to_f32(x: &[f16], out: &mut [f32]) {
    let (eights, last) = x.as_chunks::<8>();
    let (outs, last_out) = out.as_chunks_mut::<8>();
    for (x, out) in eights.iter().zip(outs) {
        // SAFETY: both are eight values; the instructions are this function's.
        unsafe { Eight::store(Eight::load_f16(x.as_ptr().cast()), out.as_mut_ptr()) };
    }
    last_out
        .iter_mut()
        .zip(last)
        .for_each(|(o, x)| *o = x.to_f32());
}

/// See `Kernels::transpose`.
///
/// # Panics
/// If `out` has no room for the keys.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn transpose(keys: &[f16], dim: usize, out: &mut [f32]) {
    let (n, m) = (keys.len() / dim, out.len() / dim);
    assert!(n <= m, "room for the keys");
    let eights = dim / 8 * 8;
    for j in (0..m / 16 * 16).step_by(16) {
        for i in (0..eights).step_by(8) {
            let at = i * m + j;
            if j + 16 <= n {
                // SAFETY: eight values from i on of each of sixteen keys are there.
                let rows = std::array::from_fn(|r| unsafe {
                    _mm_loadu_si128(keys.as_ptr().add((j + r) * dim + i).cast())
                });
                sixteen_keys(&rows, at, m, out);
            } else {
                let rows = std::array::from_fn(|r| match keys.get((j + r) * dim + i..) {
                    // SAFETY: the chunk is the sixteen bytes of the load.
                    Some(part) if j + r < n => unsafe {
                        let eight = part.first_chunk().unwrap_or(&[f16::ZERO; 8]);
                        _mm_loadu_si128(eight.as_ptr().cast())
                    },
                    _ => _mm_setzero_si128(),
                });
                sixteen_keys(&rows, at, m, out);
            }
        }
    }
    // Values and places that fill no square.
    for (i, row) in out.chunks_exact_mut(m).enumerate() {
        let from = if i < eights { m / 16 * 16 } else { 0 };
        for (j, o) in row.iter_mut().enumerate().skip(from) {
            *o = keys.get(j * dim + i).map_or(0.0, |k| k.to_f32());
        }
    }
}

/// Eight values of sixteen keys: rows of `out` that begin at `at` and are `m` apart.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sixteen_keys(rows: &[__m128i; 16], at: usize, m: usize, out: &mut [f32]) {
    let v: [__m256i; 8] = std::array::from_fn(|r| _mm256_set_m128i(rows[r + 8], rows[r]));
    // Pairs of keys, then fours, then eights; in each half on its own.
    let low16 = |i: usize| _mm256_unpacklo_epi16(v[i], v[i + 1]);
    let high16 = |i: usize| _mm256_unpackhi_epi16(v[i], v[i + 1]);
    let two: [__m256i; 8] = std::array::from_fn(|i| {
        if i < 4 {
            low16(2 * i)
        } else {
            high16(2 * (i - 4))
        }
    });
    // two[k]: values 0–3 of keys 2k, 2k + 1; two[4 + k]: values 4–7.
    let four = |base: usize| {
        let (a, b) = (two[base], two[base + 1]);
        [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)]
    };
    // [values 0, 1] and [values 2, 3] of keys 0–3 and 4–7, then the same of values 4–7.
    for (half, base) in [(0, 0), (4, 4)] {
        let (first, second) = (four(base), four(base + 2));
        for pair in 0..2 {
            let (a, b) = (first[pair], second[pair]);
            let values = [_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)];
            for (k, v) in values.into_iter().enumerate() {
                let place = at + (half + 2 * pair + k) * m;
                let place = &mut out[place..place + 16];
                let halves = [_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v)];
                for (place, v) in place.as_chunks_mut::<8>().0.iter_mut().zip(halves) {
                    // SAFETY: the place is eight values.
                    unsafe { _mm256_storeu_ps(place.as_mut_ptr(), _mm256_cvtph_ps(v)) };
                }
            }
        }
    }
}

/// See `Kernels::scores`.
///
/// # Panics
/// If `out` has no room for the scores.
pub(crate) fn scores(level: Level, q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
    let (queries, n) = (q.len() / dim, keys.len() / dim);
    assert!(out.len() >= queries * n, "room for the scores");
    // SAFETY: a `Level` is made where the processor has its instructions; the lengths are as
    // checked.
    unsafe {
        match level {
            Level::Avx512 | Level::Amx => scores_512(q, keys, dim, out),
            _ => scores_256(q, keys, dim, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scores_256(q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
    scores_all::<Eight, 3>(q, keys, dim, out);
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scores_512(q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
    scores_all::<Sixteen, 6>(q, keys, dim, out);
}

/// Queries to take next of `left`, at most `most`, so that no single one remains.
#[inline(always)]
fn some_of(left: usize, most: usize) -> usize {
    match left {
        6 | 9.. if most >= 6 => 6,
        4 | 7 | 8 if most >= 6 => 4,
        3 | 5.. => 3,
        2 | 4 => 2,
        _ => 1,
    }
}

/// Up to `MOST` queries at a time.
#[inline(always)]
unsafe fn scores_all<L: Lanes, const MOST: usize>(
    q: &[f32],
    keys: &[f16],
    dim: usize,
    out: &mut [f32],
) {
    let (queries, n) = (q.len() / dim, keys.len() / dim);
    let mut i = 0;
    while i < queries {
        let (q, out) = (&q[i * dim..], &mut out[i * n..]);
        let some = some_of(queries - i, MOST);
        match some {
            6 => scores_some::<L, 6>(q, keys, dim, out),
            4 => scores_some::<L, 4>(q, keys, dim, out),
            3 => scores_some::<L, 3>(q, keys, dim, out),
            2 => scores_some::<L, 2>(q, keys, dim, out),
            _ => scores_some::<L, 1>(q, keys, dim, out),
        }
        i += some;
    }
}

/// `R` queries with all keys, four keys at a time.
#[inline(always)]
unsafe fn scores_some<L: Lanes, const R: usize>(
    q: &[f32],
    keys: &[f16],
    dim: usize,
    out: &mut [f32],
) {
    let n = keys.len() / dim;
    debug_assert!(q.len() >= R * dim && out.len() >= R * n);
    let fours = n / 4 * 4;
    for j in (0..fours).step_by(4) {
        let first = keys.as_ptr().add(j * dim);
        prefetch(first, 8 * dim);
        let key = [0, 1, 2, 3].map(|k| first.wrapping_add(k * dim));
        let totals = dots::<L, R>(q.as_ptr(), key, dim);
        for (r, four) in totals.into_iter().enumerate() {
            _mm_storeu_ps(out.as_mut_ptr().add(r * n + j), four);
        }
    }
    if fours < n {
        // The last key again where fewer than four are left.
        let key = [0, 1, 2, 3].map(|k| keys[(fours + k).min(n - 1) * dim..].as_ptr());
        let totals = dots::<L, R>(q.as_ptr(), key, dim);
        for (r, total) in totals.into_iter().enumerate() {
            let mut four = [0.0; 4];
            _mm_storeu_ps(four.as_mut_ptr(), total);
            for (out, v) in out[r * n + fours..(r + 1) * n].iter_mut().zip(four) {
                *out = v;
            }
        }
    }
}

/// `R` queries times four keys.
#[inline(always)]
unsafe fn dots<L: Lanes, const R: usize>(
    q: *const f32,
    key: [*const f16; 4],
    dim: usize,
) -> [__m128; R] {
    let mut total = [[L::zero(); 4]; R];
    let mut i = 0;
    while i + L::LEN <= dim {
        let mut v = [L::zero(); 4];
        for (v, key) in v.iter_mut().zip(key) {
            *v = L::load_f16(key.add(i).cast());
        }
        for (r, total) in total.iter_mut().enumerate() {
            let x = L::load(q.add(r * dim + i));
            for (total, v) in total.iter_mut().zip(v) {
                *total = L::fma(x, v, *total);
            }
        }
        i += L::LEN;
    }
    let mut out = [_mm_setzero_ps(); R];
    for (out, total) in out.iter_mut().zip(total) {
        *out = L::sums(total);
    }
    while i < dim {
        let v = key.map(|key| (*key.add(i)).to_f32());
        let v = _mm_setr_ps(v[0], v[1], v[2], v[3]);
        for (r, out) in out.iter_mut().enumerate() {
            *out = _mm_fmadd_ps(_mm_set1_ps(*q.add(r * dim + i)), v, *out);
        }
        i += 1;
    }
    out
}

/// See `Kernels::mix`.
///
/// # Panics
/// If `p` is too short or `out` has no room for the sums.
pub(crate) fn mix(level: Level, p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
    let (queries, n) = (out.len() / dim, values.len() / dim);
    assert!(p.len() >= queries * n, "weights of all values");
    // SAFETY: a `Level` is made where the processor has its instructions; the lengths are as
    // checked.
    unsafe {
        match level {
            Level::Avx512 | Level::Amx => mix_512(p, values, dim, out),
            _ => mix_256(p, values, dim, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn mix_256(p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
    mix_all::<Eight, 3>(p, values, dim, out);
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn mix_512(p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
    mix_all::<Sixteen, 6>(p, values, dim, out);
}

/// Queries `MOST` at a time.
#[inline(always)]
unsafe fn mix_all<L: Lanes, const MOST: usize>(
    p: &[f32],
    values: &[f16],
    dim: usize,
    out: &mut [f32],
) {
    let (queries, n) = (out.len() / dim, values.len() / dim);
    let mut i = 0;
    while i < queries {
        let (p, out) = (&p[i * n..], &mut out[i * dim..]);
        let some = some_of(queries - i, MOST);
        match some {
            6 => mix_some::<L, 6>(p, values, dim, out),
            4 => mix_some::<L, 4>(p, values, dim, out),
            3 => mix_some::<L, 3>(p, values, dim, out),
            2 => mix_some::<L, 2>(p, values, dim, out),
            _ => mix_some::<L, 1>(p, values, dim, out),
        }
        i += some;
    }
}

/// `R` queries: the values of four vectors at a time, then of one.
#[inline(always)]
unsafe fn mix_some<L: Lanes, const R: usize>(
    p: &[f32],
    values: &[f16],
    dim: usize,
    out: &mut [f32],
) {
    let n = values.len() / dim;
    let mut at = 0;
    while at + 4 * L::LEN <= dim {
        mix_part::<L, R, 4>(p, values, (dim, at), out);
        at += 4 * L::LEN;
    }
    while at + L::LEN <= dim {
        mix_part::<L, R, 1>(p, values, (dim, at), out);
        at += L::LEN;
    }
    while at + 8 <= dim {
        mix_part::<Eight, R, 1>(p, values, (dim, at), out);
        at += 8;
    }
    for r in 0..R {
        for i in at..dim {
            for j in 0..n {
                out[r * dim + i] += p[r * n + j] * values[j * dim + i].to_f32();
            }
        }
    }
}

/// `W` vectors of values from `at` on.
#[inline(always)]
unsafe fn mix_part<L: Lanes, const R: usize, const W: usize>(
    p: &[f32],
    values: &[f16],
    (dim, at): (usize, usize),
    out: &mut [f32],
) {
    let n = values.len() / dim;
    debug_assert!(p.len() >= R * n && out.len() >= R * dim && at + W * L::LEN <= dim);
    let mut total = [[L::zero(); W]; R];
    for j in 0..n {
        let value = values.as_ptr().add(j * dim + at);
        prefetch(value, 2 * W * L::LEN);
        let mut v = [L::zero(); W];
        for (w, v) in v.iter_mut().enumerate() {
            *v = L::load_f16(value.add(w * L::LEN).cast());
        }
        for (r, total) in total.iter_mut().enumerate() {
            let x = L::splat(*p.as_ptr().add(r * n + j));
            for (total, v) in total.iter_mut().zip(v) {
                *total = L::fma(x, v, *total);
            }
        }
    }
    for (r, total) in total.into_iter().enumerate() {
        for (w, total) in total.into_iter().enumerate() {
            let to = out.as_mut_ptr().add(r * dim + at + w * L::LEN);
            L::store(L::add(L::load(to), total), to);
        }
    }
}
