//! `strftime_now`: today's date in a prompt, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// The present time in the format of C's `strftime`.
pub(super) fn strftime_now(format: String) -> Result<String, Error> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs());
    strftime(&format, now)
}

/// Year, month (from 1) and day (from 1) of a day counted from 1970-01-01.
fn civil(days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [
        31,
        28 + u64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 0;
    while left >= lengths[month] {
        left -= lengths[month];
        month += 1;
    }
    (year, month + 1, left + 1)
}

/// `seconds` since 1970 in UTC.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    // A clock set to the far future must not make the search for the year long.
    let seconds = seconds.min(253_402_300_799);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[(days % 7) as usize]);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let hour12 = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = rest.next();
        let padded = directive != Some('-');
        if !padded {
            directive = rest.next();
        }
        let two = |value: u64| {
            if padded {
                format!("{value:02}")
            } else {
                value.to_string()
            }
        };
        let text = match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month as u64),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('M') => two(minute),
            Some('S') => two(second % 60),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('%') => "%".to_owned(),
            _ => {
                let what = format!("strftime_now: the format `{format}` has an unknown directive");
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        };
        out.push_str(&text);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let cases = [
            (0, "1970-01-01 Thu 00:00:00 12 AM"),
            (951_782_399, "2000-02-28 Mon 23:59:59 11 PM"),
            (951_782_400, "2000-02-29 Tue 00:00:00 12 AM"),
            (1_767_225_600, "2026-01-01 Thu 00:00:00 12 AM"),
            (4_107_585_600, "2100-03-01 Mon 12:00:00 12 PM"),
        ];
        for (seconds, want) in cases {
            assert_eq!(strftime("%Y-%m-%d %a %T %I %p", seconds).unwrap(), want);
        }
        assert_eq!(
            strftime("%-d %B %y, %e%%", 1_767_225_600).unwrap(),
            "1 January 26,  1%"
        );
        assert!(strftime("%Q", 0).is_err() && strftime("%", 0).is_err());
    }
}
