//! The last chunk of a panel, made whole.

use myq_blocks::DType;
use myq_blocks::panels::{PANEL, VECTOR, head_bytes, planes};

/// Bytes of the largest chunk, which is Q8_0's.
pub(crate) const BYTES: usize = myq_blocks::panels::chunk_bytes(DType::Q8_0, 8);

/// Makes a chunk of eight groups, whose scales are zero from `groups` on, in `out`, which is
/// zero.
#[cold]
#[inline(never)]
pub(crate) fn fill(dtype: DType, groups: usize, chunk: &[u8], out: &mut [u8]) {
    let (head, codes) = chunk.split_at(head_bytes(dtype, groups));
    let (whole, out_codes) = out.split_at_mut(head_bytes(dtype, 8));
    let (low, high) = planes(dtype).unwrap_or_default();
    let n = VECTOR * (low + high) as usize * groups;
    out_codes[..n].copy_from_slice(&codes[..n]);
    let scales = 2 * PANEL;
    match dtype {
        DType::Q3K => {
            let (d, fields) = head.split_at(scales);
            whole[..scales].copy_from_slice(d);
            eights(groups, fields, &mut whole[scales..], |u| u);
        }
        DType::Q4K | DType::Q5K => {
            let (d, fields) = head.split_at(2 * scales);
            whole[..2 * scales].copy_from_slice(d);
            // Minima start at field 64 of a whole chunk.
            let minima = |u| if u < groups { u } else { 8 + u - groups };
            eights(groups, fields, &mut whole[2 * scales..], minima);
        }
        DType::Q4_1 | DType::Q5_1 => {
            let (d, m) = head.split_at(scales * groups);
            whole[..d.len()].copy_from_slice(d);
            whole[8 * scales..][..m.len()].copy_from_slice(m);
        }
        DType::Linear(l) => {
            let count = (32 * groups).div_ceil(l.group());
            let (d, zero) = head.split_at(scales * count);
            whole[..d.len()].copy_from_slice(d);
            whole[scales * (256 / l.group())..][..zero.len()].copy_from_slice(zero);
        }
        _ => whole[..head.len()].copy_from_slice(head),
    }
}

/// Moves fields of six bits, eight at a time (see `myq_blocks::panels::sixes`): the u-th eight
/// of a chunk of `groups` groups to place `to(u)` of a whole one.
fn eights(groups: usize, from: &[u8], out: &mut [u8], to: impl Fn(usize) -> usize) {
    // Eights in the low and in the high bytes of a chunk of n groups; a byte of the first holds
    // two fields, one of the second the rest of four.
    let places = |n: usize, u: usize| {
        let high = n.div_ceil(2);
        (8 * (u % n), 4 * (u / n), 8 * (n + u % high), 2 * (u / high))
    };
    let word = |b: &[u8], at: usize| b[at..].first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
    let mut put = |at: usize, v: u64| {
        let v = word(out, at) | v;
        out[at..at + 8].copy_from_slice(&v.to_le_bytes());
    };
    const EACH: u64 = 0x0101_0101_0101_0101;
    for u in 0..2 * groups {
        let (low, nibble, high, top) = places(groups, u);
        let low = word(from, low) >> nibble & (15 * EACH);
        let high = word(from, high) >> top & (3 * EACH);
        let (at, nibble, above, top) = places(8, to(u));
        put(at, low << nibble);
        put(above, high << top);
    }
}
