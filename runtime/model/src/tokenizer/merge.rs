//! Byte-pair merging: which pairs join, in which order, and the loop that joins them.
//!
//! Of all adjacent pairs the one with the lowest rank is joined, the leftmost of equals,
//! until none is left. Ranks are the order of the merge list, or for SentencePiece the order
//! of the scores.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::hash::{Slots, word};

/// Longest run of symbols joined by plain search; longer ones take the heap.
const SHORT: usize = 48;
/// Rank of a pair that does not join.
const NEVER: u32 = u32::MAX;

/// Two adjacent tokens that join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Merge {
    /// The first token.
    pub(super) left: u32,
    /// The second token.
    pub(super) right: u32,
    /// What they become.
    pub(super) result: u32,
    /// Lower ranks join first; below `u32::MAX`.
    pub(super) rank: u32,
}

/// All pairs that join, by pair.
#[derive(Clone, Debug)]
pub(super) struct Merges {
    list: Vec<Merge>,
    slots: Slots,
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Merges {
    /// Indexes the list; of two merges of the same pair the first counts.
    pub(super) fn new(list: Vec<Merge>) -> Self {
        let mut slots = Slots::new(list.len());
        for (index, merge) in list.iter().enumerate() {
            let hash = word(slots.seed(), key(merge.left, merge.right));
            slots.insert(hash, index as u32, |other| {
                let other = &list[other as usize];
                (other.left, other.right) == (merge.left, merge.right)
            });
        }
        Merges { list, slots }
    }

    /// The list as it is stored.
    pub(super) fn list(&self) -> &[Merge] {
        &self.list
    }

    /// Rank and result of a pair; the rank `NEVER` if it does not join.
    #[inline]
    fn find(&self, left: u32, right: u32) -> (u32, u32) {
        let hash = word(self.slots.seed(), key(left, right));
        let found = self.slots.find(hash, |index| {
            let merge = &self.list[index as usize];
            (merge.left, merge.right) == (left, right)
        });
        found.map_or((NEVER, 0), |index| {
            let merge = &self.list[index as usize];
            (merge.rank, merge.result)
        })
    }

    /// Joins what joins in `symbols` and appends the rest to `out`.
    pub(super) fn apply(&self, symbols: &mut Vec<u32>, out: &mut Vec<u32>) {
        match symbols.len() {
            0 | 1 => out.extend_from_slice(symbols),
            2..=SHORT => self.apply_short(symbols, out),
            _ => self.apply_long(symbols, out),
        }
    }

    /// Quadratic, and the quickest for words.
    fn apply_short(&self, symbols: &mut Vec<u32>, out: &mut Vec<u32>) {
        let mut pairs = [(NEVER, 0); SHORT];
        for (pair, two) in pairs.iter_mut().zip(symbols.windows(2)) {
            *pair = self.find(two[0], two[1]);
        }
        let mut count = symbols.len() - 1;
        loop {
            let best = (0..count).min_by_key(|&i| pairs[i].0);
            let Some(at) = best.filter(|&i| pairs[i].0 != NEVER) else {
                break;
            };
            symbols[at] = pairs[at].1;
            symbols.remove(at + 1);
            pairs.copy_within(at + 1..count, at);
            count -= 1;
            if at > 0 {
                pairs[at - 1] = self.find(symbols[at - 1], symbols[at]);
            }
            if at < count {
                pairs[at] = self.find(symbols[at], symbols[at + 1]);
            }
        }
        out.extend_from_slice(symbols);
    }

    /// n log n, for long runs: a chain of the living symbols and a heap of pairs. A pair is
    /// stale, and skipped, when one of its symbols has changed or gone since it was entered.
    fn apply_long(&self, symbols: &mut [u32], out: &mut Vec<u32>) {
        let n = symbols.len();
        let mut next: Vec<usize> = (1..=n).collect();
        let mut previous: Vec<usize> = (0..n).map(|i| i.wrapping_sub(1)).collect();
        let mut alive = vec![true; n];
        let mut heap = BinaryHeap::new();
        let enter = |heap: &mut BinaryHeap<_>, symbols: &[u32], at: usize, right: usize| {
            let (rank, result) = self.find(symbols[at], symbols[right]);
            if rank != NEVER {
                heap.push(Reverse((rank, at, symbols[at], symbols[right], result)));
            }
        };
        for at in 0..n - 1 {
            enter(&mut heap, symbols, at, at + 1);
        }
        while let Some(Reverse((_, at, left, right, result))) = heap.pop() {
            let second = next[at];
            let stale =
                !alive[at] || second == n || symbols[at] != left || symbols[second] != right;
            if stale {
                continue;
            }
            symbols[at] = result;
            alive[second] = false;
            next[at] = next[second];
            if next[at] < n {
                previous[next[at]] = at;
                enter(&mut heap, symbols, at, next[at]);
            }
            if previous[at] < n {
                enter(&mut heap, symbols, previous[at], at);
            }
        }
        out.extend((0..n).filter(|&i| alive[i]).map(|i| symbols[i]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ids below 4 are letters; every pair of the list joins to a new id.
    fn merges() -> Merges {
        let pairs = [
            (0, 1),
            (4, 2),
            (2, 2),
            (6, 6),
            (5, 6),
            (0, 0),
            (9, 9),
            (1, 3),
            (9, 1),
        ];
        let list = pairs.iter().enumerate().map(|(i, &(left, right))| Merge {
            left,
            right,
            result: 4 + i as u32,
            rank: i as u32,
        });
        Merges::new(list.collect())
    }

    #[test]
    fn the_lowest_rank_joins_first_and_the_leftmost_of_equals() {
        let mut out = Vec::new();
        // a a b: `a b` has the lower rank, so the first `a` stays.
        merges().apply(&mut vec![0, 0, 1], &mut out);
        assert_eq!(out, [0, 4]);
        out.clear();
        // a a a: equal ranks, the left pair joins.
        merges().apply(&mut vec![0, 0, 0], &mut out);
        assert_eq!(out, [9, 0]);
    }

    #[test]
    fn both_loops_agree() {
        let merges = merges();
        let mut state = 12345u64;
        for round in 0..3000 {
            let symbols: Vec<u32> = (0..2 + round % (SHORT - 1))
                .map(|_| {
                    state = state
                        .wrapping_mul(6364136223846793005)
                        .wrapping_add(1442695040888963407);
                    (state >> 61) as u32 & 3
                })
                .collect();
            let (mut short, mut long) = (Vec::new(), Vec::new());
            merges.apply_short(&mut symbols.clone(), &mut short);
            merges.apply_long(&mut symbols.clone(), &mut long);
            assert_eq!(short, long, "{symbols:?}");
        }
    }
}
