//! The `.myq` container: one file with all that a board needs to run a model.
//!
//! ```text
//! preamble   64 bytes: magic, version, file length, header length, header checksum
//! header     JSON: configuration, template, recipe, provenance, tensor table
//! tokenizer  opaque bytes, at a multiple of 64
//! tensors    from a multiple of 4096 on, each at a multiple of 64, to the end of the file
//! ```
//!
//! Sections follow one another in this order with only zero padding between them, so every
//! byte of the file is either checked by the parser or covered by a checksum of the header,
//! and the header's checksum stands for the whole file.

mod header;
mod write;

use std::collections::HashMap;

use myq_blocks::{Layout, dtype::DType};

pub use header::{Header, Provenance, Source};
pub use write::{MyqWriter, TensorSpec, to_vec};

use crate::cursor::{Cursor, align_up};
use crate::tensor::{MAX_TENSORS, shape_bytes, slice};
use crate::{Error, TensorInfo};
use header::{Record, Stored, TokenizerRecord, parse_hex};

/// First four bytes of a file.
pub const MAGIC: &[u8; 4] = b"MYQ\x1a";
/// The version this crate reads and writes.
pub const VERSION: u32 = 1;
/// Alignment of every section.
pub const ALIGNMENT: u64 = 64;
/// Alignment of the first tensor: a page, so that a map of the tensors begins on one.
pub const DATA_ALIGNMENT: u64 = 4096;
/// Bytes before the header.
pub const PREAMBLE: u64 = 64;
/// Longest header: some ten times that of the largest published model.
pub const MAX_HEADER: u64 = 16 << 20;
/// Name of the tokenizer section in messages.
const TOKENIZER: &str = "tokenizer";
/// Bytes of the preamble that the checksum covers; the checksum itself follows.
const HASHED_PREAMBLE: usize = 32;

/// A `.myq` file, checked as a whole but for the contents of its sections.
#[derive(Clone, Debug)]
pub struct Myq<'a> {
    bytes: &'a [u8],
    hash: [u8; 32],
    header: Header,
    tokenizer: TokenizerRecord,
    tokenizer_hash: [u8; 32],
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl<'a> Myq<'a> {
    /// Checks preamble, header checksum, header, and that the sections fill the file.
    ///
    /// Damage inside a section shows only in [`Myq::verify_tensor`], [`Myq::verify_tokenizer`]
    /// and [`Myq::verify_all`], because those read every byte.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let (json, hash) = read_front(bytes)?;
        let stored: Stored =
            serde_json::from_slice(json).map_err(|source| Error::HeaderJson { source })?;
        let (header, tokenizer, records) = stored.split();
        header.check()?;
        let tokenizer_hash = parse_hex(&tokenizer.blake3, TOKENIZER)?;
        let (tensors, by_name) = read_tensors(records)?;
        check_sections(bytes, json.len() as u64, &tokenizer, &tensors)?;
        Ok(Myq {
            bytes,
            hash,
            header,
            tokenizer,
            tokenizer_hash,
            tensors,
            by_name,
        })
    }

    /// Configuration, template, recipe, provenance, layout.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// How matrices are stored: those that the layout has no form for are plain
    /// (`Layout::of`).
    pub fn layout(&self) -> Layout {
        // The header was checked.
        Layout::from_name(&self.header.layout).unwrap_or_default()
    }

    /// All tensors in the order of the file.
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

    /// The tokenizer section; `header().tokenizer_kind` says how to read it.
    pub fn tokenizer(&self) -> &'a [u8] {
        slice(self.bytes, self.tokenizer.offset, self.tokenizer.bytes)
    }

    /// Byte offset of the tokenizer section from the start of the file.
    pub fn tokenizer_offset(&self) -> u64 {
        self.tokenizer.offset
    }

    /// Compares a tensor's bytes with its checksum.
    pub fn verify_tensor(&self, tensor: &TensorInfo) -> Result<(), Error> {
        let Some(checksum) = tensor.checksum else {
            return Err(Error::NoChecksum {
                tensor: tensor.name.clone(),
            });
        };
        verify(&tensor.name, tensor.offset, self.data(tensor), checksum)
    }

    /// Compares the tokenizer section with its checksum; it is small, so do it at every load.
    pub fn verify_tokenizer(&self) -> Result<(), Error> {
        verify(
            TOKENIZER,
            self.tokenizer.offset,
            self.tokenizer(),
            self.tokenizer_hash,
        )
    }

    /// Compares every section with its checksum: reads the whole file.
    pub fn verify_all(&self) -> Result<(), Error> {
        self.verify_tokenizer()?;
        self.tensors.iter().try_for_each(|t| self.verify_tensor(t))
    }

    /// Checksum of the whole file in hexadecimal: that of the header, which holds those of
    /// all sections.
    pub fn file_hash(&self) -> String {
        blake3::Hash::from_bytes(self.hash).to_hex().to_string()
    }
}

fn verify(section: &str, offset: u64, data: &[u8], checksum: [u8; 32]) -> Result<(), Error> {
    if *blake3::hash(data).as_bytes() == checksum {
        return Ok(());
    }
    Err(Error::Checksum {
        section: section.to_owned(),
        offset,
    })
}

/// Checksum over the first half of the preamble and the header.
fn front_hash(preamble: &[u8], json: &[u8]) -> blake3::Hash {
    blake3::Hasher::new()
        .update(preamble)
        .update(json)
        .finalize()
}

/// Checks the preamble; the bytes of the header and the checksum they match.
fn read_front(bytes: &[u8]) -> Result<(&[u8], [u8; 32]), Error> {
    let mut cursor = Cursor::new(bytes);
    let magic = cursor.take(4, "the magic number")?;
    if magic != MAGIC {
        return Err(Error::Magic {
            expected: ".myq",
            found: magic.to_vec(),
        });
    }
    let found = cursor.u32("the version")?;
    if found != VERSION {
        return Err(Error::Version {
            format: ".myq",
            found,
            supported: "1",
        });
    }
    let (expected, found) = (cursor.u64("the file length")?, bytes.len() as u64);
    if expected > found {
        let what = "the whole file";
        return Err(Error::Truncated {
            what,
            offset: 0,
            need: expected,
            file: found,
        });
    }
    if expected < found {
        return Err(Error::TrailingBytes {
            expected,
            found,
            excess: found - expected,
        });
    }
    let header = cursor.u64("the header length")?;
    if header > MAX_HEADER {
        return Err(Error::HeaderTooLarge {
            found: header,
            limit: MAX_HEADER,
        });
    }
    let offset = cursor.offset();
    if cursor.u64("the reserved bytes")? != 0 {
        return Err(Error::Reserved { offset });
    }
    let mut stored = [0; 32];
    stored.copy_from_slice(cursor.take(32, "the header checksum")?);
    let json = cursor.take(header, "the header")?;

    let hash = front_hash(&bytes[..HASHED_PREAMBLE], json);
    if *hash.as_bytes() != stored {
        let expected = blake3::Hash::from_bytes(stored).to_hex().to_string();
        return Err(Error::HeaderChecksum {
            expected,
            found: hash.to_hex().to_string(),
        });
    }
    Ok((json, stored))
}

/// The tensor table of the header, each row checked by itself.
fn read_tensors(records: Vec<Record>) -> Result<(Vec<TensorInfo>, HashMap<String, usize>), Error> {
    let count = records.len() as u64;
    if count > MAX_TENSORS {
        let (what, limit, offset) = ("tensors", MAX_TENSORS, PREAMBLE);
        return Err(Error::TooMany {
            what,
            count,
            limit,
            offset,
        });
    }
    let mut tensors = Vec::with_capacity(records.len());
    let mut by_name = HashMap::with_capacity(records.len());
    for (index, record) in records.into_iter().enumerate() {
        let tensor = read_tensor(record, index as u64)?;
        if by_name.insert(tensor.name.clone(), index).is_some() {
            return Err(Error::DuplicateTensor {
                tensor: tensor.name,
            });
        }
        tensors.push(tensor);
    }
    Ok((tensors, by_name))
}

fn read_tensor(record: Record, index: u64) -> Result<TensorInfo, Error> {
    let Record {
        name,
        dtype,
        shape,
        offset,
        bytes,
        blake3,
    } = record;
    if name.is_empty() {
        return Err(Error::EmptyName { index });
    }
    let Some(dtype) = DType::from_name(&dtype) else {
        return Err(Error::UnknownDType {
            tensor: name,
            dtype,
        });
    };
    let expected = shape_bytes(&name, dtype, &shape)?;
    if bytes != expected {
        let dtype = dtype.name();
        return Err(Error::ByteCount {
            tensor: name,
            dtype,
            shape,
            expected,
            found: bytes,
        });
    }
    let checksum = Some(parse_hex(&blake3, &name)?);
    Ok(TensorInfo {
        name,
        dtype,
        shape,
        offset,
        bytes,
        checksum,
    })
}

/// Walks the sections in order: each begins where the one before it, padded, ends; the
/// padding is zero; the last ends with the file.
fn check_sections(
    bytes: &[u8],
    header: u64,
    tokenizer: &TokenizerRecord,
    tensors: &[TensorInfo],
) -> Result<(), Error> {
    let mut walk = Walk {
        bytes,
        end: PREAMBLE + header,
    };
    walk.section(TOKENIZER, ALIGNMENT, tokenizer.offset, tokenizer.bytes)?;
    for (i, t) in tensors.iter().enumerate() {
        let alignment = if i == 0 { DATA_ALIGNMENT } else { ALIGNMENT };
        walk.section(&t.name, alignment, t.offset, t.bytes)?;
    }
    let (expected, found) = (walk.end, bytes.len() as u64);
    if expected != found {
        return Err(Error::TrailingBytes {
            expected,
            found,
            excess: found - expected,
        });
    }
    Ok(())
}

/// How far the sections reach; never past the end of the file.
struct Walk<'a> {
    bytes: &'a [u8],
    end: u64,
}

impl Walk<'_> {
    fn section(&mut self, name: &str, alignment: u64, at: u64, len: u64) -> Result<(), Error> {
        let section = || name.to_owned();
        // `end` is at most the file's length: no overflow.
        let expected = align_up(self.end, alignment).unwrap_or(u64::MAX);
        if at < self.end {
            let first = "the section before it".to_owned();
            return Err(Error::Overlap {
                first,
                second: section(),
                offset: at,
            });
        }
        if at != expected {
            return Err(Error::Hole {
                section: section(),
                expected,
                found: at,
            });
        }
        let file = self.bytes.len() as u64;
        let Some(end) = at.checked_add(len).filter(|&end| end <= file) else {
            let what = "a section";
            return Err(Error::Truncated {
                what,
                offset: at,
                need: len,
                file,
            });
        };
        let padding = slice(self.bytes, self.end, at - self.end);
        if let Some(i) = padding.iter().position(|&b| b != 0) {
            return Err(Error::Padding {
                offset: self.end + i as u64,
            });
        }
        self.end = end;
        Ok(())
    }
}
