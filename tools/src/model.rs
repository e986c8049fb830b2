//! One view of every source: GGUF, `.myq`, or a model-hub directory.

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};

use myq_blocks::{DType, Layout, Rows, panels::PANEL};
use myq_engine::Mapped;
use myq_format::myq::{Myq, Provenance, Source as SourceHash};
use myq_format::{Kind, gguf::Gguf, sniff};
use myq_model::{Config, ModelError, tokenizer::Tokenizer, weights::check_table};
use rayon::prelude::*;

use crate::{ToolError, hub, layout};

/// A tensor of a source, under its GGUF name.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name, as `blk.0.attn_q.weight`.
    pub name: String,
    /// Format.
    pub dtype: DType,
    /// Shape, `[columns, rows …]`.
    pub shape: Vec<u64>,
    /// How the rows are stored.
    pub layout: Layout,
    /// BLAKE3 of the bytes, where the file has one.
    pub(crate) checksum: Option<[u8; 32]>,
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

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.bytes / self.rows().max(1)
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
    /// Layout of the file; each tensor has its own too.
    pub layout: Layout,
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
                let tensors = g.tensors().iter();
                let tensors = tensors.map(|t| tensor(t, Layout::Plain)).collect();
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
                    layout: Layout::Plain,
                    files: vec![file],
                })
            }
            Some(Kind::Myq) => {
                let m = Myq::parse(file.bytes()).map_err(|e| fail(e.into()))?;
                let config: Config = serde_json::from_value(m.header().config.clone())
                    .map_err(|e| fail(ModelError::Config(e.to_string())))?;
                config.check().map_err(fail)?;
                let tokenizer = Tokenizer::from_bytes(m.tokenizer()).map_err(|e| fail(e.into()))?;
                m.verify_tokenizer().map_err(|e| fail(e.into()))?;
                let tensors = m.tensors().iter();
                let tensors = tensors.map(|t| tensor(t, m.layout())).collect();
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
                    layout: m.layout(),
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

    /// The tensor that gives logits: the embedding where the model has no other.
    pub fn output_name(&self) -> &'static str {
        match self.tensor("output.weight") {
            Some(_) => "output.weight",
            None => "token_embd.weight",
        }
    }

    /// The stored bytes of a tensor, in its own layout.
    pub fn data(&self, t: &Tensor) -> &[u8] {
        &self.files[t.file].bytes()[t.start..t.start + t.bytes]
    }

    /// Rows `rows` of a tensor as fp32, row after row.
    pub fn rows(&self, t: &Tensor, rows: Range<usize>) -> Vec<f32> {
        let view = Rows::in_layout(t.layout, t.dtype, t.cols(), self.data(t))
            .expect("checked when the model was opened");
        let mut out = vec![0.0; rows.len() * t.cols()];
        for (r, out) in rows.zip(out.chunks_exact_mut(t.cols())) {
            view.dequantize(r, out);
        }
        out
    }

    /// The bytes of a tensor as a file of this layout has them.
    pub fn data_in(&self, t: &Tensor, layout: Layout) -> Cow<'_, [u8]> {
        let layout = layout::stored(layout, t.dtype, &t.shape);
        let data = self.data(t);
        if layout == t.layout {
            return Cow::Borrowed(data);
        }
        let mut out = vec![0; data.len()];
        // Whole panels, about half a megabyte.
        let panel = PANEL * t.row_bytes();
        let piece = panel * ((1 << 19) / panel).max(1);
        out.par_chunks_mut(piece)
            .zip(data.par_chunks(piece))
            .for_each(|(out, data)| {
                layout::convert(t.dtype, t.cols(), t.layout, data, layout, out);
            });
        Cow::Owned(out)
    }

    /// Compares a tensor with its checksum, so that damage is not passed on under a fresh one;
    /// right where the file has none.
    pub fn check(&self, t: &Tensor) -> Result<(), ToolError> {
        match t.checksum {
            Some(sum) if *blake3::hash(self.data(t)).as_bytes() != sum => {
                let error = myq_format::Error::Checksum {
                    section: t.name.clone(),
                    offset: t.start as u64,
                };
                Err(ToolError::model(&self.path, error))
            }
            _ => Ok(()),
        }
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

fn tensor(t: &myq_format::TensorInfo, layout: Layout) -> Tensor {
    Tensor {
        name: t.name.clone(),
        dtype: t.dtype,
        shape: t.shape.clone(),
        layout: layout::stored(layout, t.dtype, &t.shape),
        checksum: t.checksum,
        file: 0,
        start: t.offset as usize,
        bytes: t.bytes as usize,
    }
}
