//! The contract of a kernel crate: small methods over slices that were checked before.

use crate::panels::PANEL;
use crate::{Column, ColumnMut, DType, Layout, panels, scalar};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Most activation columns one call of [`Kernels::matmul`] takes.
pub const MAX_COLUMNS: usize = 32;

/// Rows of weights in one format. The constructor checks; kernels rely on it.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    dtype: DType,
    cols: usize,
    row_bytes: usize,
    layout: Layout,
    data: &'a [u8],
}

/// Where a row is.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// The bytes of a plain row.
    Row(&'a [u8]),
    /// A panel, and the row's number in it.
    Panel(&'a [u8], usize),
}

/// Why bytes are not rows of the format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowsError {
    /// The format cannot hold a row of that length.
    #[error(
        "{0} columns do not fit the format (superblock and 32-weight formats need a multiple of 32)"
    )]
    Columns(usize),
    /// The format has no such layout for that row length.
    #[error("rows of {1} weights of {0} cannot be stored in the layout rows8")]
    Layout(String, usize),
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
            layout: Layout::Plain,
            data,
        })
    }

    /// Rows of `cols` weights in a layout; `data` holds a whole number of rows, which are
    /// panels of eight and, where eight do not divide them, plain rows behind.
    pub fn in_layout(
        layout: Layout,
        dtype: DType,
        cols: usize,
        data: &'a [u8],
    ) -> Result<Rows<'a>, RowsError> {
        let rows = Rows::new(dtype, cols, data)?;
        if layout == Layout::Rows8 && !panels::has_panels(dtype, cols) {
            return Err(RowsError::Layout(dtype.name(), cols));
        }
        Ok(Rows { layout, ..rows })
    }

    /// How the rows are stored.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Number of panels; none in the plain layout.
    pub fn panels(&self) -> usize {
        match self.layout {
            Layout::Plain => 0,
            Layout::Rows8 => self.rows() / PANEL,
        }
    }

    /// The bytes of panel `p`.
    pub fn panel(&self, p: usize) -> &'a [u8] {
        let bytes = PANEL * self.row_bytes;
        &self.data[p * bytes..(p + 1) * bytes]
    }

    /// The rows behind the panels, in the plain layout; all of them where there are none.
    pub fn behind_panels(&self) -> Rows<'a> {
        Rows {
            layout: Layout::Plain,
            data: &self.data[self.panels() * PANEL * self.row_bytes..],
            ..*self
        }
    }

    /// Where row `r` is.
    pub fn place(&self, r: usize) -> Place<'a> {
        if r < self.panels() * PANEL {
            Place::Panel(self.panel(r / PANEL), r % PANEL)
        } else {
            Place::Row(self.row(r))
        }
    }

    /// Dequantises row `r` into `out`, `cols` values.
    pub fn dequantize(&self, r: usize, out: &mut [f32]) {
        match self.place(r) {
            Place::Row(row) => crate::decode::dequantize_row(self.dtype, row, out),
            Place::Panel(panel, r) => panels::dequantize_row(self.dtype, panel, r, out),
        }
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

    /// The bytes of one row, which must not be in a panel (see [`Rows::place`]).
    pub fn row(&self, r: usize) -> &'a [u8] {
        &self.data[r * self.row_bytes..(r + 1) * self.row_bytes]
    }

    /// Rows `range` of these; where there are panels, it must not cut one.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Rows<'a> {
        let inside = PANEL * self.panels();
        debug_assert!(
            [range.start, range.end]
                .iter()
                .all(|&r| r >= inside || r.is_multiple_of(PANEL)),
            "a cut through a panel"
        );
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

    /// The layout in which products are fastest; every kernel takes all of them.
    fn layout(self) -> Layout {
        Layout::Plain
    }

    /// Whether [`Kernels::matmul`] reads the 8-bit form of its columns for this format, and
    /// not only their fp32 values.
    fn wants_codes(self, dtype: DType) -> bool {
        !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
    }

    /// `out[c][r] = row r of w · columns[c]`; 1 to [`MAX_COLUMNS`] columns of `w.cols()`
    /// values, each `out[c]` of `w.rows()` values.
    fn matmul(self, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]);

    // Everything else is the reference unless a kernel is faster.

    /// 8-bit form of `x`: for each 32 values `d = max|x| / 127`, `q = round(x / d)` with ties
    /// to even, sums of 16 codes; zero padding to the end of `out`.
    fn quantize(self, x: &[f32], out: ColumnMut<'_>) {
        scalar::quantize(x, out);
    }

    /// `out = x / sqrt(mean(x²) + eps) · weight`.
    fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        scalar::rms_norm(x, weight, eps, out);
    }

    /// `gate = silu(gate) · up`.
    fn swiglu(self, gate: &mut [f32], up: &[f32]) {
        scalar::swiglu(gate, up);
    }

    /// Rounds to fp16, out-of-range values to the largest finite one.
    fn to_f16(self, x: &[f32], out: &mut [f16]) {
        scalar::to_f16(x, out);
    }

    /// `out = x`.
    fn to_f32(self, x: &[f16], out: &mut [f32]) {
        x.convert_to_f32_slice(out);
    }

    // Attention in blocks of keys (see `myq_model::cache::tile`).

    /// Keys as [`Kernels::product`] takes them: `out[i·m + j] = keys[j·dim + i]` where `out`
    /// holds `dim` × m values, m not less than the number of keys; zero where there is no key.
    fn transpose(self, keys: &[f16], dim: usize, out: &mut [f32]) {
        scalar::transpose(keys, dim, out);
    }

    /// `out += a · b`, all of them row by row: `a` is n × `inner`, `b` is `inner` × m.
    fn product(self, a: &[f32], b: &[f32], inner: usize, out: &mut [f32]) {
        scalar::product(a, b, inner, out);
    }

    /// A step of a softmax in blocks: with m the largest of `max` and `x`, `x = exp(x − m)`;
    /// gives m and the sum of the new `x`. There is a value, and m is finite.
    fn exp_block(self, x: &mut [f32], max: f32) -> (f32, f32) {
        scalar::exp_block(x, max)
    }

    /// Products of several queries with the same keys, `dim` values each: `out` is queries × keys.
    fn scores(self, q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
        scalar::scores(q, keys, dim, out);
    }

    /// `out += p · values`: `p` is queries × values, `out` queries × `dim`.
    fn mix(self, p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
        scalar::mix(p, values, dim, out);
    }
}
