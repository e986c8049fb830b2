//! The quantisers: from fp32 rows to blocks, shared by tools and tests.
//!
//! [`Method::Round`] takes each scale from the range of its weights and rounds.
//! [`Method::Search`] looks for the scales (and minima) with the least weighted squared error
//! `Σ wᵢ·(xᵢ − x̂ᵢ)²`, and never ends above what rounding gives. Both round the codes against
//! the scales as stored, so the error is the one a reader of the file sees.
//!
//! **Weights of the error.** From calibration: the second moment of the input that meets each
//! column, one per column. Without calibration the weight's own second moment stands in:
//! `wᵢ = xᵢ² + 8·σ²`, σ² the mean square of its block. Large weights carry more of an output;
//! the share of the mean keeps the many small ones from being given up for them. A given
//! weight that is zero, negative or not finite is raised to a thousandth of the block's mean;
//! where a block has no usable one, all count alike. [`RowReport::floored`] counts both.
//!
//! **Range.** Every fp16 scale is stored finite: one that would overflow is clamped to 65504,
//! which clips the weights out of reach ([`RowReport::clipped`]). Elsewhere an outlier is
//! clipped only where a shrunken range, one of the search's candidates, lowers the error. No
//! fixed quantile is cut off, for on most blocks that would raise it.
//!
//! Nothing allocates and nothing depends on the machine: sums run in a fixed order, so equal
//! rows give equal bytes.

mod block;
mod fit;
mod flat;
mod linear;
mod store;
mod supers;

use crate::decode::Decoded;
use crate::{DType, tail};
use block::Block;
use half::{bf16, f16};

pub use store::store_block;

/// How scales are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Method {
    /// From the range of the weights.
    Round,
    /// By the least importance-weighted squared error.
    Search,
}

/// What became of a row, or of many.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RowReport {
    /// Weights beyond the largest value the format holds with finite fp16 scales.
    pub clipped: usize,
    /// Weights whose given importance was zero, negative or not finite.
    pub floored: usize,
}

impl std::ops::AddAssign for RowReport {
    fn add_assign(&mut self, other: RowReport) {
        self.clipped += other.clipped;
        self.floored += other.floored;
    }
}

/// Why a row was not quantised.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
pub enum EncodeError {
    /// weight {index} is {value}: quantisation needs finite weights; repair the source
    #[error("weight {index} is {value}: quantisation needs finite weights; repair the source")]
    NonFinite {
        /// Index in the given slice: row · columns + column.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// {name} cannot hold rows of {cols} weights: choose a type whose block divides them
    #[error("{} cannot hold rows of {cols} weights: choose a type whose block divides them", dtype.name())]
    Columns {
        /// The format asked for.
        dtype: DType,
        /// Weights in a row.
        cols: usize,
    },
    /// {what} has length {got}, {want} needed
    #[error("{what} has length {got}, {want} needed")]
    Length {
        /// Which slice.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length it should have.
        want: usize,
    },
}

/// Quantises one row of `x.len()` weights into the [`DType::row_bytes`] bytes of `out`.
///
/// `importance`, one weight of the error per column, is used by [`Method::Search`] alone; see
/// the module for its meaning and for what stands in when it is absent.
///
/// # Errors
///
/// [`EncodeError::NonFinite`] for NaN or infinity in `x`, [`EncodeError::Columns`] for a row
/// length that the format cannot hold, [`EncodeError::Length`] for a wrong slice.
pub fn encode_row(
    dtype: DType,
    method: Method,
    x: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<RowReport, EncodeError> {
    let bytes = dtype.row_bytes(x.len()).ok_or(EncodeError::Columns {
        dtype,
        cols: x.len(),
    })?;
    check_len("the output row", out.len(), bytes)?;
    check_inputs(x, importance)?;
    let mut report = RowReport::default();
    match dtype {
        DType::F32 => floats(x, out, f32::to_le_bytes),
        DType::F16 => {
            report.clipped = x.iter().filter(|v| v.abs() > block::F16_MAX).count();
            floats(x, out, |v| {
                f16::from_f32(v.clamp(-block::F16_MAX, block::F16_MAX)).to_le_bytes()
            });
        }
        DType::BF16 => {
            let max = bf16::MAX.to_f32();
            report.clipped = x.iter().filter(|v| v.abs() > max).count();
            floats(x, out, |v| bf16::from_f32(v.clamp(-max, max)).to_le_bytes());
        }
        DType::Linear(l) => report = linear::encode(l, method, x, importance, out),
        _ => report = blocks(dtype, method, x, importance, out),
    }
    Ok(report)
}

/// Quantises `x`, rows of `cols` weights one after another; all rows share `importance`.
///
/// Serial, so that callers split rows over threads as they like: the result is the same.
///
/// # Errors
///
/// Those of [`encode_row`]; an index counts from the start of `x`.
pub fn encode_rows(
    dtype: DType,
    method: Method,
    cols: usize,
    x: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<RowReport, EncodeError> {
    let bytes = dtype
        .row_bytes(cols)
        .ok_or(EncodeError::Columns { dtype, cols })?;
    let rows = x.len() / cols;
    check_len("the input", x.len(), rows * cols)?;
    check_len("the output", out.len(), rows * bytes)?;
    let mut report = RowReport::default();
    for (r, (x, out)) in x.chunks(cols).zip(out.chunks_mut(bytes)).enumerate() {
        report += encode_row(dtype, method, x, importance, out).map_err(|e| match e {
            EncodeError::NonFinite { index, value } => EncodeError::NonFinite {
                index: index + r * cols,
                value,
            },
            other => other,
        })?;
    }
    Ok(report)
}

/// Scales and codes of one block of an integer format: a whole one, or the first weights of
/// a superblock. For methods that choose codes themselves; [`store_block`] writes the result.
///
/// `x` has a multiple of 32 weights, at most [`DType::block_len`].
///
/// # Errors
///
/// Those of [`encode_row`]; [`EncodeError::Columns`] too for float and linear formats, which
/// have no such blocks.
pub fn fit_block(
    dtype: DType,
    method: Method,
    x: &[f32],
    importance: Option<&[f32]>,
) -> Result<(Decoded, RowReport), EncodeError> {
    let blocked = dtype.block_len() >= 32 && !matches!(dtype, DType::Linear(_));
    if !blocked || x.len() > dtype.block_len() || dtype.row_bytes(x.len()).is_none() {
        return Err(EncodeError::Columns {
            dtype,
            cols: x.len(),
        });
    }
    check_inputs(x, importance)?;
    Ok(fit(dtype, method, x, importance))
}

/// Smallest and largest code of a block format, as [`Decoded::q`] holds them; `None` for
/// float and linear formats.
pub fn code_range(dtype: DType) -> Option<(i8, i8)> {
    Some(match dtype {
        DType::Q4_0 => (-8, 7),
        DType::Q4_1 | DType::Q4K => (0, 15),
        DType::Q5_0 => (-16, 15),
        DType::Q5_1 | DType::Q5K => (0, 31),
        // Not −128: kernels may then take absolute values in eight bits.
        DType::Q8_0 => (-127, 127),
        DType::Iq4Nl => (-127, 113),
        DType::Q2K => (0, 3),
        DType::Q3K => (-4, 3),
        DType::Q6K => (-32, 31),
        DType::Tq1_0 | DType::Tq2_0 => (-1, 1),
        DType::F32 | DType::F16 | DType::BF16 | DType::Linear(_) => return None,
    })
}

/// The whole numbers that a block is made of, for methods that choose them themselves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Weights that share a sub-scale and a sub-minimum.
    pub sub: usize,
    /// Smallest and largest code.
    pub codes: (i16, i16),
    /// Smallest and largest sub-scale; 1 and 1 in formats without.
    pub scales: (i16, i16),
    /// Smallest and largest sub-minimum; none in formats without minima.
    pub mins: Option<(i16, i16)>,
    /// Whether every code between the ends exists.
    pub even: bool,
}

impl Grid {
    /// The grid of a block format; `None` for float and linear formats.
    pub fn of(dtype: DType) -> Option<Grid> {
        let (lo, hi) = code_range(dtype)?;
        let codes = (i16::from(lo), i16::from(hi));
        let two_levels = dtype.is_super() && !matches!(dtype, DType::Tq1_0 | DType::Tq2_0);
        Some(if two_levels {
            supers::grid(dtype, codes)
        } else {
            Grid {
                sub: dtype.block_len(),
                codes,
                scales: (1, 1),
                mins: matches!(dtype, DType::Q4_1 | DType::Q5_1).then_some((1, 1)),
                even: dtype != DType::Iq4Nl,
            }
        })
    }
}

fn check_len(what: &'static str, got: usize, want: usize) -> Result<(), EncodeError> {
    if got == want {
        Ok(())
    } else {
        Err(EncodeError::Length { what, got, want })
    }
}

fn check_inputs(x: &[f32], importance: Option<&[f32]>) -> Result<(), EncodeError> {
    if let Some(w) = importance {
        check_len("the importance", w.len(), x.len())?;
    }
    match x.iter().position(|v| !v.is_finite()) {
        Some(index) => Err(EncodeError::NonFinite {
            index,
            value: x[index],
        }),
        None => Ok(()),
    }
}

fn floats<const N: usize>(x: &[f32], out: &mut [u8], f: impl Fn(f32) -> [u8; N]) {
    for (b, &v) in out.as_chunks_mut::<N>().0.iter_mut().zip(x) {
        *b = f(v);
    }
}

/// A row of a block format; lengths are checked.
fn blocks(
    dtype: DType,
    method: Method,
    x: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> RowReport {
    let mut report = RowReport::default();
    let Some(facts) = dtype.facts() else {
        return report;
    };
    let mut whole = [0; tail::MAX_BLOCK];
    let whole = &mut whole[..facts.bytes];
    for (b, (x, out)) in x
        .chunks(facts.block)
        .zip(out.chunks_mut(facts.bytes))
        .enumerate()
    {
        let at = b * facts.block;
        let (fitted, r) = fit(dtype, method, x, importance.map(|w| &w[at..at + x.len()]));
        report += r;
        if x.len() == facts.block {
            store_block(dtype, &fitted, out);
        } else {
            store_block(dtype, &fitted, whole);
            tail::compact(dtype, whole, x.len(), out);
        }
    }
    report
}

/// [`fit_block`] of checked inputs.
fn fit(
    dtype: DType,
    method: Method,
    x: &[f32],
    importance: Option<&[f32]>,
) -> (Decoded, RowReport) {
    let (block, floored) = Block::load(method, x, importance);
    let solve = if dtype.is_super() && !matches!(dtype, DType::Tq1_0 | DType::Tq2_0) {
        supers::fit
    } else {
        flat::fit
    };
    let mut best = solve(dtype, Method::Round, &block);
    if method == Method::Search {
        let searched = solve(dtype, Method::Search, &block);
        // The search works on sums in single precision; this is the promise it is held to.
        if block.error(&searched) < block.error(&best) {
            best = searched;
        }
    }
    (
        best,
        RowReport {
            clipped: clipped(dtype, x),
            floored,
        },
    )
}

/// Weights that no finite fp16 scale reaches.
fn clipped(dtype: DType, x: &[f32]) -> usize {
    // Largest sub-scale and sub-minimum; minima reach below zero only.
    let (scale, min) = match dtype {
        DType::Q2K => (15.0, Some(15.0)),
        DType::Q4K | DType::Q5K => (63.0, Some(63.0)),
        DType::Q3K => (32.0, None),
        DType::Q6K => (128.0, None),
        _ => (1.0, None),
    };
    let (lo, hi) = code_range(dtype).unwrap_or((0, 0));
    let reach = block::F16_MAX * scale * f32::from(lo).abs().max(f32::from(hi));
    let below = min.map_or(reach, |m| block::F16_MAX * m);
    x.iter().filter(|&&v| v > reach || v < -below).count()
}
