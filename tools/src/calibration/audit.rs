//! What a calibration set must not hold: the future, the evaluation, the same thing twice.
//!
//! A set that speaks of what came after the model's cut-off, or of the texts that it will be
//! judged by, makes figures look better than the model is. Everything is found by line, so that
//! a person can look at it, and can be dropped.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::LazyLock;

use regex::Regex;
use serde::Serialize;

use super::dates::{self, Date};
use super::drift::{self, Drift};
use super::{Content, Record};
use crate::eval::detect::Script;

/// Why a record is doubtful.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "reason", rename_all = "kebab-case")]
pub enum Reason {
    /// Its own date is behind the cut-off.
    Dated {
        /// The date.
        date: String,
    },
    /// Its text names a day behind the cut-off.
    Mentions {
        /// The latest.
        date: String,
    },
    /// It looks ahead.
    ForwardLooking {
        /// The words.
        words: Vec<String>,
    },
    /// It says what another record says.
    Duplicate {
        /// File of the earlier one.
        file: usize,
        /// Line of the earlier one.
        line: usize,
    },
    /// It shares a passage with the evaluation text.
    Overlap {
        /// The start of the passage.
        passage: String,
    },
}

/// A doubtful record.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// File, as an index into those read.
    pub file: usize,
    /// Line in the file, from 1.
    pub line: usize,
    /// Why.
    #[serde(flatten)]
    pub reason: Reason,
}

/// The outcome.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Audit {
    /// Records looked at.
    pub records: usize,
    /// Doubtful ones, by line; a record may be doubtful for several reasons.
    pub findings: Vec<Finding>,
    /// Records with a date.
    pub dated: usize,
    /// Whether lengths drift over time, where twenty records or more have a date.
    pub length_drift: Option<Drift>,
    /// Whether the vocabulary does: the share of a record's words that it uses once.
    pub vocabulary_drift: Option<Drift>,
}

/// Words of English and Chinese that speak of what is to come.
static AHEAD: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r"(?ix)
        \b(?: (?:is|are|was|were)\s+(?:expected|projected|forecast(?:ed)?|anticipated|scheduled|slated|set)\s+to
            | we\s+(?:expect|anticipate|forecast|project)
            | expects?\s+to | anticipates?
            | forecasts? | projections? | outlook | guidance\s+for
            | upcoming | forthcoming
            | (?:next|coming)\s+(?:year|quarter|month|decade)s?
            | will\s+be\s+(?:released|launched|announced|published|available)
            | going\s+forward | looking\s+ahead | by\s+the\s+end\s+of\s+(?:the|this|next)\s+(?:year|decade)
        )\b
        | 预计 | 预期 | 预测 | 展望 | 有望 | 即将 | 将于 | 将会 | 拟于 | 计划于
        | 明年 | 后年 | 下个月 | 下季度 | 下一年度? | 未来[一二三四五六七八九十几两\d]+[年月个]",
    )
    .expect("a fixed pattern, run by the tests")
});

/// Characters of a passage that two texts share by accident no more: Latin, Chinese.
const PASSAGE: (usize, usize) = (60, 16);
/// Share of a record's shingles that another one has, from which on it is the same.
const SAME: f64 = 0.8;
/// Words (Latin) or characters (Chinese) of a shingle.
const SHINGLE: usize = 6;

/// Looks through `records`. Without a cut-off, days are not judged; without an evaluation text,
/// overlap is not.
pub fn audit(records: &[Record], cutoff: Option<Date>, evaluation: Option<&str>) -> Audit {
    let known = evaluation.map(Passages::of);
    let mut twins = Twins::default();
    let mut findings = Vec::new();
    for record in records {
        let words = record.words();
        let mut add = |reason| {
            findings.push(Finding {
                file: record.file,
                line: record.line,
                reason,
            });
        };
        if let Some(cutoff) = cutoff {
            if let Some(date) = record.date.filter(|d| *d > cutoff) {
                add(Reason::Dated {
                    date: date.to_string(),
                });
            }
            let latest = dates::mentions(&words).into_iter().map(|m| m.1).max();
            if let Some(date) = latest.filter(|d| *d > cutoff) {
                add(Reason::Mentions {
                    date: date.to_string(),
                });
            }
        }
        let ahead: BTreeSet<String> = AHEAD
            .find_iter(&words)
            .map(|m| m.as_str().to_lowercase())
            .collect();
        if !ahead.is_empty() {
            add(Reason::ForwardLooking {
                words: ahead.into_iter().collect(),
            });
        }
        if let Some((file, line)) = twins.seen(record, &words) {
            add(Reason::Duplicate { file, line });
        }
        if let Some(passage) = known.as_ref().and_then(|k| k.shared(&words)) {
            add(Reason::Overlap { passage });
        }
    }
    let mut dated: Vec<(&Record, Date)> =
        records.iter().filter_map(|r| Some((r, r.date?))).collect();
    dated.sort_by_key(|(_, date)| *date);
    let series = |of: fn(&str) -> f64| {
        let values: Vec<f64> = dated.iter().map(|(r, _)| of(&r.words())).collect();
        drift::test(&values)
    };
    Audit {
        records: records.len(),
        findings,
        dated: dated.len(),
        length_drift: series(|words| words.chars().count() as f64),
        vocabulary_drift: series(used_once),
    }
}

impl Audit {
    /// Lines to drop, by file.
    pub fn doubtful(&self) -> BTreeSet<(usize, usize)> {
        self.findings.iter().map(|f| (f.file, f.line)).collect()
    }
}

/// Share of the different words that occur once.
fn used_once(text: &str) -> f64 {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for word in units(text) {
        *counts.entry(word).or_default() += 1;
    }
    let once = counts.values().filter(|n| **n == 1).count();
    once as f64 / counts.len().max(1) as f64
}

/// Words of Latin text, characters of Chinese.
fn units(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|w| !w.is_empty())
        .flat_map(|word| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let first = rest.chars().next()?;
                let len = if is_chinese(first) {
                    first.len_utf8()
                } else {
                    rest.find(is_chinese).unwrap_or(rest.len())
                };
                let (unit, after) = rest.split_at(len);
                rest = after;
                Some(unit)
            })
        })
}

fn is_chinese(c: char) -> bool {
    Script::of(c) == Some(Script::Chinese)
}

/// Lower case, punctuation and space reduced to one mark.
fn normal(text: &str) -> Vec<char> {
    let mut out: Vec<char> = Vec::with_capacity(text.len());
    for c in text.chars().flat_map(char::to_lowercase) {
        if c.is_alphanumeric() {
            out.push(c);
        } else if out.last().is_some_and(|l| *l != ' ') {
            out.push(' ');
        }
    }
    out
}

fn hash(text: impl Iterator<Item = char>) -> u64 {
    // FNV-1a over characters; passages found are compared no further, at 2⁻⁶⁴ each.
    text.fold(0xcbf2_9ce4_8422_2325, |h, c| {
        (h ^ u64::from(u32::from(c))).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Every passage of an evaluation text.
struct Passages {
    latin: HashSet<u64>,
    chinese: HashSet<u64>,
}

impl Passages {
    fn of(text: &str) -> Passages {
        let text = normal(text);
        let all = |n: usize| text.windows(n).map(|w| hash(w.iter().copied())).collect();
        let chinese = text
            .windows(PASSAGE.1)
            .filter(|w| mostly_chinese(w))
            .map(|w| hash(w.iter().copied()))
            .collect();
        Passages {
            latin: all(PASSAGE.0),
            chinese,
        }
    }

    fn shared(&self, text: &str) -> Option<String> {
        let text = normal(text);
        let found = |n: usize, known: &HashSet<u64>, want: fn(&[char]) -> bool| {
            text.windows(n)
                .find(|w| want(w) && known.contains(&hash(w.iter().copied())))
                .map(|w| w.iter().collect::<String>())
        };
        found(PASSAGE.1, &self.chinese, mostly_chinese)
            .or_else(|| found(PASSAGE.0, &self.latin, |_| true))
    }
}

fn mostly_chinese(window: &[char]) -> bool {
    2 * window.iter().filter(|c| is_chinese(**c)).count() > window.len()
}

/// Records seen, by their shingles.
#[derive(Default)]
struct Twins {
    first: HashMap<u64, usize>,
    records: Vec<(usize, usize)>,
}

impl Twins {
    /// The earlier record that says the same.
    fn seen(&mut self, record: &Record, words: &str) -> Option<(usize, usize)> {
        // One long text is not a record among others.
        if matches!(record.content, Content::Text(_)) && record.raw.is_empty() {
            return None;
        }
        let units: Vec<String> = units(words).map(str::to_lowercase).collect();
        let n = SHINGLE.min(units.len()).max(1);
        let shingles: BTreeSet<u64> = units
            .windows(n)
            .map(|w| hash(w.join(" ").chars()))
            .collect();
        let mut hits: HashMap<usize, usize> = HashMap::new();
        for s in &shingles {
            if let Some(of) = self.first.get(s) {
                *hits.entry(*of).or_default() += 1;
            }
        }
        let index = self.records.len();
        self.records.push((record.file, record.line));
        for s in &shingles {
            self.first.entry(*s).or_insert(index);
        }
        let (of, most) = hits
            .into_iter()
            .max_by_key(|(of, n)| (*n, usize::MAX - of))?;
        (most as f64 >= SAME * shingles.len() as f64).then(|| self.records[of])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(line: usize, words: &str, date: Option<Date>) -> Record {
        Record {
            file: 0,
            line,
            raw: words.to_owned(),
            content: Content::Text(words.to_owned()),
            date,
        }
    }

    #[test]
    fn planted_lines_are_found_and_clean_ones_are_not() {
        let cutoff = Date::new(2024, 3, 1);
        let evaluation = "The quick brown fox jumps over the lazy dog while seven wizards watch from the old stone tower. 这条河从北方的群山中流出来,经过许多古老的村庄和城市。";
        let clean = [
            "In 2023 the museum opened a new wing. Visitors came from all over the country.",
            "量化把权重映射到有限个整数格点上,分组之后每组各有自己的比例。",
            "A sort is stable when equal elements keep their order; merge sort is.",
            "The report of 2024-02-28 lists the members and their offices.",
            "河边的村庄在春天很安静,孩子们在田里放风筝。",
            "def add(a, b):\n    return a + b",
        ];
        let planted = [
            (
                "The 2024-05-17 session adopted the text without a vote.",
                "mentions",
            ),
            ("截至2024年8月底,公司共有三千名员工。", "mentions"),
            (
                "Profits are expected to rise as the plant opens.",
                "forward-looking",
            ),
            (
                "公司预计收入增长两成,并展望下季度的订单。",
                "forward-looking",
            ),
            (
                "A sort is stable when equal elements keep their order;  merge sort IS!",
                "duplicate",
            ),
            (
                "He wrote: the quick brown fox jumps over the lazy dog, while seven wizards watch from the tower.",
                "overlap",
            ),
            (
                "他说这条河从北方的群山中流出来,经过许多古老的村庄,风景很好。",
                "overlap",
            ),
        ];
        let mut records: Vec<Record> = Vec::new();
        for (i, words) in clean.iter().enumerate() {
            records.push(text(i + 1, words, None));
        }
        for (i, (words, _)) in planted.iter().enumerate() {
            records.push(text(101 + i, words, None));
        }
        records.push(text(
            200,
            "An old tale of a miller and his three sons.",
            Date::new(2024, 3, 2),
        ));
        records.push(text(
            201,
            "An old song of a sailor at the harbour wall.",
            Date::new(2024, 3, 1),
        ));
        let audit = audit(&records, cutoff, Some(evaluation));
        let mut lines: Vec<usize> = audit.doubtful().iter().map(|d| d.1).collect();
        lines.sort_unstable();
        assert_eq!(
            lines,
            [101, 102, 103, 104, 105, 106, 107, 200],
            "{:#?}",
            audit.findings
        );
        for (i, (_, reason)) in planted.iter().enumerate() {
            let found = audit.findings.iter().filter(|f| f.line == 101 + i);
            let names: Vec<String> = found
                .map(|f| serde_json::to_value(f).expect("plain data")["reason"].to_string())
                .collect();
            assert!(
                names.iter().any(|n| n.contains(reason)),
                "{names:?}, {reason}"
            );
        }
        let twin = audit
            .findings
            .iter()
            .find(|f| f.line == 105)
            .expect("found");
        assert_eq!(twin.reason, Reason::Duplicate { file: 0, line: 3 });
        assert_eq!((audit.records, audit.dated), (15, 2));
    }

    #[test]
    fn a_set_that_changes_over_the_years_drifts() {
        let series = |grows: bool| {
            let record = |i: usize| {
                let n = 37 * i % 23 + if grows { 3 * i } else { 100 };
                let words: Vec<String> = (0..n).map(|k| format!("w{}", k * (i + 7) % 61)).collect();
                text(
                    i + 1,
                    &words.join(" "),
                    Date::new(2000 + (i / 12) as i32, 1 + (i % 12) as u8, 1),
                )
            };
            let mut records: Vec<Record> = (0..120).map(record).collect();
            // The order in the file does not matter.
            records.reverse();
            audit(&records, None, None).length_drift.expect("dated")
        };
        assert!(series(true).drifts);
        assert!(!series(false).drifts);
    }
}
