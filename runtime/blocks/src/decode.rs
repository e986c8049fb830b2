//! From stored bytes to codes, scales and weights: the plain definition of every format.

use crate::layout::*;
use crate::{DType, Linear, dense, tail};
use bytemuck::{Pod, pod_read_unaligned};
use half::{bf16, f16};

/// A block taken apart: weight i is `d·scale[i/16]·q[i] − dmin·min[i/16]`.
///
/// Formats of 32 weights use the first two entries of `scale` and `min`.
#[derive(Clone, Debug)]
pub struct Decoded {
    /// Weights in the block: 256 or 32.
    pub len: usize,
    /// Super-scale.
    pub d: f32,
    /// Super-minimum (negated minimum for Q4_1 and Q5_1).
    pub dmin: f32,
    /// Integer scale of each 16 weights.
    pub scale: [i16; 16],
    /// Integer minimum of each 16 weights.
    pub min: [i16; 16],
    /// Codes, with the format's fixed offset taken off.
    pub q: [i8; SUPER],
}

impl Decoded {
    /// The weights, `out.len()` of them.
    ///
    /// Products are taken in the order `(d·scale)·q − dmin·min`, each rounded to f32, which
    /// equals the `gguf` package's values to the bit.
    pub fn dequantize(&self, out: &mut [f32]) {
        for (j, out) in out.chunks_mut(16).enumerate() {
            let (d, m) = (
                self.d * f32::from(self.scale[j]),
                self.dmin * f32::from(self.min[j]),
            );
            for (y, &q) in out.iter_mut().zip(&self.q[16 * j..]) {
                *y = d * f32::from(q) - m;
            }
        }
    }
}

fn read<T: Pod>(bytes: &[u8]) -> T {
    pod_read_unaligned(&bytes[..size_of::<T>()])
}

/// Takes a whole block of an integer format apart (see [`Decoded`]).
///
/// Panics if `bytes` is shorter than the block; float and linear formats have no blocks and
/// give zeros.
pub fn decode(dtype: DType, bytes: &[u8]) -> Decoded {
    let mut o = Decoded {
        len: dtype.block_len(),
        d: 0.0,
        dmin: 0.0,
        scale: [1; 16],
        min: [0; 16],
        q: [0; SUPER],
    };
    match dtype {
        DType::Q4_0 => {
            let b: Q4_0 = read(bytes);
            o.d = b.d.to_f32();
            nibbles(&b.qs, |i, c| o.q[i] = c as i8 - 8);
        }
        DType::Q4_1 => {
            let b: Q4_1 = read(bytes);
            (o.d, o.dmin, o.min) = (b.d.to_f32(), -b.m.to_f32(), [1; 16]);
            nibbles(&b.qs, |i, c| o.q[i] = c as i8);
        }
        DType::Q5_0 => {
            let b: Q5_0 = read(bytes);
            o.d = b.d.to_f32();
            let high = u32::from_le_bytes(b.qh);
            nibbles(&b.qs, |i, c| {
                o.q[i] = c as i8 + 16 * (high >> i & 1) as i8 - 16
            });
        }
        DType::Q5_1 => {
            let b: Q5_1 = read(bytes);
            (o.d, o.dmin, o.min) = (b.d.to_f32(), -b.m.to_f32(), [1; 16]);
            let high = u32::from_le_bytes(b.qh);
            nibbles(&b.qs, |i, c| o.q[i] = c as i8 + 16 * (high >> i & 1) as i8);
        }
        DType::Q8_0 => {
            let b: Q8_0 = read(bytes);
            o.d = b.d.to_f32();
            o.q[..32].copy_from_slice(&b.qs);
        }
        DType::Iq4Nl => {
            let b: Iq4Nl = read(bytes);
            o.d = b.d.to_f32();
            nibbles(&b.qs, |i, c| o.q[i] = IQ4NL_LEVELS[usize::from(c)]);
        }
        DType::Q2K => {
            let b: Q2K = read(bytes);
            (o.d, o.dmin) = (b.d.to_f32(), b.dmin.to_f32());
            o.scale = b.scales.map(|s| i16::from(s & 15));
            o.min = b.scales.map(|s| i16::from(s >> 4));
            for (w, q) in o.q.iter_mut().enumerate() {
                *q = pair(&b.qs, w) as i8;
            }
        }
        DType::Q3K => {
            let b: Q3K = read(bytes);
            o.d = b.d.to_f32();
            o.scale = q3k_scales(&b.scales).map(i16::from);
            for (w, q) in o.q.iter_mut().enumerate() {
                *q = (pair(&b.qs, w) | (b.hmask[w % 32] >> (w / 32) & 1) << 2) as i8 - 4;
            }
        }
        DType::Q4K => {
            let b: Q4K = read(bytes);
            (o.d, o.dmin) = (b.d.to_f32(), b.dmin.to_f32());
            six_bit_pairs(&b.scales, &mut o);
            for (w, q) in o.q.iter_mut().enumerate() {
                *q = nibble(&b.qs, w) as i8;
            }
        }
        DType::Q5K => {
            let b: Q5K = read(bytes);
            (o.d, o.dmin) = (b.d.to_f32(), b.dmin.to_f32());
            six_bit_pairs(&b.scales, &mut o);
            for (w, q) in o.q.iter_mut().enumerate() {
                *q = (nibble(&b.qs, w) | (b.qh[w % 32] >> (w / 32) & 1) << 4) as i8;
            }
        }
        DType::Q6K => {
            let b: Q6K = read(bytes);
            o.d = b.d.to_f32();
            o.scale = b.scales.map(i16::from);
            for (w, q) in o.q.iter_mut().enumerate() {
                let low = b.ql[w / 128 * 64 + w % 64] >> (w % 128 / 64 * 4) & 15;
                *q = (low | pair(&b.qh, w) << 4) as i8 - 32;
            }
        }
        DType::Tq1_0 => {
            let b: Tq1_0 = read(bytes);
            o.d = b.d.to_f32();
            for (w, q) in o.q.iter_mut().enumerate() {
                let (at, digit) = tail::trit_place(w);
                let byte = if at < 48 { b.qs[at] } else { b.qh[at - 48] };
                *q = tq1_code(byte, digit) as i8 - 1;
            }
        }
        DType::Tq2_0 => {
            let b: Tq2_0 = read(bytes);
            o.d = b.d.to_f32();
            for (w, q) in o.q.iter_mut().enumerate() {
                *q = pair(&b.qs, w) as i8 - 1;
            }
        }
        DType::F32 | DType::F16 | DType::BF16 | DType::Linear(_) => {}
    }
    o
}

fn nibbles(qs: &[u8; 16], mut put: impl FnMut(usize, u8)) {
    for (i, &b) in qs.iter().enumerate() {
        put(i, b & 15);
        put(i + 16, b >> 4);
    }
}

/// Code `w` of a 2-bit plane.
fn pair(qs: &[u8; 64], w: usize) -> u8 {
    qs[w / 128 * 32 + w % 32] >> (w % 128 / 32 * 2) & 3
}

/// Code `w` of a nibble plane of Q4_K and Q5_K.
fn nibble(qs: &[u8; 128], w: usize) -> u8 {
    qs[w / 64 * 32 + w % 32] >> (w % 64 / 32 * 4) & 15
}

fn six_bit_pairs(scales: &[u8; 12], o: &mut Decoded) {
    for j in 0..8 {
        let (s, m) = k4_scale_min(scales, j);
        (o.scale[2 * j], o.scale[2 * j + 1]) = (i16::from(s), i16::from(s));
        (o.min[2 * j], o.min[2 * j + 1]) = (i16::from(m), i16::from(m));
    }
}

/// Calls `f(first weight, block)` for every block of a row, the partial one expanded and
/// with its true length. Only for integer formats other than linear ones.
pub fn for_each_block(dtype: DType, row: &[u8], cols: usize, mut f: impl FnMut(usize, &Decoded)) {
    let Some(facts) = dtype.facts() else { return };
    let whole = cols / facts.block;
    for (b, bytes) in row.chunks_exact(facts.bytes).take(whole).enumerate() {
        f(b * facts.block, &decode(dtype, bytes));
    }
    let rest = cols - whole * facts.block;
    if rest > 0 {
        let mut full = [0; tail::MAX_BLOCK];
        tail::expand(
            dtype,
            &row[whole * facts.bytes..],
            rest,
            &mut full[..facts.bytes],
        );
        let mut last = decode(dtype, &full);
        last.len = rest;
        f(whole * facts.block, &last);
    }
}

/// Dequantises a row of `out.len()` weights; `row` has [`DType::row_bytes`] bytes.
pub fn dequantize_row(dtype: DType, row: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => floats(row, out, |b: [u8; 4]| f32::from_le_bytes(b)),
        DType::F16 => floats(row, out, |b: [u8; 2]| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => floats(row, out, |b: [u8; 2]| bf16::from_le_bytes(b).to_f32()),
        DType::Linear(l) => linear_row(l, row, out),
        _ => for_each_block(dtype, row, out.len(), |at, b| {
            b.dequantize(&mut out[at..at + b.len])
        }),
    }
}

fn floats<const N: usize>(row: &[u8], out: &mut [f32], f: impl Fn([u8; N]) -> f32) {
    for (y, b) in out.iter_mut().zip(row.as_chunks::<N>().0) {
        *y = f(*b);
    }
}

fn linear_row(l: Linear, row: &[u8], out: &mut [f32]) {
    let (codes, scales, zeros) = l.split(row, out.len());
    let mut q = [0; 128];
    for (g, y) in out.chunks_mut(l.group()).enumerate() {
        let start = g * l.group() * l.bits() as usize / 8;
        dense::unpack(l.bits(), &codes[start..], &mut q[..y.len()]);
        let (scale, zero) = l.scale_zero(scales, zeros, g);
        for (y, &q) in y.iter_mut().zip(&q) {
            *y = scale * (i32::from(q) - zero) as f32;
        }
    }
}
