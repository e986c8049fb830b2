//! GGUF versions 2 and 3, little-endian: reader and writer.
//!
//! A file is a preamble (magic, version, counts), the metadata, the tensor table, and, from
//! the next multiple of the alignment on, the tensors' bytes. The layout is that of the
//! public GGUF specification; `docs/format.md` says what is accepted and what refused.

mod tensors;
mod value;
mod write;

use std::collections::HashMap;

pub use value::{Array, Str, Value, ValueType, Values};
pub use write::{Body, Builder};

use crate::cursor::Cursor;
use crate::tensor::{MAX_TENSORS, slice};
use crate::{Error, TensorInfo};

/// First four bytes of a file.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// Alignment of tensors where the metadata name none.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// The metadata key with the alignment.
pub const ALIGNMENT_KEY: &str = "general.alignment";

/// Most metadata keys; published files have some dozens.
const MAX_KEYS: u64 = 1 << 16;
/// Longest key or tensor name in bytes, as the GGUF specification has it for keys.
const MAX_NAME: u64 = 65_535;
/// Fewest bytes of a metadata entry: empty key, type, one byte.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Fewest bytes of a row of the tensor table: empty name, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// A GGUF file, checked as a whole, with views into its bytes.
#[derive(Clone, Debug)]
pub struct Gguf<'a> {
    bytes: &'a [u8],
    version: u32,
    alignment: u64,
    metadata: Vec<(&'a str, Value<'a>)>,
    by_key: HashMap<&'a str, usize>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl<'a> Gguf<'a> {
    /// Checks the whole file but for the tensors' contents.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let mut cursor = Cursor::new(bytes);
        let version = read_preamble(&mut cursor)?;
        let tensor_count = read_count(&mut cursor, "tensors", MAX_TENSORS)?;
        let key_count = read_count(&mut cursor, "metadata keys", MAX_KEYS)?;

        let (metadata, by_key) = read_metadata(&mut cursor, key_count)?;
        let alignment = alignment(by_key.get(ALIGNMENT_KEY).map(|&i| &metadata[i].1))?;
        let (tensors, by_name) = tensors::read(&mut cursor, tensor_count, alignment)?;
        Ok(Gguf {
            bytes,
            version,
            alignment,
            metadata,
            by_key,
            tensors,
            by_name,
        })
    }

    /// Version of the file, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of the tensors in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        self.by_key.get(key).map(|&i| &self.metadata[i].1)
    }

    /// All metadata in the order of the file.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = (&'a str, &Value<'a>)> {
        self.metadata.iter().map(|(key, value)| (*key, value))
    }

    /// All tensors in the order of the table.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The bytes of one of this file's tensors.
    pub fn data(&self, tensor: &TensorInfo) -> &'a [u8] {
        slice(self.bytes, tensor.offset, tensor.bytes)
    }

    /// A string value; `None` if absent, of another type, or not UTF-8.
    pub fn str(&self, key: &str) -> Option<&'a str> {
        self.get(key)?.as_str()
    }

    /// An integer value of any width that fits; `None` if absent or of another type.
    pub fn u32(&self, key: &str) -> Option<u32> {
        self.get(key)?.as_integer()?.try_into().ok()
    }

    /// As [`Gguf::u32`], for 64 bits.
    pub fn u64(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_integer()?.try_into().ok()
    }

    /// A floating-point value of either width, rounded to `f32`.
    pub fn f32(&self, key: &str) -> Option<f32> {
        self.get(key)?.as_float().map(|v| v as f32)
    }

    /// A truth value; `None` if absent or of another type.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(v) => Some(*v),
            _ => None,
        }
    }

    /// An array; `None` if absent or of another type.
    pub fn array(&self, key: &str) -> Option<&Array<'a>> {
        match self.get(key)? {
            Value::Array(a) => Some(a),
            _ => None,
        }
    }
}

/// Magic and version; the version returned.
fn read_preamble(cursor: &mut Cursor<'_>) -> Result<u32, Error> {
    let magic = cursor.take(4, "the magic number")?;
    if magic != MAGIC {
        return Err(Error::Magic {
            expected: "GGUF",
            found: magic.to_vec(),
        });
    }
    match cursor.u32("the version")? {
        version @ (2 | 3) => Ok(version),
        swapped if (1..=3).contains(&swapped.swap_bytes()) => Err(Error::BigEndian),
        found => Err(Error::Version {
            format: "GGUF",
            found,
            supported: "2 and 3",
        }),
    }
}

fn read_count(cursor: &mut Cursor<'_>, what: &'static str, limit: u64) -> Result<u64, Error> {
    let offset = cursor.offset();
    let count = cursor.u64(what)?;
    if count > limit {
        return Err(Error::TooMany {
            what,
            count,
            limit,
            offset,
        });
    }
    Ok(count)
}

/// Refuses a count of entries that the rest of the file cannot hold.
fn check_count(
    cursor: &Cursor<'_>,
    what: &'static str,
    count: u64,
    min_bytes: u64,
) -> Result<(), Error> {
    if count * min_bytes > cursor.rest() {
        let (offset, rest) = (cursor.offset(), cursor.rest());
        return Err(Error::CountBeyondFile {
            what,
            count,
            offset,
            rest,
        });
    }
    Ok(())
}

/// A key or tensor name: bounded length, UTF-8.
fn read_name<'a>(cursor: &mut Cursor<'a>, what: &'static str) -> Result<&'a str, Error> {
    let offset = cursor.offset();
    let bytes = cursor.u64(what)?;
    if bytes > MAX_NAME {
        return Err(Error::NameTooLong {
            what,
            offset,
            bytes,
            limit: MAX_NAME,
        });
    }
    let name = cursor.take(bytes, what)?;
    std::str::from_utf8(name).map_err(|_| Error::NameNotUtf8 { what, offset })
}

type Metadata<'a> = (Vec<(&'a str, Value<'a>)>, HashMap<&'a str, usize>);

fn read_metadata<'a>(cursor: &mut Cursor<'a>, count: u64) -> Result<Metadata<'a>, Error> {
    check_count(cursor, "the metadata", count, MIN_KEY_BYTES)?;
    let mut metadata = Vec::new();
    let mut by_key = HashMap::new();
    for index in 0..count as usize {
        let offset = cursor.offset();
        let key = read_name(cursor, "a metadata key")?;
        if by_key.insert(key, index).is_some() {
            return Err(Error::DuplicateKey {
                key: key.to_owned(),
                offset,
            });
        }
        metadata.push((key, value::read_typed(cursor, key)?));
    }
    Ok((metadata, by_key))
}

/// The alignment that `general.alignment` asks for.
fn alignment(value: Option<&Value<'_>>) -> Result<u64, Error> {
    let Some(value) = value else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value.as_integer().and_then(|v| u64::try_from(v).ok()) {
        Some(n) if n.is_power_of_two() && (8..=65_536).contains(&n) => Ok(n),
        Some(n) => Err(Error::Alignment {
            value: n.to_string(),
        }),
        None => Err(Error::Alignment {
            value: format!("of type {:?}", value.value_type()),
        }),
    }
}
