//! Rows of every format, ordinary and extreme, and what they amount to.

use super::Random;
use crate::decode::for_each_block;
use crate::layout::q3k_pack;
use crate::{DType, Linear, dense, tail};
use half::{bf16, f16};

/// How the sub-scales of a block are set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Sub {
    /// Random bytes.
    Random,
    /// Every sub-scale zero.
    Zero,
    /// The smallest: −32 (Q3_K), −128 (Q6_K), scale zero with the largest minimum elsewhere.
    Lowest,
    /// The largest of scale and minimum.
    Highest,
}

/// Byte that fills the codes; `None` for random codes.
pub(super) type Fill = Option<u8>;

/// The rows of an exact matrix: every fill with every kind of sub-scale.
pub(super) fn extremes() -> Vec<(Fill, Sub)> {
    let subs = [Sub::Random, Sub::Highest, Sub::Lowest, Sub::Zero];
    let fills = [None, Some(0xff), Some(0), Some(0x7f), Some(0x80)];
    subs.iter()
        .flat_map(|&s| fills.iter().map(move |&f| (f, s)))
        .collect()
}

/// Offsets of the fp16 super-scale and super-minimum in a whole block.
fn super_scales(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        DType::Tq1_0 => &[52],
        DType::Tq2_0 => &[64],
        _ => &[0],
    }
}

fn set_sub(dtype: DType, block: &mut [u8], sub: Sub, random: &mut Random) {
    let range = match dtype {
        DType::Q2K => 0..16,
        DType::Q3K => 96..108,
        DType::Q4K | DType::Q5K => 4..16,
        DType::Q6K => 192..208,
        _ => return,
    };
    let bytes = &mut block[range];
    match (sub, dtype) {
        (Sub::Random, _) => bytes.iter_mut().for_each(|b| *b = random.bits() as u8),
        (Sub::Zero, DType::Q3K) => bytes.copy_from_slice(&q3k_pack(&[0; 16])),
        (Sub::Zero, _) | (Sub::Lowest, DType::Q3K) => bytes.fill(0),
        (Sub::Lowest, DType::Q2K) => bytes.fill(0xf0),
        (Sub::Lowest, DType::Q6K) => bytes.fill(0x80),
        (Sub::Lowest, _) => bytes.copy_from_slice(&crate::layout::k4_pack(&[0; 8], &[63; 8])),
        (Sub::Highest, DType::Q6K) => bytes.fill(0x7f),
        (Sub::Highest, _) => bytes.fill(0xff),
    }
}

/// One row; `scale` gives each fp16 super-scale.
pub(super) fn row(
    dtype: DType,
    cols: usize,
    (fill, sub): (Fill, Sub),
    random: &mut Random,
    mut scale: impl FnMut(&mut Random) -> f16,
) -> Vec<u8> {
    if let DType::Linear(l) = dtype {
        return linear_row(l, cols, (fill, sub), random, scale);
    }
    let Some(facts) = dtype.facts().filter(|f| f.block > 1) else {
        return (0..cols)
            .flat_map(|_| float(dtype, f32::from(random.int(-31, 31) as i8)))
            .collect();
    };
    let mut out = Vec::new();
    for start in (0..cols).step_by(facts.block) {
        let mut block: Vec<u8> = (0..facts.bytes)
            .map(|_| fill.unwrap_or(random.bits() as u8))
            .collect();
        set_sub(dtype, &mut block, sub, random);
        for &at in super_scales(dtype) {
            block[at..at + 2].copy_from_slice(&scale(random).to_le_bytes());
        }
        let n = facts.block.min(cols - start);
        if n < facts.block {
            let mut part = vec![0; tail::bytes(dtype, n).unwrap_or(0)];
            tail::compact(dtype, &block, n, &mut part);
            block = part;
        }
        out.extend(block);
    }
    out
}

fn linear_row(
    l: Linear,
    cols: usize,
    (fill, sub): (Fill, Sub),
    random: &mut Random,
    mut scale: impl FnMut(&mut Random) -> f16,
) -> Vec<u8> {
    let mask = (1u8 << l.bits()) - 1;
    let codes: Vec<u8> = (0..cols)
        .map(|_| fill.unwrap_or(random.bits() as u8) & mask)
        .collect();
    let mut out = vec![0; l.code_bytes(cols).unwrap_or(0)];
    dense::pack(l.bits(), &codes, &mut out);
    let groups = cols.div_ceil(l.group());
    (0..groups).for_each(|_| out.extend(scale(random).to_le_bytes()));
    if l.asymmetric() {
        out.extend((0..groups).map(|_| match sub {
            Sub::Random => random.bits() as u8 & mask,
            Sub::Zero => 0,
            Sub::Lowest => 255,
            Sub::Highest => mask,
        }));
    }
    out.resize(l.row_bytes(cols).unwrap_or(out.len()), 0);
    out
}

fn float(dtype: DType, v: f32) -> Vec<u8> {
    match dtype {
        DType::F32 => v.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
        _ => bf16::from_f32(v).to_le_bytes().to_vec(),
    }
}

/// A row with random codes and scales of ordinary size, some subnormal in fp16.
pub(super) fn ordinary(dtype: DType, cols: usize, random: &mut Random) -> Vec<u8> {
    if matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return (0..cols)
            .flat_map(|_| float(dtype, 0.05 * random.bell()))
            .collect();
    }
    row(dtype, cols, (None, Sub::Random), random, |r| {
        match r.int(0, 15) {
            0 => f16::from_f32(1e-6 * r.signed()),
            1 => f16::ZERO,
            2 => f16::from_f32(-0.01),
            _ => f16::from_f32(0.002 + 0.01 * r.signed().abs()),
        }
    })
}

/// A row whose weights are all about `size`, so that dot products become large.
pub(super) fn constant(dtype: DType, cols: usize, size: f32) -> Vec<u8> {
    let mut random = Random::new(5);
    if matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return (0..cols).flat_map(|_| float(dtype, size)).collect();
    }
    let fill = if dtype == DType::Q8_0 { 0x7f } else { 0xff };
    // The largest codes, and in linear formats no zero-point that takes them off again.
    let sub = if matches!(dtype, DType::Linear(_)) {
        Sub::Zero
    } else {
        Sub::Highest
    };
    let mut make = |scale: f16| row(dtype, cols, (Some(fill), sub), &mut random, |_| scale);
    let bytes = make(f16::ONE);
    // With scales of one the weights say what scale gives the wanted size.
    let mut w = vec![0.0; cols];
    crate::decode::dequantize_row(dtype, &bytes, &mut w);
    make(f16::from_f32(if w[0] == 0.0 { size } else { size / w[0] }))
}

/// What the weights of a row can amount to in a kernel's sums.
pub(super) struct Sizes {
    /// For each weight a bound of the sizes of all factors that a kernel may multiply its
    /// activation with and add up: scaled code with and without the fixed offset of the
    /// format, offset, and minimum.
    pub(super) factors: Vec<f64>,
    /// A power of two of which every factor is a whole multiple, where super-scales are
    /// powers of two.
    pub(super) quantum: f64,
}

/// The greatest power of two that divides all of `values`; `None` if all are zero.
fn common(values: &[i16]) -> Option<f64> {
    values
        .iter()
        .filter(|v| **v != 0)
        .map(|v| v.trailing_zeros())
        .min()
        .map(|z| f64::from(1u32 << z))
}

/// Sizes of a row of any format.
pub(super) fn sizes(dtype: DType, row: &[u8], cols: usize) -> Sizes {
    let mut s = Sizes {
        factors: vec![0.0; cols],
        quantum: f64::INFINITY,
    };
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {
            let mut w = vec![0.0; cols];
            crate::decode::dequantize_row(dtype, row, &mut w);
            s.factors = w.iter().map(|w| f64::from(w.abs())).collect();
            s.quantum = 1.0;
        }
        DType::Linear(l) => {
            let (codes, scales, zeros) = l.split(row, cols);
            let mut q = vec![0; cols];
            dense::unpack(l.bits(), codes, &mut q);
            for (i, q) in q.iter().enumerate() {
                let (scale, zero) = l.scale_zero(scales, zeros, i / l.group());
                let scale = f64::from(scale.abs());
                s.factors[i] = scale * f64::from(i32::from(*q) + zero);
                s.quantum = if scale > 0.0 {
                    s.quantum.min(scale)
                } else {
                    s.quantum
                };
            }
        }
        _ => for_each_block(dtype, row, cols, |at, b| {
            // Formats without an offset of their own may get one of 128 to make codes unsigned.
            let offset = match dtype {
                DType::Q8_0 | DType::Iq4Nl => 128.0,
                DType::Q6K => 32.0,
                DType::Q5_0 => 16.0,
                DType::Q4_0 => 8.0,
                DType::Q3K => 4.0,
                DType::Tq1_0 | DType::Tq2_0 => 1.0,
                _ => 0.0,
            };
            let (d, dmin) = (f64::from(b.d.abs()), f64::from(b.dmin.abs()));
            for i in 0..b.len {
                let code = f64::from(b.q[i]).abs() + 2.0 * offset;
                let (scale, min) = (
                    f64::from(b.scale[i / 16]).abs(),
                    f64::from(b.min[i / 16]).abs(),
                );
                s.factors[at + i] = d * scale * code + dmin * min;
            }
            for (d, values) in [(d, &b.scale), (dmin, &b.min)] {
                if let Some(q) = common(values).filter(|_| d > 0.0) {
                    s.quantum = s.quantum.min(d * q);
                }
            }
        }),
    }
    if s.quantum.is_infinite() {
        s.quantum = 1.0;
    }
    s
}
