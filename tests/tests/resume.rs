//! B7: a quantisation that is killed at any moment and started again ends with the same bytes.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use myq_tests::{Random, calibration, data, program};

/// Times that the program is killed.
const KILLS: usize = 20;

fn start(out: &Path, calibration: &Path, threads: usize) -> Child {
    Command::new(program("myq"))
        .arg("quantize")
        .arg(data("target"))
        .args(["--bits", "2", "--samples", "8", "--length", "128"])
        .arg("--calibration")
        .arg(calibration)
        .arg("--out")
        .arg(out)
        .env("RAYON_NUM_THREADS", threads.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts")
}

fn finish(out: &Path, calibration: &Path, threads: usize) -> String {
    let outcome = start(out, calibration, threads).wait().expect("it ends");
    assert!(outcome.success());
    blake3(out)
}

fn blake3(path: &Path) -> String {
    let file = myq_engine::Mapped::open(path).expect("it is whole");
    let myq = myq_format::myq::Myq::parse(file.bytes()).expect("it is a model");
    myq.verify_all().expect("every checksum is right");
    let sum: u64 = file.bytes().iter().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{sum:016x} {}", file.bytes().len())
}

#[test]
fn a_killed_run_goes_on_and_ends_with_the_same_bytes() {
    let dir = tempfile::tempdir().expect("a folder");
    let calibration = calibration(dir.path());
    let begin = Instant::now();
    let whole = dir.path().join("whole.myq");
    let want = finish(&whole, &calibration, 2);
    let time = begin.elapsed();
    // Threads do not count.
    let alone = dir.path().join("alone.myq");
    assert_eq!(finish(&alone, &calibration, 1), want);
    let out = dir.path().join("killed.myq");
    let work = dir.path().join("killed.myq.work");
    let mut random = Random(0x5eed);
    let (mut killed, mut resumed) = (0, 0);
    while killed < KILLS {
        // A fresh run now and then: each is killed up to four times on its way.
        if killed % 4 == 0 {
            drop(std::fs::remove_file(&out));
            drop(std::fs::remove_dir_all(&work));
        }
        let mut run = start(&out, &calibration, 2);
        std::thread::sleep(time.mul_f64(random.below(1000) as f64 / 1000.0));
        run.kill().expect("it can be killed");
        let ended = run.wait().expect("it ends");
        if ended.success() {
            // It was faster than its killer; the result must be right, and does not count.
            assert_eq!(blake3(&out), want);
            drop(std::fs::remove_file(&out));
            continue;
        }
        killed += 1;
        assert!(!out.exists() || blake3(&out) == want, "half a file");
        resumed += usize::from(work.join("manifest.json").exists());
        if killed % 4 == 0 {
            assert_eq!(finish(&out, &calibration, 2), want);
            assert!(!work.exists(), "the work folder stays behind");
        }
    }
    assert!(
        resumed > KILLS / 2,
        "{resumed} of {KILLS} runs left work behind"
    );
}
