//! `myq export`: a model as GGUF, for llama.cpp and what else reads it.
//!
//! Superblocks are the same bytes in both, so that nothing is lost. Three things differ:
//!
//! 1. *Partial superblocks* are ours alone. Such a matrix goes out in the smallest type of 32
//!    weights that holds its values nearly as they are, and the cost is told.
//! 2. *Rope*: GGUF's Llama turns neighbouring components; rows of query and key move where the
//!    model turns halves.
//! 3. *Llama 3's frequencies* are a tensor of divisors in GGUF.

use std::io::BufWriter;
use std::path::Path;

use myq_blocks::encode::{Method, encode_rows};
use myq_blocks::{DType, Layout};
use myq_format::atomic::AtomicFile;
use myq_format::gguf::Builder;
use myq_model::Config;
use myq_model::config::{Family, Pairing, Rope, Scaling};
use myq_model::rope::RopeTable;
use myq_model::tokenizer::Export;
use rayon::prelude::*;

use crate::model::{Model, Tensor};
use crate::{ToolError, progress};

/// What an export did.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Bytes of tensors.
    pub bytes: u64,
    /// Bytes of the same tensors in the source.
    pub source_bytes: u64,
    /// Matrices that went out in another type, with what that costs.
    pub notes: Vec<String>,
}

/// Types of 32 weights, smallest first.
const PLAIN: [DType; 5] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
];
/// Error of a new type, as a share of the values' norm, that is nearly none: an eighth of what
/// quantising to six bits costs.
const NEARLY: f64 = 2e-3;

/// One tensor of the result.
struct Out<'a> {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    data: Data<'a>,
}

enum Data<'a> {
    /// As in the source, rows moved for the rope of this many heads.
    Rows(&'a Tensor, Option<usize>),
    /// Requantised.
    New(Vec<u8>),
}

/// Writes `model` to `out`.
///
/// # Errors
/// A damaged source; a tokenizer or a row length that GGUF cannot hold; a file that cannot be
/// written.
pub fn export(model: &Model, out: &Path) -> Result<Summary, ToolError> {
    let fail = |error| ToolError::Write {
        path: out.to_owned(),
        error,
    };
    let mut summary = Summary::default();
    let bar = progress::bar(model.tensors.len() as u64, "exporting");
    let mut tensors = Vec::new();
    for t in &model.tensors {
        model.check(t)?;
        tensors.push(plan(model, t, &mut summary)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    tensors.extend(rope_factors(model));
    let mut builder = Builder::new();
    let tokenizer = model.tokenizer.to_gguf();
    let tokenizer = tokenizer.map_err(|e| ToolError::model(&model.path, e))?;
    describe_model(&model.config, &mut builder).map_err(fail)?;
    describe_tokenizer(tokenizer, &mut builder).map_err(fail)?;
    if let Some(template) = &model.chat_template {
        let key = "tokenizer.chat_template";
        builder.str(key, template).map_err(fail)?;
    }
    for t in &tensors {
        builder.tensor(&t.name, t.dtype, &t.shape).map_err(fail)?;
    }
    let file = BufWriter::new(AtomicFile::create(out).map_err(fail)?);
    let mut body = builder.write(file).map_err(fail)?;
    for t in &tensors {
        let bytes = match &t.data {
            Data::New(bytes) => bytes.clone(),
            Data::Rows(source, heads) => {
                let plain = model.data_in(source, Layout::Plain);
                match heads {
                    Some(heads) => interleaved(&plain, source.row_bytes(), *heads),
                    None => plain.into_owned(),
                }
            }
        };
        summary.bytes += bytes.len() as u64;
        body.tensor(&bytes).map_err(fail)?;
    }
    let file = body.finish().map_err(fail)?;
    let file = file.into_inner();
    let file = file.map_err(|e| ToolError::write(out, e.into_error()))?;
    file.commit().map_err(fail)?;
    Ok(summary)
}

/// The type and place of one tensor.
fn plan<'a>(model: &Model, t: &'a Tensor, summary: &mut Summary) -> Result<Out<'a>, ToolError> {
    summary.source_bytes += t.bytes() as u64;
    let turned = model.config.family == Family::Llama && model.config.rope.pairing == Pairing::Half;
    let heads = match t.name.rsplit('.').nth(1) {
        Some("attn_q") if turned => Some(model.config.heads),
        Some("attn_k") if turned => Some(model.config.kv_heads),
        _ => None,
    };
    let whole = t.cols().is_multiple_of(t.dtype.block_len());
    if t.dtype.gguf_id().is_some() && whole {
        return Ok(Out {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            data: Data::Rows(t, heads),
        });
    }
    let x = model.rows(t, 0..t.rows());
    let norm: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let mut best = None;
    for dtype in PLAIN {
        let Some(row) = dtype.row_bytes(t.cols()) else {
            continue;
        };
        let mut bytes = vec![0; row * t.rows()];
        let error: f64 = bytes
            .par_chunks_mut(row * 64)
            .zip(x.par_chunks(t.cols() * 64))
            .map(|(out, x)| -> Result<f64, ToolError> {
                encode_rows(dtype, Method::Search, t.cols(), x, None, out)
                    .map_err(|error| ToolError::encode(&model.path, &t.name, error))?;
                Ok(distance(dtype, t.cols(), out, x))
            })
            .collect::<Result<Vec<f64>, _>>()?
            .iter()
            .sum();
        let share = (error / norm.max(1e-300)).sqrt();
        best = Some((dtype, bytes, share));
        if share <= NEARLY {
            break;
        }
    }
    let Some((dtype, mut bytes, share)) = best else {
        return Err(ToolError::Setting(format!(
            "{} has rows of {} weights, which no GGUF type but floats holds; quantise with --tensor {}=16 first",
            t.name,
            t.cols(),
            t.name
        )));
    };
    summary.notes.push(format!(
        "{}: {} -> {}, {} -> {} B, moved by {:.2} % of its norm: GGUF has no partial superblocks for rows of {}",
        t.name,
        t.dtype.name(),
        dtype.name(),
        t.bytes(),
        bytes.len(),
        100.0 * share,
        t.cols()
    ));
    if let Some(heads) = heads {
        bytes = interleaved(&bytes, bytes.len() / t.rows(), heads);
    }
    Ok(Out {
        name: t.name.clone(),
        dtype,
        shape: t.shape.clone(),
        data: Data::New(bytes),
    })
}

/// Squared distance of stored rows to `x`.
fn distance(dtype: DType, cols: usize, bytes: &[u8], x: &[f32]) -> f64 {
    let rows = myq_blocks::Rows::new(dtype, cols, bytes).expect("rows that were just written");
    let mut y = vec![0.0; cols];
    let mut sum = 0.0;
    for (r, x) in x.chunks_exact(cols).enumerate() {
        rows.dequantize(r, &mut y);
        sum += x
            .iter()
            .zip(&y)
            .map(|(x, y)| f64::from(x - y) * f64::from(x - y))
            .sum::<f64>();
    }
    sum
}

/// Rows of each head reordered from halves to neighbours: i, i + n/2 become 2i, 2i + 1.
fn interleaved(bytes: &[u8], row: usize, heads: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let head = bytes.len() / heads;
    for head in bytes.chunks_exact(head) {
        let (first, second) = head.split_at(head.len() / 2);
        for (a, b) in first.chunks_exact(row).zip(second.chunks_exact(row)) {
            out.extend_from_slice(a);
            out.extend_from_slice(b);
        }
    }
    out
}

/// Llama 3's stretching as divisors of the frequencies.
fn rope_factors(model: &Model) -> Option<Out<'static>> {
    let rope = &model.config.rope;
    let Scaling::Llama3 { .. } = rope.scaling else {
        return None;
    };
    let plain = Config {
        rope: Rope {
            scaling: Scaling::None,
            ..*rope
        },
        ..model.config.clone()
    };
    let tables = [&plain, &model.config].map(|c| RopeTable::new(c, None));
    let factors = tables[0].frequencies().iter().zip(tables[1].frequencies());
    let bytes: Vec<u8> = factors.flat_map(|(a, b)| (a / b).to_le_bytes()).collect();
    Some(Out {
        name: "rope_freqs.weight".into(),
        dtype: DType::F32,
        shape: vec![bytes.len() as u64 / 4],
        data: Data::New(bytes),
    })
}

/// The keys of the configuration.
fn describe_model(c: &Config, b: &mut Builder) -> Result<(), myq_format::Error> {
    let arch = match c.family {
        Family::Llama => "llama",
        Family::Qwen2 => "qwen2",
    };
    let key = |k: &str| format!("{arch}.{k}");
    b.str("general.architecture", arch)?;
    if !c.name.is_empty() {
        b.str("general.name", &c.name)?;
    }
    b.u32("general.quantization_version", 2)?;
    for (k, v) in [
        ("block_count", c.layers),
        ("context_length", c.context),
        ("embedding_length", c.width),
        ("feed_forward_length", c.ffn),
        ("attention.head_count", c.heads),
        ("attention.head_count_kv", c.kv_heads),
        ("attention.key_length", c.head_dim),
        ("attention.value_length", c.head_dim),
        ("rope.dimension_count", c.rope.dims),
        ("vocab_size", c.vocab),
    ] {
        b.u32(&key(k), v as u32)?;
    }
    b.f32(&key("attention.layer_norm_rms_epsilon"), c.norm_eps)?;
    b.f32(&key("rope.freq_base"), c.rope.theta)?;
    match c.rope.scaling {
        Scaling::None | Scaling::Llama3 { .. } => {}
        Scaling::Linear { factor } => {
            b.str(&key("rope.scaling.type"), "linear")?;
            b.f32(&key("rope.scaling.factor"), factor)?;
        }
        Scaling::Yarn {
            factor,
            original,
            beta_fast,
            beta_slow,
            attention,
        } => {
            b.str(&key("rope.scaling.type"), "yarn")?;
            b.u32(
                &key("rope.scaling.original_context_length"),
                original as u32,
            )?;
            for (k, v) in [
                ("factor", factor),
                ("yarn_beta_fast", beta_fast),
                ("yarn_beta_slow", beta_slow),
                ("attn_factor", attention),
            ] {
                b.f32(&key(&format!("rope.scaling.{k}")), v)?;
            }
        }
    }
    Ok(())
}

/// The keys of the tokenizer.
fn describe_tokenizer(t: Export, b: &mut Builder) -> Result<(), myq_format::Error> {
    let key = |k: &str| format!("tokenizer.ggml.{k}");
    b.str(&key("model"), t.model)?;
    if let Some(pre) = t.pre {
        b.str(&key("pre"), pre)?;
    }
    b.strings(&key("tokens"), &t.tokens)?;
    b.i32s(&key("token_type"), t.kinds)?;
    if !t.scores.is_empty() {
        b.f32s(&key("scores"), t.scores)?;
    }
    if !t.merges.is_empty() {
        b.strings(&key("merges"), &t.merges)?;
    }
    for (k, v) in [
        ("bos_token_id", t.bos),
        ("eos_token_id", t.eos),
        ("unknown_token_id", t.unknown),
    ] {
        if let Some(v) = v {
            b.u32(&key(k), v)?;
        }
    }
    b.bool(&key("add_bos_token"), t.add_bos)?;
    b.bool(&key("add_eos_token"), t.add_eos)?;
    if let Some(v) = t.add_space_prefix {
        b.bool(&key("add_space_prefix"), v)?;
    }
    Ok(())
}
