//! `config.json` as model hubs publish it, in the forms of several years.

use serde::Deserialize;
use serde_json::Value;

use super::{Config, Family, Pairing, Rope, Scaling, yarn_temperature};
use crate::ModelError;

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
    rope_scaling: Option<HubRope>,
    /// Newer files keep theta and scaling together here.
    rope_parameters: Option<HubRope>,
    hidden_act: Option<String>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
}

#[derive(Default, Deserialize)]
struct HubRope {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<usize>,
    beta_fast: Option<f32>,
    beta_slow: Option<f32>,
    attention_factor: Option<f32>,
}

/// Keys that change the forward pass in ways it does not have here, with the value that
/// leaves it as it is.
const FOREIGN: [(&str, f64); 6] = [
    ("partial_rotary_factor", 1.0),
    ("embedding_multiplier", 1.0),
    ("residual_multiplier", 1.0),
    ("logits_scaling", 1.0),
    ("attention_multiplier", f64::NAN),
    ("num_local_experts", f64::NAN),
];

fn wrong(problem: String) -> ModelError {
    ModelError::Config(format!("config.json: {problem}"))
}

impl Config {
    /// From the `config.json` of a model-hub directory.
    pub fn from_hub(json: &str, name: &str) -> Result<Config, ModelError> {
        let all: Value = serde_json::from_str(json).map_err(|e| wrong(e.to_string()))?;
        refuse_foreign(&all)?;
        let hub: Hub = serde_json::from_value(all).map_err(|e| wrong(e.to_string()))?;
        let family = match hub.model_type.as_str() {
            "llama" | "mistral" => Family::Llama,
            "qwen2" => Family::Qwen2,
            other => return Err(ModelError::Family(other.to_owned())),
        };
        if !matches!(hub.hidden_act.as_deref(), None | Some("silu")) {
            return Err(wrong(format!(
                "hidden_act {:?} is not silu",
                hub.hidden_act
            )));
        }
        let context = hub.max_position_embeddings;
        // Without a sliding window in the forward pass, no more context than one window.
        let used = hub.use_sliding_window.unwrap_or(family != Family::Qwen2);
        let window = hub.sliding_window.filter(|_| used).unwrap_or(context);
        let head_dim = hub
            .head_dim
            .unwrap_or(hub.hidden_size / hub.num_attention_heads.max(1));
        let rope = hub.rope_parameters.or(hub.rope_scaling).unwrap_or_default();
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
            context: window.min(context),
            norm_eps: hub.rms_norm_eps,
            rope: Rope {
                theta: hub.rope_theta.or(rope.rope_theta).unwrap_or(10_000.0),
                dims: head_dim,
                pairing: Pairing::Half,
                scaling: rope.scaling(context)?,
            },
        };
        config.check()?;
        Ok(config)
    }
}

fn refuse_foreign(all: &Value) -> Result<(), ModelError> {
    let present = |key: &str| all.get(key).filter(|v| !v.is_null());
    if present("quantization_config").is_some() {
        return Err(wrong(
            "the weights are quantised already (quantization_config); import the unquantised model"
                .into(),
        ));
    }
    for (key, harmless) in FOREIGN {
        let nested = all.get("rope_parameters").and_then(|r| r.get(key));
        if let Some(value) = present(key).or(nested)
            && value.as_f64() != Some(harmless)
        {
            return Err(wrong(format!(
                "{key} is {value}, and the forward pass here has no such thing"
            )));
        }
    }
    Ok(())
}

impl HubRope {
    fn scaling(self, context: usize) -> Result<Scaling, ModelError> {
        let original = self.original_max_position_embeddings.unwrap_or(context);
        let kind = self
            .rope_type
            .or(self.old_type)
            .unwrap_or_else(|| "default".into());
        if kind == "default" {
            return Ok(Scaling::None);
        }
        let factor = self
            .factor
            .ok_or_else(|| wrong(format!("rope scaling `{kind}` has no factor")))?;
        match kind.as_str() {
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
            other => Err(wrong(format!(
                "rope scaling `{other}` is not known; known are default, linear, llama3, yarn"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(extra: &str) -> Result<Config, ModelError> {
        let base = r#""model_type":"llama","hidden_size":64,"num_hidden_layers":2,"intermediate_size":96,
            "num_attention_heads":2,"vocab_size":100,"max_position_embeddings":2048,"rms_norm_eps":1e-5"#;
        Config::from_hub(&format!("{{{base}{extra}}}"), "test")
    }

    #[test]
    fn both_homes_of_the_rope_settings_are_read() {
        let old = read(
            r#","rope_theta":5e5,"rope_scaling":{"type":"linear","rope_type":"linear","factor":2}"#,
        );
        let new = read(r#","rope_parameters":{"rope_theta":5e5,"rope_type":"linear","factor":2}"#);
        let old = old.expect("valid");
        assert_eq!(old, new.expect("valid"));
        assert_eq!(old.rope.scaling, Scaling::Linear { factor: 2.0 });
        assert_eq!(old.rope.theta, 5e5);
    }

    #[test]
    fn what_the_forward_pass_lacks_is_refused() {
        for extra in [
            r#","partial_rotary_factor":0.5"#,
            r#","rope_parameters":{"rope_type":"default","partial_rotary_factor":0.5}"#,
            r#","quantization_config":{"bits":4}"#,
            r#","logits_scaling":8"#,
            r#","rope_scaling":{"rope_type":"linear","factor":0.0}"#,
            r#","rope_scaling":{"rope_type":"linear"}"#,
            r#","rope_scaling":{"rope_type":"longrope","factor":2}"#,
            r#","hidden_act":"gelu""#,
        ] {
            assert!(read(extra).is_err(), "{extra}");
        }
        assert!(read(r#","partial_rotary_factor":1.0,"quantization_config":null"#).is_ok());
    }
}
