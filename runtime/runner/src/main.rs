//! The command: runs a `.myq` or `.gguf` model on this machine.

mod args;
mod bench;
mod chat;
mod load;
mod run;

use std::process::ExitCode;

use args::{Arguments, Command};
use clap::Parser;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let level = if arguments.verbose { "debug" } else { "warn" };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(level))
        .format_timestamp(None)
        .format_target(false)
        .init();
    let outcome = match arguments.command {
        Some(Command::Run(options)) => run::run(&options),
        Some(Command::Chat(options)) => chat::chat(&options),
        Some(Command::Bench(options)) => bench::bench(&options),
        None => match arguments.direct {
            Some(options) => run::run(&options),
            None => Err("no model given; try `runner --model m.myq --prompt \"Hello\"` or `runner --help`".into()),
        },
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            // Bad input, as clap's own errors.
            ExitCode::from(2)
        }
    }
}
