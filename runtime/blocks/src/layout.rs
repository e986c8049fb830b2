//! `repr(C)` blocks with their sizes asserted, in GGUF's byte order.
//!
//! Source of the layouts: the GGUF tensor types of the same names. Numbers in comments are
//! offsets within the block.

use bytemuck::{Pod, Zeroable};
use half::f16;

/// Weights in a superblock.
pub const SUPER: usize = 256;

macro_rules! block {
    ($(#[$doc:meta])* $name:ident = $size:literal { $($(#[$fdoc:meta])* $field:ident : $ty:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size && align_of::<$name>() <= 2);
    };
}

block! {
    /// 4 bits: `w = d·(q − 8)`; byte i holds weights i (low) and i+16 (high).
    Q4_0 = 18 { /** scale */ d: f16, /** codes */ qs: [u8; 16], }
}
block! {
    /// 4 bits: `w = d·q + m`.
    Q4_1 = 20 { /** scale */ d: f16, /** minimum */ m: f16, /** codes */ qs: [u8; 16], }
}
block! {
    /// 5 bits: `w = d·(q − 16)`; bit i of `qh` is the fifth bit of weight i.
    Q5_0 = 22 { /** scale */ d: f16, /** high bits, little-endian */ qh: [u8; 4], /** low codes */ qs: [u8; 16], }
}
block! {
    /// 5 bits: `w = d·q + m`.
    Q5_1 = 24 { /** scale */ d: f16, /** minimum */ m: f16, /** high bits */ qh: [u8; 4], /** low codes */ qs: [u8; 16], }
}
block! {
    /// 8 bits: `w = d·q`.
    Q8_0 = 34 { /** scale */ d: f16, /** codes */ qs: [i8; 32], }
}
block! {
    /// 4 bits through [`IQ4NL_LEVELS`]: `w = d·level[q]`.
    Iq4Nl = 18 { /** scale */ d: f16, /** codes */ qs: [u8; 16], }
}
block! {
    /// 2 bits: `w = d·s·q − dmin·m` with s (low) and m (high nibble) of each 16 weights.
    Q2K = 84 { /** sub-scales and minima */ scales: [u8; 16], /** two halves of 128: byte i, shifts 0 2 4 6: weights i, i+32, i+64, i+96 */ qs: [u8; 64], /** super-scale */ d: f16, /** super-minimum */ dmin: f16, }
}
block! {
    /// 3 bits: `w = d·(s − 32)·(q − 4)`, s of 6 bits for each 16 weights.
    Q3K = 110 { /** third bits: weight w is bit w/32 of byte w%32 */ hmask: [u8; 32], /** low two bits, as in Q2K */ qs: [u8; 64], /** sixteen 6-bit sub-scales, see [`q3k_scales`] */ scales: [u8; 12], /** super-scale */ d: f16, }
}
block! {
    /// 4 bits: `w = d·s·q − dmin·m`, s and m of 6 bits for each 32 weights.
    Q4K = 144 { /** super-scale */ d: f16, /** super-minimum */ dmin: f16, /** see [`k4_scale_min`] */ scales: [u8; 12], /** four chunks of 64: low nibbles first */ qs: [u8; 128], }
}
block! {
    /// 5 bits: as Q4K with a plane of fifth bits.
    Q5K = 176 { /** super-scale */ d: f16, /** super-minimum */ dmin: f16, /** see [`k4_scale_min`] */ scales: [u8; 12], /** fifth bits: weight w is bit w/32 of byte w%32 */ qh: [u8; 32], /** low nibbles, as in Q4K */ qs: [u8; 128], }
}
block! {
    /// 6 bits: `w = d·s·(q − 32)`, s an int8 for each 16 weights.
    Q6K = 210 { /** low nibbles: two halves of 64 bytes */ ql: [u8; 128], /** high two bits: two halves of 32 bytes, shifts 0 2 4 6 */ qh: [u8; 64], /** sub-scales */ scales: [i8; 16], /** super-scale */ d: f16, }
}
block! {
    /// Ternary, five to a byte: `w = d·(t − 1)`; see [`tq1_code`].
    Tq1_0 = 54 { /** 240 weights, five to a byte */ qs: [u8; 48], /** 16 weights, four to a byte */ qh: [u8; 4], /** scale */ d: f16, }
}
block! {
    /// Ternary, four to a byte: `w = d·(t − 1)`; positions as in Q2K.
    Tq2_0 = 66 { /** codes */ qs: [u8; 64], /** scale */ d: f16, }
}

/// Levels of IQ4_NL, from the GGUF format.
pub const IQ4NL_LEVELS: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// The 6-bit scale and minimum of sub-block `j` (0..8) of Q4K and Q5K.
///
/// Bytes 0..4 hold scales 0..4 and bytes 4..8 minima 0..4, in their low six bits; the low
/// nibbles of 4..8 of both are in bytes 8..12, their upper two bits in the tops of 0..8.
#[inline]
pub fn k4_scale_min(scales: &[u8; 12], j: usize) -> (u8, u8) {
    if j < 4 {
        (scales[j] & 63, scales[j + 4] & 63)
    } else {
        (
            (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4),
            (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4),
        )
    }
}

/// Packs eight 6-bit scales and minima; the inverse of [`k4_scale_min`].
pub fn k4_pack(scale: &[u8; 8], min: &[u8; 8]) -> [u8; 12] {
    let mut out = [0; 12];
    for j in 0..4 {
        out[j] = (scale[j] & 63) | ((scale[j + 4] >> 4) << 6);
        out[j + 4] = (min[j] & 63) | ((min[j + 4] >> 4) << 6);
        out[j + 8] = (scale[j + 4] & 15) | ((min[j + 4] & 15) << 4);
    }
    out
}

/// The sixteen sub-scales of Q3K, with their offset of 32 taken off: −32 … 31.
///
/// The low nibble of scale j is the low nibble of byte j (j < 8) or the high nibble of byte
/// j−8; its upper two bits are bits 2·(j/4) of byte 8 + j%4.
#[inline]
pub fn q3k_scales(packed: &[u8; 12]) -> [i8; 16] {
    let mut out = [0; 16];
    for (j, s) in out.iter_mut().enumerate() {
        let low = if j < 8 {
            packed[j] & 15
        } else {
            packed[j - 8] >> 4
        };
        let high = (packed[8 + j % 4] >> (2 * (j / 4))) & 3;
        *s = (low | (high << 4)) as i8 - 32;
    }
    out
}

/// Packs sixteen sub-scales of −32 … 31; the inverse of [`q3k_scales`].
pub fn q3k_pack(scales: &[i8; 16]) -> [u8; 12] {
    let mut out = [0; 12];
    for (j, &s) in scales.iter().enumerate() {
        let s = (s + 32) as u8;
        out[j % 8] |= (s & 15) << (4 * (j / 8));
        out[8 + j % 4] |= (s >> 4) << (2 * (j / 4));
    }
    out
}

/// Ternary digit `n` (0..5) of a TQ1_0 byte, as 0, 1 or 2.
///
/// A byte holds `ceil(256·v/243)` of the base-3 number v; multiplying by a power of three
/// (mod 256) moves the wanted digit to the top, where times three over 256 reads it.
#[inline]
pub fn tq1_code(byte: u8, n: usize) -> u8 {
    const POW3: [u8; 5] = [1, 3, 9, 27, 81];
    let v = byte.wrapping_mul(POW3[n]);
    ((u16::from(v) * 3) >> 8) as u8
}

/// Packs up to five ternary digits (first digit most significant) into a TQ1_0 byte.
pub fn tq1_pack(digits: &[u8; 5]) -> u8 {
    let v = digits.iter().fold(0u32, |v, &t| v * 3 + u32::from(t));
    (v * 256).div_ceil(243) as u8
}
