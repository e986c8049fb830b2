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

use indicatif::ProgressBar;
use myq_blocks::encode::Method as Scales;
use myq_blocks::{DType, Rows};
use serde::Serialize;
use serde_json::{Value, json};

use crate::linalg::{add_gram, mirror};
use crate::model::Model;
use crate::pass::{Block, Part, Pass, tensor};
use crate::solve::{self, Curvature, Effort, Factor, Order};
use crate::states::{Pair, States};
use crate::vector;
use crate::work::{Work, bytes_of, floats_of};
use crate::{ToolError, awq};

/// Tokens that pass through the feed-forward part together.
const TOKENS: usize = 512;

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
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Tensor.
    pub name: String,
    /// Format.
    #[serde(serialize_with = "by_name")]
    pub dtype: DType,
    /// Calibration tokens that reached it.
    pub tokens: usize,
    /// Inputs that were zero for every token.
    pub dead: usize,
    /// Share of the mean diagonal that was added to H.
    pub damping: f32,
    /// Output error over output energy, on the calibration tokens.
    pub error: f64,
}

fn by_name<S: serde::Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&dtype.name())
}

/// A walk through one model.
pub struct Walk<'a> {
    /// The source.
    pub model: &'a Model,
    /// How.
    pub method: &'a Method,
    /// The format of a tensor; none where it stays as it is.
    pub format: &'a dyn Fn(&str) -> Option<DType>,
    /// Where finished parts are kept.
    pub work: &'a Work,
    /// Moves by one for each weight.
    pub bar: &'a ProgressBar,
}

impl Walk<'_> {
    /// Passes `samples` through all layers and the output; the rows of each matrix are kept in
    /// the work directory. Gives an outcome for each matrix that was quantised now, and not by
    /// an earlier run.
    ///
    /// # Errors
    /// A tensor of the source that is damaged or not finite; a matrix that no input reaches; a
    /// full disk.
    pub fn run(&self, samples: &[Vec<u32>]) -> Result<Vec<Outcome>, ToolError> {
        let c = &self.model.config;
        let pass = Pass::of(self.model)?;
        let mut outcomes = Vec::new();
        let (first, mut states) = self.start(&pass, samples)?;
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
                source,
                index,
            };
            let mut quantised = layer.source.clone();
            outcomes.extend(layer.attention(&mut states, &mut middle, &mut quantised)?);
            outcomes.extend(layer.feed_forward(&mut middle, &mut states, &mut quantised)?);
            states.keep(self.work, &states_file(index + 1))?;
            self.work.forget(&states_file(index));
        }
        self.work.forget("states-middle.bin");
        let name = self.model.output_name();
        let norm = tensor(self.model, "output_norm.weight")?;
        let sums = |sums: &mut Sums| {
            for i in 0..states.len() {
                let [x, y] = states.get(i)?.map(|x| pass.norm(&x, &norm));
                sums.add(&x, &y);
            }
            Ok(())
        };
        if (self.format)(name).is_some() && self.work.rows(name).is_none() {
            let weights = tensor(self.model, name)?;
            let moments = self.moments(name, c.width, sums)?;
            outcomes.push(self.quantise(name, &weights, &moments)?.0);
            self.work.forget(&moments_file(name));
        }
        Ok(outcomes)
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
                self.work
                    .keep_rows(&name, DType::F32, &bytes_of(&[vector]))?;
            }
        }
        Ok(())
    }

    /// The first layer to do, and the states before it.
    fn start(&self, pass: &Pass<'_>, samples: &[Vec<u32>]) -> Result<(usize, States), ToolError> {
        let width = self.model.config.width;
        let lens: Vec<usize> = samples.iter().map(|s| s.len() * width).collect();
        for index in (1..=self.model.config.layers).rev() {
            let file = states_file(index);
            let Some(states) = States::kept(&lens, self.work, &file, "states-now.bin")? else {
                continue;
            };
            for done in 0..index {
                let tensors = Part::ALL.map(|p| p.tensor(done));
                let here = tensors.iter().filter(|name| (self.format)(name).is_some());
                let weights = here.filter_map(|name| self.model.tensor(name));
                self.bar.inc(weights.map(|t| t.len() as u64).sum());
            }
            return Ok((index, states));
        }
        let embedding = tensor(self.model, "token_embd.weight")?;
        let mut states = States::new(lens, self.work, "states-now.bin")?;
        for (i, sample) in samples.iter().enumerate() {
            let x = pass.embed(&embedding, sample);
            states.set(i, [x.clone(), x])?;
        }
        Ok((0, states))
    }

    /// The moments of the input of `name` and its neighbours: kept ones, or from `sums`.
    fn moments(
        &self,
        name: &str,
        n: usize,
        sums: impl FnOnce(&mut Sums) -> Result<(), ToolError>,
    ) -> Result<Moments, ToolError> {
        let cross = self.method.propagate != 0.0;
        let file = moments_file(name);
        let kept = self
            .work
            .kept(&file)
            .and_then(|b| Sums::from_bytes(n, cross, &b));
        let all = match kept {
            Some(all) => all,
            None => {
                let mut all = Sums::new(n, cross);
                sums(&mut all)?;
                mirror(&mut all.h, n);
                if self.work.lasts() {
                    self.work.keep(&file, &all.to_bytes())?;
                }
                all
            }
        };
        all.finish(name, self.method)
    }

    /// Quantises a matrix and keeps its rows, which it gives as well.
    fn quantise(
        &self,
        name: &str,
        weights: &[f32],
        moments: &Moments,
    ) -> Result<(Outcome, Vec<u8>), ToolError> {
        let n = moments.n;
        let dtype = (self.format)(name).unwrap_or(DType::F32);
        let curvature = Curvature {
            n,
            h: &moments.h,
            factor: &moments.factor,
            pull: moments.cross.as_deref().map(|c| (c, self.method.propagate)),
        };
        let fail = |error| ToolError::encode(&self.model.path, name, error);
        let done = |rows: usize| self.bar.inc((rows * n) as u64);
        let solution =
            solve::solve(dtype, self.method.effort, &curvature, weights, &done).map_err(fail)?;
        self.work.keep_rows(name, dtype, &solution.bytes)?;
        let outcome = Outcome {
            name: name.into(),
            dtype,
            tokens: moments.tokens,
            dead: moments.factor.dead,
            damping: moments.factor.damping,
            error: solution.loss.iter().sum::<f64>() / moments.energy(weights).max(1e-300),
        };
        Ok((outcome, solution.bytes))
    }
}

fn moments_file(name: &str) -> String {
    format!("moments-{name}.bin")
}

fn states_file(layer: usize) -> String {
    format!("states-{layer}.bin")
}

/// Sums over the inputs of one matrix.
struct Sums {
    n: usize,
    tokens: usize,
    /// Σ y·yᵀ, on and above the diagonal until all are in.
    h: Vec<f32>,
    /// Σ (x − y)·yᵀ, where errors are passed on.
    cross: Option<Vec<f32>>,
}

impl Sums {
    fn new(n: usize, cross: bool) -> Sums {
        Sums {
            n,
            tokens: 0,
            h: vec![0.0; n * n],
            cross: cross.then(|| vec![0.0; n * n]),
        }
    }

    fn add(&mut self, x: &[f32], y: &[f32]) {
        self.tokens += y.len() / self.n;
        add_gram(y, y, self.n, true, &mut self.h);
        if let Some(cross) = &mut self.cross {
            add_gram(&vector::difference(x, y), y, self.n, false, cross);
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.tokens as u64).to_le_bytes().to_vec();
        bytes.extend(bytes_of(&[
            &self.h,
            self.cross.as_deref().unwrap_or_default(),
        ]));
        bytes
    }

    fn from_bytes(n: usize, cross: bool, bytes: &[u8]) -> Option<Sums> {
        let (tokens, rest) = bytes.split_first_chunk::<8>()?;
        let mut h = floats_of(rest);
        if h.len() != n * n * (1 + usize::from(cross)) {
            return None;
        }
        let rest = h.split_off(n * n);
        Some(Sums {
            n,
            tokens: u64::from_le_bytes(*tokens) as usize,
            h,
            cross: cross.then_some(rest),
        })
    }

    /// `name` is the first matrix of this input.
    fn finish(mut self, name: &str, method: &Method) -> Result<Moments, ToolError> {
        let factor = Factor::new(&mut self.h, self.n, method.damping, method.order);
        let factor = factor.ok_or_else(|| {
            ToolError::Setting(format!(
                "{name}: of {} calibration tokens none reached it with a finite input that is not zero; calibrate with other texts",
                self.tokens
            ))
        })?;
        Ok(Moments {
            n: self.n,
            tokens: self.tokens,
            h: self.h,
            factor,
            cross: self.cross,
        })
    }
}

/// Second moments of one input.
struct Moments {
    n: usize,
    tokens: usize,
    /// Σ y·yᵀ, damped.
    h: Vec<f32>,
    factor: Factor,
    /// Σ (x − y)·yᵀ, where errors are passed on.
    cross: Option<Vec<f32>>,
}

impl Moments {
    /// Σ over rows of wᵀHw.
    fn energy(&self, weights: &[f32]) -> f64 {
        let mut hw = vec![0.0; weights.len()];
        crate::linalg::linear(weights, &self.h, self.n, &mut hw);
        let terms = hw.iter().zip(weights);
        terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    }
}

/// A layer on the way.
struct Layer<'a, 'b> {
    walk: &'a Walk<'b>,
    pass: &'a Pass<'b>,
    source: Block,
    index: usize,
}

impl Layer<'_, '_> {
    /// Quantises the matrices `parts`, which share an input of `n` values, and gives them as
    /// they are stored to `to`.
    fn replace(
        &self,
        parts: &[Part],
        n: usize,
        to: &mut [Vec<f32>],
        sums: impl FnOnce(&mut Sums) -> Result<(), ToolError>,
    ) -> Result<Vec<Outcome>, ToolError> {
        let walk = self.walk;
        let names: Vec<String> = parts.iter().map(|p| p.tensor(self.index)).collect();
        let mut rows: Vec<_> = names.iter().map(|name| walk.work.rows(name)).collect();
        let mut outcomes = Vec::new();
        let missing = |i: usize, rows: &[Option<_>]| {
            rows[i]
                .is_none()
                .then(|| (walk.format)(&names[i]))
                .flatten()
        };
        if (0..parts.len()).any(|i| missing(i, &rows).is_some()) {
            let moments = walk.moments(&names[0], n, sums)?;
            for (i, part) in parts.iter().enumerate() {
                if let Some(dtype) = missing(i, &rows) {
                    let weights = self.source.matrix(*part);
                    let (outcome, bytes) = walk.quantise(&names[i], weights, &moments)?;
                    outcomes.push(outcome);
                    rows[i] = Some((dtype, bytes));
                }
            }
            walk.work.forget(&moments_file(&names[0]));
        }
        for ((name, rows), to) in names.iter().zip(&rows).zip(to) {
            let Some((dtype, bytes)) = rows else {
                continue;
            };
            let rows = Rows::new(*dtype, n, bytes).map_err(|_| {
                ToolError::Setting(format!(
                    "{name} in the work folder is of another size; remove the folder"
                ))
            })?;
            for (r, to) in to.chunks_exact_mut(n).enumerate() {
                rows.dequantize(r, to);
            }
        }
        Ok(outcomes)
    }

    /// From the states before the layer to those behind attention.
    fn attention(
        &self,
        states: &mut States,
        middle: &mut States,
        quantised: &mut Block,
    ) -> Result<Vec<Outcome>, ToolError> {
        let (c, pass, source) = (self.pass.config, self.pass, &self.source);
        let normed = |x: &[f32]| pass.norm(x, &source.attn_norm);
        let (queries, rest) = quantised.matrices.split_at_mut(Part::O as usize);
        let mut outcomes =
            self.replace(&[Part::Q, Part::K, Part::V], c.width, queries, |sums| {
                for i in 0..states.len() {
                    let [x, y] = states.get(i)?.map(|x| normed(&x));
                    sums.add(&x, &y);
                }
                Ok(())
            })?;
        let mut output = std::mem::take(&mut rest[0]);
        let seen = |[x, y]: &Pair| {
            [
                pass.attention(&normed(x), source),
                pass.attention(&normed(y), quantised),
            ]
        };
        let to = std::slice::from_mut(&mut output);
        outcomes.extend(self.replace(&[Part::O], c.q_width(), to, |sums| {
            for i in 0..states.len() {
                let [x, y] = seen(&states.get(i)?);
                sums.add(&x, &y);
            }
            Ok(())
        })?);
        for i in 0..states.len() {
            let mut pair = states.get(i)?;
            let [seen_x, seen_y] = seen(&pair);
            pass.add_projected(&mut pair[0], &seen_x, source.matrix(Part::O));
            pass.add_projected(&mut pair[1], &seen_y, &output);
            middle.set(i, pair)?;
        }
        quantised.matrices[Part::O as usize] = output;
        Ok(outcomes)
    }

    /// From the states behind attention to those behind the layer.
    fn feed_forward(
        &self,
        middle: &mut States,
        states: &mut States,
        quantised: &mut Block,
    ) -> Result<Vec<Outcome>, ToolError> {
        let (c, pass, source) = (self.pass.config, self.pass, &self.source);
        let some = TOKENS * c.width;
        let normed = |x: &[f32]| pass.norm(x, &source.ffn_norm);
        let wide = Part::Gate as usize..Part::Down as usize;
        let to = &mut quantised.matrices[wide];
        let mut outcomes = self.replace(&[Part::Gate, Part::Up], c.width, to, |sums| {
            for i in 0..middle.len() {
                let [x, y] = middle.get(i)?.map(|x| normed(&x));
                sums.add(&x, &y);
            }
            Ok(())
        })?;
        let mut down = std::mem::take(&mut quantised.matrices[Part::Down as usize]);
        let to = std::slice::from_mut(&mut down);
        outcomes.extend(self.replace(&[Part::Down], c.ffn, to, |sums| {
            for i in 0..middle.len() {
                let [x, y] = middle.get(i)?;
                for (x, y) in x.chunks(some).zip(y.chunks(some)) {
                    let x = pass.activated(&normed(x), source);
                    sums.add(&x, &pass.activated(&normed(y), quantised));
                }
            }
            Ok(())
        })?);
        // Computed once more: kept, it would take more memory than all else.
        for i in 0..middle.len() {
            let mut pair = middle.get(i)?;
            let of = [(source, source.matrix(Part::Down)), (&*quantised, &down)];
            for (x, (block, down)) in pair.iter_mut().zip(of) {
                for x in x.chunks_mut(some) {
                    let input = pass.activated(&normed(x), block);
                    pass.add_projected(x, &input, down);
                }
            }
            states.set(i, pair)?;
        }
        quantised.matrices[Part::Down as usize] = down;
        Ok(outcomes)
    }
}
