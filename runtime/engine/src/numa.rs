//! Memory nodes: where new memory goes, and where a mapped file's pages lie.
//!
//! A core reads another node's memory at about half the speed. The page cache keeps a file's
//! pages where the process that read them first ran, also for later runs (case 13).

use std::io;
use std::os::fd::AsRawFd;

use crate::map::{Mapped, page_size};

/// Pages looked at: enough to tell shares apart by a few percent.
pub const SAMPLES: usize = 256;
/// Below this share on the chosen node the pages are reported.
const GOOD_SHARE: f64 = 0.5;
/// Words of a node mask: 1,024 nodes, the kernel's limit.
const WORDS: usize = 1024 / libc::c_ulong::BITS as usize;

/// A memory policy of this thread, and of those it starts, that ends when this is dropped.
#[derive(Debug)]
pub struct Bound {
    here: std::marker::PhantomData<*const ()>,
}

impl Bound {
    /// New memory of this thread, and pages that it reads into the page cache, come from
    /// `node` as long as it has any: a full node must slow a run, not end it. `None`, and no
    /// change, where a policy was set before, as by `numactl`, or the system forbids it.
    pub fn to(node: usize) -> Option<Bound> {
        if policy()? != libc::MPOL_DEFAULT {
            log::debug!("the memory policy set before stays");
            return None;
        }
        let mut mask = [0 as libc::c_ulong; WORDS];
        *mask.get_mut(node / libc::c_ulong::BITS as usize)? =
            1 << (node % libc::c_ulong::BITS as usize);
        match set_policy(libc::MPOL_PREFERRED, &mask) {
            Ok(()) => Some(Bound {
                here: std::marker::PhantomData,
            }),
            Err(error) => {
                log::debug!("memory is not bound to node {node}: {error}");
                None
            }
        }
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Err(error) = set_policy(libc::MPOL_DEFAULT, &[0; WORDS]) {
            log::debug!("the memory policy stays: {error}");
        }
    }
}

/// The calling thread's policy.
fn policy() -> Option<libc::c_int> {
    let mut mode: libc::c_int = 0;
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the kernel writes the mode to a live integer; no mask and no address are asked.
    let ok = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, none, 0, none, 0) };
    (ok == 0).then_some(mode)
}

fn set_policy(mode: libc::c_int, mask: &[libc::c_ulong; WORDS]) -> io::Result<()> {
    let (mask, bits) = match mode {
        libc::MPOL_DEFAULT => (std::ptr::null(), 0),
        // The kernel reads one bit less than it is told.
        _ => (mask.as_ptr(), size_of_val(mask) * 8 + 1),
    };
    // SAFETY: the mask, where there is one, has all the bits that the kernel reads.
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, bits) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The node of each of up to `samples` pages spread over the file: negative for a page that
/// this process has not touched yet. `None` where the system does not say.
pub fn page_nodes(file: &Mapped, samples: usize) -> Option<Vec<i32>> {
    let (bytes, page) = (file.bytes(), page_size());
    let pages = bytes.len().div_ceil(page);
    let count = samples.min(pages);
    let address = |i: usize| bytes[i * pages / count * page..].as_ptr().cast_mut();
    let addresses: Vec<*mut u8> = (0..count).map(address).collect();
    let mut nodes = vec![0i32; count];
    let ask = std::ptr::null::<libc::c_int>();
    // SAFETY: both lists have `count` entries; without target nodes nothing is moved and the
    // addresses are only looked up.
    let ok = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            count,
            addresses.as_ptr(),
            ask,
            nodes.as_mut_ptr(),
            0,
        )
    };
    (ok == 0).then_some(nodes)
}

/// Reads a byte of each page that [`page_nodes`] looks at, so that they are mapped: cheap only
/// for pages in the page cache.
pub fn touch(file: &Mapped, samples: usize) {
    let (bytes, page) = (file.bytes(), page_size());
    let pages = bytes.len().div_ceil(page);
    let count = samples.min(pages);
    let sum = (0..count).fold(0u8, |s, i| s.wrapping_add(bytes[i * pages / count * page]));
    std::hint::black_box(sum);
}

/// The node that holds more than half of the pages whose place is known.
pub fn home(nodes: &[i32]) -> Option<usize> {
    let known: Vec<usize> = nodes
        .iter()
        .filter_map(|&n| usize::try_from(n).ok())
        .collect();
    let most = *known
        .iter()
        .max_by_key(|n| known.iter().filter(|o| o == n).count())?;
    let on = known.iter().filter(|&&n| n == most).count();
    (on * 2 > known.len()).then_some(most)
}

/// Share of the pages whose place is known that lie on `node`, 0 to 1.
pub fn share(nodes: &[i32], node: usize) -> Option<f64> {
    let known = nodes.iter().filter(|&&n| n >= 0).count();
    let on = nodes
        .iter()
        .filter(|&&n| usize::try_from(n) == Ok(node))
        .count();
    (known > 0).then(|| on as f64 / known as f64)
}

/// What to tell the user where fewer than half of the file's pages lie on the threads' node.
pub fn advice(nodes: &[i32], node: usize) -> Option<String> {
    let share = share(nodes, node).filter(|&s| s < GOOD_SHARE)?;
    let there = home(nodes).map_or("other nodes".to_owned(), |n| format!("node {n}"));
    Some(format!(
        "{:.0} % of the model's pages lie on node {node}, where the threads run, the others on {there}: reading them takes about twice as long; --renew-pages reads the file again into node {node}, `numactl --cpunodebind` moves the threads",
        share * 100.0
    ))
}

/// Drops the file's pages from memory, so that the next to touch them brings them to its own
/// node. Pages that another process has mapped stay.
///
/// # Errors
/// The system's.
pub fn drop_pages(file: &Mapped) -> io::Result<()> {
    let bytes = file.bytes();
    // SAFETY: the map is of a file and is only read, so that a dropped page comes back with the
    // same bytes; address and length are those of the live mapping.
    let ok = unsafe {
        libc::madvise(
            bytes.as_ptr().cast_mut().cast(),
            bytes.len(),
            libc::MADV_DONTNEED,
        )
    };
    if ok != 0 {
        return Err(io::Error::last_os_error());
    }
    let open = std::fs::File::open(file.path())?;
    // SAFETY: the descriptor is open; length 0 is the whole file.
    match unsafe { libc::posix_fadvise(open.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Case 13: pages that stayed on the node of the last run.
    #[test]
    fn pages_on_another_node_are_reported() {
        let mut nodes = vec![1; 200];
        nodes.extend([0; 56]);
        assert_eq!(home(&nodes), Some(1));
        assert_eq!(share(&nodes, 0), Some(56.0 / 256.0));
        let advice = advice(&nodes, 0).expect("advice");
        assert!(
            advice.contains("22 %") && advice.contains("node 1"),
            "{advice}"
        );
        assert!(advice.contains("--renew-pages"));
        assert_eq!(super::advice(&nodes, 1), None);
    }

    #[test]
    fn unknown_pages_say_nothing() {
        assert_eq!(home(&[-2, -2]), None);
        assert_eq!(share(&[-2], 0), None);
        assert_eq!(advice(&[-2, -14], 0), None);
        // Interleaved: no node holds more than half.
        assert_eq!(home(&[0, 1, 0, 1]), None);
        assert_eq!(share(&[0, 1, -2], 0), Some(0.5));
    }

    fn file(bytes: usize) -> (tempfile::TempDir, Mapped) {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("file");
        std::fs::write(&path, vec![7u8; bytes]).expect("written");
        let map = Mapped::open(&path).expect("mapped");
        (dir, map)
    }

    #[test]
    fn the_systems_calls_agree_on_one_node() {
        let (_dir, map) = file(64 * page_size() + 1);
        touch(&map, SAMPLES);
        let Some(nodes) = page_nodes(&map, SAMPLES) else {
            // A container's filter forbids it.
            println!("move_pages: {}", io::Error::last_os_error());
            return;
        };
        assert_eq!(nodes.len(), 65);
        let machine = crate::topology::Machine::here();
        let known: Vec<usize> = machine.nodes.iter().map(|n| n.number).collect();
        for node in &nodes {
            let node = usize::try_from(*node).expect("touched pages have a node");
            assert!(
                known.is_empty() || known.contains(&node),
                "{node} of {known:?}"
            );
        }
    }

    #[test]
    fn dropped_pages_come_back_with_their_bytes() {
        let (_dir, map) = file(16 * page_size());
        drop_pages(&map).expect("dropped");
        assert!(map.bytes().iter().all(|&b| b == 7));
    }

    #[test]
    fn a_policy_ends_with_its_guard() {
        let Some(before) = policy().filter(|&p| p == libc::MPOL_DEFAULT) else {
            println!("this process has a memory policy, or may not ask");
            return;
        };
        let node = crate::topology::Machine::here()
            .nodes
            .first()
            .map_or(0, |n| n.number);
        match Bound::to(node) {
            Some(bound) => {
                assert_eq!(policy(), Some(libc::MPOL_PREFERRED));
                assert!(Bound::to(node).is_none(), "the policy in force stays");
                assert_eq!(policy(), Some(libc::MPOL_PREFERRED));
                drop(bound);
            }
            None => println!("set_mempolicy: {}", io::Error::last_os_error()),
        }
        assert_eq!(policy(), Some(before));
        assert!(Bound::to(1 << 20).is_none());
    }
}
