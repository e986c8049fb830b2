//! What a GGUF says of a tokenizer: the way back from [`super::gguf`].

use super::gguf::ByteAlphabet;
use super::split;
use super::vocab::TokenKind;
use super::{Inner, SpacePrefix, TokenizerError};

/// The values of the keys `tokenizer.ggml.*`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Export {
    /// `model`.
    pub model: &'static str,
    /// `pre`; none for SentencePiece.
    pub pre: Option<&'static str>,
    /// `tokens`, as GGUF writes them, by id.
    pub tokens: Vec<Vec<u8>>,
    /// `token_type` by id.
    pub kinds: Vec<i32>,
    /// `scores` by id; SentencePiece only.
    pub scores: Vec<f32>,
    /// `merges`, best first; byte-level BPE only.
    pub merges: Vec<Vec<u8>>,
    /// `bos_token_id`.
    pub bos: Option<u32>,
    /// `eos_token_id`.
    pub eos: Option<u32>,
    /// `unknown_token_id`.
    pub unknown: Option<u32>,
    /// `add_bos_token`.
    pub add_bos: bool,
    /// `add_eos_token`.
    pub add_eos: bool,
    /// `add_space_prefix`; SentencePiece only.
    pub add_space_prefix: Option<bool>,
}

pub(super) fn export(inner: &Inner) -> Result<Export, TokenizerError> {
    let o = &inner.options;
    let tokens = inner.vocab.tokens();
    let text = |id: u32| inner.vocab.get(id).unwrap_or_default();
    let ids = || 0..inner.vocab.len() as u32;
    let common = Export {
        kinds: tokens.kinds.iter().map(|k| *k as i32).collect(),
        bos: o.bos,
        eos: o.ends.first().copied(),
        unknown: o.unknown,
        add_bos: o.add_bos,
        add_eos: o.add_eos,
        ..Export::default()
    };
    if !o.byte_level {
        return Ok(sentencepiece(inner, common));
    }
    let patterns = inner.steps.iter().map(|s| s.pattern());
    let drops = inner.steps.iter().any(|s| s.drops_gaps());
    let pre = split::name_of(patterns, o.nfc, o.whole_pieces).filter(|_| !drops);
    let pre = pre.ok_or(TokenizerError::NoName)?;
    let alphabet = ByteAlphabet::new();
    let written = |id: u32| match tokens.pieces[id as usize]
        && tokens.kinds[id as usize] == TokenKind::Normal
    {
        true => alphabet.encode(text(id)).into_bytes(),
        false => text(id).to_vec(),
    };
    let merge = |m: &super::merge::Merge| {
        let (left, right) = (
            alphabet.encode(text(m.left)),
            alphabet.encode(text(m.right)),
        );
        format!("{left} {right}").into_bytes()
    };
    let mut merges: Vec<_> = inner.merges.list().to_vec();
    merges.sort_by_key(|m| m.rank);
    Ok(Export {
        model: "gpt2",
        pre: Some(pre),
        tokens: ids().map(written).collect(),
        merges: merges.iter().map(merge).collect(),
        ..common
    })
}

fn sentencepiece(inner: &Inner, common: Export) -> Export {
    let tokens = inner.vocab.tokens();
    let written = |id: u32| {
        let text = inner.vocab.get(id).unwrap_or_default();
        match tokens.kinds[id as usize] {
            TokenKind::Normal | TokenKind::UserDefined => String::from_utf8_lossy(text)
                .replace(' ', "\u{2581}")
                .into_bytes(),
            TokenKind::Byte => format!("<0x{:02X}>", text.first().unwrap_or(&0)).into_bytes(),
            _ => text.to_vec(),
        }
    };
    // A score is a rank with another sign; what no merge makes comes last.
    let mut scores = vec![-1e9f32; tokens.ends.len()];
    for merge in inner.merges.list() {
        let score = &mut scores[merge.result as usize];
        *score = score.max(-(merge.rank as f32));
    }
    Export {
        model: "llama",
        tokens: (0..inner.vocab.len() as u32).map(written).collect(),
        scores,
        add_space_prefix: Some(inner.options.space_prefix != SpacePrefix::Never),
        ..common
    }
}
