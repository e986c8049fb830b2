//! `runner bench`: prompt and decode speed, the memory's, and what decoding waits for.

mod counters;
mod measure;
mod report;
mod verdict;

use std::io::Write;

use indicatif::{ProgressBar, ProgressStyle};
use myq_engine::{Engine, Mapped, Options, bandwidth, default_threads, memory};
use myq_model::Source;

use crate::args::Bench;
use crate::load::{self, Outcome};
use measure::{Ceiling, Runs, Work, median};
use report::{Bandwidth, Judged, Report};

/// Runs when `--repeat` is not given: of one set-up, and of each in a sweep.
const REPEAT: usize = 5;
const REPEAT_SWEEP: usize = 3;

pub(crate) fn bench(options: &Bench) -> Outcome {
    let default = if options.sweep { REPEAT_SWEEP } else { REPEAT };
    let work = Work {
        prompt_tokens: options.prompt_tokens,
        decode_tokens: options.decode_tokens,
        repeat: options.repeat.unwrap_or(default),
    };
    if work.prompt_tokens == 0 || work.decode_tokens < 2 || work.repeat == 0 {
        return Err("bench needs at least 1 prompt token, 2 decode tokens and 1 run".into());
    }
    let mut out = std::io::stdout().lock();
    if options.bandwidth_only {
        let ceiling = ceiling(options, &bandwidth::thread_counts(most_threads(options)?))?;
        let table = Bandwidth::new(&ceiling);
        return Ok(match options.json {
            true => writeln!(out, "{}", serde_json::to_string_pretty(&table)?)?,
            false => table.print(&mut out)?,
        });
    }
    if options.sweep {
        let reports = sweep(options, &work)?;
        return Ok(match options.json {
            true => writeln!(out, "{}", serde_json::to_string_pretty(&reports)?)?,
            false => report::print_sweep(&reports, &mut out)?,
        });
    }
    let report = single(options, &work)?;
    Ok(match options.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?,
        false => report.print(&mut out)?,
    })
}

fn most_threads(options: &Bench) -> Outcome<usize> {
    match options
        .model
        .options()?
        .threads
        .unwrap_or_else(default_threads)
    {
        n @ 1..=1024 => Ok(n),
        n => Err(format!("--threads {n}: give 1 to 1024").into()),
    }
}

/// The read test, beside what a token of this model reads.
fn ceiling(options: &Bench, threads: &[usize]) -> Outcome<Ceiling> {
    let path = &options.model.model;
    let file = Mapped::open(path)?;
    let source = Source::open(file.bytes()).map_err(|e| format!("{}: {e}", path.display()))?;
    let bar = bar("reading memory", threads.len() as u64)?;
    let ceiling = Ceiling::measure(
        source.weights.bytes_per_token(),
        threads,
        &mut |done, of| {
            bar.set_length(of);
            bar.set_position(done);
        },
    );
    bar.finish_and_clear();
    ceiling
}

fn bar(what: &'static str, steps: u64) -> Outcome<ProgressBar> {
    let bar = ProgressBar::new(steps).with_message(what);
    bar.set_style(ProgressStyle::with_template("{msg} {bar:30} {pos}/{len}")?);
    Ok(bar)
}

/// One set-up: speed, and unless `--speed-only` the memory's speed and a verdict.
fn single(options: &Bench, work: &Work) -> Outcome<Report> {
    // Before anything reads the file.
    let resident = Mapped::open(&options.model.model)?.residency();
    let threads = most_threads(options)?;
    let ceiling = match (options.speed_only, threads) {
        (true, _) => None,
        (_, 1) => Some(ceiling(options, &[1])?),
        _ => Some(ceiling(options, &[1, threads])?),
    };
    let mut engine = load::open(&options.model)?;
    let (mut report, runs) = speed(&mut engine, options, work, resident)?;
    if let Some(ceiling) = ceiling {
        let empty = measure::empty_rate(&mut engine, work.decode_tokens)?;
        let single = match threads {
            1 => empty,
            _ => measure::empty_rate(&mut again(options, 1)?, work.decode_tokens)?,
        };
        let m = measure::measured(&engine, work, &runs, &ceiling, (empty, single));
        report.judged = Some(Judged::new(&ceiling, &m, verdict::verdict(&m)));
    }
    Ok(report)
}

/// The table of `--sweep`: every number of threads.
fn sweep(options: &Bench, work: &Work) -> Outcome<Vec<Report>> {
    let resident = Mapped::open(&options.model.model)?.residency();
    let counts = bandwidth::thread_counts(most_threads(options)?);
    let ceiling = ceiling(options, &counts)?;
    // Reads the file ahead and checks it, once for all rows.
    drop(load::open(&options.model)?);
    let (mut reports, mut single) = (Vec::new(), None);
    for threads in counts {
        let mut engine = again(options, threads)?;
        let (mut report, runs) = speed(&mut engine, options, work, resident)?;
        let empty = measure::empty_rate(&mut engine, work.decode_tokens)?;
        // The first row is the one with one thread.
        let single = *single.get_or_insert(empty);
        let m = measure::measured(&engine, work, &runs, &ceiling, (empty, single));
        report.judged = Some(Judged::new(&ceiling, &m, verdict::verdict(&m)));
        reports.push(report);
    }
    Ok(reports)
}

/// The model once more, with another number of threads, unread and unchecked.
fn again(options: &Bench, threads: usize) -> Outcome<Engine> {
    let engine_options = Options {
        threads: Some(threads),
        prewarm: false,
        verify: false,
        ..options.model.options()?
    };
    Ok(Engine::open(
        &options.model.model,
        &engine_options,
        &mut |_, _| {},
    )?)
}

/// Prompt and decode speed of an engine that was just opened; `resident` is the share of the
/// file that was in memory before.
fn speed(
    engine: &mut Engine,
    options: &Bench,
    work: &Work,
    resident: Option<f64>,
) -> Outcome<(Report, Runs)> {
    let needed = work.prompt_tokens.saturating_add(work.decode_tokens);
    if needed > engine.plan().context {
        return Err(format!(
            "{needed} tokens do not fit into the context of {}; see --context",
            engine.plan().context
        )
        .into());
    }
    let first = measure::first_step(engine)?;
    let bar = bar("measuring", work.repeat as u64)?;
    let runs = measure::runs(engine, work, || bar.inc(1));
    bar.finish_and_clear();
    let runs = runs?;
    let (prompt, prompt_spread) = median(&runs.prompt);
    let (decode, decode_spread) = median(&runs.decode);
    let bytes = engine.source().weights.bytes_per_token();
    let (resident_bytes, anonymous) = memory::resident().unwrap_or_default();
    let (plan, config) = (engine.plan(), &engine.source().config);
    let report = Report {
        model: options.model.model.display().to_string(),
        kernels: engine.kernels(),
        threads: plan.threads,
        gpu_layers: 0,
        prompt_tokens: work.prompt_tokens,
        decode_tokens: work.decode_tokens,
        repeat: work.repeat,
        prompt_tokens_per_second: prompt,
        prompt_spread,
        decode_tokens_per_second: decode,
        decode_spread,
        bytes_per_token: bytes,
        decode_gigabytes_per_second: bytes as f64 * decode / 1e9,
        load_seconds: engine.load_time().as_secs_f64(),
        first_token_seconds: (engine.load_time() + first).as_secs_f64(),
        cold_start: resident.map(|r| r < 0.9),
        planned_cache_bytes: plan.kv_bytes(config),
        planned_buffer_bytes: plan.buffer_bytes(config),
        resident_bytes,
        resident_anonymous_bytes: anonymous,
        judged: None,
    };
    Ok((report, runs))
}
