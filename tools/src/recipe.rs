//! Which format each tensor gets.

use myq_blocks::DType;
use myq_blocks::encode::Method;
use serde_json::{Value, json};

use crate::ToolError;
use crate::model::{Model, Tensor};

/// How a model is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Width class: 2, 3, 4, 5 or 6.
    pub bits: u8,
    /// Width class of embedding and output.
    pub embedding_bits: u8,
    /// Rounding or search of scales.
    pub method: Method,
}

/// What happens to one tensor.
#[derive(Clone, Debug)]
pub struct Step {
    /// Index of the source tensor.
    pub source: usize,
    /// Name in the result.
    pub name: String,
    /// Format in the result.
    pub dtype: DType,
    /// What is unusual about it, for people: a wider format than the recipe says, or a part
    /// that serves twice.
    pub note: Option<String>,
}

impl Recipe {
    /// A uniform recipe.
    pub fn uniform(bits: u8, method: Method) -> Result<Recipe, ToolError> {
        super_format(bits)?;
        Ok(Recipe {
            bits,
            embedding_bits: bits.max(6),
            method,
        })
    }

    /// `uniform-3`.
    pub fn from_name(name: &str, method: Method) -> Result<Recipe, ToolError> {
        let bits = name.strip_prefix("uniform-").and_then(|b| b.parse().ok());
        match bits {
            Some(bits) => Recipe::uniform(bits, method),
            None => Err(ToolError::Setting(format!(
                "recipe `{name}` is not known; known are uniform-2, -3, -4, -5 and -6"
            ))),
        }
    }

    /// Name, as stored in the file.
    pub fn name(&self) -> String {
        format!("uniform-{}", self.bits)
    }

    /// Form stored in the file.
    pub fn as_json(&self) -> Value {
        let method = match self.method {
            Method::Round => "round",
            Method::Search => "search",
        };
        json!({ "name": self.name(), "bits": self.bits, "embedding_bits": self.embedding_bits, "method": method })
    }

    /// The format of every tensor of the result.
    pub fn plan(&self, model: &Model, tie: bool) -> Result<Vec<Step>, ToolError> {
        let (body, embedding) = (super_format(self.bits)?, super_format(self.embedding_bits)?);
        let tied = tie && is_tied(model);
        let mut steps = Vec::new();
        for (source, t) in model.tensors.iter().enumerate() {
            let mut name = t.name.clone();
            if tied && name == "token_embd.weight" {
                continue;
            }
            let wide = matches!(name.as_str(), "token_embd.weight" | "output.weight");
            let mut note = None;
            if tied && name == "output.weight" {
                name = "token_embd.weight".into();
                note = Some("serves as the embedding too, which is a copy of it (--keep-output stores both)".into());
            }
            let (dtype, wider) = if t.is_matrix() {
                matrix_format(t, if wide { embedding } else { body })
            } else {
                (DType::F32, None)
            };
            let note = wider.or(note);
            steps.push(Step {
                source,
                name,
                dtype,
                note,
            });
        }
        Ok(steps)
    }
}

fn super_format(bits: u8) -> Result<DType, ToolError> {
    Ok(match bits {
        2 => DType::Q2K,
        3 => DType::Q3K,
        4 => DType::Q4K,
        5 => DType::Q5K,
        6 => DType::Q6K,
        other => {
            return Err(ToolError::Setting(format!(
                "{other} bits are not a width class; choose 2, 3, 4, 5 or 6"
            )));
        }
    })
}

fn matrix_format(t: &Tensor, wanted: DType) -> (DType, Option<String>) {
    if wanted.row_bytes(t.cols()).is_some() {
        return (wanted, None);
    }
    let note = format!("kept as F16: {} columns are not a multiple of 32", t.cols());
    (DType::F16, Some(note))
}

/// Whether the source's separate output is a copy of its embedding: the same numbers, or, in
/// a GGUF file, the same numbers in another quantised format, as files of tied models have it.
/// One 6-bit copy then serves as both.
fn is_tied(model: &Model) -> bool {
    let (Some(a), Some(b)) = (
        model.tensor("token_embd.weight"),
        model.tensor("output.weight"),
    ) else {
        return false;
    };
    if a.shape != b.shape {
        return false;
    }
    // Unquantised copies are equal; a 4-bit copy is at a cosine above 0.995, a 3-bit one at 0.98,
    // and an output that was trained apart from the embedding far below.
    let float = |t: &Tensor| matches!(t.dtype, DType::F32 | DType::F16 | DType::BF16);
    let coarse = |t: &Tensor| matches!(t.dtype, DType::Q2K | DType::Q3K);
    let enough = match () {
        () if float(a) && float(b) => 1.0 - 1e-6,
        () if coarse(a) || coarse(b) => 0.95,
        () => 0.993,
    };
    // Rows spread over the vocabulary.
    (0..64).map(|i| i * a.rows() / 64).all(|r| {
        let (x, y) = (model.rows(a, r..r + 1), model.rows(b, r..r + 1));
        let dot = |x: &[f32], y: &[f32]| {
            x.iter()
                .zip(y)
                .map(|(x, y)| f64::from(*x) * f64::from(*y))
                .sum::<f64>()
        };
        let (xx, yy) = (dot(&x, &x), dot(&y, &y));
        if xx == 0.0 || yy == 0.0 {
            xx == yy
        } else {
            dot(&x, &y) / (xx * yy).sqrt() > enough
        }
    })
}
