//! One view of every source: GGUF, `.myq`, or a model-hub directory.

use std::ops::Range;
use std::path::{Path, PathBuf};

use myq_blocks::{DType, decode::dequantize_row};
use myq_engine::Mapped;
use myq_format::myq::{Myq, Provenance, Source as SourceHash};
use myq_format::{Kind, gguf::Gguf, sniff};
use myq_model::{Config, ModelError, tokenizer::Tokenizer, weights::check_table};

use crate::{ToolError, hub};

/// A tensor of a source, under its GGUF name.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name, as `blk.0.attn_q.weight`.
    pub name: String,
    /// Format.
    pub dtype: DType,
    /// Shape, `[columns, rows …]`.
    pub shape: Vec<u64>,
    pub(crate) file: usize,
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

impl Tensor {
    /// Weights in a row.
    pub fn cols(&self) -> usize {
        self.shape.first().map_or(0, |&n| n as usize)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape.iter().skip(1).product::<u64>() as usize
    }

    /// Weights.
    pub fn len(&self) -> usize {
        self.cols() * self.rows()
    }

    /// Whether it has no weights; a model's tensors always have some.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes stored.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it is a matrix, and not a norm's or bias' vector.
    pub fn is_matrix(&self) -> bool {
        self.shape.len() > 1
    }
}

/// A model as it is on disk, weights mapped.
pub struct Model {
    /// Path it was opened by.
    pub path: PathBuf,
    /// Which container; `None` for a model-hub directory.
    pub kind: Option<Kind>,
    /// Sizes and constants.
    pub config: Config,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, as published.
    pub chat_template: Option<String>,
    /// Tensors, in the file's order.
    pub tensors: Vec<Tensor>,
    /// Recipe of a `.myq` file.
    pub recipe: serde_json::Value,
    /// Provenance of a `.myq` file.
    pub provenance: Option<Provenance>,
    pub(crate) files: Vec<Mapped>,
}

impl Model {
    /// Opens a GGUF or `.myq` file, or a model-hub directory, and checks that its tensors are
    /// those of its configuration.
    pub fn open(path: &Path) -> Result<Model, ToolError> {
        let model = if path.is_dir() {
            hub::open(path)?
        } else {
            Model::open_file(path)?
        };
        let fail = |error| ToolError::model(path, error);
        let table = model
            .tensors
            .iter()
            .map(|t| (t.name.as_str(), &t.shape[..]));
        check_table(&model.config, table).map_err(fail)?;
        let tokens = model.tokenizer.vocab_size();
        model.config.check_tokenizer(tokens).map_err(fail)?;
        Ok(model)
    }

    /// Whether `path` is one of the files this model is read from.
    pub fn reads(&self, path: &Path) -> bool {
        let same = |file: &Mapped| matches!((file.path().canonicalize(), path.canonicalize()), (Ok(a), Ok(b)) if a == b);
        self.files.iter().any(same)
    }

    fn open_file(path: &Path) -> Result<Model, ToolError> {
        let file = Mapped::open(path)?;
        let fail = |error: ModelError| ToolError::model(path, error);
        match sniff(file.bytes()) {
            Some(Kind::Gguf) => {
                let g = Gguf::parse(file.bytes()).map_err(|e| fail(e.into()))?;
                let tensors = g.tensors().iter().map(tensor).collect();
                let config = Config::from_gguf(&g).map_err(fail)?;
                let tokenizer = Tokenizer::from_gguf(&g).map_err(|e| fail(e.into()))?;
                let chat_template = g.str("tokenizer.chat_template").map(str::to_owned);
                Ok(Model {
                    path: path.to_owned(),
                    kind: Some(Kind::Gguf),
                    config,
                    tokenizer,
                    chat_template,
                    tensors,
                    recipe: serde_json::Value::Null,
                    provenance: None,
                    files: vec![file],
                })
            }
            Some(Kind::Myq) => {
                let m = Myq::parse(file.bytes()).map_err(|e| fail(e.into()))?;
                let config: Config = serde_json::from_value(m.header().config.clone())
                    .map_err(|e| fail(ModelError::Config(e.to_string())))?;
                config.check().map_err(fail)?;
                let tokenizer = Tokenizer::from_bytes(m.tokenizer()).map_err(|e| fail(e.into()))?;
                let tensors = m.tensors().iter().map(tensor).collect();
                let (recipe, provenance) =
                    (m.header().recipe.clone(), m.header().provenance.clone());
                Ok(Model {
                    path: path.to_owned(),
                    kind: Some(Kind::Myq),
                    config,
                    tokenizer,
                    chat_template: m.header().chat_template.clone(),
                    tensors,
                    recipe,
                    provenance: Some(provenance),
                    files: vec![file],
                })
            }
            None => Err(fail(ModelError::Signature)),
        }
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// The stored bytes of a tensor.
    pub fn data(&self, t: &Tensor) -> &[u8] {
        &self.files[t.file].bytes()[t.start..t.start + t.bytes]
    }

    /// Rows `rows` of a tensor as fp32, row after row.
    pub fn rows(&self, t: &Tensor, rows: Range<usize>) -> Vec<f32> {
        let row_bytes = t.bytes / t.rows().max(1);
        let mut out = vec![0.0; rows.len() * t.cols()];
        let data = &self.data(t)[rows.start * row_bytes..rows.end * row_bytes];
        for (row, out) in data
            .chunks_exact(row_bytes)
            .zip(out.chunks_exact_mut(t.cols()))
        {
            dequantize_row(t.dtype, row, out);
        }
        out
    }

    /// Name and BLAKE3 hash of each file read.
    pub fn hashes(&self) -> Vec<SourceHash> {
        let hash = |file: &Mapped| SourceHash {
            name: file
                .path()
                .file_name()
                .map(|n| n.to_string_lossy().into_owned())
                .unwrap_or_default(),
            blake3: blake3::hash(file.bytes()).to_hex().to_string(),
        };
        self.files.iter().map(hash).collect()
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes().len() as u64).sum()
    }
}

fn tensor(t: &myq_format::TensorInfo) -> Tensor {
    Tensor {
        name: t.name.clone(),
        dtype: t.dtype,
        shape: t.shape.clone(),
        file: 0,
        start: t.offset as usize,
        bytes: t.bytes as usize,
    }
}
