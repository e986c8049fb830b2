//! Days, and where texts speak of them.

use std::fmt;
use std::ops::Range;
use std::sync::LazyLock;

use regex::{Captures, Regex};

/// A day; where a text names a month or year alone, its last day.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Date {
    /// Year.
    pub year: i32,
    /// Month, from 1.
    pub month: u8,
    /// Day, from 1.
    pub day: u8,
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

const MONTHS: [&str; 12] = [
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
];

static MENTIONS: LazyLock<[Regex; 6]> = LazyLock::new(|| {
    let month = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\\.?";
    [
        // 2024-03-05, 2024/3/5, 2024.03.05, 2024-03
        r"\b(?<y>(?:19|20)\d\d)[-/.](?<m>\d{1,2})(?:[-/.](?<d>\d{1,2})(?:T[\d:.]+)?)?\b".to_owned(),
        // 2024年3月5日, 2024年3月, 2024年
        r"(?<y>(?:19|20)\d\d)\s*年(?:\s*(?<m>\d{1,2})\s*月(?:\s*(?<d>\d{1,2})\s*[日号])?)?".to_owned(),
        // March 5, 2024; March 2024
        format!(r"(?i)\b(?<n>{month})\s+(?:(?<d>\d{{1,2}})(?:st|nd|rd|th)?,?\s+)?(?<y>(?:19|20)\d\d)\b"),
        // 5 March 2024
        format!(r"(?i)\b(?<d>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?(?<n>{month}),?\s+(?<y>(?:19|20)\d\d)\b"),
        // Q3 2024, 2024Q3
        r"\b(?:Q(?<q>[1-4])\s*(?<y>(?:19|20)\d\d)|(?<y2>(?:19|20)\d\d)\s*Q(?<q2>[1-4]))\b".to_owned(),
        // in 2024, since 2024, 2024's
        r"(?i)\b(?:in|since|by|until|during|of|for|year|fy|fiscal)\s+(?<y>20\d\d)\b".to_owned(),
    ]
    .map(|r| Regex::new(&r).expect("fixed patterns, run by the tests"))
});

impl Date {
    /// A day that exists; `None` for others.
    pub fn new(year: i32, month: u8, day: u8) -> Option<Date> {
        ((1..=12).contains(&month) && (1..=days(year, month)).contains(&day)).then_some(Date {
            year,
            month,
            day,
        })
    }

    /// The day that a text begins with, as `2024-03-05`, `2024-03-05T10:00:00Z`, `5 March 2024`.
    pub fn parse(text: &str) -> Option<Date> {
        let text = text.trim();
        mentions(text)
            .into_iter()
            .find(|(at, _)| *at == 0)
            .map(|m| m.1)
    }

    /// The day of so many seconds (or milliseconds) after 1970, UTC.
    pub fn of_unix(seconds: f64) -> Option<Date> {
        let seconds = if seconds.abs() > 1e11 {
            seconds / 1e3
        } else {
            seconds
        };
        if !seconds.is_finite() || seconds.abs() > 1e11 {
            return None;
        }
        // Days since 0000-03-01: years then end with the leap day.
        let day = (seconds / 86_400.0).floor() as i64 + 719_468;
        let era = day.div_euclid(146_097);
        let of_era = day.rem_euclid(146_097);
        let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = year + era * 400 + i64::from(month <= 2);
        Date::new(year as i32, month as u8, day as u8)
    }

    /// Days since some day long ago, for differences.
    pub fn number(self) -> i64 {
        let (y, m) = match self.month {
            3.. => (i64::from(self.year), i64::from(self.month) - 3),
            _ => (i64::from(self.year) - 1, i64::from(self.month) + 9),
        };
        365 * y + y.div_euclid(4) - y.div_euclid(100)
            + y.div_euclid(400)
            + (153 * m + 2) / 5
            + i64::from(self.day)
    }
}

fn days(year: i32, month: u8) -> u8 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}

/// Every day, month, quarter or year that `text` names, with its place.
pub(super) fn mentions(text: &str) -> Vec<(usize, Date)> {
    let mut all: Vec<(Range<usize>, Date)> = MENTIONS
        .iter()
        .flat_map(|r| r.captures_iter(text))
        .filter_map(|c| Some((c.get(0)?.range(), date(&c)?)))
        .collect();
    // Of two readings of one place the longer says more: a day more than its year.
    all.sort_by_key(|(range, _)| (std::cmp::Reverse(range.len()), range.start));
    let mut taken: Vec<(Range<usize>, Date)> = Vec::new();
    for (range, date) in all {
        let free = |t: &(Range<usize>, Date)| t.0.end <= range.start || range.end <= t.0.start;
        if taken.iter().all(free) {
            taken.push((range, date));
        }
    }
    taken
        .into_iter()
        .map(|(range, date)| (range.start, date))
        .collect()
}

fn date(c: &Captures<'_>) -> Option<Date> {
    let number = |name: &str| c.name(name)?.as_str().parse::<i32>().ok();
    let year = number("y").or_else(|| number("y2"))?;
    let quarter = number("q").or_else(|| number("q2"));
    let named = c.name("n").and_then(|n| {
        let name = n.as_str().to_lowercase();
        MONTHS.iter().position(|m| name.starts_with(m))
    });
    let month = match (named, quarter, number("m")) {
        (Some(m), ..) => m as i32 + 1,
        (_, Some(q), _) => 3 * q,
        (.., Some(m)) => m,
        _ => 12,
    };
    let month = u8::try_from(month).ok().filter(|m| (1..=12).contains(m))?;
    let day = number("d").map_or(Some(days(year, month)), |d| u8::try_from(d).ok())?;
    Date::new(year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn d(year: i32, month: u8, day: u8) -> Date {
        Date::new(year, month, day).expect("a day that exists")
    }

    #[test]
    fn days_are_found_in_both_languages() {
        for (text, want) in [
            ("on 2024-03-05 it rained", d(2024, 3, 5)),
            ("2024/3/5", d(2024, 3, 5)),
            ("截至2024年3月5日,", d(2024, 3, 5)),
            ("2024年2月的报告", d(2024, 2, 29)),
            ("2024年一季度", d(2024, 12, 31)),
            ("March 5, 2024", d(2024, 3, 5)),
            ("by Sept. 2023 at last", d(2023, 9, 30)),
            ("the 5th of March 2024", d(2024, 3, 5)),
            ("revenue in Q1 2024 rose", d(2024, 3, 31)),
            ("2024Q2", d(2024, 6, 30)),
            ("in 2025 they", d(2025, 12, 31)),
        ] {
            let found: Vec<Date> = mentions(text).into_iter().map(|m| m.1).collect();
            assert_eq!(found, [want], "{text}");
        }
        for text in [
            "version 2.0.24",
            "2024-13-05",
            "a 1080p film",
            "port 2049",
            "x2024y",
        ] {
            assert_eq!(mentions(text), [], "{text}");
        }
    }

    #[test]
    fn fields_are_read_in_their_usual_forms() {
        assert_eq!(Date::parse("2024-03-05T10:00:00Z"), Some(d(2024, 3, 5)));
        assert_eq!(Date::parse(" 5 March 2024"), Some(d(2024, 3, 5)));
        assert_eq!(Date::parse("no day"), None);
        assert_eq!(Date::of_unix(0.0), Some(d(1970, 1, 1)));
        assert_eq!(Date::of_unix(951_782_400.0), Some(d(2000, 2, 29)));
        assert_eq!(Date::of_unix(1_709_596_800_000.0), Some(d(2024, 3, 5)));
        assert_eq!(Date::of_unix(f64::NAN), None);
    }

    #[test]
    fn numbers_of_days_follow_each_other() {
        assert_eq!(d(2024, 3, 1).number() - d(2024, 2, 29).number(), 1);
        assert_eq!(d(2001, 1, 1).number() - d(2000, 1, 1).number(), 366);
        assert_eq!(d(1970, 1, 1).number() - d(1969, 12, 31).number(), 1);
    }
}
