//! `myq verify`: checksums, unpack and compare, and the distance to a source.

use std::path::Path;

use myq_blocks::panels::{self, PANEL};
use myq_blocks::{DType, Layout, decode::dequantize_row, tail};
use myq_engine::prewarm;
use myq_format::{Kind, myq::Myq};
use rayon::prelude::*;
use serde::Serialize;

use crate::model::{Model, Tensor};
use crate::{ToolError, progress};

/// What was checked.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Tensors compared with their checksums; none in a GGUF file, which has none.
    pub checksums: usize,
    /// Tensors unpacked.
    pub tensors: usize,
    /// Weights unpacked and found finite.
    pub weights: u64,
    /// Partial superblocks that were unpacked and packed again to the same bytes.
    pub partial_blocks: u64,
    /// Panels of eight rows that were unpacked and packed again to the same bytes.
    pub panels: u64,
    /// Distance of each matrix to the source's, the largest first.
    pub distances: Vec<Distance>,
}

/// How far a matrix is from the source's.
#[derive(Clone, Debug, Serialize)]
pub struct Distance {
    /// Tensor.
    pub name: String,
    /// Format.
    pub dtype: String,
    /// `‖w − source‖ / ‖source‖`.
    pub relative_rms: f64,
}

/// Checks a file; the first failure is the error.
pub fn verify(model: &Model, source: Option<&Model>) -> Result<Report, ToolError> {
    let mut report = Report::default();
    if model.kind == Some(Kind::Myq) {
        report.checksums = checksums(model)?;
    }
    let bar = progress::bar(
        model.tensors.iter().map(|t| t.len() as u64).sum(),
        "unpacking",
    );
    for t in &model.tensors {
        let panels = unpack_panels(model, t)?;
        unpack_rows(model, t, PANEL * panels as usize)?;
        let partial = t.dtype.is_super() && !t.cols().is_multiple_of(256);
        report.panels += panels;
        report.partial_blocks += if partial { t.rows() as u64 } else { 0 };
        report.tensors += 1;
        report.weights += t.len() as u64;
        bar.inc(t.len() as u64);
    }
    bar.finish_and_clear();
    if let Some(source) = source {
        report.distances = distances(model, source)?;
    }
    Ok(report)
}

fn failed(path: &Path, problem: String) -> ToolError {
    ToolError::Verify {
        path: path.to_owned(),
        problem,
    }
}

fn checksums(model: &Model) -> Result<usize, ToolError> {
    let file = model.files[0].bytes();
    let fail = |error: myq_format::Error| ToolError::model(&model.path, error);
    let m = Myq::parse(file).map_err(fail)?;
    m.verify_tokenizer().map_err(fail)?;
    let bar = progress::bar(file.len() as u64, "comparing checksums");
    let mut show = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    prewarm::verify(&m, rayon::current_num_threads(), &mut show).map_err(fail)?;
    bar.finish_and_clear();
    Ok(m.tensors().len())
}

/// Every panel unpacks, and packs to the same bytes; then its rows are checked. The number of
/// panels.
fn unpack_panels(model: &Model, t: &Tensor) -> Result<u64, ToolError> {
    if t.layout == Layout::Plain {
        return Ok(0);
    }
    let (cols, row_bytes) = (t.cols(), t.row_bytes());
    let panels = model.data(t).par_chunks_exact(PANEL * row_bytes);
    let count = panels.len();
    panels.enumerate().try_for_each_init(
        || (vec![0; PANEL * row_bytes], vec![0; PANEL * row_bytes], vec![0.0; cols]),
        |(rows, again, x), (p, panel)| {
            panels::unpack(t.dtype, cols, panel, rows);
            panels::pack(t.dtype, cols, rows, again);
            if again != panel {
                return Err(failed(&model.path, format!(
                    "tensor {}: the panel of rows {} to {} does not pack back to its bytes; quantise again",
                    t.name, PANEL * p, PANEL * p + PANEL - 1
                )));
            }
            let mut rows = rows.chunks_exact(row_bytes).enumerate();
            rows.try_for_each(|(r, row)| check_row(model, t, PANEL * p + r, row, x))
        },
    )?;
    Ok(count as u64)
}

/// Checks the plain rows of a tensor, from row `first` on.
fn unpack_rows(model: &Model, t: &Tensor, first: usize) -> Result<(), ToolError> {
    model.data(t)[first * t.row_bytes()..]
        .par_chunks_exact(t.row_bytes())
        .enumerate()
        .try_for_each_init(
            || vec![0.0; t.cols()],
            |x, (r, row)| check_row(model, t, first + r, row, x),
        )
}

/// Every weight finite; a partial superblock unpacks and packs to the same bytes. `x` takes
/// the weights of the row.
fn check_row(
    model: &Model,
    t: &Tensor,
    r: usize,
    row: &[u8],
    x: &mut [f32],
) -> Result<(), ToolError> {
    dequantize_row(t.dtype, row, x);
    if let Some(c) = x.iter().position(|v| !v.is_finite()) {
        return Err(failed(
            &model.path,
            format!(
                "tensor {}, row {r}, column {c} is {}; the source was damaged, quantise again from a sound one",
                t.name, x[c]
            ),
        ));
    }
    let partial = t.dtype.is_super() && !t.cols().is_multiple_of(256);
    if partial && !packs_back(t.dtype, row, t.cols()) {
        return Err(failed(
            &model.path,
            format!(
                "tensor {}, row {r}: the partial superblock does not pack back to its bytes; quantise again",
                t.name
            ),
        ));
    }
    Ok(())
}

fn packs_back(dtype: DType, row: &[u8], cols: usize) -> bool {
    let Some(facts) = dtype.facts() else {
        return true;
    };
    let part = &row[cols / 256 * facts.bytes..];
    let mut whole = [0; tail::MAX_BLOCK];
    let mut again = [0; tail::MAX_BLOCK];
    tail::expand(dtype, part, cols % 256, &mut whole[..facts.bytes]);
    tail::compact(
        dtype,
        &whole[..facts.bytes],
        cols % 256,
        &mut again[..part.len()],
    );
    again[..part.len()] == *part
}

fn distances(model: &Model, source: &Model) -> Result<Vec<Distance>, ToolError> {
    let mut out = Vec::new();
    for t in model.tensors.iter().filter(|t| t.is_matrix()) {
        // A tied model may have been made from the source's output.
        let tied = t.name == "token_embd.weight" && model.tensor("output.weight").is_none();
        let twin = if tied {
            source.tensor("output.weight")
        } else {
            None
        }
        .or_else(|| source.tensor(&t.name));
        let Some(s) = twin.filter(|s| s.shape == t.shape) else {
            return Err(failed(
                &source.path,
                format!(
                    "it has no tensor {} of shape {:?}; give the file this one was made from",
                    t.name, t.shape
                ),
            ));
        };
        let rows = ((1 << 18) / t.cols()).max(1);
        let (error, norm) = (0..t.rows().div_ceil(rows))
            .into_par_iter()
            .map(|i| {
                let range = i * rows..t.rows().min((i + 1) * rows);
                let (x, y) = (model.rows(t, range.clone()), source.rows(s, range));
                let square = |a: f32| f64::from(a) * f64::from(a);
                let error: f64 = x.iter().zip(&y).map(|(x, y)| square(x - y)).sum();
                (error, y.iter().map(|&y| square(y)).sum::<f64>())
            })
            .reduce(|| (0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        let relative_rms = if norm == 0.0 {
            error.sqrt()
        } else {
            (error / norm).sqrt()
        };
        out.push(Distance {
            name: t.name.clone(),
            dtype: t.dtype.name(),
            relative_rms,
        });
    }
    out.sort_by(|a, b| b.relative_rms.total_cmp(&a.relative_rms));
    Ok(out)
}

/// `NAME TYPE BLAKE3` of each tensor's weights as little-endian fp32, to compare with another
/// program's unpacking.
pub fn digests(model: &Model) -> Vec<String> {
    let digest = |t: &Tensor| {
        let mut hasher = blake3::Hasher::new();
        let rows = ((1 << 20) / t.cols()).max(1);
        for first in (0..t.rows()).step_by(rows) {
            let x = model.rows(t, first..t.rows().min(first + rows));
            x.iter().for_each(|v| {
                hasher.update(&v.to_le_bytes());
            });
        }
        format!(
            "{} {} {}",
            t.name,
            t.dtype.name(),
            hasher.finalize().to_hex()
        )
    };
    model.tensors.par_iter().map(digest).collect()
}
