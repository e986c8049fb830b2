//! One token, from its id to logits: the transformer, written once for every backend.

use crate::backend::{Backend, Batch, Slot};
use crate::weights::{Layer, Weights};

/// Runs a batch through the model; keys and values stay in the backend's cache.
pub fn forward<B: Backend>(backend: &mut B, weights: &Weights, batch: &Batch<'_>) {
    backend.begin(batch, &weights.embedding);
    for (index, layer) in weights.layers.iter().enumerate() {
        attention(backend, index, layer);
        feed_forward(backend, layer);
    }
    if batch.logits > 0 {
        backend.logits(&weights.norm, &weights.output);
    }
}

fn attention<B: Backend>(backend: &mut B, index: usize, layer: &Layer) {
    backend.norm(&layer.attn_norm);
    backend.project(
        Slot::Normed,
        &[
            (layer.q, Slot::Query),
            (layer.k, Slot::Key),
            (layer.v, Slot::Value),
        ],
    );
    backend.rope_and_store(index, layer);
    backend.attend(index);
    backend.project(Slot::Attention, &[(layer.o, Slot::Delta)]);
    backend.add();
}

fn feed_forward<B: Backend>(backend: &mut B, layer: &Layer) {
    backend.norm(&layer.ffn_norm);
    backend.project(
        Slot::Normed,
        &[(layer.gate, Slot::Gate), (layer.up, Slot::Up)],
    );
    backend.activate();
    backend.project(Slot::Gate, &[(layer.down, Slot::Delta)]);
    backend.add();
}
