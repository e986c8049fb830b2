//! Eight rows side by side: the layout `rows8`, which kernels read without shuffling.
//!
//! A *panel* is eight consecutive rows of one matrix and takes as many bytes as they take in
//! the plain layout; rows that do not fill a panel follow in the plain layout. A panel is a
//! sequence of *chunks* of 256 weights of each row (the last one may be shorter, by whole
//! groups of 32), and a chunk is its scales followed by its groups of 32 weights:
//!
//! ```text
//! panel = chunk 0, chunk 1, …, zeros up to 8 · row_bytes
//! chunk = head, group 0, group 1, …
//! group = low plane, high plane         vectors of 32 bytes: byte 4·row + j
//! ```
//!
//! A group has eight *quads*: quad t is weights 4t … 4t + 3 of the group, and byte
//! `4·row + j` of a vector belongs to weight `4t + j` of that row. So a 32-bit lane is a row,
//! and one 32-bit piece of the activations meets all rows at once. A vector holds as many quads as
//! fit a byte: of 2 bits quads 4v … 4v + 3 (lowest bits first), of 4 bits quads 2v and 2v + 1,
//! of 1 bit all eight, of 8 bits one.
//!
//! | format | low | high | head, fp16 and bytes, each for the eight rows in turn |
//! | --- | --- | --- | --- |
//! | Q2_K | 2 | | d, dmin; scale \| min « 4 of sixteens 2g and 2g + 1 of each row, for each group |
//! | Q3_K | 2 | 1 | d; [`sixes`]: scales + 32 in that same order |
//! | Q4_K | 4 | | d, dmin; [`sixes`]: scales group by group, then minima group by group |
//! | Q5_K | 4 | 1 | as Q4_K |
//! | Q6_K | 4 | 2 | d; scales in the order of Q2_K's |
//! | TQ2_0 | 2 | | d |
//! | Q4_0, IQ4_NL | 4 | | d, group by group |
//! | Q4_1 | 4 | | d, group by group; then m |
//! | Q5_0, Q5_1 | 4 | 1 | as Q4_0, Q4_1 |
//! | Q8_0 | 8 | | as Q4_0; codes are signed |
//! | linear | 2, 4 | 1, 2 | scales, scale group by group; then zero-points |
//!
//! Codes are those of the plain layout, without its fixed offset taken off. Formats that are
//! not in the table, and linear ones whose row is not a multiple of 32, have no panels.

mod pack;

pub use pack::pack;

use crate::decode::Decoded;
use crate::layout::{IQ4NL_LEVELS, SUPER};
use crate::{DType, dense, tail};
use half::f16;

/// Rows of a panel.
pub const PANEL: usize = 8;
/// Bytes of a vector: a byte for each of four weights of each row.
pub const VECTOR: usize = 4 * PANEL;

/// How the rows of a matrix are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Layout {
    /// One row after another.
    #[default]
    Plain,
    /// Panels of eight rows (see [`crate::panels`]).
    Rows8,
}

impl Layout {
    /// All layouts by name.
    pub const NAMES: [(&'static str, Layout); 2] =
        [("plain", Layout::Plain), ("rows8", Layout::Rows8)];

    /// The name, as files and flags have it.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    /// The layout with this name.
    pub fn from_name(name: &str) -> Option<Layout> {
        Self::NAMES
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, l)| *l)
    }

    /// How a matrix of this format and row length is stored in a file of this layout: plain
    /// where it has no panels.
    pub fn of(self, dtype: DType, cols: usize) -> Layout {
        if self == Layout::Rows8 && has_panels(dtype, cols) {
            Layout::Rows8
        } else {
            Layout::Plain
        }
    }
}

/// Whether rows of this format and length can be stored in panels.
pub fn has_panels(dtype: DType, cols: usize) -> bool {
    planes(dtype).is_some() && cols.is_multiple_of(32) && dtype.row_bytes(cols).is_some()
}

/// Bits of the low and of the high plane.
pub const fn planes(dtype: DType) -> Option<(u32, u32)> {
    match dtype {
        DType::Q2K | DType::Tq2_0 => Some((2, 0)),
        DType::Q3K => Some((2, 1)),
        DType::Q4K | DType::Q4_0 | DType::Q4_1 | DType::Iq4Nl => Some((4, 0)),
        DType::Q5K | DType::Q5_0 | DType::Q5_1 => Some((4, 1)),
        DType::Q6K => Some((4, 2)),
        DType::Q8_0 => Some((8, 0)),
        DType::Linear(l) => Some(match l.bits() {
            2 => (2, 0),
            3 => (2, 1),
            5 => (4, 1),
            _ => (4, 2),
        }),
        DType::F32 | DType::F16 | DType::BF16 | DType::Tq1_0 => None,
    }
}

/// Bytes of the head of a chunk of `groups` groups.
#[inline]
pub const fn head_bytes(dtype: DType, groups: usize) -> usize {
    let scale = 2 * PANEL;
    match dtype {
        DType::Q2K => 2 * scale + 16 * groups,
        DType::Q3K => scale + sixes_bytes(groups),
        DType::Q4K | DType::Q5K => 2 * scale + sixes_bytes(groups),
        DType::Q6K => scale + 16 * groups,
        DType::Tq2_0 => scale,
        DType::Q4_1 | DType::Q5_1 => 2 * scale * groups,
        DType::Linear(l) => {
            let each = if l.asymmetric() { scale + PANEL } else { scale };
            (32 * groups).div_ceil(l.group()) * each
        }
        _ => scale * groups,
    }
}

/// Bytes of a chunk of `groups` groups of a format that has panels.
#[inline]
pub const fn chunk_bytes(dtype: DType, groups: usize) -> usize {
    let bits = match planes(dtype) {
        Some((low, high)) => low + high,
        None => 0,
    };
    head_bytes(dtype, groups) + VECTOR * groups * bits as usize
}

/// Bytes of `16 · groups` fields of 6 bits.
pub const fn sixes_bytes(groups: usize) -> usize {
    8 * groups + high_bytes(groups)
}

const fn high_bytes(groups: usize) -> usize {
    8 * groups.div_ceil(2)
}

/// Place of field `i` of `16 · groups` fields of 6 bits: byte and shift of its low nibble,
/// byte and shift of its two high bits.
///
/// The first half of the fields has the low nibbles of `8 · groups` bytes, the second the high
/// ones; the bytes behind hold two bits of four fields each, the first ones lowest.
pub const fn sixes(groups: usize, i: usize) -> (usize, u32, usize, u32) {
    let (half, high) = (8 * groups, high_bytes(groups));
    (
        i % half,
        4 * (i / half) as u32,
        half + i % high,
        2 * (i / high) as u32,
    )
}

fn six(bytes: &[u8], groups: usize, i: usize) -> u8 {
    let (at, shift, high, top) = sixes(groups, i);
    bytes[at] >> shift & 15 | (bytes[high] >> top & 3) << 4
}

/// Groups of chunk `i` of a row of `cols` weights.
fn groups_of(cols: usize, i: usize) -> usize {
    (cols - SUPER * i).min(SUPER) / 32
}

/// Stores a panel as eight plain rows: the inverse of [`pack`].
///
/// # Panics
/// As [`pack`].
pub fn unpack(dtype: DType, cols: usize, panel: &[u8], rows: &mut [u8]) {
    let row_bytes = checked_row_bytes(dtype, cols, panel.len(), rows.len());
    for (r, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
        row.fill(0);
        if let DType::Linear(l) = dtype {
            unpack_linear(l, cols, panel, r, row);
            continue;
        }
        let len = dtype.block_len();
        let bytes = dtype.row_bytes(len).expect("a whole block");
        for_each_block(dtype, cols, panel, r, |at, b| {
            let out = &mut row[at / len * bytes..];
            if b.len == len {
                crate::encode::store_block(dtype, b, &mut out[..bytes]);
            } else {
                let mut whole = [0; tail::MAX_BLOCK];
                crate::encode::store_block(dtype, b, &mut whole[..bytes]);
                tail::compact(dtype, &whole[..bytes], b.len, out);
            }
        });
    }
}

/// Dequantises row `r` of a panel into `out`, the same values as the plain row gives.
pub fn dequantize_row(dtype: DType, panel: &[u8], r: usize, out: &mut [f32]) {
    for_each_block(dtype, out.len(), panel, r, |at, b| {
        b.dequantize(&mut out[at..at + b.len])
    });
}

/// Calls `f(first weight, block)` for every block of row `r`, the partial one with its true
/// length; a linear format comes as blocks of 32, `scale · q − scale · zero`.
pub fn for_each_block(
    dtype: DType,
    cols: usize,
    panel: &[u8],
    r: usize,
    mut f: impl FnMut(usize, &Decoded),
) {
    let step = chunk_bytes(dtype, 8);
    let mut codes = [0; SUPER];
    for i in 0..cols.div_ceil(SUPER) {
        let groups = groups_of(cols, i);
        let (head, planes) = panel[step * i..].split_at(head_bytes(dtype, groups));
        take_codes(dtype, groups, r, planes, &mut codes);
        if dtype.is_super() {
            f(SUPER * i, &whole_block(dtype, groups, r, head, &codes));
        } else {
            for g in 0..groups {
                let block = small_block(dtype, (groups, g), r, head, &codes);
                f(SUPER * i + 32 * g, &block);
            }
        }
    }
}

fn checked_row_bytes(dtype: DType, cols: usize, a: usize, b: usize) -> usize {
    let bytes = dtype.row_bytes(cols).filter(|_| has_panels(dtype, cols));
    let bytes = bytes.expect("a format and row length that has panels");
    assert!(
        a == PANEL * bytes && b == PANEL * bytes,
        "the bytes of eight rows"
    );
    bytes
}

fn empty(len: usize) -> Decoded {
    Decoded {
        len,
        d: 0.0,
        dmin: 0.0,
        scale: [1; 16],
        min: [0; 16],
        q: [0; SUPER],
    }
}

fn half_at(bytes: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32()
}

/// Fixed offset of the codes of a format.
fn offset(dtype: DType) -> i8 {
    match dtype {
        DType::Q4_0 => 8,
        DType::Q5_0 => 16,
        DType::Q3K => 4,
        DType::Q6K => 32,
        DType::Tq2_0 => 1,
        _ => 0,
    }
}

fn whole_block(dtype: DType, groups: usize, r: usize, head: &[u8], codes: &[u8]) -> Decoded {
    let mut b = empty(32 * groups);
    b.d = half_at(head, r);
    let off = offset(dtype);
    for (q, &c) in b.q.iter_mut().zip(&codes[..32 * groups]) {
        *q = c as i8 - off;
    }
    let (one, two) = (&head[2 * PANEL..], head.get(4 * PANEL..).unwrap_or(&[]));
    // Field of sixteen j of this row, and of group g.
    let sixteen = |j: usize| 16 * (j / 2) + 2 * r + j % 2;
    match dtype {
        DType::Q2K => {
            b.dmin = half_at(head, PANEL + r);
            for j in 0..2 * groups {
                let v = two[sixteen(j)];
                (b.scale[j], b.min[j]) = (i16::from(v & 15), i16::from(v >> 4));
            }
        }
        DType::Q3K => {
            for j in 0..2 * groups {
                b.scale[j] = i16::from(six(one, groups, sixteen(j))) - 32;
            }
        }
        DType::Q6K => {
            for j in 0..2 * groups {
                b.scale[j] = i16::from(one[sixteen(j)] as i8);
            }
        }
        DType::Q4K | DType::Q5K => {
            b.dmin = half_at(head, PANEL + r);
            for j in 0..2 * groups {
                let field = PANEL * (j / 2) + r;
                b.scale[j] = i16::from(six(two, groups, field));
                b.min[j] = i16::from(six(two, groups, PANEL * groups + field));
            }
        }
        _ => {}
    }
    b
}

fn small_block(
    dtype: DType,
    (groups, g): (usize, usize),
    r: usize,
    head: &[u8],
    codes: &[u8],
) -> Decoded {
    let mut b = empty(32);
    let off = offset(dtype);
    for (q, &c) in b.q.iter_mut().zip(&codes[32 * g..32 * g + 32]) {
        *q = match dtype {
            DType::Iq4Nl => IQ4NL_LEVELS[usize::from(c)],
            _ => c as i8 - off,
        };
    }
    match dtype {
        DType::Linear(l) => {
            let (count, s) = ((32 * groups).div_ceil(l.group()), 32 * g / l.group());
            b.d = half_at(head, PANEL * s + r);
            b.dmin = b.d;
            let zero = match l.asymmetric() {
                true => head[2 * PANEL * count + PANEL * s + r],
                false => 1 << (l.bits() - 1),
            };
            b.min = [i16::from(zero); 16];
        }
        DType::Q4_1 | DType::Q5_1 => {
            b.d = half_at(head, PANEL * g + r);
            b.dmin = -half_at(head, PANEL * (groups + g) + r);
            b.min = [1; 16];
        }
        _ => b.d = half_at(head, PANEL * g + r),
    }
    b
}

fn unpack_linear(l: crate::Linear, cols: usize, panel: &[u8], r: usize, row: &mut [u8]) {
    let dtype = DType::Linear(l);
    let (step, bits) = (chunk_bytes(dtype, 8), l.bits() as usize);
    let stream = (cols * bits).div_ceil(32) * 4;
    let all = cols.div_ceil(l.group());
    let mut codes = [0; SUPER];
    for i in 0..cols.div_ceil(SUPER) {
        let groups = groups_of(cols, i);
        let (head, planes) = panel[step * i..].split_at(head_bytes(dtype, groups));
        take_codes(dtype, groups, r, planes, &mut codes);
        let bytes = 4 * groups * bits;
        dense::pack(
            l.bits(),
            &codes[..32 * groups],
            &mut row[32 * bits * i..][..bytes],
        );
        let (first, count) = (SUPER / l.group() * i, (32 * groups).div_ceil(l.group()));
        for s in 0..count {
            let (to, from) = (stream + 2 * (first + s), 2 * (PANEL * s + r));
            row[to..to + 2].copy_from_slice(&head[from..from + 2]);
            if l.asymmetric() {
                row[stream + 2 * all + first + s] = head[2 * PANEL * count + PANEL * s + r];
            }
        }
    }
}

/// A byte in each of four.
const fn four(byte: u8) -> u32 {
    0x0101_0101 * byte as u32
}

/// Codes of row `r` of a chunk.
fn take_codes(dtype: DType, groups: usize, r: usize, data: &[u8], codes: &mut [u8; SUPER]) {
    let Some((low, high)) = planes(dtype) else {
        return;
    };
    let bytes = VECTOR * (low + high) as usize;
    for (codes, data) in codes
        .chunks_exact_mut(32)
        .zip(data.chunks_exact(bytes))
        .take(groups)
    {
        let (first, second) = data.split_at(VECTOR * low as usize);
        for (t, c) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let mut quad = quad(first, low, r, t);
            if high > 0 {
                quad |= self::quad(second, high, r, t) << low;
            }
            *c = quad.to_le_bytes();
        }
    }
}

fn quad(plane: &[u8], bits: u32, r: usize, t: usize) -> u32 {
    let per = (8 / bits) as usize;
    let at = t / per * VECTOR + 4 * r;
    let word = u32::from_le_bytes([plane[at], plane[at + 1], plane[at + 2], plane[at + 3]]);
    word >> ((t % per) as u32 * bits) & four(((1u32 << bits) - 1) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panel_takes_the_bytes_of_its_rows() {
        for f in &crate::dtype::TABLE {
            for cols in (32..=2048).step_by(32).filter(|&n| has_panels(f.dtype, n)) {
                let (whole, rest) = (cols / SUPER, cols % SUPER / 32);
                let last = if rest > 0 {
                    chunk_bytes(f.dtype, rest)
                } else {
                    0
                };
                let bytes = whole * chunk_bytes(f.dtype, 8) + last;
                let row = f.dtype.row_bytes(cols).unwrap();
                // A partial superblock is filled up to an even number of bytes.
                let spare = (PANEL * row).checked_sub(bytes);
                assert!(spare.is_some_and(|n| n <= PANEL), "{} of {cols}", f.name);
            }
        }
    }

    #[test]
    fn fields_of_six_bits_do_not_overlap() {
        for groups in 1..=8 {
            let mut bytes = vec![0; sixes_bytes(groups)];
            let field = |i: usize| (i * 37 % 64) as u8;
            (0..16 * groups).for_each(|i| pack::put_six(&mut bytes, groups, i, field(i)));
            assert!((0..16 * groups).all(|i| six(&bytes, groups, i) == field(i)));
        }
    }
}
