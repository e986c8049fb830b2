//! The tokenizer section of a `.myq` file: what is needed to run, ready to index.
//!
//! Little-endian, in this order: the magic `MYQT`; version, u32; flags, u32 (bits below);
//! BOS and unknown, u32 each, all ones for none; a list (count u32, then the items) of the
//! ids that end an answer; a list of split steps (flag u8, length u32, pattern); a list of
//! tokens that take white space along (id u32, sides u8); the tokens (count u32, then their
//! ends u32 each, their kinds u8 each with 128 for pieces, their bytes); the merges (count
//! u32, then left, right, result u32 each, and where the ranks are not the positions, those).

use super::merge::Merge;
use super::special::Strip;
use super::split::{MAX_PATTERN, MAX_STEPS};
use super::vocab::{MAX_TOKENS, TokenKind, Tokens};
use super::{Inner, Options, Parts, SpacePrefix, TokenizerError};

const MAGIC: &[u8; 4] = b"MYQT";
const VERSION: u32 = 1;
/// An absent id.
const NONE: u32 = u32::MAX;
/// In a kind byte: merging can produce the token.
const PIECE: u8 = 0x80;

const BYTE_LEVEL: u32 = 1;
const WHOLE_PIECES: u32 = 1 << 1;
const NFC: u32 = 1 << 2;
const ADD_BOS: u32 = 1 << 3;
const ADD_EOS: u32 = 1 << 4;
const RANKS: u32 = 1 << 5;
/// Two bits for [`SpacePrefix`].
const SPACE_SHIFT: u32 = 6;
const KNOWN_FLAGS: u32 = (1 << 8) - 1;

/// The section's bytes.
pub(super) fn write(inner: &Inner) -> Vec<u8> {
    let options = &inner.options;
    let tokens = inner.vocab.tokens();
    let merges = inner.merges.list();
    let ranked = merges
        .iter()
        .enumerate()
        .any(|(i, merge)| merge.rank as usize != i);
    let mut out =
        Vec::with_capacity(1024 + tokens.bytes.len() + tokens.ends.len() * 5 + merges.len() * 16);
    let word = |out: &mut Vec<u8>, value: u32| out.extend_from_slice(&value.to_le_bytes());

    out.extend_from_slice(MAGIC);
    word(&mut out, VERSION);
    let flags = [
        (options.byte_level, BYTE_LEVEL),
        (options.whole_pieces, WHOLE_PIECES),
        (options.nfc, NFC),
        (options.add_bos, ADD_BOS),
        (options.add_eos, ADD_EOS),
        (ranked, RANKS),
    ];
    let flags = flags
        .iter()
        .filter(|(set, _)| *set)
        .fold(0, |all, (_, flag)| all | flag);
    word(
        &mut out,
        flags | (options.space_prefix as u32) << SPACE_SHIFT,
    );
    word(&mut out, options.bos.unwrap_or(NONE));
    word(&mut out, options.unknown.unwrap_or(NONE));
    word(&mut out, options.ends.len() as u32);
    options.ends.iter().for_each(|&id| word(&mut out, id));

    word(&mut out, inner.steps.len() as u32);
    for step in &inner.steps {
        out.push(u8::from(step.drops_gaps()));
        word(&mut out, step.pattern().len() as u32);
        out.extend_from_slice(step.pattern().as_bytes());
    }
    word(&mut out, inner.specials.strips().len() as u32);
    for strip in inner.specials.strips() {
        word(&mut out, strip.id);
        out.push(u8::from(strip.left) | u8::from(strip.right) << 1);
    }

    word(&mut out, tokens.ends.len() as u32);
    tokens.ends.iter().for_each(|&end| word(&mut out, end));
    let kinds = tokens.kinds.iter().zip(&tokens.pieces);
    out.extend(kinds.map(|(kind, piece)| *kind as u8 | if *piece { PIECE } else { 0 }));
    out.extend_from_slice(&tokens.bytes);

    word(&mut out, merges.len() as u32);
    for merge in merges {
        [merge.left, merge.right, merge.result]
            .iter()
            .for_each(|&id| word(&mut out, id));
    }
    if ranked {
        merges.iter().for_each(|merge| word(&mut out, merge.rank));
    }
    out
}

/// A place in the section.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn fail<T>(&self, what: impl Into<String>) -> Result<T, TokenizerError> {
        Err(TokenizerError::Section {
            at: self.at,
            what: what.into(),
        })
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], TokenizerError> {
        let Some(taken) = self.bytes.get(self.at..).and_then(|rest| rest.get(..count)) else {
            return self.fail(format!("{count} more bytes are announced than there are"));
        };
        self.at += count;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, TokenizerError> {
        Ok(self.take(1)?[0])
    }

    fn word(&mut self) -> Result<u32, TokenizerError> {
        Ok(self.words(1)?[0])
    }

    /// `count` words; the length is checked before anything is allocated.
    fn words(&mut self, count: usize) -> Result<Vec<u32>, TokenizerError> {
        let Some(length) = count.checked_mul(4) else {
            return self.fail("a length overflows");
        };
        let (words, _) = self.take(length)?.as_chunks::<4>();
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    fn id(&mut self) -> Result<Option<u32>, TokenizerError> {
        Ok(Some(self.word()?).filter(|&id| id != NONE))
    }

    fn count(&mut self, what: &str, most: usize) -> Result<usize, TokenizerError> {
        let count = self.word()? as usize;
        if count > most {
            return self.fail(format!("{count} {what}; at most {most} are possible"));
        }
        Ok(count)
    }
}

/// The parts of a section.
pub(super) fn read(bytes: &[u8]) -> Result<Parts, TokenizerError> {
    let mut reader = Reader { bytes, at: 0 };
    if reader.take(4)? != MAGIC {
        return Reader { bytes, at: 0 }.fail("the signature is not MYQT");
    }
    let version = reader.word()?;
    if version != VERSION {
        return reader.fail(format!(
            "version {version} is not {VERSION}, the one this program reads"
        ));
    }
    let flags = reader.word()?;
    if flags & !KNOWN_FLAGS != 0 {
        return reader.fail(format!("unknown flags {flags:#x}"));
    }
    let options = read_options(&mut reader, flags)?;
    let steps = read_steps(&mut reader)?;
    let strips = read_strips(&mut reader)?;
    let tokens = read_tokens(&mut reader)?;
    let merges = read_merges(&mut reader, flags & RANKS != 0)?;
    if reader.at != bytes.len() {
        return reader.fail(format!("{} bytes follow the end", bytes.len() - reader.at));
    }
    Ok(Parts {
        tokens,
        merges,
        steps,
        strips,
        options,
    })
}

fn read_options(reader: &mut Reader<'_>, flags: u32) -> Result<Options, TokenizerError> {
    use SpacePrefix::*;
    let space_prefix =
        [Never, Always, UnlessSpace, StartUnlessSpace][(flags >> SPACE_SHIFT & 3) as usize];
    let (bos, unknown) = (reader.id()?, reader.id()?);
    let count = reader.count("ids that end an answer", MAX_TOKENS)?;
    Ok(Options {
        byte_level: flags & BYTE_LEVEL != 0,
        whole_pieces: flags & WHOLE_PIECES != 0,
        nfc: flags & NFC != 0,
        space_prefix,
        add_bos: flags & ADD_BOS != 0,
        add_eos: flags & ADD_EOS != 0,
        bos,
        unknown,
        ends: reader.words(count)?,
    })
}

fn read_steps(reader: &mut Reader<'_>) -> Result<Vec<(String, bool)>, TokenizerError> {
    let count = reader.count("split steps", MAX_STEPS)?;
    let mut steps = Vec::with_capacity(count);
    for _ in 0..count {
        let drops = reader.byte()? != 0;
        let length = reader.count("bytes of a pattern", MAX_PATTERN)?;
        let Ok(pattern) = std::str::from_utf8(reader.take(length)?) else {
            return reader.fail("a pattern is not UTF-8");
        };
        steps.push((pattern.to_owned(), drops));
    }
    Ok(steps)
}

fn read_strips(reader: &mut Reader<'_>) -> Result<Vec<Strip>, TokenizerError> {
    let count = reader.count("special tokens", MAX_TOKENS)?;
    let mut strips = Vec::new();
    for _ in 0..count {
        let (id, sides) = (reader.word()?, reader.byte()?);
        strips.push(Strip {
            id,
            left: sides & 1 != 0,
            right: sides & 2 != 0,
        });
    }
    Ok(strips)
}

fn read_tokens(reader: &mut Reader<'_>) -> Result<Tokens, TokenizerError> {
    let count = reader.count("tokens", MAX_TOKENS)?;
    let ends = reader.words(count)?;
    if !ends.is_sorted() {
        return reader.fail("the tokens' ends are not in order");
    }
    let packed = reader.take(count)?;
    let mut kinds = Vec::with_capacity(count);
    for &byte in packed {
        match TokenKind::from_number(i64::from(byte & !PIECE)) {
            Some(kind) => kinds.push(kind),
            None => return reader.fail(format!("{byte} is not the kind of a token")),
        }
    }
    let pieces = packed.iter().map(|byte| byte & PIECE != 0).collect();
    let bytes = reader
        .take(ends.last().map_or(0, |&end| end as usize))?
        .to_vec();
    Ok(Tokens {
        bytes,
        ends,
        kinds,
        pieces,
    })
}

fn read_merges(reader: &mut Reader<'_>, ranked: bool) -> Result<Vec<Merge>, TokenizerError> {
    let count = reader.word()? as usize;
    let Some(length) = count.checked_mul(12) else {
        return reader.fail("a length overflows");
    };
    let (entries, _) = reader.take(length)?.as_chunks::<12>();
    let ranks = if ranked {
        reader.words(count)?
    } else {
        Vec::new()
    };
    let field = |entry: &[u8; 12], at: usize| {
        u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]])
    };
    let merge = |(index, entry): (usize, &[u8; 12])| Merge {
        left: field(entry, 0),
        right: field(entry, 4),
        result: field(entry, 8),
        rank: ranks
            .get(index)
            .copied()
            .unwrap_or(index as u32)
            .min(u32::MAX - 1),
    };
    Ok(entries.iter().enumerate().map(merge).collect())
}
