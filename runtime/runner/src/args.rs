//! Flags of the command.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use myq_engine::repack::Repack;
use myq_engine::{KernelChoice, Options};
use myq_model::{Activations, CacheType, Sampling};

/// Runs low-bit language models on small boards.
#[derive(Parser)]
#[command(version, arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Say more on standard error
    #[arg(long, short, global = true)]
    pub(crate) verbose: bool,
}

const EXAMPLES: &str = "Examples:
  runner --model m.myq --prompt \"What is gravity?\"
  runner --model m.myq --prompt \"用一句话介绍长城。\" --n-predict 64 --threads 4
  runner --model m.gguf --raw --prompt \"Once upon a time\" --temperature 0.8 --seed 7
  runner chat --model m.myq
  runner bench --model m.myq --json
  runner tune --model m.myq";

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Answer one prompt; `run` may be left out: runner --model m.myq --n-gpu-layers 0 --prompt …
    Run(Run),
    /// Talk with the model in the terminal
    Chat(Chat),
    /// Measure prompt and decode speed
    Bench(Bench),
    /// Measure the best number of threads for this machine and model, and keep it
    Tune(Tune),
}

#[derive(Args)]
pub(crate) struct ModelArguments {
    /// Model file, .myq or .gguf
    #[arg(long, short)]
    pub(crate) model: PathBuf,
    /// Threads that compute [default: what `runner tune` measured, or two thirds of the
    /// physical cores, big ones only, at most 16]
    #[arg(long, short)]
    threads: Option<usize>,
    /// Microseconds that a thread without work spins before it sleeps [default: what
    /// `runner tune` measured, or 100]
    #[arg(long)]
    spin: Option<u64>,
    /// Let the system move threads between CPUs
    #[arg(long)]
    no_pin: bool,
    /// Read the file again: into the memory node of the threads, and into large pages where its
    /// file system has them
    #[arg(long)]
    renew_pages: bool,
    /// Tokens of context [default: 4096, less where model or memory hold less]
    #[arg(long, short)]
    context: Option<usize>,
    /// How keys and values of past tokens are stored: f16, or f32 (for comparison)
    #[arg(long, default_value = "f16")]
    cache_type: String,
    /// Tokens of a prompt that are computed together
    #[arg(long, default_value_t = 256)]
    batch: usize,
    /// How activations are rounded before a matrix: int8, int8x2 (about 15 bits), or mixed
    /// (int8x2 for up to eight tokens at once, as in decoding)
    #[arg(long, default_value = "int8")]
    activations: String,
    /// Layers on the GPU: a number, or `auto`. This build computes on the CPU alone
    #[arg(long, default_value = "auto")]
    n_gpu_layers: String,
    /// auto, avx2, avx-vnni, avx512, amx, neon, neon-dotprod, neon-i8mm, scalar, or exact (fp32
    /// activations, slow)
    #[arg(long, default_value = "auto")]
    kernels: String,
    /// Don't read the file into memory before the first token
    #[arg(long)]
    no_prewarm: bool,
    /// Don't compare a .myq file with its checksums
    #[arg(long)]
    no_verify: bool,
    /// Keep the model's pages locked in memory
    #[arg(long)]
    mlock: bool,
    /// Copy matrices into the layout of this processor's kernels where the file has another:
    /// auto (where memory allows), always or never. `myq relayout` spares the copy
    #[arg(long, default_value = "auto")]
    repack: String,
}

impl ModelArguments {
    pub(crate) fn options(&self) -> Result<Options, String> {
        match self.n_gpu_layers.parse::<u32>() {
            Ok(0) => {}
            Ok(n) => log::warn!(
                "--n-gpu-layers {n}: this build has no GPU kernels, all layers run on the CPU"
            ),
            Err(_) if self.n_gpu_layers == "auto" => {}
            Err(_) => {
                return Err(format!(
                    "--n-gpu-layers {}: give a number or `auto`",
                    self.n_gpu_layers
                ));
            }
        }
        let kernels = KernelChoice::from_name(&self.kernels).ok_or_else(|| {
            let names = KernelChoice::NAMES.map(|(n, _)| n).join(", ");
            format!("--kernels {}: known are {names}", self.kernels)
        })?;
        let cache = CacheType::from_name(&self.cache_type)
            .ok_or_else(|| format!("--cache-type {}: known are f16, f32", self.cache_type))?;
        let repack = Repack::from_name(&self.repack)
            .ok_or_else(|| format!("--repack {}: known are auto, always, never", self.repack))?;
        let activations = Activations::from_name(&self.activations).ok_or_else(|| {
            format!(
                "--activations {}: known are int8, int8x2, mixed",
                self.activations
            )
        })?;
        Ok(Options {
            cache,
            activations,
            repack,
            threads: self.threads,
            spin: self.spin.map(Duration::from_micros),
            pin: !self.no_pin,
            renew_pages: self.renew_pages,
            context: self.context,
            batch: self.batch,
            kernels,
            prewarm: !self.no_prewarm,
            verify: !self.no_verify,
            lock: self.mlock,
            ..Options::default()
        })
    }
}

#[derive(Args)]
pub(crate) struct SamplingArguments {
    /// 0 takes the likeliest token; higher is more varied
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Keep the k likeliest tokens; 0 keeps all
    #[arg(long, default_value_t = 40)]
    top_k: usize,
    /// Keep the likeliest tokens that together reach this probability
    #[arg(long, default_value_t = 0.95)]
    top_p: f32,
    /// Drop tokens less likely than this share of the likeliest
    #[arg(long, default_value_t = 0.05)]
    min_p: f32,
    /// Weaken recent tokens by this factor; 1 is off
    #[arg(long, default_value_t = 1.0)]
    repeat_penalty: f32,
    /// Take this from the logit of each recent token
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Take this from the logit for each time a token came recently
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// How many of the last tokens are recent
    #[arg(long, default_value_t = 64)]
    penalty_window: usize,
    /// Seed of the random choices [default: from the clock]
    #[arg(long)]
    seed: Option<u64>,
}

impl SamplingArguments {
    pub(crate) fn settings(&self) -> Result<Sampling, String> {
        let clock = || {
            std::time::SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |d| d.as_nanos() as u64)
        };
        let settings = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_window: self.penalty_window,
            seed: self.seed.unwrap_or_else(clock),
        };
        settings.check()?;
        Ok(settings)
    }
}

#[derive(Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Text to answer; `-` reads standard input
    #[arg(long, short)]
    pub(crate) prompt: String,
    /// Most tokens to generate
    #[arg(long, short, default_value_t = 256)]
    pub(crate) n_predict: usize,
    /// System message that comes before the prompt
    #[arg(long, conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Continue the text as it is, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Print text and figures as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
}

#[derive(Args)]
pub(crate) struct Chat {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// System message
    #[arg(long)]
    pub(crate) system: Option<String>,
    /// Most tokens of an answer
    #[arg(long, short, default_value_t = 1024)]
    pub(crate) n_predict: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
}

#[derive(Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 512)]
    pub(crate) prompt_tokens: usize,
    /// Tokens to decode; the first is left out
    #[arg(long, default_value_t = 128)]
    pub(crate) decode_tokens: usize,
    /// Runs; the median counts [default: 5, with --sweep 3]
    #[arg(long)]
    pub(crate) repeat: Option<usize>,
    /// Measure 1 to --threads threads and print a table with the bottleneck of each
    #[arg(long)]
    pub(crate) sweep: bool,
    /// Only measure how fast memory is read, with 1 to --threads threads
    #[arg(long, conflicts_with_all = ["sweep", "speed_only"])]
    pub(crate) bandwidth_only: bool,
    /// Leave out the memory's speed and the verdict
    #[arg(long, conflicts_with = "sweep")]
    pub(crate) speed_only: bool,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct Tune {
    /// Model file, .myq or .gguf
    #[arg(long, short, required_unless_present_any = ["show", "forget"])]
    pub(crate) model: Option<PathBuf>,
    /// As for `run`; settings are kept for each
    #[arg(long, default_value = "auto")]
    pub(crate) kernels: String,
    /// Tokens decoded in a measurement; fewer where they take over 2 seconds
    #[arg(long, default_value_t = 48)]
    pub(crate) tokens: usize,
    /// Measurements of each candidate; the median counts
    #[arg(long, default_value_t = 3)]
    pub(crate) repeat: usize,
    /// Print what is stored
    #[arg(long, conflicts_with = "forget")]
    pub(crate) show: bool,
    /// Remove what is stored for the model; without --model, all
    #[arg(long)]
    pub(crate) forget: bool,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
