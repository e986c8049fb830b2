//! Every buffer of a run, by name, with its shape; allocated once.

use myq_blocks::{ActBuffer, MAX_COLUMNS};

use crate::cache::{Cache, tile};
use crate::{Activations, Config, Plan};

/// Tokens whose second planes a thread multiplies at once.
pub const PARTIAL_COLUMNS: usize = MAX_COLUMNS / 2;
/// Rows of a matrix that a thread multiplies by both planes at once.
pub const PARTIAL_ROWS: usize = 512;

/// Buffers of one sequence on the CPU. Shapes are rows × columns, row-major.
#[derive(Debug)]
pub struct State {
    /// batch × width
    pub hidden: Vec<f32>,
    /// batch × width
    pub normed: Vec<f32>,
    /// batch × heads·head_dim
    pub query: Vec<f32>,
    /// batch × kv_heads·head_dim
    pub key: Vec<f32>,
    /// batch × kv_heads·head_dim
    pub value: Vec<f32>,
    /// batch × heads·head_dim
    pub attention: Vec<f32>,
    /// batch × ffn
    pub gate: Vec<f32>,
    /// batch × ffn
    pub up: Vec<f32>,
    /// batch × width
    pub delta: Vec<f32>,
    /// logit_rows × vocab
    pub logits: Vec<f32>,
    /// batch × rope.dims: the cosines of all pairs, then the sines
    pub angles: Vec<f32>,
    /// threads × [`tile::floats`]: attention while it is computed
    pub tiles: Vec<f32>,
    /// kv_heads × [`Plan::key_parts`] × group × (head_dim + 2): what tiles over parts of one
    /// head's keys have seen
    pub parts: Vec<f32>,
    /// 8-bit form of a matrix's input, a column or two for each token of the batch
    pub codes: ActBuffer,
    /// threads × the longest of a matrix's inputs, with two planes: what the first leaves
    pub residual: Vec<f32>,
    /// threads × [`PARTIAL_COLUMNS`] × [`PARTIAL_ROWS`], with two planes: products of the second
    pub partial: Vec<f32>,
    /// Keys and values of past tokens
    pub cache: Cache,
}

impl State {
    /// Allocates everything; the cache's pages are taken by the system when first written.
    pub fn new(c: &Config, p: &Plan) -> State {
        let longest = p.longest_input(c);
        let one_plane = p.activations == Activations::Int8;
        let spare = if one_plane { 0 } else { p.threads };
        let buffer = |rows: usize, cols: usize| vec![0.0f32; rows * cols];
        State {
            hidden: buffer(p.batch, c.width),
            normed: buffer(p.batch, c.width),
            query: buffer(p.batch, c.q_width()),
            key: buffer(p.batch, c.kv_width()),
            value: buffer(p.batch, c.kv_width()),
            attention: buffer(p.batch, c.q_width()),
            gate: buffer(p.batch, c.ffn),
            up: buffer(p.batch, c.ffn),
            delta: buffer(p.batch, c.width),
            logits: buffer(p.logit_rows, c.vocab),
            angles: buffer(p.batch, c.rope.dims),
            tiles: buffer(p.threads, tile::floats(c.heads / c.kv_heads, c.head_dim)),
            parts: buffer(c.heads * p.key_parts(c), c.head_dim + 2),
            codes: ActBuffer::new(p.activations.columns(p.batch), longest),
            residual: buffer(spare, longest),
            partial: buffer(spare * PARTIAL_COLUMNS, PARTIAL_ROWS),
            cache: Cache::new(c, p.context, p.cache),
        }
    }
}
