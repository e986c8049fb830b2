//! The header of a `.myq` file, as JSON and as the caller sees it.

use myq_blocks::Layout;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Error;

/// What a `.myq` file says of its model besides the tensors.
#[derive(Clone, PartialEq, Debug)]
pub struct Header {
    /// The model's configuration, a JSON object that the model crate defines.
    pub config: Value,
    /// The chat template, as published with the model.
    pub chat_template: Option<String>,
    /// The quantisation recipe: which tensors got which type, and by what method.
    pub recipe: Value,
    /// Where the file comes from.
    pub provenance: Provenance,
    /// Order of rows in the tensors: a name of [`Layout`].
    pub layout: String,
    /// How to read the tokenizer section.
    pub tokenizer_kind: String,
}

impl Header {
    /// What serde cannot check.
    pub(super) fn check(&self) -> Result<(), Error> {
        let wrong = |field: &str, problem| {
            Err(Error::HeaderField {
                field: field.into(),
                problem,
            })
        };
        if !self.config.is_object() {
            return wrong("config", "is not a JSON object");
        }
        if Layout::from_name(&self.layout).is_none() {
            return Err(Error::UnknownLayout {
                layout: self.layout.clone(),
            });
        }
        for source in &self.provenance.sources {
            parse_hex(&source.blake3, "provenance.sources")?;
        }
        if let Some(hash) = &self.provenance.calibration {
            parse_hex(hash, "provenance.calibration")?;
        }
        Ok(())
    }
}

/// Where a file comes from; nothing in it depends on time or machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Name and version of the program that wrote the file.
    pub tool: String,
    /// Name of the recipe.
    pub recipe: String,
    /// The files it was made from.
    pub sources: Vec<Source>,
    /// BLAKE3 of the calibration set in hexadecimal; `None` if none was used.
    pub calibration: Option<String>,
}

/// One file that a model was made from.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// File name without its folder.
    pub name: String,
    /// BLAKE3 of its bytes in hexadecimal.
    pub blake3: String,
}

/// The tokenizer section.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TokenizerRecord {
    pub(super) kind: String,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) blake3: String,
}

/// One row of the tensor table.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) blake3: String,
}

/// The JSON of the header; the order of the fields is that of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stored {
    config: Value,
    chat_template: Option<String>,
    recipe: Value,
    provenance: Provenance,
    layout: String,
    pub(super) tokenizer: TokenizerRecord,
    pub(super) tensors: Vec<Record>,
}

impl Stored {
    pub(super) fn new(header: &Header, tokenizer: TokenizerRecord, tensors: Vec<Record>) -> Self {
        Stored {
            config: sorted(&header.config),
            chat_template: header.chat_template.clone(),
            recipe: sorted(&header.recipe),
            provenance: header.provenance.clone(),
            layout: header.layout.clone(),
            tokenizer,
            tensors,
        }
    }

    /// The caller's view, the tokenizer section, the tensor table.
    pub(super) fn split(self) -> (Header, TokenizerRecord, Vec<Record>) {
        let header = Header {
            config: self.config,
            chat_template: self.chat_template,
            recipe: self.recipe,
            provenance: self.provenance,
            layout: self.layout,
            tokenizer_kind: self.tokenizer.kind.clone(),
        };
        (header, self.tokenizer, self.tensors)
    }
}

/// The value with the keys of every object in order, so that the bytes do not depend on how
/// `serde_json` was built (its maps keep insertion order if any crate asks for it).
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            let entries = entries
                .into_iter()
                .map(|(key, value)| (key.clone(), sorted(value)));
            Value::Object(entries.collect::<Map<_, _>>())
        }
        Value::Array(values) => Value::Array(values.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

/// A checksum of 64 hexadecimal digits in lower case, the one way we write them.
pub(super) fn parse_hex(text: &str, field: &str) -> Result<[u8; 32], Error> {
    let lower = text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let hash = lower.then(|| blake3::Hash::from_hex(text).ok()).flatten();
    hash.map(|h| *h.as_bytes())
        .ok_or_else(|| Error::HeaderField {
            field: format!("blake3 of {field}"),
            problem: "is not 64 hexadecimal digits in lower case",
        })
}
