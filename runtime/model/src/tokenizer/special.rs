//! Finds the tokens that are not made by merging: marks of the format, user-defined pieces.

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

use super::TokenizerError;
use super::vocab::{TokenKind, Vocab};

/// Whether a special token takes the white space beside it along (tokenizer.json only).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strip {
    /// The token.
    pub(super) id: u32,
    /// Takes what stands before it.
    pub(super) left: bool,
    /// Takes what follows it.
    pub(super) right: bool,
}

/// A stretch of the text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part<'t> {
    /// To be split and merged; never empty.
    Text(&'t str),
    /// A token that stands in the text by name.
    Token(u32),
}

/// The longest of the names at the leftmost place, found in one pass.
#[derive(Clone, Debug)]
struct Finder {
    ids: Vec<u32>,
    names: AhoCorasick,
}

impl Finder {
    fn new(vocab: &Vocab, kinds: &[TokenKind]) -> Result<Option<Self>, TokenizerError> {
        let ids: Vec<u32> = (0..vocab.len() as u32)
            .filter(|&id| vocab.kind(id).is_some_and(|kind| kinds.contains(&kind)))
            .filter(|&id| {
                vocab
                    .get(id)
                    .is_some_and(|name| std::str::from_utf8(name).is_ok())
            })
            .filter(|&id| vocab.get(id).is_some_and(|name| !name.is_empty()))
            .collect();
        if ids.is_empty() {
            return Ok(None);
        }
        let names = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(ids.iter().filter_map(|&id| vocab.get(id)))
            .map_err(|e| TokenizerError::Vocabulary(format!("special tokens: {e}")))?;
        Ok(Some(Finder { ids, names }))
    }
}

/// The special tokens of a vocabulary.
#[derive(Clone, Debug)]
pub(super) struct Specials {
    /// Marks and user-defined pieces.
    all: Option<Finder>,
    /// User-defined pieces alone.
    user_defined: Option<Finder>,
    strips: Vec<Strip>,
}

impl Specials {
    /// Collects them.
    pub(super) fn new(vocab: &Vocab, strips: Vec<Strip>) -> Result<Self, TokenizerError> {
        use TokenKind::{Control, Unknown, UserDefined};
        Ok(Specials {
            all: Finder::new(vocab, &[Control, Unknown, UserDefined])?,
            user_defined: Finder::new(vocab, &[UserDefined])?,
            strips,
        })
    }

    /// The tokens with white space of their own.
    pub(super) fn strips(&self) -> &[Strip] {
        &self.strips
    }

    /// Gives the parts of `text` to `emit`, in order; marks are looked for where `parse_special`.
    pub(super) fn parts<'t>(
        &self,
        text: &'t str,
        parse_special: bool,
        mut emit: impl FnMut(Part<'t>),
    ) {
        let finder = if parse_special {
            &self.all
        } else {
            &self.user_defined
        };
        let mut done = 0;
        for found in finder
            .iter()
            .flat_map(|finder| finder.names.find_iter(text))
        {
            let Some(&id) = finder
                .as_ref()
                .and_then(|f| f.ids.get(found.pattern().as_usize()))
            else {
                continue;
            };
            if found.start() < done {
                // White space that the token before took along.
                continue;
            }
            let mut before = &text[done..found.start()];
            let mut end = found.end();
            if let Some(strip) = self.strips.iter().find(|strip| strip.id == id) {
                if strip.left {
                    before = before.trim_end();
                }
                if strip.right {
                    end = text.len() - text[end..].trim_start().len();
                }
            }
            if !before.is_empty() {
                emit(Part::Text(before));
            }
            emit(Part::Token(id));
            done = end;
        }
        if done < text.len() {
            emit(Part::Text(&text[done..]));
        }
    }
}
