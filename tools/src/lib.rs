//! The host side: import, quantise, evaluate, compare, export and verify models.
#![forbid(unsafe_code)]

pub mod awq;
pub mod calibration;
pub mod compare;
pub mod error;
pub mod eval;
pub mod export;
pub mod guide;
mod hub;
pub mod import;
pub mod inspect;
pub mod job;
pub mod layout;
pub mod linalg;
pub mod logits;
pub mod model;
pub mod pass;
pub mod progress;
pub mod quantize;
pub mod quickstart;
pub mod recipe;
pub mod relayout;
pub mod selfcheck;
pub mod sensitivity;
pub mod solve;
pub mod states;
#[cfg(test)]
mod testing;
pub mod vector;
pub mod verify;
pub mod walk;
pub mod work;

pub use error::ToolError;

/// Writes a file that appears whole or not at all.
///
/// # Errors
/// Those of the system, with the path.
pub fn write_whole(path: &std::path::Path, data: &[u8]) -> Result<(), ToolError> {
    use std::io::Write;
    let fail = |error| ToolError::Write {
        path: path.to_owned(),
        error,
    };
    let mut file = myq_format::atomic::AtomicFile::create(path).map_err(fail)?;
    file.write_all(data)
        .map_err(|source| ToolError::write(path, source))?;
    file.commit().map_err(fail)
}
