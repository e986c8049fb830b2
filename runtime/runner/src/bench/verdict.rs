//! What decoding waits for, from what was measured.
//!
//! A step needs the file's pages, then reads the weights and the cache of past tokens, then
//! computes, on threads that meet after every matrix. [`verdict`] looks at what excludes the
//! rest first:
//!
//! 1. Page cache: bytes still come from the disk while decoding. A disk is ten to a thousand
//!    times slower than memory, so a fiftieth of the bytes already decides.
//! 2. KV cache: past tokens take more time than the weights do (a step with a nearly empty
//!    cache is measured as well), or more of the bytes.
//! 3. Bandwidth: at least three quarters of what a plain read reaches with as many threads, each
//!    reading one stream, as one reads a matrix. Several streams at once may be faster; that a
//!    kernel could still gain by them is said in the reason.
//! 4. Synchronisation: the threads together are far from their number times one thread, where
//!    neither the processors nor the bandwidth limits them.
//! 5. Arithmetic is what is left: the threads add up, and memory could give more.

use serde::Serialize;

/// What one set-up was seen to do; rates in tokens a second, the rest per decoded token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// Threads that computed, and processors that they may use.
    pub(crate) threads: usize,
    pub(crate) processors: usize,
    /// Bytes of weights and of keys and values that a step reads.
    pub(crate) weight_bytes: f64,
    pub(crate) cache_bytes: f64,
    /// Bytes a second that a plain read reaches with as many threads: at best, and with one
    /// stream for each thread.
    pub(crate) bandwidth: f64,
    pub(crate) one_stream: f64,
    /// Decoding behind the prompt.
    pub(crate) rate: f64,
    /// Decoding with a nearly empty cache: with these threads, and with one.
    pub(crate) empty_rate: f64,
    pub(crate) single_rate: f64,
    /// Page faults that waited for the disk, and bytes that came from it; 0 where the system
    /// does not say.
    pub(crate) major_faults: f64,
    pub(crate) disk_bytes: f64,
    /// Share of the file in memory afterwards.
    pub(crate) residency: Option<f64>,
    /// Whether most of the file lies in small pages.
    pub(crate) small_pages: bool,
    /// Share of their time that the threads waited for a processor, and how often one lost it.
    pub(crate) wait_share: Option<f64>,
    pub(crate) involuntary_switches: f64,
}

/// What limits decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Bottleneck {
    Bandwidth,
    Arithmetic,
    Synchronisation,
    PageCache,
    KvCache,
}

impl Bottleneck {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Bottleneck::Bandwidth => "bandwidth",
            Bottleneck::Arithmetic => "arithmetic",
            Bottleneck::Synchronisation => "synchronisation",
            Bottleneck::PageCache => "page cache",
            Bottleneck::KvCache => "KV cache",
        }
    }
}

/// The limit, and the numbers that it was seen by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Verdict {
    pub(crate) bottleneck: Bottleneck,
    pub(crate) reason: String,
}

/// Share of a step's bytes from the disk above which the disk decides.
const FROM_DISK: f64 = 0.02;
/// What could be faster where memory decides.
const SMALL_PAGES: &str = "; the file lies in small pages, and where its file system has large ones (ext4 since Linux 6.16, XFS since 5.18) --renew-pages reads it again into those, from which cores read up to 1.5 times as fast";
/// Share of the bandwidth above which memory decides.
const OF_BANDWIDTH: f64 = 0.75;
/// Threads that reach less than this share of what they could wait for each other.
const OF_THREADS: f64 = 0.65;
/// As above, where they were also seen to wait for processors.
const OF_THREADS_WAITING: f64 = 0.85;
/// Share of their time that threads wait for a processor when there are more of them.
const WAITING: f64 = 0.3;

impl Measured {
    /// Bytes that decoding reads in a second.
    pub(crate) fn traffic(&self) -> f64 {
        (self.weight_bytes + self.cache_bytes) * self.rate
    }

    /// The speed of reading beside that of plain reads.
    fn reads(&self) -> String {
        format!(
            "decoding reads {:.1} GB/s, {:.0} % of the {:.1} GB/s that {} can read here in one stream and {:.0} % of the {:.1} GB/s at best",
            self.traffic() / 1e9,
            100.0 * self.traffic() / self.one_stream,
            self.one_stream / 1e9,
            threads(self.threads),
            100.0 * self.traffic() / self.bandwidth,
            self.bandwidth / 1e9,
        )
    }

    /// Share of a step's time that past tokens take.
    fn cache_time(&self) -> f64 {
        1.0 - self.rate / self.empty_rate
    }

    /// How many times as fast as one thread, and how many times processors and memory allow.
    fn speed_up(&self) -> (f64, f64) {
        let processors = self.threads.min(self.processors).max(1) as f64;
        let memory = self.one_stream / self.weight_bytes / self.single_rate;
        (self.empty_rate / self.single_rate, processors.min(memory))
    }
}

/// See the head of this file.
pub(crate) fn verdict(m: &Measured) -> Verdict {
    let found = [page_cache, kv_cache, bandwidth, synchronisation]
        .iter()
        .find_map(|look| look(m));
    found.unwrap_or_else(|| arithmetic(m))
}

fn page_cache(m: &Measured) -> Option<Verdict> {
    let share = m.disk_bytes / m.weight_bytes;
    // Where the system counts no bytes, a fault for every step is one too many.
    let faults = m.disk_bytes == 0.0 && m.major_faults >= 1.0;
    if share < FROM_DISK && !faults {
        return None;
    }
    let resident = m.residency.map_or_else(String::new, |r| {
        format!("; {:.0} % of the file is in memory", 100.0 * r)
    });
    Some(Verdict {
        bottleneck: Bottleneck::PageCache,
        reason: format!(
            "each token waits for the disk {:.1} times and reads {:.1} MB from it, {:.0} % of the weights{resident}: free memory, take a smaller file, or keep it with --mlock",
            m.major_faults,
            m.disk_bytes / 1e6,
            100.0 * share
        ),
    })
}

fn kv_cache(m: &Measured) -> Option<Verdict> {
    let bytes = m.cache_bytes > m.weight_bytes;
    if !bytes && m.cache_time() <= 0.5 {
        return None;
    }
    Some(Verdict {
        bottleneck: Bottleneck::KvCache,
        reason: format!(
            "a token reads {:.1} MB of keys and values beside {:.1} MB of weights, and takes {:.1} ms where it takes {:.1} ms with an empty cache: a shorter context makes it faster",
            m.cache_bytes / 1e6,
            m.weight_bytes / 1e6,
            1e3 / m.rate,
            1e3 / m.empty_rate
        ),
    })
}

fn bandwidth(m: &Measured) -> Option<Verdict> {
    (m.traffic() >= OF_BANDWIDTH * m.one_stream).then(|| Verdict {
        bottleneck: Bottleneck::Bandwidth,
        reason: format!(
            "{}: fewer bits a weight make it faster, faster arithmetic does not{}",
            m.reads(),
            if m.small_pages { SMALL_PAGES } else { "" }
        ),
    })
}

fn synchronisation(m: &Measured) -> Option<Verdict> {
    if m.threads == 1 {
        return None;
    }
    let (got, possible) = m.speed_up();
    let waiting = m.wait_share.is_some_and(|w| w >= WAITING);
    let bound = if waiting {
        OF_THREADS_WAITING
    } else {
        OF_THREADS
    };
    if got >= bound * possible {
        return None;
    }
    let waited = m.wait_share.map_or_else(String::new, |w| {
        format!(
            "; for {:.0} % of their time they waited for a processor, and lost it {:.1} times a token",
            100.0 * w,
            m.involuntary_switches
        )
    });
    let advice = if m.threads > m.processors {
        format!("no more than {} threads", m.processors)
    } else if waiting {
        "fewer threads, or less other work on this machine".into()
    } else {
        "fewer threads; the model is small for so many".into()
    };
    Some(Verdict {
        bottleneck: Bottleneck::Synchronisation,
        reason: format!(
            "{} on {} processors are {got:.2} times as fast as one, where processors and memory allow {possible:.2}: they wait for each other{waited}; try {advice}",
            threads(m.threads),
            m.processors
        ),
    })
}

fn arithmetic(m: &Measured) -> Verdict {
    let together = if m.threads == 1 {
        "one thread computes without waiting for others".into()
    } else {
        let (got, possible) = m.speed_up();
        format!(
            "{} are {got:.2} times as fast as one of {possible:.2} possible",
            threads(m.threads)
        )
    };
    Verdict {
        bottleneck: Bottleneck::Arithmetic,
        reason: format!(
            "{}, and {together}: computing takes the time, so faster kernels or more processors help",
            m.reads()
        ),
    }
}

fn threads(n: usize) -> String {
    if n == 1 {
        "one thread".into()
    } else {
        format!("{n} threads")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 MB of weights on four processors, 10 GB/s in one stream, 50 tokens/s: half the bandwidth, threads
    /// that add up.
    const PLAIN: Measured = Measured {
        threads: 4,
        processors: 4,
        weight_bytes: 1e8,
        cache_bytes: 1e6,
        bandwidth: 1.25e10,
        one_stream: 1e10,
        rate: 50.0,
        empty_rate: 51.0,
        single_rate: 13.0,
        major_faults: 0.0,
        disk_bytes: 0.0,
        residency: Some(1.0),
        small_pages: false,
        wait_share: Some(0.01),
        involuntary_switches: 0.1,
    };

    #[track_caller]
    fn check(m: Measured, bottleneck: Bottleneck, reasons: &[&str]) {
        let verdict = verdict(&m);
        assert_eq!(verdict.bottleneck, bottleneck, "{}", verdict.reason);
        for part in reasons {
            assert!(verdict.reason.contains(part), "{part}: {}", verdict.reason);
        }
    }

    #[test]
    fn threads_that_add_up_below_the_bandwidth_compute() {
        check(
            PLAIN,
            Bottleneck::Arithmetic,
            &[
                "5.0 GB/s, 50 % of the 10.0 GB/s",
                "40 % of the 12.5 GB/s",
                "3.92 times",
            ],
        );
        let one = Measured {
            threads: 1,
            rate: 13.0,
            empty_rate: 13.0,
            ..PLAIN
        };
        check(one, Bottleneck::Arithmetic, &["one thread computes"]);
    }

    #[test]
    fn most_of_the_bandwidth_is_bandwidth() {
        let fast = Measured {
            rate: 80.0,
            empty_rate: 82.0,
            // Four threads are not four times as fast, and cannot be.
            single_rate: 40.0,
            ..PLAIN
        };
        check(
            fast,
            Bottleneck::Bandwidth,
            &["81 %", "10.0 GB/s", "65 %", "4 threads"],
        );
        let small = Measured {
            small_pages: true,
            ..fast
        };
        check(small, Bottleneck::Bandwidth, &["--renew-pages"]);
        // As before with more threads than processors: they do all that memory allows.
        let crowded = Measured {
            threads: 16,
            wait_share: Some(0.7),
            ..fast
        };
        check(crowded, Bottleneck::Bandwidth, &[]);
    }

    #[test]
    fn threads_that_do_not_add_up_wait_for_each_other() {
        let slow = Measured {
            rate: 20.0,
            empty_rate: 20.0,
            ..PLAIN
        };
        check(
            slow,
            Bottleneck::Synchronisation,
            &["1.54 times", "allow 4.00"],
        );
        let crowded = Measured {
            threads: 8,
            processors: 2,
            rate: 20.0,
            empty_rate: 20.0,
            wait_share: Some(0.6),
            ..PLAIN
        };
        let parts = [
            "8 threads on 2 processors",
            "60 %",
            "no more than 2 threads",
        ];
        check(crowded, Bottleneck::Synchronisation, &parts);
        let beside_others = Measured {
            rate: 40.0,
            empty_rate: 40.0,
            wait_share: Some(0.4),
            ..PLAIN
        };
        check(
            beside_others,
            Bottleneck::Synchronisation,
            &["less other work"],
        );
        // The same speed without waiting is what processors of two kinds give.
        let uneven = Measured {
            wait_share: None,
            ..beside_others
        };
        check(uneven, Bottleneck::Arithmetic, &[]);
    }

    #[test]
    fn what_memory_allows_is_not_asked_of_threads() {
        // 74 % of the bandwidth: below the line, and yet threads cannot add up further.
        let near = Measured {
            rate: 73.0,
            empty_rate: 74.0,
            single_rate: 60.0,
            ..PLAIN
        };
        check(near, Bottleneck::Arithmetic, &[]);
    }

    #[test]
    fn pages_from_the_disk_decide() {
        let cold = Measured {
            rate: 2.0,
            empty_rate: 2.0,
            major_faults: 300.0,
            disk_bytes: 4e7,
            residency: Some(0.6),
            ..PLAIN
        };
        let parts = ["300.0 times", "40.0 MB", "40 %", "60 % of the file"];
        check(cold, Bottleneck::PageCache, &parts);
        // No count of bytes, as under some kernels.
        let uncounted = Measured {
            disk_bytes: 0.0,
            residency: None,
            ..cold
        };
        check(uncounted, Bottleneck::PageCache, &[]);
        // A stray read is not a bottleneck, nor is a part of the file that no step needs.
        let stray = Measured {
            major_faults: 0.5,
            disk_bytes: 1e5,
            residency: Some(0.8),
            ..PLAIN
        };
        check(stray, Bottleneck::Arithmetic, &[]);
    }

    #[test]
    fn past_tokens_decide_by_bytes_or_by_time() {
        let bytes = Measured {
            cache_bytes: 1.2e8,
            ..PLAIN
        };
        check(
            bytes,
            Bottleneck::KvCache,
            &["120.0 MB of keys", "100.0 MB of weights"],
        );
        let time = Measured {
            rate: 20.0,
            empty_rate: 50.0,
            cache_bytes: 6e7,
            ..PLAIN
        };
        check(time, Bottleneck::KvCache, &["50.0 ms", "20.0 ms"]);
    }
}
