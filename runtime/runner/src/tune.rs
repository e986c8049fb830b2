//! `runner tune`: measures threads and spinning for this machine and model, keeps the best.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use myq_engine::topology::{Machine, Mask, Want};
use myq_engine::tune::{Key, Store, Tuned};
use myq_engine::{Engine, KernelChoice, Options};
use myq_model::sample::argmax;
use serde::Serialize;

use crate::args::Tune;
use crate::load::Outcome;

/// Times of spinning that are tried, in microseconds; the first goes with every number of
/// threads, the others with the best numbers.
const SPINS: [u64; 4] = [100, 0, 20, 1000];
/// Numbers of threads that the other times are tried with.
const FINALISTS: usize = 3;
/// A candidate as good as the best but for this share is preferred if it takes less.
const NEAR: f64 = 0.98;
/// Tokens before a measurement: threads wake, pages come.
const WARM_UP: u32 = 2;
/// A measurement ends after this time, with fewer tokens than asked for, but at least four.
const LONG: Duration = Duration::from_secs(2);

#[derive(Serialize)]
struct Candidate {
    threads: usize,
    spin_us: u64,
    /// Median.
    tokens_per_second: f64,
    spread: [f64; 2],
    #[serde(skip)]
    rates: Vec<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a str,
    model: String,
    kernels: &'a str,
    candidates: &'a [Candidate],
    best: &'a Tuned,
    stored: String,
}

pub(crate) fn tune(options: &Tune) -> Outcome {
    let path = Store::path()
        .ok_or("neither XDG_CONFIG_HOME nor HOME is set, so settings have no place to be kept")?;
    if options.show {
        return show(&path, options.json);
    }
    let Some(model) = &options.model else {
        return forget_all(&path);
    };
    let kernels = KernelChoice::from_name(&options.kernels).ok_or_else(|| {
        let names = KernelChoice::NAMES.map(|(n, _)| n).join(", ");
        format!("--kernels {}: known are {names}", options.kernels)
    })?;
    if options.tokens == 0 || options.repeat == 0 {
        return Err("tune needs at least 1 token and 1 measurement of each candidate".into());
    }
    let first = Options {
        context: Some(64.max(options.tokens.saturating_add(16))),
        batch: 16,
        kernels,
        ..Options::default()
    };
    // Brings the file into memory, and tells at once what is wrong with it.
    let engine = Engine::open(model, &first, &mut |_, _| {})?;
    let machine = Machine::here();
    let key = Key::of(&machine, engine.file().bytes(), kernels);
    let name = engine.kernels();
    drop(engine);
    if options.forget {
        return forget(&path, &key);
    }
    let candidates = measure_all(model, &first, options, &machine)?;
    let best = choose(&candidates);
    let mut store = Store::load(&path);
    store.set(key.clone(), best.clone());
    store.save(&path)?;
    let report = Report {
        machine: &key.machine,
        model: model.display().to_string(),
        kernels: name,
        candidates: &candidates,
        best: &best,
        stored: path.display().to_string(),
    };
    print(&report, options.json)
}

/// All numbers of threads, then the best of them with other times of spinning.
fn measure_all(
    model: &Path,
    first: &Options,
    options: &Tune,
    machine: &Machine,
) -> Outcome<Vec<Candidate>> {
    let affinity = Mask::current().map(|m| m.cpus());
    let want = Want {
        affinity: affinity.as_deref(),
        ..Want::default()
    };
    let threads = machine.candidates(&want);
    let finalists = FINALISTS.min(threads.iter().filter(|&&t| t > 1).count());
    let steps = options.repeat * (threads.len() + finalists * (SPINS.len() - 1));
    let bar = ProgressBar::new(steps as u64);
    bar.set_style(ProgressStyle::with_template(
        "measuring {bar:30} {pos}/{len} {msg}",
    )?);
    // The candidates are wide on purpose: what is unwise about one is not news.
    let level = log::max_level();
    log::set_max_level(log::LevelFilter::Error);
    let outcome = (|| {
        let mut round: Vec<Candidate> = threads.iter().map(|&t| candidate(t, SPINS[0])).collect();
        interleaved(&mut round, model, first, options, &bar)?;
        round.sort_by(|a, b| b.tokens_per_second.total_cmp(&a.tokens_per_second));
        let best = round.iter().filter(|c| c.threads > 1).take(FINALISTS);
        let mut last: Vec<Candidate> = best
            .flat_map(|c| SPINS[1..].iter().map(|&s| candidate(c.threads, s)))
            .collect();
        interleaved(&mut last, model, first, options, &bar)?;
        round.extend(last);
        round.sort_by_key(|c| (c.threads, c.spin_us));
        Ok(round)
    })();
    log::set_max_level(level);
    bar.finish_and_clear();
    outcome
}

fn candidate(threads: usize, spin_us: u64) -> Candidate {
    Candidate {
        threads,
        spin_us,
        tokens_per_second: 0.0,
        spread: [0.0; 2],
        rates: Vec::new(),
    }
}

/// One measurement of each after the other, so that a change of clock or load meets all.
fn interleaved(
    candidates: &mut [Candidate],
    model: &Path,
    first: &Options,
    options: &Tune,
    bar: &ProgressBar,
) -> Outcome {
    for _ in 0..options.repeat {
        for c in candidates.iter_mut() {
            bar.set_message(format!("{} threads, {} µs", c.threads, c.spin_us));
            let settings = Options {
                threads: Some(c.threads),
                spin: Some(Duration::from_micros(c.spin_us)),
                prewarm: false,
                verify: false,
                ..*first
            };
            c.rates.push(once(model, &settings, options.tokens)?);
            bar.inc(1);
        }
    }
    for c in candidates.iter_mut() {
        c.rates.sort_by(f64::total_cmp);
        c.tokens_per_second = c.rates[c.rates.len() / 2];
        c.spread = [c.rates[0], c.rates[c.rates.len() - 1]];
    }
    Ok(())
}

/// Decoded tokens a second.
fn once(model: &Path, settings: &Options, tokens: usize) -> Outcome<f64> {
    let mut engine = Engine::open(model, settings, &mut |_, _| {})?;
    let mut token = 0;
    for _ in 0..WARM_UP {
        token = argmax(engine.step(token)?);
    }
    // Model or memory may hold less than was asked for.
    let tokens = tokens.min(engine.plan().context.saturating_sub(WARM_UP as usize));
    let (start, mut done) = (Instant::now(), 0);
    while done < tokens && (done < 4 || start.elapsed() < LONG) {
        token = argmax(engine.step(token)?);
        done += 1;
    }
    Ok(done as f64 / start.elapsed().as_secs_f64())
}

/// The fastest; among those about as fast the one with the fewest threads, then the one that
/// spins least: they leave most to others.
fn choose(candidates: &[Candidate]) -> Tuned {
    let rates = candidates.iter().map(|c| c.tokens_per_second);
    let enough = rates.fold(0.0, f64::max) * NEAR;
    let near = candidates.iter().filter(|c| c.tokens_per_second >= enough);
    let best = near.min_by_key(|c| (c.threads, c.spin_us));
    best.map_or(
        Tuned {
            threads: 1,
            spin_us: SPINS[0],
            tokens_per_second: 0.0,
        },
        |c| Tuned {
            threads: c.threads,
            spin_us: c.spin_us,
            tokens_per_second: c.tokens_per_second,
        },
    )
}

fn print(report: &Report<'_>, json: bool) -> Outcome {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(report)?)?;
        return Ok(());
    }
    writeln!(out, "{}\n{} kernels\n", report.machine, report.kernels)?;
    writeln!(out, "threads  spin µs  decode tokens/s")?;
    let best = report.best;
    for c in report.candidates {
        let mark = match (c.threads, c.spin_us) == (best.threads, best.spin_us) {
            true => "  <- best",
            false => "",
        };
        writeln!(
            out,
            "{:>7}  {:>7}  {:>8.2}   ({:.2} – {:.2}){mark}",
            c.threads, c.spin_us, c.tokens_per_second, c.spread[0], c.spread[1]
        )?;
    }
    writeln!(
        out,
        "\nstored in {}: this model now runs with {} threads and {} µs of spinning, unless flags say otherwise",
        report.stored, best.threads, best.spin_us
    )?;
    Ok(())
}

fn show(path: &Path, json: bool) -> Outcome {
    let store = Store::load(path);
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(&store)?)?;
        return Ok(());
    }
    if store.machines.is_empty() {
        writeln!(out, "nothing is stored in {}", path.display())?;
    }
    for (machine, models) in &store.machines {
        writeln!(out, "{machine}")?;
        for (model, t) in models {
            writeln!(
                out,
                "  {model}: {} threads, {} µs of spinning, {:.2} tokens/s",
                t.threads, t.spin_us, t.tokens_per_second
            )?;
        }
    }
    Ok(())
}

fn forget(path: &Path, key: &Key) -> Outcome {
    let mut store = Store::load(path);
    let found = store.forget(key);
    if found {
        store.save(path)?;
    }
    let said = if found {
        "forgotten"
    } else {
        "nothing was stored"
    };
    writeln!(std::io::stdout(), "{said}: {}", key.model)?;
    Ok(())
}

fn forget_all(path: &Path) -> Outcome {
    match std::fs::remove_file(path) {
        Ok(()) => writeln!(std::io::stdout(), "removed {}", path.display())?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            writeln!(std::io::stdout(), "nothing is stored in {}", path.display())?;
        }
        Err(e) => return Err(format!("cannot remove {}: {e}", path.display()).into()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rated(threads: usize, spin_us: u64, rate: f64) -> Candidate {
        Candidate {
            tokens_per_second: rate,
            ..candidate(threads, spin_us)
        }
    }

    #[test]
    fn the_fastest_wins_and_a_near_one_that_takes_less() {
        let best = choose(&[
            rated(1, 100, 5.0),
            rated(2, 0, 8.0),
            rated(2, 20, 9.9),
            rated(2, 100, 9.95),
            rated(3, 100, 10.0),
            rated(8, 100, 4.0),
        ]);
        assert_eq!((best.threads, best.spin_us), (2, 20));
        let best = choose(&[rated(1, 100, 5.0), rated(4, 100, 10.0)]);
        assert_eq!((best.threads, best.tokens_per_second), (4, 10.0));
    }
}
