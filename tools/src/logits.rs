//! `myq logits`: the logits of given tokens, to compare with another program's.

use std::io::{BufWriter, Write};
use std::path::Path;

use myq_engine::{Engine, KernelChoice, Options};
use myq_format::atomic::AtomicFile;
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
            "{}: a JSON object of lists of token ids is needed, none of them empty, under the names en, zh, code",
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
    let fail = |error| ToolError::Write {
        path: out.to_owned(),
        error,
    };
    let write = |source| ToolError::write(out, source);
    let mut file = BufWriter::new(AtomicFile::create(out).map_err(fail)?);
    for tokens in &texts {
        engine.rewind(0);
        for part in tokens.chunks(batch) {
            for value in engine.feed(part, part.len())? {
                file.write_all(&value.to_le_bytes()).map_err(write)?;
            }
            bar.inc(part.len() as u64);
        }
    }
    let file = file.into_inner().map_err(|e| write(e.into_error()))?;
    file.commit().map_err(fail)?;
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
    let known = ["en", "zh", "code"];
    let object = json.as_object()?;
    if object.is_empty() || object.keys().any(|k| !known.contains(&k.as_str())) {
        return None;
    }
    // The same order that other programs are given: by name as written in the file.
    let lists: Option<Vec<Vec<u32>>> = known.iter().filter_map(|k| json.get(k)).map(list).collect();
    lists.filter(|l| l.iter().all(|tokens| !tokens.is_empty()))
}
