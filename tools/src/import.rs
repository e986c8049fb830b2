//! `myq import`: any source into one `.myq` file, weights as they are.

use std::path::Path;

use myq_format::myq::{Header, MyqWriter, Provenance, TensorSpec};
use serde_json::{Value, json};

use crate::model::Model;
use crate::{ToolError, progress};

/// Name and version of this program, for provenance.
pub const TOOL: &str = concat!("myq ", env!("CARGO_PKG_VERSION"));

/// Header of a file made from `model` by the recipe of this name.
pub(crate) fn header(model: &Model, name: &str, recipe: Value) -> Header {
    let before = model.provenance.clone();
    Header {
        // Serialising plain numbers and strings cannot fail.
        config: serde_json::to_value(&model.config).unwrap_or_default(),
        chat_template: model.chat_template.clone(),
        recipe,
        provenance: Provenance {
            tool: TOOL.into(),
            recipe: name.into(),
            // The first source counts: a quantised import names what was imported.
            sources: before
                .as_ref()
                .map_or_else(|| model.hashes(), |p| p.sources.clone()),
            calibration: before.and_then(|p| p.calibration),
        },
        layout: "plain".into(),
        tokenizer_kind: "myq".into(),
    }
}

/// Writes `model` to `out` with every tensor in its own format; gives the file's hash.
pub fn import(model: &Model, out: &Path) -> Result<String, ToolError> {
    let specs: Vec<TensorSpec> = model
        .tensors
        .iter()
        .map(|t| TensorSpec {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
        })
        .collect();
    let bar = progress::bar(
        model.tensors.iter().map(|t| t.bytes() as u64).sum(),
        "importing",
    );
    let header = header(model, "import", json!({ "name": "import" }));
    let fail = |error| ToolError::Write {
        path: out.to_owned(),
        error,
    };
    let mut writer =
        MyqWriter::create(out, &header, &model.tokenizer.to_bytes(), &specs).map_err(fail)?;
    for (i, t) in model.tensors.iter().enumerate() {
        writer.write_tensor(i, model.data(t)).map_err(fail)?;
        bar.inc(t.bytes() as u64);
    }
    bar.finish_and_clear();
    writer.finish().map_err(fail)
}
