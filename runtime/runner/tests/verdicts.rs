//! Verdicts of `bench` on set-ups made to have each bottleneck; measured, so run by hand:
//!
//! `MYQ_SLOW=1 MYQ_BENCH_F32=F32.gguf MYQ_BENCH_MODEL=Q4_K_M.gguf MYQ_BENCH_TINY=fixture.myq
//! cargo test --release -p runner --test verdicts -- --nocapture`
//!
//! on a machine that does nothing else. The first two hold the same small model, as
//! `compare-peers --quantize` writes it: decoding 32-bit weights needs the least arithmetic for
//! a byte, and 4-bit weights are soon outweighed by past tokens. The third is `tests/data/target`,
//! imported: its matrices are too small for many threads. What the verdicts follow from is held
//! by the unit tests of `bench/verdict.rs`, which need no clock.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The three files.
fn models() -> Option<[PathBuf; 3]> {
    let names = ["MYQ_BENCH_F32", "MYQ_BENCH_MODEL", "MYQ_BENCH_TINY"];
    let paths = names.map(std::env::var_os);
    if std::env::var_os("MYQ_SLOW").is_none() || paths.iter().any(Option::is_none) {
        eprintln!("skipped: set MYQ_SLOW=1, {}", names.join(", "));
        return None;
    }
    Some(paths.map(|p| p.unwrap_or_default().into()))
}

fn start(model: &Path, args: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_runner"))
        .args(["bench", "--json", "--model"])
        .arg(model)
        .args(args.split_whitespace())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the runner starts")
}

/// Checks the verdict and prints its reason.
#[track_caller]
fn expect(bottleneck: &str, args: &str, child: Child) {
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{args}: {}", output.status);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    println!("{args}\n  {} — {}", json["bottleneck"], json["reason"]);
    assert_eq!(json["bottleneck"], bottleneck, "{args}: {}", json["reason"]);
}

/// One test, so that the set-ups do not run beside each other.
#[test]
fn each_set_up_has_its_verdict() {
    let Some([wide, model, tiny]) = models() else {
        return;
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let short = "--prompt-tokens 16 --decode-tokens 64 --repeat 3";
    let many = format!("{short} --no-pin --threads {}", 4 * processors);
    let long = "--prompt-tokens 6000 --decode-tokens 32 --repeat 1 --context 8192 --cache-type f32";
    for (bottleneck, model, args) in [
        ("bandwidth", &wide, &*format!("{short} --threads 1")),
        (
            "arithmetic",
            &model,
            &format!("{short} --threads 1 --kernels scalar"),
        ),
        ("synchronisation", &tiny, &many),
        ("kv-cache", &model, long),
    ] {
        expect(bottleneck, args, start(model, args));
    }
    let args =
        "--prompt-tokens 4 --decode-tokens 8 --repeat 1 --threads 1 --no-prewarm --repack never";
    let child = start(&wide, args);
    let name = wide.file_name().and_then(|n| n.to_str()).expect("UTF-8");
    let evictor = evict::keep_out(child.id(), name);
    expect("page-cache", args, child);
    assert!(evictor.join().expect("it ends") > 0, "nothing was evicted");
}

/// What a machine with too little memory does: pages of the file leave memory as soon as they
/// were used. Asked of the system for another process, so that no limit has to be set up.
mod evict {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::thread::JoinHandle;
    use std::time::Duration;

    /// Evicts what process `id` maps of the file `name` until the process ends; gives the
    /// number of times that worked.
    pub(crate) fn keep_out(id: u32, name: &str) -> JoinHandle<usize> {
        let name = name.to_owned();
        // SAFETY: the call takes two numbers and gives a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, id, 0) };
        assert!(fd >= 0, "pidfd_open: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new and belongs to nobody else.
        let process = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        std::thread::spawn(move || {
            let mut count = 0;
            while let Some(range) = mapping(id, &name) {
                if let Some((start, len)) = range {
                    count += usize::from(page_out(&process, start, len));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            count
        })
    }

    fn page_out(process: &OwnedFd, start: usize, len: usize) -> bool {
        let range = libc::iovec {
            iov_base: start as *mut libc::c_void,
            iov_len: len,
        };
        // SAFETY: the addresses are the other process's and nothing here is read or written
        // through them; the advice changes where pages lie, not what they hold.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                process.as_raw_fd(),
                &raw const range,
                1,
                libc::MADV_PAGEOUT,
                0,
            )
        };
        done > 0
    }

    /// Start and length of the file's mapping: `None` when the process has ended, `Some(None)`
    /// before it maps the file.
    fn mapping(id: u32, name: &str) -> Option<Option<(usize, usize)>> {
        let maps = std::fs::read_to_string(format!("/proc/{id}/maps")).ok()?;
        if maps.is_empty() {
            return None;
        }
        let parse = |line: &str| {
            let (start, end) = line.split_whitespace().next()?.split_once('-')?;
            let number = |hex| usize::from_str_radix(hex, 16).ok();
            Some((number(start)?, number(end)? - number(start)?))
        };
        Some(maps.lines().find(|l| l.ends_with(name)).and_then(parse))
    }
}
