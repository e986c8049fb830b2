//! Token ids are those of the reference tokenizers (case 16), with one BOS (case 17).
//!
//! `tests/data/golden/tokens.py` wrote the ids. The real vocabularies are too large for the
//! repository: `MYQ_MODELS` names a folder with their GGUF files, `MYQ_TEXTS` one with the
//! eval texts, and `MYQ_VOCABS` one with llama.cpp's `ggml-vocab-*.gguf`, `.inp` and `.out`.

use std::path::{Path, PathBuf};

use myq_format::gguf::Gguf;
use myq_model::tokenizer::{GgufVocab, TextStream, Tokenizer, TokenizerError, encode_prompt};
use serde_json::{Value, json};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data")
        .join(name)
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn golden() -> Value {
    serde_json::from_slice(&read(&data("golden/tokens.json"))).unwrap()
}

fn fixture() -> Tokenizer {
    let json = read(&data("target/tokenizer.json"));
    let config = json!({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}});
    Tokenizer::from_tokenizer_json(&json, Some(config.to_string().as_bytes())).unwrap()
}

fn sentencepiece() -> (Value, Tokenizer) {
    let golden = golden();
    let json = golden["sentencepiece"]["tokenizer"].to_string();
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true});
    let config = config.to_string();
    let tokenizer = Tokenizer::from_tokenizer_json(json.as_bytes(), Some(config.as_bytes()));
    (golden, tokenizer.unwrap())
}

/// The folder that an environment variable names.
fn folder(variable: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(variable).map(PathBuf::from);
    if folder.is_none() {
        println!("skipped: {variable} is not set");
    }
    folder
}

fn ids(value: &Value) -> Vec<u32> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|id| id.as_u64().unwrap() as u32).collect()
}

/// 64-bit FNV-1a over the ids as little-endian u32.
fn fnv1a(ids: &[u32]) -> String {
    let bytes = ids.iter().flat_map(|id| id.to_le_bytes());
    let digest = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{digest:016x}")
}

/// The text of tokens, by way of the stream.
fn text(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let (mut stream, mut out) = (TextStream::new(), String::new());
    ids.iter()
        .for_each(|&id| stream.push_token(tokenizer, id, &mut out));
    stream.finish(&mut out);
    out
}

#[test]
fn ids_of_the_fixture_are_the_references() {
    let tokenizer = fixture();
    let reread = Tokenizer::from_bytes(&tokenizer.to_bytes()).unwrap();
    for case in golden()["fixture"].as_array().unwrap() {
        let source = case[0].as_str().unwrap();
        for tokenizer in [&tokenizer, &reread] {
            assert_eq!(
                tokenizer.encode(source, true),
                ids(&case[1]),
                "{source:?}, marks"
            );
            assert_eq!(
                tokenizer.encode(source, false),
                ids(&case[2]),
                "{source:?}, text"
            );
        }
        assert_eq!(text(&tokenizer, &ids(&case[1])), source);
    }
}

#[test]
fn ids_of_sentencepiece_are_the_references() {
    let (golden, tokenizer) = sentencepiece();
    let reread = Tokenizer::from_bytes(&tokenizer.to_bytes()).unwrap();
    let scored = Tokenizer::from_parts(&gguf_of(&golden).view()).unwrap();
    for case in golden["sentencepiece"]["texts"].as_array().unwrap() {
        let source = case[0].as_str().unwrap();
        for tokenizer in [&tokenizer, &reread, &scored] {
            assert_eq!(tokenizer.encode(source, true), ids(&case[1]), "{source:?}");
        }
    }
    assert_eq!((scored.bos(), scored.add_bos()), (Some(1), true));
    assert_eq!(scored.eos_ids(), [2]);
}

/// The owner of what a `GgufVocab` borrows.
struct Vocab {
    tokens: Vec<String>,
    kinds: Vec<i32>,
    scores: Vec<f32>,
}

impl Vocab {
    fn view(&self) -> GgufVocab<'_> {
        GgufVocab {
            model: "llama",
            tokens: self.tokens.iter().map(|token| token.as_bytes()).collect(),
            kinds: self.kinds.clone(),
            scores: self.scores.clone(),
            ..GgufVocab::default()
        }
    }
}

/// The small SentencePiece tokenizer as converters write it into a GGUF: scores for merges.
fn gguf_of(golden: &Value) -> Vocab {
    let model = &golden["sentencepiece"]["tokenizer"]["model"];
    let entries = model["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); entries.len()];
    for (token, id) in entries {
        tokens[id.as_u64().unwrap() as usize] = token.clone();
    }
    let mut scores = vec![f32::NEG_INFINITY; tokens.len()];
    for (rank, merge) in model["merges"].as_array().unwrap().iter().enumerate() {
        let merged = format!(
            "{}{}",
            merge[0].as_str().unwrap(),
            merge[1].as_str().unwrap()
        );
        let id = entries[&merged].as_u64().unwrap() as usize;
        scores[id] = scores[id].max(-(rank as f32));
    }
    let kinds = tokens.iter().map(|token| match token.as_str() {
        "<unk>" => 2,
        "<s>" | "</s>" => 3,
        byte if byte.starts_with("<0x") => 6,
        _ => 1,
    });
    Vocab {
        kinds: kinds.collect(),
        tokens,
        scores,
    }
}

#[test]
fn a_prompt_has_one_bos() {
    let (_, wants) = sentencepiece();
    for text in ["the cat", "<s>the cat", "<s><s>the cat"] {
        let ids = encode_prompt(&wants, text, true);
        assert_eq!(ids.iter().filter(|&&id| id == 1).count(), 1, "{text}");
        assert_eq!(ids[0], 1);
    }
    assert_eq!(
        encode_prompt(&wants, "<s>x", false),
        encode_prompt(&wants, "x", false)
    );
    assert_eq!(encode_prompt(&wants, "", true), [1]);

    let wants_none = fixture();
    assert!(!wants_none.add_bos());
    let text = "<|im_start|>user\nhi<|im_end|>\n";
    assert_eq!(
        encode_prompt(&wants_none, text, true),
        wants_none.encode(text, true)
    );
}

#[test]
fn marks_and_their_roles_are_known() {
    let mut tokenizer = fixture();
    assert_eq!((tokenizer.vocab_size(), tokenizer.bos()), (2048, Some(1)));
    assert_eq!(tokenizer.eos_ids(), [2, 0], "the model's own first");
    tokenizer.add_eos_ids(&[7, 2, 99_999]);
    assert_eq!(tokenizer.eos_ids(), [2, 0, 7]);
    assert!(tokenizer.is_special(2) && !tokenizer.is_special(3) && !tokenizer.is_special(99_999));
    assert_eq!(tokenizer.token_id(b"<|im_end|>"), Some(2));
    assert_eq!(tokenizer.token_bytes(99_999), b"");
    let mut bytes = Vec::new();
    tokenizer
        .encode("好 👩‍👩‍👧", false)
        .iter()
        .for_each(|&id| tokenizer.decode_into(id, &mut bytes));
    assert_eq!(bytes, "好 👩‍👩‍👧".as_bytes());
}

#[test]
fn damaged_sections_are_errors() {
    let whole = fixture().to_bytes();
    let (_, small) = sentencepiece();
    let small = small.to_bytes();
    for length in (0..small.len()).chain([whole.len() - 1, whole.len() / 2]) {
        let bytes = if length < small.len() {
            &small[..length]
        } else {
            &whole[..length]
        };
        let error = Tokenizer::from_bytes(bytes).expect_err("a shortened section");
        assert!(
            matches!(error, TokenizerError::Section { .. }),
            "{length}: {error}"
        );
    }
    let longer = [small.as_slice(), &[0]].concat();
    assert!(
        Tokenizer::from_bytes(&longer)
            .unwrap_err()
            .to_string()
            .contains("1 bytes follow")
    );
    let mut accepted = 0;
    for at in 0..small.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = small.clone();
            bytes[at] ^= flip;
            // A bit of text or of an id may change unnoticed (the container has checksums);
            // what is accepted must then work without a panic.
            if let Ok(tokenizer) = Tokenizer::from_bytes(&bytes) {
                accepted += 1;
                let ids = tokenizer.encode("the cat <s> 你好 \u{1F600}", true);
                let _ = text(&tokenizer, &ids);
            }
        }
    }
    assert!(accepted < small.len() * 3);
}

#[test]
fn what_would_change_ids_is_refused() {
    let source: Value = serde_json::from_slice(&read(&data("target/tokenizer.json"))).unwrap();
    let with = |pointer: &str, value: Value| {
        let mut changed = source.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        Tokenizer::from_tokenizer_json(changed.to_string().as_bytes(), None)
            .unwrap_err()
            .to_string()
    };
    let cases = [
        ("/normalizer", json!({"type": "NFKC"}), "the normalizer"),
        (
            "/pre_tokenizer",
            json!({"type": "Whitespace"}),
            "the pre-tokenizer",
        ),
        ("/pre_tokenizer", Value::Null, "neither byte-level nor"),
        (
            "/pre_tokenizer/pretokenizers/0/behavior",
            json!("Removed"),
            "the pre-tokenizer",
        ),
        (
            "/pre_tokenizer/pretokenizers/0/pattern/Regex",
            json!("(?<=a)b"),
            "look-around",
        ),
        (
            "/pre_tokenizer/pretokenizers/1/add_prefix_space",
            json!(true),
            "the pre-tokenizer",
        ),
        ("/model/type", json!("Unigram"), "`Unigram`"),
        ("/model/dropout", json!(0.1), "dropout"),
        ("/model/merges/0", json!("zz qq"), "merge 0"),
        ("/model/vocab/!", json!(u32::MAX), "past"),
        ("/added_tokens/0/single_word", json!(true), "single_word"),
        (
            "/post_processor",
            json!({"type": "BertProcessing"}),
            "the post-processor",
        ),
    ];
    for (pointer, value, want) in cases {
        let message = with(pointer, value);
        assert!(message.contains(want), "{pointer}: {message}");
    }
    for text in ["", "{", "[]", "{\"model\": 3}"] {
        assert!(Tokenizer::from_tokenizer_json(text.as_bytes(), None).is_err());
    }
}

#[test]
fn gguf_vocabularies_that_contradict_themselves_are_refused() {
    let tokens: Vec<&[u8]> = vec![b"a", b"b", b"ab", b"<s>"];
    let good = GgufVocab {
        model: "gpt2",
        pre: Some("qwen2"),
        tokens,
        kinds: vec![1, 1, 1, 3],
        merges: vec![b"a b"],
        ..GgufVocab::default()
    };
    assert_eq!(
        Tokenizer::from_parts(&good)
            .unwrap()
            .encode("abba<s>", true),
        [2, 1, 0, 3]
    );
    let error = |vocab: GgufVocab<'_>| Tokenizer::from_parts(&vocab).unwrap_err().to_string();
    let unknown = error(GgufVocab {
        pre: Some("klingon"),
        ..good.clone()
    });
    assert!(
        unknown.contains("`klingon`") && unknown.contains("smollm"),
        "{unknown}"
    );
    assert!(
        error(GgufVocab {
            pre: None,
            ..good.clone()
        })
        .contains("does not name")
    );
    assert!(
        error(GgufVocab {
            model: "t5",
            ..good.clone()
        })
        .contains("`t5`")
    );
    assert!(
        error(GgufVocab {
            merges: vec![b"ab"],
            ..good.clone()
        })
        .contains("merge 0, `ab`")
    );
    assert!(
        error(GgufVocab {
            merges: vec![b"b a"],
            ..good.clone()
        })
        .contains("merge 0")
    );
    assert!(
        error(GgufVocab {
            kinds: vec![1],
            ..good.clone()
        })
        .contains("4 tokens but 1")
    );
    assert!(
        error(GgufVocab {
            kinds: vec![1, 1, 9, 3],
            ..good.clone()
        })
        .contains("type 9")
    );
    assert!(
        error(GgufVocab {
            bos: Some(4),
            ..good.clone()
        })
        .contains("id 4 of 4")
    );
    assert!(
        error(GgufVocab {
            add_bos: Some(true),
            ..good.clone()
        })
        .contains("BOS")
    );
    assert!(
        error(GgufVocab {
            tokens: vec![],
            kinds: vec![],
            merges: vec![],
            ..good.clone()
        })
        .contains("no tokens")
    );
    let nan = GgufVocab {
        model: "llama",
        scores: vec![f32::NAN; 4],
        ..good.clone()
    };
    assert!(error(nan).contains("not a number"));
    assert!(
        error(GgufVocab {
            model: "llama",
            ..good
        })
        .contains("scores is missing")
    );
}

/// Reads a tokenizer from the GGUF, and from its own section again.
fn both_ways(path: &Path) -> [Tokenizer; 2] {
    let bytes = read(path);
    let direct = Tokenizer::from_gguf(&Gguf::parse(&bytes).unwrap()).unwrap();
    let section = direct.to_bytes();
    let reread = Tokenizer::from_bytes(&section).unwrap();
    assert_eq!(reread.to_bytes(), section);
    [direct, reread]
}

#[test]
fn ids_of_real_models_are_the_references() {
    let Some(models) = folder("MYQ_MODELS") else {
        return;
    };
    for (name, golden) in golden()["models"].as_object().unwrap() {
        let path = models.join(name);
        if !path.exists() {
            println!("skipped: {name} is not in MYQ_MODELS");
            continue;
        }
        for tokenizer in both_ways(&path) {
            for case in golden["short"].as_array().unwrap() {
                let source = case[0].as_str().unwrap();
                assert_eq!(
                    tokenizer.encode(source, true),
                    ids(&case[1]),
                    "{name}: {source:?}"
                );
            }
            let Some(texts) = folder("MYQ_TEXTS") else {
                continue;
            };
            for (file, want) in golden["long"].as_object().unwrap() {
                let source = String::from_utf8(read(&texts.join(file))).unwrap();
                let got = tokenizer.encode(&source, true);
                assert_eq!(json!([got.len(), fnv1a(&got)]), *want, "{name}: {file}");
                assert_eq!(text(&tokenizer, &got), source);
                println!("{name}: {file}: {} ids equal", got.len());
            }
        }
    }
}

#[test]
fn ids_of_llama_cpps_vocabularies_are_the_references() {
    let Some(vocabs) = folder("MYQ_VOCABS") else {
        return;
    };
    let names = [
        "llama-bpe",
        "llama-spm",
        "phi-3",
        "qwen2",
        "qwen35",
        "gpt-2",
        "mpt",
        "starcoder",
    ];
    for name in names
        .iter()
        .chain(&["refact", "command-r", "deepseek-coder", "falcon"])
    {
        let path = vocabs.join(format!("ggml-vocab-{name}.gguf"));
        let beside = |end: &str| {
            let path = vocabs.join(format!("ggml-vocab-{name}.gguf.{end}"));
            String::from_utf8(read(&path)).unwrap()
        };
        let (inputs, outputs) = (beside("inp"), beside("out"));
        for tokenizer in both_ways(&path) {
            let inputs = inputs.split("\n__ggml_vocab_test__\n");
            for (source, want) in inputs.zip(outputs.lines()) {
                // llama.cpp does not compose characters, as the published tokenizers do.
                if !unicode_normalization::is_nfc(source) {
                    continue;
                }
                let want: Vec<u32> = want
                    .split_whitespace()
                    .map(|id| id.parse().unwrap())
                    .collect();
                assert_eq!(tokenizer.encode(source, false), want, "{name}: {source:?}");
            }
        }
        println!("{name}: {} texts equal", outputs.lines().count());
    }
}
