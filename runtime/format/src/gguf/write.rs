//! Writing GGUF version 3: the header from declarations, then the tensors in order.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};

use myq_blocks::dtype::DType;

use super::value::{Str, Value, ValueType};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_NAME, alignment, tensors};
use crate::Error;
use crate::cursor::align_up;

/// The head of a GGUF file: metadata and tensors in the order they were added.
///
/// The same calls give the same bytes. [`Builder::write`] then takes the tensors' contents.
#[derive(Clone, Debug)]
pub struct Builder {
    metadata: Vec<u8>,
    keys: BTreeSet<String>,
    alignment: u64,
    tensors: Vec<Declared>,
    names: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct Declared {
    name: String,
    dtype: DType,
    id: u32,
    shape: Vec<u64>,
    bytes: u64,
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

impl Builder {
    /// No metadata, no tensors.
    pub fn new() -> Self {
        Builder {
            metadata: Vec::new(),
            keys: BTreeSet::new(),
            alignment: DEFAULT_ALIGNMENT,
            tensors: Vec::new(),
            names: BTreeSet::new(),
        }
    }

    /// Adds any value, for instance one of another file. The key `general.alignment` sets the
    /// alignment of the tensors as well.
    pub fn value(&mut self, key: &str, value: &Value<'_>) -> Result<&mut Self, Error> {
        if key == ALIGNMENT_KEY {
            self.alignment = alignment(Some(value))?;
        }
        self.key(key, value.value_type())?;
        value.encode(&mut self.metadata);
        Ok(self)
    }

    /// Adds an integer of 32 bits, the type GGUF uses for most numbers.
    pub fn u32(&mut self, key: &str, value: u32) -> Result<&mut Self, Error> {
        self.value(key, &Value::U32(value))
    }

    /// Adds a floating-point number.
    pub fn f32(&mut self, key: &str, value: f32) -> Result<&mut Self, Error> {
        self.value(key, &Value::F32(value))
    }

    /// Adds a truth value.
    pub fn bool(&mut self, key: &str, value: bool) -> Result<&mut Self, Error> {
        self.value(key, &Value::Bool(value))
    }

    /// Adds a string.
    pub fn str(&mut self, key: &str, value: &str) -> Result<&mut Self, Error> {
        self.value(key, &Value::String(Str(value.as_bytes())))
    }

    /// Adds an array of strings (of any bytes).
    pub fn strings<S: AsRef<[u8]>>(
        &mut self,
        key: &str,
        strings: impl IntoIterator<Item = S>,
    ) -> Result<&mut Self, Error> {
        self.array(key, ValueType::String, strings, |s, out| {
            Value::String(Str(s.as_ref())).encode(out);
        })
    }

    /// Adds an array of floating-point numbers.
    pub fn f32s(
        &mut self,
        key: &str,
        numbers: impl IntoIterator<Item = f32>,
    ) -> Result<&mut Self, Error> {
        self.array(key, ValueType::F32, numbers, |n, out| {
            out.extend(n.to_le_bytes())
        })
    }

    /// Adds an array of integers.
    pub fn i32s(
        &mut self,
        key: &str,
        numbers: impl IntoIterator<Item = i32>,
    ) -> Result<&mut Self, Error> {
        self.array(key, ValueType::I32, numbers, |n, out| {
            out.extend(n.to_le_bytes())
        })
    }

    fn array<T>(
        &mut self,
        key: &str,
        element: ValueType,
        items: impl IntoIterator<Item = T>,
        encode: impl Fn(T, &mut Vec<u8>),
    ) -> Result<&mut Self, Error> {
        self.key(key, ValueType::Array)?;
        self.metadata.extend((element as u32).to_le_bytes());
        let count_at = self.metadata.len();
        self.metadata.extend([0; 8]);
        let mut count = 0u64;
        for item in items {
            encode(item, &mut self.metadata);
            count += 1;
        }
        self.metadata[count_at..count_at + 8].copy_from_slice(&count.to_le_bytes());
        Ok(self)
    }

    fn key(&mut self, key: &str, value_type: ValueType) -> Result<(), Error> {
        let offset = self.metadata.len() as u64;
        check_name("a metadata key", key, offset)?;
        if !self.keys.insert(key.to_owned()) {
            return Err(Error::DuplicateKey {
                key: key.to_owned(),
                offset,
            });
        }
        put_str(&mut self.metadata, key);
        self.metadata.extend((value_type as u32).to_le_bytes());
        Ok(())
    }

    /// Declares a tensor of `shape` `[cols, rows, ...]`; its contents follow in the same order.
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[u64]) -> Result<&mut Self, Error> {
        let tensor = || name.to_owned();
        check_name("a tensor name", name, 0)?;
        if name.is_empty() {
            return Err(Error::EmptyName {
                index: self.tensors.len() as u64,
            });
        }
        let Some(id) = dtype.gguf_id() else {
            return Err(Error::NotInGguf {
                tensor: tensor(),
                dtype: dtype.name(),
            });
        };
        let bytes = tensors::tensor_bytes(name, dtype, shape)?;
        if !self.names.insert(tensor()) {
            return Err(Error::DuplicateTensor { tensor: tensor() });
        }
        let shape = shape.to_vec();
        self.tensors.push(Declared {
            name: tensor(),
            dtype,
            id,
            shape,
            bytes,
        });
        Ok(self)
    }

    /// Writes the header; the contents then go to the [`Body`].
    pub fn write<W: Write>(self, mut out: W) -> Result<Body<W>, Error> {
        let header = self.header()?;
        out.write_all(&header)?;
        Ok(Body {
            out,
            alignment: self.alignment,
            tensors: self.tensors,
            next: 0,
        })
    }

    /// The whole file in memory, for small ones.
    pub fn to_vec(self, contents: &[&[u8]]) -> Result<Vec<u8>, Error> {
        let mut body = self.write(Vec::new())?;
        for data in contents {
            body.tensor(data)?;
        }
        body.finish()
    }

    /// Everything before the data, padded to the alignment.
    fn header(&self) -> Result<Vec<u8>, Error> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        out.extend(&self.metadata);
        let mut offset = 0u64;
        for t in &self.tensors {
            put_str(&mut out, &t.name);
            out.extend((t.shape.len() as u32).to_le_bytes());
            out.extend(t.shape.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(t.id.to_le_bytes());
            out.extend(offset.to_le_bytes());
            let end = offset
                .checked_add(t.bytes)
                .and_then(|end| align_up(end, self.alignment));
            offset = end.ok_or_else(|| Error::ShapeOverflow {
                tensor: t.name.clone(),
                shape: t.shape.clone(),
            })?;
        }
        pad(&mut out, self.alignment);
        Ok(out)
    }
}

/// A GGUF file whose header is written: takes the tensors in the order of declaration.
#[derive(Debug)]
pub struct Body<W> {
    out: W,
    alignment: u64,
    tensors: Vec<Declared>,
    next: usize,
}

impl<W: Write> Body<W> {
    /// Writes the contents of the next tensor, and the padding after it.
    pub fn tensor(&mut self, data: &[u8]) -> Result<(), Error> {
        let count = self.tensors.len();
        let Some(t) = self.tensors.get(self.next) else {
            return Err(Error::NoSuchTensor {
                index: self.next,
                count,
            });
        };
        if data.len() as u64 != t.bytes {
            return Err(Error::ByteCount {
                tensor: t.name.clone(),
                dtype: t.dtype.name(),
                shape: t.shape.clone(),
                expected: t.bytes,
                found: data.len() as u64,
            });
        }
        self.out.write_all(data)?;
        let padding = t.bytes.next_multiple_of(self.alignment) - t.bytes;
        io::copy(&mut io::repeat(0).take(padding), &mut self.out)?;
        self.next += 1;
        Ok(())
    }

    /// Ends the file and returns what it was written to, to be flushed or committed.
    pub fn finish(mut self) -> Result<W, Error> {
        if let Some(t) = self.tensors.get(self.next) {
            return Err(Error::NeverWritten {
                tensor: t.name.clone(),
            });
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

fn check_name(what: &'static str, name: &str, offset: u64) -> Result<(), Error> {
    let bytes = name.len() as u64;
    if bytes > MAX_NAME {
        return Err(Error::NameTooLong {
            what,
            offset,
            bytes,
            limit: MAX_NAME,
        });
    }
    Ok(())
}

fn put_str(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn pad(out: &mut Vec<u8>, alignment: u64) {
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
}
