//! Descent on the exact error: codes, sub-scales, minima and super-scales, one at a time.
//!
//! ```text
//! g = (w − ŵ)·H;  a change δ of the stored row adds  δᵀHδ − 2·gᵀδ  to the error
//! for each superblock, twice:
//!     each code to its best value, g of the superblock follows
//!     each sub-block: other sub-scales and minima next to its own, with codes descended anew
//!     super-scales by least squares for what they multiply
//! then g of the whole row follows, one product for all rows
//! ```
//!
//! Codes alone are QuantEase (arXiv 2309.01885); that scales join in, on their own grid, is
//! what makes it worth more than compensation where there are few codes.
//!
//! Only changes that lower the error are taken, so the error of a row never rises.

use myq_blocks::decode::Decoded;
use myq_blocks::encode::Grid;

use super::{Chunk, half};
use crate::linalg::{matrix, matrix_mut, multiply, multiply_add};
use crate::vector::wide;

/// Weights in a superblock, at most.
const SUPER: usize = 256;
/// Times that a superblock is gone through before the row moves on.
const ROUNDS: usize = 2;
/// Times that the codes of a sub-block are gone through for each candidate.
const PASSES: usize = 2;
/// Steps of a sub-scale and its minimum that are tried. A larger scale goes with a larger minimum,
/// as both widen the range; farther and contrary steps lower the error by less than a thousandth
/// more.
const NEXT: [(i16, i16); 6] = [(-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1)];
/// A change must lower the error by more than rounding could feign, as a share of `H·δ²`.
const CERTAIN: f32 = 1e-4;

/// One sweep over all superblocks; `gradient` is rows × n and stays right.
pub(super) fn sweep(chunk: &mut Chunk<'_>, h: &[f32], gradient: &mut [f32]) {
    let (n, rows, per_row) = (chunk.n, chunk.rows(), chunk.per_row);
    let mut buffers = [(); 4].map(|()| vec![0.0f32; rows * SUPER]);
    for b in 0..per_row {
        let columns = chunk.columns(b);
        let len = columns.len();
        let mut near = vec![0.0f32; len * len];
        for (to, i) in near.chunks_exact_mut(len).zip(columns.clone()) {
            to.copy_from_slice(&h[i * n..][columns.clone()]);
        }
        let [g, units, mins, moved] = buffers.each_mut().map(|x| &mut x[..rows * len]);
        for (g, from) in g.chunks_exact_mut(len).zip(gradient.chunks_exact(n)) {
            g.copy_from_slice(&from[columns.clone()]);
        }
        let mut all = All {
            grid: chunk.grid,
            len,
            h: &near,
            diagonal: near.iter().step_by(len + 1).copied().collect(),
            blocks: chunk.blocks[b..].iter_mut().step_by(per_row).collect(),
            g,
        };
        for (block, moved) in all.blocks.iter().zip(moved.chunks_exact_mut(len)) {
            block.dequantize(moved);
            moved.iter_mut().for_each(|m| *m = -*m);
        }
        all.descend([units, mins]);
        for (block, moved) in all.blocks.iter().zip(moved.chunks_exact_mut(len)) {
            let mut stored = [0.0; SUPER];
            block.dequantize(&mut stored[..len]);
            moved.iter_mut().zip(stored).for_each(|(m, x)| *m += x);
        }
        let rows_of_h = matrix(h, n).subrows(columns.start, len);
        multiply_add(matrix_mut(gradient, n), matrix(moved, len), rows_of_h, -1.0);
    }
}

/// One superblock of all rows.
struct All<'a> {
    grid: Grid,
    len: usize,
    /// H within the superblock, len × len.
    h: &'a [f32],
    /// Its diagonal.
    diagonal: Vec<f32>,
    blocks: Vec<&'a mut Decoded>,
    /// Rows × len.
    g: &'a mut [f32],
}

impl All<'_> {
    /// `units` and `mins` have room for rows × len values each.
    fn descend(&mut self, [units, mins]: [&mut [f32]; 2]) {
        let len = self.len;
        let (mut by_units, mut by_mins) = (vec![0.0; units.len()], vec![0.0; mins.len()]);
        for _ in 0..ROUNDS {
            self.each(
                #[inline(always)]
                |work, block| {
                    work.codes(block);
                    match work.grid.sub {
                        _ if work.grid.scales.0 == work.grid.scales.1 => {}
                        16 => work.sub_blocks::<16>(block),
                        _ => work.sub_blocks::<32>(block),
                    }
                },
            );
            let parts = units.chunks_exact_mut(len).zip(mins.chunks_exact_mut(len));
            for (block, (u, v)) in self.blocks.iter().zip(parts) {
                for (i, (u, v)) in u.iter_mut().zip(v).enumerate() {
                    *u = f32::from(block.scale[i / 16]) * f32::from(block.q[i]);
                    *v = f32::from(block.min[i / 16]);
                }
            }
            let h = matrix(self.h, len);
            multiply(matrix_mut(&mut by_units, len), matrix(units, len), h);
            if self.grid.mins.is_some() {
                multiply(matrix_mut(&mut by_mins, len), matrix(mins, len), h);
            }
            let mut r = 0;
            self.each(
                #[inline(always)]
                |work, block| {
                    let row = r * len..(r + 1) * len;
                    let [u, v, hu, hv] =
                        [&*units, &*mins, &by_units, &by_mins].map(|x| &x[row.clone()]);
                    work.super_scales(block, [u, v], [hu, hv]);
                    r += 1;
                },
            );
        }
        self.each(
            #[inline(always)]
            |work, block| work.codes(block),
        );
    }

    /// Each row in turn, in vector code.
    #[inline(always)]
    fn each(&mut self, mut body: impl FnMut(&mut Work<'_>, &mut Decoded)) {
        let rows = self
            .blocks
            .iter_mut()
            .zip(self.g.chunks_exact_mut(self.len));
        for (block, g) in rows {
            let mut work = Work {
                grid: self.grid,
                len: self.len,
                h: self.h,
                diagonal: &self.diagonal,
                g,
            };
            wide(
                #[inline(always)]
                || body(&mut work, block),
            );
        }
    }
}

/// One superblock of one row.
struct Work<'a> {
    grid: Grid,
    len: usize,
    /// H within the superblock, len × len.
    h: &'a [f32],
    /// Its diagonal.
    diagonal: &'a [f32],
    g: &'a mut [f32],
}

impl Work<'_> {
    #[inline(always)]
    fn row(&self, i: usize) -> &[f32] {
        &self.h[i * self.len..][..self.len]
    }

    /// `g −= δ·H[i]`.
    #[inline(always)]
    fn follow(&mut self, i: usize, delta: f32) {
        let row = &self.h[i * self.len..][..self.len];
        for (g, h) in self.g.iter_mut().zip(row) {
            *g -= delta * h;
        }
    }

    /// Each code to its best value.
    #[inline(always)]
    fn codes(&mut self, block: &mut Decoded) {
        let (lo, hi) = self.grid.codes;
        for first in (0..self.len).step_by(16) {
            let step = block.d * f32::from(block.scale[first / 16]);
            let limits = std::array::from_fn(|k| limit(step, self.diagonal[first + k]));
            if !some_wanted(&self.g[first..first + 16], &limits) {
                continue;
            }
            for i in first..first + 16 {
                let q = i16::from(block.q[i]);
                if let Some(code) = best_code(q, step, self.g[i], self.diagonal[i], lo, hi) {
                    self.follow(i, step * f32::from(code - q));
                    block.q[i] = code as i8;
                }
            }
        }
    }

    /// Sub-blocks of `SUB` weights: the scale and minimum of each to the best of their neighbours.
    #[inline(always)]
    fn sub_blocks<const SUB: usize>(&mut self, block: &mut Decoded) {
        for first in (0..self.len).step_by(SUB) {
            self.sub_block::<SUB>(block, first);
        }
    }

    #[inline(always)]
    fn sub_block<const SUB: usize>(&mut self, block: &mut Decoded, first: usize) {
        let j = first / 16;
        let mut h = [[0.0f32; SUB]; SUB];
        for (i, to) in h.iter_mut().enumerate() {
            to.copy_from_slice(&self.row(first + i)[first..first + SUB]);
        }
        let local = Local {
            h: &h,
            diagonal: std::array::from_fn(|i| h[i][i]),
            codes: self.grid.codes,
        };
        let (scale, min) = (block.scale[j], block.min[j]);
        let (step, low) = (block.d * f32::from(scale), block.dmin * f32::from(min));
        let start = Candidate::new(&block.q[first..first + SUB], &self.g[first..first + SUB]);
        let mut best = start;
        let mut chosen = (scale, min);
        let (s_lo, s_hi) = self.grid.scales;
        let (m_lo, m_hi) = self.grid.mins.unwrap_or((min, min));
        for (ds, dm) in NEXT {
            let (s, m) = (scale + ds, min + dm);
            if !(s_lo..=s_hi).contains(&s) || !(m_lo..=m_hi).contains(&m) {
                continue;
            }
            let (new_step, new_low) = (block.d * f32::from(s), block.dmin * f32::from(m));
            let mut c = start;
            local.shift(&mut c, new_step - step, new_low - low);
            local.descend(&mut c, new_step);
            if c.gain > best.gain {
                (best, chosen) = (c, (s, m));
            }
        }
        let needed = CERTAIN * step * step * h[0][0];
        if best.gain <= needed {
            return;
        }
        let (new_step, new_low) = (
            block.d * f32::from(chosen.0),
            block.dmin * f32::from(chosen.1),
        );
        for i in 0..SUB {
            let old = step * f32::from(block.q[first + i]) - low;
            let new = new_step * f32::from(best.q[i]) - new_low;
            block.q[first + i] = best.q[i] as i8;
            if new != old {
                self.follow(first + i, new - old);
            }
        }
        for k in j..j + SUB / 16 {
            (block.scale[k], block.min[k]) = chosen;
        }
    }

    /// Super-scale and super-minimum by least squares. `u` and `v` are what they multiply, `hu` and
    /// `hv` that times H.
    #[inline(always)]
    fn super_scales(&mut self, block: &mut Decoded, [u, v]: [&[f32]; 2], [hu, hv]: [&[f32]; 2]) {
        let minima = self.grid.mins.is_some() && v.iter().any(|v| *v != 0.0);
        let (uu, ug) = (dot(u, hu), dot(u, self.g));
        if uu <= 0.0 {
            return;
        }
        let (vv, uv, vg) = if minima {
            (dot(v, hv), dot(u, hv), dot(v, self.g))
        } else {
            (0.0, 0.0, 0.0)
        };
        let det = uu * vv - uv * uv;
        // δŵ = a·u − b·v
        let (a, b) = if minima && det > 1e-6 * uu * vv {
            ((ug * vv - vg * uv) / det, (ug * uv - vg * uu) / det)
        } else {
            (ug / uu, 0.0)
        };
        let mut best = (0.0f64, 0.0f32, 0.0f32);
        for (a, b) in [(a, b), (ug / uu, 0.0)] {
            let d = half((f64::from(block.d) + a) as f32);
            let dmin = half((f64::from(block.dmin) + b) as f32);
            let (a, b) = (d - block.d, dmin - block.dmin);
            let (x, y) = (f64::from(a), f64::from(b));
            let gain = 2.0 * (x * ug - y * vg) - (x * x * uu - 2.0 * x * y * uv + y * y * vv);
            // Affine superblocks are `step·q − minimum` with neither below zero; a minimum below
            // zero is that of Q4_1 and Q5_1, where any is allowed.
            let free = self.grid.mins.is_none() || block.dmin < 0.0;
            let allowed = free || d * block.d > 0.0 && dmin >= 0.0;
            if allowed && gain > best.0 {
                best = (gain, a, b);
            }
        }
        let (gain, a, b) = best;
        if gain <= f64::from(CERTAIN) * f64::from(a) * f64::from(a) * uu {
            return;
        }
        block.d += a;
        block.dmin += b;
        let b = if minima { b } else { 0.0 };
        for (g, (hu, hv)) in self.g.iter_mut().zip(hu.iter().zip(hv)) {
            *g -= a * hu - b * hv;
        }
    }
}

/// How far g may be from zero before another code is better, of a weight with this step and
/// diagonal of H: the best real-valued change is g/h, and half a step away is the next code.
#[inline(always)]
fn limit(step: f32, h: f32) -> f32 {
    (0.5 + CERTAIN) * h * step.abs()
}

/// Whether some of 16 weights have a better code.
#[inline(always)]
fn some_wanted(g: &[f32], limits: &[f32; 16]) -> bool {
    let mut found = false;
    for (g, limit) in g.iter().zip(limits) {
        found |= g.abs() > *limit;
    }
    found
}

/// The code that lowers the error most, if that is another one.
#[inline(always)]
fn best_code(q: i16, step: f32, g: f32, h: f32, lo: i16, hi: i16) -> Option<i16> {
    if step == 0.0 || g.abs() <= limit(step, h) {
        return None;
    }
    let wanted = f32::from(q) + (g / (h * step)).round_ties_even();
    let code = wanted.clamp(f32::from(lo), f32::from(hi));
    (code != f32::from(q)).then_some(code as i16)
}

#[inline(always)]
fn axpy(sum: &mut [f32], a: f32, x: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += a * x;
    }
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0.0f32; 16];
    let (a, rest_a) = a.as_chunks::<16>();
    let (b, _) = b.as_chunks::<16>();
    debug_assert!(rest_a.is_empty());
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.iter().map(|l| f64::from(*l)).sum()
}

/// Codes of a sub-block with the gradient they leave, and by how much they lower the error.
#[derive(Clone, Copy)]
struct Candidate<const SUB: usize> {
    q: [i16; SUB],
    g: [f32; SUB],
    gain: f32,
}

impl<const SUB: usize> Candidate<SUB> {
    #[inline(always)]
    fn new(q: &[i8], g: &[f32]) -> Candidate<SUB> {
        let mut c = Candidate {
            q: [0; SUB],
            g: [0.0; SUB],
            gain: 0.0,
        };
        for ((to, from), (g_to, g)) in c.q.iter_mut().zip(q).zip(c.g.iter_mut().zip(g)) {
            *to = i16::from(*from);
            *g_to = *g;
        }
        c
    }
}

/// A sub-block by itself.
struct Local<'a, const SUB: usize> {
    h: &'a [[f32; SUB]; SUB],
    diagonal: [f32; SUB],
    codes: (i16, i16),
}

impl<const SUB: usize> Local<'_, SUB> {
    /// The same codes on another scale and minimum.
    #[inline(always)]
    fn shift(&self, c: &mut Candidate<SUB>, step: f32, low: f32) {
        let mut delta = [0.0f32; SUB];
        let mut hd = [0.0f32; SUB];
        let moved = delta.iter_mut().zip(&c.q).zip(self.h);
        for ((delta, q), h) in moved {
            *delta = step * f32::from(*q) - low;
            axpy(&mut hd, *delta, h);
        }
        for ((g, delta), hd) in c.g.iter_mut().zip(delta).zip(hd) {
            c.gain += delta * (2.0 * *g - hd);
            *g -= hd;
        }
    }

    #[inline(always)]
    fn descend(&self, c: &mut Candidate<SUB>, step: f32) {
        let (lo, hi) = self.codes;
        for _ in 0..PASSES {
            let mut moved = false;
            for first in (0..SUB).step_by(16) {
                let limits = std::array::from_fn(|k| limit(step, self.diagonal[first + k]));
                if !some_wanted(&c.g[first..first + 16], &limits) {
                    continue;
                }
                for i in first..first + 16 {
                    let h = self.diagonal[i];
                    let Some(code) = best_code(c.q[i], step, c.g[i], h, lo, hi) else {
                        continue;
                    };
                    let delta = step * f32::from(code - c.q[i]);
                    c.gain += delta * (2.0 * c.g[i] - delta * h);
                    c.q[i] = code;
                    axpy_minus(&mut c.g, delta, &self.h[i]);
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
    }
}

#[inline(always)]
fn axpy_minus<const SUB: usize>(sum: &mut [f32; SUB], a: f32, x: &[f32; SUB]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum -= a * x;
    }
}
