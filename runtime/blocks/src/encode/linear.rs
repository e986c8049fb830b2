//! Linear groups: one fp16 scale and, asymmetric, one whole zero-point for each.

use super::block::{Block, F16_MAX};
use super::fit::{Group, Step, Uniform, best_step, inverse, whole};
use super::flat::half_step;
use super::{Method, RowReport};
use crate::{Linear, dense};
use half::f16;

/// Quantises a row; lengths are checked.
pub(super) fn encode(
    l: Linear,
    method: Method,
    x: &[f32],
    importance: Option<&[f32]>,
    row: &mut [u8],
) -> RowReport {
    let groups = x.len().div_ceil(l.group());
    let mut report = RowReport::default();
    row.fill(0);
    let (stream, rest) = row.split_at_mut((x.len() * l.bits() as usize).div_ceil(32) * 4);
    for (g, x) in x.chunks(l.group()).enumerate() {
        let at = g * l.group();
        let (block, floored) = Block::load(method, x, importance.map(|w| &w[at..at + x.len()]));
        report.floored += floored;
        report.clipped += clipped(l, x);
        let group = Group::new(block.all());
        let (scale, zero) = grid(l, method, &block, &group);
        rest[2 * g..2 * g + 2].copy_from_slice(&f16::from_f32(block.outer(scale)).to_le_bytes());
        if l.asymmetric() {
            rest[2 * groups + g] = zero as u8;
        }
        let mut codes = [0u8; 128];
        group.write(shifted(l, zero), scale, 0.0, |i, q| {
            codes[i] = (q + zero) as u8
        });
        // A group starts on a byte: its length times `bits` is a multiple of 8.
        let start = at * l.bits() as usize / 8;
        let end = start + x.len() * l.bits() as usize / 8;
        dense::pack(l.bits(), &codes[..x.len()], &mut stream[start..end]);
    }
    report
}

fn max_code(l: Linear) -> f32 {
    ((1u32 << l.bits()) - 1) as f32
}

/// The codes with the zero-point taken off.
fn shifted(l: Linear, zero: f32) -> Uniform {
    Uniform {
        lo: -zero,
        hi: max_code(l) - zero,
    }
}

/// Scale and zero-point of a group, the better of both methods for the search.
fn grid(l: Linear, method: Method, block: &Block, group: &Group<'_>) -> (f32, f32) {
    let round = if l.asymmetric() {
        rounded_range(l, block, group)
    } else {
        rounded_extreme(l, block, group)
    };
    if method == Method::Round {
        return round;
    }
    let (mut best, mut best_zero) = (Step::default(), round.1);
    let mut consider = |zero: f32, signed| {
        let s = best_step(group, shifted(l, zero), signed);
        if s.gain > best.gain {
            (best, best_zero) = (s, zero);
        }
    };
    if !l.asymmetric() {
        consider(round.1, true);
    } else {
        // Few codes: every zero-point. Many: those about the one of the range.
        let near = if l.bits() <= 3 { max_code(l) } else { 3.0 };
        let mut zero = (round.1 - near).max(0.0);
        while zero <= (round.1 + near).min(max_code(l)) {
            consider(zero, false);
            zero += 1.0;
        }
    }
    let scale = half_step(block, group, shifted(l, best_zero), best.step);
    let error = |(scale, zero): (f32, f32)| group.measure(shifted(l, zero), scale, 0.0).error;
    let searched = (scale, best_zero);
    if error(searched) < error(round) {
        searched
    } else {
        round
    }
}

/// The largest weight by size takes the one code that reaches a step further.
fn rounded_extreme(l: Linear, block: &Block, group: &Group<'_>) -> (f32, f32) {
    let half = (1u32 << (l.bits() - 1)) as f32;
    (block.half(group.extreme() / -half), half)
}

/// The range, zero included, spread over the codes.
fn rounded_range(l: Linear, block: &Block, group: &Group<'_>) -> (f32, f32) {
    let low = group.min.min(0.0);
    let scale = block.half((group.max.max(0.0) - low) / max_code(l));
    (scale, whole((-low * inverse(scale)).min(max_code(l))))
}

/// Weights that no finite fp16 scale reaches.
fn clipped(l: Linear, x: &[f32]) -> usize {
    let reach = F16_MAX
        * if l.asymmetric() {
            max_code(l)
        } else {
            (1u32 << (l.bits() - 1)) as f32
        };
    x.iter().filter(|v| v.abs() > reach).count()
}
