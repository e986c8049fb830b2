//! Plain rows to panels.

use super::{
    PANEL, SUPER, VECTOR, checked_row_bytes, chunk_bytes, four, groups_of, head_bytes, planes,
    sixes,
};
use crate::{DType, dense, layout, tail};

/// Stores eight plain rows as a panel; both have eight times the bytes of a row.
///
/// # Panics
/// If the format has no panels for that row length, or a length is wrong.
pub fn pack(dtype: DType, cols: usize, rows: &[u8], panel: &mut [u8]) {
    let row_bytes = checked_row_bytes(dtype, cols, rows.len(), panel.len());
    panel.fill(0);
    let step = chunk_bytes(dtype, 8);
    let mut codes = [0; SUPER];
    for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
        for i in 0..cols.div_ceil(SUPER) {
            let groups = groups_of(cols, i);
            let chunk = &mut panel[step * i..];
            let (head, planes) = chunk.split_at_mut(head_bytes(dtype, groups));
            plain_chunk(dtype, cols, row, i, |block| {
                read_codes(dtype, block, &mut codes);
                put_head(dtype, groups, r, block, head);
            });
            if let DType::Linear(l) = dtype {
                put_linear(l, cols, row, i, (r, groups), &mut codes, head);
            }
            put_codes(dtype, groups, r, &codes, planes);
        }
    }
}

/// Calls `f` with chunk `i` of a plain row: the block, or the blocks, or a partial superblock
/// made whole. Not for linear formats.
fn plain_chunk(dtype: DType, cols: usize, row: &[u8], i: usize, f: impl FnOnce(&[u8])) {
    let Some(facts) = dtype.facts() else { return };
    let (len, n) = (
        facts.bytes * SUPER / facts.block,
        (cols - SUPER * i).min(SUPER),
    );
    let row = &row[len * i..];
    if n == SUPER || !dtype.is_super() {
        f(&row[..len.min(row.len())]);
    } else {
        let mut whole = [0; tail::MAX_BLOCK];
        tail::expand(dtype, row, n, &mut whole[..len]);
        f(&whole[..len]);
    }
}

/// Stored codes of a plain chunk; loops over 32 neighbours, which compilers vectorise.
fn read_codes(dtype: DType, b: &[u8], out: &mut [u8; SUPER]) {
    match dtype {
        DType::Q2K => pairs(&b[16..80], out, 0),
        DType::Tq2_0 => pairs(&b[..64], out, 0),
        DType::Q3K => {
            pairs(&b[32..96], out, 0);
            bits(&b[..32], out, 2);
        }
        DType::Q4K => nibbles(&b[16..144], 32, out),
        DType::Q5K => {
            nibbles(&b[48..176], 32, out);
            bits(&b[16..48], out, 4);
        }
        DType::Q6K => {
            nibbles(&b[..128], 64, out);
            pairs(&b[128..192], out, 4);
        }
        _ => {
            let bytes = dtype.facts().map_or(0, |f| f.bytes);
            for (b, out) in b.chunks_exact(bytes).zip(out.as_chunks_mut::<32>().0) {
                small_codes(dtype, b, out);
            }
        }
    }
}

/// Adds a 2-bit plane, shifted.
fn pairs(plane: &[u8], out: &mut [u8; SUPER], shift: u32) {
    let fresh = shift == 0;
    for (p, out) in plane.chunks_exact(32).zip(out.chunks_exact_mut(128)) {
        for (s, out) in out.chunks_exact_mut(32).enumerate() {
            for (o, b) in out.iter_mut().zip(p) {
                let v = (b >> (2 * s) & 3) << shift;
                *o = if fresh { v } else { *o | v };
            }
        }
    }
}

/// Adds a 1-bit plane of 32 bytes, shifted.
fn bits(plane: &[u8], out: &mut [u8; SUPER], shift: u32) {
    for (k, out) in out.chunks_exact_mut(32).enumerate() {
        for (o, b) in out.iter_mut().zip(plane) {
            *o |= (b >> k & 1) << shift;
        }
    }
}

/// A nibble plane whose chunks have `half` low and `half` high ones.
fn nibbles(plane: &[u8], half: usize, out: &mut [u8; SUPER]) {
    for (p, out) in plane.chunks_exact(half).zip(out.chunks_exact_mut(2 * half)) {
        let (low, high) = out.split_at_mut(half);
        low.iter_mut().zip(p).for_each(|(o, b)| *o = b & 15);
        high.iter_mut().zip(p).for_each(|(o, b)| *o = b >> 4);
    }
}

/// Codes of a block of 32.
fn small_codes(dtype: DType, b: &[u8], out: &mut [u8; 32]) {
    let (at, high) = match dtype {
        DType::Q8_0 => return out.copy_from_slice(&b[2..34]),
        DType::Q4_1 => (4, None),
        DType::Q5_0 => (6, Some(2)),
        DType::Q5_1 => (8, Some(4)),
        _ => (2, None),
    };
    for i in 0..16 {
        out[i] = b[at + i] & 15;
        out[16 + i] = b[at + i] >> 4;
    }
    if let Some(h) = high {
        let v = u32::from_le_bytes([b[h], b[h + 1], b[h + 2], b[h + 3]]);
        for (i, o) in out.iter_mut().enumerate() {
            *o |= (v >> i & 1) as u8 * 16;
        }
    }
}

/// Scales of row `r` from a plain chunk.
fn put_head(dtype: DType, groups: usize, r: usize, b: &[u8], head: &mut [u8]) {
    let mut half = |i: usize, from: usize| {
        head[2 * i..2 * i + 2].copy_from_slice(&b[from..from + 2]);
    };
    let sixteen = |j: usize| 16 * (j / 2) + 2 * r + j % 2;
    match dtype {
        DType::Q2K => {
            half(r, 80);
            half(PANEL + r, 82);
            for j in 0..2 * groups {
                head[4 * PANEL + sixteen(j)] = b[j];
            }
        }
        DType::Q3K => {
            half(r, 108);
            let mut packed = [0; 12];
            packed.copy_from_slice(&b[96..108]);
            for (j, s) in layout::q3k_scales(&packed)
                .iter()
                .take(2 * groups)
                .enumerate()
            {
                put_six(&mut head[2 * PANEL..], groups, sixteen(j), (s + 32) as u8);
            }
        }
        DType::Q4K | DType::Q5K => {
            half(r, 0);
            half(PANEL + r, 2);
            let mut packed = [0; 12];
            packed.copy_from_slice(&b[4..16]);
            let fields = &mut head[4 * PANEL..];
            for g in 0..groups {
                let (s, m) = layout::k4_scale_min(&packed, g);
                put_six(fields, groups, PANEL * g + r, s);
                put_six(fields, groups, PANEL * (groups + g) + r, m);
            }
        }
        DType::Q6K => {
            half(r, 208);
            for j in 0..2 * groups {
                head[2 * PANEL + sixteen(j)] = b[192 + j];
            }
        }
        DType::Tq2_0 => half(r, 64),
        _ => {
            let bytes = dtype.facts().map_or(0, |f| f.bytes);
            for g in 0..groups {
                half(PANEL * g + r, bytes * g);
                if matches!(dtype, DType::Q4_1 | DType::Q5_1) {
                    half(PANEL * (groups + g) + r, bytes * g + 2);
                }
            }
        }
    }
}

/// Codes, scales and zero-points of chunk `i` of a plain row of a linear format.
fn put_linear(
    l: crate::Linear,
    cols: usize,
    row: &[u8],
    i: usize,
    (r, groups): (usize, usize),
    codes: &mut [u8; SUPER],
    head: &mut [u8],
) {
    let (stream, scales, zeros) = l.split(row, cols);
    dense::unpack(
        l.bits(),
        &stream[SUPER * i * l.bits() as usize / 8..],
        &mut codes[..32 * groups],
    );
    let (first, count) = (SUPER / l.group() * i, (32 * groups).div_ceil(l.group()));
    for s in 0..count {
        let at = 2 * (PANEL * s + r);
        head[at..at + 2].copy_from_slice(&scales[2 * (first + s)..][..2]);
        if l.asymmetric() {
            head[2 * PANEL * count + PANEL * s + r] = zeros[first + s];
        }
    }
}

/// Writes row `r` of the planes of a chunk, which are zero or this row's.
fn put_codes(dtype: DType, groups: usize, r: usize, codes: &[u8; SUPER], out: &mut [u8]) {
    let Some((low, high)) = planes(dtype) else {
        return;
    };
    let bytes = VECTOR * (low + high) as usize;
    let mask = four(((1u32 << low) - 1) as u8);
    for (codes, out) in codes
        .chunks_exact(32)
        .zip(out.chunks_exact_mut(bytes))
        .take(groups)
    {
        let mut quads = [0u32; 8];
        for (q, c) in quads.iter_mut().zip(codes.as_chunks::<4>().0) {
            *q = u32::from_le_bytes(*c);
        }
        let (first, second) = out.split_at_mut(VECTOR * low as usize);
        put_plane(&quads.map(|q| q & mask), low, r, first);
        if high > 0 {
            let mask = four(((1u32 << high) - 1) as u8);
            put_plane(&quads.map(|q| q >> low & mask), high, r, second);
        }
    }
}

fn put_plane(quads: &[u32; 8], bits: u32, r: usize, out: &mut [u8]) {
    let per = (8 / bits) as usize;
    for (quads, out) in quads.chunks_exact(per).zip(out.chunks_exact_mut(VECTOR)) {
        let shifted = quads
            .iter()
            .enumerate()
            .map(|(s, q)| q << (s as u32 * bits));
        let word = shifted.fold(0, |a, b| a | b);
        out[4 * r..4 * r + 4].copy_from_slice(&word.to_le_bytes());
    }
}

/// Writes field `i`, which is zero before.
pub(super) fn put_six(bytes: &mut [u8], groups: usize, i: usize, v: u8) {
    let (at, shift, high, top) = sixes(groups, i);
    bytes[at] |= (v & 15) << shift;
    bytes[high] |= (v >> 4) << top;
}
