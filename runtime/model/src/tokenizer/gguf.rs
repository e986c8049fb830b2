//! A tokenizer from the vocabulary, merges and pre-tokeniser name of a GGUF.

use myq_format::gguf::Gguf;

use super::merge::Merge;
use super::split;
use super::vocab::{TokenKind, Tokens, Vocab};
use super::{Options, Parts, SpacePrefix, TokenizerError};

/// What a GGUF says about its tokenizer, under the keys `tokenizer.ggml.*`.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab<'a> {
    /// `model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE).
    pub model: &'a str,
    /// `pre`: the pre-tokeniser's name; byte-level BPE needs it.
    pub pre: Option<&'a str>,
    /// `tokens`: the tokens as the file writes them, by id.
    pub tokens: Vec<&'a [u8]>,
    /// `token_type`: kind numbers by id; empty for all normal.
    pub kinds: Vec<i32>,
    /// `scores` by id; SentencePiece needs them.
    pub scores: Vec<f32>,
    /// `merges`: two tokens with a space between, best first; byte-level BPE needs them.
    pub merges: Vec<&'a [u8]>,
    /// `bos_token_id`.
    pub bos: Option<u32>,
    /// `eos_token_id`, `eot_token_id`, `eom_token_id`: those that are given.
    pub ends: Vec<u32>,
    /// `unknown_token_id`.
    pub unknown: Option<u32>,
    /// `add_bos_token`.
    pub add_bos: Option<bool>,
    /// `add_eos_token`.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`; SentencePiece only.
    pub add_space_prefix: Option<bool>,
}

impl<'a> GgufVocab<'a> {
    /// Collects the keys of a file; absent ones stay empty.
    ///
    /// # Errors
    /// A key of another type than the format asks for.
    pub fn of(file: &Gguf<'a>) -> Result<Self, TokenizerError> {
        let wrong = |key: &str, want: &str| {
            TokenizerError::Vocabulary(format!("tokenizer.ggml.{key} is not {want}"))
        };
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let strings = |name: &str| -> Result<Vec<&'a [u8]>, TokenizerError> {
            if file.get(&key(name)).is_none() {
                return Ok(Vec::new());
            }
            let strings = file.array(&key(name)).and_then(|array| array.strings());
            let strings = strings.ok_or_else(|| wrong(name, "an array of strings"))?;
            Ok(strings.map(|s| s.bytes()).collect())
        };
        let kinds = match file.array(&key("token_type")) {
            None => Vec::new(),
            Some(array) => {
                let numbers = array
                    .integers()
                    .ok_or_else(|| wrong("token_type", "an array of integers"))?;
                numbers.map(|n| i32::try_from(n).unwrap_or(0)).collect()
            }
        };
        let scores = match file.array(&key("scores")) {
            None => Vec::new(),
            Some(array) => array
                .f32s()
                .ok_or_else(|| wrong("scores", "an array of f32"))?
                .collect(),
        };
        let ends = ["eos_token_id", "eot_token_id", "eom_token_id"];
        Ok(GgufVocab {
            model: file
                .str(&key("model"))
                .ok_or_else(|| wrong("model", "given as a string"))?,
            pre: file.str(&key("pre")),
            tokens: strings("tokens")?,
            kinds,
            scores,
            merges: strings("merges")?,
            bos: file.u32(&key("bos_token_id")),
            ends: ends
                .iter()
                .filter_map(|name| file.u32(&key(name)))
                .collect(),
            unknown: file.u32(&key("unknown_token_id")),
            add_bos: file.bool(&key("add_bos_token")),
            add_eos: file.bool(&key("add_eos_token")),
            add_space_prefix: file.bool(&key("add_space_prefix")),
        })
    }

    fn kind(&self, id: usize) -> Result<TokenKind, TokenizerError> {
        match self.kinds.get(id) {
            None => Ok(TokenKind::Normal),
            Some(&number) => TokenKind::from_number(i64::from(number)).ok_or_else(|| {
                TokenizerError::Vocabulary(format!("token {id} has the unknown type {number}"))
            }),
        }
    }
}

/// The parts of a tokenizer.
pub(super) fn read(vocab: &GgufVocab<'_>) -> Result<Parts, TokenizerError> {
    let count = vocab.tokens.len();
    for (name, length) in [
        ("token_type", vocab.kinds.len()),
        ("scores", vocab.scores.len()),
    ] {
        if length != 0 && length != count {
            return Err(TokenizerError::Vocabulary(format!(
                "there are {count} tokens but {length} entries in tokenizer.ggml.{name}"
            )));
        }
    }
    match vocab.model {
        "gpt2" => byte_level(vocab),
        "llama" => sentencepiece(vocab),
        other => Err(TokenizerError::Model(other.to_owned())),
    }
}

fn byte_level(vocab: &GgufVocab<'_>) -> Result<Parts, TokenizerError> {
    let known = split::known(vocab.pre)?;
    let alphabet = ByteAlphabet::new();
    let mut tokens = Tokens::default();
    let mut bytes = Vec::new();
    for (id, text) in vocab.tokens.iter().enumerate() {
        alphabet.push(&mut tokens, text, vocab.kind(id)?, &mut bytes)?;
    }
    let index = Vocab::new(tokens, true);
    let merges = vocab.merges.iter().map(|line| {
        // A token never begins with a space, but it may consist of one: look from the second.
        let space = line
            .iter()
            .skip(1)
            .position(|&byte| byte == b' ')
            .map(|at| at + 1);
        space.map(|at| (&line[..at], &line[at + 1..])).ok_or(*line)
    });
    let merges = alphabet.merges(merges, &index)?;
    Ok(Parts {
        tokens: index.into_tokens(),
        merges,
        steps: known
            .patterns
            .iter()
            .map(|&pattern| (pattern.to_owned(), false))
            .collect(),
        strips: Vec::new(),
        options: Options {
            byte_level: true,
            whole_pieces: known.whole_pieces,
            nfc: known.nfc,
            space_prefix: SpacePrefix::Never,
            add_bos: vocab.add_bos.unwrap_or(known.add_bos),
            add_eos: vocab.add_eos.unwrap_or(false),
            bos: vocab.bos,
            unknown: None,
            ends: vocab.ends.clone(),
        },
    })
}

/// GPT-2's writing of bytes as printable characters: those that are printable in Latin-1
/// stand for themselves, the others are the characters from U+0100 on, in order.
pub(super) struct ByteAlphabet {
    /// For each character below U+0144 its byte.
    bytes: [Option<u8>; 0x144],
}

impl ByteAlphabet {
    pub(super) fn new() -> Self {
        let mut bytes = [None; 0x144];
        let mut moved = 0x100;
        for byte in 0..=255u8 {
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let character = if printable { usize::from(byte) } else { moved };
            moved += usize::from(!printable);
            bytes[character] = Some(byte);
        }
        ByteAlphabet { bytes }
    }

    /// The characters that write `bytes`.
    pub(super) fn encode(&self, bytes: &[u8]) -> String {
        let write = |byte: &u8| {
            let at = self.bytes.iter().position(|b| *b == Some(*byte));
            char::from_u32(at.unwrap_or(0) as u32).unwrap_or_default()
        };
        bytes.iter().map(write).collect()
    }

    /// The bytes that `text` writes, into `out`; `false` if it is not in this alphabet.
    pub(super) fn decode(&self, text: &[u8], out: &mut Vec<u8>) -> bool {
        out.clear();
        let Ok(text) = std::str::from_utf8(text) else {
            return false;
        };
        for character in text.chars() {
            match self.bytes.get(character as usize) {
                Some(Some(byte)) => out.push(*byte),
                _ => return false,
            }
        }
        true
    }

    /// Appends a token. Marks and text outside the alphabet stand for themselves, and
    /// merging cannot produce the latter.
    pub(super) fn push(
        &self,
        tokens: &mut Tokens,
        text: &[u8],
        kind: TokenKind,
        scratch: &mut Vec<u8>,
    ) -> Result<(), TokenizerError> {
        use TokenKind::{Control, Normal, Unknown, Unused, UserDefined};
        let written = self.decode(text, scratch);
        match kind {
            Normal if written => tokens.push(scratch, kind, true),
            // User-defined pieces are given as text, so that the two writings must agree to
            // be one that merging produces.
            Control | Unknown | UserDefined => tokens.push(text, kind, written && scratch == text),
            Normal | Unused | TokenKind::Byte => tokens.push(text, kind, false),
        }
    }

    /// Resolves merges given as two tokens; `Err` carries a line without two.
    pub(super) fn merges<'l>(
        &self,
        lines: impl Iterator<Item = Result<(&'l [u8], &'l [u8]), &'l [u8]>>,
        vocab: &Vocab,
    ) -> Result<Vec<Merge>, TokenizerError> {
        let (mut left, mut right) = (Vec::new(), Vec::new());
        resolve(lines, |first, second| {
            let known = self.decode(first, &mut left) && self.decode(second, &mut right);
            let ids = (vocab.lookup(&left), vocab.lookup(&right));
            left.extend_from_slice(&right);
            known.then_some((ids.0?, ids.1?, vocab.lookup(&left)?))
        })
    }
}

/// Numbers merges in order; an error names the first with a part or result that is no token.
pub(super) fn resolve<'l>(
    lines: impl Iterator<Item = Result<(&'l [u8], &'l [u8]), &'l [u8]>>,
    mut find: impl FnMut(&[u8], &[u8]) -> Option<(u32, u32, u32)>,
) -> Result<Vec<Merge>, TokenizerError> {
    let mut merges = Vec::with_capacity(lines.size_hint().0);
    for (rank, line) in lines.enumerate() {
        let ids = line.ok().and_then(|(left, right)| find(left, right));
        let Some((left, right, result)) = ids else {
            let text = match line {
                Ok((left, right)) => [left, right].map(String::from_utf8_lossy).join(" "),
                Err(line) => String::from_utf8_lossy(line).into_owned(),
            };
            return Err(TokenizerError::Vocabulary(format!(
                "merge {rank}, `{text}`, is not two tokens that join to a third"
            )));
        };
        merges.push(Merge {
            left,
            right,
            result,
            rank: rank as u32,
        });
    }
    Ok(merges)
}

fn sentencepiece(vocab: &GgufVocab<'_>) -> Result<Parts, TokenizerError> {
    if vocab.scores.is_empty() {
        return Err(TokenizerError::Vocabulary(
            "tokenizer.ggml.scores is missing".to_owned(),
        ));
    }
    let mut tokens = Tokens::default();
    for (id, text) in vocab.tokens.iter().enumerate() {
        push_piece(&mut tokens, text, vocab.kind(id)?)?;
    }
    let index = Vocab::new(tokens, false);
    let merges = merges_of_scores(&index, &vocab.scores)?;
    // The numbers that SentencePiece gives where the file does not say.
    let named = |id: u32, name: &str| (index.get(id) == Some(name.as_bytes())).then_some(id);
    let mut ends = vocab.ends.clone();
    if ends.is_empty() {
        ends.extend(named(2, "</s>"));
    }
    let options = Options {
        byte_level: false,
        space_prefix: match vocab.add_space_prefix {
            Some(false) => SpacePrefix::Never,
            _ => SpacePrefix::Always,
        },
        add_bos: vocab.add_bos.unwrap_or(true),
        add_eos: vocab.add_eos.unwrap_or(false),
        bos: vocab.bos.or_else(|| named(1, "<s>")),
        unknown: vocab.unknown.or_else(|| named(0, "<unk>")),
        ends,
        ..Options::default()
    };
    Ok(Parts {
        tokens: index.into_tokens(),
        merges,
        options,
        ..Parts::default()
    })
}

/// Appends a token of SentencePiece: U+2581 is a space, `<0x0A>` a byte.
pub(super) fn push_piece(
    tokens: &mut Tokens,
    text: &[u8],
    kind: TokenKind,
) -> Result<(), TokenizerError> {
    match kind {
        TokenKind::Normal => {
            let text = String::from_utf8_lossy(text).replace('\u{2581}', " ");
            tokens.push(text.as_bytes(), kind, !text.is_empty())
        }
        TokenKind::Byte => match byte_of(text) {
            Some(byte) => tokens.push(&[byte], kind, false),
            None => Err(TokenizerError::Vocabulary(format!(
                "`{}` is of the type byte, but does not read like <0x0A>",
                String::from_utf8_lossy(text)
            ))),
        },
        TokenKind::UserDefined => {
            let text = String::from_utf8_lossy(text).replace('\u{2581}', " ");
            tokens.push(text.as_bytes(), kind, false)
        }
        TokenKind::Control | TokenKind::Unknown | TokenKind::Unused => {
            tokens.push(text, kind, false)
        }
    }
}

/// The byte of `<0x0A>`.
pub(super) fn byte_of(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    if digits.len() != 2 || digits.iter().any(|digit| !digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// SentencePiece joins the adjacent pieces whose joint piece has the best score. As merges:
/// every way to cut a piece in two, with the rank of its score; equal scores, equal ranks.
fn merges_of_scores(vocab: &Vocab, scores: &[f32]) -> Result<Vec<Merge>, TokenizerError> {
    /// Longest piece whose cuts are looked at, in bytes; published ones have up to some 100.
    const LONGEST: usize = 1024;
    let mut order: Vec<u32> = (0..vocab.len() as u32)
        .filter(|&id| {
            vocab
                .get(id)
                .is_some_and(|text| vocab.lookup(text) == Some(id))
        })
        .collect();
    if let Some(id) = order.iter().find(|&&id| scores[id as usize].is_nan()) {
        return Err(TokenizerError::Vocabulary(format!(
            "the score of token {id} is not a number"
        )));
    }
    order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
    let mut merges = Vec::new();
    let (mut rank, mut last) = (0, f32::INFINITY);
    for result in order {
        let score = scores[result as usize];
        if score != last {
            (rank, last) = (merges.len() as u32, score);
        }
        let text = vocab.get(result).unwrap_or_default();
        for at in 1..text.len().min(LONGEST) {
            if let (Some(left), Some(right)) =
                (vocab.lookup(&text[..at]), vocab.lookup(&text[at..]))
            {
                merges.push(Merge {
                    left,
                    right,
                    result,
                    rank,
                });
            }
        }
    }
    Ok(merges)
}
