//! What a model is made of: sizes, norm, rope; from GGUF keys or a hub's config.json.

use myq_format::gguf::Gguf;
use serde::{Deserialize, Serialize};

use crate::ModelError;

mod hub;

/// Families whose forward pass this crate has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 2/3, SmolLM2, Mistral without sliding window, TinyLlama, …
    Llama,
    /// Qwen2 and Qwen2.5: biases on query, key and value.
    Qwen2,
}

/// Which two components of a head a rope angle turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pairing {
    /// Components 2i and 2i+1 (GGUF's "norm", Llama in GGUF files).
    Interleaved,
    /// Components i and i + dims/2 (GGUF's "neox", every family on model hubs).
    Half,
}

/// Stretching of rope frequencies for contexts longer than the trained one.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Scaling {
    /// Frequencies as trained.
    None,
    /// All frequencies divided by `factor` (position interpolation, arXiv 2306.15595).
    Linear {
        /// Stretch.
        factor: f32,
    },
    /// Llama 3.1: long waves divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// Stretch of the longest waves.
        factor: f32,
        /// Waves longer than `original / low` are stretched fully.
        low: f32,
        /// Waves shorter than `original / high` are kept.
        high: f32,
        /// Trained context, tokens.
        original: usize,
    },
    /// YaRN (arXiv 2309.00071), with its attention temperature.
    Yarn {
        /// Stretch.
        factor: f32,
        /// Trained context, tokens.
        original: usize,
        /// Rotations over the trained context above which a wave is kept.
        beta_fast: f32,
        /// Rotations below which a wave is stretched fully.
        beta_slow: f32,
        /// Multiplies the paper's temperature; 1 unless the file says otherwise.
        attention: f32,
    },
}

impl Scaling {
    fn check(&self) -> Result<(), ModelError> {
        let stretch = |f: f32| f.is_finite() && f >= 1.0;
        let ok = match *self {
            Scaling::None => true,
            Scaling::Linear { factor } => stretch(factor),
            Scaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => stretch(factor) && low > 0.0 && high > low && high.is_finite() && original > 0,
            Scaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                attention,
            } => {
                stretch(factor)
                    && original > 0
                    && beta_slow > 0.0
                    && beta_fast > beta_slow
                    && beta_fast.is_finite()
                    && attention > 0.0
                    && attention.is_finite()
            }
        };
        if ok {
            Ok(())
        } else {
            Err(ModelError::Config(format!(
                "the rope scaling {self:?} makes no sense"
            )))
        }
    }
}

/// Rotary position embedding.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Components of a head that are turned; even, at most the head size.
    pub dims: usize,
    /// Which components form a pair.
    pub pairing: Pairing,
    /// Stretching for long contexts.
    pub scaling: Scaling,
}

/// Sizes and constants of a model; stored as `config` in a `.myq` file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Config {
    /// Family.
    pub family: Family,
    /// Name for people; may be empty.
    pub name: String,
    /// Transformer blocks.
    pub layers: usize,
    /// Components of the hidden state.
    pub width: usize,
    /// Components of the feed-forward state.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Components of a head.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Longest context the model was made for, tokens.
    pub context: usize,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// Position embedding.
    pub rope: Rope,
}

impl Config {
    /// Refuses sizes that no forward pass can have; names the field.
    pub fn check(&self) -> Result<(), ModelError> {
        let bad = |what: &str, value: usize| {
            Err(ModelError::Config(format!(
                "{what} is {value}; the file's configuration is damaged or not of this family"
            )))
        };
        let limits = [
            ("layers", self.layers, 1 << 12),
            ("width", self.width, 1 << 20),
            ("ffn", self.ffn, 1 << 22),
            ("heads", self.heads, 1 << 12),
            ("kv_heads", self.kv_heads, 1 << 12),
            ("head_dim", self.head_dim, 1 << 12),
            ("vocab", self.vocab, 1 << 24),
            ("context", self.context, 1 << 28),
        ];
        for (what, value, limit) in limits {
            if value == 0 || value > limit {
                return bad(what, value);
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return bad("kv_heads does not divide heads; kv_heads", self.kv_heads);
        }
        if self.rope.dims == 0
            || !self.rope.dims.is_multiple_of(2)
            || self.rope.dims > self.head_dim
        {
            return bad("rope.dims", self.rope.dims);
        }
        if !(self.norm_eps.is_finite()
            && self.norm_eps >= 0.0
            && self.rope.theta.is_finite()
            && self.rope.theta > 0.0)
        {
            return Err(ModelError::Config(
                "norm epsilon or rope theta is not a positive number".into(),
            ));
        }
        self.rope.scaling.check()
    }

    /// Refuses a tokenizer with more tokens than the embedding has rows.
    pub fn check_tokenizer(&self, tokens: usize) -> Result<(), ModelError> {
        if tokens > self.vocab {
            return Err(ModelError::Config(format!(
                "the tokenizer has {tokens} tokens, the embedding {} rows; tokenizer and model do not belong together",
                self.vocab
            )));
        }
        Ok(())
    }

    /// Components of all query heads.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Components of all key heads.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// From the metadata of a GGUF file.
    pub fn from_gguf(g: &Gguf<'_>) -> Result<Config, ModelError> {
        let arch = g
            .str("general.architecture")
            .ok_or_else(|| missing("general.architecture"))?;
        let family = match arch {
            "llama" => Family::Llama,
            "qwen2" => Family::Qwen2,
            other => return Err(ModelError::Family(other.to_owned())),
        };
        let key = |k: &str| format!("{arch}.{k}");
        let number = |k: &str| g.u64(&key(k)).map(|v| v as usize);
        let need = |k: &str| number(k).ok_or_else(|| missing(&key(k)));
        if number("expert_count").is_some_and(|n| n > 0) {
            return Err(ModelError::Family(format!("{arch} with experts")));
        }
        if g.u64("split.count").is_some_and(|n| n > 1) {
            return Err(ModelError::Config("this is one part of a GGUF split over several files; join them first (gguf-split --merge)".into()));
        }
        let (heads, width) = (need("attention.head_count")?, need("embedding_length")?);
        let head_dim = number("attention.key_length").unwrap_or(width / heads.max(1));
        let config = Config {
            family,
            name: g.str("general.name").unwrap_or_default().to_owned(),
            layers: need("block_count")?,
            width,
            ffn: need("feed_forward_length")?,
            heads,
            kv_heads: match (
                g.get(&key("attention.head_count_kv")),
                number("attention.head_count_kv"),
            ) {
                (None, _) => heads,
                (Some(_), Some(n)) => n,
                (Some(_), None) => {
                    let problem =
                        "is not one positive number; layers of different shape are not supported";
                    return Err(ModelError::Config(format!(
                        "{} {problem}",
                        key("attention.head_count_kv")
                    )));
                }
            },
            head_dim,
            vocab: g
                .tensor("token_embd.weight")
                .and_then(|t| t.shape.get(1).copied())
                .ok_or_else(|| ModelError::Missing("token_embd.weight".into()))?
                as usize,
            context: need("context_length")?,
            norm_eps: g
                .f32(&key("attention.layer_norm_rms_epsilon"))
                .ok_or_else(|| missing(&key("attention.layer_norm_rms_epsilon")))?,
            rope: Rope {
                theta: g.f32(&key("rope.freq_base")).unwrap_or(10_000.0),
                dims: number("rope.dimension_count").unwrap_or(head_dim),
                pairing: if family == Family::Llama {
                    Pairing::Interleaved
                } else {
                    Pairing::Half
                },
                scaling: gguf_scaling(g, arch)?,
            },
        };
        config.check()?;
        Ok(config)
    }
}

fn missing(key: &str) -> ModelError {
    ModelError::Config(format!(
        "metadata key {key} is missing; the file is not a complete model"
    ))
}

fn gguf_scaling(g: &Gguf<'_>, arch: &str) -> Result<Scaling, ModelError> {
    let key = |k: &str| format!("{arch}.rope.scaling.{k}");
    // Older files have the linear factor alone, under one of two names.
    let factor = g
        .f32(&key("factor"))
        .or_else(|| g.f32(&format!("{arch}.rope.scale_linear")))
        .unwrap_or(1.0);
    let default = if factor == 1.0 { "none" } else { "linear" };
    match g.str(&key("type")).unwrap_or(default) {
        "none" => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor }),
        "yarn" => Ok(Scaling::Yarn {
            factor,
            original: g
                .u64(&key("original_context_length"))
                .ok_or_else(|| missing(&key("original_context_length")))?
                as usize,
            beta_fast: g.f32(&key("yarn_beta_fast")).unwrap_or(32.0),
            beta_slow: g.f32(&key("yarn_beta_slow")).unwrap_or(1.0),
            attention: g.f32(&key("attn_factor")).unwrap_or(1.0),
        }),
        other => Err(ModelError::Config(format!(
            "rope scaling `{other}` is not known; known are none, linear, yarn"
        ))),
    }
}

/// The attention temperature of the YaRN paper, equation 22.
pub(crate) fn yarn_temperature(factor: f32) -> f32 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * factor.ln() + 1.0
    }
}
