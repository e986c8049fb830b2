//! What `runner bench` prints, as text and as JSON.

use std::io::Write;

use myq_engine::bandwidth::{Pages, Reading};
use serde::Serialize;

use super::measure::Ceiling;
use super::verdict::{Bottleneck, Measured, Verdict};

/// One set-up.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) model: String,
    pub(crate) kernels: &'static str,
    pub(crate) threads: usize,
    pub(crate) gpu_layers: usize,
    pub(crate) prompt_tokens: usize,
    pub(crate) decode_tokens: usize,
    pub(crate) repeat: usize,
    pub(crate) prompt_tokens_per_second: f64,
    pub(crate) prompt_spread: [f64; 2],
    pub(crate) decode_tokens_per_second: f64,
    pub(crate) decode_spread: [f64; 2],
    pub(crate) bytes_per_token: usize,
    pub(crate) decode_gigabytes_per_second: f64,
    pub(crate) load_seconds: f64,
    /// From the start of opening the file to the logits of a one-token prompt.
    pub(crate) first_token_seconds: f64,
    /// Whether a tenth of the file or more had to come from the disk first.
    pub(crate) cold_start: Option<bool>,
    pub(crate) planned_cache_bytes: usize,
    pub(crate) planned_buffer_bytes: usize,
    pub(crate) resident_bytes: u64,
    pub(crate) resident_anonymous_bytes: u64,
    /// Share of the weights in memory that lies in large pages.
    pub(crate) large_page_share: Option<f64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) judged: Option<Judged>,
}

/// What is left out with `--speed-only`.
#[derive(Serialize)]
pub(crate) struct Judged {
    #[serde(flatten)]
    pub(crate) bandwidth: Bandwidth,
    /// The best reading with as many threads, and decoding's share of it.
    pub(crate) bandwidth_gigabytes_per_second: f64,
    pub(crate) bandwidth_share: f64,
    /// The same for reading in one stream, by which the verdict goes.
    pub(crate) one_stream_gigabytes_per_second: f64,
    pub(crate) one_stream_share: f64,
    pub(crate) cache_bytes_per_token: f64,
    pub(crate) empty_cache_tokens_per_second: f64,
    pub(crate) single_thread_tokens_per_second: f64,
    pub(crate) major_faults_per_token: f64,
    pub(crate) disk_bytes_per_token: f64,
    pub(crate) processor_wait_share: Option<f64>,
    pub(crate) involuntary_switches_per_token: f64,
    pub(crate) bottleneck: Bottleneck,
    pub(crate) reason: String,
}

impl Judged {
    pub(crate) fn new(ceiling: &Ceiling, m: &Measured, verdict: Verdict) -> Judged {
        Judged {
            bandwidth: Bandwidth::new(ceiling),
            bandwidth_gigabytes_per_second: m.bandwidth / 1e9,
            bandwidth_share: m.traffic() / m.bandwidth,
            one_stream_gigabytes_per_second: m.one_stream / 1e9,
            one_stream_share: m.traffic() / m.one_stream,
            cache_bytes_per_token: m.cache_bytes,
            empty_cache_tokens_per_second: m.empty_rate,
            single_thread_tokens_per_second: m.single_rate,
            major_faults_per_token: m.major_faults,
            disk_bytes_per_token: m.disk_bytes,
            processor_wait_share: m.wait_share,
            involuntary_switches_per_token: m.involuntary_switches,
            bottleneck: verdict.bottleneck,
            reason: verdict.reason,
        }
    }
}

/// The read test.
#[derive(Serialize)]
pub(crate) struct Bandwidth {
    /// Whether the buffers were in large pages, as far as the system has them.
    pub(crate) large_pages: bool,
    pub(crate) last_level_cache_bytes: Option<usize>,
    /// A buffer that no cache holds.
    pub(crate) memory_bandwidth: Vec<Read>,
    /// A buffer as large as what a token reads; absent where no cache holds that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) model_size_bandwidth: Option<Vec<Read>>,
}

/// One reading.
#[derive(Serialize)]
pub(crate) struct Read {
    pub(crate) threads: usize,
    pub(crate) buffer_bytes: usize,
    pub(crate) gigabytes_per_second: f64,
    pub(crate) one_stream_gigabytes_per_second: f64,
}

impl Bandwidth {
    pub(crate) fn new(ceiling: &Ceiling) -> Bandwidth {
        let reads = |readings: &Vec<Reading>| {
            let read = |r: &Reading| Read {
                threads: r.threads,
                buffer_bytes: r.buffer_bytes,
                gigabytes_per_second: r.bytes_per_second / 1e9,
                one_stream_gigabytes_per_second: r.one_stream / 1e9,
            };
            readings.iter().map(read).collect()
        };
        Bandwidth {
            large_pages: ceiling.pages == Pages::Large,
            last_level_cache_bytes: ceiling.last_level_cache,
            memory_bandwidth: reads(&ceiling.memory),
            model_size_bandwidth: ceiling.model.as_ref().map(reads),
        }
    }

    pub(crate) fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        let pages = if self.large_pages { "large" } else { "small" };
        print_reads("memory reads", pages, &self.memory_bandwidth, out)?;
        if let Some(reads) = &self.model_size_bandwidth {
            print_reads("model-sized reads", pages, reads, out)?;
            writeln!(
                out,
                "  what a token reads fits into the last-level cache of {:.0} MB; the faster of the two is the ceiling",
                self.last_level_cache_bytes.unwrap_or(0) as f64 / 1e6
            )?;
        }
        Ok(())
    }
}

fn print_reads(
    name: &str,
    pages: &str,
    reads: &[Read],
    out: &mut impl Write,
) -> std::io::Result<()> {
    let buffer = reads.first().map_or(0, |r| r.buffer_bytes);
    write!(
        out,
        "{name} ({:.0} MB in {pages} pages), GB/s by threads (in one stream):",
        buffer as f64 / 1e6
    )?;
    for r in reads {
        let one = r.one_stream_gigabytes_per_second;
        write!(
            out,
            "  {}: {:.2} ({one:.2})",
            r.threads, r.gigabytes_per_second
        )?;
    }
    writeln!(out)
}

impl Report {
    pub(crate) fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(
            out,
            "{} — {} kernels, {} threads, {} runs",
            self.model, self.kernels, self.threads, self.repeat
        )?;
        let mut line = |name: &str, n: usize, rate: f64, spread: [f64; 2]| {
            writeln!(
                out,
                "{name:<8}{n:>6} tokens {rate:>10.1} tokens/s   ({:.1} – {:.1})",
                spread[0], spread[1]
            )
        };
        line(
            "prompt",
            self.prompt_tokens,
            self.prompt_tokens_per_second,
            self.prompt_spread,
        )?;
        line(
            "decode",
            self.decode_tokens,
            self.decode_tokens_per_second,
            self.decode_spread,
        )?;
        write!(
            out,
            "decode reads {:.1} MB of weights a token: {:.2} GB/s",
            self.bytes_per_token as f64 / 1e6,
            self.decode_gigabytes_per_second
        )?;
        if let Some(j) = &self.judged {
            write!(
                out,
                "; with {:.1} MB of keys and values {:.0} % of the bandwidth",
                j.cache_bytes_per_token / 1e6,
                100.0 * j.bandwidth_share
            )?;
        }
        writeln!(out)?;
        writeln!(
            out,
            "{} start: loaded in {:.2} s, first token after {:.2} s; resident {:.0} MB, of which not the file {:.0} MB{}",
            match self.cold_start {
                Some(true) => "cold",
                Some(false) => "warm",
                None => "cold or warm (the system does not say)",
            },
            self.load_seconds,
            self.first_token_seconds,
            self.resident_bytes as f64 / 1e6,
            self.resident_anonymous_bytes as f64 / 1e6,
            self.large_page_share
                .map_or_else(String::new, |share| format!(
                    "; {:.0} % of the weights in large pages",
                    100.0 * share
                ))
        )?;
        match &self.judged {
            Some(j) => {
                j.bandwidth.print(out)?;
                writeln!(out, "bottleneck: {} — {}", j.bottleneck.name(), j.reason)
            }
            None => Ok(()),
        }
    }
}

/// The table of `--sweep`.
pub(crate) fn print_sweep(reports: &[Report], out: &mut impl Write) -> std::io::Result<()> {
    let Some(first) = reports.first() else {
        return Ok(());
    };
    writeln!(out, "{} — {} kernels", first.model, first.kernels)?;
    if let Some(j) = &first.judged {
        j.bandwidth.print(out)?;
    }
    writeln!(
        out,
        "This build has no GPU kernels: GPU layers are 0 in all rows.\n\n\
        | GPU layers | threads | prompt of {}, s | prompt, tokens/s | decode, tokens/s | of bandwidth | bottleneck |\n\
        |---:|---:|---:|---:|---:|---:|---|",
        first.prompt_tokens
    )?;
    for r in reports {
        let (share, bottleneck) = r
            .judged
            .as_ref()
            .map_or((0.0, "–"), |j| (j.bandwidth_share, j.bottleneck.name()));
        writeln!(
            out,
            "| {} | {} | {:.2} | {:.1} | {:.1} ({:.1} – {:.1}) | {:.0} % | {bottleneck} |",
            r.gpu_layers,
            r.threads,
            r.prompt_tokens as f64 / r.prompt_tokens_per_second,
            r.prompt_tokens_per_second,
            r.decode_tokens_per_second,
            r.decode_spread[0],
            r.decode_spread[1],
            100.0 * share
        )?;
    }
    writeln!(out)?;
    for (r, j) in reports.iter().filter_map(|r| Some((r, r.judged.as_ref()?))) {
        writeln!(out, "{}: {} — {}", r.threads, j.bottleneck.name(), j.reason)?;
    }
    Ok(())
}
