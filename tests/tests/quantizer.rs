//! The quantizer's commands from outside: calibration, recipes, export, evaluation, comparison.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use myq_blocks::encode::Method;
use myq_tests::{calibration, data, imported, program, quantised};
use serde_json::Value;

fn myq(args: &[&str]) -> Assert {
    Command::new(program("myq")).args(args).assert()
}

fn text_of(outcome: &Assert) -> String {
    let output = outcome.get_output();
    [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .concat()
}

fn json_of(outcome: &Assert) -> Value {
    serde_json::from_slice(&outcome.get_output().stdout).expect("JSON")
}

fn path(p: &Path) -> &str {
    p.to_str().expect("UTF-8")
}

/// KL of a model to the source on a document that is not in the calibration set.
fn divergence(source: &Path, models: &[&Path]) -> Vec<f64> {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/quality.md");
    let mut args = vec!["eval"];
    args.extend(models.iter().map(|m| path(m)));
    args.extend(["--source", path(source), "--text", path(&text)]);
    args.extend(["--context", "128", "--activations", "int8x2", "--json"]);
    let json = json_of(&myq(&args).success());
    let found = json["texts"][0]["models"].as_array().expect("a list");
    found
        .iter()
        .map(|m| m["kl"].as_f64().expect("a number"))
        .collect()
}

#[test]
fn each_method_is_nearer_to_the_source_than_the_one_before() {
    let dir = tempfile::tempdir().expect("a folder");
    let source = imported("target", dir.path());
    let calibration = calibration(dir.path());
    let made = |method: &str| {
        let out = dir.path().join(format!("{method}.myq"));
        let mut args = vec!["quantize", path(&source), "--bits", "2", "--method", method];
        args.extend(["--out", path(&out), "--samples", "24", "--length", "256"]);
        if method != "round" {
            args.extend(["--calibration", path(&calibration)]);
        }
        myq(&args).success();
        out
    };
    let files = ["round", "search", "gptq", "best"].map(made);
    let kl = divergence(&source, &files.each_ref().map(PathBuf::as_path));
    assert!(
        kl[1] < kl[0] && kl[2] < 0.8 * kl[1] && kl[3] < 0.8 * kl[2],
        "{kl:?}"
    );
}

#[test]
fn provenance_names_the_calibration_and_the_method() {
    let dir = tempfile::tempdir().expect("a folder");
    let calibration = calibration(dir.path());
    let out = dir.path().join("draft.myq");
    let draft = data("draft");
    let args = [
        "quantize",
        path(&draft),
        "--recipe",
        "m-3",
        "--out",
        path(&out),
    ];
    let set = [
        "--calibration",
        path(&calibration),
        "--samples",
        "8",
        "--length",
        "128",
    ];
    let text = text_of(&myq(&[&args[..], &set].concat()).success());
    assert!(!text.contains("work folder"), "{text}");
    let json = json_of(&myq(&["inspect", path(&out), "--json"]).success());
    let all = json.to_string();
    for part in [
        "\"calibration\":\"",
        "\"method\":\"best\"",
        "m-3",
        "\"sweeps\":3",
    ] {
        assert!(all.contains(part), "{part}: {all}");
    }
    assert!(!dir.path().join("draft.myq.work").exists());
    myq(&["verify", path(&out)]).success();
}

/// Types whose codes are not evenly spaced, or have no blocks, are quantised as without texts.
#[test]
fn other_types_of_single_matrices_are_quantised_too() {
    let dir = tempfile::tempdir().expect("a folder");
    let source = imported("target", dir.path());
    let calibration = calibration(dir.path());
    let out = dir.path().join("out.myq");
    let mut args = vec![
        "quantize",
        path(&source),
        "--bits",
        "3",
        "--out",
        path(&out),
    ];
    args.extend(["--calibration", path(&calibration), "--samples", "8"]);
    args.extend(["--length", "64", "--tensor", "blk.*.attn_v.weight=IQ4_NL"]);
    args.extend(["--tensor", "blk.*.attn_k.weight=16"]);
    myq(&args).success();
    let json =
        json_of(&myq(&["verify", path(&out), "--source", path(&source), "--json"]).success());
    let distances = json["distances"].as_array().expect("a list");
    let of = |part: &str| -> Vec<f64> {
        let named = |d: &&Value| d["name"].as_str().is_some_and(|n| n.contains(part));
        let each = distances.iter().filter(named);
        each.map(|d| d["relative_rms"].as_f64().expect("a number"))
            .collect()
    };
    assert!(
        !of("attn_v").is_empty() && of("attn_v").iter().all(|d| *d < 0.12),
        "{json:#}"
    );
    assert!(of("attn_k").iter().all(|d| *d < 1e-3), "{json:#}");
    let best = divergence(&source, &[&out]);
    assert!(best[0] < 0.03, "{best:?}");
}

#[test]
fn warnings_and_bad_sets_say_what_to_do() {
    let dir = tempfile::tempdir().expect("a folder");
    let draft = data("draft");
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("space");
        path
    };
    let run = |set: &Path| {
        let out = dir.path().join("out.myq");
        let args = ["quantize", path(&draft), "--bits", "3", "--out", path(&out)];
        let set = [
            "--calibration",
            path(set),
            "--samples",
            "4",
            "--length",
            "64",
        ];
        myq(&[&args[..], &set].concat())
    };
    let short = file(
        "short.jsonl",
        "{\"text\": \"A short one.\"}\n{\"text\": \"Another, [INST] user\"}\n",
    );
    let said = text_of(&run(&short).success());
    for part in [
        "2 samples, 4 were wanted",
        "2 of 2 samples are shorter than 64",
        "1 of 2 records have marks",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    for (name, text, part) in [
        (
            "broken.jsonl",
            "{\"text\": \"fine\"}\n{\"text\": 7}\n",
            "line 2",
        ),
        ("nothing.jsonl", "\n\n", "no tokens"),
        (
            "neither.jsonl",
            "{\"prompt\": \"x\"}\n",
            "neither `text` nor `messages`",
        ),
    ] {
        let said = text_of(&run(&file(name, text)).code(2));
        assert!(said.contains(part), "{part}: {said}");
    }
    let said =
        text_of(&myq(&["quantize", path(&draft), "--bits", "3", "--method", "gptq"]).code(2));
    assert!(said.contains("--calibration"), "{said}");
    assert!(
        !dir.path()
            .join("out.myq.work")
            .join("manifest.json")
            .exists()
    );
}

#[test]
fn an_audit_finds_planted_lines_and_drops_them() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("set.jsonl");
    let records = [
        r#"{"text": "The museum opened in 2019 and has three floors.", "date": "2023-05-01"}"#,
        r#"{"text": "Sales are expected to double as new shops open.", "date": "2023-05-02"}"#,
        r#"{"messages": [{"role": "user", "content": "请介绍一下长城。"}, {"role": "assistant", "content": "长城是中国古代的防御工程。"}]}"#,
        r#"{"text": "Notes of a later day.", "date": "2025-01-01"}"#,
        r#"{"text": "The museum opened in 2019, and has three floors!"}"#,
        r#"{"text": "A pot of tea stands on the table by the window, and outside the first snow of the year is falling on the roofs."}"#,
    ];
    std::fs::write(&file, records.join("\n")).expect("space");
    let judged = dir.path().join("eval.txt");
    std::fs::write(&judged, "He looked up. A pot of tea stands on the table by the window and outside the first snow of the year is falling on the roofs.").expect("space");
    let clean = dir.path().join("clean.jsonl");
    let outcome = myq(&[
        "calibrate",
        path(&file),
        "--audit",
        "--cutoff",
        "2024-03-01",
        "--evaluation",
        path(&judged),
        "--drop",
        "--out",
        path(&clean),
    ])
    .success();
    let said = text_of(&outcome);
    for part in [
        ":2: looks ahead",
        ":4: dated 2025-01-01",
        ":5: says what",
        ":6: is in the evaluation text",
        "4 of 6",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let kept = std::fs::read_to_string(&clean).expect("it is there");
    assert_eq!(kept, format!("{}\n{}\n", records[0], records[2]));
    myq(&["calibrate", path(&file), "--cutoff", "soon", "--audit"]).code(2);
}

#[test]
fn an_exported_file_has_the_same_weights_and_says_what_partial_superblocks_cost() {
    let dir = tempfile::tempdir().expect("a folder");
    let digest = |p: &Path| text_of(&myq(&["verify", path(p), "--dequantised-digest"]).success());
    // Whole superblocks: to the bit, but for rows that move for GGUF's rope.
    let whole = quantised("target", 3, Method::Search, dir.path());
    let gguf = dir.path().join("target.gguf");
    let said = text_of(&myq(&["export", path(&whole), "--out", path(&gguf)]).success());
    assert!(!said.contains("note:"), "{said}");
    let (a, b) = (digest(&whole), digest(&gguf));
    let lines = |text: &str| -> Vec<String> {
        let moved = |l: &&str| !l.contains("attn_q.weight") && !l.contains("attn_k.weight");
        text.lines().filter(moved).map(str::to_owned).collect()
    };
    assert!(lines(&a).len() > 10);
    for line in lines(&a) {
        assert!(lines(&b).contains(&line), "{line}\n{b}");
    }
    assert!(divergence(&whole, &[&gguf])[0] < 1e-5);
    // Rows of 128 weights: another type, told and nearly the same.
    let partial = quantised("draft", 3, Method::Search, dir.path());
    let gguf = dir.path().join("draft.gguf");
    let said = text_of(&myq(&["export", path(&partial), "--out", path(&gguf)]).success());
    assert!(
        said.contains("note:") && said.contains("partial superblocks"),
        "{said}"
    );
    let kl = divergence(&partial, &[&gguf])[0];
    assert!(kl < 1e-3, "{kl}");
}

#[test]
fn a_broken_layer_is_named_with_its_matrix() {
    let dir = tempfile::tempdir().expect("a folder");
    let source = imported("target", dir.path());
    let good = quantised("target", 6, Method::Search, dir.path());
    let json = json_of(&myq(&["compare", path(&source), path(&good), "--json"]).success());
    assert!(json["broken"].is_null(), "{json}");
    assert!(json["first_answer"].as_f64().expect("a number") > 0.99);
    // One matrix with its codes upside down.
    let mut bytes = std::fs::read(&good).expect("it is there");
    let (start, len) = {
        let file = myq_format::myq::Myq::parse(&bytes).expect("a model");
        let t = file.tensor("blk.2.ffn_down.weight").expect("it has one");
        (t.offset as usize, t.bytes as usize)
    };
    bytes[start..start + len].iter_mut().for_each(|b| *b = !*b);
    let broken = dir.path().join("broken.myq");
    std::fs::write(&broken, &bytes).expect("space");
    // Damage is damage; the comparison is for what a quantiser did wrong.
    myq(&["compare", path(&source), path(&broken)]).code(2);
    let gguf = dir.path().join("good.gguf");
    myq(&["export", path(&good), "--out", path(&gguf)]).success();
    let mut bytes = std::fs::read(&gguf).expect("it is there");
    let (start, len) = {
        let file = myq_format::gguf::Gguf::parse(&bytes).expect("a model");
        let t = file.tensor("blk.2.ffn_down.weight").expect("it has one");
        (t.offset as usize, t.bytes as usize)
    };
    // Low and high bits of the codes; scales stay.
    for block in bytes[start..start + len].chunks_exact_mut(210) {
        block[..192].iter_mut().for_each(|b| *b = !*b);
    }
    std::fs::write(&gguf, &bytes).expect("space");
    let json = json_of(&myq(&["compare", path(&source), path(&gguf), "--json"]).success());
    assert_eq!(json["broken"]["layer"], 2, "{json}");
    let mended = json["broken"]["mended"].as_array().expect("a list");
    let best = mended
        .iter()
        .max_by(|a, b| a[1].as_f64().partial_cmp(&b[1].as_f64()).expect("numbers"))
        .expect("seven");
    assert_eq!(best[0], "blk.2.ffn_down.weight");
    assert!(best[1].as_f64().expect("a number") > 0.99);
}

#[test]
fn a_quantisation_ends_with_a_self_check() {
    let dir = tempfile::tempdir().expect("a folder");
    let source = imported("target", dir.path());
    let calibration = calibration(dir.path());
    let out = dir.path().join("six.myq");
    let args = ["quantize", path(&source), "--bits", "6", "--json"];
    let texts = ["--calibration", path(&calibration), "--out", path(&out)];
    let size = ["--samples", "8", "--length", "128"];
    let json = json_of(&myq(&[&args[..], &texts, &size].concat()).success());
    // Each matrix was reached by every token.
    let outcomes = json["summary"]["outcomes"].as_array().expect("a list");
    assert_eq!(outcomes.len(), 4 * 7 + 1);
    assert!(outcomes.iter().all(|o| o["tokens"] == 1024), "{json}");
    let checks = json["self_check"]["checks"].as_array().expect("a list");
    let holds = |what: &str| {
        let check = checks.iter().find(|c| c["what"] == what);
        check.map(|c| c["holds"].clone())
    };
    for what in ["bytes", "bit order", "layers", "first token"] {
        assert_eq!(holds(what), Some(Value::Bool(true)), "{what}: {json}");
    }
    // Weights that make up for each other may be farther than half a step; searched ones not.
    assert_eq!(holds("steps"), Some(Value::Null));
    let json = json_of(&myq(&[&args[..], &["--out", path(&out)]].concat()).success());
    assert_eq!(json["self_check"]["checks"][2]["what"], "steps");
    assert_eq!(json["self_check"]["checks"][2]["holds"], true, "{json}");
    // At two bits the layers are told, not judged; the first one under 0.95 is named.
    let two = [
        "quantize",
        path(&source),
        "--bits",
        "2",
        "--method",
        "round",
    ];
    let said = text_of(&myq(&[&two[..], &["--out", path(&out)]].concat()).success());
    assert!(said.contains("is the first under 0.95"), "{said}");
    assert!(!said.contains("FAILS"), "{said}");
}

#[test]
fn a_target_is_met_to_the_byte_and_beats_the_uniform_recipe() {
    let dir = tempfile::tempdir().expect("a folder");
    let source = imported("target", dir.path());
    let calibration = calibration(dir.path());
    let set = [
        "--calibration",
        path(&calibration),
        "--samples",
        "24",
        "--length",
        "256",
        "--method",
        "search",
    ];
    let uniform = dir.path().join("uniform.myq");
    let args = [
        "quantize",
        path(&source),
        "--bits",
        "3",
        "--out",
        path(&uniform),
    ];
    myq(&[&args[..], &set].concat()).success();
    let bits = |p: &Path| {
        let json = json_of(&myq(&["inspect", path(p), "--json"]).success());
        json["bits_per_weight"].as_f64().expect("a number")
    };
    let target = format!("{:.4}", bits(&uniform) - 0.00005);
    let kept = dir.path().join("kept.json");
    let mixed = dir.path().join("mixed.myq");
    let args = [
        "quantize",
        path(&source),
        "--target-bpw",
        &target,
        "--out",
        path(&mixed),
    ];
    let more = ["--sensitivity", path(&kept)];
    myq(&[&args[..], &set, &more].concat()).success();
    assert!(kept.exists());
    assert!(bits(&mixed) <= target.parse::<f64>().expect("a number"));
    assert!(bits(&mixed) > 0.97 * target.parse::<f64>().expect("a number"));
    let kl = divergence(&source, &[&uniform, &mixed]);
    assert!(kl[1] < kl[0], "{kl:?}");
    let args = [
        "quantize",
        path(&source),
        "--target-bpw",
        "1.5",
        "--out",
        path(&mixed),
    ];
    let said = text_of(&myq(&[&args[..], &set, &more].concat()).code(2));
    assert!(said.contains("too few"), "{said}");
}
