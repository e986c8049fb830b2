//! `--help` and the way bad flags end.

use assert_cmd::Command;

fn runner(args: &[&str]) -> assert_cmd::assert::Assert {
    Command::new(env!("CARGO_BIN_EXE_runner"))
        .args(args)
        .assert()
}

#[test]
fn help_has_examples_for_each_command() {
    let outcome = runner(&["--help"]).success();
    let text = String::from_utf8_lossy(&outcome.get_output().stdout).into_owned();
    for part in [
        "Examples:",
        "runner --model m.myq",
        "runner chat",
        "runner bench",
        "--n-gpu-layers",
    ] {
        assert!(text.contains(part), "{part}");
    }
    for command in ["run", "chat", "bench", "tune"] {
        runner(&[command, "--help"]).success();
    }
}

#[test]
fn wrong_flags_end_with_code_2() {
    for args in [
        &["--no-such-flag"][..],
        &["run"],
        &["--model", "x"],
        &["bench", "--model", "x", "--repeat", "many"],
    ] {
        runner(args).code(2);
    }
}
