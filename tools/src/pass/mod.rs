//! The forward pass of the quantiser: fp32, one layer at a time, whole sequences.
//!
//! The runtime's own pass reads quantised matrices and keeps a cache; here every layer's inputs
//! are wanted, for all calibration tokens, once with the source's weights and once with the
//! quantised ones. Both walk through a [`Block`] in four steps, each of which ends where a
//! matrix takes an input.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use myq_blocks::encode::EncodeError;
use myq_model::{Config, rope::RopeTable};
use rayon::prelude::*;

use crate::ToolError;
use crate::linalg::{linear, matrix, matrix_mut, multiply};
use crate::model::{Model, Tensor};
use crate::vector;

mod gradient;
pub use gradient::Gradients;

/// Queries whose scores are held at once.
const QUERIES: usize = 128;

/// The matrices of a layer, in the order in which inputs reach them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Part {
    /// Query.
    Q,
    /// Key.
    K,
    /// Value.
    V,
    /// Attention output.
    O,
    /// Gate.
    Gate,
    /// Up.
    Up,
    /// Down.
    Down,
}

impl Part {
    /// All of them.
    pub const ALL: [Part; 7] = [
        Part::Q,
        Part::K,
        Part::V,
        Part::O,
        Part::Gate,
        Part::Up,
        Part::Down,
    ];

    /// Those that share an input, in the order in which a layer's four inputs arise.
    pub const GROUPS: [&'static [Part]; 4] = [
        &[Part::Q, Part::K, Part::V],
        &[Part::O],
        &[Part::Gate, Part::Up],
        &[Part::Down],
    ];

    /// Name in a tensor's name.
    pub fn name(self) -> &'static str {
        match self {
            Part::Q => "attn_q",
            Part::K => "attn_k",
            Part::V => "attn_v",
            Part::O => "attn_output",
            Part::Gate => "ffn_gate",
            Part::Up => "ffn_up",
            Part::Down => "ffn_down",
        }
    }

    /// Name of its tensor in layer `layer`.
    pub fn tensor(self, layer: usize) -> String {
        format!("blk.{layer}.{}.weight", self.name())
    }
}

/// One layer's weights, fp32, row-major.
#[derive(Clone, Debug, Default)]
pub struct Block {
    /// Weight of the norm before attention.
    pub attn_norm: Vec<f32>,
    /// Weight of the norm before the feed-forward part.
    pub ffn_norm: Vec<f32>,
    /// Biases of query, key and value; empty where there are none.
    pub bias: [Vec<f32>; 3],
    /// The matrices, indexed by [`Part`].
    pub matrices: [Vec<f32>; 7],
}

impl Block {
    /// Reads layer `layer` of `model`.
    ///
    /// # Errors
    /// A tensor that does not match its checksum, or is missing.
    pub fn read(model: &Model, layer: usize) -> Result<Block, ToolError> {
        let named = |part: &str| format!("blk.{layer}.{part}");
        let bias = |part: &str| match model.tensor(&named(part)) {
            Some(_) => tensor(model, &named(part)),
            None => Ok(Vec::new()),
        };
        let mut matrices = <[Vec<f32>; 7]>::default();
        for part in Part::ALL {
            matrices[part as usize] = tensor(model, &part.tensor(layer))?;
        }
        Ok(Block {
            attn_norm: tensor(model, &named("attn_norm.weight"))?,
            ffn_norm: tensor(model, &named("ffn_norm.weight"))?,
            bias: [
                bias("attn_q.bias")?,
                bias("attn_k.bias")?,
                bias("attn_v.bias")?,
            ],
            matrices,
        })
    }

    /// A matrix.
    pub fn matrix(&self, part: Part) -> &[f32] {
        &self.matrices[part as usize]
    }
}

/// A tensor as fp32, checked against its checksum and for numbers that are not finite.
pub fn tensor(model: &Model, name: &str) -> Result<Vec<f32>, ToolError> {
    let t = checked(model, name)?;
    finite_rows(model, t, 0..t.rows())
}

/// A tensor that is there and as its checksum says.
pub fn checked<'a>(model: &'a Model, name: &str) -> Result<&'a Tensor, ToolError> {
    let missing = || ToolError::model(&model.path, myq_model::ModelError::Missing(name.into()));
    let t = model.tensor(name).ok_or_else(missing)?;
    model.check(t)?;
    Ok(t)
}

/// Some rows of a tensor as fp32.
///
/// # Errors
/// Numbers that are not finite.
pub fn finite_rows(model: &Model, t: &Tensor, rows: Range<usize>) -> Result<Vec<f32>, ToolError> {
    let first = rows.start * t.cols();
    let x = model.rows(t, rows);
    match x.iter().position(|v| !v.is_finite()) {
        None => Ok(x),
        Some(i) => {
            let error = EncodeError::NonFinite {
                index: first + i,
                value: x[i],
            };
            Err(ToolError::encode(&model.path, &t.name, error))
        }
    }
}

/// The embedding, of which only the rows asked for are read.
pub struct Embedding<'a> {
    model: &'a Model,
    tensor: &'a Tensor,
}

impl<'a> Embedding<'a> {
    /// That of `model`, compared with its checksum.
    ///
    /// # Errors
    /// Those of [`checked`].
    pub fn of(model: &'a Model) -> Result<Embedding<'a>, ToolError> {
        let tensor = checked(model, "token_embd.weight")?;
        Ok(Embedding { model, tensor })
    }

    /// Rows of tokens, tokens × width.
    ///
    /// # Errors
    /// Numbers that are not finite.
    pub fn rows(&self, tokens: &[u32]) -> Result<Vec<f32>, ToolError> {
        let mut out = Vec::with_capacity(tokens.len() * self.tensor.cols());
        for token in tokens {
            let row = *token as usize;
            out.extend(finite_rows(self.model, self.tensor, row..row + 1)?);
        }
        Ok(out)
    }
}

/// What the steps need beside weights.
pub struct Pass<'a> {
    /// Sizes.
    pub config: &'a Config,
    rope: RopeTable,
    /// Angles of the first positions, as many as were asked for so far.
    angles: Mutex<Arc<Vec<f32>>>,
}

impl<'a> Pass<'a> {
    /// For models of this configuration; `factors` are the model's `rope_freqs.weight`.
    pub fn new(config: &'a Config, factors: Option<&[f32]>) -> Pass<'a> {
        Pass {
            config,
            rope: RopeTable::new(config, factors),
            angles: Mutex::default(),
        }
    }

    /// For `model`.
    ///
    /// # Errors
    /// Those of [`tensor`].
    pub fn of(model: &'a Model) -> Result<Pass<'a>, ToolError> {
        let name = "rope_freqs.weight";
        let factors = model.tensor(name).map(|_| tensor(model, name));
        Ok(Pass::new(&model.config, factors.transpose()?.as_deref()))
    }

    /// Root-mean-square norm of each row, times `weight`.
    pub fn norm(&self, x: &[f32], weight: &[f32]) -> Vec<f32> {
        let (width, eps) = (weight.len(), self.config.norm_eps);
        let mut out = vec![0.0; x.len()];
        out.par_chunks_mut(width)
            .zip(x.par_chunks(width))
            .for_each(|(out, x)| vector::rms_norm(x, weight, eps, out));
        out
    }

    /// What attention hands to its output matrix, `tokens × heads·head_dim`, from the normed
    /// state of one sequence that starts at position 0.
    pub fn attention(&self, normed: &[f32], block: &Block) -> Vec<f32> {
        let [query, key, value] = self.projections(normed, block);
        self.attend(&query, &key, &value)
    }

    /// Query, key and value, the first two with their positions.
    fn projections(&self, normed: &[f32], block: &Block) -> [Vec<f32>; 3] {
        let c = self.config;
        let project = |part: Part, rows: usize| {
            let mut out = vec![0.0; normed.len() / c.width * rows];
            linear(normed, block.matrix(part), c.width, &mut out);
            let bias = &block.bias[part as usize];
            if !bias.is_empty() {
                for row in out.chunks_exact_mut(rows) {
                    vector::add(row, bias);
                }
            }
            out
        };
        let mut query = project(Part::Q, c.q_width());
        let mut key = project(Part::K, c.kv_width());
        let value = project(Part::V, c.kv_width());
        self.turn(&mut query, c.q_width(), 1.0);
        self.turn(&mut key, c.kv_width(), 1.0);
        [query, key, value]
    }

    /// Turns heads by their positions, or with a `sign` of −1 the other way.
    fn turn(&self, x: &mut [f32], width: usize, sign: f32) {
        let (dims, head_dim) = (self.rope.dims(), self.config.head_dim);
        let all = self.angles(x.len() / width);
        x.par_chunks_mut(width)
            .zip(all.par_chunks_exact(dims))
            .for_each(|(row, angles)| {
                let mut angles = angles.to_vec();
                let sines = &mut angles[dims / 2..];
                sines.iter_mut().for_each(|s| *s *= sign);
                for head in row.chunks_exact_mut(head_dim) {
                    self.rope.turn(head, &angles);
                }
            });
    }

    /// Angles of `tokens` positions at least, from 0 on.
    fn angles(&self, tokens: usize) -> Arc<Vec<f32>> {
        let dims = self.rope.dims();
        let mut all = self.angles.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < tokens * dims {
            let mut more = vec![0.0; tokens * dims];
            for (i, angles) in more.chunks_exact_mut(dims).enumerate() {
                self.rope.angles(i, angles);
            }
            *all = Arc::new(more);
        }
        Arc::clone(&all)
    }

    fn attend(&self, query: &[f32], key: &[f32], value: &[f32]) -> Vec<f32> {
        let c = self.config;
        let (hd, group) = (c.head_dim, c.heads / c.kv_heads);
        let (q, k, v) = (
            matrix(query, c.q_width()),
            matrix(key, c.kv_width()),
            matrix(value, c.kv_width()),
        );
        let tokens = query.len() / c.q_width();
        let scale = 1.0 / (hd as f32).sqrt();
        let mut out = vec![0.0; query.len()];
        out.par_chunks_mut(QUERIES * c.q_width())
            .enumerate()
            .for_each(|(i, out)| {
                let (first, rows) = (i * QUERIES, out.len() / c.q_width());
                let seen = (first + rows).min(tokens);
                let mut scores = vec![0.0; rows * seen];
                for head in 0..c.heads {
                    let kv = head / group * hd;
                    let keys = k.submatrix(0, kv, seen, hd).transpose();
                    let queries = q.submatrix(first, head * hd, rows, hd);
                    multiply(matrix_mut(&mut scores, seen), queries, keys);
                    for (r, row) in scores.chunks_exact_mut(seen).enumerate() {
                        vector::softmax(row, first + r + 1, scale);
                    }
                    let values = v.submatrix(0, kv, seen, hd);
                    let to = matrix_mut(out, c.q_width()).subcols_mut(head * hd, hd);
                    multiply(to, matrix(&scores, seen), values);
                }
            });
        out
    }

    /// What the feed-forward part hands to its last matrix, `tokens × ffn`, from the normed
    /// state.
    pub fn activated(&self, normed: &[f32], block: &Block) -> Vec<f32> {
        let ffn = self.config.ffn;
        let [mut gate, up] = self.gate_and_up(normed, block);
        gate.par_chunks_mut(ffn)
            .zip(up.par_chunks(ffn))
            .for_each(|(gate, up)| vector::swiglu(gate, up));
        gate
    }

    fn gate_and_up(&self, normed: &[f32], block: &Block) -> [Vec<f32>; 2] {
        [Part::Gate, Part::Up].map(|part| {
            let mut out = vec![0.0; normed.len() / self.config.width * self.config.ffn];
            linear(normed, block.matrix(part), self.config.width, &mut out);
            out
        })
    }

    /// A whole layer, for one sequence.
    pub fn layer(&self, block: &Block, x: &mut [f32]) {
        let seen = self.attention(&self.norm(x, &block.attn_norm), block);
        self.add_projected(x, &seen, block.matrix(Part::O));
        let active = self.activated(&self.norm(x, &block.ffn_norm), block);
        self.add_projected(x, &active, block.matrix(Part::Down));
    }

    /// `hidden += input · wᵀ`: the last step of either half of a layer.
    pub fn add_projected(&self, hidden: &mut [f32], input: &[f32], w: &[f32]) {
        let width = self.config.width;
        let cols = w.len() / width;
        let mut delta = vec![0.0; hidden.len()];
        linear(input, w, cols, &mut delta);
        vector::add(hidden, &delta);
    }
}
