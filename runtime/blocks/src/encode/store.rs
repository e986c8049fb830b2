//! From codes and scales to stored bytes: the inverse of [`crate::decode::decode`].

use crate::DType;
use crate::decode::Decoded;
use crate::layout::*;
use crate::tail;
use bytemuck::bytes_of;
use half::f16;

/// Writes a whole block of an integer format; what `decode` gives is stored without change.
///
/// `out` has the block's length. Codes must lie in the range of [`super::code_range`] and
/// scales in that of the format; a row's partial superblock goes on to [`tail::compact`].
/// Float and linear formats have no blocks and leave `out` as it is.
pub fn store_block(dtype: DType, b: &Decoded, out: &mut [u8]) {
    let d = f16::from_f32(b.d);
    let code = |w: usize, offset: i8| (b.q[w] + offset) as u8;
    match dtype {
        DType::Q4_0 => put(
            out,
            &Q4_0 {
                d,
                qs: nibbles(|w| code(w, 8)),
            },
        ),
        DType::Q4_1 => put(
            out,
            &Q4_1 {
                d,
                m: f16::from_f32(-b.dmin),
                qs: nibbles(|w| code(w, 0)),
            },
        ),
        DType::Q5_0 => {
            let (qh, qs) = fifth_bits(|w| code(w, 16));
            put(out, &Q5_0 { d, qh, qs });
        }
        DType::Q5_1 => {
            let (qh, qs) = fifth_bits(|w| code(w, 0));
            put(
                out,
                &Q5_1 {
                    d,
                    m: f16::from_f32(-b.dmin),
                    qh,
                    qs,
                },
            );
        }
        DType::Q8_0 => put(
            out,
            &Q8_0 {
                d,
                qs: std::array::from_fn(|w| b.q[w]),
            },
        ),
        DType::Iq4Nl => put(
            out,
            &Iq4Nl {
                d,
                qs: nibbles(|w| level(b.q[w])),
            },
        ),
        DType::Q2K => {
            let scales = std::array::from_fn(|j| b.scale[j] as u8 | (b.min[j] as u8) << 4);
            put(
                out,
                &Q2K {
                    scales,
                    qs: pairs(|w| code(w, 0)),
                    d,
                    dmin: f16::from_f32(b.dmin),
                },
            );
        }
        DType::Q3K => {
            let scales = q3k_pack(&b.scale.map(|s| s as i8));
            put(
                out,
                &Q3K {
                    hmask: top_bits(|w| code(w, 4) >> 2),
                    qs: pairs(|w| code(w, 4) & 3),
                    scales,
                    d,
                },
            );
        }
        DType::Q4K => {
            let qs = chunks_of_64(|w| code(w, 0));
            put(
                out,
                &Q4K {
                    d,
                    dmin: f16::from_f32(b.dmin),
                    scales: six_bit_pairs(b),
                    qs,
                },
            );
        }
        DType::Q5K => {
            let (qh, qs) = (
                top_bits(|w| code(w, 0) >> 4),
                chunks_of_64(|w| code(w, 0) & 15),
            );
            put(
                out,
                &Q5K {
                    d,
                    dmin: f16::from_f32(b.dmin),
                    scales: six_bit_pairs(b),
                    qh,
                    qs,
                },
            );
        }
        DType::Q6K => {
            let mut ql = [0; 128];
            for w in 0..SUPER {
                ql[w / 128 * 64 + w % 64] |= (code(w, 32) & 15) << (w % 128 / 64 * 4);
            }
            put(
                out,
                &Q6K {
                    ql,
                    qh: pairs(|w| code(w, 32) >> 4),
                    scales: b.scale.map(|s| s as i8),
                    d,
                },
            );
        }
        DType::Tq1_0 => {
            let mut digits = [[0u8; 5]; 52];
            for w in 0..SUPER {
                let (at, digit) = tail::trit_place(w);
                digits[at][digit] = code(w, 1);
            }
            let byte = |at: usize| tq1_pack(&digits[at]);
            put(
                out,
                &Tq1_0 {
                    qs: std::array::from_fn(byte),
                    qh: std::array::from_fn(|i| byte(48 + i)),
                    d,
                },
            );
        }
        DType::Tq2_0 => put(
            out,
            &Tq2_0 {
                qs: pairs(|w| code(w, 1)),
                d,
            },
        ),
        DType::F32 | DType::F16 | DType::BF16 | DType::Linear(_) => {}
    }
}

fn put<T: bytemuck::NoUninit>(out: &mut [u8], block: &T) {
    out.copy_from_slice(bytes_of(block));
}

/// Nibbles of 32 weights: low ones the first sixteen.
fn nibbles(code: impl Fn(usize) -> u8) -> [u8; 16] {
    std::array::from_fn(|i| code(i) & 15 | code(i + 16) << 4)
}

/// Fifth bits and nibbles of 32 weights.
fn fifth_bits(code: impl Fn(usize) -> u8) -> ([u8; 4], [u8; 16]) {
    let high = (0..32).fold(0u32, |h, w| h | u32::from(code(w) >> 4) << w);
    (high.to_le_bytes(), nibbles(|w| code(w) & 15))
}

fn level(q: i8) -> u8 {
    IQ4NL_LEVELS.partition_point(|&l| l < q) as u8
}

/// Two bits of 256 weights.
fn pairs(code: impl Fn(usize) -> u8) -> [u8; 64] {
    std::array::from_fn(|at| {
        let w = at / 32 * 128 + at % 32;
        code(w) | code(w + 32) << 2 | code(w + 64) << 4 | code(w + 96) << 6
    })
}

/// One bit of 256 weights: bit w/32 of byte w%32.
fn top_bits(bit: impl Fn(usize) -> u8) -> [u8; 32] {
    std::array::from_fn(|i| (0..8).fold(0, |b, k| b | bit(32 * k + i) << k))
}

/// Nibbles of 256 weights as Q4_K and Q5_K have them.
fn chunks_of_64(code: impl Fn(usize) -> u8) -> [u8; 128] {
    std::array::from_fn(|at| {
        let w = at / 32 * 64 + at % 32;
        code(w) | code(w + 32) << 4
    })
}

fn six_bit_pairs(b: &Decoded) -> [u8; 12] {
    let scale = std::array::from_fn(|j| b.scale[2 * j] as u8);
    let min = std::array::from_fn(|j| b.min[2 * j] as u8);
    k4_pack(&scale, &min)
}
