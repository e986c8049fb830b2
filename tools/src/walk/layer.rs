//! One layer on the walk.

use std::borrow::Cow;

use myq_blocks::Rows;

use super::Walk;
use super::moments::{self, Sums};
use super::price::Price;
use crate::ToolError;
use crate::pass::{Block, Part, Pass};
use crate::states::States;

/// Tokens that pass through the feed-forward part together.
const TOKENS: usize = 512;

/// A layer on the way.
pub(super) struct Layer<'a, 'b> {
    pub(super) walk: &'a Walk<'b>,
    pub(super) pass: &'a Pass<'b>,
    pub(super) price: &'a Price,
    pub(super) source: Block,
    pub(super) index: usize,
}

impl Layer<'_, '_> {
    /// Quantises the matrices of a group, which share an input of `n` values, and gives them as
    /// they are stored to `to`.
    fn replace<'s>(
        &'s self,
        group: usize,
        n: usize,
        to: &mut [Vec<f32>],
        sums: impl FnOnce(&mut Sums<'s>) -> Result<(), ToolError>,
    ) -> Result<(), ToolError> {
        let (walk, parts) = (self.walk, Part::GROUPS[group]);
        self.price.begin(self.index, group);
        let done = |rows: usize| self.price.rows(group, rows);
        let names: Vec<String> = parts.iter().map(|p| p.tensor(self.index)).collect();
        let mut rows: Vec<_> = names.iter().map(|name| walk.work.rows(name)).collect();
        let missing = |i: usize, rows: &[Option<_>]| {
            rows[i]
                .is_none()
                .then(|| (walk.format)(&names[i]))
                .flatten()
        };
        if (0..parts.len()).any(|i| missing(i, &rows).is_some()) {
            let weights: Vec<&[f32]> = parts.iter().map(|p| self.source.matrix(*p)).collect();
            let moments = walk.moments(&names[0], n, &weights, sums)?;
            for (i, weights) in weights.iter().enumerate() {
                if let Some(dtype) = missing(i, &rows) {
                    let all = [Ok(Cow::Borrowed(*weights))];
                    let bytes = walk.quantise(&names[i], all, &moments, &done)?;
                    rows[i] = Some((dtype, bytes));
                }
            }
            walk.work.forget(&moments::file(&names[0]));
        }
        for ((name, rows), to) in names.iter().zip(&rows).zip(to) {
            let Some((dtype, bytes)) = rows else {
                continue;
            };
            let rows = Rows::new(*dtype, n, bytes).map_err(|_| {
                ToolError::Setting(format!(
                    "{name} in the work folder is of another size; remove the folder"
                ))
            })?;
            for (r, to) in to.chunks_exact_mut(n).enumerate() {
                rows.dequantize(r, to);
            }
        }
        Ok(())
    }

    /// Adds all `states`, normed, to the sums of a group.
    fn add_normed(
        &self,
        sums: &mut Sums<'_>,
        group: usize,
        states: &mut States,
        norm: &[f32],
    ) -> Result<(), ToolError> {
        for i in 0..states.len() {
            let [x, y] = states.get(i)?.map(|x| self.pass.norm(&x, norm));
            sums.add(&x, &y);
            self.price.tokens(group, x.len() / norm.len());
        }
        Ok(())
    }

    /// From the states before the layer to those behind attention.
    pub(super) fn attention(
        &self,
        states: &mut States,
        middle: &mut States,
        quantised: &mut Block,
    ) -> Result<(), ToolError> {
        let (c, pass, source) = (self.pass.config, self.pass, &self.source);
        let normed = |x: &[f32]| pass.norm(x, &source.attn_norm);
        let (queries, rest) = quantised.matrices.split_at_mut(Part::O as usize);
        self.replace(0, c.width, queries, |sums| {
            self.add_normed(sums, 0, states, &source.attn_norm)
        })?;
        let mut output = std::mem::take(&mut rest[0]);
        // The source's states go on as their inputs are computed for the sums.
        let mut ahead = false;
        let to = std::slice::from_mut(&mut output);
        self.replace(1, c.q_width(), to, |sums| {
            for i in 0..states.len() {
                let [mut x, y] = states.get(i)?;
                let seen = [
                    pass.attention(&normed(&x), source),
                    pass.attention(&normed(&y), quantised),
                ];
                sums.add(&seen[0], &seen[1]);
                self.price.tokens(1, x.len() / c.width);
                pass.add_projected(&mut x, &seen[0], source.matrix(Part::O));
                middle.set(i, [x, y])?;
            }
            ahead = true;
            Ok(())
        })?;
        for i in 0..states.len() {
            let from = if ahead { &mut *middle } else { &mut *states };
            let [mut x, mut y] = from.get(i)?;
            if !ahead {
                let seen = pass.attention(&normed(&x), source);
                pass.add_projected(&mut x, &seen, source.matrix(Part::O));
            }
            let seen = pass.attention(&normed(&y), quantised);
            pass.add_projected(&mut y, &seen, &output);
            middle.set(i, [x, y])?;
        }
        quantised.matrices[Part::O as usize] = output;
        Ok(())
    }

    /// From the states behind attention to those behind the layer.
    pub(super) fn feed_forward(
        &self,
        middle: &mut States,
        states: &mut States,
        quantised: &mut Block,
    ) -> Result<(), ToolError> {
        let (c, pass, source) = (self.pass.config, self.pass, &self.source);
        let some = TOKENS * c.width;
        let normed = |x: &[f32]| pass.norm(x, &source.ffn_norm);
        let wide = Part::Gate as usize..Part::Down as usize;
        let to = &mut quantised.matrices[wide];
        self.replace(2, c.width, to, |sums| {
            self.add_normed(sums, 2, middle, &source.ffn_norm)
        })?;
        let mut down = std::mem::take(&mut quantised.matrices[Part::Down as usize]);
        let mut ahead = false;
        let to = std::slice::from_mut(&mut down);
        self.replace(3, c.ffn, to, |sums| {
            for i in 0..middle.len() {
                let [mut x, y] = middle.get(i)?;
                for (x, y) in x.chunks_mut(some).zip(y.chunks(some)) {
                    let active = [
                        pass.activated(&normed(x), source),
                        pass.activated(&normed(y), quantised),
                    ];
                    sums.add(&active[0], &active[1]);
                    self.price.tokens(3, x.len() / c.width);
                    pass.add_projected(x, &active[0], source.matrix(Part::Down));
                }
                middle.set(i, [x, y])?;
            }
            ahead = true;
            Ok(())
        })?;
        // Computed once more: kept, it would take more memory than all else.
        let advance = |x: &mut [f32], block: &Block, down: &[f32]| {
            for x in x.chunks_mut(some) {
                let input = pass.activated(&normed(x), block);
                pass.add_projected(x, &input, down);
            }
        };
        for i in 0..middle.len() {
            let [mut x, mut y] = middle.get(i)?;
            if !ahead {
                advance(&mut x, source, source.matrix(Part::Down));
            }
            advance(&mut y, quantised, &down);
            states.set(i, [x, y])?;
        }
        quantised.matrices[Part::Down as usize] = down;
        Ok(())
    }
}
