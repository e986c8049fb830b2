//! A quantisation from start to end, resumable.
//!
//! 1. *Load and split*: the plan, the samples.
//! 2. *Hessian*, 3. *quantise and compensate*: [`crate::walk`], layer by layer.
//! 4. *Group and pack*: each matrix's rows in their format.
//! 5. *Write*: the file in its layout, from the kept rows.
//!
//! Stages 2 to 4 keep what they finish in the work folder. Without calibration there is nothing
//! worth keeping, and stage 5 quantises as it writes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use myq_blocks::encode::Grid;
use myq_blocks::{DType, Layout};
use serde_json::json;

use crate::calibration::Samples;
use crate::model::Model;
use crate::quantize::{self, Summary};
use crate::recipe::{Recipe, Step};
use crate::walk::{Outcome, Walk};
use crate::work::Work;
use crate::{ToolError, import};

/// What to do.
pub struct Job<'a> {
    /// The source.
    pub model: &'a Model,
    /// How.
    pub recipe: &'a Recipe,
    /// Its plan.
    pub steps: &'a [Step],
    /// Calibration tokens.
    pub samples: Option<&'a Samples>,
    /// Layout of the result.
    pub layout: Layout,
    /// Folder for what is finished.
    pub work: PathBuf,
    /// Whether the folder stays at the end.
    pub keep_work: bool,
}

/// Does it.
///
/// # Errors
/// A damaged source, texts that do not reach a matrix, a full disk.
pub fn run(job: &Job<'_>, out: &Path) -> Result<Summary, ToolError> {
    let (Some(samples), Some((_, method))) = (job.samples, &job.recipe.calibrated) else {
        let q = quantize::Calibrated::none();
        return quantize::quantize(job.model, job.recipe, job.steps, job.layout, &q, out);
    };
    let formats: BTreeMap<&str, DType> = job
        .steps
        .iter()
        .map(|s| (&job.model.tensors[s.source], s.dtype))
        .filter(|(t, dtype)| t.is_matrix() && t.dtype != *dtype && has_even_grid(*dtype))
        .map(|(t, dtype)| (t.name.as_str(), dtype))
        .collect();
    let plan: Vec<String> = job
        .steps
        .iter()
        .map(|s| format!("{}={}", s.name, s.dtype.name()))
        .collect();
    let manifest = json!({
        "tool": import::TOOL,
        "sources": job.model.hashes(),
        "recipe": job.recipe.as_json(),
        "plan": plan,
        "samples": samples.hash,
    });
    let (work, known) = Work::open(&job.work, &manifest)?;
    if known {
        eprintln!("going on with what {} holds", job.work.display());
    }
    let label = format!("quantising to {}", job.recipe.name());
    let walk = Walk {
        model: job.model,
        method,
        format: &|name| formats.get(name).copied(),
        tied: job.steps.iter().all(|s| s.name != "output.weight"),
        work: &work,
        label: &label,
    };
    walk.run(&samples.tokens)?;
    let rows = |name: &str| work.rows(name).map(|(_, rows)| rows);
    let calibrated = quantize::Calibrated {
        rows: &rows,
        hash: Some(samples.hash.clone()),
    };
    let mut summary = quantize::quantize(
        job.model,
        job.recipe,
        job.steps,
        job.layout,
        &calibrated,
        out,
    )?;
    let names = job.steps.iter().map(|s| &job.model.tensors[s.source].name);
    summary.outcomes = names.filter_map(|name| Outcome::of(&work, name)).collect();
    for o in &summary.outcomes {
        let notes = [
            (o.clipped > 0).then(|| quantize::clipped(o.clipped)),
            (o.damping > method.damping).then(|| {
                let to = o.damping;
                format!("its second moments could not be factored; damping rose to {to}")
            }),
            (o.dead > 0).then(|| {
                format!(
                    "{} inputs are zero for all {} calibration tokens; their columns are rounded by themselves",
                    o.dead, o.tokens
                )
            }),
        ];
        let all = notes.into_iter().flatten();
        summary
            .notes
            .extend(all.map(|note| format!("{}: {note}", o.name)));
        summary.clipped += o.clipped;
    }
    if !job.keep_work {
        work.remove()?;
    }
    Ok(summary)
}

/// Whether codes and scales can be moved one by one: the others are quantised as without
/// calibration.
fn has_even_grid(dtype: DType) -> bool {
    Grid::of(dtype).is_some_and(|grid| grid.even)
}
