//! What both formats know of a tensor, and the checks both make.

use myq_blocks::dtype::DType;

use crate::Error;

/// Most dimensions of a tensor.
pub(crate) const MAX_DIMS: usize = 4;
/// Most tensors of a file: some forty times the largest published model.
pub(crate) const MAX_TENSORS: u64 = 1 << 16;
/// Most weights of a tensor, far above any model, so that later products cannot overflow.
const MAX_ELEMENTS: u64 = 1 << 48;

/// One tensor of a file: where its bytes lie and how to read them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorInfo {
    /// Name, unique in the file.
    pub name: String,
    /// How the weights are stored.
    pub dtype: DType,
    /// `[cols, rows, ...]`: the length of a row first, one to four dimensions, none zero.
    pub shape: Vec<u64>,
    /// Byte offset from the start of the file.
    pub offset: u64,
    /// Bytes of all rows.
    pub bytes: u64,
    /// BLAKE3 of those bytes; GGUF has none.
    pub checksum: Option<[u8; 32]>,
}

impl TensorInfo {
    /// Weights in a row.
    pub fn cols(&self) -> u64 {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Number of rows, over all outer dimensions.
    pub fn rows(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }

    /// Number of weights.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        self.bytes.checked_div(self.rows()).unwrap_or(0)
    }
}

/// Bytes a tensor of this shape takes, or what is wrong with the shape.
pub(crate) fn shape_bytes(name: &str, dtype: DType, shape: &[u64]) -> Result<u64, Error> {
    check_shape(name, shape)?;
    let too_large = || Error::ShapeOverflow {
        tensor: name.to_owned(),
        shape: shape.to_vec(),
    };
    let cols = usize::try_from(shape[0]).map_err(|_| too_large())?;
    let Some(row) = dtype.row_bytes(cols) else {
        return Err(Error::RowLength {
            tensor: name.to_owned(),
            dtype: dtype.name(),
            cols: shape[0],
            multiple: match dtype {
                DType::Linear(_) => 8,
                _ => dtype.block_len().min(32) as u64,
            },
        });
    };
    let rows: u64 = shape[1..].iter().product();
    rows.checked_mul(row as u64).ok_or_else(too_large)
}

/// One to four dimensions, none zero, a product that fits.
fn check_shape(name: &str, shape: &[u64]) -> Result<(), Error> {
    let tensor = || name.to_owned();
    if shape.is_empty() || shape.len() > MAX_DIMS {
        return Err(Error::Dimensions {
            tensor: tensor(),
            dims: shape.len() as u64,
        });
    }
    if shape.contains(&0) {
        return Err(Error::ZeroDimension {
            tensor: tensor(),
            shape: shape.to_vec(),
        });
    }
    match shape
        .iter()
        .try_fold(1u64, |product, &d| product.checked_mul(d))
    {
        Some(n) if n <= MAX_ELEMENTS => Ok(()),
        _ => Err(Error::ShapeOverflow {
            tensor: tensor(),
            shape: shape.to_vec(),
        }),
    }
}

/// The bytes of a tensor; empty if its range is not in these bytes (another file's tensor).
pub(crate) fn slice(bytes: &[u8], offset: u64, len: u64) -> &[u8] {
    let range = || {
        let start = usize::try_from(offset).ok()?;
        let end = usize::try_from(offset.checked_add(len)?).ok()?;
        bytes.get(start..end)
    };
    range().unwrap_or(&[])
}
