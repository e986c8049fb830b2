//! 128 codes times 128 activations: what an instruction set extension makes faster.
//!
//! Pseudo-code:
//!
//! ```text
//! sixteens[j] = Σ w[16j + i] · x[16j + i]      i in 0..16, j in 0..8
//! groups[g]   = sixteens[2g] + sixteens[2g+1]  g in 0..4
//! ```
//!
//! Deviations:
//!
//! 1. Products are added in 16 bits as long as they fit, which `MAX`, the largest |w|,
//!    tells at compile time: n products of |x| ≤ 127 fit while n·127·MAX ≤ 32,767.
//! 2. The sums across lanes are taken for all groups at once, by pairwise additions, so
//!    that one conversion and one multiply-add serve four groups of 32.

use crate::simd::*;

/// Codes of 128 weights, sixteen to a register, in the order of the weights.
pub(crate) type Codes = [int8x16_t; 8];

/// Exact integer dot products over 128 weights, |w| ≤ `MAX` and |x| ≤ 127.
pub(crate) trait Dot: Copy + 'static {
    /// Sums over each 16 weights.
    fn sixteens<const MAX: i32>(w: &Codes, x: &[i8; 128]) -> [int32x4_t; 2];

    /// Sums over each 32 weights.
    fn groups<const MAX: i32>(w: &Codes, x: &[i8; 128]) -> int32x4_t;
}

/// Armv8.0: products in 16 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base;

/// Whether `n` products of 127 and `max` can be added in 16 bits. Of the codes −128, only
/// two products (−32,512) ever are.
const fn fits(n: i32, max: i32) -> bool {
    n * 127 * max <= 32767
}

impl Dot for Base {
    #[inline(always)]
    fn sixteens<const MAX: i32>(w: &Codes, x: &[i8; 128]) -> [int32x4_t; 2] {
        const {
            assert!(
                fits(8, MAX),
                "no format with a scale for each 16 weights has wider codes"
            )
        };
        let four = |j: usize| {
            let a = vpaddq_s16(sixteen(w, x, j), sixteen(w, x, j + 1));
            let b = vpaddq_s16(sixteen(w, x, j + 2), sixteen(w, x, j + 3));
            vpaddlq_s16(vpaddq_s16(a, b))
        };
        [four(0), four(4)]
    }

    #[inline(always)]
    fn groups<const MAX: i32>(w: &Codes, x: &[i8; 128]) -> int32x4_t {
        if fits(16, MAX) {
            let a = vpaddq_s16(thirty_two(w, x, 0), thirty_two(w, x, 1));
            let b = vpaddq_s16(thirty_two(w, x, 2), thirty_two(w, x, 3));
            vpaddlq_s16(vpaddq_s16(a, b))
        } else if fits(8, MAX) {
            let a = vpaddq_s16(thirty_two(w, x, 0), thirty_two(w, x, 1));
            let b = vpaddq_s16(thirty_two(w, x, 2), thirty_two(w, x, 3));
            vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b))
        } else if fits(4, MAX) {
            let sum = |g: usize| vpaddlq_s16(thirty_two(w, x, g));
            vpaddq_s32(vpaddq_s32(sum(0), sum(1)), vpaddq_s32(sum(2), sum(3)))
        } else {
            let sum =
                |g: usize| vpadalq_s16(vpaddlq_s16(sixteen(w, x, 2 * g)), sixteen(w, x, 2 * g + 1));
            vpaddq_s32(vpaddq_s32(sum(0), sum(1)), vpaddq_s32(sum(2), sum(3)))
        }
    }
}

/// Armv8.2: `sdot` adds four products at once, exact for all codes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DotProd;

impl Dot for DotProd {
    #[inline(always)]
    fn sixteens<const MAX: i32>(w: &Codes, x: &[i8; 128]) -> [int32x4_t; 2] {
        let fours = |j: usize| sdot(vdupq_n_s32(0), w[j], load_s8(part(x, 16 * j)));
        let four = |j: usize| {
            let (a, b) = (
                vpaddq_s32(fours(j), fours(j + 1)),
                vpaddq_s32(fours(j + 2), fours(j + 3)),
            );
            vpaddq_s32(a, b)
        };
        [four(0), four(4)]
    }

    #[inline(always)]
    fn groups<const MAX: i32>(w: &Codes, x: &[i8; 128]) -> int32x4_t {
        let eights = |g: usize| {
            let low = sdot(vdupq_n_s32(0), w[2 * g], load_s8(part(x, 32 * g)));
            sdot(low, w[2 * g + 1], load_s8(part(x, 32 * g + 16)))
        };
        vpaddq_s32(
            vpaddq_s32(eights(0), eights(1)),
            vpaddq_s32(eights(2), eights(3)),
        )
    }
}

/// Eight sums of two products each of register `j`.
#[inline(always)]
fn sixteen(w: &Codes, x: &[i8; 128], j: usize) -> int16x8_t {
    let x = load_s8(part(x, 16 * j));
    vmlal_high_s8(vmull_s8(vget_low_s8(w[j]), vget_low_s8(x)), w[j], x)
}

/// Eight sums of four products each of group `g`.
#[inline(always)]
fn thirty_two(w: &Codes, x: &[i8; 128], g: usize) -> int16x8_t {
    let b = load_s8(part(x, 32 * g + 16));
    let sum = vmlal_s8(
        sixteen(w, x, 2 * g),
        vget_low_s8(w[2 * g + 1]),
        vget_low_s8(b),
    );
    vmlal_high_s8(sum, w[2 * g + 1], b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<const MAX: i32>(w: i8, x: i8) {
        let codes = [load_s8(&[w; 16]); 8];
        let mut sums = [0; 4];
        store_s32(&mut sums, Base::groups::<MAX>(&codes, &[x; 128]));
        assert_eq!(sums, [32 * i32::from(w) * i32::from(x); 4], "{w} · {x}");
    }

    #[test]
    fn the_largest_codes_do_not_overflow() {
        for x in [-127, 127] {
            check::<15>(15, x);
            check::<16>(-16, x);
            check::<31>(31, x);
            check::<32>(-32, x);
            check::<63>(63, x);
            check::<128>(127, x);
            check::<128>(-127, x);
            check::<128>(-128, x);
            let mut sums = [0; 4];
            store_s32(
                &mut sums,
                Base::sixteens::<32>(&[load_s8(&[-32; 16]); 8], &[x; 128])[1],
            );
            assert_eq!(sums, [16 * -32 * i32::from(x); 4]);
        }
    }

    #[test]
    fn sums_come_in_the_order_of_the_weights() {
        let x: [i8; 128] = std::array::from_fn(|i| (i * 37 % 255) as i8);
        let w: [i8; 128] = std::array::from_fn(|i| (i * 11 % 31) as i8 - 15);
        let codes: Codes = std::array::from_fn(|j| load_s8(part(&w, 16 * j)));
        let product = |i: usize| i32::from(w[i]) * i32::from(x[i].max(-127));
        let x = x.map(|v| v.max(-127));
        let mut got = [[0; 4]; 2];
        for (got, v) in got.iter_mut().zip(Base::sixteens::<15>(&codes, &x)) {
            store_s32(got, v);
        }
        let want: Vec<i32> = (0..8)
            .map(|j| (16 * j..16 * j + 16).map(product).sum())
            .collect();
        assert_eq!(got.as_flattened(), want);
        let want: Vec<i32> = want.chunks(2).map(|p| p[0] + p[1]).collect();
        for v in [
            Base::groups::<15>(&codes, &x),
            Base::groups::<31>(&codes, &x),
            Base::groups::<63>(&codes, &x),
            Base::groups::<128>(&codes, &x),
        ] {
            store_s32(&mut got[0], v);
            assert_eq!(got[0], want[..]);
        }
    }
}
