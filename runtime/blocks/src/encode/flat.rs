//! Blocks with one fp16 scale: those of 32 weights, and the ternary ones of 256.

use super::block::Block;
use super::fit::{Codes, Group, Uniform, best_affine, best_step, inverse};
use super::{Method, code_range};
use crate::DType;
use crate::decode::Decoded;
use crate::layout::{IQ4NL_LEVELS, SUPER};

/// The uneven levels of IQ4_NL.
#[derive(Clone, Copy)]
struct Levels;

impl Codes for Levels {
    fn lo(self) -> f32 {
        f32::from(IQ4NL_LEVELS[0])
    }

    fn hi(self) -> f32 {
        f32::from(IQ4NL_LEVELS[15])
    }

    #[inline(always)]
    fn nearest(self, v: f32) -> f32 {
        // Adds the gaps below v: no branches, so that eight weights go at once.
        let mut level = f32::from(IQ4NL_LEVELS[0]);
        for pair in IQ4NL_LEVELS.windows(2) {
            let (low, high) = (f32::from(pair[0]), f32::from(pair[1]));
            level += if v > 0.5 * (low + high) {
                high - low
            } else {
                0.0
            };
        }
        level
    }
}

/// Fits a block of a format with one scale, or one scale and one minimum.
pub(super) fn fit(dtype: DType, method: Method, block: &Block) -> Decoded {
    let group = Group::new(block.all());
    let (lo, hi) = code_range(dtype).unwrap_or((0, 0));
    let codes = Uniform {
        lo: f32::from(lo),
        hi: f32::from(hi),
    };
    match dtype {
        DType::Q4_1 | DType::Q5_1 => affine(method, block, &group, codes),
        DType::Iq4Nl => signed(method, block, &group, Levels),
        DType::Tq1_0 | DType::Tq2_0 => ternary(method, block, &group, codes),
        _ => signed(method, block, &group, codes),
    }
}

fn stored(
    block: &Block,
    group: &Group<'_>,
    codes: impl Codes,
    d: f32,
    min: Option<f32>,
) -> Decoded {
    let mut o = Decoded {
        len: block.len(),
        d: block.outer(d),
        dmin: block.outer(min.unwrap_or(0.0)),
        scale: [1; 16],
        min: [i16::from(min.is_some()); 16],
        q: [0; SUPER],
    };
    group.write(codes, d, min.unwrap_or(0.0), |i, q| o.q[i] = q as i8);
    o
}

fn signed(method: Method, block: &Block, group: &Group<'_>, codes: impl Codes) -> Decoded {
    let d = match method {
        // The farthest weight takes the end of the codes that reaches further.
        Method::Round => block.half(group.extreme() / codes.lo()),
        Method::Search => half_step(block, group, codes, best_step(group, codes, true).step),
    };
    stored(block, group, codes, d, None)
}

/// The fp16 number for a step: among the nearest ones, that with the least error.
///
/// Their spacing matters for weights so small that the step is a subnormal number.
pub(super) fn half_step(block: &Block, group: &Group<'_>, codes: impl Codes, step: f32) -> f32 {
    let nearest = block.half(step);
    let mut best = (group.measure(codes, nearest, 0.0).error, nearest);
    for d in block.neighbours(nearest) {
        let error = group.measure(codes, d, 0.0).error;
        if error < best.0 {
            best = (error, d);
        }
    }
    best.1
}

fn affine(method: Method, block: &Block, group: &Group<'_>, codes: Uniform) -> Decoded {
    let (step, min) = match method {
        Method::Round => ((group.max - group.min) / codes.hi, -group.min),
        Method::Search => {
            let a = best_affine(group, codes.hi, true);
            (a.step, a.min)
        }
    };
    stored(block, group, codes, block.half(step), Some(block.half(min)))
}

/// Rounding takes the farthest weight as the scale, which keeps a ternary source as it is.
///
/// The search is exact: for any scale the weights that become non-zero are those farther
/// from zero than half of it, so with the weights sorted by size only their first k can be
/// the right set, whatever the error weights; the best scale of a set is its weighted mean.
fn ternary(method: Method, block: &Block, group: &Group<'_>, codes: Uniform) -> Decoded {
    let mut d = group.extreme().abs();
    if method == Method::Search {
        let mut sorted = [(0.0f32, 0.0f32); SUPER];
        let sorted = &mut sorted[..block.len()];
        for (to, (x, w)) in sorted.iter_mut().zip(group.x.iter().zip(group.w)) {
            *to = (x.abs(), *w);
        }
        sorted.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let (mut wx, mut w1, mut best) = (0.0, 0.0, 0.0);
        for (x, w) in sorted.iter() {
            wx += w * x;
            w1 += w;
            if wx * wx > best * w1 {
                best = wx * wx * inverse(w1);
                d = wx * inverse(w1);
            }
        }
    }
    let d = match method {
        Method::Round => block.half(d),
        Method::Search => half_step(block, group, codes, d),
    };
    stored(block, group, codes, d, None)
}
