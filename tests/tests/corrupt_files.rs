//! A8, case 11: damaged files end in one clear error, for the whole path and not the parser alone.

use std::path::Path;

use assert_cmd::Command;
use myq_blocks::Layout;
use myq_blocks::encode::Method;
use myq_engine::{Engine, Options};
use myq_tests::{Random, data, program, quantised, quantised_in};

fn opens(path: &Path) -> Result<(), String> {
    let options = Options {
        threads: Some(1),
        context: Some(32),
        batch: 8,
        ..Options::default()
    };
    let mut engine = Engine::open(path, &options, &mut |_, _| {}).map_err(|e| e.to_string())?;
    engine
        .feed(&[1, 2, 3], 1)
        .map(|_| ())
        .map_err(|e| e.to_string())
}

#[test]
fn every_flipped_byte_of_a_myq_file_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, layout) in Layout::NAMES {
        let path = dir.path().join(name);
        quantised_in(layout, "draft", 2, Method::Round, &path);
        opens(&path).expect("the whole file is sound");
        damage(&std::fs::read(&path).expect("a file"), dir.path());
    }
}

fn damage(bytes: &[u8], dir: &Path) {
    let broken = dir.join("broken.myq");
    let mut random = Random(42);
    for _ in 0..200 {
        let mut copy = bytes.to_vec();
        copy[random.below(bytes.len())] ^= 1 << random.below(8);
        std::fs::write(&broken, &copy).expect("it writes");
        let error = opens(&broken).expect_err("a flipped bit must not go unnoticed");
        assert!(
            error.contains("broken.myq"),
            "the message names the file: {error}"
        );
    }
    for _ in 0..100 {
        std::fs::write(&broken, &bytes[..random.below(bytes.len())]).expect("it writes");
        opens(&broken).expect_err("a cut file must be refused");
    }
}

#[test]
fn a_file_that_shrinks_while_it_runs_ends_with_an_error() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = quantised("target", 6, Method::Round, dir.path());
    let mut child = std::process::Command::new(program("runner"))
        .args([
            "bench",
            "--speed-only",
            "--repeat",
            "100000",
            "--prompt-tokens",
            "64",
            "--decode-tokens",
            "64",
            "--model",
        ])
        .arg(&path)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(
        child.try_wait().expect("it is ours").is_none(),
        "it must still run"
    );
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("opens")
        .set_len(5000)
        .expect("cut");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(2), "an error, not a crash");
    assert!(String::from_utf8_lossy(&output.stderr).contains("became shorter"));
}

#[test]
fn hub_directories_with_faults_are_refused_by_name() {
    let dir = tempfile::tempdir().expect("a folder");
    let copy = |name: &str| {
        let to = dir.path().join(name);
        std::fs::create_dir(&to).expect("a folder");
        for file in [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "model.safetensors",
        ] {
            std::fs::copy(data("draft").join(file), to.join(file)).expect("a copy");
        }
        to
    };
    let fails = |dir: &Path, word: &str| match myq_tools::model::Model::open(dir) {
        Ok(_) => panic!("{} must not open", dir.display()),
        Err(error) => assert!(
            error.to_string().contains(word),
            "`{error}` should say `{word}`"
        ),
    };
    let cut = copy("cut");
    let weights = std::fs::read(cut.join("model.safetensors")).expect("weights");
    std::fs::write(cut.join("model.safetensors"), &weights[..weights.len() / 2])
        .expect("it writes");
    fails(&cut, "fetch it again");
    let none = copy("none");
    std::fs::remove_file(none.join("model.safetensors")).expect("gone");
    fails(&none, "safetensors");
    let change = |dir: &Path, from: &str, to: &str| {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).expect("text");
        assert!(text.contains(from), "{from}");
        std::fs::write(path, text.replace(from, to)).expect("it writes");
    };
    let family = copy("family");
    change(&family, "\"llama\"", "\"mamba\"");
    fails(&family, "mamba");
    // A layer too few would run, with wrong results; one too many is missing.
    let fewer = copy("fewer");
    change(
        &fewer,
        "\"num_hidden_layers\": 2",
        "\"num_hidden_layers\": 1",
    );
    fails(&fewer, "has no place");
    let more = copy("more");
    change(
        &more,
        "\"num_hidden_layers\": 2",
        "\"num_hidden_layers\": 3",
    );
    fails(&more, "missing");
    let untied = copy("untied");
    change(
        &untied,
        "\"tie_word_embeddings\": true",
        "\"tie_word_embeddings\": false",
    );
    fails(&untied, "lm_head");
    let tokenizer = copy("tokenizer");
    std::fs::write(tokenizer.join("tokenizer.json"), "{").expect("it writes");
    fails(&tokenizer, "tokenizer.json");
}

#[test]
fn nan_in_the_source_is_an_error_and_not_a_model() {
    let dir = tempfile::tempdir().expect("a folder");
    let from = data("draft");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(file), dir.path().join(file)).expect("a copy");
    }
    let mut weights = std::fs::read(from.join("model.safetensors")).expect("weights");
    // The last tensor's last weight becomes a bf16 NaN.
    let end = weights.len();
    weights[end - 2..].copy_from_slice(&[0xc0, 0x7f]);
    std::fs::write(dir.path().join("model.safetensors"), weights).expect("it writes");
    let out = dir.path().join("out.myq");
    let outcome = Command::new(program("myq"))
        .arg("quantize")
        .arg(dir.path())
        .args(["--bits", "3", "--out"])
        .arg(&out)
        .assert()
        .code(2);
    let text = String::from_utf8_lossy(&outcome.get_output().stderr).into_owned();
    assert!(
        text.contains("NaN") && text.contains("blk.") || text.contains("norm"),
        "{text}"
    );
    assert!(!out.exists());
    let left = std::fs::read_dir(dir.path()).expect("a folder").count();
    assert_eq!(left, 4, "nothing half-written stays");
}
