//! The tensor table of a GGUF file.

use std::collections::HashMap;

use myq_blocks::dtype::DType;

use super::{MIN_TENSOR_BYTES, check_count, read_name};
use crate::cursor::{Cursor, align_up};
use crate::tensor::{MAX_DIMS, shape_bytes};
use crate::{Error, TensorInfo};

/// Type numbers of GGUF that we do not read, for the message.
const UNSUPPORTED: [(u32, &str); 25] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

type Table = (Vec<TensorInfo>, HashMap<String, usize>);

/// Reads the table; the cursor then stands at its end, before the padding to the data.
pub(super) fn read(cursor: &mut Cursor<'_>, count: u64, alignment: u64) -> Result<Table, Error> {
    check_count(cursor, "the tensor table", count, MIN_TENSOR_BYTES)?;
    let mut tensors = Vec::new();
    let mut by_name = HashMap::new();
    for index in 0..count as usize {
        let tensor = read_row(cursor, index)?;
        if by_name.insert(tensor.name.clone(), index).is_some() {
            return Err(Error::DuplicateTensor {
                tensor: tensor.name,
            });
        }
        tensors.push(tensor);
    }
    place(&mut tensors, cursor, alignment)?;
    check_overlap(&tensors)?;
    Ok((tensors, by_name))
}

/// One row of the table; its offset still counts from the start of the data.
fn read_row(cursor: &mut Cursor<'_>, index: usize) -> Result<TensorInfo, Error> {
    const WHAT: &str = "a row of the tensor table";
    let name = read_name(cursor, "a tensor name")?;
    if name.is_empty() {
        return Err(Error::EmptyName {
            index: index as u64,
        });
    }
    let dims = cursor.u32(WHAT)?;
    if dims == 0 || dims as usize > MAX_DIMS {
        return Err(Error::Dimensions {
            tensor: name.to_owned(),
            dims: dims.into(),
        });
    }
    let shape = (0..dims)
        .map(|_| cursor.u64(WHAT))
        .collect::<Result<Vec<_>, _>>()?;
    let dtype = dtype(name, cursor.u32(WHAT)?)?;
    let offset = cursor.u64(WHAT)?;
    let bytes = tensor_bytes(name, dtype, &shape)?;
    Ok(TensorInfo {
        name: name.to_owned(),
        dtype,
        shape,
        offset,
        bytes,
        checksum: None,
    })
}

/// As [`shape_bytes`], but with rows of whole superblocks only, as GGUF has them.
pub(super) fn tensor_bytes(name: &str, dtype: DType, shape: &[u64]) -> Result<u64, Error> {
    let bytes = shape_bytes(name, dtype, shape)?;
    let multiple = dtype.block_len() as u64;
    if !shape[0].is_multiple_of(multiple) {
        let (tensor, dtype) = (name.to_owned(), dtype.name());
        return Err(Error::RowLength {
            tensor,
            dtype,
            cols: shape[0],
            multiple,
        });
    }
    Ok(bytes)
}

fn dtype(name: &str, id: u32) -> Result<DType, Error> {
    if let Some(dtype) = DType::from_gguf_id(id) {
        return Ok(dtype);
    }
    let tensor = name.to_owned();
    Err(match UNSUPPORTED.iter().find(|(known, _)| *known == id) {
        Some(&(id, name)) => Error::UnsupportedTensorType { tensor, name, id },
        None => Error::UnknownTensorType { tensor, id },
    })
}

/// Checks the offsets against the file and makes them count from its start.
fn place(tensors: &mut [TensorInfo], cursor: &Cursor<'_>, alignment: u64) -> Result<(), Error> {
    let file = cursor.offset() + cursor.rest();
    // A slice is shorter than 2^63 bytes and the alignment at most 2^16: no overflow.
    let start = align_up(cursor.offset(), alignment).unwrap_or(u64::MAX);
    let data = file.saturating_sub(start);
    for t in tensors {
        let (tensor, offset, bytes) = (&t.name, t.offset, t.bytes);
        if !offset.is_multiple_of(alignment) {
            return Err(Error::Misaligned {
                tensor: tensor.clone(),
                offset,
                alignment,
            });
        }
        if offset.checked_add(bytes).is_none_or(|end| end > data) {
            return Err(Error::TensorBeyondFile {
                tensor: tensor.clone(),
                offset,
                bytes,
                data,
            });
        }
        t.offset += start;
    }
    Ok(())
}

fn check_overlap(tensors: &[TensorInfo]) -> Result<(), Error> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|t| t.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            let (first, second) = (pair[0].name.clone(), pair[1].name.clone());
            return Err(Error::Overlap {
                first,
                second,
                offset: pair[1].offset,
            });
        }
    }
    Ok(())
}
