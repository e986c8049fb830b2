//! Which format each tensor gets.

use myq_blocks::DType;
use myq_blocks::encode::Method;
use serde_json::{Value, json};

use crate::model::{Model, Tensor};
use crate::{ToolError, walk};

/// How a model is quantised.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// Width class: 2, 3, 4, 5 or 6.
    pub bits: u8,
    /// Which tensors get more.
    pub mix: Mix,
    /// Size that widths are chosen for, in place of both: `3.2bpw`, `700MB`.
    pub target: Option<String>,
    /// Width class of embedding and output.
    pub embedding_bits: u8,
    /// Types of single tensors, by pattern; the last that fits counts.
    pub overrides: Vec<Override>,
    /// Whether tensors whose source takes no more bytes are quantised all the same.
    pub requantize: bool,
    /// Rounding or search of scales, where there are no calibration tokens.
    pub method: Method,
    /// How matrices are quantised that calibration tokens reach, and under which name.
    pub calibrated: Option<(&'static str, walk::Method)>,
}

/// Which tensors get more bits than the width class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mix {
    /// None but embedding and output.
    Uniform,
    /// Value and attention output.
    Small,
    /// Those, and the feed-forward output of the first and last layers.
    Medium,
    /// Those, and the feed-forward output of all layers.
    Large,
}

impl Mix {
    /// All of them by name.
    pub const NAMES: [(&'static str, Mix); 4] = [
        ("uniform", Mix::Uniform),
        ("s", Mix::Small),
        ("m", Mix::Medium),
        ("l", Mix::Large),
    ];

    /// How many width classes more a matrix gets in layer `layer` of `layers`.
    fn more(self, part: &str, layer: usize, layers: usize) -> u8 {
        let edge = layer < layers.div_ceil(8) || layer >= layers - layers.div_ceil(8);
        match (self, part) {
            (Mix::Uniform, _) => 0,
            (Mix::Medium | Mix::Large, "attn_v") => 2,
            (_, "attn_v" | "attn_output") => 1,
            (Mix::Medium, "ffn_down") => u8::from(edge),
            (Mix::Large, "ffn_down") => 1,
            (Mix::Large, "attn_k" | "attn_q") => u8::from(edge),
            _ => 0,
        }
    }
}

/// A type for the tensors whose name fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// Name, in which `*` stands for anything.
    pub pattern: String,
    /// The type.
    pub dtype: DType,
}

impl std::str::FromStr for Override {
    type Err = String;

    /// `blk.*.attn_v.weight=5`: a width class, 8, 16, or the name of a type.
    fn from_str(text: &str) -> Result<Override, String> {
        let (pattern, width) = text
            .rsplit_once('=')
            .ok_or_else(|| format!("`{text}` is not PATTERN=WIDTH"))?;
        let dtype = match width {
            "8" => Some(DType::Q8_0),
            "16" => Some(DType::F16),
            "32" => Some(DType::F32),
            _ => match width.parse() {
                Ok(bits) => super_format(bits).ok(),
                Err(_) => DType::from_name(&width.to_uppercase()),
            },
        };
        Ok(Override {
            pattern: pattern.to_owned(),
            dtype: dtype.ok_or_else(|| {
                format!("`{width}` is not a width; choose 2, 3, 4, 5, 6, 8, 16 or a type as Q5_K, TQ2_0, BF16")
            })?,
        })
    }
}

impl Override {
    fn fits(&self, name: &str) -> bool {
        fits(self.pattern.as_bytes(), name.as_bytes())
    }
}

fn fits(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|skip| fits(rest, &name[skip..])),
        Some((first, rest)) => name
            .split_first()
            .is_some_and(|(n, after)| n == first && fits(rest, after)),
    }
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
    /// Whether a pattern of the recipe names it.
    pub fixed: bool,
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
            mix: Mix::Uniform,
            target: None,
            embedding_bits: bits.max(6),
            overrides: Vec::new(),
            requantize: false,
            method,
            calibrated: None,
        })
    }

    /// `uniform-3`, `s-3`, `m-2`, `l-5`.
    pub fn from_name(name: &str, method: Method) -> Result<Recipe, ToolError> {
        let found = name.rsplit_once('-').and_then(|(mix, bits)| {
            let mix = Mix::NAMES.iter().find(|m| m.0.eq_ignore_ascii_case(mix))?.1;
            Some((mix, bits.parse().ok()?))
        });
        let Some((mix, bits)) = found else {
            return Err(ToolError::Setting(format!(
                "recipe `{name}` is not known; known are uniform, s, m and l with the width class, as in m-3"
            )));
        };
        Ok(Recipe {
            mix,
            ..Recipe::uniform(bits, method)?
        })
    }

    /// Name, as stored in the file.
    pub fn name(&self) -> String {
        if let Some(target) = &self.target {
            return format!("target-{target}");
        }
        let mix = Mix::NAMES.iter().find(|m| m.1 == self.mix);
        format!("{}-{}", mix.map_or("", |m| m.0), self.bits)
    }

    /// Form stored in the file.
    pub fn as_json(&self) -> Value {
        let scales = match self.method {
            Method::Round => "round",
            Method::Search => "search",
        };
        let mut json = json!({
            "name": self.name(),
            "bits": self.bits,
            "embedding_bits": self.embedding_bits,
            "method": self.calibrated.as_ref().map_or(scales, |c| c.0),
        });
        if let Some((_, method)) = &self.calibrated {
            json["calibrated"] = method.as_json();
        }
        let overrides = self.overrides.iter();
        let overrides: Vec<String> = overrides
            .map(|o| format!("{}={}", o.pattern, o.dtype.name()))
            .collect();
        if !overrides.is_empty() {
            json["overrides"] = overrides.into();
        }
        json
    }

    /// The format of every tensor of the result.
    pub fn plan(&self, model: &Model, tie: bool) -> Result<Vec<Step>, ToolError> {
        let tied = tie && is_tied(model);
        let mut steps = Vec::new();
        let mut used = vec![false; self.overrides.len()];
        for (source, t) in model.tensors.iter().enumerate() {
            let mut name = t.name.clone();
            if tied && name == "token_embd.weight" {
                continue;
            }
            let mut note = None;
            if tied && name == "output.weight" {
                name = "token_embd.weight".into();
                note = Some("serves as the embedding too, which is a copy of it (--keep-output stores both)".into());
            }
            let fixed = self.overrides.iter().any(|o| o.fits(&t.name));
            let (dtype, other) = if t.is_matrix() {
                self.matrix_format(model, t, &mut used)?
            } else {
                (DType::F32, None)
            };
            steps.push(Step {
                source,
                name,
                dtype,
                fixed,
                note: other.or(note),
            });
        }
        match used.iter().position(|u| !u) {
            None => Ok(steps),
            Some(i) => Err(ToolError::Setting(format!(
                "no matrix has a name like `{}`; `myq inspect --tensors` lists them",
                self.overrides[i].pattern
            ))),
        }
    }

    fn matrix_format(
        &self,
        model: &Model,
        t: &Tensor,
        used: &mut [bool],
    ) -> Result<(DType, Option<String>), ToolError> {
        let overrides = self.overrides.iter().zip(used);
        let chosen = overrides.filter(|(o, _)| o.fits(&t.name)).map(|(o, used)| {
            *used = true;
            o.dtype
        });
        let chosen = chosen.last();
        let wanted = match chosen {
            Some(dtype) => dtype,
            None => super_format(self.width(model, &t.name))?,
        };
        let (dtype, note) = matrix_format(t, wanted);
        // Quantising again what is narrow already would only add error, and bytes.
        let fewer = dtype.row_bytes(t.cols()) >= Some(t.row_bytes());
        if fewer && t.dtype != dtype && !self.requantize && chosen.is_none() {
            let note = format!(
                "stays {}: the source takes no more bytes than {} would (--requantize quantises it all the same)",
                t.dtype.name(),
                dtype.name()
            );
            return Ok((t.dtype, Some(note)));
        }
        Ok((dtype, note))
    }

    /// Width class of a matrix.
    fn width(&self, model: &Model, name: &str) -> u8 {
        if matches!(name, "token_embd.weight" | "output.weight") {
            return self.embedding_bits;
        }
        let mut parts = name.split('.').skip(1);
        let layer = parts.next().and_then(|l| l.parse().ok()).unwrap_or(0);
        let part = parts.next().unwrap_or_default();
        let more = self.mix.more(part, layer, model.config.layers);
        (self.bits + more).min(6)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_as_people_expect() {
        let o = |text: &str| text.parse::<Override>();
        let v = o("blk.*.attn_v.weight=5").expect("well-formed");
        assert_eq!(v.dtype, DType::Q5K);
        assert!(v.fits("blk.0.attn_v.weight") && v.fits("blk.27.attn_v.weight"));
        assert!(!v.fits("blk.0.attn_k.weight"));
        assert!(o("*=8").expect("well-formed").fits("output.weight"));
        assert!(
            o("blk.1.*=q6_k")
                .expect("well-formed")
                .fits("blk.1.ffn_up.weight")
        );
        assert!(
            !o("blk.1.*=6")
                .expect("well-formed")
                .fits("blk.11.ffn_up.weight")
        );
        for bad in ["blk.*", "a=7", "a=", "a=Q9"] {
            assert!(o(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn larger_mixes_never_take_bits_away() {
        for part in [
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        ] {
            for layer in 0..28 {
                let more: Vec<u8> = Mix::NAMES
                    .iter()
                    .map(|m| m.1.more(part, layer, 28))
                    .collect();
                assert!(more.is_sorted(), "{part} {layer} {more:?}");
            }
        }
    }
}
