//! The list at the end of every quantisation: whether the file is what it should be.
//!
//! 1. *Bytes*: read back, compared with their checksums, unpacked and packed to the same bytes.
//! 2. *Bit order*: the runtime's kernels on the file, against plain arithmetic on its unpacked
//!    weights.
//! 3. *Steps*: how many groups of weights are, in the root mean square, more than half a step
//!    from the source.
//! 4. *Layers*: how alike hidden states are to the source's; the first one under 0.95 is named.
//! 5. *First token*: the logits of an answer's first token beside the source's.
//! 6. *Answers*: four of the twenty prompts, looked through for repetition, another language and
//!    garbage. A small source has such faults too: half of them may.
//!
//! The first two say whether the file is sound, and are errors where they fail. The others say
//! how good it is; they are expected to hold at 5 and 6 bits, and are only told at fewer.

use std::path::{Path, PathBuf};

use myq_blocks::decode::decode;
use myq_blocks::encode::Grid;
use myq_blocks::{Layout, tail};
use myq_engine::KernelChoice;
use myq_model::Activations;
use myq_model::tokenizer::encode_prompt;
use rayon::prelude::*;
use serde::Serialize;

use crate::compare::{BROKEN, Comparison, compare, cosine};
use crate::eval::health::{self, Health};
use crate::eval::{self, Setup};
use crate::model::{Model, Tensor};
use crate::{ToolError, verify};

/// What is read by both models.
pub const PROMPT: &str =
    "The three primary colours are red, yellow and blue. 量化把权重映射到有限个格点上。";
/// Least cosine of the runtime's logits to plain arithmetic's, whose inputs are not rounded.
const SAME: f64 = 0.99;
/// Least cosine of the first answer's logits to the source's at 5 and 6 bits.
const ALIKE: f64 = 0.99;
/// Most groups that may be farther than half a step, as a share, at 5 and 6 bits.
const FAR: f64 = 0.01;
/// Prompts that are answered, one of each kind, and the tokens of an answer.
const ASKED: ([&str; 4], usize) = (
    ["qa-en-2", "code-zh-1", "translation-1", "continuation-en-3"],
    48,
);

/// One line of the list.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// What was looked at.
    pub what: &'static str,
    /// Whether it is as it should be; none where it is only told.
    pub holds: Option<bool>,
    /// What was found.
    pub found: String,
}

/// The list.
#[derive(Clone, Debug, Serialize)]
pub struct SelfCheck {
    /// Its lines.
    pub checks: Vec<Check>,
    /// Layer by layer.
    pub comparison: Comparison,
    /// Answers.
    pub answers: Health,
}

/// How single weights of a result are related to the source's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weights {
    /// Each is the nearest that its scale allows.
    Nearest,
    /// They make up for each other, and may be farther than half a step.
    Compensated,
    /// Scales of channels were folded into neighbours: they cannot be compared.
    Folded,
}

/// Checks `out`, made from `source`.
///
/// # Errors
/// A file that is not sound: it does not match its checksums, does not unpack, or the kernels
/// read something else than what was written.
pub fn check(source: &Model, out: &Path, weights: Weights) -> Result<SelfCheck, ToolError> {
    let model = Model::open(out)?;
    let sound = verify::verify(&model, None)?;
    let tokens = encode_prompt(&model.tokenizer, PROMPT, false);
    let comparison = compare(source, &model, &tokens)?;
    let setup = Setup {
        text: PathBuf::new(),
        context: tokens.len().max(64),
        windows: None,
        activations: Activations::Int8,
        kernels: KernelChoice::Auto,
        threads: None,
    };
    let by_kernels = {
        let mut engine = eval::open(out, &setup)?;
        cosine(engine.feed(&tokens, 1)?, &comparison.logits[1])
    };
    if by_kernels < SAME {
        return Err(ToolError::Verify {
            path: out.to_owned(),
            problem: format!(
                "the kernels of this machine and plain arithmetic on the same weights give different logits, cosine {by_kernels:.4}; please report this with the processor's name, and try `runner --kernels scalar`"
            ),
        });
    }
    let far = (weights != Weights::Folded).then(|| far_groups(source, &model));
    let answers = health::health(out, &ASKED.0, ASKED.1, &setup)?;
    let fine = model.tensors.iter().filter(|t| t.is_matrix()).all(|t| {
        let same = origin(source, t).is_some_and(|from| from.dtype == t.dtype);
        same || t.row_bytes() * 8 >= t.cols() * 5
    });
    let told = |holds: bool| fine.then_some(holds);
    let mut checks = vec![
        Check {
            what: "bytes",
            holds: Some(true),
            found: format!(
                "{} tensors match their checksums; {} panels and {} partial superblocks unpack and pack to the same bytes",
                sound.checksums, sound.panels, sound.partial_blocks
            ),
        },
        Check {
            what: "bit order",
            holds: Some(true),
            found: format!("kernels against plain arithmetic: cosine of logits {by_kernels:.5}"),
        },
    ];
    if let Some(far) = far {
        checks.push(Check {
            what: "steps",
            holds: told(far.share() <= FAR).filter(|_| weights == Weights::Nearest),
            found: format!(
                "{:.2} % of {} groups farther than half a step from the source{}{}",
                100.0 * far.share(),
                far.groups,
                if weights == Weights::Compensated {
                    ", to make up for others"
                } else {
                    ""
                },
                far.worst.map_or(String::new(), |(name, share)| format!(
                    "; most in {name}, {:.1} %",
                    100.0 * share
                ))
            ),
        });
    }
    let least = comparison
        .layers
        .iter()
        .min_by(|a, b| a.cosine.total_cmp(&b.cosine));
    checks.push(Check {
        what: "layers",
        holds: told(comparison.broken.is_none()),
        found: match (&comparison.broken, least) {
            (Some(b), _) => format!(
                "layer {} is the first under {BROKEN}: cosine {:.4}{}",
                b.layer,
                b.cosine,
                b.best().map_or(String::new(), |(name, cosine)| format!(
                    "; {cosine:.4} with the source's {name}"
                ))
            ),
            (None, Some(l)) => format!("least cosine {:.4}, at {}", l.cosine, l.place),
            (None, None) => String::new(),
        },
    });
    checks.push(Check {
        what: "first token",
        holds: told(comparison.first_answer >= ALIKE),
        found: format!("cosine of its logits {:.5}", comparison.first_answer),
    });
    let faults: Vec<String> = answers
        .answers
        .iter()
        .flat_map(|a| a.faults.iter().map(|f| format!("{}: {f}", a.id)))
        .collect();
    checks.push(Check {
        what: "answers",
        holds: told(2 * answers.healthy() >= answers.answers.len()),
        found: match faults.as_slice() {
            [] => format!("{} without a fault", answers.answers.len()),
            some => some.join("; "),
        },
    });
    Ok(SelfCheck {
        checks,
        comparison,
        answers,
    })
}

/// Groups of weights that share a scale.
#[derive(Clone, Debug, Default)]
struct Far {
    groups: u64,
    far: u64,
    /// The matrix with the largest share.
    worst: Option<(String, f64)>,
}

impl Far {
    fn share(&self) -> f64 {
        self.far as f64 / self.groups.max(1) as f64
    }
}

/// The tensor of the source that `t` is made from; an output that serves as the embedding too is
/// stored under the embedding's name.
fn origin<'a>(source: &'a Model, t: &Tensor) -> Option<&'a Tensor> {
    let name = match t.name.as_str() {
        "token_embd.weight" => source.output_name(),
        name => name,
    };
    source.tensor(name).or_else(|| source.tensor(&t.name))
}

/// Groups whose weights are, in the root mean square, farther than half a step from the source.
fn far_groups(source: &Model, model: &Model) -> Far {
    let mut all = Far::default();
    for t in &model.tensors {
        let grid = Grid::of(t.dtype).filter(|_| t.is_matrix());
        let (Some(grid), Some(from)) = (grid, origin(source, t)) else {
            continue;
        };
        if from.dtype == t.dtype {
            continue;
        }
        let (groups, far) = far_in(source, from, model, t, grid.sub);
        let share = far as f64 / groups.max(1) as f64;
        if far > 0 && all.worst.as_ref().is_none_or(|w| share > w.1) {
            all.worst = Some((t.name.clone(), share));
        }
        all.groups += groups;
        all.far += far;
    }
    all
}

fn far_in(source: &Model, from: &Tensor, model: &Model, t: &Tensor, sub: usize) -> (u64, u64) {
    let Some(facts) = t.dtype.facts() else {
        return (0, 0);
    };
    let (cols, row_bytes) = (t.cols(), t.row_bytes());
    let data = model.data_in(t, Layout::Plain);
    let counts = data
        .par_chunks_exact(row_bytes)
        .enumerate()
        .map(|(r, row)| {
            let wanted = source.rows(from, r..r + 1);
            let mut whole = [0; tail::MAX_BLOCK];
            let whole = &mut whole[..facts.bytes];
            let mut stored = [0.0; 256];
            let (mut groups, mut far) = (0, 0);
            for (bytes, wanted) in row.chunks(facts.bytes).zip(wanted.chunks(facts.block)) {
                let block = if wanted.len() == facts.block {
                    decode(t.dtype, bytes)
                } else {
                    tail::expand(t.dtype, bytes, wanted.len(), whole);
                    decode(t.dtype, whole)
                };
                let stored = &mut stored[..wanted.len()];
                block.dequantize(stored);
                for (i, (w, s)) in wanted.chunks(sub).zip(stored.chunks(sub)).enumerate() {
                    let step = block.d * f32::from(block.scale[i * sub / 16]);
                    let sum: f32 = w.iter().zip(s).map(|(w, s)| (w - s) * (w - s)).sum();
                    groups += 1;
                    far += u64::from((sum / w.len() as f32).sqrt() > 0.5 * step.abs() + 1e-9);
                }
            }
            (groups, far)
        });
    debug_assert_eq!(cols, from.cols());
    counts.reduce(|| (0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
}
