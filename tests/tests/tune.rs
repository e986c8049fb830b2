//! D4: `runner tune` measures, keeps and forgets settings, and the other commands use them.

use std::path::Path;

use assert_cmd::Command;
use myq_blocks::encode::Method;
use myq_tests::{program, quantised};
use serde_json::Value;

/// Standard output and error of a run that succeeds.
#[track_caller]
fn runner(config: &Path, args: &[&str]) -> (String, String) {
    let outcome = Command::new(program("runner"))
        .env("XDG_CONFIG_HOME", config)
        .env_remove("RUST_LOG")
        .args(args)
        .assert()
        .success();
    let output = outcome.get_output();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn settings_are_measured_kept_used_and_forgotten() {
    let dir = tempfile::tempdir().expect("a folder");
    let (config, file) = (
        dir.path().join("config"),
        dir.path().join("config/myq/tune.json"),
    );
    let model = quantised("draft", 4, Method::Round, dir.path());
    let model = model.to_str().expect("UTF-8");
    let run = [
        "-v", "run", "--raw", "--prompt", "a", "-n", "2", "--model", model,
    ];
    let with = |extra: &[&str]| runner(&config, &[&run, extra].concat()).1;

    assert!(!with(&[]).contains("runner tune"));
    let tune = [
        "tune", "--tokens", "2", "--repeat", "1", "--json", "--model", model,
    ];
    let json: Value = serde_json::from_str(&runner(&config, &tune).0).expect("JSON");
    let best = &json["best"];
    let threads = best["threads"].as_u64().expect("threads");
    let candidates = json["candidates"].as_array().expect("candidates");
    assert!(candidates.iter().any(|c| c["threads"] == best["threads"]));
    assert!(candidates.iter().any(|c| c["threads"] == 1));
    assert!(
        candidates
            .iter()
            .all(|c| c["tokens_per_second"].as_f64() > Some(0.0))
    );

    let said = with(&[]);
    assert!(
        said.contains(&format!("`runner tune` measured {threads} threads")),
        "{said}"
    );
    assert!(said.contains("as `runner tune` measured"), "{said}");
    let said = with(&["--threads", "1", "--spin", "7"]);
    assert!(
        said.contains("as asked for") && said.contains("spins 7 µs"),
        "{said}"
    );
    // Settings are for the kernels they were measured with.
    assert!(!with(&["--kernels", "scalar"]).contains("runner tune"));
    assert!(
        runner(&config, &["tune", "--show"])
            .0
            .contains(&format!("{threads} threads"))
    );

    let said = runner(&config, &["tune", "--forget", "--model", model]).0;
    assert!(said.starts_with("forgotten"), "{said}");
    assert!(!with(&[]).contains("runner tune"));

    std::fs::write(&file, "{ broken").expect("written");
    let said = with(&[]);
    assert!(
        said.contains("tune.json") && said.contains("--forget"),
        "{said}"
    );
    runner(&config, &["tune", "--forget"]);
    assert!(!file.exists());
}
