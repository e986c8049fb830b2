//! Why a tokenizer cannot be used; the documentation is the message.

/// An error of reading or building a tokenizer. Encoding and decoding cannot fail.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TokenizerError {
    /// The model kind of the vocabulary is not byte-level BPE or SentencePiece BPE.
    #[error(
        "tokenizers of the kind `{0}` are not supported; supported are byte-level BPE \
         (GGUF `gpt2`) and SentencePiece BPE (GGUF `llama`)"
    )]
    Model(String),
    /// A byte-level BPE vocabulary without the name of its pre-tokeniser.
    #[error(
        "the GGUF does not name its pre-tokeniser (tokenizer.ggml.pre), and guessing one would \
         lower the quality unnoticed; convert the model again with a current converter. \
         Known names: {known}"
    )]
    NoPreTokeniser {
        /// All known names.
        known: String,
    },
    /// A pre-tokeniser name without a verified pattern.
    #[error("the pre-tokeniser `{name}` is not known; known names: {known}")]
    PreTokeniser {
        /// The name in the file.
        name: String,
        /// All known names.
        known: String,
    },
    /// A component of tokenizer.json without a counterpart here.
    #[error(
        "tokenizer.json: {what} is not supported; ids would differ from the reference \
         tokenizer, so the model is refused"
    )]
    Unsupported {
        /// The component and its value.
        what: String,
    },
    /// A split pattern that cannot be compiled.
    #[error(
        "the split pattern `{pattern}` cannot be used: {why}; look-around other than a final \
         `\\s+(?!\\S)|\\s+`, possessive quantifiers and back-references are not supported"
    )]
    Pattern {
        /// The regular expression.
        pattern: String,
        /// What the compiler says.
        why: String,
    },
    /// Text that is not the JSON of a tokenizer.
    #[error("{file} cannot be read: {why}; fetch the file again")]
    Json {
        /// tokenizer.json or tokenizer_config.json.
        file: &'static str,
        /// What the parser says.
        why: String,
    },
    /// A vocabulary that contradicts itself.
    #[error("the vocabulary is damaged: {0}; fetch or import the model again")]
    Vocabulary(String),
    /// A serialised tokenizer that is damaged or from another version.
    #[error("the tokenizer section is damaged at byte {at}: {what}; import the model again")]
    Section {
        /// Offset within the section, in bytes.
        at: usize,
        /// What is wrong there.
        what: String,
    },
    /// No GGUF name stands for the tokenizer's pre-tokeniser.
    #[error(
        "no GGUF name stands for its pre-tokeniser: other programs would cut text into other \
         tokens; keep the model in its own format"
    )]
    NoName,
}
