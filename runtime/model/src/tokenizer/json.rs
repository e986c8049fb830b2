//! A tokenizer from tokenizer.json and tokenizer_config.json, as model hubs publish them.
//!
//! Only what is reproduced exactly is accepted; every other component is an error that names
//! it, since a component left out changes ids without a sign.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::gguf::{ByteAlphabet, byte_of, push_piece, resolve};
use super::special::Strip;
use super::split::GPT2;
use super::vocab::{MAX_TOKENS, TokenKind, Tokens, Vocab};
use super::{Options, Parts, SpacePrefix, TokenizerError};

#[derive(Deserialize)]
struct File<'a> {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(borrow)]
    model: Model<'a>,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model<'a> {
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(borrow)]
    vocab: Entries<'a>,
    #[serde(borrow, default)]
    merges: Vec<Line<'a>>,
}

/// The vocabulary in the file's order.
struct Entries<'a>(Vec<(Text<'a>, u32)>);

/// A string, borrowed where it has no escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// A merge: two tokens with a space between, or an array of two.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line<'a> {
    Joined(#[serde(borrow)] Cow<'a, str>),
    Pair(#[serde(borrow)] Text<'a>, #[serde(borrow)] Text<'a>),
}

impl<'de: 'a, 'a> Deserialize<'de> for Entries<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Entries<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tokens and ids (model.vocab of a BPE model)")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

fn unsupported<T>(what: impl Into<String>) -> Result<T, TokenizerError> {
    Err(TokenizerError::Unsupported { what: what.into() })
}

/// A JSON value for a message, cut to a line.
fn show(value: &Value) -> String {
    value.to_string().chars().take(160).collect()
}

/// The parts of a tokenizer.
pub(super) fn read(bytes: &[u8], config: Option<&[u8]>) -> Result<Parts, TokenizerError> {
    let json = |file| {
        move |e: serde_json::Error| TokenizerError::Json {
            file,
            why: e.to_string(),
        }
    };
    // The kind first: other models have other vocabularies, which would fail with less said.
    let kind: Kind = serde_json::from_slice(bytes).map_err(json("tokenizer.json"))?;
    if kind.model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
        return Err(TokenizerError::Model(kind.model.kind.unwrap_or_default()));
    }
    let file: File<'_> = serde_json::from_slice(bytes).map_err(json("tokenizer.json"))?;
    let config: Value = match config {
        None => Value::Null,
        Some(bytes) => serde_json::from_slice(bytes).map_err(json("tokenizer_config.json"))?,
    };
    check_model(&file)?;
    let (steps, byte_level, metaspace) = pre_tokenizer(&file.pre_tokenizer)?;
    let mut options = Options {
        byte_level,
        whole_pieces: file.model.ignore_merges,
        ..Options::default()
    };
    let replaces_spaces = normalizer(&file.normalizer, &mut options)?;
    if let Some(prefix) = metaspace {
        options.space_prefix = prefix;
    }
    match (byte_level, replaces_spaces || metaspace.is_some()) {
        (true, false) => {}
        (false, true) if steps.is_empty() && file.model.byte_fallback => {}
        _ => {
            return unsupported(
                "a model that is neither byte-level nor SentencePiece with byte fallback",
            );
        }
    }

    let tokens = tokens(&file, byte_level)?;
    let index = Vocab::new(tokens, byte_level);
    let merges = merges(&file.model.merges, &index, byte_level)?;
    let strips = file
        .added_tokens
        .iter()
        .filter(|added| added.lstrip || added.rstrip);
    let strips = strips.map(|added| Strip {
        id: added.id,
        left: added.lstrip,
        right: added.rstrip,
    });
    roles(&file, &config, &mut options)?;
    Ok(Parts {
        merges,
        steps,
        strips: strips.collect(),
        options,
        tokens: index.into_tokens(),
    })
}

#[derive(Deserialize)]
struct Kind {
    model: KindOfModel,
}

#[derive(Deserialize)]
struct KindOfModel {
    #[serde(rename = "type", default)]
    kind: Option<String>,
}

fn check_model(file: &File<'_>) -> Result<(), TokenizerError> {
    let model = &file.model;
    if model.dropout.is_some_and(|p| p != 0.0) {
        return unsupported("model.dropout");
    }
    let affixes = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
    if affixes
        .iter()
        .any(|affix| affix.as_ref().is_some_and(|text| !text.is_empty()))
    {
        return unsupported("model.continuing_subword_prefix or end_of_word_suffix");
    }
    match file.added_tokens.iter().find(|added| added.single_word) {
        Some(added) => unsupported(format!("single_word of the token `{}`", added.content)),
        None => Ok(()),
    }
}

/// The vocabulary and the added tokens by id; ids that nobody has become unused tokens.
fn tokens(file: &File<'_>, byte_level: bool) -> Result<Tokens, TokenizerError> {
    let vocab = &file.model.vocab.0;
    let ids = vocab
        .iter()
        .map(|entry| entry.1)
        .chain(file.added_tokens.iter().map(|added| added.id));
    let count = ids.max().map_or(0, |id| id as usize + 1);
    if count > MAX_TOKENS {
        return Err(TokenizerError::Vocabulary(format!(
            "the id {} is past {MAX_TOKENS}",
            count - 1
        )));
    }
    let mut table: Vec<(&str, TokenKind)> = vec![("", TokenKind::Unused); count];
    for (text, id) in vocab {
        let slot = &mut table[*id as usize];
        if slot.1 != TokenKind::Unused {
            return Err(TokenizerError::Vocabulary(format!(
                "`{}` and `{}` share the id {id}",
                slot.0, text.0
            )));
        }
        let is_byte = file.model.byte_fallback && byte_of(text.0.as_bytes()).is_some();
        *slot = (
            &text.0,
            if is_byte {
                TokenKind::Byte
            } else {
                TokenKind::Normal
            },
        );
    }
    for added in &file.added_tokens {
        let kind = if added.special {
            TokenKind::Control
        } else {
            TokenKind::UserDefined
        };
        table[added.id as usize] = (&added.content, kind);
    }
    let (alphabet, mut scratch, mut tokens) = (ByteAlphabet::new(), Vec::new(), Tokens::default());
    for (text, kind) in table {
        match byte_level {
            true => alphabet.push(&mut tokens, text.as_bytes(), kind, &mut scratch)?,
            false => push_piece(&mut tokens, text.as_bytes(), kind)?,
        }
    }
    Ok(tokens)
}

fn merges(
    lines: &[Line<'_>],
    vocab: &Vocab,
    byte_level: bool,
) -> Result<Vec<super::Merge>, TokenizerError> {
    let lines = lines.iter().map(|line| match line {
        Line::Pair(left, right) => Ok((left.0.as_bytes(), right.0.as_bytes())),
        Line::Joined(line) => match line.split_once(' ') {
            Some((left, right)) => Ok((left.as_bytes(), right.as_bytes())),
            None => Err(line.as_bytes()),
        },
    });
    if byte_level {
        return ByteAlphabet::new().merges(lines, vocab);
    }
    let spaced = |text: &[u8]| String::from_utf8_lossy(text).replace('\u{2581}', " ");
    resolve(lines, |left, right| {
        let (left, right) = (spaced(left), spaced(right));
        let find = |text: &str| vocab.lookup(text.as_bytes());
        Some((find(&left)?, find(&right)?, find(&(left.clone() + &right))?))
    })
}

/// A component and, for a sequence, those in it.
fn flatten<'v>(value: &'v Value, list: &str) -> Vec<&'v Value> {
    match value.get(list).and_then(Value::as_array) {
        Some(items) => items.iter().flat_map(|item| flatten(item, list)).collect(),
        None if value.is_null() => Vec::new(),
        None => vec![value],
    }
}

fn kind(value: &Value) -> &str {
    value["type"].as_str().unwrap_or("")
}

/// Whether spaces are replaced by U+2581, which makes it SentencePiece.
fn normalizer(value: &Value, options: &mut Options) -> Result<bool, TokenizerError> {
    let mut replaces = false;
    for item in flatten(value, "normalizers") {
        match kind(item) {
            "NFC" => options.nfc = true,
            "Prepend" if item["prepend"] == "\u{2581}" => {
                options.space_prefix = SpacePrefix::Always
            }
            "Replace" if item["pattern"]["String"] == " " && item["content"] == "\u{2581}" => {
                replaces = true
            }
            _ => return unsupported(format!("the normalizer {}", show(item))),
        }
    }
    match options.space_prefix != SpacePrefix::Never && !replaces {
        true => unsupported("a normalizer that prepends U+2581 and does not replace spaces"),
        false => Ok(replaces),
    }
}

/// Split steps, whether the model is byte-level, and the prefix of SentencePiece's Metaspace.
type PreTokenizer = (Vec<(String, bool)>, bool, Option<SpacePrefix>);

fn pre_tokenizer(value: &Value) -> Result<PreTokenizer, TokenizerError> {
    let (mut steps, mut byte_level, mut metaspace) = (Vec::new(), false, None);
    for item in flatten(value, "pretokenizers") {
        let refuse = || unsupported(format!("the pre-tokenizer {}", show(item)));
        if byte_level {
            // It has turned the text into its alphabet; patterns would see that.
            return refuse();
        }
        match kind(item) {
            "ByteLevel" if item["add_prefix_space"] != true => {
                if item["use_regex"] != false {
                    steps.push((GPT2.to_owned(), false));
                }
                byte_level = true;
            }
            "Digits" => {
                let pattern = if item["individual_digits"] == true {
                    r"\p{N}"
                } else {
                    r"\p{N}+"
                };
                steps.push((pattern.to_owned(), false));
            }
            "Split" => match split_step(item) {
                Some(Some(step)) => steps.push(step),
                Some(None) => {}
                None => return refuse(),
            },
            "Metaspace" if item["split"] == false && item["replacement"] == "\u{2581}" => {
                metaspace = Some(match item["prepend_scheme"].as_str() {
                    Some("never") => SpacePrefix::Never,
                    Some("first") => SpacePrefix::StartUnlessSpace,
                    Some("always") => SpacePrefix::UnlessSpace,
                    _ => return refuse(),
                });
            }
            _ => return refuse(),
        }
    }
    Ok((steps, byte_level, metaspace))
}

/// A step; `Some(None)` for one without effect, `None` for one that is not supported.
fn split_step(item: &Value) -> Option<Option<(String, bool)>> {
    let pattern = match (
        item["pattern"]["Regex"].as_str(),
        item["pattern"]["String"].as_str(),
    ) {
        (Some(pattern), None) => pattern.to_owned(),
        // Gemma's: by then its normalizer has replaced all spaces.
        (None, Some(" ")) if item["behavior"] == "MergedWithPrevious" => return Some(None),
        (None, Some(text)) => escape(text),
        _ => return None,
    };
    match (
        item["behavior"].as_str()?,
        item["invert"].as_bool().unwrap_or(false),
    ) {
        ("Isolated", _) => Some(Some((pattern, false))),
        // What the pattern matches is kept, and what it does not match removed.
        ("Removed", true) => Some(Some((pattern, true))),
        _ => None,
    }
}

/// A pattern that matches `text` alone.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        if character.is_ascii_punctuation() && !matches!(character, '<' | '>') {
            out.push('\\');
        }
        out.push(character);
    }
    out
}

/// BOS, EOS and unknown: from the configuration, and where it is silent from the
/// post-processor, which adds the first two.
fn roles(file: &File<'_>, config: &Value, options: &mut Options) -> Result<(), TokenizerError> {
    let id_of = |text: &str| {
        let added = file
            .added_tokens
            .iter()
            .find(|added| added.content == text)
            .map(|added| added.id);
        added.or_else(|| {
            file.model
                .vocab
                .0
                .iter()
                .find(|entry| entry.0.0 == text)
                .map(|entry| entry.1)
        })
    };
    let configured = |role: &str| {
        let value = &config[role];
        value
            .as_str()
            .or_else(|| value["content"].as_str())
            .and_then(id_of)
    };
    let (mut first, mut last) = (None, None);
    for item in flatten(&file.post_processor, "processors") {
        match kind(item) {
            "ByteLevel" => {}
            "TemplateProcessing" => {
                let parts = item["single"].as_array().map_or(&[][..], Vec::as_slice);
                let mark = |part: Option<&Value>| {
                    part.and_then(|part| part["SpecialToken"]["id"].as_str())
                        .and_then(id_of)
                };
                (first, last) = (mark(parts.first()), mark(parts.last()));
            }
            _ => return unsupported(format!("the post-processor {}", show(item))),
        }
    }
    options.bos = configured("bos_token").or(first);
    options.add_bos =
        config["add_bos_token"].as_bool().unwrap_or(first.is_some()) && options.bos.is_some();
    options.add_eos = config["add_eos_token"].as_bool().unwrap_or(last.is_some());
    options.ends.extend(configured("eos_token").or(last));
    options.unknown = file.model.unk_token.as_deref().and_then(id_of);
    Ok(())
}
