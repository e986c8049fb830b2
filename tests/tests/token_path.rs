//! From a model-hub directory to text: every step, on the fixtures.

use std::path::Path;

use assert_cmd::Command;
use myq_blocks::encode::Method;
use myq_engine::{Engine, KernelChoice, Options, available_kernels, generate};
use myq_model::{Activations, Sampler, Sampling};
use myq_tests::{data, imported, program, quantised};
use myq_tools::model::Model;
use myq_tools::verify;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;

fn open(path: &Path, kernels: KernelChoice, threads: usize, batch: usize) -> Engine {
    rounded(path, kernels, (threads, batch), Activations::Int8)
}

fn rounded(
    path: &Path,
    kernels: KernelChoice,
    (threads, batch): (usize, usize),
    activations: Activations,
) -> Engine {
    let options = Options {
        activations,
        kernels,
        threads: Some(threads),
        context: Some(512),
        batch,
        logit_rows: batch,
        ..Options::default()
    };
    Engine::open(path, &options, &mut |_, _| {}).expect("it opens")
}

/// Tokens of a little text in three languages.
fn prompt(engine: &Engine) -> Vec<u32> {
    engine.source().tokenizer.encode(
        "The city lies on the river.\n人生而自由。\ndef add(a, b):\n    return a + b\n",
        false,
    )
}

/// Some 400 tokens of English and code, for comparisons that a short text is too noisy for.
fn long_text(engine: &Engine) -> Vec<u32> {
    let text = std::fs::read_to_string(data("train_fixture.py")).expect("the script is there");
    let mut tokens = prompt(engine);
    tokens.extend(engine.source().tokenizer.encode(&text[..900], false));
    tokens.truncate(500);
    tokens
}

/// `KL(p ‖ q)` of two rows of logits, in nats.
fn kl(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |x: &[f32]| {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(max) + x.iter().map(|v| f64::from(v - max).exp()).sum::<f64>().ln()
    };
    let (a, b) = (log_sum(p), log_sum(q));
    p.iter()
        .zip(q)
        .map(|(p, q)| (f64::from(*p) - a).exp() * (f64::from(*p) - a - f64::from(*q) + b))
        .sum()
}

fn mean_kl(a: &mut Engine, b: &mut Engine, text: fn(&Engine) -> Vec<u32>) -> f64 {
    let tokens = text(a);
    let vocab = a.source().config.vocab;
    let x = a.feed(&tokens, tokens.len()).expect("it fits").to_vec();
    let y = b.feed(&tokens, tokens.len()).expect("it fits");
    assert_eq!(x.len(), tokens.len() * vocab);
    x.chunks(vocab)
        .zip(y.chunks(vocab))
        .map(|(x, y)| kl(x, y))
        .sum::<f64>()
        / tokens.len() as f64
}

#[test]
fn every_kernel_gives_the_same_text_distribution() {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["target", "draft"] {
        for bits in [2, 3, 4, 5, 6] {
            let path = quantised(name, bits, Method::Search, dir.path());
            for kernels in available_kernels() {
                let choice = KernelChoice::from_name(kernels).expect("a name");
                let mut exact = open(&path, KernelChoice::Exact, 2, 512);
                let distance = mean_kl(&mut exact, &mut open(&path, choice, 2, 512), prompt);
                // 8-bit activations cost well below 1e-3 nats on models of this size.
                assert!(
                    distance < 1e-3,
                    "{name} at {bits} bits, {kernels}: {distance}"
                );
            }
        }
    }
}

#[test]
fn batches_steps_and_threads_agree() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = quantised("target", 4, Method::Search, dir.path());
    let tokens = prompt(&open(&path, KernelChoice::Auto, 1, 128));
    let last = |activations, batch, threads| {
        let mut engine = rounded(&path, KernelChoice::Auto, (threads, batch), activations);
        engine.feed(&tokens, 1).expect("it fits").to_vec()
    };
    // Only the order of float sums differs. With one 8-bit plane its last bit can move an
    // activation to the next code, which is then the noise that 8 bits have anyway.
    for (activations, most) in [(Activations::Int8x2, 1e-7), (Activations::Int8, 1e-3)] {
        let whole = last(activations, 128, 1);
        for (batch, threads) in [(1, 1), (1, 3), (7, 2), (16, 4), (128, 2)] {
            let distance = kl(&whole, &last(activations, batch, threads)).abs();
            assert!(
                distance < most,
                "{activations:?}, batch {batch}, {threads} threads: {distance}"
            );
        }
        assert_eq!(
            whole,
            last(activations, 128, 2),
            "threads must not change a result"
        );
    }
}

#[test]
fn rewinding_forgets() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = quantised("target", 6, Method::Round, dir.path());
    let mut engine = open(&path, KernelChoice::Auto, 2, 64);
    let tokens = prompt(&engine);
    let first = engine.feed(&tokens, 1).expect("it fits").to_vec();
    engine.feed(&[5, 6, 7, 8], 1).expect("it fits");
    engine.rewind(tokens.len() - 3);
    let again = engine
        .feed(&tokens[tokens.len() - 3..], 1)
        .expect("it fits")
        .to_vec();
    assert!(kl(&first, &again) < 1e-7);
}

#[test]
fn wider_files_are_nearer_to_the_source() {
    let dir = tempfile::tempdir().expect("a folder");
    let source = imported("target", dir.path());
    let distance = |bits, method| {
        let path = quantised("target", bits, method, dir.path());
        mean_kl(
            &mut open(&source, KernelChoice::Exact, 2, 512),
            &mut open(&path, KernelChoice::Exact, 2, 512),
            long_text,
        )
    };
    let all: Vec<f64> = [2, 3, 4, 5, 6]
        .into_iter()
        .map(|b| distance(b, Method::Search))
        .collect();
    println!("KL to the source at 2 to 6 bits: {all:?}");
    assert!(all.windows(2).all(|w| w[1] < w[0]), "{all:?}");
    // Search gains most where bits are few.
    assert!(all[0] < distance(2, Method::Round));
    assert!(all[1] < distance(3, Method::Round));
}

#[test]
fn quantising_twice_gives_the_same_bytes_and_passes_verify() {
    let (a, b) = (
        tempfile::tempdir().expect("a folder"),
        tempfile::tempdir().expect("a folder"),
    );
    let one = quantised("draft", 3, Method::Search, a.path());
    let two = quantised("draft", 3, Method::Search, b.path());
    assert_eq!(
        std::fs::read(&one).expect("one"),
        std::fs::read(two).expect("two")
    );
    let (small, source) = (
        Model::open(&one).expect("opens"),
        Model::open(&data("draft")).expect("opens"),
    );
    let report = verify::verify(&small, Some(&source)).expect("sound");
    assert!(report.checksums > 0 && report.partial_blocks > 0 && !report.distances.is_empty());
    assert!(report.distances.iter().all(|d| d.relative_rms < 0.3));
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = quantised("draft", 5, Method::Round, dir.path());
    let run = |seed| {
        let mut engine = open(&path, KernelChoice::Auto, 2, 32);
        let tokens = prompt(&engine);
        let settings = Sampling {
            temperature: 1.0,
            seed,
            ..Sampling::default()
        };
        let mut sampler = Sampler::new(settings, engine.source().config.vocab);
        let mut out = Vec::new();
        generate(
            &mut engine,
            &mut sampler,
            &tokens,
            40,
            &AtomicBool::new(false),
            |t| {
                out.push(t);
                ControlFlow::Continue(())
            },
        )
        .expect("it runs");
        out
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

fn command(name: &str) -> Command {
    Command::new(program(name))
}

#[test]
fn the_commands_people_know_work_as_written() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = quantised("target", 3, Method::Round, dir.path());
    let model = path.to_str().expect("UTF-8");
    let run = |args: &[&str]| command("runner").args(args).assert();
    run(&[
        "--model",
        model,
        "--n-gpu-layers",
        "0",
        "--threads",
        "2",
        "--prompt",
        "预热",
        "--n-predict",
        "1",
    ])
    .success();
    let raw = run(&[
        "run",
        "--model",
        model,
        "--raw",
        "--prompt",
        "The city",
        "--n-predict",
        "12",
        "--json",
    ])
    .success();
    let json: serde_json::Value = serde_json::from_slice(&raw.get_output().stdout).expect("JSON");
    assert!(json["tokens"].as_u64().expect("a count") >= 1);
    run(&[
        "bench",
        "--model",
        model,
        "--prompt-tokens",
        "16",
        "--decode-tokens",
        "4",
        "--repeat",
        "1",
        "--json",
    ])
    .success();
    // Bad input: exit code 2 and a message that says what to do.
    for args in [
        &["--model", "no-such-file.myq", "--prompt", "x"][..],
        &["--model", model, "--prompt", "x", "--threads", "0"],
        &["--model", model, "--prompt", "x", "--kernels", "none"],
        &["--model", model, "--prompt", "x", "--temperature", "-1"],
        &["--model", model, "--raw", "--prompt", ""],
        &[
            "--model",
            dir.path().to_str().expect("UTF-8"),
            "--prompt",
            "x",
        ],
        &[],
    ] {
        let outcome = run(args).failure().code(2);
        assert!(
            String::from_utf8_lossy(&outcome.get_output().stderr).contains("error"),
            "{args:?}"
        );
    }
    command("myq")
        .args(["inspect", model, "--json"])
        .assert()
        .success();
    command("myq").args(["verify", model]).assert().success();
    command("myq")
        .args(["quantize", model, "--bits", "7"])
        .assert()
        .code(2);
}
