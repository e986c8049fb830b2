//! Faults that people see at once and perplexity does not: repetition, another language, garbage.

use serde::Serialize;

/// What is wrong with a text, and from which character on.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "fault", rename_all = "kebab-case")]
pub enum Fault {
    /// The same passage again and again.
    Repetition {
        /// The passage.
        passage: String,
        /// How often it stands there in a row, or in all.
        times: usize,
    },
    /// A script that neither the prompt nor the answer's beginning has.
    Switch {
        /// The script.
        to: &'static str,
        /// Share of the letters that are of it.
        share: f64,
    },
    /// Characters that no text has: replacement marks, controls, private ones, or letters without
    /// any words.
    Garbage {
        /// What was found.
        what: String,
    },
    /// Nothing was said.
    Empty,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Repetition { passage, times } => write!(f, "{times} times `{passage}`"),
            Fault::Switch { to, share } => {
                write!(
                    f,
                    "goes over to {to} ({:.0} % of the letters)",
                    100.0 * share
                )
            }
            Fault::Garbage { what } => write!(f, "garbage: {what}"),
            Fault::Empty => write!(f, "says nothing"),
        }
    }
}

/// Times in a row that a passage may stand.
const IN_A_ROW: usize = 4;
/// Words (characters in Chinese) of the passages that are counted over the whole text.
const PASSAGE: usize = 8;
/// Share of the passages that may have been there before.
const AGAIN: f64 = 0.5;
/// Share of the letters that may be of a script that was not asked for.
const FOREIGN: f64 = 0.15;

/// Looks for faults in an answer to `prompt`; `wanted` are scripts that the prompt asks for beside
/// its own.
pub fn faults(prompt: &str, answer: &str, wanted: &[Script]) -> Vec<Fault> {
    let text = answer.trim();
    if text.is_empty() {
        return vec![Fault::Empty];
    }
    let mut all = Vec::new();
    all.extend(garbage(text));
    all.extend(repetition(text));
    all.extend(switch(prompt, text, wanted));
    all
}

/// Writing systems that are told apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Script {
    /// Latin.
    Latin,
    /// Chinese characters.
    Chinese,
    /// Japanese syllables.
    Kana,
    /// Korean.
    Hangul,
    /// Cyrillic.
    Cyrillic,
    /// Arabic and Hebrew.
    Semitic,
    /// Thai, Devanagari and their neighbours.
    Indic,
    /// Greek.
    Greek,
}

impl Script {
    /// All of them.
    const ALL: [Script; 8] = [
        Script::Latin,
        Script::Chinese,
        Script::Kana,
        Script::Hangul,
        Script::Cyrillic,
        Script::Semitic,
        Script::Indic,
        Script::Greek,
    ];

    /// The script of a letter.
    pub fn of(c: char) -> Option<Script> {
        Some(match c {
            'a'..='z' | 'A'..='Z' | '\u{c0}'..='\u{24f}' => Script::Latin,
            '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3134f}' => {
                Script::Chinese
            }
            '\u{3040}'..='\u{30ff}' => Script::Kana,
            '\u{1100}'..='\u{11ff}' | '\u{ac00}'..='\u{d7af}' => Script::Hangul,
            '\u{400}'..='\u{52f}' => Script::Cyrillic,
            '\u{590}'..='\u{77f}' => Script::Semitic,
            '\u{900}'..='\u{e7f}' => Script::Indic,
            '\u{370}'..='\u{3ff}' => Script::Greek,
            _ => return None,
        })
    }

    /// The script of this name.
    pub fn named(name: &str) -> Option<Script> {
        let mut all = Script::ALL.into_iter();
        all.find(|s| s.name().eq_ignore_ascii_case(name))
    }

    fn name(self) -> &'static str {
        match self {
            Script::Latin => "Latin",
            Script::Chinese => "Chinese",
            Script::Kana => "Japanese",
            Script::Hangul => "Korean",
            Script::Cyrillic => "Cyrillic",
            Script::Semitic => "Arabic or Hebrew",
            Script::Indic => "Thai or Indic",
            Script::Greek => "Greek",
        }
    }
}

/// Share of each script among the letters of a text, a Chinese character for three letters.
fn shares(text: &str) -> [f64; 8] {
    let mut counts = [0.0; 8];
    for script in text.chars().filter_map(Script::of) {
        let weight = match script {
            Script::Chinese | Script::Kana | Script::Hangul => 3.0,
            _ => 1.0,
        };
        counts[script as usize] += weight;
    }
    let all: f64 = counts.iter().sum();
    counts.map(|c| if all > 0.0 { c / all } else { 0.0 })
}

/// Text without what stands in code marks: code is Latin in every language.
fn without_code(text: &str) -> String {
    let fences = text.split("```").step_by(2);
    let lines = fences.flat_map(|part| part.split('`').step_by(2));
    lines.collect::<Vec<_>>().join(" ")
}

fn switch(prompt: &str, text: &str, wanted: &[Script]) -> Option<Fault> {
    let text = without_code(text);
    let (asked, found) = (shares(prompt), shares(&text));
    let main = Script::ALL
        .into_iter()
        .max_by(|a, b| asked[*a as usize].total_cmp(&asked[*b as usize]))?;
    for script in Script::ALL {
        let allowed = asked[script as usize] > 0.05
            || wanted.contains(&script)
            // Names and terms are Latin in every language.
            || script == Script::Latin && main != Script::Latin && found[script as usize] < 0.5;
        let share = found[script as usize];
        if !allowed && share > FOREIGN {
            return Some(Fault::Switch {
                to: script.name(),
                share,
            });
        }
    }
    // Neither the prompt's script nor one that was asked for is left at the end.
    let tail: String = text.chars().rev().take(200).collect();
    let tail_shares = shares(&tail);
    let wanted_share: f64 = Script::ALL
        .into_iter()
        .filter(|s| *s == main || wanted.contains(s))
        .map(|s| tail_shares[s as usize])
        .sum();
    let letters = tail.chars().filter_map(Script::of).count();
    if asked[main as usize] > 0.5 && letters >= 60 && wanted_share < 0.2 {
        let to = Script::ALL
            .into_iter()
            .max_by(|a, b| tail_shares[*a as usize].total_cmp(&tail_shares[*b as usize]))?;
        return Some(Fault::Switch {
            to: to.name(),
            share: tail_shares[to as usize],
        });
    }
    None
}

fn repetition(text: &str) -> Option<Fault> {
    let units = units(text);
    if let Some(fault) = in_a_row(&units) {
        return Some(fault);
    }
    let passages: Vec<&[&str]> = units.windows(PASSAGE).collect();
    let mut seen = std::collections::HashMap::new();
    let mut again = 0;
    for p in &passages {
        let times = seen.entry(*p).or_insert(0usize);
        again += usize::from(*times > 0);
        *times += 1;
    }
    if passages.len() >= 4 * PASSAGE && again as f64 > AGAIN * passages.len() as f64 {
        let (passage, times) = seen.into_iter().max_by_key(|(p, n)| (*n, p.len()))?;
        return Some(Fault::Repetition {
            passage: passage.join(" "),
            times,
        });
    }
    None
}

/// A passage of up to forty units that stands there [`IN_A_ROW`] times and over.
fn in_a_row(units: &[&str]) -> Option<Fault> {
    for len in 1..=40.min(units.len() / IN_A_ROW) {
        let mut run = 0;
        for i in len..units.len() {
            run = if units[i] == units[i - len] {
                run + 1
            } else {
                0
            };
            let times = run / len + 1;
            // Short ones occur in honest text: ", , ," in tables, "ha ha ha".
            let enough = if len < 3 { 3 * IN_A_ROW } else { IN_A_ROW };
            if times > enough {
                let words = &units[i + 1 - len..=i];
                if !words.iter().any(|w| w.chars().any(char::is_alphabetic)) {
                    continue;
                }
                return Some(Fault::Repetition {
                    passage: words.join(" "),
                    times,
                });
            }
        }
    }
    None
}

/// Words, and Chinese characters by themselves.
fn units(text: &str) -> Vec<&str> {
    let mut out = Vec::new();
    for word in text.split_whitespace() {
        let mut start = 0;
        for (at, c) in word.char_indices() {
            let alone = matches!(Script::of(c), Some(Script::Chinese | Script::Kana))
                || ('\u{3000}'..='\u{303f}').contains(&c)
                || ('\u{ff00}'..='\u{ffef}').contains(&c);
            if alone {
                if start < at {
                    out.push(&word[start..at]);
                }
                out.push(&word[at..at + c.len_utf8()]);
                start = at + c.len_utf8();
            }
        }
        if start < word.len() {
            out.push(&word[start..]);
        }
    }
    out
}

fn garbage(text: &str) -> Option<Fault> {
    let total = text.chars().count();
    let odd = |c: char| {
        c == '\u{fffd}'
            || c.is_control() && !matches!(c, '\n' | '\r' | '\t')
            || ('\u{e000}'..='\u{f8ff}').contains(&c)
            || ('\u{fff0}'..='\u{fffc}').contains(&c)
    };
    let count = text.chars().filter(|c| odd(*c)).count();
    if count * 200 > total {
        return Some(Fault::Garbage {
            what: format!("{count} of {total} characters are no text"),
        });
    }
    // Marks and digits without words between them.
    let letters = text.chars().filter(|c| c.is_alphabetic()).count();
    let solid = text.chars().filter(|c| !c.is_whitespace()).count();
    if solid >= 60 && letters * 10 < solid {
        return Some(Fault::Garbage {
            what: format!("{letters} letters among {solid} characters"),
        });
    }
    let longest = text
        .split(|c: char| !c.is_alphanumeric() || Script::of(c) == Some(Script::Chinese))
        .map(|w| w.chars().count())
        .max()
        .unwrap_or(0);
    if longest > 80 {
        return Some(Fault::Garbage {
            what: format!("a word of {longest} letters"),
        });
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const EN: &str = "Tell me about rivers.";
    const ZH: &str = "请介绍一下河流。";
    const GOOD_EN: &str = "A river is a natural stream of fresh water that flows over land towards a lake, a sea or another river. Its water comes from rain, from springs and from melting snow. Where it leaves the hills it slows down, and drops the sand and stones it has carried. Towns grew up along rivers because they gave water, food and a way to travel.";
    const GOOD_ZH: &str = "河流是陆地表面的天然水流,由雨水、泉水和融雪汇集而成,最后流入湖泊或海洋。上游坡度大,水流急,常常切出峡谷;到了下游,河道变宽,泥沙沉积下来,形成平原和三角洲。许多城市依河而建,因为河流提供水源、食物和运输的便利。";
    const CODE: &str = "Here is a function:\n\n```python\ndef add(a, b):\n    return a + b\n```\n\nCall it as `add(1, 2)`, which gives 3.";

    #[test]
    fn honest_texts_have_no_faults() {
        for (prompt, text) in [
            (EN, GOOD_EN),
            (ZH, GOOD_ZH),
            (EN, CODE),
            (ZH, CODE_ZH),
            (EN, LIST),
            (ZH, MIXED),
        ] {
            assert_eq!(faults(prompt, text, &[]), [], "{text}");
        }
        // A translation was asked for.
        let prompt = "Translate into Chinese: rivers flow to the sea.";
        assert_eq!(faults(prompt, "河流奔向大海。", &[Script::Chinese]), []);
    }

    const CODE_ZH: &str = "下面是一个求和函数:\n\n```python\ndef add(first_number, second_number):\n    \"\"\"Return the sum.\"\"\"\n    return first_number + second_number\n```\n\n调用 `add(1, 2)` 得到 3。";
    const LIST: &str = "1. Wash the rice.\n2. Add the water.\n3. Bring it to the boil.\n4. Turn the heat down and wait for fifteen minutes.\n5. Let it rest before you serve it.";
    const MIXED: &str = "Transformer 模型由 Google 在 2017 年提出,论文题目是 Attention Is All You Need。它用自注意力代替循环结构,训练时可以并行。";

    #[test]
    fn planted_faults_are_found() {
        let loops = format!("{GOOD_EN} {}", "It flows to the sea. ".repeat(8));
        let loops_zh = format!("{GOOD_ZH}{}", "河流很长。".repeat(9));
        let word = format!("The river is {}", "very ".repeat(30));
        // Sentences in turn, never twice in a row.
        let turns: String = (0..24)
            .map(|i| {
                [
                    "The river is long and wide and deep here. ",
                    "Its banks are green and soft in the spring. ",
                    "Boats go up and down it all day long. ",
                ][i * 7 % 3]
            })
            .collect();
        for text in [&loops, &loops_zh, &word, &turns] {
            let prompt = if text.contains('河') { ZH } else { EN };
            let found = faults(prompt, text, &[]);
            assert!(
                matches!(found[..], [Fault::Repetition { .. }]),
                "{text}: {found:?}"
            );
        }
        let switched = format!("{GOOD_ZH} {GOOD_EN}{GOOD_EN}");
        let back = format!("{GOOD_EN} {GOOD_ZH}");
        let russian = format!(
            "{GOOD_EN} Река впадает в море и несёт с собой песок и камни. Города стоят на берегах рек, потому что вода даёт жизнь, пищу и путь."
        );
        for (prompt, text) in [(ZH, &switched), (EN, &back), (EN, &russian)] {
            let found = faults(prompt, text, &[]);
            assert!(
                found.iter().any(|f| matches!(f, Fault::Switch { .. })),
                "{text}: {found:?}"
            );
        }
        let marks = format!("{GOOD_EN} \u{fffd}\u{fffd}\u{fffd}\u{fffd}");
        let digits = "0 1 , ; 33 . . 12 ( ) 8 8 9 - - 4 5 6 7 : : 1 2 3 4 5 6 7 8 9 0 1 2 3 4 , . ; : ! ? 4 4 5 5 6 7 8 9 1 2 3 9 9 8 7 6 5 3";
        let run = format!("The {}", "abcdefghij".repeat(12));
        for text in [marks.as_str(), digits, &run] {
            let found = faults(EN, text, &[]);
            assert!(
                found.iter().any(|f| matches!(f, Fault::Garbage { .. })),
                "{text}: {found:?}"
            );
        }
        assert_eq!(faults(EN, " \n", &[]), [Fault::Empty]);
    }
}
