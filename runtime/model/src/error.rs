//! The one error type of this crate; its documentation is its message.

/// Why a file cannot be used as a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Neither `.myq` nor GGUF.
    #[error(
        "the file starts with neither the .myq nor the GGUF signature; give a .myq or .gguf file"
    )]
    Signature,
    /// The container is damaged.
    #[error(transparent)]
    Format(#[from] myq_format::Error),
    /// A family without a forward pass here.
    #[error(
        "models of the family `{0}` are not supported; supported are llama (Llama, SmolLM2, Mistral) and qwen2"
    )]
    Family(String),
    /// A configuration that cannot be.
    #[error("{0}")]
    Config(String),
    /// A tensor is absent.
    #[error("tensor {0} is missing; the file is not a complete model, fetch or import it again")]
    Missing(String),
    /// A tensor that the forward pass would leave out.
    #[error("tensor {0} (and {n} more) has no place in a model of this configuration; results would be wrong without it", n = .1 - 1)]
    Unused(String, usize),
    /// A tensor has another shape than the configuration asks for.
    #[error("tensor {name} has shape {got:?} (columns first), the configuration asks for {want:?}")]
    Shape {
        /// Tensor.
        name: String,
        /// Shape found.
        got: Vec<u64>,
        /// Shape needed.
        want: Vec<u64>,
    },
    /// A tensor holds NaN or infinity where that breaks the model.
    #[error("tensor {0} holds values that are not finite; the source is damaged")]
    NotFinite(String),
    /// The tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::TokenizerError),
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] crate::template::TemplateError),
}
