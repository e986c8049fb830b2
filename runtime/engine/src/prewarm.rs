//! Bringing the file into the page cache before the first token, and checking it on the way.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use myq_format::{Error as FormatError, myq::Myq};

use crate::map::{Mapped, page_size};
use crate::memory;

/// What a prewarm did.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Share of the file in memory before, 0 to 1: low is a cold start. `None` where the
    /// system does not say.
    pub resident_before: Option<f64>,
    /// Share after.
    pub resident_after: Option<f64>,
    /// Bytes read.
    pub bytes: u64,
    /// Time taken.
    pub time: Duration,
    /// Whether the file is larger than the memory that was available, so that only a part
    /// was read.
    pub partial: bool,
}

/// Called with bytes done and bytes in all; from one thread, about ten times a second.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

const PIECE: usize = 4 << 20;

/// Touches every page with `threads` threads, the file's first bytes first, and stops at nine
/// tenths of the memory that is available beside the `reserved` bytes still to be taken:
/// reading more would push out what was just read.
pub fn prewarm(file: &Mapped, threads: usize, reserved: u64, progress: Progress<'_>) -> Report {
    let start = Instant::now();
    let resident_before = file.residency();
    let len = file.bytes().len();
    let limit = room_for(len, memory::available(), reserved);
    let cold = resident_before.is_none_or(|r| r < 1.0);
    if cold {
        if limit == len {
            file.read_ahead();
        }
        touch(&file.bytes()[..limit], threads, progress);
    }
    Report {
        resident_before,
        resident_after: if cold {
            file.residency()
        } else {
            resident_before
        },
        bytes: if cold { limit as u64 } else { 0 },
        time: start.elapsed(),
        partial: cold && limit < len,
    }
}

/// Bytes of a file of `len` that stay in memory once they are read. What is there of it already
/// counts as available, as any page of a file does.
fn room_for(len: usize, available: Option<u64>, reserved: u64) -> usize {
    let room = available.map_or(u64::MAX, |a| a.saturating_sub(reserved) / 10 * 9);
    usize::try_from(room).unwrap_or(usize::MAX).min(len)
}

/// Reads one byte of every page.
fn touch(bytes: &[u8], threads: usize, progress: Progress<'_>) {
    let piece = |i: usize| {
        let piece = &bytes[i * PIECE..bytes.len().min((i + 1) * PIECE)];
        let sum = piece
            .iter()
            .step_by(page_size())
            .fold(0u8, |s, b| s.wrapping_add(*b));
        // The sum keeps the reads; its value does not matter.
        std::hint::black_box(sum);
        piece.len() as u64
    };
    in_parallel(
        threads,
        bytes.len().div_ceil(PIECE),
        &piece,
        bytes.len() as u64,
        progress,
    );
}

/// Compares every tensor of a `.myq` file with its checksum, with `threads` threads; gives
/// the first difference in the file's order.
pub fn verify(file: &Myq<'_>, threads: usize, progress: Progress<'_>) -> Result<(), FormatError> {
    let tensors = file.tensors();
    let total = tensors.iter().map(|t| t.bytes).sum();
    let first_bad = AtomicUsize::new(usize::MAX);
    let check = |i: usize| {
        if file.verify_tensor(&tensors[i]).is_err() {
            first_bad.fetch_min(i, Relaxed);
        }
        tensors[i].bytes
    };
    in_parallel(threads, tensors.len(), &check, total, progress);
    match first_bad.into_inner() {
        usize::MAX => Ok(()),
        bad => file.verify_tensor(&tensors[bad]),
    }
}

/// Runs `job(i)`, which returns the bytes it did, for all `i < jobs`.
fn in_parallel(
    threads: usize,
    jobs: usize,
    job: &(dyn Fn(usize) -> u64 + Sync),
    total: u64,
    progress: Progress<'_>,
) {
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let work = || {
        loop {
            let i = next.fetch_add(1, Relaxed);
            if i >= jobs {
                return;
            }
            done.fetch_add(job(i), Relaxed);
        }
    };
    std::thread::scope(|scope| {
        // Fewer threads than asked for only take longer; with none, this one works.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let workers: Vec<_> = (0..threads.max(1)).filter_map(spawn).collect();
        if workers.is_empty() {
            work();
        }
        let mut shown = Instant::now();
        while workers.iter().any(|w| !w.is_finished()) {
            std::thread::sleep(Duration::from_millis(1));
            if shown.elapsed() > Duration::from_millis(100) {
                progress(done.load(Relaxed), total);
                shown = Instant::now();
            }
        }
    });
    progress(total, total);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second start finds a part of the file in memory, which is not room for more.
    #[test]
    fn a_model_larger_than_memory_is_never_read_whole() {
        const GB: u64 = 1_000_000_000;
        let file = 10 * GB as usize;
        let reads = |available: u64, reserved: u64| room_for(file, Some(available), reserved);
        assert_eq!(reads(20 * GB, GB), file);
        assert_eq!(reads(7 * GB, 0), 6_300_000_000);
        assert_eq!(reads(7 * GB, 2 * GB), 4_500_000_000);
        assert_eq!(reads(GB, 2 * GB), 0);
        assert_eq!(room_for(file, None, GB), file);
    }
}
