//! The machine as the kernel describes it, and which CPUs the threads take.
//!
//! [`Machine::read`] takes a root directory, so that tests describe other machines as small
//! trees of files. Sources: `sysfs-devices-system-cpu` and `sysfs-devices-node` of the kernel's
//! ABI documentation, `cgroup-v2` and `cgroup-v1/memory` of its administrator's guide.

mod affinity;
mod choose;
pub mod groups;
mod read;

pub use affinity::Mask;
pub use choose::{Placement, Want};

/// An online CPU: what the scheduler gives work to.
#[derive(Clone, Debug, PartialEq)]
pub struct Cpu {
    /// Its number.
    pub number: usize,
    /// The lowest CPU number of the same physical core: equal for SMT siblings.
    pub core: usize,
    /// NUMA node.
    pub node: usize,
    /// Speed against the fastest CPU's 1,024, as the scheduler sees it.
    pub capacity: Option<u64>,
    /// Highest clock, in kHz.
    pub max_khz: Option<u64>,
    /// On a hybrid PC: whether it is a performance core.
    pub performance: Option<bool>,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its number.
    pub number: usize,
    /// Bytes that are free or can be reclaimed from the page cache.
    pub free: u64,
}

/// The part of a machine that this process sees.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Online CPUs in the order of their numbers; at least one.
    pub cpus: Vec<Cpu>,
    /// NUMA nodes; empty where the kernel does not tell.
    pub nodes: Vec<Node>,
    /// CPUs' worth of time that the control group may use; `None` is no limit.
    pub quota: Option<f64>,
    /// CPUs that the control group allows; `None` is all.
    pub allowed: Option<Vec<usize>>,
    /// Bytes of the last-level cache of the first CPU.
    pub last_level_cache: Option<u64>,
    /// Name of the board or the processor.
    pub name: String,
}

impl Machine {
    /// Physical cores that are online.
    pub fn cores(&self) -> usize {
        self.cpus.iter().filter(|c| c.core == c.number).count()
    }

    /// Tells machines apart whose best settings may differ.
    pub fn fingerprint(&self) -> String {
        let quota = self
            .quota
            .map_or("no quota".into(), |q| format!("quota {q:.2}"));
        let allowed = self.allowed.as_ref().map_or(self.cpus.len(), |a| {
            self.cpus.iter().filter(|c| a.contains(&c.number)).count()
        });
        format!(
            "{}; {} CPUs, {allowed} allowed, {} cores; {quota}",
            self.name,
            self.cpus.len(),
            self.cores(),
        )
    }
}

/// A kernel's list of numbers, `0-3,8`; `None` where it is not one.
pub(crate) fn parse_list(text: &str) -> Option<Vec<usize>> {
    // More CPUs than this is a broken file.
    const MOST: usize = 1 << 16;
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |t: &str| t.trim().parse::<usize>().ok();
        let (first, last) = (number(first)?, number(last)?);
        if last >= MOST || first > last {
            return None;
        }
        numbers.extend(first..=last);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Some(numbers)
}

/// The reverse of [`parse_list`], for messages.
pub(crate) fn print_list(numbers: &[usize]) -> String {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for n in sorted {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => parts.push((n, n)),
        }
    }
    let print = |&(a, b): &(usize, usize)| match a == b {
        true => a.to_string(),
        false => format!("{a}-{b}"),
    };
    parts.iter().map(print).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_printed() {
        assert_eq!(parse_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(parse_list("\n"), Some(vec![]));
        for bad in ["x", "3-1", "0-999999999", "1-", "-1"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
        assert_eq!(print_list(&[8, 0, 1, 2, 2, 3]), "0-3,8");
        assert_eq!(print_list(&[]), "");
    }
}
