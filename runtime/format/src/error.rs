//! Everything that can be wrong with a model file; the message is the documentation.

use std::io;
use std::path::PathBuf;

/// One variant per malformation. Offsets are bytes from the start of the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of each variant documents it and its fields"
)]
pub enum Error {
    // Both formats.
    #[error(
        "not a {expected} file: it begins with {found:02x?}; give a .myq or .gguf file (safetensors are imported with `myq import`)"
    )]
    Magic {
        expected: &'static str,
        found: Vec<u8>,
    },
    #[error(
        "{format} version {found} is not supported, only {supported}; convert the file again with a matching tool"
    )]
    Version {
        format: &'static str,
        found: u32,
        supported: &'static str,
    },
    #[error(
        "file ends at byte {file} but {what} at offset {offset} needs {need} bytes; the file is cut short or damaged, copy it again"
    )]
    Truncated {
        what: &'static str,
        offset: u64,
        need: u64,
        file: u64,
    },
    #[error("tensor name {tensor:?} occurs twice; the file is damaged, convert it again")]
    DuplicateTensor { tensor: String },
    #[error("tensor number {index} has an empty name; the file is damaged, convert it again")]
    EmptyName { index: u64 },
    #[error("tensor {tensor:?} has {dims} dimensions; 1 to 4 are allowed")]
    Dimensions { tensor: String, dims: u64 },
    #[error("tensor {tensor:?} has the shape {shape:?} with a dimension of zero")]
    ZeroDimension { tensor: String, shape: Vec<u64> },
    #[error("tensor {tensor:?} has the shape {shape:?}, which is too large to address")]
    ShapeOverflow { tensor: String, shape: Vec<u64> },
    #[error(
        "tensor {tensor:?} has rows of {cols} weights, which {dtype} cannot hold (it needs a multiple of {multiple}); requantise the tensor to another type"
    )]
    RowLength {
        tensor: String,
        dtype: String,
        cols: u64,
        multiple: u64,
    },
    #[error("{first:?} and {second:?} overlap at offset {offset}; the file is damaged")]
    Overlap {
        first: String,
        second: String,
        offset: u64,
    },
    #[error("{what}: {count} is more than the {limit} allowed, at offset {offset}")]
    TooMany {
        what: &'static str,
        count: u64,
        limit: u64,
        offset: u64,
    },

    // GGUF.
    #[error(
        "this GGUF file is big-endian; only little-endian files are supported, convert it first"
    )]
    BigEndian,
    #[error(
        "{what} at offset {offset} announces {count} entries, but only {rest} bytes follow; the file is cut short or damaged"
    )]
    CountBeyondFile {
        what: &'static str,
        count: u64,
        offset: u64,
        rest: u64,
    },
    #[error("{what} at offset {offset} is {bytes} bytes long; at most {limit} are allowed")]
    NameTooLong {
        what: &'static str,
        offset: u64,
        bytes: u64,
        limit: u64,
    },
    #[error("{what} at offset {offset} is not UTF-8; the file is damaged")]
    NameNotUtf8 { what: &'static str, offset: u64 },
    #[error("string value {shown:?} is not UTF-8 from its byte {at} on")]
    StringNotUtf8 { shown: String, at: usize },
    #[error("metadata key {key:?} occurs twice, the second time at offset {offset}")]
    DuplicateKey { key: String, offset: u64 },
    #[error("metadata key {key:?} has the unknown value type {id} at offset {offset}")]
    UnknownValueType { key: String, id: u32, offset: u64 },
    #[error("metadata key {key:?} nests arrays deeper than {limit} at offset {offset}")]
    TooDeep {
        key: String,
        limit: u32,
        offset: u64,
    },
    #[error(
        "metadata key {key:?} holds a truth value of {value} at offset {offset}; only 0 and 1 exist"
    )]
    BadBool { key: String, value: u8, offset: u64 },
    #[error("general.alignment is {value}; it must be a power of two from 8 to 65536")]
    Alignment { value: String },
    #[error(
        "tensor {tensor:?} has the unknown type number {id}; a newer program wrote this file, convert the model to a type such as Q4_K or Q8_0"
    )]
    UnknownTensorType { tensor: String, id: u32 },
    #[error(
        "tensor {tensor:?} has the type {name} ({id}), which is not supported; take the model as F16, BF16, Q8_0 or Q2_K to Q6_K instead, or requantise it from the original"
    )]
    UnsupportedTensorType {
        tensor: String,
        name: &'static str,
        id: u32,
    },
    #[error(
        "tensor {tensor:?} lies at data offset {offset}, not a multiple of the alignment {alignment}"
    )]
    Misaligned {
        tensor: String,
        offset: u64,
        alignment: u64,
    },
    #[error(
        "tensor {tensor:?} needs {bytes} bytes from data offset {offset} on, but the file holds only {data} bytes of data; it is cut short, copy it again"
    )]
    TensorBeyondFile {
        tensor: String,
        offset: u64,
        bytes: u64,
        data: u64,
    },
    #[error(
        "tensor {tensor:?} has the type {dtype}, which GGUF does not know; export it as Q2_K to Q6_K or Q8_0"
    )]
    NotInGguf { tensor: String, dtype: String },

    // .myq.
    #[error(
        "file holds {found} bytes but its header says {expected}: {excess} bytes follow the end; the file is damaged"
    )]
    TrailingBytes {
        expected: u64,
        found: u64,
        excess: u64,
    },
    #[error("header length is {found} bytes; at most {limit} are allowed")]
    HeaderTooLarge { found: u64, limit: u64 },
    #[error(
        "reserved bytes at offset {offset} are not zero; the file is damaged or from a newer program"
    )]
    Reserved { offset: u64 },
    #[error(
        "header checksum is {found}, but the file says {expected}; the header is damaged, copy the file again"
    )]
    HeaderChecksum { expected: String, found: String },
    #[error("header is not what version 1 prescribes: {source}")]
    HeaderJson { source: serde_json::Error },
    #[error("header field {field} {problem}")]
    HeaderField {
        field: String,
        problem: &'static str,
    },
    #[error(
        "layout {layout:?} is unknown; this file was packed for another processor or by a newer program, pack it again"
    )]
    UnknownLayout { layout: String },
    #[error(
        "tensor {tensor:?} has the unknown type {dtype:?}; the file is damaged or from a newer program"
    )]
    UnknownDType { tensor: String, dtype: String },
    #[error(
        "{section:?} begins at offset {found} but the section before it ends so that it must begin at {expected}; the file is damaged"
    )]
    Hole {
        section: String,
        expected: u64,
        found: u64,
    },
    #[error("padding byte at offset {offset} is not zero; the file is damaged, copy it again")]
    Padding { offset: u64 },
    #[error(
        "tensor {tensor:?} of type {dtype} and shape {shape:?} takes {expected} bytes, but {found} are given"
    )]
    ByteCount {
        tensor: String,
        dtype: String,
        shape: Vec<u64>,
        expected: u64,
        found: u64,
    },
    #[error(
        "{section:?} at offset {offset} does not match its checksum; the file is damaged, copy it again"
    )]
    Checksum { section: String, offset: u64 },
    #[error("tensor {tensor:?} carries no checksum")]
    NoChecksum { tensor: String },

    // Writers.
    #[error("tensor number {index} does not exist; {count} were declared")]
    NoSuchTensor { index: usize, count: usize },
    #[error("tensor {tensor:?} was already written")]
    WrittenTwice { tensor: String },
    #[error("tensor {tensor:?} was declared but never written; no file was made")]
    NeverWritten { tensor: String },
    #[error("cannot {action} {path}: {source}")]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("cannot write the file: {0}")]
    Write(#[from] io::Error),
}
