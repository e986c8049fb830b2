//! What a model is made of: sizes, norm, rope; from GGUF keys or a hub's config.json.

use myq_format::gguf::Gguf;
use serde::{Deserialize, Serialize};

use crate::ModelError;

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
            kv_heads: number("attention.head_count_kv").unwrap_or(heads),
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

    /// From the `config.json` of a model-hub directory.
    pub fn from_hub(json: &str, name: &str) -> Result<Config, ModelError> {
        let hub: Hub = serde_json::from_str(json)
            .map_err(|e| ModelError::Config(format!("config.json: {e}")))?;
        let family = match hub.model_type.as_str() {
            "llama" | "mistral" => Family::Llama,
            "qwen2" => Family::Qwen2,
            other => return Err(ModelError::Family(other.to_owned())),
        };
        if !matches!(hub.hidden_act.as_deref(), None | Some("silu")) {
            return Err(ModelError::Config(format!(
                "hidden_act {:?} is not silu",
                hub.hidden_act.unwrap_or_default()
            )));
        }
        let head_dim = hub
            .head_dim
            .unwrap_or(hub.hidden_size / hub.num_attention_heads.max(1));
        let config = Config {
            family,
            name: name.to_owned(),
            layers: hub.num_hidden_layers,
            width: hub.hidden_size,
            ffn: hub.intermediate_size,
            heads: hub.num_attention_heads,
            kv_heads: hub.num_key_value_heads.unwrap_or(hub.num_attention_heads),
            head_dim,
            vocab: hub.vocab_size,
            // Without a sliding window in the forward pass, no more context than one window.
            context: hub.window().map_or(hub.max_position_embeddings, |w| {
                w.min(hub.max_position_embeddings)
            }),
            norm_eps: hub.rms_norm_eps,
            rope: Rope {
                theta: hub.rope_theta.unwrap_or(10_000.0),
                dims: head_dim,
                pairing: Pairing::Half,
                scaling: hub
                    .rope_scaling
                    .map_or(Ok(Scaling::None), |s| s.read(hub.max_position_embeddings))?,
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
    let factor = g.f32(&key("factor")).unwrap_or(1.0);
    match g.str(&key("type")).unwrap_or("none") {
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

/// The keys of `config.json` that matter here.
#[derive(Deserialize)]
struct Hub {
    model_type: String,
    hidden_size: usize,
    num_hidden_layers: usize,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    rope_theta: Option<f32>,
    rope_scaling: Option<HubScaling>,
    hidden_act: Option<String>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
}

impl Hub {
    fn window(&self) -> Option<usize> {
        self.sliding_window
            .filter(|_| self.use_sliding_window != Some(false))
    }
}

#[derive(Deserialize)]
struct HubScaling {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<usize>,
    beta_fast: Option<f32>,
    beta_slow: Option<f32>,
    attention_factor: Option<f32>,
}

impl HubScaling {
    fn read(self, context: usize) -> Result<Scaling, ModelError> {
        let factor = self.factor.unwrap_or(1.0);
        let original = self.original_max_position_embeddings.unwrap_or(context);
        match self.rope_type.as_deref().unwrap_or("default") {
            "default" => Ok(Scaling::None),
            "linear" => Ok(Scaling::Linear { factor }),
            "llama3" => Ok(Scaling::Llama3 {
                factor,
                low: self.low_freq_factor.unwrap_or(1.0),
                high: self.high_freq_factor.unwrap_or(4.0),
                original,
            }),
            "yarn" => Ok(Scaling::Yarn {
                factor,
                original,
                beta_fast: self.beta_fast.unwrap_or(32.0),
                beta_slow: self.beta_slow.unwrap_or(1.0),
                // config.json states the whole temperature; ours multiplies the paper's.
                attention: self
                    .attention_factor
                    .map_or(1.0, |a| a / yarn_temperature(factor)),
            }),
            other => Err(ModelError::Config(format!(
                "rope_scaling `{other}` is not known; known are default, linear, llama3, yarn"
            ))),
        }
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
