//! The model files: `.myq` containers and GGUF, read from bytes.
//!
//! Both parsers take the whole file as `&[u8]` (mapped or read, that is the caller's affair),
//! check every count, offset and length in it before using it, and hand out views into the
//! same bytes. They allocate in proportion to the bytes of the file's header, and end with
//! one [`Error`] per kind of malformation; the messages name the tensor or key and the byte
//! offset, and the caller adds the path.
//!
//! * [`gguf`]: GGUF versions 2 and 3 (little-endian), reader and writer.
//! * [`myq`]: our own container, reader and streaming writer; `docs/format.md` gives each byte.
//! * [`atomic`]: files that appear whole under their name or not at all.
//!
//! ```
//! use myq_format::{Kind, gguf::Builder, gguf::Gguf, sniff};
//! use myq_blocks::dtype::DType;
//!
//! let mut builder = Builder::new();
//! builder.str("general.architecture", "llama")?;
//! builder.tensor("output_norm.weight", DType::F32, &[2])?;
//! let file = builder.to_vec(&[&[0; 8]])?;
//!
//! assert_eq!(sniff(&file), Some(Kind::Gguf));
//! let model = Gguf::parse(&file)?;
//! assert_eq!(model.str("general.architecture"), Some("llama"));
//! assert_eq!(model.data(&model.tensors()[0]).len(), 8);
//! # Ok::<(), myq_format::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod atomic;
mod cursor;
pub mod error;
pub mod gguf;
pub mod myq;
mod tensor;

pub use error::Error;
pub use tensor::TensorInfo;

/// Which of the two file formats some bytes begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// GGUF, whatever version and byte order.
    Gguf,
    /// Our own container, whatever version.
    Myq,
}

/// Tells the format from the first four bytes; `None` if it is neither.
pub fn sniff(bytes: &[u8]) -> Option<Kind> {
    match bytes.first_chunk::<4>()? {
        gguf::MAGIC => Some(Kind::Gguf),
        myq::MAGIC => Some(Kind::Myq),
        _ => None,
    }
}
