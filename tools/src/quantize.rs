//! `myq quantize`: a source into a low-bit `.myq` file.

use std::path::Path;

use myq_blocks::encode::{EncodeError, RowReport, encode_rows};
use myq_blocks::{DType, Layout, panels::PANEL};
use myq_format::myq::{MyqWriter, TensorSpec};
use rayon::prelude::*;
use serde::Serialize;

use crate::model::{Model, Tensor};
use crate::recipe::{Recipe, Step};
use crate::walk::Outcome;
use crate::{ToolError, import, layout, progress};

/// What a quantisation did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Hash of the file.
    pub hash: String,
    /// Bytes of tensors, and weights.
    pub bytes: u64,
    /// Weights.
    pub weights: u64,
    /// Weights clipped because fp16 cannot hold their scale.
    pub clipped: usize,
    /// Notes on tensors that kept a wider format.
    pub notes: Vec<String>,
    /// What became of each matrix that was calibrated.
    pub outcomes: Vec<Outcome>,
}

impl Summary {
    /// Bits a weight takes on average, scales included.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.weights as f64
    }
}

/// What calibration has already made.
pub struct Calibrated<'a> {
    /// Rows of a source's tensor in its new format, plain; none where it is quantised here.
    pub rows: &'a dyn Fn(&str) -> Option<Vec<u8>>,
    /// BLAKE3 of the calibration tokens, for the file.
    pub hash: Option<String>,
}

impl Calibrated<'_> {
    /// Nothing.
    pub fn none() -> Calibrated<'static> {
        Calibrated {
            rows: &|_| None,
            hash: None,
        }
    }
}

/// Bytes a tensor takes in the format of its step.
pub fn step_bytes(model: &Model, step: &Step) -> u64 {
    let t = &model.tensors[step.source];
    step.dtype
        .row_bytes(t.cols())
        .map_or(0, |b| (b * t.rows()) as u64)
}

/// Sizes of a plan, before anything is quantised.
pub fn forecast(model: &Model, steps: &[Step]) -> Summary {
    let mut s = Summary::default();
    for step in steps {
        let t = &model.tensors[step.source];
        s.bytes += step_bytes(model, step);
        s.weights += t.len() as u64;
        s.notes
            .extend(step.note.as_ref().map(|n| format!("{}: {n}", t.name)));
    }
    s
}

/// Quantises `model` by `steps` into `out`, stored in `layout`, on all of rayon's threads; the
/// bytes do not depend on their number.
///
/// # Errors
/// A tensor of the source that does not match its checksum, or holds weights that are not
/// finite; a file that cannot be written.
pub fn quantize(
    model: &Model,
    recipe: &Recipe,
    steps: &[Step],
    layout: Layout,
    calibrated: &Calibrated<'_>,
    out: &Path,
) -> Result<Summary, ToolError> {
    let spec = |s: &Step| TensorSpec {
        name: s.name.clone(),
        dtype: s.dtype,
        shape: model.tensors[s.source].shape.clone(),
    };
    let specs: Vec<TensorSpec> = steps.iter().map(spec).collect();
    let mut summary = forecast(model, steps);
    let bar = progress::bar(
        summary.weights,
        &format!("quantising to {} bits", recipe.bits),
    );
    let mut header = import::header(model, &recipe.name(), recipe.as_json(), layout);
    if calibrated.hash.is_some() {
        header.provenance.calibration.clone_from(&calibrated.hash);
    }
    let fail = |error| ToolError::Write {
        path: out.to_owned(),
        error,
    };
    let mut writer =
        MyqWriter::create(out, &header, &model.tokenizer.to_bytes(), &specs).map_err(fail)?;
    for (i, step) in steps.iter().enumerate() {
        let t = &model.tensors[step.source];
        model.check(t)?;
        let form = (step.dtype, layout::stored(layout, step.dtype, &t.shape));
        if let Some(plain) = (calibrated.rows)(&t.name) {
            let mut bytes = vec![0; plain.len()];
            layout::convert(
                step.dtype,
                t.cols(),
                Layout::Plain,
                &plain,
                form.1,
                &mut bytes,
            );
            bar.inc(t.len() as u64);
            writer.write_tensor(i, &bytes).map_err(fail)?;
            continue;
        }
        let (bytes, report) = tensor(model, t, form, recipe, &|n| bar.inc(n as u64))
            .map_err(|error| ToolError::encode(&model.path, &t.name, error))?;
        if report.clipped > 0 {
            let note = format!("{}: {}", t.name, clipped(report.clipped));
            summary.notes.push(note);
        }
        summary.clipped += report.clipped;
        writer.write_tensor(i, &bytes).map_err(fail)?;
    }
    bar.finish_and_clear();
    summary.hash = writer.finish().map_err(fail)?;
    Ok(summary)
}

/// What is said about clipped weights.
pub(crate) fn clipped(weights: usize) -> String {
    format!("{weights} weights clipped, fp16 cannot hold their scale")
}

fn finite(x: &[f32], first: usize) -> Result<RowReport, EncodeError> {
    match x.iter().position(|v| !v.is_finite()) {
        Some(i) => Err(EncodeError::NonFinite {
            index: first + i,
            value: x[i],
        }),
        None => Ok(RowReport::default()),
    }
}

/// One tensor in its new format and layout; unchanged codes where the format is the same.
fn tensor(
    model: &Model,
    t: &Tensor,
    (dtype, layout): (DType, Layout),
    recipe: &Recipe,
    done: &(dyn Fn(usize) + Sync),
) -> Result<(Vec<u8>, RowReport), EncodeError> {
    let cols = t.cols();
    let row_bytes = dtype
        .row_bytes(cols)
        .ok_or(EncodeError::Columns { dtype, cols })?;
    let mut bytes = vec![0; row_bytes * t.rows()];
    // About a megabyte of fp32 at a time, whole panels.
    let rows = ((1 << 18) / cols).max(1).next_multiple_of(PANEL);
    let parts: Vec<RowReport> = bytes
        .par_chunks_mut(rows * row_bytes)
        .enumerate()
        .map(|(i, out)| {
            let first = i * rows;
            let x = model.rows(t, first..first + out.len() / row_bytes);
            if t.dtype == dtype {
                // Quantising again would only add error.
                let old = &model.data(t)[first * row_bytes..][..out.len()];
                layout::convert(dtype, cols, t.layout, old, layout, out);
                done(x.len());
                return finite(&x, first * cols);
            }
            let mut plain = vec![0; out.len()];
            let report = encode_rows(dtype, recipe.method, cols, &x, None, &mut plain);
            layout::convert(dtype, cols, Layout::Plain, &plain, layout, out);
            done(x.len());
            report.map_err(|e| match e {
                EncodeError::NonFinite { index, value } => EncodeError::NonFinite {
                    index: index + first * cols,
                    value,
                },
                other => other,
            })
        })
        .collect::<Result<_, _>>()?;
    let report = parts.into_iter().fold(RowReport::default(), |mut sum, r| {
        sum += r;
        sum
    });
    Ok((bytes, report))
}
