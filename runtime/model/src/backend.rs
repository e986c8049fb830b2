//! What a processor must be able to do for the forward pass: stages over named buffers.

use crate::weights::{Layer, Matrix};

/// Tokens of one sequence that pass through the model together.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Token ids, at most [`crate::Plan::batch`] of them.
    pub tokens: &'a [u32],
    /// Position of the first; everything before it is in the cache.
    pub position: usize,
    /// For how many of the last tokens logits are wanted, at most
    /// [`crate::Plan::logit_rows`].
    pub logits: usize,
}

/// The buffers that a matrix reads or writes; one column per token of the batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slot {
    /// Output of a norm, `width`.
    Normed,
    /// Query, `heads·head_dim`.
    Query,
    /// Key, `kv_heads·head_dim`.
    Key,
    /// Value, `kv_heads·head_dim`.
    Value,
    /// Output of attention, `heads·head_dim`.
    Attention,
    /// Gate, then the activated feed-forward state, `ffn`.
    Gate,
    /// Up, `ffn`.
    Up,
    /// What a block adds to the hidden state, `width`.
    Delta,
}

/// One processor's stages. Buffers belong to it and are sized by the plan before the first
/// token, so that no stage can fail or allocate.
pub trait Backend {
    /// Takes a batch: embeds its tokens into the hidden state, prepares rope angles.
    fn begin(&mut self, batch: &Batch<'_>, embedding: &Matrix);

    /// Normed = norm of the hidden state.
    fn norm(&mut self, weight: &[f32]);

    /// Multiplies `input` by each matrix into its slot, in one pass.
    fn project(&mut self, input: Slot, outputs: &[(Matrix, Slot)]);

    /// Adds the biases, turns query and key by their positions, and stores key and value in
    /// the cache.
    fn rope_and_store(&mut self, index: usize, layer: &Layer);

    /// Attention = softmax(query · keys) · values, over the cache up to each position.
    fn attend(&mut self, index: usize);

    /// Gate = silu(gate) · up.
    fn activate(&mut self);

    /// Hidden += delta.
    fn add(&mut self);

    /// Logits of the last tokens of the batch.
    fn logits(&mut self, norm: &[f32], output: &Matrix);
}
