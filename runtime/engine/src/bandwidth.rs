//! How fast this machine reads memory: the ceiling of decoding.
//!
//! A decode step reads every weight once, so bytes a second of a plain sequential read is what
//! it can reach at best. [`measure`] reads a buffer with 1 to n threads, each its own contiguous
//! part, in one stream and in four at once: on some processors one stream does not keep enough
//! reads in flight, and four are up to twice as fast. The ceiling is the best pass, as a pass can
//! only be slowed from outside, not sped up. To compare a program with, that reads rows one after
//! the other and is slowed from outside too, there is the median pass in one stream.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{
    AtomicU8,
    Ordering::{Acquire, Release},
};
use std::time::{Duration, Instant};

use memmap2::MmapMut;

use crate::EngineError;
use crate::memory;
use crate::numa::Bound;
use crate::topology::{Machine, Mask, Want};

/// Reading speed at one number of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// Threads that read at the same time.
    pub threads: usize,
    /// Bytes of the buffer that they share.
    pub buffer_bytes: usize,
    /// Bytes read a second, all threads together, in the best pass: each thread in one stream
    /// or in four, whichever is faster.
    pub bytes_per_second: f64,
    /// The same in the median pass of those with one stream.
    pub one_stream: f64,
}

/// The pages of the buffer that is read. A core reads large ones up to 1.5 times as fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// The system's smallest.
    Small,
    /// Large ones, where the system gives them.
    Large,
}

/// Where the test runs, so that it is where decoding runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seats {
    /// The pages of the buffer.
    pub pages: Pages,
    /// Whether each thread stays on the CPU that an engine with as many threads would give it.
    pub pin: bool,
    /// The node that the buffer lies on and the CPUs belong to, on a machine with several.
    pub node: Option<usize>,
}

impl Seats {
    /// The CPU of each thread; `None` where threads are not pinned, or share CPUs.
    fn masks(self, threads: usize) -> Option<Vec<Mask>> {
        if !self.pin {
            return None;
        }
        let affinity = Mask::current().map(|m| m.cpus());
        let placement = Machine::here().place(&Want {
            affinity: affinity.as_deref(),
            threads: Some(threads),
            node: self.node,
            ..Want::default()
        });
        let alone = placement.apart() && placement.cpus.len() == threads;
        alone.then(|| placement.cpus.iter().map(|&c| Mask::of(&[c])).collect())
    }
}

/// Time for all of one [`measure`], the filling of the buffer left out.
const TIME: Duration = Duration::from_millis(800);
/// A pass reads at least this much, so that starting it is under a percent of it.
const PASS_BYTES: usize = 64 << 20;
const MIB: usize = 1 << 20;

/// Bytes of the last-level cache of the first processor; `None` where the system does not say, as
/// on many boards.
pub fn last_level_cache() -> Option<usize> {
    let bytes = Machine::here().last_level_cache?;
    usize::try_from(bytes).ok()
}

/// Bytes of a buffer that no cache holds: twice the last level, at least 64 MiB, at most 1 GiB
/// and an eighth of the available memory.
pub fn memory_buffer() -> usize {
    buffer_for(last_level_cache(), memory::available())
}

fn buffer_for(cache: Option<usize>, available: Option<u64>) -> usize {
    let room = available.map_or(usize::MAX, |a| (a / 8) as usize);
    let wanted = cache.unwrap_or(0).saturating_mul(2);
    wanted.clamp(64 * MIB, 1024 * MIB).min(room).max(MIB)
}

/// Numbers of threads worth a measurement: all up to eight, then doubled, and `threads` itself.
pub fn thread_counts(threads: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (1..=threads.min(8)).collect();
    counts.extend((4..usize::BITS).map(|b| 1 << b).filter(|&n| n < threads));
    if counts.last() != Some(&threads) && threads > 0 {
        counts.push(threads);
    }
    counts
}

/// Reads a buffer of `bytes` with each number of threads; under a second in all, and a few
/// tenths more to fill a large buffer. `progress` hears of the measurements done and their
/// number.
///
/// # Errors
/// [`EngineError::Setting`] where the memory or the threads are not to be had.
pub fn measure(
    bytes: usize,
    seats: Seats,
    threads: &[usize],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Reading>, EngineError> {
    let bound = seats.node.and_then(Bound::to);
    let buffer = filled(bytes, seats.pages)?;
    drop(bound);
    let words: &[u64] = bytemuck::cast_slice(&buffer[..buffer.len() / 8 * 8]);
    let time = TIME / (2 * threads.len().max(1)) as u32;
    let total = threads.len() as u64;
    let mut readings = Vec::with_capacity(threads.len());
    for (i, &threads) in threads.iter().enumerate() {
        progress(i as u64, total);
        let masks = seats.masks(threads.max(1));
        let rates = |read| rates(words, threads.max(1), masks.as_deref(), time, read);
        let (one_stream, best) = rates(one_stream)?;
        let (_, best_of_four) = rates(four_streams)?;
        readings.push(Reading {
            threads,
            buffer_bytes: size_of_val(words),
            bytes_per_second: best.max(best_of_four),
            one_stream,
        });
    }
    progress(total, total);
    Ok(readings)
}

/// A buffer whose pages are all there. The values are not zero: untouched pages would all be
/// one page of zeros, and reading them would measure the first cache.
fn filled(bytes: usize, pages: Pages) -> Result<MmapMut, EngineError> {
    let bytes = bytes.max(64 * size_of::<u64>());
    let mut buffer = MmapMut::map_anon(bytes).map_err(|_| {
        EngineError::Setting(format!(
            "no memory for a buffer of {} MB to measure bandwidth with; close other programs",
            bytes / 1_000_000
        ))
    })?;
    #[cfg(target_os = "linux")]
    {
        let advice = match pages {
            Pages::Small => memmap2::Advice::NoHugePage,
            Pages::Large => memmap2::Advice::HugePage,
        };
        if let Err(error) = buffer.advise(advice) {
            log::debug!("madvise({advice:?}): {error}");
        }
    }
    buffer.fill(0x5a);
    Ok(buffer)
}

/// Bytes a second of the median and of the best pass within `time`, and of at least three.
fn rates(
    words: &[u64],
    threads: usize,
    masks: Option<&[Mask]>,
    time: Duration,
    read: fn(&[u64]) -> u64,
) -> Result<(f64, f64), EngineError> {
    let repeats = PASS_BYTES.div_ceil(size_of_val(words));
    let test = &Test {
        gate: Barrier::new(threads),
        state: AtomicU8::new(WAIT),
        start: Instant::now(),
        time,
    };
    let passes: Vec<Vec<Span>> = std::thread::scope(|scope| {
        let part = |i: usize| &words[i * words.len() / threads..(i + 1) * words.len() / threads];
        let work = move |i: usize| {
            move || {
                if let Some(Err(error)) = masks.map(|m| m[i].apply()) {
                    log::debug!("reading thread {i} is not pinned: {error}");
                }
                test.passes(i == 0, || (0..repeats).for_each(|_| once(read, part(i))))
            }
        };
        // This thread only waits, so that it need not be brought back to its CPUs.
        let mut workers = Vec::with_capacity(threads);
        for i in 0..threads {
            match std::thread::Builder::new().spawn_scoped(scope, work(i)) {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    test.state.store(STOP, Release);
                    return Err(EngineError::Threads(threads, error));
                }
            }
        }
        test.state.store(GO, Release);
        Ok(workers.into_iter().filter_map(|w| w.join().ok()).collect())
    })?;
    let bytes = (size_of_val(words) * repeats) as f64;
    let pass = |n: usize| {
        let spans = || passes.iter().filter_map(|p| p.get(n));
        let begin = spans().map(|s| s.0).min().unwrap_or_default();
        let end = spans().map(|s| s.1).max().unwrap_or_default();
        bytes / (end - begin).as_secs_f64().max(1e-9)
    };
    let mut rates: Vec<f64> = (0..passes[0].len()).map(pass).collect();
    rates.sort_by(f64::total_cmp);
    Ok((rates[rates.len() / 2], rates[rates.len() - 1]))
}

fn once(read: fn(&[u64]) -> u64, part: &[u64]) {
    black_box(read(black_box(part)));
}

/// Begin and end of a thread's part of a pass.
type Span = (Duration, Duration);

const WAIT: u8 = 0;
const GO: u8 = 1;
const STOP: u8 = 2;

/// What the threads of one measurement share.
struct Test {
    gate: Barrier,
    state: AtomicU8,
    start: Instant,
    time: Duration,
}

impl Test {
    /// Repeats `pass` together with the other threads until the first one ends it.
    fn passes(&self, first: bool, pass: impl Fn()) -> Vec<Span> {
        // Not at the gate, which would never open if the system gave fewer threads.
        while self.state.load(Acquire) == WAIT {
            std::thread::sleep(Duration::from_micros(50));
        }
        let mut spans = Vec::new();
        if self.state.load(Acquire) == STOP {
            return spans;
        }
        loop {
            self.gate.wait();
            let begin = self.start.elapsed();
            pass();
            spans.push((begin, self.start.elapsed()));
            if first && spans.len() >= 3 && self.start.elapsed() >= self.time {
                self.state.store(STOP, Release);
            }
            // All threads see the first one's decision behind this.
            self.gate.wait();
            if self.state.load(Acquire) == STOP {
                return spans;
            }
        }
    }
}

/// Adds words up with independent sums, which the compiler turns into wide loads.
fn one_stream(words: &[u64]) -> u64 {
    let mut sums = [0u64; 16];
    for chunk in words.chunks_exact(16) {
        add(&mut sums, chunk);
    }
    sums.iter().fold(0, |a, s| a.wrapping_add(*s))
}

/// The same from four places at once. Up to four words at the end are left out.
fn four_streams(words: &[u64]) -> u64 {
    let quarter = words.len() / 4;
    let part = |i: usize| words[i * quarter..(i + 1) * quarter].chunks_exact(8);
    let mut sums = [[0u64; 8]; 4];
    for (((a, b), c), d) in part(0).zip(part(1)).zip(part(2)).zip(part(3)) {
        for (sums, chunk) in sums.iter_mut().zip([a, b, c, d]) {
            add(sums, chunk);
        }
    }
    sums.iter().flatten().fold(0, |a, s| a.wrapping_add(*s))
}

#[inline(always)]
fn add(sums: &mut [u64], words: &[u64]) {
    for (sum, word) in sums.iter_mut().zip(words) {
        *sum = sum.wrapping_add(*word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_is_larger_than_the_cache_and_leaves_memory() {
        let gib = 1u64 << 30;
        assert_eq!(buffer_for(None, None), 64 * MIB);
        assert_eq!(buffer_for(Some(4 * MIB), Some(8 * gib)), 64 * MIB);
        assert_eq!(buffer_for(Some(48 * MIB), Some(8 * gib)), 96 * MIB);
        assert_eq!(buffer_for(Some(4096 * MIB), Some(64 * gib)), 1024 * MIB);
        assert_eq!(buffer_for(Some(480 * MIB), Some(gib)), 128 * MIB);
        assert_eq!(buffer_for(None, Some(0)), MIB);
    }

    #[test]
    fn thread_counts_end_with_the_one_asked_for() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(3), [1, 2, 3]);
        assert_eq!(thread_counts(8), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(thread_counts(20), [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]);
        assert_eq!(thread_counts(16).last_chunk(), Some(&[8, 16]));
    }

    /// Both read every word, so that a pass is worth the bytes it is counted with.
    #[test]
    fn every_word_is_read() {
        let words: Vec<u64> = (0..1024).collect();
        assert_eq!(one_stream(&words), 1023 * 512);
        assert_eq!(four_streams(&words), 1023 * 512);
    }

    #[test]
    fn threads_sit_where_an_engines_would() {
        let seats = |pin| Seats {
            pages: Pages::Large,
            pin,
            node: None,
        };
        assert_eq!(seats(false).masks(1), None);
        let allowed = Mask::current().expect("Linux tells").cpus();
        let one = seats(true).masks(1).expect("one CPU at least");
        let placement = Machine::here().place(&Want {
            affinity: Some(&allowed),
            threads: Some(1),
            ..Want::default()
        });
        assert_eq!(one, [Mask::of(&placement.cpus)]);
        assert_eq!(seats(true).masks(allowed.len() + 1), None);
    }

    #[test]
    fn each_number_of_threads_gives_a_speed() {
        for (pages, pin) in [(Pages::Small, false), (Pages::Large, true)] {
            let node = None;
            let seats = Seats { pages, pin, node };
            let before = Mask::current();
            let mut seen = Vec::new();
            let readings = measure(100_000, seats, &[1, 3], &mut |done, of| {
                seen.push((done, of))
            })
            .expect("memory and threads");
            assert_eq!(seen, [(0, 2), (1, 2), (2, 2)]);
            assert_eq!(Mask::current(), before);
            assert_eq!(readings.len(), 2);
            for (reading, threads) in readings.iter().zip([1, 3]) {
                assert_eq!(reading.threads, threads);
                assert_eq!(reading.buffer_bytes, 100_000);
                assert!(reading.one_stream > 0.0);
                assert!(reading.bytes_per_second >= reading.one_stream);
            }
        }
    }
}
