//! Dense little-endian bit streams of linear groups: 2, 3, 5 or 6 bits a weight.
//!
//! A row is `[codes, padded with zero bits to 4 bytes][f16 scale per group][u8 zero-point
//! per group, asymmetric only]`, padded to 4 bytes. Weight i takes bits `i·b .. (i+1)·b` of
//! the stream, lowest bit first: 8 weights of 3 bits fill 3 bytes, 8 of 5 bits 5 bytes,
//! 4 of 6 bits 3 bytes. The value is `scale · (code − zero)`; symmetric groups have the
//! fixed zero `2^(b−1)`.

use half::f16;

/// Parameters of a linear format; only valid ones can be made.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Linear {
    bits: u8,
    group: u8,
    zero: bool,
}

impl Linear {
    /// `bits` of 2, 3, 5 or 6; `group` of 32, 64 or 128; `zero` for a zero-point per group.
    pub fn new(bits: u8, group: usize, zero: bool) -> Option<Linear> {
        let ok = matches!(bits, 2 | 3 | 5 | 6) && matches!(group, 32 | 64 | 128);
        ok.then_some(Linear {
            bits,
            group: group as u8,
            zero,
        })
    }

    /// All 24 of them.
    pub fn all() -> impl Iterator<Item = Linear> {
        [2u8, 3, 5, 6].into_iter().flat_map(|bits| {
            [32u8, 64, 128].into_iter().flat_map(move |group| {
                [false, true]
                    .into_iter()
                    .map(move |zero| Linear { bits, group, zero })
            })
        })
    }

    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        self.bits as u32
    }

    /// Weights that share a scale.
    pub const fn group(self) -> usize {
        self.group as usize
    }

    /// Whether each group has a zero-point of its own.
    pub const fn asymmetric(self) -> bool {
        self.zero
    }

    /// `L3G64` or, asymmetric, `L3G64Z`.
    pub fn name(self) -> String {
        format!(
            "L{}G{}{}",
            self.bits,
            self.group,
            if self.zero { "Z" } else { "" }
        )
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<Linear> {
        Linear::all().find(|l| l.name() == name)
    }

    /// Bytes of the code stream of a row, padding included.
    pub fn code_bytes(self, cols: usize) -> Option<usize> {
        Some(cols.checked_mul(usize::from(self.bits))?.div_ceil(32) * 4)
    }

    /// Bytes of a row; `None` unless `cols` is a multiple of 8.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(8) {
            return None;
        }
        let per_group = if self.zero { 3 } else { 2 };
        let groups = cols.div_ceil(self.group());
        Some(
            self.code_bytes(cols)?
                .checked_add(groups * per_group)?
                .next_multiple_of(4),
        )
    }

    /// The parts of a row: codes, scales as little-endian f16 pairs, zero-points.
    pub fn split(self, row: &[u8], cols: usize) -> (&[u8], &[u8], &[u8]) {
        let codes = (cols * usize::from(self.bits)).div_ceil(32) * 4;
        let groups = cols.div_ceil(self.group());
        let (codes, rest) = row.split_at(codes);
        let (scales, rest) = rest.split_at(2 * groups);
        (codes, scales, if self.zero { &rest[..groups] } else { &[] })
    }

    /// Scale and zero-point of group `g` from the parts that [`Linear::split`] gives.
    #[inline]
    pub fn scale_zero(self, scales: &[u8], zeros: &[u8], g: usize) -> (f32, i32) {
        let scale = f16::from_le_bytes([scales[2 * g], scales[2 * g + 1]]).to_f32();
        let zero = if self.zero {
            i32::from(zeros[g])
        } else {
            1 << (self.bits - 1)
        };
        (scale, zero)
    }
}

/// Appends nothing, allocates nothing: writes `codes` of `bits` bits into `out`, whose
/// length must be at least `codes.len()·bits/8` rounded up; the rest of `out` becomes zero.
pub fn pack(bits: u32, codes: &[u8], out: &mut [u8]) {
    out.fill(0);
    for (i, &code) in codes.iter().enumerate() {
        let bit = i * bits as usize;
        let v = u32::from(code) << (bit % 8);
        out[bit / 8] |= v as u8;
        if bit % 8 + bits as usize > 8 {
            out[bit / 8 + 1] |= (v >> 8) as u8;
        }
    }
}

/// Reads `out.len()` codes of `bits` bits; the inverse of [`pack`].
pub fn unpack(bits: u32, packed: &[u8], out: &mut [u8]) {
    let mask = ((1u32 << bits) - 1) as u8;
    // Eight codes take exactly `bits` bytes, so every group starts on a byte.
    let step = bits as usize;
    for (eight, bytes) in out.chunks_mut(8).zip(packed.chunks(step)) {
        let mut v = [0u8; 8];
        v[..bytes.len()].copy_from_slice(bytes);
        let v = u64::from_le_bytes(v);
        for (i, q) in eight.iter_mut().enumerate() {
            *q = (v >> (i as u32 * bits)) as u8 & mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: &mut u64) -> u64 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed
    }

    #[test]
    fn a_million_codes_come_back() {
        let mut seed = 7;
        for bits in [2u32, 3, 5, 6] {
            let codes: Vec<u8> = (0..1_000_000)
                .map(|_| (random(&mut seed) & ((1 << bits) - 1)) as u8)
                .collect();
            let mut packed = vec![0; codes.len() * bits as usize / 8];
            pack(bits, &codes, &mut packed);
            let mut back = vec![0; codes.len()];
            unpack(bits, &packed, &mut back);
            assert!(codes == back, "{bits} bits");
        }
    }

    #[test]
    fn bit_order_is_little_endian() {
        let mut out = [0; 3];
        pack(3, &[1, 2, 3, 4, 5, 6, 7, 0], &mut out);
        let v = u32::from_le_bytes([out[0], out[1], out[2], 0]);
        assert_eq!(
            v,
            1 | 2 << 3 | 3 << 6 | 4 << 9 | 5 << 12 | 6 << 15 | 7 << 18
        );
    }
}
