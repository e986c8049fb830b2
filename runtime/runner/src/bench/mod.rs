//! `runner bench`: prompt and decode speed, the memory's, and what decoding waits for.

mod counters;
mod measure;
mod report;
mod verdict;

use std::io::{StdoutLock, Write};

use indicatif::{ProgressBar, ProgressStyle};
use myq_engine::bandwidth::{Pages, Seats};
use myq_engine::map::page_size;
use myq_engine::repack::Repack;
use myq_engine::{Engine, Mapped, Options, bandwidth, memory};
use serde::Serialize;

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
        processors: std::thread::available_parallelism().map_or(1, usize::from),
    };
    if work.prompt_tokens == 0 || work.decode_tokens < 2 || work.repeat == 0 {
        return Err("bench needs at least 1 prompt token, 2 decode tokens and 1 run".into());
    }
    if options.bandwidth_only {
        let probe = Probe::of(options, work.processors)?;
        let ceiling = ceiling(&probe, &bandwidth::thread_counts(probe.most_threads))?;
        let table = Bandwidth::new(&ceiling);
        show(options, &table, |out| table.print(out))
    } else if options.sweep {
        let reports = sweep(options, &work)?;
        show(options, &reports, |out| report::print_sweep(&reports, out))
    } else {
        let report = single(options, &work)?;
        show(options, &report, |out| report.print(out))
    }
}

/// On standard output, as JSON or by `print`.
fn show(
    options: &Bench,
    value: &impl Serialize,
    print: impl FnOnce(&mut StdoutLock<'_>) -> std::io::Result<()>,
) -> Outcome {
    let mut out = std::io::stdout().lock();
    if options.json {
        writeln!(out, "{}", serde_json::to_string_pretty(value)?)?;
    } else {
        print(&mut out)?;
    }
    Ok(())
}

/// What has to be known before the model is opened in earnest.
struct Probe {
    /// Threads that it will run with, and the most that a table goes to.
    threads: usize,
    most_threads: usize,
    /// Bytes of weights that a token reads.
    bytes_per_token: usize,
    /// Share of the file in memory.
    resident: Option<f64>,
    /// Pages that the weights will lie in, and where threads run.
    seats: Seats,
}

impl Probe {
    fn of(options: &Bench, processors: usize) -> Outcome<Probe> {
        let resident = Mapped::open(&options.model.model)?.residency();
        let wanted = options.model.options()?;
        let engine_options = Options {
            prewarm: false,
            verify: false,
            lock: false,
            renew_pages: false,
            repack: Repack::Never,
            ..wanted
        };
        let engine = Engine::open(&options.model.model, &engine_options, &mut |_, _| {})?;
        let threads = engine.plan().threads;
        let asked = wanted.threads.is_some();
        let copied = engine.repack().is_some() && wanted.repack != Repack::Never;
        // Nothing of a cold file is read before its start is timed.
        let warm = resident.is_some_and(|share| share > 0.9);
        let pages = match copied || wanted.renew_pages || !warm || options.speed_only {
            true => Pages::Large,
            false => pages_of(engine.file()),
        };
        Ok(Probe {
            threads,
            most_threads: if asked { threads } else { processors.min(16) },
            bytes_per_token: engine.source().weights.bytes_per_token(),
            resident,
            seats: Seats {
                pages,
                pin: wanted.pin,
                node: engine.placement().node,
            },
        })
    }
}

/// The pages of a file that is in memory.
fn pages_of(file: &Mapped) -> Pages {
    let all = file.bytes();
    let sum = all
        .iter()
        .step_by(page_size())
        .fold(0u8, |s, b| s.wrapping_add(*b));
    std::hint::black_box(sum);
    match memory::in_large_pages(all) {
        Some(share) if share < 0.5 => Pages::Small,
        _ => Pages::Large,
    }
}

/// The read test, beside what a token of this model reads.
fn ceiling(probe: &Probe, threads: &[usize]) -> Outcome<Ceiling> {
    let bar = bar("reading memory", threads.len() as u64)?;
    let ceiling = Ceiling::measure(
        probe.bytes_per_token,
        probe.seats,
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
    let probe = Probe::of(options, work.processors)?;
    let ceiling = match (options.speed_only, probe.threads) {
        (true, _) => None,
        (_, 1) => Some(ceiling(&probe, &[1])?),
        (_, n) => Some(ceiling(&probe, &[1, n])?),
    };
    let mut engine = load::open(&options.model)?;
    let (mut report, runs) = speed(&mut engine, options, work, probe.resident)?;
    if let Some(ceiling) = ceiling {
        let empty = measure::empty_rate(&mut engine, work.decode_tokens)?;
        let mut m = measure::measured(&engine, work, &runs, &ceiling, (empty, empty));
        // It may hold a copy of the weights, and there need not be room for two.
        drop(engine);
        if m.threads > 1 {
            m.single_rate = measure::empty_rate(&mut again(options, 1)?, work.decode_tokens)?;
        }
        report.judged = Some(Judged::new(&ceiling, &m, verdict::verdict(&m)));
    }
    Ok(report)
}

/// The table of `--sweep`: every number of threads.
fn sweep(options: &Bench, work: &Work) -> Outcome<Vec<Report>> {
    let probe = Probe::of(options, work.processors)?;
    let counts = bandwidth::thread_counts(probe.most_threads);
    let ceiling = ceiling(&probe, &counts)?;
    // Reads the file ahead and checks it, once for all rows.
    drop(load::open(&options.model)?);
    let (mut reports, mut single) = (Vec::new(), None);
    for threads in counts {
        let mut engine = again(options, threads)?;
        let (mut report, runs) = speed(&mut engine, options, work, probe.resident)?;
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
        renew_pages: false,
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
        large_page_share: engine.in_large_pages(),
        judged: None,
    };
    Ok((report, runs))
}
