//! The partial superblock that ends a row whose length is not a multiple of 256.
//!
//! It holds `n` weights, a multiple of 32, and only their own sub-blocks, so that a row of
//! 576 weights keeps its low width. Fields stand in the order of the whole block:
//!
//! * Planes of 2-bit and 4-bit codes are cut into chunks of 128, 64 and 32 weights, in that
//!   order. A chunk of m weights in a 2-bit plane takes m/4 bytes: byte i holds weights
//!   i, i+m/4, i+m/2, i+3m/4 from the lowest bits up. For m = 128 that is the half of a
//!   whole block. Nibble planes of Q4_K and Q5_K use chunks of 64 (as the whole block) and
//!   32: byte i holds weights i (low) and i+m/2 (high); those of Q6_K chunks of 128 as the
//!   whole block, then 64 and 32 in the same way.
//! * Planes of one high bit are a bit stream: weight w is bit w%8 of byte w/8.
//! * Sub-scales: Q2_K one byte a sub-block, Q3_K a stream of 6-bit fields, Q4_K and Q5_K a
//!   stream of 12-bit fields (scale low, minimum high), Q6_K one int8.
//! * TQ1_0: m = ⌈n/5⌉ bytes; byte i holds weights i, i+m, i+2m, … as base-3 digits.
//! * The whole is padded with a zero byte to an even length.
//!
//! [`expand`] turns it into a whole block whose missing sub-blocks have zero scales, which
//! any kernel can run; [`compact`] is its inverse.

use crate::DType;
use crate::layout::{self, k4_pack, k4_scale_min, q3k_pack, q3k_scales};

/// Bytes of a partial superblock of `n` weights; `None` unless n is a multiple of 32 below
/// 256 and `dtype` a superblock format.
pub const fn bytes(dtype: DType, n: usize) -> Option<usize> {
    if n == 0 || n >= 256 || !n.is_multiple_of(32) {
        return None;
    }
    let exact = match dtype {
        DType::Q2K => 4 + n / 16 + n / 4,
        DType::Q3K => 2 + n / 8 + n / 4 + (n / 16 * 6).div_ceil(8),
        DType::Q4K => 4 + (n / 32 * 12).div_ceil(8) + n / 2,
        DType::Q5K => 4 + (n / 32 * 12).div_ceil(8) + n / 8 + n / 2,
        DType::Q6K => 2 + n / 2 + n / 4 + n / 16,
        DType::Tq1_0 => 2 + n.div_ceil(5),
        DType::Tq2_0 => 2 + n / 4,
        _ => return None,
    };
    Some(exact.next_multiple_of(2))
}

/// Bytes of the largest whole superblock: room for [`expand`]'s result.
pub const MAX_BLOCK: usize = 210;

/// Writes the whole block that stands for the partial superblock `part` of `n` weights.
///
/// `out` has the whole block's length. Panics where lengths do not fit the format: callers
/// have them from [`bytes`].
#[inline]
pub fn expand(dtype: DType, part: &[u8], n: usize, out: &mut [u8]) {
    out.fill(0);
    match dtype {
        DType::Q2K => {
            let (scales, rest) = part.split_at(n / 16);
            let (qs, d) = rest.split_at(n / 4);
            out[..n / 16].copy_from_slice(scales);
            expand_pairs(qs, n, &mut out[16..80]);
            out[80..84].copy_from_slice(&d[..4]);
        }
        DType::Q3K => {
            let (high, rest) = part.split_at(n / 8);
            let (qs, rest) = rest.split_at(n / 4);
            let (scales, d) = rest.split_at((n / 16 * 6).div_ceil(8));
            expand_bits(high, n, &mut out[..32]);
            expand_pairs(qs, n, &mut out[32..96]);
            let mut full = [0i8; 16];
            for (j, s) in full.iter_mut().enumerate().take(n / 16) {
                *s = field(scales, 6 * j, 6) as i8 - 32;
            }
            out[96..108].copy_from_slice(&q3k_pack(&full));
            out[108..110].copy_from_slice(&d[..2]);
        }
        DType::Q4K | DType::Q5K => {
            let (d, rest) = part.split_at(4);
            let (scales, rest) = rest.split_at((n / 32 * 12).div_ceil(8));
            out[..4].copy_from_slice(d);
            let (mut s, mut m) = ([0; 8], [0; 8]);
            for j in 0..n / 32 {
                s[j] = field(scales, 12 * j, 6);
                m[j] = field(scales, 12 * j + 6, 6);
            }
            out[4..16].copy_from_slice(&k4_pack(&s, &m));
            if dtype == DType::Q5K {
                let (high, qs) = rest.split_at(n / 8);
                expand_bits(high, n, &mut out[16..48]);
                expand_nibbles(&qs[..n / 2], n, 64, &mut out[48..176]);
            } else {
                expand_nibbles(&rest[..n / 2], n, 64, &mut out[16..144]);
            }
        }
        DType::Q6K => {
            let (ql, rest) = part.split_at(n / 2);
            let (qh, rest) = rest.split_at(n / 4);
            expand_nibbles(ql, n, 128, &mut out[..128]);
            expand_pairs(qh, n, &mut out[128..192]);
            out[192..192 + n / 16].copy_from_slice(&rest[..n / 16]);
            out[208..210].copy_from_slice(&rest[n / 16..n / 16 + 2]);
        }
        DType::Tq2_0 => {
            expand_pairs(&part[..n / 4], n, &mut out[..64]);
            out[64..66].copy_from_slice(&part[n / 4..n / 4 + 2]);
        }
        DType::Tq1_0 => expand_trits(part, n, out),
        _ => {}
    }
}

/// Writes the partial superblock for the first `n` weights of the whole block `block`.
pub fn compact(dtype: DType, block: &[u8], n: usize, out: &mut [u8]) {
    out.fill(0);
    match dtype {
        DType::Q2K => {
            out[..n / 16].copy_from_slice(&block[..n / 16]);
            compact_pairs(&block[16..80], n, &mut out[n / 16..]);
            out[n / 16 + n / 4..][..4].copy_from_slice(&block[80..84]);
        }
        DType::Q3K => {
            compact_bits(&block[..32], n, out);
            compact_pairs(&block[32..96], n, &mut out[n / 8..]);
            let at = n / 8 + n / 4;
            let packed = std::array::from_fn(|i| block[96 + i]);
            for (j, &s) in q3k_scales(&packed).iter().enumerate().take(n / 16) {
                set_field(&mut out[at..], 6 * j, 6, (s + 32) as u8);
            }
            let end = at + (n / 16 * 6).div_ceil(8);
            out[end..end + 2].copy_from_slice(&block[108..110]);
        }
        DType::Q4K | DType::Q5K => {
            out[..4].copy_from_slice(&block[..4]);
            let packed = std::array::from_fn(|i| block[4 + i]);
            for j in 0..n / 32 {
                let (s, m) = k4_scale_min(&packed, j);
                set_field(&mut out[4..], 12 * j, 6, s);
                set_field(&mut out[4..], 12 * j + 6, 6, m);
            }
            let at = 4 + (n / 32 * 12).div_ceil(8);
            if dtype == DType::Q5K {
                compact_bits(&block[16..48], n, &mut out[at..]);
                compact_nibbles(&block[48..176], n, 64, &mut out[at + n / 8..]);
            } else {
                compact_nibbles(&block[16..144], n, 64, &mut out[at..]);
            }
        }
        DType::Q6K => {
            compact_nibbles(&block[..128], n, 128, out);
            compact_pairs(&block[128..192], n, &mut out[n / 2..]);
            let at = n / 2 + n / 4;
            out[at..at + n / 16].copy_from_slice(&block[192..192 + n / 16]);
            out[at + n / 16..][..2].copy_from_slice(&block[208..210]);
        }
        DType::Tq2_0 => {
            compact_pairs(&block[..64], n, out);
            out[n / 4..n / 4 + 2].copy_from_slice(&block[64..66]);
        }
        DType::Tq1_0 => compact_trits(block, n, out),
        _ => {}
    }
}

/// A field of up to 8 bits that starts at `bit` of a little-endian stream.
#[inline]
fn field(stream: &[u8], bit: usize, bits: u32) -> u8 {
    let low = u16::from(stream[bit / 8]);
    let high = stream.get(bit / 8 + 1).map_or(0, |&b| u16::from(b));
    (((low | high << 8) >> (bit % 8)) & ((1 << bits) - 1)) as u8
}

fn set_field(stream: &mut [u8], bit: usize, bits: u32, value: u8) {
    let v = (u16::from(value) & ((1 << bits) - 1)) << (bit % 8);
    stream[bit / 8] |= v as u8;
    if bit % 8 + bits as usize > 8 {
        stream[bit / 8 + 1] |= (v >> 8) as u8;
    }
}

/// 2-bit planes: chunks of the partial block into the halves of the whole one.
#[inline]
fn expand_pairs(part: &[u8], n: usize, out: &mut [u8]) {
    let whole = n / 128 * 32;
    out[..whole].copy_from_slice(&part[..whole]);
    let (mut part, half) = (&part[whole..], &mut out[whole..]);
    if n % 128 >= 64 {
        for i in 0..16 {
            let b = part[i];
            half[i] |= (b & 3) | (b >> 4 & 3) << 2;
            half[16 + i] |= (b >> 2 & 3) | (b >> 6) << 2;
        }
        part = &part[16..];
    }
    if n % 64 == 32 {
        let shift = if n % 128 > 64 { 4 } else { 0 };
        for i in 0..8 {
            for k in 0..4 {
                half[8 * k + i] |= (part[i] >> (2 * k) & 3) << shift;
            }
        }
    }
}

fn compact_pairs(full: &[u8], n: usize, out: &mut [u8]) {
    let whole = n / 128 * 32;
    out[..whole].copy_from_slice(&full[..whole]);
    let (half, mut out) = (&full[whole..], &mut out[whole..]);
    if n % 128 >= 64 {
        for i in 0..16 {
            let (a, b) = (half[i], half[16 + i]);
            out[i] = (a & 3) | (b & 3) << 2 | (a >> 2 & 3) << 4 | (b >> 2 & 3) << 6;
        }
        out = &mut out[16..];
    }
    if n % 64 == 32 {
        let shift = if n % 128 > 64 { 4 } else { 0 };
        for i in 0..8 {
            out[i] = (0..4).fold(0, |v, k| v | (half[8 * k + i] >> shift & 3) << (2 * k));
        }
    }
}

/// Nibble planes; `chunk` is the whole block's own chunk: 64 (Q4_K, Q5_K) or 128 (Q6_K).
#[inline]
fn expand_nibbles(part: &[u8], n: usize, chunk: usize, out: &mut [u8]) {
    let whole = n / chunk * (chunk / 2);
    out[..whole].copy_from_slice(&part[..whole]);
    let (mut part, half) = (&part[whole..], &mut out[whole..]);
    if n % chunk >= 64 {
        for i in 0..32 {
            half[i] = part[i] & 15;
            half[32 + i] = part[i] >> 4;
        }
        part = &part[32..];
    }
    if n % 64 == 32 {
        let shift = if n % chunk > 64 { 4 } else { 0 };
        for i in 0..16 {
            half[i] |= (part[i] & 15) << shift;
            half[16 + i] |= (part[i] >> 4) << shift;
        }
    }
}

fn compact_nibbles(full: &[u8], n: usize, chunk: usize, out: &mut [u8]) {
    let whole = n / chunk * (chunk / 2);
    out[..whole].copy_from_slice(&full[..whole]);
    let (half, mut out) = (&full[whole..], &mut out[whole..]);
    if n % chunk >= 64 {
        for i in 0..32 {
            out[i] = (half[i] & 15) | (half[32 + i] & 15) << 4;
        }
        out = &mut out[32..];
    }
    if n % 64 == 32 {
        let shift = if n % chunk > 64 { 4 } else { 0 };
        for i in 0..16 {
            out[i] = (half[i] >> shift & 15) | (half[16 + i] >> shift & 15) << 4;
        }
    }
}

/// One-bit planes: a stream in the partial block, bit w/32 of byte w%32 in the whole one.
#[inline]
fn expand_bits(part: &[u8], n: usize, out: &mut [u8]) {
    for g in 0..n / 32 {
        for i in 0..32 {
            out[i] |= (part[4 * g + i / 8] >> (i % 8) & 1) << g;
        }
    }
}

fn compact_bits(full: &[u8], n: usize, out: &mut [u8]) {
    for w in 0..n {
        out[w / 8] |= (full[w % 32] >> (w / 32) & 1) << (w % 8);
    }
}

/// Byte and digit of weight `w` in a whole TQ1_0 block; bytes 48.. are `qh`.
pub(crate) fn trit_place(w: usize) -> (usize, usize) {
    match w {
        0..160 => (w % 32, w / 32),
        160..240 => (32 + (w - 160) % 16, (w - 160) / 16),
        _ => (48 + (w - 240) % 4, (w - 240) / 4),
    }
}

fn expand_trits(part: &[u8], n: usize, out: &mut [u8]) {
    let m = n.div_ceil(5);
    let mut digits = [[0u8; 5]; 52];
    for (w, place) in (0..256).map(|w| (w, trit_place(w))) {
        // A missing weight is digit 1, the weight zero.
        digits[place.0][place.1] = if w < n {
            layout::tq1_code(part[w % m], w / m)
        } else {
            1
        };
    }
    for (byte, digits) in out.iter_mut().zip(&digits) {
        *byte = layout::tq1_pack(digits);
    }
    out[52..54].copy_from_slice(&part[m..m + 2]);
}

fn compact_trits(block: &[u8], n: usize, out: &mut [u8]) {
    let m = n.div_ceil(5);
    for (i, byte) in out.iter_mut().enumerate().take(m) {
        let digit = |k: usize| {
            let w = i + k * m;
            let (at, place) = trit_place(w);
            if w < n {
                layout::tq1_code(block[at], place)
            } else {
                0
            }
        };
        *byte = layout::tq1_pack(&std::array::from_fn(digit));
    }
    out[m..m + 2].copy_from_slice(&block[52..54]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::dequantize_row;
    use crate::dtype::TABLE;

    /// Whatever bytes a partial block has, going to a whole block and back keeps them, and
    /// the whole block dequantises to the same weights.
    #[test]
    fn expand_and_compact_are_inverse() {
        let mut seed = 3u64;
        let mut byte = || {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (seed >> 33) as u8
        };
        for f in TABLE.iter().filter(|f| f.block == 256) {
            for n in (32..256).step_by(32) {
                let mut whole = vec![0u8; f.bytes];
                whole.iter_mut().for_each(|b| *b = byte());
                let mut part = vec![0; bytes(f.dtype, n).unwrap()];
                compact(f.dtype, &whole, n, &mut part);
                let mut again = vec![0; f.bytes];
                expand(f.dtype, &part, n, &mut again);
                let mut part2 = vec![0; part.len()];
                compact(f.dtype, &again, n, &mut part2);
                assert_eq!(part, part2, "{} {n}", f.name);
                let (mut x, mut y) = (vec![0.0; 256], vec![0.0; n]);
                dequantize_row(f.dtype, &whole, &mut x);
                dequantize_row(f.dtype, &part, &mut y);
                let bits = |v: &[f32]| v.iter().map(|f| f.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&x[..n]), bits(&y), "{} {n}", f.name);
            }
        }
    }
}
