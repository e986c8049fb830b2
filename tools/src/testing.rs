//! Numbers and layers for tests.

use myq_model::Config;
use myq_model::config::{Family, Pairing, Rope, Scaling};

use crate::pass::Block;

/// `n` numbers around zero, nearly normal, as weights are.
pub(crate) fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..n)
        .map(|_| (0..4).map(|_| next()).sum::<f32>() * 0.5)
        .collect()
}

/// Sizes of a layer.
pub(crate) fn config() -> Config {
    Config {
        family: Family::Llama,
        name: String::new(),
        layers: 1,
        width: 64,
        ffn: 96,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab: 8,
        context: 64,
        norm_eps: 1e-5,
        rope: Rope {
            theta: 1e4,
            dims: 16,
            pairing: Pairing::Half,
            scaling: Scaling::None,
        },
    }
}

/// A layer of these sizes, with biases.
pub(crate) fn block(c: &Config) -> Block {
    let (d, q, kv, f) = (c.width, c.q_width(), c.kv_width(), c.ffn);
    let shapes = [(d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d)];
    let mut seed = 0;
    let mut some = |n: usize, scale: f32| -> Vec<f32> {
        seed += 1;
        numbers(n, seed).iter().map(|x| x * scale).collect()
    };
    // Channels of very different size, as norms of real models give them.
    let norm = |mut x: Vec<f32>| {
        x.iter_mut().enumerate().for_each(|(i, x)| {
            *x = 1.0 + *x * 0.1 + if i % 9 == 0 { 8.0 } else { 0.0 };
        });
        x
    };
    Block {
        attn_norm: norm(some(d, 1.0)),
        ffn_norm: norm(some(d, 1.0)),
        bias: [some(q, 0.1), some(kv, 0.1), some(kv, 0.1)],
        matrices: shapes.map(|(cols, rows)| some(cols * rows, 0.15)),
    }
}
