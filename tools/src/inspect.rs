//! `myq inspect`: everything that a file says of itself.

use std::collections::BTreeMap;

use myq_format::Kind;
use serde_json::{Value, json};

use crate::layout::Census;
use crate::model::{Model, Tensor};

/// Tensors of one role and width.
pub(crate) struct Class {
    pub(crate) role: String,
    pub(crate) cols: usize,
    pub(crate) formats: String,
    pub(crate) count: usize,
    pub(crate) weights: u64,
    pub(crate) bytes: u64,
}

/// `attn_q` of `blk.3.attn_q.weight`; the name without `.weight` elsewhere.
pub fn role(name: &str) -> String {
    let part = name
        .strip_prefix("blk.")
        .and_then(|r| r.split_once('.'))
        .map_or(name, |(_, part)| part);
    part.strip_suffix(".weight").unwrap_or(part).to_owned()
}

pub(crate) fn classes(model: &Model) -> Vec<Class> {
    let mut map: BTreeMap<(String, usize), (Class, BTreeMap<String, usize>)> = BTreeMap::new();
    for t in model.tensors.iter().filter(|t| t.is_matrix()) {
        let key = (role(&t.name), t.cols());
        let class = Class {
            role: key.0.clone(),
            cols: key.1,
            formats: String::new(),
            count: 0,
            weights: 0,
            bytes: 0,
        };
        let (class, formats) = map.entry(key).or_insert((class, BTreeMap::new()));
        class.count += 1;
        class.weights += t.len() as u64;
        class.bytes += t.bytes() as u64;
        *formats.entry(t.dtype.name()).or_default() += 1;
    }
    let spell = |formats: BTreeMap<String, usize>| match formats.len() {
        1 => formats.into_keys().collect(),
        _ => formats
            .iter()
            .map(|(f, n)| format!("{n}×{f}"))
            .collect::<Vec<_>>()
            .join(" "),
    };
    map.into_values()
        .map(|(class, formats)| Class {
            formats: spell(formats),
            ..class
        })
        .collect()
}

fn bpw(bytes: u64, weights: u64) -> f64 {
    bytes as f64 * 8.0 / weights as f64
}

pub(crate) fn totals(model: &Model) -> (u64, u64) {
    model.tensors.iter().fold((0, 0), |(b, w), t| {
        (b + t.bytes() as u64, w + t.len() as u64)
    })
}

fn kind(model: &Model) -> &'static str {
    match model.kind {
        Some(Kind::Myq) => ".myq",
        Some(Kind::Gguf) => "GGUF",
        None => "model-hub directory",
    }
}

/// Everything, for machines.
pub fn as_json(model: &Model) -> Value {
    let tensor = |t: &Tensor| {
        json!({
            "name": t.name, "type": t.dtype.name(), "shape": t.shape, "layout": t.layout.name(), "bytes": t.bytes(),
            "bits_per_weight": bpw(t.bytes() as u64, t.len() as u64),
        })
    };
    let class = |c: Class| {
        json!({
            "role": c.role, "columns": c.cols, "types": c.formats, "tensors": c.count, "weights": c.weights,
            "bytes": c.bytes, "bits_per_weight": bpw(c.bytes, c.weights),
        })
    };
    let (bytes, weights) = totals(model);
    json!({
        "path": model.path.display().to_string(),
        "kind": kind(model),
        "config": model.config,
        "recipe": model.recipe,
        "provenance": model.provenance,
        "layout": model.layout.name(),
        "chat_template": model.chat_template,
        "vocabulary": model.tokenizer.vocab_size(),
        "file_bytes": model.file_bytes(),
        "tensor_bytes": bytes,
        "weights": weights,
        "bits_per_weight": bpw(bytes, weights),
        "classes": classes(model).into_iter().map(class).collect::<Vec<_>>(),
        "tensors": model.tensors.iter().map(tensor).collect::<Vec<_>>(),
    })
}

/// A page for people; `tensors` adds a line for each tensor, `template` the chat template.
pub fn as_text(model: &Model, tensors: bool, template: bool) -> String {
    let c = &model.config;
    let (bytes, weights) = totals(model);
    let mut out = format!(
        "{}\n  {} file, {:.1} MB; {:.1} M weights, {:.3} bits a weight\n",
        model.path.display(),
        kind(model),
        model.file_bytes() as f64 / 1e6,
        weights as f64 / 1e6,
        bpw(bytes, weights)
    );
    let mut line = |name: &str, value: String| out.push_str(&format!("  {name:<12} {value}\n"));
    line("name", c.name.clone());
    line("family", format!("{:?}", c.family).to_lowercase());
    line(
        "size",
        format!(
            "{} layers, width {}, feed-forward {}",
            c.layers, c.width, c.ffn
        ),
    );
    line(
        "heads",
        format!(
            "{} query, {} key/value, {} wide",
            c.heads, c.kv_heads, c.head_dim
        ),
    );
    line("context", format!("{} tokens", c.context));
    line(
        "rope",
        format!(
            "theta {}, {:?} pairs, scaling {:?}",
            c.rope.theta, c.rope.pairing, c.rope.scaling
        ),
    );
    line(
        "vocabulary",
        format!(
            "{} tokens, embedding {} rows",
            model.tokenizer.vocab_size(),
            c.vocab
        ),
    );
    line(
        "layout",
        Census::of_tensors(model.layout, &model.tensors).text(model.layout),
    );
    line(
        "template",
        if model.chat_template.is_some() {
            "yes (--template prints it)"
        } else {
            "none"
        }
        .into(),
    );
    if let Some(p) = &model.provenance {
        line("made by", p.tool.clone());
        line("recipe", model.recipe.to_string());
        for source in &p.sources {
            line(
                "source",
                format!("{} blake3 {}", source.name, source.blake3),
            );
        }
        line(
            "calibration",
            p.calibration.clone().unwrap_or_else(|| "none".into()),
        );
    }
    out.push_str(&format!(
        "\n  {:<16}{:>8}{:>9}  {:<16}{:>12}{:>9}\n",
        "class", "columns", "tensors", "types", "MB", "bits"
    ));
    for c in classes(model) {
        out.push_str(&format!(
            "  {:<16}{:>8}{:>9}  {:<16}{:>12.2}{:>9.3}\n",
            c.role,
            c.cols,
            c.count,
            c.formats,
            c.bytes as f64 / 1e6,
            bpw(c.bytes, c.weights)
        ));
    }
    if tensors {
        out.push('\n');
        for t in &model.tensors {
            let shape = t
                .shape
                .iter()
                .map(u64::to_string)
                .collect::<Vec<_>>()
                .join(" × ");
            out.push_str(&format!(
                "  {:<30} {:<8} {:<6} {:>16} {:>11} B {:>7.3}\n",
                t.name,
                t.dtype.name(),
                t.layout.name(),
                shape,
                t.bytes(),
                bpw(t.bytes() as u64, t.len() as u64)
            ));
        }
    }
    if let (true, Some(text)) = (template, &model.chat_template) {
        out.push_str(&format!("\n{text}\n"));
    }
    out
}
