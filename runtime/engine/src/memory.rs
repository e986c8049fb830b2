//! Memory that the system can give, and memory that this process holds.

use std::path::Path;

use crate::topology::groups;

/// Bytes available without swapping, reclaimable page cache included (`MemAvailable`), and
/// not above what the control group, and those above it, have left. `None` where the system
/// does not say.
pub fn available() -> Option<u64> {
    available_at(Path::new("/"))
}

/// The same for a machine whose `/proc` and `/sys` are below `root`.
pub fn available_at(root: &Path) -> Option<u64> {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let machine = field(&meminfo, "MemAvailable:")?;
    Some(groups::memory_left(root).map_or(machine, |g| g.min(machine)))
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
    fn this_machine_says_something() {
        assert!(available().unwrap() > 0);
        let (all, anonymous) = resident().unwrap();
        assert!(all >= anonymous && anonymous > 0);
    }
}
