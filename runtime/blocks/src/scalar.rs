//! The reference: every kernel in its plainest form.
#![forbid(unsafe_code)]

use crate::decode::{Decoded, dequantize_row, for_each_block};
use crate::kernels::Place;
use crate::{Column, ColumnMut, DType, Kernels, Linear, Rows, dense, panels};
use half::f16;

/// 8-bit activations and integer sums, as the SIMD kernels compute.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scalar;

/// fp32 activations and dequantised weights: what the formats mean, without the rounding of
/// activations. Slow; for comparison.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exact;

impl Kernels for Scalar {
    fn name(self) -> &'static str {
        "scalar"
    }

    fn matmul(self, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
        for r in 0..w.rows() {
            for (column, out) in columns.iter().zip(out.iter_mut()) {
                out[r] = match w.place(r) {
                    Place::Row(row) => dot(w.dtype(), row, column),
                    Place::Panel(panel, r) => dot_in_panel(w.dtype(), panel, r, column),
                };
            }
        }
    }
}

impl Kernels for Exact {
    fn name(self) -> &'static str {
        "exact"
    }

    fn wants_codes(self, _: DType) -> bool {
        false
    }

    fn matmul(self, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
        // A stack buffer, because no kernel may allocate: 1,024 weights at a time, which is a
        // whole number of blocks and groups of every format.
        const PART: usize = 1024;
        let mut buffer = [0.0; PART];
        let (d, n) = (w.dtype(), w.cols());
        for r in 0..w.rows() {
            out.iter_mut().for_each(|o| o[r] = 0.0);
            let row = match w.place(r) {
                Place::Row(row) => row,
                Place::Panel(panel, i) => {
                    panels::for_each_block(d, n, panel, i, |at, b| {
                        let part = &mut buffer[..b.len];
                        b.dequantize(part);
                        for (column, out) in columns.iter().zip(out.iter_mut()) {
                            out[r] += dot_f32(part, &column.x[at..at + b.len]);
                        }
                    });
                    continue;
                }
            };
            for start in (0..n).step_by(PART) {
                let part = &mut buffer[..PART.min(n - start)];
                dequantize_part(d, row, n, start, part);
                for (column, out) in columns.iter().zip(out.iter_mut()) {
                    out[r] += dot_f32(part, &column.x[start..start + part.len()]);
                }
            }
        }
    }
}

/// Weights `start .. start + out.len()` of a row of `cols`; `start` on a block border.
fn dequantize_part(dtype: DType, row: &[u8], cols: usize, start: usize, out: &mut [f32]) {
    if let DType::Linear(l) = dtype {
        let (codes, scales, zeros) = l.split(row, cols);
        let mut q = [0; 128];
        for (g, y) in out.chunks_mut(l.group()).enumerate() {
            let g = start / l.group() + g;
            dense::unpack(
                l.bits(),
                &codes[g * l.group() * l.bits() as usize / 8..],
                &mut q[..y.len()],
            );
            let (scale, zero) = l.scale_zero(scales, zeros, g);
            y.iter_mut()
                .zip(&q)
                .for_each(|(y, &q)| *y = scale * (i32::from(q) - zero) as f32);
        }
    } else {
        let at = if start == 0 {
            0
        } else {
            dtype.row_bytes(start).unwrap_or(row.len())
        };
        dequantize_row(dtype, &row[at..], out);
    }
}

/// Dot product in eight partial sums, so that rounding errors stay small on long rows.
fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    for (a, b) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

/// Reference of [`Kernels::quantize`].
pub fn quantize(x: &[f32], mut out: ColumnMut<'_>) {
    out.q.fill(0);
    out.d.fill(0.0);
    out.sums.fill(0);
    for (g, x) in x.chunks(32).enumerate() {
        let max = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let d = max / 127.0;
        // A scale too small to invert stands for zeros.
        let inverse = if d >= f32::MIN_POSITIVE { 1.0 / d } else { 0.0 };
        out.d[g] = if inverse == 0.0 { 0.0 } else { d };
        for (i, v) in x.iter().enumerate() {
            let q = (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
            out.q[32 * g + i] = q;
            out.sums[2 * g + i / 16] += i16::from(q);
        }
    }
    out.scale_sums();
}

/// One row times one column, integer sums within each 32 weights.
pub fn dot(dtype: DType, row: &[u8], column: &Column<'_>) -> f32 {
    let cols = column.x.len();
    let mut weights = [0.0f32; 256];
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {
            let size = if dtype == DType::F32 { 4 } else { 2 };
            let parts = row.chunks(256 * size).zip(column.x.chunks(256));
            parts
                .map(|(row, x)| {
                    dequantize_row(dtype, row, &mut weights[..x.len()]);
                    dot_f32(&weights[..x.len()], x)
                })
                .sum()
        }
        DType::Linear(l) => dot_linear(l, row, column),
        _ => {
            let mut sum = 0.0;
            for_each_block(dtype, row, cols, |at, b| sum += dot_block(b, at, column));
            sum
        }
    }
}

/// Row `r` of a panel times one column.
pub fn dot_in_panel(dtype: DType, panel: &[u8], r: usize, column: &Column<'_>) -> f32 {
    let mut sum = 0.0;
    panels::for_each_block(dtype, column.x.len(), panel, r, |at, b| {
        sum += dot_block(b, at, column);
    });
    sum
}

/// A block that starts at weight `at` times its part of a column.
fn dot_block(b: &Decoded, at: usize, column: &Column<'_>) -> f32 {
    let (mut scaled, mut minima) = (0.0, 0.0);
    for g in 0..b.len.div_ceil(32) {
        let (mut dot, mut min) = (0i32, 0i32);
        for j in 2 * g..2 * g + 2 {
            let q = &b.q[16 * j..16 * j + 16];
            let a = &column.q[at + 16 * j..at + 16 * j + 16];
            let products = q.iter().zip(a).map(|(&q, &a)| i32::from(q) * i32::from(a));
            dot += i32::from(b.scale[j]) * products.sum::<i32>();
            min += i32::from(b.min[j]) * i32::from(column.sums[at / 16 + j]);
        }
        let d = column.d[at / 32 + g];
        scaled += d * dot as f32;
        minima += d * min as f32;
    }
    b.d * scaled - b.dmin * minima
}

fn dot_linear(l: Linear, row: &[u8], column: &Column<'_>) -> f32 {
    let (codes, scales, zeros) = l.split(row, column.x.len());
    let mut q = [0; 32];
    let mut sum = 0.0;
    for g in 0..column.x.len().div_ceil(32) {
        let n = 32.min(column.x.len() - 32 * g);
        q.fill(0);
        dense::unpack(
            l.bits(),
            &codes[32 * g * l.bits() as usize / 8..],
            &mut q[..n],
        );
        let (scale, zero) = l.scale_zero(scales, zeros, 32 * g / l.group());
        let a = &column.q[32 * g..32 * g + 32];
        let dot: i32 = q
            .iter()
            .zip(a)
            .map(|(&q, &a)| i32::from(q) * i32::from(a))
            .sum();
        let total = i32::from(column.sums[2 * g]) + i32::from(column.sums[2 * g + 1]);
        sum += scale * (column.d[g] * (dot - zero * total) as f32);
    }
    sum
}

/// Reference of [`Kernels::rms_norm`].
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mean = dot_f32(x, x) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * scale * w;
    }
}

/// Reference of [`Kernels::swiglu`].
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + (-*g).exp()) * u;
    }
}

/// Reference of [`Kernels::scores`].
pub fn scores(q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
    let rows = out.chunks_exact_mut(keys.len() / dim);
    for (q, out) in q.chunks_exact(dim).zip(rows) {
        for (o, key) in out.iter_mut().zip(keys.chunks_exact(dim)) {
            *o = q.iter().zip(key).map(|(q, k)| q * k.to_f32()).sum();
        }
    }
}

/// Reference of [`Kernels::mix`].
pub fn mix(p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
    let rows = p.chunks_exact(values.len() / dim);
    rows.zip(out.chunks_exact_mut(dim))
        .for_each(|(p, out)| add_mix(p, values, out));
}

/// `out += Σ p[i] · values[i]` over vectors of `out.len()` values.
fn add_mix<T: Copy + Into<f32>>(p: &[f32], values: &[T], out: &mut [f32]) {
    for (p, value) in p.iter().zip(values.chunks_exact(out.len())) {
        for (o, v) in out.iter_mut().zip(value) {
            *o += p * (*v).into();
        }
    }
}

/// Reference of [`Kernels::transpose`], for keys of any float type.
pub fn transpose<T: Copy + Into<f32>>(keys: &[T], dim: usize, out: &mut [f32]) {
    let m = out.len() / dim;
    for (i, row) in out.chunks_exact_mut(m).enumerate() {
        let column = keys.chunks_exact(dim).map(|key| key[i].into());
        row.iter_mut()
            .zip(column.chain(std::iter::repeat(0.0)))
            .for_each(|(o, k)| *o = k);
    }
}

/// Reference of [`Kernels::product`].
pub fn product(a: &[f32], b: &[f32], inner: usize, out: &mut [f32]) {
    let m = b.len() / inner;
    let rows = a.chunks_exact(inner).zip(out.chunks_exact_mut(m));
    rows.for_each(|(a, out)| add_mix(a, b, out));
}

/// Reference of [`Kernels::exp_block`].
pub fn exp_block(x: &mut [f32], max: f32) -> (f32, f32) {
    let max = x.iter().copied().fold(max, f32::max);
    let mut sum = 0.0;
    for v in x.iter_mut() {
        *v = (*v - max).exp();
        sum += *v;
    }
    (max, sum)
}

/// Reference of [`Kernels::to_f16`].
pub fn to_f16(x: &[f32], out: &mut [f16]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = f16::from_f32(x.clamp(-65504.0, 65504.0));
    }
}
