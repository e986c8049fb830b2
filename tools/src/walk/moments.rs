//! Second moments of one input, and what quantised layers before it have changed.

use super::Method;
use crate::ToolError;
use crate::linalg::{add_cross, add_gram, linear, mirror};
use crate::solve::{Cross, Curvature, Factor};
use crate::vector;
use crate::work::{Work, bytes_of, floats_of};

/// Every so many rows are looked at for the energy of outputs.
const STRIDE: usize = 8;

/// Name of the file of the sums of the input of `name` and its neighbours.
pub(super) fn file(name: &str) -> String {
    format!("moments-{name}.bin")
}

/// Sums over the inputs of one matrix, or of some that share them.
pub(super) struct Sums<'a> {
    n: usize,
    tokens: usize,
    /// Σ y·yᵀ, on and above the diagonal until all are in.
    h: Vec<f32>,
    /// What errors of the layers before ask for, where they are passed on.
    cross: Option<Asked<'a>>,
}

/// The difference that the layers before have made, in one of two forms; the smaller and
/// cheaper is chosen.
struct Asked<'a> {
    /// The only matrix of the input, where the difference is that of its outputs.
    weights: Option<&'a [f32]>,
    /// Σ (x − y)·yᵀ, n × n, or Σ W(x − y)·yᵀ, rows × n.
    sums: Vec<f32>,
}

impl<'a> Sums<'a> {
    /// For inputs of `n` values of the matrices `weights`.
    pub(super) fn new(n: usize, weights: &[&'a [f32]], method: &Method) -> Sums<'a> {
        let cross = (method.propagate != 0.0).then(|| {
            let only = match weights {
                // The output costs another product, W·(x − y).
                [w] if 2 * w.len() <= n * n => Some(*w),
                _ => None,
            };
            Asked {
                weights: only,
                sums: vec![0.0; only.map_or(n * n, <[f32]>::len)],
            }
        });
        Sums {
            n,
            tokens: 0,
            h: vec![0.0; n * n],
            cross,
        }
    }

    /// Adds some tokens: their inputs by the source and by quantised layers before.
    pub(super) fn add(&mut self, x: &[f32], y: &[f32]) {
        let n = self.n;
        self.tokens += y.len() / n;
        add_gram(y, n, &mut self.h);
        let Some(Asked { weights, sums }) = &mut self.cross else {
            return;
        };
        let lacking = vector::difference(x, y);
        match weights {
            None => add_cross(&lacking, y, n, sums),
            Some(w) => {
                let mut out = vec![0.0; lacking.len() / n * (w.len() / n)];
                linear(&lacking, w, n, &mut out);
                add_cross(&out, y, n, sums);
            }
        }
    }

    /// To be kept.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.tokens as u64).to_le_bytes().to_vec();
        let cross = self.cross.as_ref().map_or(&[][..], |c| &c.sums);
        bytes.extend(bytes_of(&[&self.h, cross]));
        bytes
    }

    /// Takes over what was kept under `name`; whether there was something of this size.
    pub(super) fn restore(&mut self, work: &Work, name: &str) -> bool {
        let kept = work.kept(&file(name));
        let Some((tokens, rest)) = kept.as_deref().and_then(<[u8]>::split_first_chunk::<8>) else {
            return false;
        };
        let cross = self.cross.as_ref().map_or(0, |c| c.sums.len());
        let mut h = floats_of(rest);
        if h.len() != self.n * self.n + cross {
            return false;
        }
        let rest = h.split_off(self.n * self.n);
        (self.tokens, self.h) = (u64::from_le_bytes(*tokens) as usize, h);
        if let Some(cross) = &mut self.cross {
            cross.sums = rest;
        }
        true
    }

    /// Completes H when all tokens are in.
    pub(super) fn complete(&mut self) {
        mirror(&mut self.h, self.n);
    }

    /// `name` is the first matrix of this input.
    pub(super) fn finish(mut self, name: &str, method: &Method) -> Result<Moments, ToolError> {
        let factor = Factor::new(&mut self.h, self.n, method.damping, method.order);
        let factor = factor.ok_or_else(|| {
            ToolError::Setting(format!(
                "{name}: of {} calibration tokens none reached it with a finite input that is not zero; calibrate with other texts",
                self.tokens
            ))
        })?;
        Ok(Moments {
            n: self.n,
            tokens: self.tokens,
            h: self.h,
            factor,
            cross: self.cross.map(|c| (c.weights.is_some(), c.sums)),
        })
    }
}

/// Second moments of one input.
pub(super) struct Moments {
    pub(super) n: usize,
    pub(super) tokens: usize,
    /// Σ y·yᵀ, damped.
    h: Vec<f32>,
    pub(super) factor: Factor,
    /// What errors of the layers before ask for, and whether of outputs.
    cross: Option<(bool, Vec<f32>)>,
}

impl Moments {
    /// For the solver.
    pub(super) fn curvature(&self, share: f32) -> Curvature<'_> {
        let cross = self.cross.as_ref().map(|(outputs, sums)| match outputs {
            true => Cross::Outputs(sums),
            false => Cross::Inputs(sums),
        });
        Curvature {
            n: self.n,
            h: &self.h,
            factor: &self.factor,
            pull: cross.map(|c| (c, share)),
        }
    }

    /// Σ `loss` over Σ wᵀHw, of some rows that stand for all.
    pub(super) fn relative(&self, weights: &[f32], loss: &[f64]) -> f64 {
        let n = self.n;
        let some: Vec<f32> = weights
            .chunks_exact(n)
            .step_by(STRIDE)
            .flatten()
            .copied()
            .collect();
        let mut hw = vec![0.0; some.len()];
        linear(&some, &self.h, n, &mut hw);
        let terms = hw.iter().zip(&some);
        let energy: f64 = terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        loss.iter().step_by(STRIDE).sum::<f64>() / energy.max(1e-300)
    }
}
