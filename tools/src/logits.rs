//! `myq logits`: the logits of given tokens, to compare with another program's.

use std::io::{BufWriter, Write};
use std::path::Path;

use myq_engine::{Engine, KernelChoice, Options};
use myq_model::CacheType;
use serde_json::Value;

use crate::{ToolError, progress};

/// Writes the logits of every position of every text in `tokens` (a JSON object of lists, in
/// its order) as little-endian fp32, positions × vocabulary; gives the number of positions.
pub fn logits(
    model: &Path,
    tokens: &Path,
    out: &Path,
    kernels: KernelChoice,
    threads: Option<usize>,
    batch: usize,
) -> Result<usize, ToolError> {
    let read = |error| ToolError::Read {
        path: tokens.to_owned(),
        error,
    };
    let text = std::fs::read_to_string(tokens).map_err(read)?;
    let texts = parse(&text).ok_or_else(|| {
        ToolError::Setting(format!(
            "{}: a JSON object of lists of token ids is needed",
            tokens.display()
        ))
    })?;
    let longest = texts.iter().map(Vec::len).max().unwrap_or(1);
    // Exact arithmetic keeps exact keys and values too.
    let cache = if kernels == KernelChoice::Exact {
        CacheType::F32
    } else {
        CacheType::F16
    };
    let options = Options {
        cache,
        kernels,
        threads,
        context: Some(longest),
        batch,
        logit_rows: batch,
        ..Options::default()
    };
    let mut engine = Engine::open(model, &options, &mut |_, _| {})?;
    let total: usize = texts.iter().map(Vec::len).sum();
    let bar = progress::bar(total as u64, "computing logits");
    let write = |error| ToolError::Read {
        path: out.to_owned(),
        error,
    };
    let mut file = BufWriter::new(std::fs::File::create(out).map_err(write)?);
    for tokens in &texts {
        engine.rewind(0);
        for part in tokens.chunks(batch) {
            for value in engine.feed(part, part.len())? {
                file.write_all(&value.to_le_bytes()).map_err(write)?;
            }
            bar.inc(part.len() as u64);
        }
    }
    file.flush().map_err(write)?;
    bar.finish_and_clear();
    Ok(total)
}

fn parse(text: &str) -> Option<Vec<Vec<u32>>> {
    let json: Value = serde_json::from_str(text).ok()?;
    let list = |v: &Value| {
        v.as_array()?
            .iter()
            .map(|id| u32::try_from(id.as_u64()?).ok())
            .collect()
    };
    // The same order that other programs are given: by name as written in the file.
    ["en", "zh", "code"]
        .iter()
        .filter_map(|k| json.get(k))
        .map(list)
        .collect()
}
