//! Sources and texts that a quantiser may stumble over: each ends well, or with an error that says
//! where and leaves nothing behind.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use myq_tests::{calibration, data, program};
use serde_json::Value;

/// The fixture's folder, some of whose numbers can be changed.
struct Fixture {
    dir: tempfile::TempDir,
    weights: Vec<u8>,
}

impl Fixture {
    fn new() -> Fixture {
        let dir = tempfile::tempdir().expect("a folder");
        let source = dir.path().join("source");
        std::fs::create_dir(&source).expect("space");
        for entry in std::fs::read_dir(data("target")).expect("the fixture") {
            let entry = entry.expect("readable");
            std::fs::copy(entry.path(), source.join(entry.file_name())).expect("space");
        }
        let weights = std::fs::read(source.join("model.safetensors")).expect("the weights");
        Fixture { dir, weights }
    }

    /// Sets numbers of a tensor, by its name on model hubs.
    fn set(&mut self, tensor: &str, which: impl Iterator<Item = usize>, value: f32) -> &mut Self {
        let header = u64::from_le_bytes(self.weights[..8].try_into().expect("eight")) as usize;
        let names: Value = serde_json::from_slice(&self.weights[8..8 + header]).expect("JSON");
        let start = names[tensor]["data_offsets"][0]
            .as_u64()
            .expect("it is there") as usize;
        for i in which {
            // bf16 is the upper half of fp32.
            let bytes = [value.to_le_bytes()[2], value.to_le_bytes()[3]];
            self.weights[8 + header + start + 2 * i..][..2].copy_from_slice(&bytes);
        }
        std::fs::write(self.path("source/model.safetensors"), &self.weights).expect("space");
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Quantises with the repository's documents into `out.myq`.
    fn quantise(&self, more: &[&str]) -> Assert {
        self.quantise_with(["8", "128"], more)
    }

    /// The same with so many samples of so many tokens.
    fn quantise_with(&self, [samples, length]: [&str; 2], more: &[&str]) -> Assert {
        let texts = calibration(self.dir.path());
        let (source, out) = (self.path("source"), self.path("out.myq"));
        let texts = [
            "--calibration",
            path(&texts),
            "--samples",
            samples,
            "--length",
            length,
        ];
        let args = ["quantize", path(&source), "--out", path(&out)];
        let all = [&args[..], &texts[..], more].concat();
        Command::new(program("myq")).args(all).assert()
    }

    /// Perplexity of `out.myq` on a document.
    fn perplexity(&self) -> f64 {
        let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/quality.md");
        let out = self.path("out.myq");
        let args = [
            "eval",
            path(&out),
            "--text",
            path(&text),
            "--context",
            "128",
            "--json",
        ];
        let outcome = Command::new(program("myq")).args(args).assert().success();
        let json: Value = serde_json::from_slice(&outcome.get_output().stdout).expect("JSON");
        json["texts"][0]["models"][0]["perplexity"]
            .as_f64()
            .expect("a number")
    }
}

fn path(p: &Path) -> &str {
    p.to_str().expect("UTF-8")
}

fn said(outcome: &Assert) -> String {
    String::from_utf8_lossy(&outcome.get_output().stderr).into_owned()
}

#[test]
fn a_number_that_is_not_finite_is_an_error_with_its_place() {
    for method in ["best", "search", "round"] {
        let mut f = Fixture::new();
        f.set("model.layers.1.mlp.down_proj.weight", 1000..1001, f32::NAN);
        let outcome = f.quantise(&["--bits", "3", "--method", method]).code(2);
        let text = said(&outcome);
        assert!(
            text.contains("blk.1.ffn_down.weight") && text.contains("1000"),
            "{text}"
        );
        assert!(!f.path("out.myq").exists());
    }
}

#[test]
fn one_weight_of_a_million_gives_a_model_that_still_speaks() {
    for method in ["best", "search"] {
        let mut f = Fixture::new();
        f.quantise(&["--bits", "3", "--method", method]).success();
        let before = f.perplexity();
        // fp16 scales hold the first; the second is clipped, and that is said.
        for (value, clipped) in [(1e6, false), (1e7, true)] {
            f.set("model.layers.1.self_attn.q_proj.weight", 77..78, value);
            let outcome = f.quantise(&["--bits", "3", "--method", method]).success();
            let text = said(&outcome);
            assert_eq!(
                text.contains("blk.1.attn_q.weight: 1 weights clipped"),
                clipped,
                "{text}"
            );
            // A row of the query is lost in the source as well; all others are not.
            let after = f.perplexity();
            assert!(after < 2.0 * before, "{method}, {value}: {before} {after}");
        }
    }
}

#[test]
fn inputs_that_are_always_zero_are_told_and_harmless() {
    for method in ["best", "gptq", "search"] {
        let mut f = Fixture::new();
        f.set("model.layers.2.input_layernorm.weight", 7..9, 0.0);
        let outcome = f.quantise(&["--bits", "2", "--method", method]).success();
        let text = said(&outcome);
        assert!(
            text.contains("blk.2.attn_q.weight") && text.contains("2 inputs"),
            "{text}"
        );
        assert!(f.perplexity().is_finite());
    }
}

#[test]
fn texts_that_never_reach_a_matrix_are_an_error_that_names_it() {
    let mut f = Fixture::new();
    f.set(
        "model.layers.1.post_attention_layernorm.weight",
        0..256,
        0.0,
    );
    let outcome = f.quantise(&["--bits", "2"]).code(2);
    let text = said(&outcome);
    assert!(
        text.contains("blk.1.ffn_gate.weight") && text.contains("1024"),
        "{text}"
    );
    assert!(!f.path("out.myq").exists());
}

#[test]
fn fewer_tokens_than_columns_are_compensated_all_the_same() {
    let f = Fixture::new();
    let made = |method: &str| {
        let outcome = f.quantise_with(["1", "64"], &["--bits", "2", "--method", method]);
        let text = said(&outcome.success());
        let file = std::fs::read(f.path("out.myq")).expect("a file");
        (file, f.perplexity(), text)
    };
    let (search, plain, _) = made("search");
    let (gptq, compensated, text) = made("gptq");
    assert!(search != gptq);
    assert!(compensated < 1.2 * plain, "{plain} {compensated}");
    // Said before anything is computed.
    assert!(
        text.contains("64 calibration tokens are fewer than the 768"),
        "{text}"
    );
}
