//! The suite that every kernel crate runs: shapes, seeds, tolerances.
//!
//! [`run`] compares a kernel with the scalar reference and returns what it covered. Matrices
//! are compared in three ways:
//!
//! * *exact*: super-scales and activation scales are powers of two and the sums so small that
//!   every fp32 operation is exact in any order, so the kernel must equal
//!   [`scalar::dot`](crate::scalar::dot). That proves its integer sums to the bit.
//! * *dense*: the same extreme blocks against columns of ±127 throughout, which overflow a
//!   kernel that sums in too narrow an integer.
//! * *random*: ordinary scales and activations, within a tolerance derived from the norms.
//!
//! All seeds are fixed. [`BENCH_SHAPES`] and [`bench_matrix`] serve the benchmarks.

mod attention;
mod columns;
mod matmul;
mod rows;
mod vectors;

use crate::dtype::TABLE;
use crate::{DType, Kernels, Linear};
use std::fmt;

pub use columns::Columns;

/// Rows and columns that benchmarks multiply: a small model's projections, a head, and a
/// matrix larger than second-level caches.
pub const BENCH_SHAPES: [(usize, usize); 3] = [(576, 576), (1536, 896), (4096, 4096)];

/// Row lengths for formats that need a multiple of 32.
const COLS: [usize; 13] = [
    32, 64, 96, 160, 192, 224, 256, 288, 512, 576, 640, 896, 1536,
];
/// Row lengths that linear (multiples of 8) and float formats have too.
const SHORT: [usize; 5] = [7, 8, 24, 33, 40];
/// Row counts of one call.
const ROWS: [usize; 9] = [1, 2, 3, 4, 5, 7, 8, 9, 17];
/// Column counts of one call.
const COLUMNS: [usize; 15] = [1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 15, 16, 17, 28, 31];

/// Unit roundoff of fp32: the relative error of one operation.
const UNIT: f64 = 1.0 / 16_777_216.0;

/// Where a kernel and the reference part.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("kernel {kernel}: {what}: {detail}")]
pub struct Mismatch {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Operation, format and shape.
    pub what: String,
    /// Position, values and tolerance.
    pub detail: String,
}

/// What a run covered.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Operation or format, and how many values were compared.
    pub lines: Vec<(String, u64)>,
}

impl Report {
    /// Values compared in all.
    pub fn values(&self) -> u64 {
        self.lines.iter().map(|l| l.1).sum()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "kernel {}: {} values equal the reference",
            self.kernel,
            self.values()
        )?;
        writeln!(
            f,
            "row lengths {COLS:?} ({SHORT:?}), rows {ROWS:?}, columns {COLUMNS:?}"
        )?;
        self.lines
            .iter()
            .try_for_each(|(what, n)| writeln!(f, "  {what}: {n}"))
    }
}

/// Every format: the table's and the linear ones.
pub fn formats() -> impl Iterator<Item = DType> {
    TABLE
        .iter()
        .map(|f| f.dtype)
        .chain(Linear::all().map(DType::Linear))
}

/// Runs everything; the report says what was compared, an error where the kernel is wrong.
pub fn run<K: Kernels>(k: K) -> Result<Report, Mismatch> {
    let mut report = Report {
        kernel: k.name(),
        lines: Vec::new(),
    };
    for dtype in formats() {
        report
            .lines
            .push((format!("matmul {}", dtype.name()), matmul(k, dtype)?));
    }
    report.lines.extend(vectors(k)?);
    Ok(report)
}

/// [`Kernels::matmul`] for one format; returns the number of values compared.
pub fn matmul<K: Kernels>(k: K, dtype: DType) -> Result<u64, Mismatch> {
    matmul::check(k, dtype)
}

/// Everything but [`Kernels::matmul`]; returns operation and values compared.
pub fn vectors<K: Kernels>(k: K) -> Result<Vec<(String, u64)>, Mismatch> {
    vectors::check(k)
}

/// `rows × cols` ordinary weights of a format, from fixed seeds; `None` where the format
/// cannot hold the length.
pub fn bench_matrix(dtype: DType, rows: usize, cols: usize) -> Option<Vec<u8>> {
    dtype.row_bytes(cols)?;
    let mut random = Random::new(0xbe7c);
    Some(
        (0..rows)
            .flat_map(|_| rows::ordinary(dtype, cols, &mut random))
            .collect(),
    )
}

/// SplitMix64: small, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator that gives the same numbers for the same seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A whole number of `low ..= high`.
    pub fn int(&mut self, low: i32, high: i32) -> i32 {
        low + (self.bits() % (i64::from(high) - i64::from(low) + 1) as u64) as i32
    }

    /// Evenly in −1 … 1.
    pub fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    /// Bell-shaped, variance 1: the sum of twelve even numbers.
    pub fn bell(&mut self) -> f32 {
        (0..12).map(|_| self.signed()).sum::<f32>() / 2.0
    }

    /// `n` values of [`Random::bell`] times `size`.
    pub fn vector(&mut self, n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|_| size * self.bell()).collect()
    }
}
