//! `myq relayout`: the same model with its rows in another order.

use std::path::Path;

use myq_blocks::Layout;
use myq_format::Kind;
use myq_format::myq::{Header, Myq, MyqWriter, TensorSpec};

use crate::model::Model;
use crate::{ToolError, import, progress};

/// Writes `model` to `out` in `layout`, every weight as it is; gives the file's hash.
///
/// Of a `.myq` file everything but the layout is taken over, recipe and provenance too, so
/// that there and back gives the same bytes; another source is imported.
///
/// # Errors
/// A tensor of the source that does not match its checksum; a file that cannot be written.
pub fn relayout(model: &Model, layout: Layout, out: &Path) -> Result<String, ToolError> {
    if model.kind != Some(Kind::Myq) {
        return import::import(model, layout, out);
    }
    let m = Myq::parse(model.files[0].bytes()).map_err(|e| ToolError::model(&model.path, e))?;
    let header = Header {
        layout: layout.name().into(),
        ..m.header().clone()
    };
    write(model, &header, m.tokenizer(), layout, out)
}

/// Writes all tensors of `model` in their own formats, one at a time.
pub(crate) fn write(
    model: &Model,
    header: &Header,
    tokenizer: &[u8],
    layout: Layout,
    out: &Path,
) -> Result<String, ToolError> {
    let spec = |t: &crate::model::Tensor| TensorSpec {
        name: t.name.clone(),
        dtype: t.dtype,
        shape: t.shape.clone(),
    };
    let specs: Vec<TensorSpec> = model.tensors.iter().map(spec).collect();
    let total = model.tensors.iter().map(|t| t.bytes() as u64).sum();
    let bar = progress::bar(total, &format!("writing {}", layout.name()));
    let fail = |error| ToolError::Write {
        path: out.to_owned(),
        error,
    };
    let mut writer = MyqWriter::create(out, header, tokenizer, &specs).map_err(fail)?;
    for (i, t) in model.tensors.iter().enumerate() {
        model.check(t)?;
        writer
            .write_tensor(i, &model.data_in(t, layout))
            .map_err(fail)?;
        bar.inc(t.bytes() as u64);
    }
    bar.finish_and_clear();
    writer.finish().map_err(fail)
}
