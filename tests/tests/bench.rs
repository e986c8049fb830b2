//! What `runner bench` prints: every figure and a verdict, whatever the clock says.

use std::path::{Path, PathBuf};

use assert_cmd::{Command, assert::Assert};
use myq_blocks::encode::Method;
use myq_tests::{program, quantised};
use serde_json::Value;

const SHORT: [&str; 6] = [
    "--prompt-tokens",
    "8",
    "--decode-tokens",
    "4",
    "--repeat",
    "1",
];

fn bench(model: &Path, args: &[&str]) -> Assert {
    Command::new(program("runner"))
        .args(["bench", "--model"])
        .arg(model)
        .args(args)
        .assert()
}

fn json(model: &Path, args: &[&str]) -> Value {
    let outcome = bench(model, &[args, &["--json"]].concat()).success();
    serde_json::from_slice(&outcome.get_output().stdout).expect("JSON")
}

fn model(dir: &Path) -> PathBuf {
    quantised("target", 4, Method::Round, dir)
}

/// A number above zero under each name.
#[track_caller]
fn positive(json: &Value, names: &[&str]) {
    for name in names {
        let value = json[name].as_f64();
        assert!(value.is_some_and(|v| v > 0.0), "{name}: {:?}", json[name]);
    }
}

#[track_caller]
fn judged(json: &Value) {
    let known = [
        "bandwidth",
        "arithmetic",
        "synchronisation",
        "page-cache",
        "kv-cache",
    ];
    let name = json["bottleneck"].as_str().expect("a name");
    assert!(known.contains(&name), "{name}");
    assert!(!json["reason"].as_str().expect("a reason").is_empty());
}

#[test]
fn one_set_up_has_every_figure_and_a_verdict() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = model(dir.path());
    let json = json(&model, &[&SHORT[..], &["--threads", "2"]].concat());
    positive(
        &json,
        &[
            "prompt_tokens_per_second",
            "decode_tokens_per_second",
            "bytes_per_token",
            "decode_gigabytes_per_second",
            "first_token_seconds",
            "bandwidth_gigabytes_per_second",
            "bandwidth_share",
            "cache_bytes_per_token",
            "empty_cache_tokens_per_second",
            "single_thread_tokens_per_second",
        ],
    );
    judged(&json);
    for read in json["memory_bandwidth"].as_array().expect("readings") {
        positive(read, &["threads", "buffer_bytes", "gigabytes_per_second"]);
    }
    let text = bench(&model, &SHORT).success();
    let text = String::from_utf8_lossy(&text.get_output().stdout).into_owned();
    for part in ["prompt ", "decode ", "start: loaded", "bottleneck: "] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
}

#[test]
fn a_sweep_has_a_row_for_each_number_of_threads() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = model(dir.path());
    let args = [&SHORT[..], &["--no-pin", "--threads", "3", "--sweep"]].concat();
    let rows = json(&model, &args);
    let rows = rows.as_array().expect("rows");
    let threads: Vec<_> = rows.iter().map(|r| r["threads"].as_u64()).collect();
    assert_eq!(threads, [Some(1), Some(2), Some(3)]);
    rows.iter().for_each(judged);
    let text = bench(&model, &args).success();
    let text = String::from_utf8_lossy(&text.get_output().stdout).into_owned();
    assert!(
        text.contains("| GPU layers | threads | prompt of 8, s |"),
        "{text}"
    );
    assert_eq!(text.matches("\n| 0 | ").count(), 3, "{text}");
}

#[test]
fn parts_can_be_had_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = model(dir.path());
    let reads = json(&model, &["--bandwidth-only", "--no-pin", "--threads", "2"]);
    assert_eq!(reads["memory_bandwidth"].as_array().map(Vec::len), Some(2));
    assert!(reads.get("decode_tokens_per_second").is_none());
    let speed = json(&model, &[&SHORT[..], &["--speed-only"]].concat());
    positive(&speed, &["decode_tokens_per_second", "bytes_per_token"]);
    assert!(speed.get("bottleneck").is_none() && speed.get("memory_bandwidth").is_none());
    for wrong in [
        &["--sweep", "--speed-only"][..],
        &["--threads", "0"],
        &["--decode-tokens", "1"],
        &["--prompt-tokens", "1000000"],
    ] {
        bench(&model, wrong).code(2);
    }
}
