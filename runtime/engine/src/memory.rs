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

/// Share of what is resident of `bytes`, a mapping or a part of one, that lies in large pages
/// (2 MiB on most systems), 0 to 1. `None` where nothing is resident or the system does not say.
pub fn in_large_pages(bytes: &[u8]) -> Option<f64> {
    let start = bytes.as_ptr() as u64;
    let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    large_share(&maps, start..start + bytes.len() as u64)
}

/// The same by the text of `/proc/…/smaps`; mappings count that lie in the range, or around it.
fn large_share(smaps: &str, range: std::ops::Range<u64>) -> Option<f64> {
    let (mut inside, mut resident, mut large) = (false, 0, 0);
    for line in smaps.lines() {
        let (name, rest) = line.split_once(' ')?;
        if let Some((from, to)) = name.split_once('-') {
            let bound = |hex| u64::from_str_radix(hex, 16).ok();
            inside = bound(from)? < range.end && bound(to)? > range.start;
        } else if inside {
            let kb = || rest.split_whitespace().next()?.parse::<u64>().ok();
            match name {
                "Rss:" => resident += kb()?,
                "AnonHugePages:" | "FilePmdMapped:" => large += kb()?,
                _ => {}
            }
        }
    }
    (resident > 0).then(|| large as f64 / resident as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_pages_are_counted_within_the_range() {
        let smaps = "\
7f0000000000-7f0000800000 r--s 00000000 fe:00 12 /models/m.myq
Size:               8192 kB
Rss:                8000 kB
AnonHugePages:         0 kB
FilePmdMapped:      6144 kB
VmFlags: rd mr me ms
7f0000800000-7f0000a00000 rw-p 00000000 00:00 0
Rss:                2048 kB
AnonHugePages:      2048 kB
FilePmdMapped:         0 kB
";
        let share = |from, to| large_share(smaps, from..to);
        assert_eq!(share(0x7f00_0000_0000, 0x7f00_0080_0000), Some(0.768));
        assert_eq!(share(0x7f00_0000_1000, 0x7f00_0000_2000), Some(0.768));
        assert_eq!(share(0x7f00_0080_0000, 0x7f00_00a0_0000), Some(1.0));
        assert_eq!(share(0x1000, 0x2000), None);
    }

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
