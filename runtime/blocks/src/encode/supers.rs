//! Superblocks: sub-scales and sub-minima as whole numbers times fp16 super-scales.
//!
//! 1. Every sub-block gets its best step (and minimum) as if it could be stored as it is.
//! 2. Super-scales around the one that covers them are compared by how much error rounding
//!    the steps to their multiples adds, `Σ weightⱼ·(stepⱼ − d·Lⱼ)²`.
//! 3. From the best few: every sub-block tries the whole numbers next to its own with codes
//!    rounded anew and keeps the best; then the super-scales are fitted to those codes by
//!    least squares; again while the error falls.

use super::Method;
use super::block::Block;
use super::fit::{Codes, Group, Sums, Uniform, best_affine, best_step, inverse};
use crate::DType;
use crate::decode::Decoded;
use crate::layout::SUPER;

/// Sub-blocks in a superblock, at most.
const SUBS: usize = 16;
/// Super-scales that step 3 starts from.
const STARTS: usize = 2;
/// Rounds of step 3.
const ROUNDS: usize = 3;

/// The whole numbers of one format.
#[derive(Clone, Copy)]
struct Shape {
    /// Weights in a sub-block.
    sub: usize,
    codes: Uniform,
    /// Range of the sub-scales.
    scales: Uniform,
    /// Range of the sub-minima; none where codes are signed.
    mins: Option<Uniform>,
}

impl Shape {
    fn of(dtype: DType) -> Shape {
        let u = |(lo, hi): (i16, i16)| Uniform {
            lo: f32::from(lo),
            hi: f32::from(hi),
        };
        let (lo, hi) = super::code_range(dtype).unwrap_or((0, 0));
        let g = grid(dtype, (i16::from(lo), i16::from(hi)));
        Shape {
            sub: g.sub,
            codes: u(g.codes),
            scales: u(g.scales),
            mins: g.mins.map(u),
        }
    }
}

/// Sub-blocks and ranges of a format with two levels of scales.
pub(super) fn grid(dtype: DType, codes: (i16, i16)) -> super::Grid {
    let (sub, scales, mins) = match dtype {
        DType::Q2K => (16, (0, 15), Some((0, 15))),
        DType::Q3K => (16, (-32, 31), None),
        DType::Q4K | DType::Q5K => (32, (0, 63), Some((0, 63))),
        _ => (16, (-128, 127), None),
    };
    super::Grid {
        sub,
        codes,
        scales,
        mins,
        even: true,
    }
}

/// Super-scales with the whole numbers of the sub-blocks.
#[derive(Clone, Copy, Default)]
struct Grid {
    d: f32,
    dmin: f32,
    scale: [f32; SUBS],
    min: [f32; SUBS],
}

/// Fits a block of Q2_K, Q3_K, Q4_K, Q5_K or Q6_K.
pub(super) fn fit(dtype: DType, method: Method, block: &Block) -> Decoded {
    let shape = Shape::of(dtype);
    let empty = Group::new((&[], &[]));
    let mut groups = [empty; SUBS];
    let groups = &mut groups[..block.len() / shape.sub];
    for (j, g) in groups.iter_mut().enumerate() {
        *g = Group::new(block.sub(j, shape.sub));
    }
    let grid = match (method, shape.mins) {
        (Method::Round, _) => rounded(&shape, block, groups),
        (Method::Search, None) => search_signed(&shape, block, groups),
        (Method::Search, Some(mins)) => search_affine(&shape, mins, block, groups),
    };
    finish(&shape, block, groups, &grid)
}

/// Rounds the codes on the grid as stored.
fn finish(shape: &Shape, block: &Block, groups: &[Group<'_>], grid: &Grid) -> Decoded {
    let mut o = Decoded {
        len: block.len(),
        d: block.outer(grid.d),
        dmin: block.outer(grid.dmin),
        scale: [0; 16],
        min: [0; 16],
        q: [0; SUPER],
    };
    for (j, g) in groups.iter().enumerate() {
        let at = j * shape.sub;
        for k in at / 16..(at + shape.sub) / 16 {
            o.scale[k] = grid.scale[j] as i16;
            o.min[k] = grid.min[j] as i16;
        }
        let (step, min) = (grid.d * grid.scale[j], grid.dmin * grid.min[j]);
        g.write(shape.codes, step, min, |i, q| o.q[at + i] = q as i8);
    }
    o
}

/// Steps from the ranges, rounded to the nearest multiples of the smallest super-scale that
/// covers the largest of them.
fn rounded(shape: &Shape, block: &Block, groups: &[Group<'_>]) -> Grid {
    let mut steps = [0.0; SUBS];
    let mut mins = [0.0; SUBS];
    for (j, g) in groups.iter().enumerate() {
        if shape.mins.is_some() {
            let low = g.min.min(0.0);
            (steps[j], mins[j]) = ((g.max - low).max(0.0) / shape.codes.hi, -low);
        } else {
            // The farthest weight takes the end that reaches a step further.
            steps[j] = g.extreme() / shape.codes.lo;
        }
    }
    let farthest = |v: &[f32]| {
        v.iter()
            .fold(0.0f32, |m, &v| if v.abs() > m.abs() { v } else { m })
    };
    let limit = if shape.scales.lo < 0.0 {
        shape.scales.lo
    } else {
        shape.scales.hi
    };
    let d = block.half(farthest(&steps) / limit);
    let mut grid = Grid {
        d,
        scale: multiples(&steps, d, shape.scales),
        ..Grid::default()
    };
    if let Some(range) = shape.mins {
        grid.dmin = block.half(farthest(&mins) / range.hi);
        grid.min = multiples(&mins, grid.dmin, range);
    }
    grid
}

/// The whole numbers whose multiples of `d` are nearest to `values`.
fn multiples(values: &[f32; SUBS], d: f32, range: Uniform) -> [f32; SUBS] {
    let inv = inverse(d);
    values.map(|v| range.nearest(v * inv))
}

/// The super-scales that add the least error, best first; zeros where there are fewer.
fn super_scales(
    values: &[f32; SUBS],
    weights: &[f32; SUBS],
    range: Uniform,
    block: &Block,
) -> [f32; STARTS] {
    let group = Group::new((values, weights));
    let mut best = [(f32::INFINITY, 0.0); STARTS];
    for flip in [false, true]
        .into_iter()
        .take(1 + usize::from(range.lo < 0.0))
    {
        let cover = group.cover(range, flip);
        for k in 0..24 {
            // Down to two thirds of the range: other multiples may fit the steps better.
            let d = block.half(cover * (0.98 + 0.02 * k as f32));
            if d == 0.0 || best.iter().any(|b| b.1 == d) {
                continue;
            }
            let mut candidate = (group.measure(range, d, 0.0).error, d);
            for b in &mut best {
                if candidate.0 < b.0 {
                    std::mem::swap(b, &mut candidate);
                }
            }
        }
    }
    best.map(|b| b.1)
}

fn search_signed(shape: &Shape, block: &Block, groups: &[Group<'_>]) -> Grid {
    let (mut steps, mut weights) = ([0.0; SUBS], [0.0; SUBS]);
    for (j, g) in groups.iter().enumerate() {
        let s = best_step(g, shape.codes, true);
        (steps[j], weights[j]) = (s.step, s.weight);
    }
    let mut best = (f32::INFINITY, Grid::default());
    for d in super_scales(&steps, &weights, shape.scales, block) {
        let mut grid = Grid {
            d,
            scale: multiples(&steps, d, shape.scales),
            ..Grid::default()
        };
        for _ in 0..ROUNDS {
            let (mut error, mut xq, mut qq) = (0.0, 0.0, 0.0);
            for (g, l) in groups.iter().zip(&mut grid.scale) {
                let s = best_neighbour(shape, g, grid.d, l);
                error += s.error;
                xq += *l * s.xq;
                qq += *l * *l * s.qq;
            }
            if error >= best.0 {
                break;
            }
            best = (error, grid);
            if qq == 0.0 {
                break;
            }
            grid.d = block.half(xq / qq);
        }
    }
    best.1
}

/// Moves a sub-scale to the best of itself and its neighbours.
fn best_neighbour(shape: &Shape, g: &Group<'_>, d: f32, scale: &mut f32) -> Sums {
    let middle = *scale;
    let mut best = g.measure(shape.codes, d * middle, 0.0);
    for l in [middle - 1.0, middle + 1.0] {
        if l < shape.scales.lo || l > shape.scales.hi {
            continue;
        }
        let s = g.measure(shape.codes, d * l, 0.0);
        if s.error < best.error {
            (best, *scale) = (s, l);
        }
    }
    best
}

fn search_affine(shape: &Shape, mins: Uniform, block: &Block, groups: &[Group<'_>]) -> Grid {
    let (mut steps, mut weights) = ([0.0; SUBS], [0.0; SUBS]);
    let (mut sums, mut w1) = ([Sums::default(); SUBS], [0.0; SUBS]);
    for (j, g) in groups.iter().enumerate() {
        let a = best_affine(g, shape.codes.hi, false);
        (steps[j], weights[j], sums[j], w1[j]) = (a.step, a.weight, a.sums, g.w1);
    }
    let mut best = (f32::INFINITY, Grid::default());
    for d in super_scales(&steps, &weights, shape.scales, block) {
        let scale = multiples(&steps, d, shape.scales);
        // The best minimum moves with the step.
        let mut offsets = [0.0; SUBS];
        for (j, g) in groups.iter().enumerate() {
            offsets[j] = ((d * scale[j] * sums[j].q1 - g.x1) / g.w1).max(0.0);
        }
        let [dmin, _] = super_scales(&offsets, &w1, mins, block);
        let mut grid = Grid {
            d,
            dmin,
            scale,
            min: multiples(&offsets, dmin, mins),
        };
        for _ in 0..ROUNDS {
            let mut normal = Normal::default();
            let mut error = 0.0;
            for (j, g) in groups.iter().enumerate() {
                let s = best_pair(shape, mins, g, &mut grid, j);
                error += s.error;
                normal.add(g, &s, grid.scale[j], grid.min[j]);
            }
            if error >= best.0 {
                break;
            }
            best = (error, grid);
            normal.solve(&mut grid);
            (grid.d, grid.dmin) = (block.half(grid.d), block.half(grid.dmin));
        }
    }
    best.1
}

/// Moves sub-scale and sub-minimum `j` to the best pair near them.
fn best_pair(shape: &Shape, mins: Uniform, g: &Group<'_>, grid: &mut Grid, j: usize) -> Sums {
    let (scale, min) = (grid.scale[j], grid.min[j]);
    let inv = inverse(grid.dmin);
    let mut best = Sums {
        error: f32::INFINITY,
        ..Sums::default()
    };
    for l in [scale, scale - 1.0, scale + 1.0] {
        if l < shape.scales.lo || l > shape.scales.hi {
            continue;
        }
        let step = grid.d * l;
        let mut m = min;
        // Once with the old minimum, once with the one that its codes ask for.
        for _ in 0..2 {
            let s = g.measure(shape.codes, step, grid.dmin * m);
            if s.error < best.error {
                (best, grid.scale[j], grid.min[j]) = (s, l, m);
            }
            let wanted = mins.nearest((step * s.q1 - g.x1) / g.w1 * inv);
            if wanted == m {
                break;
            }
            m = wanted;
        }
    }
    best
}

/// Normal equations of the two super-scales for fixed codes and whole numbers.
#[derive(Default)]
struct Normal {
    qq: f64,
    qm: f64,
    mm: f64,
    xq: f64,
    xm: f64,
}

impl Normal {
    fn add(&mut self, g: &Group<'_>, s: &Sums, scale: f32, min: f32) {
        let (l, m) = (f64::from(scale), f64::from(min));
        self.qq += l * l * f64::from(s.qq);
        self.qm += l * m * f64::from(s.q1);
        self.mm += m * m * f64::from(g.w1);
        self.xq += l * f64::from(s.xq);
        self.xm += m * f64::from(g.x1);
    }

    /// Sets both super-scales, or the first alone where the minima determine no second.
    fn solve(&self, grid: &mut Grid) {
        let det = self.qq * self.mm - self.qm * self.qm;
        let d = (self.xq * self.mm - self.xm * self.qm) / det;
        let dmin = (self.xq * self.qm - self.xm * self.qq) / det;
        if det > 1e-9 * self.qq * self.mm && d > 0.0 && dmin >= 0.0 {
            (grid.d, grid.dmin) = (d as f32, dmin as f32);
        } else if self.qq > 0.0 {
            grid.d = ((self.xq + f64::from(grid.dmin) * self.qm) / self.qq).max(0.0) as f32;
        }
    }
}
