//! A seeded hash for the tables built from files.
//!
//! Keys come from files that nobody vouches for, so the seed differs in every process and a
//! file cannot be made to collide; a multiply and a fold a word keep loading fast.

use std::hash::{BuildHasher, RandomState};

/// Odd constant of the multiplication (the fraction of the golden ratio, 64 bits).
const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

/// An unpredictable number for one table.
pub(super) fn seed() -> u64 {
    RandomState::new().hash_one(0u8)
}

/// Hash of one word.
#[inline]
pub(super) fn word(seed: u64, value: u64) -> u64 {
    let product = u128::from(value ^ seed) * u128::from((MULTIPLIER ^ seed.rotate_left(32)) | 1);
    (product >> 64) as u64 ^ product as u64
}

/// Hash of a byte string.
#[inline]
pub(super) fn bytes(seed: u64, key: &[u8]) -> u64 {
    let (words, rest) = key.as_chunks::<8>();
    let mut hash = seed ^ key.len() as u64;
    for chunk in words {
        hash = word(seed, hash.rotate_left(5) ^ u64::from_le_bytes(*chunk));
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    word(seed, hash.rotate_left(5) ^ u64::from_le_bytes(last))
}

/// An open-addressing table of indices: who owns the keys also compares them.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    seed: u64,
    slots: Box<[u32]>,
}

/// The value of an empty slot.
const EMPTY: u32 = u32::MAX;

impl Slots {
    /// A table for at most `count` keys, at least three eighths of it free.
    pub(super) fn new(count: usize) -> Self {
        let size = (count * 8 / 5 + 1).next_power_of_two();
        Slots {
            seed: seed(),
            slots: vec![EMPTY; size].into_boxed_slice(),
        }
    }

    /// The seed with which keys of this table are hashed.
    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// The first index on the probe path of `hash` that `is_key` accepts.
    #[inline]
    pub(super) fn find(&self, hash: u64, mut is_key: impl FnMut(u32) -> bool) -> Option<u32> {
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            match self.slots[at] {
                EMPTY => return None,
                index if is_key(index) => return Some(index),
                _ => at = (at + 1) & mask,
            }
        }
    }

    /// Enters `index` unless an equal key is there already; the first one stays.
    pub(super) fn insert(&mut self, hash: u64, index: u32, mut is_key: impl FnMut(u32) -> bool) {
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        while self.slots[at] != EMPTY {
            if is_key(self.slots[at]) {
                return;
            }
            at = (at + 1) & mask;
        }
        self.slots[at] = index;
    }
}
