//! Text to tokens and back, with the ids of the model's reference tokenizer.
//!
//! A [`Tokenizer`] is byte-level BPE (GPT-2's scheme: Llama 3, Qwen2, SmolLM2) or
//! SentencePiece BPE (Llama 2, TinyLlama, Mistral). It is read from tokenizer.json, from a
//! GGUF's vocabulary, or from the compact section of a `.myq` file, which is the form that
//! loads fastest. Encoding is: special tokens by name (`special`), normalisation, splitting
//! (`split`), merging (`merge`). Why it is written here and not taken from a crate:
//! `docs/decisions/0002-tokenizer.md`.

mod error;
mod export;
mod gguf;
mod hash;
mod json;
mod merge;
mod serial;
mod special;
mod split;
mod stream;
mod vocab;

use std::borrow::Cow;
use std::sync::Arc;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

pub use error::TokenizerError;
pub use export::Export;
pub use gguf::GgufVocab;
pub use stream::TextStream;

use merge::{Merge, Merges};
use special::{Part, Specials, Strip};
use split::Step;
use vocab::{TokenKind, Tokens, Vocab};

/// Tokens that end an answer, by the names that published models give them. A model may end
/// with another one than its `eos` (base models' `<|endoftext|>`, the turn marks of chats).
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "</s>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<end_of_utterance>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// Where a space is put before a text (SentencePiece).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
enum SpacePrefix {
    /// Nowhere.
    #[default]
    Never = 0,
    /// At the start and after every special token.
    Always = 1,
    /// There, unless the text begins with a space.
    UnlessSpace = 2,
    /// At the start only, unless the text begins with a space.
    StartUnlessSpace = 3,
}

/// What is read from a file, before the indices are built.
#[derive(Clone, Debug, Default)]
struct Parts {
    tokens: Tokens,
    merges: Vec<Merge>,
    /// Patterns of the pre-tokeniser, with whether gaps are dropped.
    steps: Vec<(String, bool)>,
    strips: Vec<Strip>,
    options: Options,
}

/// The scalar properties; they are stored as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Options {
    /// Symbols are bytes; else characters, with tokens for the bytes of the others.
    byte_level: bool,
    /// A piece that is a token is taken as it is, whatever the merges say.
    whole_pieces: bool,
    /// Text is composed (Unicode NFC) first.
    nfc: bool,
    space_prefix: SpacePrefix,
    add_bos: bool,
    add_eos: bool,
    bos: Option<u32>,
    /// Stands for what the vocabulary cannot write; without it that is left out.
    unknown: Option<u32>,
    /// All tokens that end an answer, the model's own first.
    ends: Vec<u32>,
}

/// Text to tokens and back. Cloning is cheap: clones share the tables.
#[derive(Clone, Debug)]
pub struct Tokenizer(Arc<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    vocab: Vocab,
    merges: Merges,
    steps: Vec<Step>,
    specials: Specials,
    options: Options,
}

impl Tokenizer {
    /// Reads tokenizer.json, and beside it tokenizer_config.json for the roles of tokens.
    ///
    /// # Errors
    /// Damaged JSON, and every component whose effect is not reproduced exactly.
    pub fn from_tokenizer_json(
        bytes: &[u8],
        config: Option<&[u8]>,
    ) -> Result<Self, TokenizerError> {
        Self::build(json::read(bytes, config)?)
    }

    /// Builds a tokenizer from what a GGUF says about its vocabulary.
    ///
    /// # Errors
    /// An unknown model kind or pre-tokeniser, and a vocabulary that contradicts itself.
    pub fn from_parts(vocab: &GgufVocab<'_>) -> Result<Self, TokenizerError> {
        Self::build(gguf::read(vocab)?)
    }

    /// Reads the tokenizer of a GGUF file; errors as for [`Tokenizer::from_parts`].
    pub fn from_gguf(file: &myq_format::gguf::Gguf<'_>) -> Result<Self, TokenizerError> {
        Self::from_parts(&GgufVocab::of(file)?)
    }

    /// Reads what [`Tokenizer::to_bytes`] wrote.
    ///
    /// # Errors
    /// Every damage that matters, with the offset; nothing is allocated beyond a small
    /// multiple of the length given.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TokenizerError> {
        Self::build(serial::read(bytes)?)
    }

    /// What a GGUF says of this tokenizer.
    ///
    /// # Errors
    /// A pre-tokeniser that no GGUF name stands for.
    pub fn to_gguf(&self) -> Result<Export, TokenizerError> {
        export::export(&self.0)
    }

    /// The compact form for the `.myq` container, little-endian; the same tokenizer always
    /// gives the same bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        serial::write(&self.0)
    }

    /// Checks the parts against one another and indexes them.
    fn build(mut parts: Parts) -> Result<Self, TokenizerError> {
        let damaged = |what: String| Err(TokenizerError::Vocabulary(what));
        let count = parts.tokens.ends.len() as u32;
        if count == 0 {
            return damaged("it has no tokens".to_owned());
        }
        for (index, merge) in parts.merges.iter().enumerate() {
            if [merge.left, merge.right, merge.result]
                .iter()
                .any(|&id| id >= count)
            {
                return damaged(format!(
                    "merge {index} names a token past the last, {count}"
                ));
            }
        }
        let options = &mut parts.options;
        let roles = options
            .ends
            .iter()
            .chain(&options.bos)
            .chain(&options.unknown);
        for &id in roles.chain(parts.strips.iter().map(|strip| &strip.id)) {
            if id >= count {
                return damaged(format!("a special token has the id {id} of {count}"));
            }
        }
        if options.add_bos && options.bos.is_none() {
            return damaged("a text is to begin with BOS, but no token is named as BOS".to_owned());
        }
        let steps = parts
            .steps
            .iter()
            .map(|(pattern, drops)| Step::new(pattern, *drops));
        let steps = steps.collect::<Result<_, _>>()?;
        let vocab = Vocab::new(parts.tokens, options.byte_level);
        let specials = Specials::new(&vocab, parts.strips)?;
        let mut tokenizer = Tokenizer(Arc::new(Inner {
            vocab,
            merges: Merges::new(parts.merges),
            steps,
            specials,
            options: parts.options,
        }));
        tokenizer.find_ends();
        Ok(tokenizer)
    }

    /// Adds the special tokens whose names say that they end an answer.
    fn find_ends(&mut self) {
        let marked = |id: &u32| self.is_special(*id) || self.is_user_defined(*id);
        let is_end = |id: &u32| {
            END_NAMES
                .iter()
                .any(|n| self.token_bytes(*id) == n.as_bytes())
        };
        let ids = (0..self.vocab_size() as u32).filter(marked).filter(is_end);
        let ids: Vec<u32> = ids.collect();
        self.add_eos_ids(&ids);
    }

    /// Adds tokens that end an answer, as generation_config.json lists them; ids past the
    /// vocabulary are ignored.
    pub fn add_eos_ids(&mut self, ids: &[u32]) {
        let size = self.vocab_size() as u32;
        let ends = &mut Arc::make_mut(&mut self.0).options.ends;
        for &id in ids {
            if id < size && !ends.contains(&id) {
                ends.push(id);
            }
        }
    }

    /// The ids of a text, without BOS. Where `parse_special`, marks such as `<|im_end|>` are
    /// recognised in the text; else they are text like any other. Pass `false` for text that
    /// must not be able to end its own turn.
    pub fn encode(&self, text: &str, parse_special: bool) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3 + 1);
        self.encode_into(text, parse_special, &mut out);
        out
    }

    /// As [`Tokenizer::encode`], appending to `out`.
    pub fn encode_into(&self, text: &str, parse_special: bool, out: &mut Vec<u32>) {
        let mut symbols = Vec::new();
        let mut at_start = true;
        self.0.specials.parts(text, parse_special, |part| {
            match part {
                Part::Token(id) => out.push(id),
                Part::Text(text) => self.0.encode_text(text, at_start, &mut symbols, out),
            }
            at_start = false;
        });
    }

    /// Appends the bytes of a token to `out`; those of a mark are its name. Nothing past the
    /// end of the vocabulary.
    pub fn decode_into(&self, id: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(self.token_bytes(id));
    }

    /// The bytes of a token as they appear in text, perhaps a part of a character; see
    /// [`TextStream`]. Empty past the end of the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.0.vocab.get(id).unwrap_or_default()
    }

    /// The id of a token by its bytes: a mark by its name, or a piece of text.
    pub fn token_id(&self, bytes: &[u8]) -> Option<u32> {
        let vocab = &self.0.vocab;
        vocab.lookup(bytes).or_else(|| {
            let marks = (0..vocab.len() as u32)
                .filter(|&id| self.is_special(id) || self.is_user_defined(id));
            marks.into_iter().find(|&id| vocab.get(id) == Some(bytes))
        })
    }

    /// Whether a token is a mark of the format, not text.
    pub fn is_special(&self, id: u32) -> bool {
        matches!(
            self.0.vocab.kind(id),
            Some(TokenKind::Control | TokenKind::Unknown)
        )
    }

    fn is_user_defined(&self, id: u32) -> bool {
        self.0.vocab.kind(id) == Some(TokenKind::UserDefined)
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.0.options.bos
    }

    /// All tokens that end an answer, the model's own first.
    pub fn eos_ids(&self) -> &[u32] {
        &self.0.options.ends
    }

    /// Whether the model was trained on texts that begin with BOS.
    pub fn add_bos(&self) -> bool {
        self.0.options.add_bos
    }

    /// Whether the model was trained on texts that end with EOS.
    pub fn add_eos(&self) -> bool {
        self.0.options.add_eos
    }

    /// Number of tokens; the embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab.len()
    }
}

impl Inner {
    /// The ids of text without marks. `symbols` is scratch memory.
    fn encode_text(&self, text: &str, at_start: bool, symbols: &mut Vec<u32>, out: &mut Vec<u32>) {
        let composed: Cow<'_, str> =
            match self.options.nfc && is_nfc_quick(text.chars()) != IsNormalized::Yes {
                true => text.nfc().collect::<String>().into(),
                false => text.into(),
            };
        if self.options.byte_level {
            split::split(&self.steps, &composed, &mut |piece| {
                self.encode_bytes(piece, symbols, out)
            });
        } else {
            let spaced = self.prefix_space(composed, at_start);
            split::split(&self.steps, &spaced, &mut |piece| {
                self.encode_chars(piece, symbols, out)
            });
        }
    }

    /// SentencePiece's white space. It writes a space as U+2581, and both are one to it; here
    /// tokens and text have spaces.
    fn prefix_space<'t>(&self, text: Cow<'t, str>, at_start: bool) -> Cow<'t, str> {
        let text = match text.contains('\u{2581}') {
            true => text.replace('\u{2581}', " ").into(),
            false => text,
        };
        let add = match self.options.space_prefix {
            SpacePrefix::Never => false,
            SpacePrefix::Always => true,
            SpacePrefix::UnlessSpace => !text.starts_with(' '),
            SpacePrefix::StartUnlessSpace => at_start && !text.starts_with(' '),
        };
        if add { format!(" {text}").into() } else { text }
    }

    /// Byte-level BPE of one piece.
    fn encode_bytes(&self, piece: &str, symbols: &mut Vec<u32>, out: &mut Vec<u32>) {
        if self.options.whole_pieces
            && let Some(id) = self.vocab.lookup(piece.as_bytes())
            && matches!(
                self.vocab.kind(id),
                Some(TokenKind::Normal | TokenKind::UserDefined)
            )
        {
            return out.push(id);
        }
        symbols.clear();
        symbols.extend(
            piece
                .bytes()
                .filter_map(|byte| self.vocab.byte(byte).or(self.options.unknown)),
        );
        self.merges.apply(symbols, out);
    }

    /// SentencePiece BPE of one piece: characters, or the bytes of those without a token.
    fn encode_chars(&self, piece: &str, symbols: &mut Vec<u32>, out: &mut Vec<u32>) {
        symbols.clear();
        for (start, character) in piece.char_indices() {
            let text = &piece[start..start + character.len_utf8()];
            if let Some(id) = self.vocab.lookup(text.as_bytes()) {
                symbols.push(id);
            } else if text.bytes().all(|byte| self.vocab.byte(byte).is_some()) {
                symbols.extend(text.bytes().filter_map(|byte| self.vocab.byte(byte)));
            } else if let Some(unknown) = self.options.unknown
                && symbols.last() != Some(&unknown)
            {
                symbols.push(unknown);
            }
        }
        self.merges.apply(symbols, out);
    }
}

/// The ids of a prompt with exactly the BOS that the model wants: one where it wants one,
/// whether the text has it, the tokenizer adds it, or both would.
///
/// Marks are recognised in the text. `templated` says that it is the output of a chat
/// template: then all BOS at its start become one (templates and system prompts may each
/// bring theirs). Of a raw prompt only the doubled one goes; more were meant.
pub fn encode_prompt(tokenizer: &Tokenizer, text: &str, templated: bool) -> Vec<u32> {
    let mut ids = Vec::with_capacity(text.len() / 3 + 2);
    let wanted = tokenizer.bos().filter(|_| tokenizer.add_bos());
    ids.extend(wanted);
    tokenizer.encode_into(text, true, &mut ids);
    if let Some(bos) = wanted {
        let run = ids.iter().take_while(|&&id| id == bos).count();
        ids.drain(1..if templated { run } else { run.min(2) });
    }
    ids
}
