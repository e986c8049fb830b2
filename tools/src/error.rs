//! The one error type of the host tool; its documentation is its message.

use std::path::PathBuf;

/// Why a command of the host tool ended.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// A file cannot be read.
    #[error("cannot read {path}: {error}")]
    Read {
        /// File.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// A file cannot be mapped or run.
    #[error(transparent)]
    Engine(#[from] myq_engine::EngineError),
    /// A file is damaged or not a model.
    #[error("{path}: {error}")]
    Model {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        error: myq_model::ModelError,
    },
    /// The model cannot be written.
    #[error("cannot write {path}: {error}")]
    Write {
        /// File.
        path: PathBuf,
        /// What is wrong.
        error: myq_format::Error,
    },
    /// A tensor cannot be quantised.
    #[error("tensor {name} of {path}: {error}")]
    Encode {
        /// Source file.
        path: PathBuf,
        /// Tensor.
        name: String,
        /// What is wrong.
        error: myq_blocks::encode::EncodeError,
    },
    /// A model-hub directory is incomplete or damaged.
    #[error("{path}: {problem}")]
    Hub {
        /// Directory or file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] std::io::Error),
    /// A check of `verify` failed.
    #[error("{path}: {problem}")]
    Verify {
        /// File.
        path: PathBuf,
        /// Which tensor failed, and how.
        problem: String,
    },
    /// Anything else that the user can mend.
    #[error("{0}")]
    Setting(String),
}

impl ToolError {
    /// A tensor of this file cannot be quantised.
    pub fn encode(
        path: &std::path::Path,
        name: &str,
        error: myq_blocks::encode::EncodeError,
    ) -> ToolError {
        ToolError::Encode {
            path: path.to_owned(),
            name: name.to_owned(),
            error,
        }
    }

    /// The system refuses to write to this file.
    pub fn write(path: &std::path::Path, source: std::io::Error) -> ToolError {
        ToolError::Write {
            path: path.to_owned(),
            error: myq_format::Error::Io {
                action: "write",
                path: path.to_owned(),
                source,
            },
        }
    }

    /// An error of the model crate in this file.
    pub fn model(path: &std::path::Path, error: impl Into<myq_model::ModelError>) -> ToolError {
        ToolError::Model {
            path: path.to_owned(),
            error: error.into(),
        }
    }
}
