//! The one error type of this crate; its documentation is its message.

use std::path::PathBuf;

/// Why an engine could not start or take tokens.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The file cannot be opened or mapped.
    #[error("cannot open {path}: {error}")]
    Open {
        /// File.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The file is empty.
    #[error("{0} is empty; fetch or import the model again")]
    Empty(PathBuf),
    /// The file is not a usable model.
    #[error("{path}: {error}")]
    Model {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        error: myq_model::ModelError,
    },
    /// The kernels asked for need instructions that this processor lacks.
    #[error("kernels `{0}` cannot run on this processor; available: {1}")]
    Kernels(String, String),
    /// The tokens do not fit into the context.
    #[error(
        "{wanted} tokens do not fit into the context of {context}; raise --context or shorten the text"
    )]
    Context {
        /// Tokens that would be in the context.
        wanted: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// Token id.
        token: u32,
        /// Tokens in the vocabulary.
        vocab: usize,
    },
    /// Pages could not be locked.
    #[error(
        "cannot lock the model in memory: {0}; raise the limit (ulimit -l, LimitMEMLOCK=) or leave --mlock out"
    )]
    Lock(std::io::Error),
    /// The system does not give the memory for a copy in another layout.
    #[error(
        "cannot take {0} bytes to repack the model: {1}; use --repack never, or `myq relayout` the file once"
    )]
    Repack(u64, std::io::Error),
    /// The system gives no more threads.
    #[error(
        "cannot start {0} threads: {1}; ask for fewer with --threads, or raise TasksMax= or `ulimit -u`"
    )]
    Threads(usize, std::io::Error),
    /// The model computes nonsense.
    #[error("no logit is a finite number: the model is broken; `myq verify` may tell where")]
    NotFinite,
    /// Stopped before the first token.
    #[error("interrupted")]
    Interrupted,
    /// A setting makes no sense.
    #[error("{0}")]
    Setting(String),
}
