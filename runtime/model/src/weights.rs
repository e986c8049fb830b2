//! Where each matrix of the model lies in the file: typed views, no copy.

use std::collections::BTreeMap;

use myq_blocks::{DType, Layout, Rows, decode::dequantize_row};
use myq_format::TensorInfo;

use crate::{Config, ModelError};

/// The bytes that matrices lie in: the whole file, and copies in another layout.
#[derive(Clone, Copy, Debug)]
pub struct Store<'a> {
    /// The file that the matrices were found in.
    pub file: &'a [u8],
    /// What [`Matrix::repacked`] refers to; empty where nothing was repacked.
    pub packed: &'a [u8],
}

impl<'a> Store<'a> {
    /// The file alone.
    pub fn of_file(file: &'a [u8]) -> Store<'a> {
        Store { file, packed: &[] }
    }
}

/// A matrix in the file, checked against the file's length and the format.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Format of the weights.
    pub dtype: DType,
    /// Input width.
    pub cols: usize,
    /// Output width.
    pub rows: usize,
    /// How the rows are stored.
    pub layout: Layout,
    start: usize,
    len: usize,
    in_file: bool,
}

impl Matrix {
    /// The rows, from the bytes that the matrix lies in.
    ///
    /// # Panics
    /// If `store` is not the matrix's (shorter than its end).
    pub fn view<'a>(&self, store: Store<'a>) -> Rows<'a> {
        let bytes = if self.in_file {
            store.file
        } else {
            store.packed
        };
        let bytes = &bytes[self.start..self.start + self.len];
        Rows::in_layout(self.layout, self.dtype, self.cols, bytes)
            .expect("checked when the model was opened")
    }

    /// A matrix that is all of a file; for tests and benchmarks.
    ///
    /// # Panics
    /// If the format cannot hold rows of that length.
    pub fn at_start(dtype: DType, cols: usize, rows: usize, layout: Layout) -> Matrix {
        let row = dtype.row_bytes(cols).expect("a length of the format");
        Matrix {
            dtype,
            cols,
            rows,
            layout: layout.of(dtype, cols),
            start: 0,
            len: rows * row,
            in_file: true,
        }
    }

    /// The same matrix in another layout, from `start` of the store's copies on.
    pub fn repacked(&self, layout: Layout, start: usize) -> Matrix {
        Matrix {
            layout: layout.of(self.dtype, self.cols),
            start,
            in_file: false,
            ..*self
        }
    }

    /// Where the matrix starts in the file; `None` for a copy.
    pub fn file_offset(&self) -> Option<usize> {
        self.in_file.then_some(self.start)
    }

    /// Bytes in the file.
    pub fn bytes(&self) -> usize {
        self.len
    }
}

/// One transformer block. Vectors are copied to fp32, matrices stay in the file.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Weight of the norm before attention, `width`.
    pub attn_norm: Vec<f32>,
    /// Query, `width → heads·head_dim`.
    pub q: Matrix,
    /// Key, `width → kv_heads·head_dim`.
    pub k: Matrix,
    /// Value, `width → kv_heads·head_dim`.
    pub v: Matrix,
    /// Biases of query, key and value; empty where the model has none.
    pub q_bias: Vec<f32>,
    /// See `q_bias`.
    pub k_bias: Vec<f32>,
    /// See `q_bias`.
    pub v_bias: Vec<f32>,
    /// Attention output, `heads·head_dim → width`.
    pub o: Matrix,
    /// Weight of the norm before the feed-forward part, `width`.
    pub ffn_norm: Vec<f32>,
    /// Gate, `width → ffn`.
    pub gate: Matrix,
    /// Up, `width → ffn`.
    pub up: Matrix,
    /// Down, `ffn → width`.
    pub down: Matrix,
}

/// All weights of a model.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Embedding, one row of `width` per token.
    pub embedding: Matrix,
    /// Blocks.
    pub layers: Vec<Layer>,
    /// Weight of the last norm.
    pub norm: Vec<f32>,
    /// Output, `width → vocab`; the embedding where they are tied.
    pub output: Matrix,
    /// Whether `output` is the embedding.
    pub tied: bool,
    /// Divisors of the rope frequencies, where the file has them.
    pub rope_factors: Option<Vec<f32>>,
}

/// A tensor that a model of some configuration has.
struct Expected {
    name: String,
    shape: Vec<usize>,
    required: bool,
}

fn expected(c: &Config) -> Vec<Expected> {
    let (d, q, kv, ffn) = (c.width, c.q_width(), c.kv_width(), c.ffn);
    let tensor = |name: String, shape: &[usize], required| Expected {
        name,
        shape: shape.to_vec(),
        required,
    };
    let mut all = vec![
        tensor("token_embd.weight".into(), &[d, c.vocab], true),
        tensor("output_norm.weight".into(), &[d], true),
        tensor("output.weight".into(), &[d, c.vocab], false),
        tensor("rope_freqs.weight".into(), &[c.rope.dims / 2], false),
    ];
    for l in 0..c.layers {
        let parts: [(&str, &[usize], bool); 12] = [
            ("attn_norm.weight", &[d], true),
            ("attn_q.weight", &[d, q], true),
            ("attn_k.weight", &[d, kv], true),
            ("attn_v.weight", &[d, kv], true),
            ("attn_q.bias", &[q], false),
            ("attn_k.bias", &[kv], false),
            ("attn_v.bias", &[kv], false),
            ("attn_output.weight", &[q, d], true),
            ("ffn_norm.weight", &[d], true),
            ("ffn_gate.weight", &[d, ffn], true),
            ("ffn_up.weight", &[d, ffn], true),
            ("ffn_down.weight", &[ffn, d], true),
        ];
        all.extend(
            parts.map(|(part, shape, required)| tensor(format!("blk.{l}.{part}"), shape, required)),
        );
    }
    all
}

/// Checks a tensor table against the configuration: every tensor that the forward pass needs
/// is there with its shape (columns first), and none that it would leave out.
pub fn check_table<'a>(
    config: &Config,
    tensors: impl Iterator<Item = (&'a str, &'a [u64])>,
) -> Result<(), ModelError> {
    let mut table: BTreeMap<&str, &[u64]> = tensors.collect();
    for Expected {
        name,
        shape,
        required,
    } in expected(config)
    {
        match table.remove(name.as_str()) {
            None if required => return Err(ModelError::Missing(name)),
            None => {}
            Some(got) => {
                let mut want: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
                // A vector may be stored as a single row.
                if shape.len() == 1 && got.len() == 2 {
                    want.push(1);
                }
                if got != want {
                    return Err(ModelError::Shape {
                        name,
                        got: got.to_vec(),
                        want,
                    });
                }
            }
        }
    }
    match table.keys().next() {
        Some(name) => Err(ModelError::Unused((*name).to_owned(), table.len())),
        None => Ok(()),
    }
}

impl Weights {
    /// Finds and checks every tensor of the model among `tensors`, stored in `layout`.
    pub fn find(
        config: &Config,
        tensors: &[TensorInfo],
        layout: Layout,
        file: &[u8],
    ) -> Result<Weights, ModelError> {
        check_table(
            config,
            tensors.iter().map(|t| (t.name.as_str(), &t.shape[..])),
        )?;
        let f = Finder {
            tensors,
            layout,
            file,
        };
        let (d, q, kv, ffn) = (
            config.width,
            config.q_width(),
            config.kv_width(),
            config.ffn,
        );
        let layers = (0..config.layers)
            .map(|l| {
                let name = |part: &str| format!("blk.{l}.{part}");
                let bias = |part: &str, n: usize| {
                    f.optional(&name(part), n).map(Option::unwrap_or_default)
                };
                Ok(Layer {
                    attn_norm: f.vector(&name("attn_norm.weight"), d)?,
                    q: f.matrix(&name("attn_q.weight"), d, q)?,
                    k: f.matrix(&name("attn_k.weight"), d, kv)?,
                    v: f.matrix(&name("attn_v.weight"), d, kv)?,
                    q_bias: bias("attn_q.bias", q)?,
                    k_bias: bias("attn_k.bias", kv)?,
                    v_bias: bias("attn_v.bias", kv)?,
                    o: f.matrix(&name("attn_output.weight"), q, d)?,
                    ffn_norm: f.vector(&name("ffn_norm.weight"), d)?,
                    gate: f.matrix(&name("ffn_gate.weight"), d, ffn)?,
                    up: f.matrix(&name("ffn_up.weight"), d, ffn)?,
                    down: f.matrix(&name("ffn_down.weight"), ffn, d)?,
                })
            })
            .collect::<Result<_, ModelError>>()?;
        let embedding = f.matrix("token_embd.weight", d, config.vocab)?;
        let tied = f.find("output.weight").is_none();
        Ok(Weights {
            embedding,
            layers,
            norm: f.vector("output_norm.weight", d)?,
            output: if tied {
                embedding
            } else {
                f.matrix("output.weight", d, config.vocab)?
            },
            tied,
            rope_factors: f.rope_factors(config.rope.dims / 2)?,
        })
    }

    /// Every matrix that decoding multiplies by, the output last.
    pub fn matrices_mut(&mut self) -> impl Iterator<Item = &mut Matrix> {
        let layers = self.layers.iter_mut().flat_map(|l| {
            [
                &mut l.q,
                &mut l.k,
                &mut l.v,
                &mut l.o,
                &mut l.gate,
                &mut l.up,
                &mut l.down,
            ]
        });
        layers.chain([&mut self.output])
    }

    /// Bytes that one decode step reads: every matrix but a separate embedding.
    pub fn bytes_per_token(&self) -> usize {
        let layer = |l: &Layer| {
            [l.q, l.k, l.v, l.o, l.gate, l.up, l.down]
                .iter()
                .map(Matrix::bytes)
                .sum::<usize>()
        };
        self.layers.iter().map(layer).sum::<usize>() + self.output.bytes()
    }
}

struct Finder<'a> {
    tensors: &'a [TensorInfo],
    layout: Layout,
    file: &'a [u8],
}

impl Finder<'_> {
    fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|t| t.name == name)
    }

    fn matrix(&self, name: &str, cols: usize, rows: usize) -> Result<Matrix, ModelError> {
        let t = self
            .find(name)
            .ok_or_else(|| ModelError::Missing(name.to_owned()))?;
        let want = vec![cols as u64, rows as u64];
        let bytes = t.dtype.row_bytes(cols).and_then(|b| b.checked_mul(rows));
        let end = t.offset.checked_add(t.bytes);
        let fits = end.is_some_and(|end| end <= self.file.len() as u64)
            && bytes.is_some_and(|b| b as u64 == t.bytes);
        if t.shape != want || !fits {
            return Err(ModelError::Shape {
                name: name.to_owned(),
                got: t.shape.clone(),
                want,
            });
        }
        Ok(Matrix {
            dtype: t.dtype,
            cols,
            rows,
            layout: self.layout.of(t.dtype, cols),
            start: t.offset as usize,
            len: t.bytes as usize,
            in_file: true,
        })
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let m = self.matrix_of_vector(name, len)?;
        let mut out = vec![0.0; len];
        let bytes = m.view(Store::of_file(self.file)).data();
        dequantize_row(m.dtype, bytes, &mut out);
        if out.iter().all(|x| x.is_finite()) {
            Ok(out)
        } else {
            Err(ModelError::NotFinite(name.to_owned()))
        }
    }

    fn optional(&self, name: &str, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        if self.find(name).is_none() {
            Ok(None)
        } else {
            self.vector(name, len).map(Some)
        }
    }

    fn rope_factors(&self, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        let factors = self.optional("rope_freqs.weight", len)?;
        match &factors {
            Some(f) if f.iter().any(|f| *f <= 0.0) => Err(ModelError::Config(
                "rope_freqs.weight holds factors that are not positive".into(),
            )),
            _ => Ok(factors),
        }
    }

    /// A vector is stored with one dimension or as a single row.
    fn matrix_of_vector(&self, name: &str, len: usize) -> Result<Matrix, ModelError> {
        let t = self
            .find(name)
            .ok_or_else(|| ModelError::Missing(name.to_owned()))?;
        if t.shape != [len as u64] {
            return self.matrix(name, len, 1);
        }
        let end = t.offset.checked_add(t.bytes);
        if end.is_none_or(|e| e > self.file.len() as u64)
            || t.dtype.row_bytes(len).map(|b| b as u64) != Some(t.bytes)
        {
            return Err(ModelError::Shape {
                name: name.to_owned(),
                got: t.shape.clone(),
                want: vec![len as u64],
            });
        }
        Ok(Matrix {
            dtype: t.dtype,
            cols: len,
            rows: 1,
            layout: Layout::Plain,
            start: t.offset as usize,
            len: t.bytes as usize,
            in_file: true,
        })
    }
}
