//! The tokens: their bytes, their kinds, and the way from bytes to id.

use super::TokenizerError;
use super::hash::{Slots, bytes as hash_bytes};

/// Most tokens of a vocabulary; the largest published ones have some 262 thousand.
pub(super) const MAX_TOKENS: usize = 1 << 22;

/// What a token is for; the numbers are those of GGUF's `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum TokenKind {
    /// A piece of text.
    Normal = 1,
    /// Stands for text that the vocabulary cannot write.
    Unknown = 2,
    /// A mark of the chat format; text names it only where the caller says so.
    Control = 3,
    /// A piece of text that is found before all splitting and merging.
    UserDefined = 4,
    /// Padding of the table.
    Unused = 5,
    /// One byte of a character that has no token (SentencePiece).
    Byte = 6,
}

impl TokenKind {
    /// The kind with this GGUF number.
    pub(super) fn from_number(number: i64) -> Option<Self> {
        use TokenKind::*;
        [Normal, Unknown, Control, UserDefined, Unused, Byte]
            .into_iter()
            .find(|kind| *kind as i64 == number)
    }
}

/// All tokens, in the order of their ids.
#[derive(Clone, Debug, Default)]
pub(super) struct Tokens {
    /// The tokens' bytes, one after the other, as they appear in text.
    pub(super) bytes: Vec<u8>,
    /// For each id the end of its bytes.
    pub(super) ends: Vec<u32>,
    /// For each id its kind.
    pub(super) kinds: Vec<TokenKind>,
    /// For each id whether merging can produce it: found by [`Vocab::lookup`].
    pub(super) pieces: Vec<bool>,
}

impl Tokens {
    /// Appends a token; `piece` says that merging can produce it.
    pub(super) fn push(
        &mut self,
        bytes: &[u8],
        kind: TokenKind,
        piece: bool,
    ) -> Result<(), TokenizerError> {
        self.bytes.extend_from_slice(bytes);
        if self.ends.len() >= MAX_TOKENS || self.bytes.len() > u32::MAX as usize {
            return Err(TokenizerError::Vocabulary(format!(
                "more than {MAX_TOKENS} tokens or 4 GiB of text"
            )));
        }
        self.ends.push(self.bytes.len() as u32);
        self.kinds.push(kind);
        self.pieces.push(piece);
        Ok(())
    }
}

/// The tokens with an index over the pieces.
#[derive(Clone, Debug)]
pub(super) struct Vocab {
    tokens: Tokens,
    slots: Slots,
    /// For each byte the token that stands for it alone.
    bytes: Box<[Option<u32>; 256]>,
}

impl Vocab {
    /// Indexes the tokens. `byte_level` says whether one-byte pieces stand for bytes, or the
    /// tokens of the kind `Byte` do.
    pub(super) fn new(tokens: Tokens, byte_level: bool) -> Self {
        let mut slots = Slots::new(tokens.ends.len());
        let mut bytes = Box::new([None; 256]);
        for id in 0..tokens.ends.len() as u32 {
            let text = token(&tokens, id);
            let is_piece = tokens.pieces[id as usize];
            if is_piece {
                slots.insert(hash_bytes(slots.seed(), text), id, |other| {
                    token(&tokens, other) == text
                });
            }
            let is_byte = match byte_level {
                true => is_piece,
                false => tokens.kinds[id as usize] == TokenKind::Byte,
            };
            if let (true, [byte]) = (is_byte, text) {
                bytes[usize::from(*byte)].get_or_insert(id);
            }
        }
        Vocab {
            tokens,
            slots,
            bytes,
        }
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.tokens.ends.len()
    }

    /// The tokens as they are stored.
    pub(super) fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// The tokens without the index.
    pub(super) fn into_tokens(self) -> Tokens {
        self.tokens
    }

    /// The bytes of a token; `None` past the end of the table.
    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        ((id as usize) < self.len()).then(|| token(&self.tokens, id))
    }

    /// The kind of a token.
    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.tokens.kinds.get(id as usize).copied()
    }

    /// The piece with exactly these bytes.
    pub(super) fn lookup(&self, piece: &[u8]) -> Option<u32> {
        let hash = hash_bytes(self.slots.seed(), piece);
        self.slots.find(hash, |id| token(&self.tokens, id) == piece)
    }

    /// The token that stands for one byte.
    pub(super) fn byte(&self, byte: u8) -> Option<u32> {
        self.bytes[usize::from(byte)]
    }
}

/// The bytes of a token that exists.
fn token(tokens: &Tokens, id: u32) -> &[u8] {
    let id = id as usize;
    let start = if id == 0 { 0 } else { tokens.ends[id - 1] };
    &tokens.bytes[start as usize..tokens.ends[id] as usize]
}
