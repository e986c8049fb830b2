//! Memory that the system can give, and memory that this process holds.

/// Bytes available without swapping, reclaimable page cache included (`MemAvailable`), and
/// not above what the control group has left. `None` where the system does not say.
pub fn available() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let machine = field(&meminfo, "MemAvailable:")?;
    Some(group_left().map_or(machine, |g| g.min(machine)))
}

/// A `kB` line of a /proc file, in bytes.
pub fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace()
        .next()?
        .parse::<u64>()
        .ok()
        .map(|kb| kb * 1024)
}

fn group_left() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|l| l.strip_prefix("0::"))?;
    let read = |file: &str| std::fs::read_to_string(format!("/sys/fs/cgroup{path}/{file}")).ok();
    let max: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    // Page cache counts as used but is given back on demand.
    let cache = file_cache(&read("memory.stat").unwrap_or_default());
    Some((max + cache).saturating_sub(used))
}

/// Bytes of page cache in a control group's `memory.stat`: a model's pages, touched more than
/// once, are in the active list.
fn file_cache(stat: &str) -> u64 {
    let line = |l: &str| {
        let rest = l
            .strip_prefix("inactive_file ")
            .or_else(|| l.strip_prefix("active_file "))?;
        rest.trim().parse::<u64>().ok()
    };
    stat.lines().filter_map(line).sum()
}

/// Resident bytes of this process: all, and those that are not pages of files.
pub fn resident() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some((field(&status, "VmRSS:")?, field(&status, "RssAnon:")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Case 24: a board with 6 GB of page cache has that memory.
    #[test]
    fn page_cache_counts_as_available() {
        let meminfo = "MemTotal:  8000000 kB\nMemFree:  200000 kB\nMemAvailable:  6200000 kB\nCached: 6000000 kB\n";
        assert_eq!(field(meminfo, "MemAvailable:"), Some(6_200_000 * 1024));
        assert_eq!(field("MemFree: 1 kB\n", "MemAvailable:"), None);
    }

    #[test]
    fn both_lists_of_page_cache_count_in_a_control_group() {
        assert_eq!(
            file_cache("anon 5\ninactive_file 100\nactive_file 30\n"),
            130
        );
    }

    #[test]
    fn this_machine_says_something() {
        assert!(available().unwrap() > 0);
        let (all, anonymous) = resident().unwrap();
        assert!(all >= anonymous && anonymous > 0);
    }
}
