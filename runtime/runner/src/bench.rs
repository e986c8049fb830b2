//! `runner bench`: prompt and decode speed, and the bytes that decoding reads.

use std::io::Write;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use myq_engine::{Engine, memory};
use myq_model::sample::argmax;
use serde::Serialize;

use crate::args::Bench;
use crate::load::{self, Outcome};

#[derive(Serialize)]
struct Result {
    model: String,
    kernels: &'static str,
    threads: usize,
    prompt_tokens: usize,
    decode_tokens: usize,
    repeat: usize,
    prompt_tokens_per_second: f64,
    prompt_spread: [f64; 2],
    decode_tokens_per_second: f64,
    decode_spread: [f64; 2],
    bytes_per_token: usize,
    decode_gigabytes_per_second: f64,
    load_seconds: f64,
    cold_start: Option<bool>,
    planned_cache_bytes: usize,
    planned_buffer_bytes: usize,
    resident_bytes: u64,
    resident_anonymous_bytes: u64,
}

pub(crate) fn bench(options: &Bench) -> Outcome {
    if options.prompt_tokens == 0 || options.decode_tokens < 2 || options.repeat == 0 {
        return Err("bench needs at least 1 prompt token, 2 decode tokens and 1 run".into());
    }
    let mut engine = load::open(&options.model)?;
    let needed = options.prompt_tokens.saturating_add(options.decode_tokens);
    if needed > engine.plan().context {
        return Err(format!(
            "{needed} tokens do not fit into the context of {}; see --context",
            engine.plan().context
        )
        .into());
    }
    let bar = ProgressBar::new(options.repeat as u64);
    bar.set_style(ProgressStyle::with_template(
        "measuring {bar:30} {pos}/{len}",
    )?);
    let (mut prompt, mut decode) = (Vec::new(), Vec::new());
    for _ in 0..options.repeat {
        let (p, d) = once(&mut engine, options)?;
        prompt.push(p);
        decode.push(d);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let (prompt_median, prompt_spread) = median(prompt);
    let (decode_median, decode_spread) = median(decode);
    let bytes = engine.source().weights.bytes_per_token();
    let (resident, anonymous) = memory::resident().unwrap_or_default();
    let (plan, config) = (engine.plan(), &engine.source().config);
    let result = Result {
        model: options.model.model.display().to_string(),
        kernels: engine.kernels(),
        threads: plan.threads,
        prompt_tokens: options.prompt_tokens,
        decode_tokens: options.decode_tokens,
        repeat: options.repeat,
        prompt_tokens_per_second: prompt_median,
        prompt_spread,
        decode_tokens_per_second: decode_median,
        decode_spread,
        bytes_per_token: bytes,
        decode_gigabytes_per_second: bytes as f64 * decode_median / 1e9,
        load_seconds: engine.load_time().as_secs_f64(),
        cold_start: engine
            .prewarm()
            .and_then(|r| r.resident_before)
            .map(|r| r < 0.9),
        planned_cache_bytes: plan.kv_bytes(config),
        planned_buffer_bytes: plan.buffer_bytes(config),
        resident_bytes: resident,
        resident_anonymous_bytes: anonymous,
    };
    let mut out = std::io::stdout().lock();
    if options.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&result)?)?;
    } else {
        print(&result, &mut out)?;
    }
    Ok(())
}

/// Prompt and decode tokens per second of one run.
fn once(engine: &mut Engine, options: &Bench) -> Outcome<(f64, f64)> {
    // One step unmeasured: threads wake, the first pages come.
    engine.rewind(0);
    engine.step(0)?;
    engine.rewind(0);
    let vocab = engine.source().config.vocab as u32;
    // Any tokens will do: the work does not depend on them.
    let tokens: Vec<u32> = (0..options.prompt_tokens as u32)
        .map(|i| (i * 7919 + 13) % vocab)
        .collect();
    let start = Instant::now();
    let mut token = argmax(engine.feed(&tokens, 1)?);
    let prompt = options.prompt_tokens as f64 / start.elapsed().as_secs_f64();
    // The first step is left out: it may still wait for pages or for threads to wake.
    token = argmax(engine.step(token)?);
    let start = Instant::now();
    for _ in 1..options.decode_tokens {
        token = argmax(engine.step(token)?);
    }
    let decode = (options.decode_tokens - 1) as f64 / start.elapsed().as_secs_f64();
    Ok((prompt, decode))
}

/// Median, and smallest and largest.
fn median(mut values: Vec<f64>) -> (f64, [f64; 2]) {
    values.sort_by(f64::total_cmp);
    (
        values[values.len() / 2],
        [values[0], values[values.len() - 1]],
    )
}

fn print(r: &Result, out: &mut impl Write) -> std::io::Result<()> {
    writeln!(
        out,
        "{} — {} kernels, {} threads, {} runs",
        r.model, r.kernels, r.threads, r.repeat
    )?;
    let mut line = |name: &str, n: usize, rate: f64, spread: [f64; 2]| {
        writeln!(
            out,
            "{name:<8}{n:>6} tokens {rate:>10.1} tokens/s   ({:.1} – {:.1})",
            spread[0], spread[1]
        )
    };
    line(
        "prompt",
        r.prompt_tokens,
        r.prompt_tokens_per_second,
        r.prompt_spread,
    )?;
    line(
        "decode",
        r.decode_tokens,
        r.decode_tokens_per_second,
        r.decode_spread,
    )?;
    writeln!(
        out,
        "decode reads {:.1} MB a token: {:.2} GB/s",
        r.bytes_per_token as f64 / 1e6,
        r.decode_gigabytes_per_second
    )?;
    writeln!(
        out,
        "loaded in {:.2} s from {} pages; resident {:.0} MB, of which not the file {:.0} MB",
        r.load_seconds,
        match r.cold_start {
            Some(true) => "cold",
            Some(false) => "warm",
            None => "unknown",
        },
        r.resident_bytes as f64 / 1e6,
        r.resident_anonymous_bytes as f64 / 1e6
    )
}
