//! `myq import`: any source into one `.myq` file, weights as they are.

use std::path::Path;

use myq_blocks::Layout;
use myq_format::myq::{Header, Provenance};
use serde_json::{Value, json};

use crate::model::Model;
use crate::{ToolError, relayout};

/// Name and version of this program, for provenance.
pub const TOOL: &str = concat!("myq ", env!("CARGO_PKG_VERSION"));

/// Header of a file made from `model` by the recipe of this name, stored in `layout`.
pub(crate) fn header(model: &Model, name: &str, recipe: Value, layout: Layout) -> Header {
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
        layout: layout.name().into(),
        tokenizer_kind: "myq".into(),
    }
}

/// Writes `model` to `out` with every tensor in its own format, stored in `layout`; gives the
/// file's hash.
pub fn import(model: &Model, layout: Layout, out: &Path) -> Result<String, ToolError> {
    let header = header(model, "import", json!({ "name": "import" }), layout);
    relayout::write(model, &header, &model.tokenizer.to_bytes(), layout, out)
}
