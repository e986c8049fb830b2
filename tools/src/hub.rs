//! Model-hub directories: config.json, tokenizer.json and safetensors, sharded or not.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use myq_blocks::{DType, Layout};
use myq_engine::Mapped;
use myq_model::{Config, tokenizer::Tokenizer};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::ToolError;
use crate::model::{Model, Tensor};

/// Parts of a block: name on the hub, name in GGUF.
const PARTS: [(&str, &str); 12] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.q_proj.bias", "attn_q.bias"),
    ("self_attn.k_proj.bias", "attn_k.bias"),
    ("self_attn.v_proj.bias", "attn_v.bias"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
];

pub(crate) fn open(dir: &Path) -> Result<Model, ToolError> {
    let text = read(dir, "config.json")?;
    let name = dir
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    let config = Config::from_hub(&text, &name)
        .map_err(|e| ToolError::model(&dir.join("config.json"), e))?;
    let json: Value = serde_json::from_str(&text).unwrap_or_default();
    let tied = json["tie_word_embeddings"].as_bool().unwrap_or(false);
    let tokenizer_config = read_if_there(dir, "tokenizer_config.json")?;
    let tokenizer_json = read(dir, "tokenizer.json")?;
    let mut tokenizer = Tokenizer::from_tokenizer_json(
        tokenizer_json.as_bytes(),
        tokenizer_config.as_deref().map(str::as_bytes),
    )
    .map_err(|e| ToolError::model(&dir.join("tokenizer.json"), e))?;
    tokenizer.add_eos_ids(&eos_ids(&json));
    if let Some(text) = read_if_there(dir, "generation_config.json")? {
        let json = serde_json::from_str(&text)
            .map_err(|e| hub(&dir.join("generation_config.json"), e.to_string()))?;
        tokenizer.add_eos_ids(&eos_ids(&json));
    }
    let chat_template = match read_if_there(dir, "chat_template.jinja")? {
        Some(text) => Some(text),
        None => tokenizer_config.as_deref().and_then(template_of),
    };
    let files = shards(dir)?
        .iter()
        .map(|p| Mapped::open(p))
        .collect::<Result<Vec<_>, _>>()?;
    let mut tensors = Vec::new();
    for (index, file) in files.iter().enumerate() {
        collect(file, index, tied, &mut tensors)?;
    }
    if !tied && !tensors.iter().any(|t| t.name == "output.weight") {
        return Err(hub(dir, "lm_head.weight is missing, and config.json does not say tie_word_embeddings; fetch the model again".into()));
    }
    // A shard's table has no order of its own; blocks by number, then by part.
    tensors.sort_by_key(|t| order(&t.name));
    if let Some(pair) = tensors.windows(2).find(|p| p[0].name == p[1].name) {
        return Err(hub(
            dir,
            format!(
                "tensor {} is in two shards; fetch the model again",
                pair[0].name
            ),
        ));
    }
    Ok(Model {
        path: dir.to_owned(),
        kind: None,
        config,
        tokenizer,
        chat_template,
        tensors,
        recipe: Value::Null,
        provenance: None,
        layout: Layout::Plain,
        files,
    })
}

/// `eos_token_id`: a number or a list of them.
fn eos_ids(json: &Value) -> Vec<u32> {
    let id = |v: &Value| u32::try_from(v.as_u64()?).ok();
    match &json["eos_token_id"] {
        Value::Array(list) => list.iter().filter_map(id).collect(),
        one => id(one).into_iter().collect(),
    }
}

fn hub(path: &Path, problem: String) -> ToolError {
    ToolError::Hub {
        path: path.to_owned(),
        problem,
    }
}

/// As [`read`]; `None` where the file does not exist.
fn read_if_there(dir: &Path, name: &str) -> Result<Option<String>, ToolError> {
    if dir.join(name).exists() {
        read(dir, name).map(Some)
    } else {
        Ok(None)
    }
}

fn read(dir: &Path, name: &str) -> Result<String, ToolError> {
    let path = dir.join(name);
    std::fs::read_to_string(&path).map_err(|error| ToolError::Read { path, error })
}

/// The template in tokenizer_config.json: a string, or a list with one named `default`.
fn template_of(config: &str) -> Option<String> {
    let json: Value = serde_json::from_str(config).ok()?;
    match &json["chat_template"] {
        Value::String(text) => Some(text.clone()),
        Value::Array(list) => {
            let named = |name: &str| list.iter().find(|t| t["name"] == name);
            Some(
                named("default").or(list.first())?["template"]
                    .as_str()?
                    .to_owned(),
            )
        }
        _ => None,
    }
}

/// model.safetensors, or the shards that its index names.
fn shards(dir: &Path) -> Result<Vec<PathBuf>, ToolError> {
    let index = dir.join("model.safetensors.index.json");
    if !index.exists() {
        let single = dir.join("model.safetensors");
        if single.exists() {
            return Ok(vec![single]);
        }
        return Err(hub(dir, "neither model.safetensors nor model.safetensors.index.json is here; weights in other forms (.bin, .pth) must be saved as safetensors first".into()));
    }
    let text = read(dir, "model.safetensors.index.json")?;
    let map: Value = serde_json::from_str(&text).map_err(|e| hub(&index, e.to_string()))?;
    let map = map["weight_map"]
        .as_object()
        .ok_or_else(|| hub(&index, "`weight_map` is missing".into()))?;
    let names: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
    if let Some(bad) = names.iter().find(|n| n.contains('/') || n.contains("..")) {
        return Err(hub(
            &index,
            format!("shard name `{bad}` leaves the directory"),
        ));
    }
    Ok(names.iter().map(|n| dir.join(n)).collect())
}

fn collect(
    file: &Mapped,
    index: usize,
    tied: bool,
    out: &mut Vec<Tensor>,
) -> Result<(), ToolError> {
    let path = file.path();
    let table = SafeTensors::deserialize(file.bytes()).map_err(|e| {
        hub(
            path,
            format!("not a whole safetensors file: {e}; fetch it again"),
        )
    })?;
    let base = file.bytes().as_ptr() as usize;
    let mut unknown = BTreeMap::new();
    for (name, view) in table.tensors() {
        let Some(ours) = gguf_name(&name) else {
            unknown.insert(name, view.shape().to_vec());
            continue;
        };
        if ours == "output.weight" && tied {
            continue;
        }
        let dtype = match view.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => {
                return Err(hub(
                    path,
                    format!(
                        "tensor {name} has type {other:?}; only F32, F16 and BF16 can be imported"
                    ),
                ));
            }
        };
        let shape: Vec<u64> = view.shape().iter().rev().map(|&n| n as u64).collect();
        if shape.is_empty() || shape.contains(&0) {
            return Err(hub(path, format!("tensor {name} is empty")));
        }
        let start = view.data().as_ptr() as usize - base;
        out.push(Tensor {
            name: ours,
            dtype,
            shape,
            layout: Layout::Plain,
            checksum: None,
            file: index,
            start,
            bytes: view.data().len(),
        });
    }
    if let Some((name, shape)) = unknown
        .iter()
        .find(|(name, _)| !name.ends_with("rotary_emb.inv_freq"))
    {
        return Err(hub(
            path,
            format!(
                "tensor {name} of shape {shape:?} (and {} more) has no place in a model of this family; its results would be wrong without it",
                unknown.len() - 1
            ),
        ));
    }
    Ok(())
}

fn gguf_name(name: &str) -> Option<String> {
    match name {
        "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
        "model.norm.weight" => return Some("output_norm.weight".into()),
        "lm_head.weight" => return Some("output.weight".into()),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (_, ours) = PARTS.iter().find(|(hub, _)| *hub == part)?;
    Some(format!("blk.{layer}.{ours}"))
}

fn order(name: &str) -> (usize, usize, String) {
    let block = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'));
    match block {
        Some((layer, part)) => {
            let place = PARTS
                .iter()
                .position(|(_, ours)| *ours == part)
                .unwrap_or(PARTS.len());
            (
                1 + layer.parse::<usize>().unwrap_or(0),
                place,
                name.to_owned(),
            )
        }
        None if name == "token_embd.weight" => (0, 0, name.to_owned()),
        None => (usize::MAX, 0, name.to_owned()),
    }
}
