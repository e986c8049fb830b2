//! Reading a [`Machine`] from `/sys` and `/proc`, or from a copy of them.

use std::path::Path;

use super::{Cpu, Machine, Node, groups, parse_list};

const CPUS: &str = "sys/devices/system/cpu";
const NODES: &str = "sys/devices/system/node";

impl Machine {
    /// The machine this runs on.
    pub fn here() -> Machine {
        Machine::read(Path::new("/"))
    }

    /// The machine whose `/sys` and `/proc` are below `root`. Never fails: what cannot be read
    /// is taken as not there, and without any CPU the standard library's count stands.
    pub fn read(root: &Path) -> Machine {
        let numbers = online(root);
        let nodes = nodes(root);
        let node_of = |cpu: usize| {
            let found = nodes.iter().find(|(_, cpus)| cpus.contains(&cpu));
            found.map_or(0, |(node, _)| node.number)
        };
        let performance = hybrid(root);
        let cpu = |number: usize| Cpu {
            number,
            core: core(root, number, &numbers),
            node: node_of(number),
            capacity: number_in(root, &format!("{CPUS}/cpu{number}/cpu_capacity")),
            max_khz: number_in(
                root,
                &format!("{CPUS}/cpu{number}/cpufreq/cpuinfo_max_freq"),
            ),
            performance: performance.as_ref().map(|p| p.contains(&number)),
        };
        Machine {
            cpus: numbers.iter().map(|&n| cpu(n)).collect(),
            quota: groups::cpu_quota(root),
            allowed: groups::cpu_set(root),
            last_level_cache: last_level_cache(root, numbers[0]),
            name: name(root),
            nodes: nodes.into_iter().map(|(node, _)| node).collect(),
        }
    }
}

fn text(root: &Path, path: &str) -> Option<String> {
    std::fs::read_to_string(root.join(path)).ok()
}

fn number_in(root: &Path, path: &str) -> Option<u64> {
    text(root, path)?.trim().parse().ok()
}

fn list_in(root: &Path, path: &str) -> Option<Vec<usize>> {
    parse_list(&text(root, path)?).filter(|l| !l.is_empty())
}

fn online(root: &Path) -> Vec<usize> {
    list_in(root, &format!("{CPUS}/online"))
        .or_else(|| list_in(root, &format!("{CPUS}/possible")))
        .unwrap_or_else(|| {
            (0..std::thread::available_parallelism().map_or(1, |n| n.get())).collect()
        })
}

/// The lowest online CPU of the same physical core.
fn core(root: &Path, number: usize, online: &[usize]) -> usize {
    let topology = format!("{CPUS}/cpu{number}/topology");
    // The second name is the newer kernels'.
    let siblings = list_in(root, &format!("{topology}/thread_siblings_list"))
        .or_else(|| list_in(root, &format!("{topology}/core_cpus_list")));
    if let Some(siblings) = siblings {
        let first = siblings.into_iter().find(|s| online.contains(s));
        return first.unwrap_or(number);
    }
    // Core numbers are unique within a package.
    let key = |cpu: usize| {
        let file = |name: &str| number_in(root, &format!("{CPUS}/cpu{cpu}/topology/{name}"));
        Some((file("physical_package_id")?, file("core_id")?))
    };
    let own = key(number);
    let same = |c: &&usize| own.is_some() && key(**c) == own;
    online.iter().find(same).copied().unwrap_or(number)
}

/// The performance cores of a hybrid PC.
fn hybrid(root: &Path) -> Option<Vec<usize>> {
    list_in(root, "sys/devices/cpu_atom/cpus")?;
    list_in(root, "sys/devices/cpu_core/cpus")
}

/// Each node with its CPUs; those without CPUs are memory alone.
fn nodes(root: &Path) -> Vec<(Node, Vec<usize>)> {
    let Ok(entries) = std::fs::read_dir(root.join(NODES)) else {
        return Vec::new();
    };
    let number = |e: std::fs::DirEntry| e.file_name().to_str()?.strip_prefix("node")?.parse().ok();
    let mut numbers: Vec<usize> = entries.flatten().filter_map(number).collect();
    numbers.sort_unstable();
    let read = |number: usize| {
        let cpus = list_in(root, &format!("{NODES}/node{number}/cpulist"))?;
        let meminfo = text(root, &format!("{NODES}/node{number}/meminfo")).unwrap_or_default();
        let free = reclaimable(&meminfo);
        Some((Node { number, free }, cpus))
    };
    numbers.into_iter().filter_map(read).collect()
}

/// Free bytes and those that are given back on demand, of lines `Node 0 MemFree: 12 kB`.
fn reclaimable(meminfo: &str) -> u64 {
    const COUNTED: [&str; 4] = [
        "MemFree:",
        "Active(file):",
        "Inactive(file):",
        "SReclaimable:",
    ];
    let line = |l: &str| {
        let mut words = l.split_whitespace().skip(2);
        let counts = COUNTED.contains(&words.next()?);
        let kb: u64 = words.next()?.parse().ok()?;
        counts.then(|| kb.saturating_mul(1024))
    };
    meminfo
        .lines()
        .filter_map(line)
        .fold(0, u64::saturating_add)
}

fn last_level_cache(root: &Path, cpu: usize) -> Option<u64> {
    let size = |i: usize| {
        let dir = format!("{CPUS}/cpu{cpu}/cache/index{i}");
        let level = number_in(root, &format!("{dir}/level"))?;
        let size = text(root, &format!("{dir}/size"))?;
        let size = size.trim();
        let (digits, unit) = match size.strip_suffix(['K', 'k']) {
            Some(digits) => (digits, 1 << 10),
            None => (size.strip_suffix('M')?, 1 << 20),
        };
        Some((level, digits.parse::<u64>().ok()?.checked_mul(unit)?))
    };
    (0..10).filter_map(size).max().map(|(_, bytes)| bytes)
}

/// The board's name where firmware gives one, else the processor's.
fn name(root: &Path) -> String {
    if let Some(board) = text(root, "sys/firmware/devicetree/base/model") {
        return board
            .trim_matches(|c: char| c == '\0' || c.is_whitespace())
            .to_owned();
    }
    let cpuinfo = text(root, "proc/cpuinfo").unwrap_or_default();
    let value = |name: &str| {
        let line = cpuinfo.lines().find(|l| l.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    value("model name")
        .or_else(|| Some(format!("ARM part {}", value("CPU part")?)))
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}
