//! D4, D5: fixtures of machines → chosen CPUs, threads and node.

use std::path::Path;

use myq_engine::memory;
use myq_engine::topology::{Machine, Placement, Want};
use tempfile::TempDir;

/// Writes a machine's text as a tree.
fn tree(name: &str) -> TempDir {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/topology");
    let text = std::fs::read_to_string(data.join(name).with_extension("txt")).expect(name);
    let dir = tempfile::tempdir().expect("a folder");
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let (path, content) = line.split_once(" = ").expect(line);
        let Some((before, rest)) = path.split_once('{') else {
            write(dir.path(), path, content);
            continue;
        };
        let (range, after) = rest.split_once('}').expect(line);
        let (first, last) = range.split_once('-').expect(line);
        let numbers = first.parse::<usize>().expect(line)..=last.parse().expect(line);
        for n in numbers {
            let path = format!("{before}{n}{after}");
            write(dir.path(), &path, &with_number(content, n));
        }
    }
    dir
}

fn write(root: &Path, path: &str, content: &str) {
    let path = root.join(path);
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
    std::fs::write(path, content.replace("\\n", "\n") + "\n").expect("written");
}

/// Replaces `{n}`, `{n+32}` and `{n-32}`.
fn with_number(content: &str, n: usize) -> String {
    let mut parts = content.split('{');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (sum, rest) = part.split_once('}').expect(content);
        let offset = sum.strip_prefix('n').expect(content).parse().unwrap_or(0);
        text += &n.checked_add_signed(offset).expect(content).to_string();
        text += rest;
    }
    text
}

fn machine(name: &str) -> Machine {
    Machine::read(tree(name).path())
}

/// Case 1 and all boards: name, physical cores, CPUs, node.
#[test]
fn each_machine_gets_its_threads() {
    let table: [(&str, usize, Vec<usize>, Option<usize>); 12] = [
        ("rk3588", 8, vec![4, 5, 6, 7], None),
        ("rk3588-vendor", 8, vec![4, 5, 6, 7], None),
        ("pi5", 4, vec![0, 1, 2], None),
        ("orin-nano", 6, vec![0, 1, 2, 3], None),
        ("agx-orin", 12, (0..8).collect(), None),
        ("agx-orin-15w", 4, vec![0, 1, 2], None),
        ("prime", 8, vec![4, 5, 6, 7], None),
        // Two thirds of the 16 cores of the node with more free memory.
        ("dual-socket", 32, (16..27).collect(), Some(1)),
        ("hybrid-pc", 16, vec![0, 2, 4, 6, 8, 10, 12, 14], None),
        // The quota of 3.5, of CPUs 4-11.
        ("container", 16, vec![4, 5, 6], None),
        ("container-v1", 16, vec![4], None),
        ("full-board", 4, vec![0, 1, 2], None),
    ];
    println!(
        "| machine | cores | threads | CPUs | node | why |\n| --- | --- | --- | --- | --- | --- |"
    );
    for (name, cores, cpus, node) in table {
        let machine = machine(name);
        let p = machine.place(&Want::default());
        let place = p.node.map_or("–".to_owned(), |n| n.to_string());
        println!(
            "| {name} | {} | {} | {:?} | {place} | {} |",
            machine.cores(),
            p.threads,
            p.cpus,
            p.why
        );
        assert_eq!(
            (machine.cores(), &p.cpus, p.node),
            (cores, &cpus, node),
            "{name}"
        );
        assert_eq!(p.threads, cpus.len(), "{name}");
        assert!(p.warnings.is_empty() && !p.oversubscribed(), "{name}");
        assert!(cpus.iter().all(|c| p.group.contains(c)), "{name}");
    }
}

fn place(name: &str, threads: Option<usize>, affinity: Option<&[usize]>) -> Placement {
    let want = Want {
        threads,
        affinity,
        ..Want::default()
    };
    machine(name).place(&want)
}

/// Case 1: a number asked for takes big cores first, and little ones with a warning.
#[test]
fn little_cores_come_last_and_with_a_warning() {
    let p = place("rk3588", Some(4), None);
    assert_eq!((p.cpus, p.warnings.len()), (vec![4, 5, 6, 7], 0));
    let p = place("rk3588", Some(6), None);
    assert_eq!(p.cpus, [4, 5, 6, 7, 0, 1]);
    assert!(p.warnings[0].contains("2 of 6 threads") && p.warnings[0].contains("--threads 4"));
    assert_eq!(p.group.len(), 8);
    // Efficient cores before SMT siblings.
    let p = place("hybrid-pc", Some(20), None);
    let order = [
        0, 2, 4, 6, 8, 10, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23, 1, 3, 5, 7,
    ];
    assert_eq!(p.cpus, order);
    assert!(!p.oversubscribed());
    // A measured number needs no warning.
    let want = Want {
        threads: Some(8),
        tuned: true,
        ..Want::default()
    };
    let p = machine("rk3588").place(&want);
    assert!(
        p.warnings.is_empty() && p.why.contains("runner tune"),
        "{}",
        p.why
    );
}

/// Case 2: more threads than CPUs, or than the quota, is warned about.
#[test]
fn too_many_threads_are_warned_about() {
    let p = place("pi5", Some(8), None);
    assert_eq!((p.cpus, p.threads), (vec![0, 1, 2, 3], 4));
    assert!(
        p.warnings[0].contains("4 threads instead of 8"),
        "{:?}",
        p.warnings
    );
    let want = Want {
        threads: Some(8),
        share: true,
        ..Want::default()
    };
    let p = machine("pi5").place(&want);
    assert_eq!(p.cpus, [0, 1, 2, 3, 0, 1, 2, 3]);
    assert!(p.oversubscribed() && !p.apart());
    assert!(
        p.warnings[0].contains("8 threads share 4 CPUs"),
        "{:?}",
        p.warnings
    );
    let p = place("container", Some(8), None);
    assert!(p.oversubscribed());
    assert!(p.warnings[0].contains("quota of 3.5"), "{:?}", p.warnings);
    assert!(place("container", Some(3), None).warnings.is_empty());
}

/// What `runner tune` measures.
#[test]
fn candidates_are_all_big_cores_and_then_all_cores() {
    let of = |name| machine(name).candidates(&Want::default());
    assert_eq!(of("rk3588"), [1, 2, 3, 4, 8]);
    assert_eq!(of("pi5"), [1, 2, 3, 4]);
    assert_eq!(of("container"), [1, 2, 3]);
    assert_eq!(of("container-v1"), [1]);
    let server: Vec<usize> = (1..=16).chain([20, 24, 28, 32]).collect();
    assert_eq!(of("dual-socket"), server);
}

#[test]
fn the_affinity_mask_limits_the_choice() {
    assert_eq!(place("rk3588", None, Some(&[0, 1, 2, 3, 4])).cpus, [4]);
    // All little: then the little ones are the best there are.
    assert_eq!(place("rk3588", None, Some(&[0, 1, 2])).cpus, [0, 1, 2]);
    assert_eq!(place("pi5", None, Some(&[3])).cpus, [3]);
    // One CPU of a core, whichever is allowed.
    assert_eq!(
        place("hybrid-pc", None, Some(&[1, 2, 3, 5])).cpus,
        [1, 2, 5]
    );
    assert_eq!(
        place("hybrid-pc", Some(4), Some(&[1, 2, 3, 5])).cpus,
        [1, 2, 5, 3]
    );
    // Within mask and control group; a mask that leaves nothing is passed over.
    assert_eq!(place("container", None, Some(&[0, 5])).cpus, [5]);
    assert_eq!(place("container", None, Some(&[0])).threads, 3);
}

/// Case 13: threads go where the file's pages are, and not to a node with hardly any cores.
#[test]
fn the_node_follows_the_file_then_the_free_memory() {
    let machine = machine("dual-socket");
    let at = |node, threads, affinity| {
        machine.place(&Want {
            node,
            threads,
            affinity,
            ..Want::default()
        })
    };
    let p = at(Some(0), None, None);
    assert_eq!((p.node, p.cpus), (Some(0), (0..11).collect()));
    // Siblings of the same node are in reach of threads whose CPU is taken.
    assert_eq!(p.group, (0..16).chain(32..48).collect::<Vec<_>>());
    let p = at(None, Some(16), None);
    assert_eq!((p.node, p.cpus), (Some(1), (16..32).collect()));
    let p = at(None, Some(20), None);
    assert_eq!((p.node, &p.cpus[16..]), (None, &[0, 1, 2, 3][..]));
    let mostly_first: Vec<usize> = (0..16).chain([16]).collect();
    let p = at(Some(1), None, Some(&mostly_first));
    assert_eq!((p.node, p.threads), (Some(0), 11));
}

/// Case 24, and limits of control groups above.
#[test]
fn page_cache_is_available_memory() {
    let available = |name| memory::available_at(tree(name).path());
    assert_eq!(available("full-board"), Some(6_200_000 * 1024));
    assert_eq!(available("container"), Some(1_600_000_000));
    assert_eq!(available("container-v1"), Some(1_600_000_000));
    assert_eq!(available("pi5"), None, "it has no /proc/meminfo here");
}

#[test]
fn what_is_read_beside() {
    let rock = machine("rk3588");
    assert_eq!(rock.name, "Radxa ROCK 5B");
    assert_eq!(rock.last_level_cache, Some(3 << 20));
    assert_eq!(machine("prime").name, "ARM part 0xd05");
    let fingerprint = machine("container").fingerprint();
    assert!(
        fingerprint.contains("16 CPUs, 8 allowed, 16 cores; quota 3.50"),
        "{fingerprint}"
    );
}

/// No file, or nonsense in all of them: some machine comes out, and no panic.
#[test]
fn broken_trees_still_give_a_machine() {
    let empty = tempfile::tempdir().expect("a folder");
    assert!(Machine::read(empty.path()).place(&Want::default()).threads >= 1);
    for junk in ["", "-1", "99999999999999999999", "0-", "\u{fffd}\\n", "7-3"] {
        let dir = tempfile::tempdir().expect("a folder");
        for path in [
            "sys/devices/system/cpu/online",
            "sys/devices/system/cpu/cpu0/cpu_capacity",
            "sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
            "sys/devices/system/cpu/cpu0/cache/index3/size",
            "sys/devices/system/cpu/cpu0/cache/index3/level",
            "sys/devices/system/node/node0/cpulist",
            "sys/devices/system/node/node1/meminfo",
            "sys/devices/cpu_core/cpus",
            "sys/devices/cpu_atom/cpus",
            "proc/self/cgroup",
            "sys/fs/cgroup/cpu.max",
            "proc/cpuinfo",
        ] {
            write(dir.path(), path, junk);
        }
        let machine = Machine::read(dir.path());
        assert!(!machine.place(&Want::default()).cpus.is_empty(), "{junk}");
    }
    let p = Machine::here().place(&Want::default());
    println!("this machine: {}", p.why);
    assert!(p.threads >= 1 && p.threads <= 16);
}
