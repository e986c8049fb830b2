//! Attention in blocks of keys: widening, transposing, products of tiles.
//!
//! ```text
//! prompt:  keys, values widened once a block; scores = queries · transposed keys, mix = weights
//!          · values: both the same product of fp32 matrices
//! decode:  the few queries of a head share the load and widening of each key and value
//! ```
//!
//! Deviations:
//! 1. *Product*: tiles of four rows × four vectors stay in registers over the whole inner length;
//!    four values of a row of `a` are one load, each a lane of the multiply-adds.
//! 2. *Transposing* is done on squares of four keys × four values.
//! 3. *Decode*: three queries × four keys (or four vectors of values), so that four widenings
//!    serve twelve multiply-adds.

use myq_blocks::f16;

use crate::simd::*;
use crate::vector::{widen, widen_one};

/// Rows of a tile.
const TILE: usize = 4;
/// Vectors of a tile, or of a part of the values.
const WIDE: usize = 4;

/// `$total[r] += $v · lane $lane of $x[r]`, for lanes 0 to 3.
macro_rules! four_lanes {
    ($total:ident, $x:ident, $v:expr) => {
        four_lanes!($total, $x, $v; 0 1 2 3)
    };
    ($total:ident, $x:ident, $v:expr; $($lane:literal)*) => {$(
        let v = $v($lane);
        for (total, x) in $total.iter_mut().zip($x) {
            for (total, v) in total.iter_mut().zip(v) {
                *total = vfmaq_laneq_f32::<$lane>(*total, v, x);
            }
        }
    )*};
}

/// See `Kernels::to_f32`.
pub(crate) fn to_f32(x: &[f16], out: &mut [f32]) {
    let (fours, rest) = x.as_chunks::<4>();
    let (out_fours, out_rest) = out.as_chunks_mut::<4>();
    for (x, out) in fours.iter().zip(out_fours) {
        store_f32(out, widen(x, 0));
    }
    for (x, out) in rest.iter().zip(out_rest) {
        *out = widen_one(*x);
    }
}

/// See `Kernels::transpose`.
pub(crate) fn transpose(keys: &[f16], dim: usize, out: &mut [f32]) {
    let (n, m) = (keys.len() / dim, out.len() / dim);
    let (keys_in_squares, values_in_squares) = (n / 4 * 4, dim / 4 * 4);
    for j in (0..keys_in_squares).step_by(4) {
        for i in (0..values_in_squares).step_by(4) {
            let [a, b, c, d] = [0, 1, 2, 3].map(|k| widen(keys, (j + k) * dim + i));
            let (ac, bd) = (
                [vzip1q_f32(a, c), vzip2q_f32(a, c)],
                [vzip1q_f32(b, d), vzip2q_f32(b, d)],
            );
            for half in 0..2 {
                let rows = [
                    vzip1q_f32(ac[half], bd[half]),
                    vzip2q_f32(ac[half], bd[half]),
                ];
                for (k, row) in rows.into_iter().enumerate() {
                    let at = (i + 2 * half + k) * m + j;
                    store_f32(part_mut(out, at), row);
                }
            }
        }
    }
    for (i, row) in out.chunks_exact_mut(m).enumerate() {
        let done = if i < values_in_squares {
            keys_in_squares
        } else {
            0
        };
        for (j, out) in row.iter_mut().enumerate().skip(done) {
            *out = keys.get(j * dim + i).map_or(0.0, |k| widen_one(*k));
        }
    }
}

/// See `Kernels::product`.
pub(crate) fn product(a: &[f32], b: &[f32], inner: usize, out: &mut [f32]) {
    let m = b.len() / inner;
    let (fours, rest) = a.split_at(a.len() / (TILE * inner) * (TILE * inner));
    let (out_fours, out_rest) = out.split_at_mut(fours.len() / inner * m);
    for (a, out) in fours
        .chunks_exact(TILE * inner)
        .zip(out_fours.chunks_exact_mut(TILE * m))
    {
        some_rows::<TILE>(a, b, inner, out);
    }
    for (a, out) in rest.chunks_exact(inner).zip(out_rest.chunks_exact_mut(m)) {
        some_rows::<1>(a, b, inner, out);
    }
}

/// `R` rows of the product.
#[inline(always)]
fn some_rows<const R: usize>(a: &[f32], b: &[f32], inner: usize, out: &mut [f32]) {
    let m = b.len() / inner;
    let mut j = 0;
    while j + 4 * WIDE <= m {
        tile::<R, WIDE>(a, b, (inner, m, j), out);
        j += 4 * WIDE;
    }
    while j + 4 <= m {
        tile::<R, 1>(a, b, (inner, m, j), out);
        j += 4;
    }
    for (a, out) in a.chunks_exact(inner).zip(out.chunks_exact_mut(m)) {
        for (a, b) in a.iter().zip(b.chunks_exact(m)) {
            for (out, b) in out[j..].iter_mut().zip(&b[j..]) {
                *out += a * b;
            }
        }
    }
}

/// `R` rows × `W` vectors of the product, from column `j` of `m`.
#[inline(always)]
fn tile<const R: usize, const W: usize>(
    a: &[f32],
    b: &[f32],
    (inner, m, j): (usize, usize, usize),
    out: &mut [f32],
) {
    let mut total = [[vdupq_n_f32(0.0); W]; R];
    let vectors = |t: usize| {
        let row = &b[t * m + j..t * m + j + 4 * W];
        std::array::from_fn::<_, W, _>(|w| load_f32(part(row, 4 * w)))
    };
    let whole = inner / 4 * 4;
    for t in (0..whole).step_by(4) {
        let x = std::array::from_fn::<_, R, _>(|r| load_f32(part(a, r * inner + t)));
        four_lanes!(total, x, |lane: usize| vectors(t + lane));
    }
    for t in whole..inner {
        let v = vectors(t);
        for (r, total) in total.iter_mut().enumerate() {
            for (total, v) in total.iter_mut().zip(v) {
                *total = vfmaq_n_f32(*total, v, a[r * inner + t]);
            }
        }
    }
    add_to(&total, m, j, out);
}

/// Adds `W` vectors to each row of `out`, rows of `m`, from column `j` on.
#[inline(always)]
fn add_to<const R: usize, const W: usize>(
    total: &[[float32x4_t; W]; R],
    m: usize,
    j: usize,
    out: &mut [f32],
) {
    for (r, total) in total.iter().enumerate() {
        for (w, total) in total.iter().enumerate() {
            let to = part_mut(out, r * m + j + 4 * w);
            let sum = vaddq_f32(load_f32(to), *total);
            store_f32(to, sum);
        }
    }
}

/// Queries to take next of `left`, so that no single one remains of four.
fn some_of(left: usize) -> usize {
    match left {
        3 | 5.. => 3,
        2 | 4 => 2,
        _ => 1,
    }
}

/// One, two or three queries `x` (or their weights) with all rows of `dim` values.
type Few = fn(x: &[f32], rows: &[f16], dim: usize, out: &mut [f32]);

/// Takes all `queries` in threes and what is left.
fn in_threes(
    of: [Few; 3],
    queries: usize,
    x: &[f32],
    (rows, dim): (&[f16], usize),
    out: &mut [f32],
) {
    let (step, out_step) = (x.len() / queries.max(1), out.len() / queries.max(1));
    let mut i = 0;
    while i < queries {
        let some = some_of(queries - i);
        of[some - 1](&x[i * step..], rows, dim, &mut out[i * out_step..]);
        i += some;
    }
}

/// See `Kernels::scores`.
pub(crate) fn scores(q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
    let of = [scores_of::<1>, scores_of::<2>, scores_of::<3>];
    in_threes(of, q.len() / dim, q, (keys, dim), out);
}

/// `R` queries with all keys, four keys at a time.
fn scores_of<const R: usize>(q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
    let n = keys.len() / dim;
    for j in (0..n).step_by(4) {
        // The last key again where fewer than four are left.
        let key = [0, 1, 2, 3].map(|k| {
            let at = (j + k).min(n - 1) * dim;
            &keys[at..at + dim]
        });
        let mut total = [[vdupq_n_f32(0.0); 4]; R];
        let whole = dim / 4 * 4;
        for i in (0..whole).step_by(4) {
            let v = key.map(|key| widen(key, i));
            for (r, total) in total.iter_mut().enumerate() {
                let x = load_f32(part(q, r * dim + i));
                for (total, v) in total.iter_mut().zip(v) {
                    *total = vfmaq_f32(*total, x, v);
                }
            }
        }
        for (r, [a, b, c, d]) in total.into_iter().enumerate() {
            let mut four = [0.0; 4];
            store_f32(&mut four, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
            let to = &mut out[r * n + j..(r * n + j + 4).min((r + 1) * n)];
            for ((to, sum), key) in to.iter_mut().zip(four).zip(key) {
                let rest = q[r * dim + whole..(r + 1) * dim].iter().zip(&key[whole..]);
                *to = sum + rest.map(|(q, k)| q * widen_one(*k)).sum::<f32>();
            }
        }
    }
}

/// See `Kernels::mix`.
pub(crate) fn mix(p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
    let of = [mix_of::<1>, mix_of::<2>, mix_of::<3>];
    in_threes(of, out.len() / dim, p, (values, dim), out);
}

/// `R` queries: the values of four vectors at a time, then of one.
fn mix_of<const R: usize>(p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
    let n = values.len() / dim;
    let mut at = 0;
    while at + 4 * WIDE <= dim {
        mix_part::<R, WIDE>(p, values, (dim, at), out);
        at += 4 * WIDE;
    }
    while at + 4 <= dim {
        mix_part::<R, 1>(p, values, (dim, at), out);
        at += 4;
    }
    for (p, out) in p.chunks_exact(n).zip(out.chunks_exact_mut(dim)).take(R) {
        for (p, value) in p.iter().zip(values.chunks_exact(dim)) {
            for (out, v) in out[at..].iter_mut().zip(&value[at..]) {
                *out += p * widen_one(*v);
            }
        }
    }
}

/// `W` vectors of the values from `at` on.
#[inline(always)]
fn mix_part<const R: usize, const W: usize>(
    p: &[f32],
    values: &[f16],
    (dim, at): (usize, usize),
    out: &mut [f32],
) {
    let n = values.len() / dim;
    let mut total = [[vdupq_n_f32(0.0); W]; R];
    let vectors = |j: usize| {
        let value = &values[j * dim + at..j * dim + at + 4 * W];
        std::array::from_fn::<_, W, _>(|w| widen(value, 4 * w))
    };
    let whole = n / 4 * 4;
    for j in (0..whole).step_by(4) {
        let x = std::array::from_fn::<_, R, _>(|r| load_f32(part(p, r * n + j)));
        four_lanes!(total, x, |lane: usize| vectors(j + lane));
    }
    for j in whole..n {
        let v = vectors(j);
        for (r, total) in total.iter_mut().enumerate() {
            for (total, v) in total.iter_mut().zip(v) {
                *total = vfmaq_n_f32(*total, v, p[r * n + j]);
            }
        }
    }
    add_to(&total, dim, at, out);
}
