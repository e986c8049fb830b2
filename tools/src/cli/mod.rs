//! The commands that take more than a few flags, and what commands share.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use myq_blocks::Layout;
use myq_tools::ToolError;
use myq_tools::layout;
use myq_tools::model::Model;

pub(crate) mod calibrate;
pub(crate) mod compare;
pub(crate) mod eval;
pub(crate) mod quantize;

/// Order of rows in a file.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Order {
    /// Panels of eight rows, where a tensor's type has them
    Rows8,
    /// One row after another
    Plain,
    /// Whichever is fastest on this machine
    Auto,
}

impl Order {
    /// The layout.
    pub(crate) fn layout(self) -> Layout {
        match self {
            Order::Rows8 => Layout::Rows8,
            Order::Plain => Layout::Plain,
            Order::Auto => layout::of_this_machine(),
        }
    }
}

/// Prints a line; an error ends the function.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        writeln!(std::io::stdout().lock(), $($text)*)?
    }};
}
pub(crate) use say;

/// The source's name with another end, in this directory.
pub(crate) fn named(source: &Path, end: &str) -> PathBuf {
    let name = if source.is_dir() {
        source.file_name()
    } else {
        source.file_stem()
    };
    let name = name.map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned());
    PathBuf::from(name + end)
}

/// Writing over the source would pull the map from under the reader.
pub(crate) fn refuse_source(model: &Model, out: &Path) -> Result<(), ToolError> {
    if model.reads(out) {
        return Err(ToolError::Setting(format!(
            "{} is a file of the source itself; name another with --out",
            out.display()
        )));
    }
    Ok(())
}
