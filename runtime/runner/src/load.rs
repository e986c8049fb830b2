//! Opening a model with progress.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use myq_engine::Engine;

use crate::args::ModelArguments;

/// Errors are shown to people and end the program.
pub(crate) type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Opens the model; a bar appears where that takes over half a second.
pub(crate) fn open(arguments: &ModelArguments) -> Outcome<Engine> {
    let options = arguments.options()?;
    let bar = ProgressBar::no_length().with_message("reading and checking the model");
    bar.set_style(ProgressStyle::with_template(
        "{msg} {bar:30} {bytes}/{total_bytes}",
    )?);
    let mut progress = |done: u64, total: u64| {
        if bar.elapsed() > Duration::from_millis(500) {
            bar.set_length(total);
            bar.set_position(done);
        }
    };
    let engine = Engine::open(&arguments.model, &options, &mut progress);
    bar.finish_and_clear();
    let engine = engine?;
    report(&engine);
    Ok(engine)
}

fn report(engine: &Engine) {
    let (c, p) = (&engine.source().config, engine.plan());
    log::info!(
        "{} kernels, {} threads, context {}: cache {:.1} MB at most, buffers {:.1} MB, opened in {:.0} ms",
        engine.kernels(),
        p.threads,
        p.context,
        p.kv_bytes(c) as f64 / 1e6,
        p.buffer_bytes(c) as f64 / 1e6,
        engine.load_time().as_secs_f64() * 1e3,
    );
    if let Some(r) = engine.repack() {
        let mb = r.bytes as f64 / 1e6;
        match (r.time, r.available) {
            (Some(time), _) => eprintln!(
                "note: repacked {mb:.0} MB for this processor in {:.1} s, which takes that memory; `myq relayout` makes a file that needs neither",
                time.as_secs_f64()
            ),
            (None, Some(left)) => log::warn!(
                "the file is not in this processor's layout, and a copy of {mb:.0} MB does not fit into the {:.0} MB that are available: decoding is slower; `myq relayout` makes a file that needs no copy",
                left as f64 / 1e6
            ),
            (None, None) => log::info!("not repacked, as asked"),
        }
    }
    if let Some(report) = engine.prewarm().filter(|r| r.partial) {
        log::warn!(
            "the model is larger than the memory that is available; {:.0} MB of {:.0} were read ahead, and decoding will wait for the disk",
            report.bytes as f64 / 1e6,
            engine.file().bytes().len() as f64 / 1e6,
        );
    }
}
