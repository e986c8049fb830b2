//! Writing `.myq` files: plan the sections, stream the tensors, put the header last.

use std::collections::BTreeSet;
use std::path::Path;

use myq_blocks::dtype::DType;

use super::header::{Header, Record, Stored, TokenizerRecord};
use super::{
    ALIGNMENT, DATA_ALIGNMENT, HASHED_PREAMBLE, MAGIC, MAX_HEADER, PREAMBLE, VERSION, front_hash,
};
use crate::Error;
use crate::atomic::AtomicFile;
use crate::cursor::align_up;
use crate::tensor::{MAX_TENSORS, shape_bytes};

/// A tensor to be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    /// Name, unique in the file.
    pub name: String,
    /// How the weights are stored.
    pub dtype: DType,
    /// `[cols, rows, ...]`.
    pub shape: Vec<u64>,
}

/// Writes a file tensor by tensor, in any order, without holding the model in memory.
///
/// The bytes go to a temporary file beside the target, which takes the target's name in
/// [`MyqWriter::finish`] only; dropped before, it leaves nothing behind. The bytes depend on
/// the arguments alone.
#[derive(Debug)]
pub struct MyqWriter {
    file: AtomicFile,
    plan: Plan,
}

impl MyqWriter {
    /// Checks the declarations, lays out the file and writes the tokenizer.
    pub fn create(
        path: &Path,
        header: &Header,
        tokenizer: &[u8],
        tensors: &[TensorSpec],
    ) -> Result<Self, Error> {
        let plan = Plan::new(header, tokenizer, tensors)?;
        let mut file = AtomicFile::create(path)?;
        // What is never written, the padding, reads as zero.
        file.set_len(plan.file_len)?;
        file.write_at(plan.stored.tokenizer.offset, tokenizer)?;
        Ok(MyqWriter { file, plan })
    }

    /// Writes the contents of the `index`-th declared tensor.
    pub fn write_tensor(&mut self, index: usize, data: &[u8]) -> Result<(), Error> {
        let offset = self.plan.accept(index, data)?;
        self.file.write_at(offset, data)
    }

    /// Writes the header, makes the file durable under its name, and returns its checksum.
    pub fn finish(mut self) -> Result<String, Error> {
        let (front, hash) = self.plan.front()?;
        self.file.write_at(0, &front)?;
        self.file.commit()?;
        Ok(hash)
    }
}

/// The whole file in memory, for small ones; `tensors` are declarations with their contents.
pub fn to_vec(
    header: &Header,
    tokenizer: &[u8],
    tensors: &[(TensorSpec, &[u8])],
) -> Result<Vec<u8>, Error> {
    let specs: Vec<TensorSpec> = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let mut plan = Plan::new(header, tokenizer, &specs)?;
    let mut out = Vec::new();
    put_at(&mut out, plan.stored.tokenizer.offset, tokenizer);
    for (index, (_, data)) in tensors.iter().enumerate() {
        let offset = plan.accept(index, data)?;
        put_at(&mut out, offset, data);
    }
    let (front, _) = plan.front()?;
    out[..front.len()].copy_from_slice(&front);
    Ok(out)
}

/// Appends `data` at `offset`, not before the end, with zeros up to there.
fn put_at(out: &mut Vec<u8>, offset: u64, data: &[u8]) {
    out.resize(offset as usize, 0);
    out.extend(data);
}

/// Where everything goes, and the header as far as it is known.
#[derive(Debug)]
struct Plan {
    stored: Stored,
    header_len: u64,
    file_len: u64,
    written: Vec<bool>,
}

impl Plan {
    fn new(header: &Header, tokenizer: &[u8], tensors: &[TensorSpec]) -> Result<Self, Error> {
        header.check()?;
        let records = declare(tensors)?;
        let tokenizer = TokenizerRecord {
            kind: header.tokenizer_kind.clone(),
            offset: 0,
            bytes: tokenizer.len() as u64,
            blake3: blake3::hash(tokenizer).to_hex().to_string(),
        };
        let written = vec![false; records.len()];
        let stored = Stored::new(header, tokenizer, records);
        let mut plan = Plan {
            stored,
            header_len: 0,
            file_len: 0,
            written,
        };
        // Offsets stand in the header as decimal numbers, so its length depends on them and
        // they on its length. From zero both only grow, and settle after a few rounds.
        loop {
            plan.lay_out()?;
            let len = plan.json()?.len() as u64;
            if len > MAX_HEADER {
                return Err(Error::HeaderTooLarge {
                    found: len,
                    limit: MAX_HEADER,
                });
            }
            if len == plan.header_len {
                return Ok(plan);
            }
            plan.header_len = len;
        }
    }

    /// Sets all offsets for a header of `header_len` bytes.
    fn lay_out(&mut self) -> Result<(), Error> {
        let mut end = PREAMBLE + self.header_len;
        let tokenizer = &mut self.stored.tokenizer;
        tokenizer.offset = end.next_multiple_of(ALIGNMENT);
        end = tokenizer.offset + tokenizer.bytes;
        let mut alignment = DATA_ALIGNMENT;
        for t in &mut self.stored.tensors {
            let place =
                align_up(end, alignment).and_then(|at| Some((at, at.checked_add(t.bytes)?)));
            let Some((offset, next)) = place else {
                let (tensor, shape) = (t.name.clone(), t.shape.clone());
                return Err(Error::ShapeOverflow { tensor, shape });
            };
            (t.offset, end, alignment) = (offset, next, ALIGNMENT);
        }
        self.file_len = end;
        Ok(())
    }

    fn json(&self) -> Result<Vec<u8>, Error> {
        serde_json::to_vec(&self.stored).map_err(|source| Error::HeaderJson { source })
    }

    /// Checks the contents of a tensor, notes their checksum, and returns where they go.
    fn accept(&mut self, index: usize, data: &[u8]) -> Result<u64, Error> {
        let count = self.written.len();
        let Some(t) = self.stored.tensors.get_mut(index) else {
            return Err(Error::NoSuchTensor { index, count });
        };
        if self.written[index] {
            return Err(Error::WrittenTwice {
                tensor: t.name.clone(),
            });
        }
        if data.len() as u64 != t.bytes {
            return Err(Error::ByteCount {
                tensor: t.name.clone(),
                dtype: t.dtype.clone(),
                shape: t.shape.clone(),
                expected: t.bytes,
                found: data.len() as u64,
            });
        }
        t.blake3 = blake3::hash(data).to_hex().to_string();
        self.written[index] = true;
        Ok(t.offset)
    }

    /// Preamble and header of the finished file, and its checksum.
    fn front(&self) -> Result<(Vec<u8>, String), Error> {
        if let Some(index) = self.written.iter().position(|w| !w) {
            return Err(Error::NeverWritten {
                tensor: self.stored.tensors[index].name.clone(),
            });
        }
        let json = self.json()?;
        let mut front = Vec::with_capacity(PREAMBLE as usize + json.len());
        front.extend(MAGIC);
        front.extend(VERSION.to_le_bytes());
        front.extend(self.file_len.to_le_bytes());
        front.extend(self.header_len.to_le_bytes());
        front.extend([0; 8]);
        debug_assert_eq!(front.len(), HASHED_PREAMBLE);
        let hash = front_hash(&front, &json);
        front.extend(hash.as_bytes());
        front.extend(json);
        Ok((front, hash.to_hex().to_string()))
    }
}

/// The tensor table without offsets, checksums as long as real ones.
fn declare(tensors: &[TensorSpec]) -> Result<Vec<Record>, Error> {
    let count = tensors.len() as u64;
    if count > MAX_TENSORS {
        return Err(Error::TooMany {
            what: "tensors",
            count,
            limit: MAX_TENSORS,
            offset: 0,
        });
    }
    let mut names = BTreeSet::new();
    let mut records = Vec::with_capacity(tensors.len());
    for (index, t) in tensors.iter().enumerate() {
        let name = t.name.clone();
        if name.is_empty() {
            return Err(Error::EmptyName {
                index: index as u64,
            });
        }
        if !names.insert(&t.name) {
            return Err(Error::DuplicateTensor { tensor: name });
        }
        let bytes = shape_bytes(&t.name, t.dtype, &t.shape)?;
        let (dtype, shape, blake3) = (t.dtype.name(), t.shape.clone(), "0".repeat(64));
        records.push(Record {
            name,
            dtype,
            shape,
            offset: 0,
            bytes,
            blake3,
        });
    }
    Ok(records)
}
