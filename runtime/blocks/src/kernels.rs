//! The contract of a kernel crate: small methods over slices that were checked before.

use crate::{Column, ColumnMut, DType};
use half::f16;

/// Most activation columns one call of [`Kernels::matmul`] takes.
pub const MAX_COLUMNS: usize = 16;

/// Rows of weights in one format. The constructor checks; kernels rely on it.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    dtype: DType,
    cols: usize,
    row_bytes: usize,
    data: &'a [u8],
}

/// Why bytes are not rows of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowsError {
    /// The format cannot hold a row of that length.
    #[error(
        "{0} columns do not fit the format (superblock and 32-weight formats need a multiple of 32)"
    )]
    Columns(usize),
    /// The bytes are not a whole number of rows.
    #[error("{bytes} bytes are not a whole number of rows of {row} bytes")]
    Bytes {
        /// Bytes given.
        bytes: usize,
        /// Bytes of a row.
        row: usize,
    },
}

impl<'a> Rows<'a> {
    /// Rows of `cols` weights stored one after another in `data`.
    pub fn new(dtype: DType, cols: usize, data: &'a [u8]) -> Result<Rows<'a>, RowsError> {
        let row_bytes = dtype.row_bytes(cols).ok_or(RowsError::Columns(cols))?;
        if !data.len().is_multiple_of(row_bytes) {
            return Err(RowsError::Bytes {
                bytes: data.len(),
                row: row_bytes,
            });
        }
        Ok(Rows {
            dtype,
            cols,
            row_bytes,
            data,
        })
    }

    /// Format of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Weights in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.data.len() / self.row_bytes
    }

    /// All bytes.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The bytes of one row.
    pub fn row(&self, r: usize) -> &'a [u8] {
        &self.data[r * self.row_bytes..(r + 1) * self.row_bytes]
    }

    /// Rows `range` of these.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Rows<'a> {
        Rows {
            data: &self.data[range.start * self.row_bytes..range.end * self.row_bytes],
            ..*self
        }
    }
}

/// The arithmetic of one instruction set.
///
/// A value of an implementing type is the proof that the processor has the instructions:
/// such types have private fields and `new() -> Option<Self>`. Lengths are the caller's
/// duty and stated for each method; methods may panic where they do not hold.
pub trait Kernels: Copy + Send + Sync + 'static {
    /// Name as printed: `scalar`, `avx2`, `neon`, …
    fn name(self) -> &'static str;

    /// Whether [`Kernels::matmul`] reads the 8-bit form of its columns for this format, and
    /// not only their fp32 values.
    fn wants_codes(self, dtype: DType) -> bool {
        !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
    }

    /// 8-bit form of `x`: for each 32 values `d = max|x| / 127`, `q = round(x / d)` with ties
    /// to even, sums of 16 codes; zero padding to the end of `out`.
    fn quantize(self, x: &[f32], out: ColumnMut<'_>);

    /// `out[c][r] = row r of w · columns[c]`; 1 to [`MAX_COLUMNS`] columns of `w.cols()`
    /// values, each `out[c]` of `w.rows()` values.
    fn matmul(self, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]);

    /// `out = x / sqrt(mean(x²) + eps) · weight`.
    fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);

    /// `gate = silu(gate) · up`.
    fn swiglu(self, gate: &mut [f32], up: &[f32]);

    /// Softmax in place; at least one value is finite.
    fn softmax(self, x: &mut [f32]);

    /// `out[p] = scale · (q · keys[p])` for `out.len()` keys of `q.len()` values each.
    fn scores(self, q: &[f32], keys: &[f16], scale: f32, out: &mut [f32]);

    /// `out = Σ p[i] · values[i]` over `p.len()` vectors of `out.len()` values each.
    fn mix(self, p: &[f32], values: &[f16], out: &mut [f32]);

    /// Rounds to fp16, out-of-range values to the largest finite one.
    fn to_f16(self, x: &[f32], out: &mut [f16]);
}
