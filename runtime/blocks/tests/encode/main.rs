//! The quantisers: error bounds, order of the methods, partial superblocks, bad input.

mod bounds;
mod edges;
mod methods;

use myq_blocks::decode::{dequantize_row, for_each_block};
use myq_blocks::dtype::{DType, TABLE};
use myq_blocks::encode::{
    EncodeError, Method, RowReport, code_range, encode_row, encode_rows, fit_block, store_block,
};
use myq_blocks::{Linear, f16, tail};

const METHODS: [Method; 2] = [Method::Round, Method::Search];

/// Random numbers that are the same everywhere.
struct Random(u64);

impl Random {
    /// In (0, 1).
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    fn gauss(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    fn laplace(&mut self) -> f64 {
        let u = self.unit() - 0.5;
        -u.signum() * (1.0 - 2.0 * u.abs()).ln()
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Gauss,
    Laplace,
    HeavyTail,
}

const KINDS: [Kind; 3] = [Kind::Gauss, Kind::Laplace, Kind::HeavyTail];

fn weights(kind: Kind, n: usize, seed: u64) -> Vec<f32> {
    let mut r = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut one = || match kind {
        Kind::Gauss => r.gauss(),
        Kind::Laplace => r.laplace(),
        Kind::HeavyTail => r.gauss() * (0.7 * r.gauss()).exp(),
    };
    (0..n).map(|_| (0.02 * one()) as f32).collect()
}

/// All formats, float ones too.
fn all() -> impl Iterator<Item = DType> {
    TABLE
        .iter()
        .map(|f| f.dtype)
        .chain(Linear::all().map(DType::Linear))
}

/// All formats with scales.
fn quantised() -> impl Iterator<Item = DType> {
    all().filter(|t| t.block_len() > 1)
}

fn encode(
    dtype: DType,
    method: Method,
    x: &[f32],
    importance: Option<&[f32]>,
) -> (Vec<u8>, RowReport) {
    let mut row = vec![0xAA; dtype.row_bytes(x.len()).unwrap()];
    let report = encode_row(dtype, method, x, importance, &mut row).unwrap();
    (row, report)
}

fn through(dtype: DType, method: Method, x: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len()];
    dequantize_row(dtype, &encode(dtype, method, x, importance).0, &mut y);
    y
}

fn squares(x: &[f32], y: &[f32], w: &[f32]) -> f64 {
    x.iter()
        .zip(y)
        .zip(w)
        .map(|((x, y), w)| f64::from(*w) * f64::from(x - y).powi(2))
        .sum()
}

fn relative_rms(x: &[f32], y: &[f32]) -> f64 {
    let ones = vec![1.0; x.len()];
    (squares(x, y, &ones) / squares(x, &vec![0.0; x.len()], &ones)).sqrt()
}

/// The values that each 16 (linear: each group) of a row can take: (step, all values).
fn levels(dtype: DType, row: &[u8], cols: usize) -> Vec<(f32, Vec<f32>)> {
    let mut out = Vec::new();
    if let DType::Linear(l) = dtype {
        let (_, scales, zeros) = l.split(row, cols);
        for g in 0..cols.div_ceil(l.group()) {
            let (scale, zero) = l.scale_zero(scales, zeros, g);
            out.push((
                scale.abs(),
                (0..1 << l.bits())
                    .map(|q| scale * (q - zero) as f32)
                    .collect(),
            ));
        }
        return out;
    }
    let (lo, hi) = code_range(dtype).unwrap();
    for_each_block(dtype, row, cols, |_, b| {
        for j in 0..b.len / 16 {
            let (step, min) = (b.d * f32::from(b.scale[j]), b.dmin * f32::from(b.min[j]));
            let is_level =
                |q: &i8| dtype != DType::Iq4Nl || myq_blocks::layout::IQ4NL_LEVELS.contains(q);
            out.push((
                step.abs(),
                (lo..=hi)
                    .filter(is_level)
                    .map(|q| step * f32::from(q) - min)
                    .collect(),
            ));
        }
    });
    out
}
