//! Attention of a tile of queries over blocks of keys, with a softmax in steps.
//!
//! ```text
//! max = −∞, total = 0, mixed = 0                                  for each query
//! for each block of KEYS keys:
//!     scores  = queries · keys                                     masked after the diagonal
//!     max', p = the larger maximum, exp(scores − max')
//!     total   = total · exp(max − max') + Σ p
//!     mixed   = mixed · exp(max − max') + p · values
//! attention = mixed / total
//! ```
//!
//! (Dao et al., "FlashAttention", 2022; Milakov and Gimelshein, "Online normalizer calculation
//! for softmax", 2018.) All sums are fp32. Scratch does not grow with the context. The queries
//! of a tile are some tokens times the heads that share keys and values, so that each block is
//! widened once for all of them. Few queries (decode) skip the widened copy.

use std::ops::Range;

use myq_blocks::{Kernels, scalar};

use super::{Head, Store};

/// Keys of a block.
const KEYS: usize = 64;
/// Queries of a tile, if the heads of a group divide it: a multiple of the rows that kernels
/// keep in registers (4, 6, 8, 12), and enough that widening a block is a tenth of the work.
const QUERIES: usize = 48;
/// Up to this many queries meet keys in the cache's own form: bringing a block into the form
/// of a product costs as much as the products of about as many queries.
const FEW: usize = 8;

/// Most tokens of a tile whose keys `group` heads share.
pub fn tokens(group: usize) -> usize {
    (QUERIES / group).max(1)
}

/// Values of scratch that a tile needs.
pub fn floats(group: usize, dim: usize) -> usize {
    let rows = group * tokens(group);
    rows * (2 * dim + KEYS + 2) + 2 * KEYS * dim
}

/// Queries of some tokens and of the heads that share keys, and what they have seen so far.
#[derive(Debug)]
pub struct Tile<'a> {
    group: usize,
    dim: usize,
    /// rows × dim, times the scale of scores; a row is a head of a token
    queries: &'a mut [f32],
    /// dim × keys of the block: transposed keys
    keys: &'a mut [f32],
    /// keys of the block × dim
    values: &'a mut [f32],
    /// rows × keys of the block: scores, then weights
    weights: &'a mut [f32],
    /// rows × dim: weighted sum of values
    mixed: &'a mut [f32],
    /// rows: largest score
    max: &'a mut [f32],
    /// rows: sum of weights
    total: &'a mut [f32],
}

impl<'a> Tile<'a> {
    /// A tile of `count` tokens, at most [`tokens`], that has seen nothing; `scratch` holds
    /// [`floats`] values.
    ///
    /// # Panics
    /// If the scratch is too small.
    pub fn new(scratch: &'a mut [f32], group: usize, dim: usize, count: usize) -> Tile<'a> {
        let rows = group * count;
        let (queries, rest) = scratch.split_at_mut(rows * dim);
        let (keys, rest) = rest.split_at_mut(KEYS * dim);
        let (values, rest) = rest.split_at_mut(KEYS * dim);
        let (weights, rest) = rest.split_at_mut(rows * KEYS);
        let (mixed, rest) = rest.split_at_mut(rows * dim);
        let (max, rest) = rest.split_at_mut(rows);
        let total = &mut rest[..rows];
        mixed.fill(0.0);
        max.fill(f32::NEG_INFINITY);
        total.fill(0.0);
        Tile {
            group,
            dim,
            queries,
            keys,
            values,
            weights,
            mixed,
            max,
            total,
        }
    }

    /// Sets the queries of token `i`, group × dim values.
    pub fn set_queries(&mut self, i: usize, query: &[f32], scale: f32) {
        let n = self.group * self.dim;
        let place = self.queries[i * n..(i + 1) * n].iter_mut();
        place.zip(query).for_each(|(to, q)| *to = q * scale);
    }

    /// Takes in the keys and values at `range`, of which token `i` sees those before
    /// `first + i + 1`.
    ///
    /// # Panics
    /// If the cache has no such positions.
    pub fn attend<K: Kernels>(&mut self, k: K, head: Head<'_>, range: Range<usize>, first: usize) {
        for start in range.clone().step_by(KEYS) {
            let count = KEYS.min(range.end - start);
            let few = self.max.len() <= FEW && matches!(head.store, Store::F16 { .. });
            // Columns of the weights: products like whole vectors.
            let m = if few {
                count
            } else {
                count.next_multiple_of(16)
            };
            let block = head.block(start, count, self.dim);
            self.score(k, block, m, few);
            self.weigh(k, (start, count, m), first);
            self.mix(k, block, m, few);
        }
    }

    /// weights = queries · keys, rows × `m`.
    fn score<K: Kernels>(&mut self, k: K, block: Block<'_>, m: usize, few: bool) {
        let (dim, rows) = (self.dim, self.max.len());
        let keys = &mut self.keys[..dim * m];
        let weights = &mut self.weights[..rows * m];
        match block {
            Block::F16(stored, _) if few => {
                return k.scores(self.queries, stored, dim, weights);
            }
            Block::F16(stored, _) => k.transpose(stored, dim, keys),
            Block::F32(stored, _) => scalar::transpose(stored, dim, keys),
        }
        weights.fill(0.0);
        k.product(self.queries, keys, dim, weights);
    }

    /// Scores become weights, `m` for each row; what was mixed before is scaled to the new
    /// maximum.
    fn weigh<K: Kernels>(&mut self, k: K, (start, count, m): (usize, usize, usize), first: usize) {
        let rows = self.weights.chunks_exact_mut(m);
        let so_far = self.max.iter_mut().zip(self.total.iter_mut());
        let mixed = self.mixed.chunks_exact_mut(self.dim);
        for (i, ((row, (max, total)), mixed)) in rows.zip(so_far).zip(mixed).enumerate() {
            let sees = (first + i / self.group + 1).saturating_sub(start);
            let (seen, hidden) = row.split_at_mut(count.min(sees));
            hidden.fill(0.0);
            if seen.is_empty() {
                continue;
            }
            let (new, sum) = k.exp_block(seen, *max);
            if new != *max {
                // The first time exp(−∞) = 0, and there is nothing yet.
                let factor = (*max - new).exp();
                *total *= factor;
                mixed.iter_mut().for_each(|v| *v *= factor);
                *max = new;
            }
            *total += sum;
        }
    }

    /// mixed += weights · values.
    fn mix<K: Kernels>(&mut self, k: K, block: Block<'_>, m: usize, few: bool) {
        let (dim, rows) = (self.dim, self.max.len());
        let weights = &self.weights[..rows * m];
        let values = &mut self.values[..m * dim];
        match block {
            Block::F16(_, stored) if few => return k.mix(weights, stored, dim, self.mixed),
            Block::F16(_, stored) => k.to_f32(stored, &mut values[..stored.len()]),
            Block::F32(_, stored) => values[..stored.len()].copy_from_slice(stored),
        }
        let count = match block {
            Block::F16(_, stored) => stored.len(),
            Block::F32(_, stored) => stored.len(),
        };
        values[count..].fill(0.0);
        k.product(weights, values, m, self.mixed);
    }

    /// The attention of token `i`, group × dim values.
    pub fn attention(&self, i: usize, out: &mut [f32]) {
        let rows = i * self.group..(i + 1) * self.group;
        let n = self.group * self.dim;
        let mixed = self.mixed[i * n..(i + 1) * n].chunks_exact(self.dim);
        let out = out.chunks_exact_mut(self.dim);
        for ((out, mixed), total) in out.zip(mixed).zip(&self.total[rows]) {
            let inverse = 1.0 / total;
            let values = out.iter_mut().zip(mixed);
            values.for_each(|(o, v)| *o = v * inverse);
        }
    }

    /// What the first token has seen: for each row `dim` mixed values, the maximum and the
    /// total; what [`merge`] takes.
    pub fn part(&self, out: &mut [f32]) {
        let rows = out.chunks_exact_mut(self.dim + 2);
        let mixed = self.mixed.chunks_exact(self.dim);
        let so_far = self.max.iter().zip(self.total.iter());
        for ((out, mixed), (max, total)) in rows.zip(mixed).zip(so_far) {
            let (to, ends) = out.split_at_mut(self.dim);
            to.copy_from_slice(mixed);
            ends.copy_from_slice(&[*max, *total]);
        }
    }
}

/// Attention of one row from what tiles over different keys have seen: rows of `dim` + 2 values
/// (see [`Tile::part`]), `stride` values apart.
pub fn merge(parts: &[f32], stride: usize, out: &mut [f32]) {
    let dim = out.len();
    let seen = || parts.chunks(stride).map(|p| p[..dim + 2].split_at(dim));
    let max = seen().fold(f32::NEG_INFINITY, |m, (_, ends)| m.max(ends[0]));
    let total: f32 = seen().map(|(_, e)| e[1] * (e[0] - max).exp()).sum();
    out.fill(0.0);
    for (mixed, ends) in seen() {
        let factor = (ends[0] - max).exp() / total;
        let values = out.iter_mut().zip(mixed);
        values.for_each(|(o, v)| *o += factor * v);
    }
}

/// Keys and values of some positions, position by position.
#[derive(Clone, Copy, Debug)]
pub(super) enum Block<'a> {
    F16(&'a [myq_blocks::f16], &'a [myq_blocks::f16]),
    F32(&'a [f32], &'a [f32]),
}

#[cfg(test)]
mod tests {
    use super::super::{Cache, CacheType};
    use super::*;
    use myq_blocks::scalar::Scalar;

    const DIM: usize = 24;
    const GROUP: usize = 3;

    fn values(n: usize, seed: u32, size: f32) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                size * ((state >> 8) as f32 / 8_388_608.0 - 1.0)
            })
            .collect()
    }

    /// A cache of one head with `n` positions, and its keys and values as stored.
    fn filled(kind: CacheType, n: usize, size: f32) -> (Cache, Vec<f64>, Vec<f64>) {
        let mut cache = Cache::with_shape(1, 1, n, DIM, kind);
        let (keys, mixed) = (values(n * DIM, 1, size), values(n * DIM, 2, size));
        for p in 0..n {
            let range = p * DIM..(p + 1) * DIM;
            cache.put(Scalar, 0, 0, p, (&keys[range.clone()], &mixed[range]));
        }
        let stored = |v: &[f32]| {
            let round = |v: &f32| match kind {
                CacheType::F16 => myq_blocks::f16::from_f32(*v).to_f64(),
                CacheType::F32 => f64::from(*v),
            };
            v.iter().map(round).collect()
        };
        (cache, stored(&keys), stored(&mixed))
    }

    fn plain(query: &[f32], keys: &[f64], values: &[f64], sees: usize, scale: f32) -> Vec<f64> {
        let score = |p: usize| {
            let key = &keys[p * DIM..(p + 1) * DIM];
            let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * k).sum();
            dot * f64::from(scale)
        };
        let scores: Vec<f64> = (0..sees).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mixed = |i: usize| {
            (0..sees)
                .map(|p| weights[p] * values[p * DIM + i])
                .sum::<f64>()
        };
        (0..DIM).map(|i| mixed(i) / total).collect()
    }

    /// Largest difference from attention in fp64, relative to the largest value.
    fn difference(kind: CacheType, count: usize, first: usize, size: f32) -> f64 {
        let n = first + count;
        let (cache, keys, stored) = filled(kind, n, size);
        let query = values(count * GROUP * DIM, 3, size);
        // Scores of about ten, whatever the size.
        let scale = 1.0 / (size * size);
        let mut scratch = vec![f32::NAN; floats(GROUP, DIM)];
        let mut tile = Tile::new(&mut scratch, GROUP, DIM, count);
        for (i, query) in query.chunks(GROUP * DIM).enumerate() {
            tile.set_queries(i, query, scale);
        }
        tile.attend(Scalar, cache.head(0, 0), 0..n, first);
        let mut worst = 0.0f64;
        for i in 0..count {
            let mut out = vec![f32::NAN; GROUP * DIM];
            tile.attention(i, &mut out);
            for (head, out) in out.chunks(DIM).enumerate() {
                let at = (i * GROUP + head) * DIM;
                let want = plain(&query[at..at + DIM], &keys, &stored, first + i + 1, scale);
                for (got, want) in out.iter().zip(want) {
                    worst = worst.max((f64::from(*got) - want).abs() / f64::from(size));
                }
            }
        }
        worst
    }

    #[test]
    fn tiles_equal_attention_in_fp64() {
        for kind in [CacheType::F16, CacheType::F32] {
            for (count, first) in [
                (1, 0),
                (1, 63),
                (1, 200),
                (2, 62),
                (5, 0),
                (tokens(GROUP), 0),
                (tokens(GROUP), 50),
                (7, 130),
            ] {
                // Case 3: with activations of 1e3 scores and sums exceed fp16's range.
                for size in [1.0, 1e3] {
                    let worst = difference(kind, count, first, size);
                    // Scores of size 24: an error of u · 24 · DIM in the exponent at most.
                    assert!(
                        worst < 1e-4,
                        "{kind:?}, {count} tokens after {first}, {size:e}: {worst:e}"
                    );
                }
            }
        }
    }

    #[test]
    fn parts_over_different_keys_merge() {
        let n = 300;
        let (cache, ..) = filled(CacheType::F16, n, 1.0);
        let query = values(GROUP * DIM, 3, 1.0);
        let run = |range: Range<usize>, finish: &mut dyn FnMut(&Tile<'_>)| {
            let mut scratch = vec![f32::NAN; floats(GROUP, DIM)];
            let mut tile = Tile::new(&mut scratch, GROUP, DIM, 1);
            tile.set_queries(0, &query, 1.0);
            tile.attend(Scalar, cache.head(0, 0), range, n - 1);
            finish(&tile);
        };
        let mut want = vec![0.0; GROUP * DIM];
        run(0..n, &mut |tile| tile.attention(0, &mut want));
        let stride = GROUP * (DIM + 2);
        let mut parts = vec![0.0; 3 * stride];
        for (i, range) in [0..100, 100..101, 101..n].into_iter().enumerate() {
            run(range, &mut |tile| {
                tile.part(&mut parts[i * stride..(i + 1) * stride]);
            });
        }
        for (head, want) in want.chunks(DIM).enumerate() {
            let mut out = vec![0.0; DIM];
            merge(&parts[head * (DIM + 2)..], stride, &mut out);
            for (got, want) in out.iter().zip(want) {
                assert!((got - want).abs() < 1e-6, "{got} {want}");
            }
        }
    }
}
