//! One row per format: block length, bytes, name, GGUF id.

use crate::dense::Linear;
use crate::tail;

/// How the weights of a tensor are stored.
///
/// Rows are stored one after another; a row is a whole number of blocks, plus, for the
/// superblock formats, one partial superblock (see [`crate::tail`]).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Upper half of a single-precision number.
    BF16,
    /// 32 weights: 4 bits, one scale. Import source.
    Q4_0,
    /// 32 weights: 4 bits, scale and minimum. Import source.
    Q4_1,
    /// 32 weights: 5 bits, one scale. Import source.
    Q5_0,
    /// 32 weights: 5 bits, scale and minimum. Import source.
    Q5_1,
    /// 32 weights: 8 bits, one scale.
    Q8_0,
    /// 32 weights: 4 bits through a table of 16 uneven levels. Import source.
    Iq4Nl,
    /// Superblock of 256: 2 bits, 16 scales and minima of 4 bits.
    Q2K,
    /// Superblock of 256: 3 bits, 16 scales of 6 bits.
    Q3K,
    /// Superblock of 256: 4 bits, 8 scales and minima of 6 bits.
    Q4K,
    /// Superblock of 256: 5 bits, 8 scales and minima of 6 bits.
    Q5K,
    /// Superblock of 256: 6 bits, 16 scales of 8 bits.
    Q6K,
    /// Superblock of 256 ternary weights, five to a byte.
    Tq1_0,
    /// Superblock of 256 ternary weights, four to a byte.
    Tq2_0,
    /// Dense bit stream with one scale (and zero-point) per group.
    Linear(Linear),
}

/// The facts about one format that never depend on a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// The format.
    pub dtype: DType,
    /// Name as GGUF writes it.
    pub name: &'static str,
    /// Type number in a GGUF tensor table.
    pub gguf_id: u32,
    /// Weights in a block.
    pub block: usize,
    /// Bytes in a block.
    pub bytes: usize,
}

const fn row(dtype: DType, name: &'static str, gguf_id: u32, block: usize, bytes: usize) -> Facts {
    Facts {
        dtype,
        name,
        gguf_id,
        block,
        bytes,
    }
}

/// Every format that GGUF knows too.
pub const TABLE: [Facts; 16] = [
    row(DType::F32, "F32", 0, 1, 4),
    row(DType::F16, "F16", 1, 1, 2),
    row(DType::BF16, "BF16", 30, 1, 2),
    row(DType::Q4_0, "Q4_0", 2, 32, 18),
    row(DType::Q4_1, "Q4_1", 3, 32, 20),
    row(DType::Q5_0, "Q5_0", 6, 32, 22),
    row(DType::Q5_1, "Q5_1", 7, 32, 24),
    row(DType::Q8_0, "Q8_0", 8, 32, 34),
    row(DType::Iq4Nl, "IQ4_NL", 20, 32, 18),
    row(DType::Q2K, "Q2_K", 10, 256, 84),
    row(DType::Q3K, "Q3_K", 11, 256, 110),
    row(DType::Q4K, "Q4_K", 12, 256, 144),
    row(DType::Q5K, "Q5_K", 13, 256, 176),
    row(DType::Q6K, "Q6_K", 14, 256, 210),
    row(DType::Tq1_0, "TQ1_0", 34, 256, 54),
    row(DType::Tq2_0, "TQ2_0", 35, 256, 66),
];

impl DType {
    /// The table row of this format; `None` for the linear formats, which are computed.
    pub fn facts(self) -> Option<&'static Facts> {
        TABLE.iter().find(|f| f.dtype == self)
    }

    /// The format with this GGUF type number.
    pub fn from_gguf_id(id: u32) -> Option<DType> {
        TABLE.iter().find(|f| f.gguf_id == id).map(|f| f.dtype)
    }

    /// The GGUF type number, if GGUF has this format.
    pub fn gguf_id(self) -> Option<u32> {
        self.facts().map(|f| f.gguf_id)
    }

    /// Name, as printed and as stored in `.myq` files: `Q2_K`, `L3G64Z`, …
    pub fn name(self) -> String {
        match self {
            DType::Linear(l) => l.name(),
            other => other
                .facts()
                .map_or_else(String::new, |f| f.name.to_owned()),
        }
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<DType> {
        TABLE
            .iter()
            .find(|f| f.name == name)
            .map(|f| f.dtype)
            .or_else(|| Linear::from_name(name).map(DType::Linear))
    }

    /// Whether this is a superblock format, the ones that may end in a partial superblock.
    pub fn is_super(self) -> bool {
        self.facts().is_some_and(|f| f.block == 256)
    }

    /// Weights in a whole block (the group length of a linear format).
    pub fn block_len(self) -> usize {
        match self {
            DType::Linear(l) => l.group(),
            other => other.facts().map_or(1, |f| f.block),
        }
    }

    /// Bytes of a row of `cols` weights, or `None` where the format cannot hold that length:
    /// superblock and 32-weight formats need a multiple of 32, linear ones of 8.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if cols == 0 {
            return None;
        }
        let facts = match self {
            DType::Linear(l) => return l.row_bytes(cols),
            other => other.facts()?,
        };
        let rest = cols % facts.block;
        let whole = (cols / facts.block).checked_mul(facts.bytes)?;
        match rest {
            0 => Some(whole),
            n if self.is_super() => whole.checked_add(tail::bytes(self, n)?),
            _ => None,
        }
    }

    /// Bits a weight takes in a row of whole blocks, scales included.
    pub fn nominal_bpw(self) -> f64 {
        let n = self.block_len();
        self.row_bytes(n)
            .map_or(f64::NAN, |b| b as f64 * 8.0 / n as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nominal_widths_are_those_of_the_specification() {
        for (t, bpw) in [
            (DType::Q2K, 2.625),
            (DType::Q3K, 3.4375),
            (DType::Q4K, 4.5),
            (DType::Q5K, 5.5),
            (DType::Q6K, 6.5625),
            (DType::Tq1_0, 1.6875),
            (DType::Tq2_0, 2.0625),
            (DType::Q8_0, 8.5),
        ] {
            assert_eq!(t.nominal_bpw(), bpw, "{t:?}");
        }
    }

    #[test]
    fn partial_superblocks_keep_the_width() {
        let bpw = |t: DType| t.row_bytes(576).unwrap() as f64 * 8.0 / 576.0;
        assert!(bpw(DType::Q2K) <= 2.8);
        for t in [DType::Q2K, DType::Q3K, DType::Q4K, DType::Q5K, DType::Q6K] {
            assert!(bpw(t) / t.nominal_bpw() < 1.07, "{t:?} {}", bpw(t));
        }
    }

    #[test]
    fn names_and_ids_are_unique_and_read_back() {
        for f in &TABLE {
            assert_eq!(DType::from_name(f.name), Some(f.dtype));
            assert_eq!(DType::from_gguf_id(f.gguf_id), Some(f.dtype));
        }
        for l in Linear::all() {
            assert_eq!(DType::from_name(&l.name()), Some(DType::Linear(l)));
        }
        assert_eq!(DType::from_name("L3G48"), None);
        assert_eq!(DType::from_gguf_id(99), None);
    }
}
