//! What the system counts about this process: page faults, disk reads, waiting.

use std::path::Path;

/// Totals since the process began; what the system does not tell is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Counters {
    /// Page faults that waited for the disk.
    pub(crate) major_faults: Option<u64>,
    /// Bytes that came from the disk.
    pub(crate) disk_bytes: Option<u64>,
    /// Nanoseconds that all threads ran, and that they could have run but for a processor.
    pub(crate) ran_and_waited: Option<(u64, u64)>,
    /// Times that a thread was taken off its processor before it had finished.
    pub(crate) involuntary_switches: Option<u64>,
}

impl Counters {
    pub(crate) fn now() -> Counters {
        let read = |file: &str| std::fs::read_to_string(Path::new("/proc/self").join(file)).ok();
        let mut total = Counters {
            major_faults: read("stat").and_then(|t| major_faults(&t)),
            disk_bytes: read("io").and_then(|t| field(&t, "read_bytes:")),
            ..Counters::default()
        };
        let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
        for task in tasks.filter_map(|t| Some(t.ok()?.path())) {
            let read = |file: &str| std::fs::read_to_string(task.join(file)).ok();
            if let Some((ran, waited)) = read("schedstat").and_then(|t| ran_and_waited(&t)) {
                let (r, w) = total.ran_and_waited.unwrap_or_default();
                total.ran_and_waited = Some((r + ran, w + waited));
            }
            if let Some(n) = read("status").and_then(|t| field(&t, "nonvoluntary_ctxt_switches:")) {
                *total.involuntary_switches.get_or_insert(0) += n;
            }
        }
        total
    }

    /// What was counted between `earlier` and this.
    pub(crate) fn since(&self, earlier: &Counters) -> Counters {
        let less = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_sub(b?));
        let pair = |(a, b): (u64, u64), (c, d)| (a.saturating_sub(c), b.saturating_sub(d));
        Counters {
            major_faults: less(self.major_faults, earlier.major_faults),
            disk_bytes: less(self.disk_bytes, earlier.disk_bytes),
            ran_and_waited: self
                .ran_and_waited
                .zip(earlier.ran_and_waited)
                .map(|(now, then)| pair(now, then)),
            involuntary_switches: less(self.involuntary_switches, earlier.involuntary_switches),
        }
    }

    /// Both together.
    pub(crate) fn plus(&self, other: &Counters) -> Counters {
        let sum = |a: Option<u64>, b: Option<u64>| a.zip(b).map(|(a, b)| a + b);
        Counters {
            major_faults: sum(self.major_faults, other.major_faults),
            disk_bytes: sum(self.disk_bytes, other.disk_bytes),
            ran_and_waited: self
                .ran_and_waited
                .zip(other.ran_and_waited)
                .map(|((a, b), (c, d))| (a + c, b + d)),
            involuntary_switches: sum(self.involuntary_switches, other.involuntary_switches),
        }
    }

    /// Share of the time in which threads could run that they waited for a processor.
    pub(crate) fn wait_share(&self) -> Option<f64> {
        let (ran, waited) = self.ran_and_waited?;
        (ran + waited > 0).then(|| waited as f64 / (ran + waited) as f64)
    }
}

/// The twelfth field of `/proc/self/stat`; the second, the name, may hold spaces.
fn major_faults(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(9)?.parse().ok()
}

/// `schedstat`: nanoseconds on a processor, nanoseconds waiting for one, turns.
fn ran_and_waited(schedstat: &str) -> Option<(u64, u64)> {
    let mut numbers = schedstat.split_whitespace().map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The number of a `name: number` line.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_files() {
        let stat = "77 (a ) name) S 1 77 77 0 -1 4194560 310 0 42 0 5 6 0 0 20 0 3 0";
        assert_eq!(major_faults(stat), Some(42));
        assert_eq!(major_faults("77 (short) S 1"), None);
        assert_eq!(
            ran_and_waited("98807 9158004 2\n"),
            Some((98_807, 9_158_004))
        );
        assert_eq!(ran_and_waited("98807"), None);
        assert_eq!(
            field("rchar: 1\nread_bytes: 4096\n", "read_bytes:"),
            Some(4096)
        );
        assert_eq!(field("rchar: 1\n", "read_bytes:"), None);
    }

    #[test]
    fn differences_and_sums_keep_what_is_unknown() {
        let (early, late) = (
            Counters {
                major_faults: Some(2),
                ran_and_waited: Some((10, 1)),
                ..Counters::default()
            },
            Counters {
                major_faults: Some(5),
                ran_and_waited: Some((40, 11)),
                disk_bytes: Some(9),
                ..Counters::default()
            },
        );
        let between = late.since(&early);
        assert_eq!(between.major_faults, Some(3));
        assert_eq!(between.disk_bytes, None);
        assert_eq!(between.wait_share(), Some(0.25));
        assert_eq!(between.plus(&between).major_faults, Some(6));
        assert_eq!(between.plus(&between).ran_and_waited, Some((60, 20)));
        assert_eq!(Counters::default().wait_share(), None);
    }
}
