//! Logits and token ids against an independent forward pass (numpy, float64).

use myq_engine::{Engine, KernelChoice, Options};
use myq_model::CacheType;
use myq_tests::{data, imported};
use serde_json::Value;

fn numbers(v: &Value) -> Vec<f64> {
    v.as_array()
        .expect("a list")
        .iter()
        .map(|n| n.as_f64().expect("a number"))
        .collect()
}

fn compare(name: &str) {
    let text = std::fs::read_to_string(data(&format!("golden/logits-{name}.json")))
        .expect("the golden file");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let dir = tempfile::tempdir().expect("a folder");
    let path = imported(name, dir.path());
    let options = Options {
        threads: Some(2),
        context: Some(128),
        batch: 128,
        logit_rows: 128,
        kernels: KernelChoice::Exact,
        cache: CacheType::F32,
        ..Options::default()
    };
    let mut engine = Engine::open(&path, &options, &mut |_, _| {}).expect("it opens");
    let tokens: Vec<u32> = numbers(&golden["tokens"])
        .iter()
        .map(|&t| t as u32)
        .collect();
    let ids = engine
        .source()
        .tokenizer
        .encode(golden["text"].as_str().expect("text"), false);
    assert_eq!(ids, tokens, "token ids of {name}");
    let vocab = engine.source().config.vocab;
    let logits = engine.feed(&tokens, tokens.len()).expect("it fits");
    let mut worst = 0.0f64;
    for (position, (row, top)) in logits
        .chunks(vocab)
        .zip(golden["top"].as_array().expect("positions"))
        .enumerate()
    {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|l| f64::from(l - max).exp()).sum();
        let log_sum = f64::from(max) + sum.ln();
        let expected = top["logsumexp"].as_f64().expect("a number");
        for (id, logit) in numbers(&top["ids"]).iter().zip(numbers(&top["logits"])) {
            let ours = f64::from(row[*id as usize]) - log_sum;
            worst = worst.max((ours - (logit - expected)).abs());
        }
        assert!(row.iter().all(|l| l.is_finite()), "position {position}");
    }
    println!("{name}: largest difference of a log-probability {worst:.2e}");
    // fp32 sums in another order, through a few layers. A wrong rope,
    // norm or mask is off by 0.1 and more.
    assert!(worst < 1e-4, "{name}: {worst}");
}

#[test]
fn the_target_equals_the_reference() {
    compare("target");
}

#[test]
fn the_draft_equals_the_reference() {
    compare("draft");
}
