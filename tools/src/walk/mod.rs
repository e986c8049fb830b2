//! Layer by layer through a model: inputs gathered, matrices quantised, activations passed on.
//!
//! ```text
//! for each layer:
//!     for each group of matrices with one input:
//!         x: the input by the source's weights so far, y: by the quantised ones
//!         H = Σ y·yᵀ, D = Σ (x − y)·yᵀ
//!         target W + α·W·D·H⁻¹: what makes W·x of y, as far as α goes
//!         quantise, replace
//! ```
//!
//! Two hidden states for each calibration token and one layer's weights are held, nothing else.
//! α = 0 is plain GPTQ on quantised inputs; α = 1 asks every layer to mend what the layers
//! before it broke (arXiv 2504.02692, 2504.09629), and fits the calibration text closer than
//! others.
//!
//! The embedding stays the source's on the way: it is looked up, not multiplied by, and where the
//! output is the same matrix its inputs are known only at the end.

use std::borrow::Cow;
use std::time::Instant;

use myq_blocks::DType;
use myq_blocks::encode::Method as Scales;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::model::Model;
use crate::pass::{self, Block, Embedding, Part, Pass};
use crate::solve::{self, Effort, Order};
use crate::states::States;
use crate::work::{Work, bytes_of};
use crate::{ToolError, awq};
use layer::Layer;
use moments::{Moments, Sums};
use price::Price;

mod layer;
mod moments;
mod price;

/// Rows of the output that are quantised together.
const ROWS: usize = 8192;

/// How layers are quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Method {
    /// How codes are chosen.
    pub effort: Effort,
    /// Order of columns.
    pub order: Order,
    /// Share of the mean diagonal added to H.
    pub damping: f32,
    /// α: how far each layer makes up for the layers before it.
    pub propagate: f32,
    /// Whether scales of channels are folded into neighbours first.
    pub awq: bool,
}

impl Method {
    /// Rounding, or rounding with compensation, by the scales of the search.
    pub const fn plain(compensate: bool) -> Method {
        Method {
            effort: Effort {
                scales: Scales::Search,
                compensate,
                sweeps: 0,
            },
            order: Order::Activation,
            damping: 0.01,
            propagate: 0.0,
            awq: false,
        }
    }

    /// What gives the best text.
    pub const fn best() -> Method {
        let plain = Method::plain(true);
        Method {
            damping: 0.03,
            effort: Effort {
                sweeps: 3,
                ..plain.effort
            },
            propagate: 0.5,
            ..plain
        }
    }

    /// Form stored in the file.
    pub fn as_json(&self) -> Value {
        json!({
            "compensate": self.effort.compensate,
            "sweeps": self.effort.sweeps,
            "order": match self.order { Order::Stored => "stored", Order::Activation => "activation" },
            "damping": self.damping,
            "propagate": self.propagate,
            "awq": self.awq,
        })
    }
}

/// What became of a matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Tensor.
    pub name: String,
    /// Name of its format.
    pub dtype: String,
    /// Calibration tokens that reached it.
    pub tokens: usize,
    /// Inputs that were zero for every token.
    pub dead: usize,
    /// Share of the mean diagonal that was added to H.
    pub damping: f32,
    /// Output error over output energy, on the calibration tokens.
    pub error: f64,
    /// Weights clipped because fp16 cannot hold their scale.
    pub clipped: usize,
}

impl Outcome {
    /// What was kept about `name`.
    pub fn of(work: &Work, name: &str) -> Option<Outcome> {
        serde_json::from_value(work.note(name)?).ok()
    }
}

/// A walk through one model.
pub struct Walk<'a> {
    /// The source.
    pub model: &'a Model,
    /// How.
    pub method: &'a Method,
    /// The format of a tensor; none where it stays as it is.
    pub format: &'a dyn Fn(&str) -> Option<DType>,
    /// Whether the output serves as the embedding too: then it may not make up for the layers.
    pub tied: bool,
    /// Where finished parts are kept.
    pub work: &'a Work,
    /// What the progress bar says.
    pub label: &'a str,
}

impl Walk<'_> {
    /// Passes `samples` through all layers and the output; the rows of each matrix are kept in
    /// the work directory, with their [`Outcome`].
    ///
    /// # Errors
    /// A tensor of the source that is damaged or not finite; a matrix that no input reaches; a
    /// full disk.
    pub fn run(&self, samples: &[Vec<u32>]) -> Result<(), ToolError> {
        let c = &self.model.config;
        let pass = Pass::of(self.model)?;
        let tokens = samples.iter().map(Vec::len).sum();
        let price = Price::new(self.model, self.method, self.format, tokens, self.label);
        let (first, mut states) = self.start(samples)?;
        let lens: Vec<usize> = samples.iter().map(|s| s.len() * c.width).collect();
        // Behind attention, the middle of a layer.
        let mut middle = States::new(lens, self.work, "states-middle.bin")?;
        for index in first..c.layers {
            let mut source = Block::read(self.model, index)?;
            if self.method.awq {
                self.fold(&pass, &mut source, &mut states, index)?;
            }
            let layer = Layer {
                walk: self,
                pass: &pass,
                price: &price,
                source,
                index,
            };
            let mut quantised = layer.source.clone();
            layer.attention(&mut states, &mut middle, &mut quantised)?;
            layer.feed_forward(&mut middle, &mut states, &mut quantised)?;
            states.keep(self.work, &states_file(index + 1))?;
            self.work.forget(&states_file(index));
        }
        self.work.forget("states-middle.bin");
        price.begin(c.layers, 0);
        self.output(&pass, &price, &mut states)?;
        price.finish();
        Ok(())
    }

    /// Quantises the output, some rows at a time: it is by far the largest matrix.
    fn output(&self, pass: &Pass<'_>, price: &Price, states: &mut States) -> Result<(), ToolError> {
        let name = self.model.output_name();
        if (self.format)(name).is_none() || self.work.rows(name).is_some() {
            return Ok(());
        }
        let norm = pass::tensor(self.model, "output_norm.weight")?;
        let weights = pass::checked(self.model, name)?;
        let moments = self.moments(name, norm.len(), &[], |sums| {
            for i in 0..states.len() {
                let [x, y] = states.get(i)?.map(|x| pass.norm(&x, &norm));
                sums.add(&x, &y);
                price.tokens(4, x.len() / norm.len());
            }
            Ok(())
        })?;
        let parts = (0..weights.rows()).step_by(ROWS).map(|first| {
            let rows = first..(first + ROWS).min(weights.rows());
            pass::finite_rows(self.model, weights, rows).map(Cow::Owned)
        });
        let done = |rows: usize| price.rows(4, rows);
        self.quantise(name, parts, &moments, &done)?;
        self.work.forget(&moments::file(name));
        Ok(())
    }

    /// Folds scales of channels into the layer, and keeps the vectors that change.
    fn fold(
        &self,
        pass: &Pass<'_>,
        block: &mut Block,
        states: &mut States,
        index: usize,
    ) -> Result<(), ToolError> {
        let format = |part: Part| (self.format)(&part.tensor(index));
        let fail = |error| ToolError::encode(&self.model.path, &format!("blk.{index}"), error);
        let (count, all) = (states.len().min(awq::SAMPLES), states.len());
        let some: Vec<Vec<f32>> = (0..count)
            .map(|k| states.get(k * all / count).map(|[_, y]| y))
            .collect::<Result<_, _>>()?;
        let alphas = awq::fold(pass, block, &some, &format).map_err(fail)?;
        log::debug!("layer {index}: scales of channels to the power of {alphas:?}");
        let [_, _, bias] = &block.bias;
        for (part, vector) in [
            ("attn_norm.weight", &block.attn_norm),
            ("ffn_norm.weight", &block.ffn_norm),
            ("attn_v.bias", bias),
        ] {
            if !vector.is_empty() {
                let name = format!("blk.{index}.{part}");
                let note = json!({ "dtype": DType::F32.name() });
                self.work.keep_rows(&name, &note, &bytes_of(&[vector]))?;
            }
        }
        Ok(())
    }

    /// The first layer to do, and the states before it.
    fn start(&self, samples: &[Vec<u32>]) -> Result<(usize, States), ToolError> {
        let width = self.model.config.width;
        let lens: Vec<usize> = samples.iter().map(|s| s.len() * width).collect();
        for index in (1..=self.model.config.layers).rev() {
            let file = states_file(index);
            let Some(states) = States::kept(&lens, self.work, &file, "states-now.bin")? else {
                continue;
            };
            return Ok((index, states));
        }
        let mut states = States::new(lens, self.work, "states-now.bin")?;
        let embedding = Embedding::of(self.model)?;
        for (i, sample) in samples.iter().enumerate() {
            let x = embedding.rows(sample)?;
            states.set(i, [x.clone(), x])?;
        }
        Ok((0, states))
    }

    /// The moments of the input, `n` values, of `name` and its neighbours, together the matrices
    /// `weights`: kept ones, or from `sums`.
    fn moments<'w>(
        &self,
        name: &str,
        n: usize,
        weights: &[&'w [f32]],
        sums: impl FnOnce(&mut Sums<'w>) -> Result<(), ToolError>,
    ) -> Result<Moments, ToolError> {
        let mut all = Sums::new(n, weights, self.method);
        let start = Instant::now();
        if !all.restore(self.work, name) {
            sums(&mut all)?;
            all.complete();
            log::debug!("{name}: sums in {:.2?}", start.elapsed());
            if self.work.lasts() {
                self.work.keep(&moments::file(name), &all.to_bytes())?;
            }
        }
        let start = Instant::now();
        let moments = all.finish(name, self.method);
        log::debug!("{name}: factor in {:.2?}", start.elapsed());
        moments
    }

    /// Quantises a matrix, given in parts of whole rows, and keeps its rows, which it gives as
    /// well.
    fn quantise<'w>(
        &self,
        name: &str,
        parts: impl IntoIterator<Item = Result<Cow<'w, [f32]>, ToolError>>,
        moments: &Moments,
        done: &(dyn Fn(usize) + Sync),
    ) -> Result<Vec<u8>, ToolError> {
        let dtype = (self.format)(name).unwrap_or(DType::F32);
        let mut curvature = moments.curvature(self.method.propagate);
        if self.tied && name == self.model.output_name() {
            curvature.pull = None;
        }
        let fail = |error| ToolError::encode(&self.model.path, name, error);
        let (mut bytes, mut errors, mut clipped) = (Vec::new(), Vec::new(), 0);
        let start = Instant::now();
        for part in parts {
            let part = part?;
            let effort = self.method.effort;
            let solution = solve::solve(dtype, effort, &curvature, &part, done).map_err(fail)?;
            errors.push(moments.relative(&part, &solution.loss));
            clipped += solution.report.clipped;
            bytes.extend(solution.bytes);
        }
        let outcome = Outcome {
            name: name.into(),
            dtype: dtype.name(),
            tokens: moments.tokens,
            dead: moments.factor.dead,
            damping: moments.factor.damping,
            clipped,
            error: errors.iter().sum::<f64>() / errors.len().max(1) as f64,
        };
        log::debug!("{name}: {} in {:.2?}", outcome.dtype, start.elapsed());
        let note = serde_json::to_value(&outcome).unwrap_or_default();
        self.work.keep_rows(name, &note, &bytes)?;
        Ok(bytes)
    }
}

fn states_file(layer: usize) -> String {
    format!("states-{layer}.bin")
}
