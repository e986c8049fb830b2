//! The command: runs a `.myq` or `.gguf` model on this machine.

mod args;
mod bench;
mod chat;
mod load;
mod run;
mod tune;

use std::ffi::OsString;
use std::process::ExitCode;

use args::{Arguments, Command};
use clap::Parser;

fn main() -> ExitCode {
    let arguments = Arguments::parse_from(with_command(std::env::args_os().collect()));
    let level = if arguments.verbose { "debug" } else { "warn" };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(level))
        .format_timestamp(None)
        .format_target(false)
        .init();
    let outcome = match arguments.command {
        Command::Run(options) => run::run(&options),
        Command::Chat(options) => chat::chat(&options),
        Command::Bench(options) => bench::bench(&options),
        Command::Tune(options) => tune::tune(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // The reader went away, as `runner … | head` does.
        Err(error) if is_broken_pipe(&*error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            // Bad input, as clap's own errors.
            ExitCode::from(2)
        }
    }
}

/// `runner --model …` means `runner run --model …`: flags without a command belong to `run`.
fn with_command(mut arguments: Vec<OsString>) -> Vec<OsString> {
    const OWN: [&str; 4] = ["-h", "--help", "-V", "--version"];
    let flags = arguments.iter().skip(1).map(|a| a.to_string_lossy());
    let mut flags = flags.skip_while(|a| a == "-v" || a == "--verbose");
    if flags
        .next()
        .is_some_and(|a| a.starts_with('-') && !OWN.contains(&&*a))
    {
        arguments.insert(1, "run".into());
    }
    arguments
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
