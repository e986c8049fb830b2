//! Keys and values of past tokens.

pub mod tile;

use half::f16;
use myq_blocks::Kernels;

use crate::Config;
use tile::Block;

/// How keys and values are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheType {
    /// fp16.
    #[default]
    F16,
    /// fp32: twice the memory and slow, for comparison with exact arithmetic.
    F32,
}

impl CacheType {
    /// All types by name.
    pub const NAMES: [(&'static str, CacheType); 2] =
        [("f16", CacheType::F16), ("f32", CacheType::F32)];

    /// The type with this name.
    pub fn from_name(name: &str) -> Option<CacheType> {
        Self::NAMES
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, t)| *t)
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            CacheType::F16 => 2,
            CacheType::F32 => 4,
        }
    }
}

/// Keys and values: layers × kv_heads × context × head_dim each.
#[derive(Debug)]
pub struct Cache {
    store: Store,
    kv_heads: usize,
    context: usize,
    head_dim: usize,
}

#[derive(Debug)]
enum Store {
    F16 { keys: Vec<f16>, values: Vec<f16> },
    F32 { keys: Vec<f32>, values: Vec<f32> },
}

impl Cache {
    /// Room for `context` tokens; the system takes the pages when they are first written.
    pub fn new(c: &Config, context: usize, kind: CacheType) -> Cache {
        Cache::with_shape(c.layers, c.kv_heads, context, c.head_dim, kind)
    }

    /// Room for layers × kv_heads × context × head_dim keys, and as many values.
    fn with_shape(
        layers: usize,
        kv_heads: usize,
        context: usize,
        head_dim: usize,
        kind: CacheType,
    ) -> Cache {
        let len = layers * kv_heads * context * head_dim;
        // u16 zeros are f16 zeros, and a vector of them comes zeroed from the system.
        let halves = || bytemuck::allocation::cast_vec(vec![0u16; len]);
        let store = match kind {
            CacheType::F16 => Store::F16 {
                keys: halves(),
                values: halves(),
            },
            CacheType::F32 => Store::F32 {
                keys: vec![0.0; len],
                values: vec![0.0; len],
            },
        };
        Cache {
            store,
            kv_heads,
            context,
            head_dim,
        }
    }

    /// Tokens that fit.
    pub fn context(&self) -> usize {
        self.context
    }

    fn start(&self, layer: usize, head: usize) -> usize {
        (layer * self.kv_heads + head) * self.context * self.head_dim
    }

    /// Stores key and value, head_dim each, of one token and head.
    pub fn put<K: Kernels>(
        &mut self,
        k: K,
        layer: usize,
        head: usize,
        position: usize,
        pair: (&[f32], &[f32]),
    ) {
        let at = self.start(layer, head) + position * self.head_dim;
        let range = at..at + self.head_dim;
        match &mut self.store {
            Store::F16 { keys, values } => {
                k.to_f16(pair.0, &mut keys[range.clone()]);
                k.to_f16(pair.1, &mut values[range]);
            }
            Store::F32 { keys, values } => {
                keys[range.clone()].copy_from_slice(pair.0);
                values[range].copy_from_slice(pair.1);
            }
        }
    }

    /// One head of one layer.
    pub fn head(&self, layer: usize, head: usize) -> Head<'_> {
        Head {
            store: &self.store,
            start: self.start(layer, head),
        }
    }
}

/// Keys and values of one head, token by token.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    store: &'a Store,
    start: usize,
}

impl<'a> Head<'a> {
    /// Keys and values, `dim` each, of `count` positions from `start` on.
    fn block(self, start: usize, count: usize, dim: usize) -> Block<'a> {
        let at = self.start + start * dim;
        let range = at..at + count * dim;
        match self.store {
            Store::F16 { keys, values } => Block::F16(&keys[range.clone()], &values[range]),
            Store::F32 { keys, values } => Block::F32(&keys[range.clone()], &values[range]),
        }
    }
}
