//! Control groups, version 1 and 2: the limits of this process's group and of those above.

use std::path::{Path, PathBuf};

/// CPUs' worth of time that the groups leave: the smallest quota from this process's group
/// up to the root. `None` is no limit.
pub fn cpu_quota(root: &Path) -> Option<f64> {
    let second = |dir: &Path| {
        let text = read(dir, "cpu.max")?;
        let mut words = text.split_whitespace();
        let quota: f64 = words.next()?.parse().ok()?;
        ratio(quota, words.next().map_or(Some(1e5), |p| p.parse().ok())?)
    };
    let first = |dir: &Path| {
        let quota: f64 = read(dir, "cpu.cfs_quota_us")?.trim().parse().ok()?;
        let period = read(dir, "cpu.cfs_period_us")?.trim().parse().ok()?;
        ratio(quota, period)
    };
    smallest(root, "cpu", &second, &first)
}

/// A quota of 0 or below, -1, is none.
fn ratio(quota: f64, period: f64) -> Option<f64> {
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

/// CPUs that the groups allow, if they say.
pub fn cpu_set(root: &Path) -> Option<Vec<usize>> {
    let files = ["cpuset.cpus.effective", "cpuset.effective_cpus"];
    // The nearest that says: it is already within those above.
    let find = |dir: &PathBuf| {
        files
            .iter()
            .find_map(|f| super::parse_list(&read(dir, f)?).filter(|l| !l.is_empty()))
    };
    let (second, first) = (second(root), first(root, "cpuset"));
    second.iter().chain(&first).find_map(find)
}

/// Bytes that the groups leave this process, page cache counted as free, since it is given
/// back on demand: the smallest from its group up to the root. `None` is no limit.
pub fn memory_left(root: &Path) -> Option<u64> {
    let number = |dir: &Path, file: &str| read(dir, file)?.trim().parse::<u64>().ok();
    let second = |dir: &Path| {
        // Above `memory.high` the group is slowed down to give memory back.
        let max = [number(dir, "memory.max"), number(dir, "memory.high")];
        let max = max.into_iter().flatten().min()?;
        left(max, number(dir, "memory.current")?, dir, "")
    };
    let first = |dir: &Path| {
        let max = number(dir, "memory.limit_in_bytes")?;
        // Version 1 counts the groups below only in the `total_` lines.
        left(max, number(dir, "memory.usage_in_bytes")?, dir, "total_")
    };
    smallest(root, "memory", &second, &first)
}

fn left(max: u64, used: u64, dir: &Path, prefix: &str) -> Option<u64> {
    let stat = read(dir, "memory.stat").unwrap_or_default();
    // "No limit" of version 1 is close to 2^63.
    Some(
        max.saturating_add(file_cache(&stat, prefix))
            .saturating_sub(used),
    )
}

/// Bytes of page cache in a `memory.stat`: a model's pages, touched more than once, are in
/// the active list.
fn file_cache(stat: &str, prefix: &str) -> u64 {
    let line = |l: &str| {
        let l = l.strip_prefix(prefix)?;
        let rest = l
            .strip_prefix("inactive_file ")
            .or_else(|| l.strip_prefix("active_file "))?;
        rest.trim().parse::<u64>().ok()
    };
    stat.lines().filter_map(line).fold(0, u64::saturating_add)
}

type Limit<'a, T> = &'a dyn Fn(&Path) -> Option<T>;

/// The smallest limit in the groups of both versions: a controller is in one of them.
fn smallest<T: PartialOrd>(
    root: &Path,
    controller: &str,
    in_second: Limit<'_, T>,
    in_first: Limit<'_, T>,
) -> Option<T> {
    let (second, first) = (second(root), first(root, controller));
    let second = second.iter().filter_map(|d| in_second(d));
    let limits = second.chain(first.iter().filter_map(|d| in_first(d)));
    limits.reduce(|a, b| if b < a { b } else { a })
}

/// Directories of this process's version 2 group and of those above, the nearest first.
fn second(root: &Path) -> Vec<PathBuf> {
    let path = own_path(root, |_, controllers| controllers.is_empty());
    let mount = root.join("sys/fs/cgroup");
    // A machine with both versions mounts the second below the first's.
    let unified = mount.join("unified");
    let mount = if unified.is_dir() { unified } else { mount };
    path.map_or(Vec::new(), |p| upward(&mount, &p))
}

/// The same for a controller of version 1.
fn first(root: &Path, controller: &str) -> Vec<PathBuf> {
    let path = own_path(root, |number, controllers| {
        number != "0" && controllers.split(',').any(|c| c == controller)
    });
    let mounts = [controller, "cpu,cpuacct", "cpuacct,cpu"];
    let mounts = mounts.iter().map(|m| root.join("sys/fs/cgroup").join(m));
    let mount = mounts.into_iter().find(|m| m.is_dir());
    match (path, mount) {
        (Some(path), Some(mount)) => upward(&mount, &path),
        _ => Vec::new(),
    }
}

/// The path in the line of `/proc/self/cgroup` whose number and controllers are wanted.
fn own_path(root: &Path, wanted: impl Fn(&str, &str) -> bool) -> Option<String> {
    let text = read(root, "proc/self/cgroup")?;
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (number, controllers) = (parts.next()?, parts.next()?);
        let path = parts.next()?;
        wanted(number, controllers).then(|| path.to_owned())
    })
}

/// `mount/path` and all directories above it down to `mount` itself. In a container the path
/// may be the host's, which is not there: what is missing says nothing and is passed over.
fn upward(mount: &Path, path: &str) -> Vec<PathBuf> {
    // A group outside the namespace shows as `/../…`.
    let parts: Vec<&str> = path
        .split('/')
        .filter(|p| !p.is_empty() && *p != "..")
        .collect();
    let dir = |n: usize| {
        let mut dir = mount.to_owned();
        dir.extend(&parts[..n]);
        dir
    };
    (0..=parts.len()).rev().map(dir).collect()
}

fn read(dir: &Path, file: &str) -> Option<String> {
    std::fs::read_to_string(dir.join(file)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            std::fs::write(path, text).expect("written");
        }
        dir
    }

    #[test]
    fn the_smallest_quota_above_counts() {
        let dir = tree(&[
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/a/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/cpu.max", "800000 100000\n"),
        ]);
        assert_eq!(cpu_quota(dir.path()), Some(1.5));
        assert_eq!(memory_left(dir.path()), None);
    }

    #[test]
    fn version_1_and_mixed_mounts() {
        let dir = tree(&[
            (
                "proc/self/cgroup",
                "5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n",
            ),
            ("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "300000\n"),
            (
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us",
                "100000\n",
            ),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            (
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "10\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "900\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 30\n",
            ),
        ]);
        assert_eq!(cpu_quota(dir.path()), Some(3.0));
        assert_eq!(memory_left(dir.path()), Some(230));
    }

    #[test]
    fn both_lists_of_page_cache_count_in_a_control_group() {
        let dir = tree(&[
            ("proc/self/cgroup", "0::/../outside\n"),
            ("sys/fs/cgroup/memory.max", "1000\n"),
            ("sys/fs/cgroup/memory.high", "900\n"),
            ("sys/fs/cgroup/memory.current", "800\n"),
            (
                "sys/fs/cgroup/memory.stat",
                "anon 5\ninactive_file 100\nactive_file 30\n",
            ),
        ]);
        assert_eq!(memory_left(dir.path()), Some(230));
    }

    #[test]
    fn garbage_is_no_limit() {
        let dir = tree(&[
            ("proc/self/cgroup", "nonsense\n0::/\n::\n"),
            ("sys/fs/cgroup/cpu.max", "\u{0}\n"),
            ("sys/fs/cgroup/memory.max", "-3\n"),
            ("sys/fs/cgroup/cpuset.cpus.effective", "a-b\n"),
        ]);
        assert_eq!(cpu_quota(dir.path()), None);
        assert_eq!(memory_left(dir.path()), None);
        assert_eq!(cpu_set(dir.path()), None);
        assert_eq!(cpu_quota(Path::new("no-such-root")), None);
    }
}
