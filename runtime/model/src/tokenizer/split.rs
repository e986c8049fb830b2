//! The pre-tokeniser: text into the pieces within which merging happens.
//!
//! Each step splits every piece of the step before: what its pattern matches becomes a piece,
//! and so does what lies between two matches. Patterns run on automata, in time linear in the
//! text. The one look-around that published patterns use, `\s+(?!\S)|\s+` at their end, is
//! done by hand: a backtracking engine needs stack for every character of a run of spaces,
//! and fails on long ones.

use regex_automata::meta::{Config, Regex};
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input};

use super::TokenizerError;

/// Most steps of a pre-tokeniser; published ones have up to six.
pub(super) const MAX_STEPS: usize = 16;
/// Longest pattern in bytes.
pub(super) const MAX_PATTERN: usize = 16 << 10;
/// Largest automaton of a pattern in bytes; that of the Qwen2 pattern has some 300 kB.
const MAX_AUTOMATON: usize = 16 << 20;
/// Memory in which an automaton keeps the states it has met, in bytes.
const STATE_CACHE: usize = 1 << 20;

/// The end of a pattern that is matched by hand.
const SPACES: &str = r"|\s+(?!\S)|\s+";
/// GPT-2's pattern, the second step of many others.
pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// A pre-tokeniser that GGUF files name.
pub(super) struct Known {
    /// The names with this behaviour.
    pub(super) names: &'static [&'static str],
    /// The steps' patterns.
    pub(super) patterns: &'static [&'static str],
    /// Whether the published tokenizer composes characters first (Unicode NFC).
    pub(super) nfc: bool,
    /// Whether a piece that is a token is taken as it is, whatever the merges say.
    pub(super) whole_pieces: bool,
    /// Whether a text begins with BOS where the file does not say.
    pub(super) add_bos: bool,
}

/// One row for each behaviour. Patterns are those of the published tokenizer.json files;
/// `docs/decisions/0002-tokenizer.md` says against what each was checked.
pub(super) const KNOWN: &[Known] = &[
    Known {
        names: &["gpt-2", "phi-2"],
        patterns: &[GPT2],
        nfc: false,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &["mpt", "olmo"],
        patterns: &[GPT2],
        nfc: true,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &["smollm", "starcoder", "refact"],
        patterns: &[r"\p{N}", GPT2],
        nfc: false,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &["command-r"],
        patterns: &[r"\p{N}", GPT2],
        nfc: true,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &["qwen2", "deepseek-r1-qwen"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: true,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &["qwen35"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: true,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "pixtral",
            "lfm2",
        ],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: false,
        whole_pieces: true,
        add_bos: true,
    },
    Known {
        names: &["tekken"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: false,
        whole_pieces: true,
        add_bos: true,
    },
    Known {
        names: &["gpt-4o", "llama4"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: false,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &["deepseek-v3"],
        patterns: &[
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ],
        nfc: false,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &["deepseek-coder"],
        patterns: &[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}",
        ],
        nfc: false,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &["falcon"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"],
        nfc: false,
        whole_pieces: false,
        add_bos: false,
    },
    Known {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
        nfc: false,
        whole_pieces: false,
        add_bos: false,
    },
];

/// The GGUF name of a pre-tokeniser with these patterns and properties; the one that composes
/// characters as well, if there is a choice, since readers of GGUF differ in that.
pub(super) fn name_of<'a>(
    patterns: impl Iterator<Item = &'a str> + Clone,
    nfc: bool,
    whole_pieces: bool,
) -> Option<&'static str> {
    let same = |k: &&Known| {
        k.patterns.iter().copied().eq(patterns.clone()) && k.whole_pieces == whole_pieces
    };
    let fitting = || KNOWN.iter().filter(same);
    let exact = fitting().find(|k| k.nfc == nfc);
    exact.or(fitting().next()).map(|k| k.names[0])
}

/// The pre-tokeniser with a GGUF name, or an error that lists the known ones.
pub(super) fn known(name: Option<&str>) -> Result<&'static Known, TokenizerError> {
    let all = || {
        let names: Vec<&str> = KNOWN.iter().flat_map(|row| row.names).copied().collect();
        names.join(", ")
    };
    match name {
        None | Some("") => Err(TokenizerError::NoPreTokeniser { known: all() }),
        Some(name) => KNOWN
            .iter()
            .find(|row| row.names.contains(&name))
            .ok_or_else(|| TokenizerError::PreTokeniser {
                name: name.to_owned(),
                known: all(),
            }),
    }
}

/// One pass over the text.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pattern: String,
    /// Whether text between two matches is dropped rather than a piece.
    drops_gaps: bool,
    /// Pattern 0, and where `trims` pattern 1, the run of spaces at its end.
    regex: Regex,
    /// Whether the pattern ended in `SPACES`.
    trims: bool,
}

impl Step {
    /// Compiles a pattern.
    pub(super) fn new(pattern: &str, drops_gaps: bool) -> Result<Self, TokenizerError> {
        let fail = |why: &str| TokenizerError::Pattern {
            pattern: pattern.chars().take(200).collect(),
            why: why.to_owned(),
        };
        if pattern.len() > MAX_PATTERN {
            return Err(fail("it is longer than 16 KiB"));
        }
        let (head, trims) = match pattern.strip_suffix(SPACES) {
            Some(head) => (head, true),
            None => (pattern, false),
        };
        if has_possessive(head) {
            return Err(fail("it has a possessive quantifier"));
        }
        let patterns = if trims {
            vec![head, r"\s+"]
        } else {
            vec![head]
        };
        let config = Config::new()
            .nfa_size_limit(Some(MAX_AUTOMATON))
            .hybrid_cache_capacity(STATE_CACHE);
        let regex = Regex::builder()
            .configure(config)
            .syntax(syntax::Config::new().nest_limit(100))
            .build_many(&patterns)
            .map_err(|e| match e.syntax_error() {
                Some(syntax) => fail(&syntax.to_string().replace('\n', " ")),
                None => fail(&e.to_string()),
            })?;
        Ok(Step {
            pattern: pattern.to_owned(),
            drops_gaps,
            regex,
            trims,
        })
    }

    /// The pattern as it was given.
    pub(super) fn pattern(&self) -> &str {
        &self.pattern
    }

    /// Whether text between two matches is dropped.
    pub(super) fn drops_gaps(&self) -> bool {
        self.drops_gaps
    }

    /// The first match at or after byte `at`, as start and end.
    fn find(&self, text: &str, at: usize) -> Option<(usize, usize)> {
        // In most patterns every position starts a match; to look there first saves the
        // second pass that finds where a match began.
        let input = Input::new(text).range(at..);
        let found = self
            .regex
            .search(&input.clone().anchored(Anchored::Yes))
            .or_else(|| self.regex.search(&input))?;
        let (start, mut end) = (found.start(), found.end());
        if self.trims && found.pattern().as_usize() == 1 && end < text.len() {
            // `\s+(?!\S)`: the last space of a run goes with the word behind it, unless it is
            // the only one.
            let last = text[start..end]
                .chars()
                .next_back()
                .map_or(0, char::len_utf8);
            if last < end - start {
                end -= last;
            }
        }
        Some((start, end))
    }
}

/// Whether a quantifier is followed by `+`, which our regex syntax reads as a repetition.
fn has_possessive(pattern: &str) -> bool {
    let (mut in_class, mut after_quantifier) = (false, false);
    let mut bytes = pattern.bytes().peekable();
    while let Some(byte) = bytes.next() {
        if byte == b'+' && after_quantifier {
            return true;
        }
        after_quantifier = false;
        match byte {
            b'\\' => {
                let named = bytes
                    .next()
                    .is_some_and(|letter| letter.is_ascii_alphabetic());
                if named && bytes.peek() == Some(&b'{') {
                    // The braces of \p{L} are no quantifier.
                    bytes.by_ref().find(|&byte| byte == b'}');
                }
            }
            b'[' => in_class = true,
            b']' => in_class = false,
            b'?' | b'*' | b'+' | b'}' => after_quantifier = !in_class,
            _ => {}
        }
    }
    false
}

/// Gives every piece of `text` to `emit`, in order.
pub(super) fn split<'t>(steps: &[Step], text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let Some((step, rest)) = steps.split_first() else {
        return emit(text);
    };
    // Where the last piece ended, and where to look on; they differ after an empty match.
    let (mut done, mut at) = (0, 0);
    while let Some((start, end)) = step.find(text, at) {
        if start == end {
            let Some(skipped) = text[end..].chars().next() else {
                break;
            };
            at = end + skipped.len_utf8();
            continue;
        }
        if done < start && !step.drops_gaps {
            split(rest, &text[done..start], emit);
        }
        split(rest, &text[start..end], emit);
        (done, at) = (end, end);
    }
    if done < text.len() && !step.drops_gaps {
        split(rest, &text[done..], emit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let row = known(Some(name)).unwrap();
        let steps: Vec<Step> = row
            .patterns
            .iter()
            .map(|p| Step::new(p, false).unwrap())
            .collect();
        let mut out = Vec::new();
        split(&steps, text, &mut |piece| out.push(piece));
        assert_eq!(out.concat(), text, "{name} loses text");
        out
    }

    #[test]
    fn spaces_go_with_the_word_behind_them() {
        assert_eq!(
            pieces("gpt-2", "a   b \t\tc  "),
            ["a", "  ", " b", " \t", "\t", "c", "  "]
        );
        assert_eq!(
            pieces("qwen2", "x\n\n  y\t z"),
            ["x", "\n\n", " ", " y", "\t", " z"]
        );
        assert_eq!(
            pieces("gpt-2", "\u{3000}\u{3000}好"),
            ["\u{3000}", "\u{3000}", "好"]
        );
    }

    #[test]
    fn digits_are_split_as_the_name_says() {
        assert_eq!(pieces("smollm", "in 1984"), ["in", " ", "1", "9", "8", "4"]);
        assert_eq!(pieces("qwen2", "in 1984"), ["in", " ", "1", "9", "8", "4"]);
        assert_eq!(pieces("llama-bpe", "in 1984"), ["in", " ", "198", "4"]);
        assert_eq!(pieces("gpt-2", "in 1984"), ["in", " 1984"]);
    }

    #[test]
    fn every_known_pattern_compiles_and_loses_nothing() {
        let text = "I'm 3 CAFÉS\r\n\tcafe\u{301} 你好，世界 👩‍👩‍👧 ½ x²  \n \n end  ";
        for name in KNOWN.iter().flat_map(|row| row.names) {
            pieces(name, text);
        }
    }

    #[test]
    fn unknown_and_missing_names_list_the_known_ones() {
        let Err(error) = known(Some("klingon")) else {
            panic!("accepted")
        };
        let text = error.to_string();
        assert!(
            text.contains("`klingon`") && text.contains("qwen2, "),
            "{text}"
        );
        assert!(known(None).is_err() && known(Some("")).is_err());
    }

    #[test]
    fn long_runs_take_linear_time_and_no_stack() {
        let text = format!("{}x", " ".repeat(2_000_000));
        assert_eq!(pieces("qwen2", &text).len(), 2);
        assert_eq!(pieces("gpt-2", &"\t\u{3000}".repeat(500_000)).len(), 1);
    }

    #[test]
    fn what_cannot_be_matched_exactly_is_refused() {
        for pattern in [
            r"(?=x)y",
            r"(a)\1",
            r"[^\s]++x",
            r"a{2}+",
            r"(",
            r"(?:\p{L}{99}){99}",
        ] {
            let error = Step::new(pattern, false).unwrap_err().to_string();
            assert!(error.contains("cannot be used"), "{error}");
        }
        assert!(Step::new(r"[+*]+a\++", false).is_ok());
        assert!(Step::new(&"(".repeat(10_000), false).is_err());
    }
}
