//! `--help` and the way bad flags end.

use assert_cmd::Command;

fn myq(args: &[&str]) -> assert_cmd::assert::Assert {
    Command::new(env!("CARGO_BIN_EXE_myq")).args(args).assert()
}

#[test]
fn help_has_examples_and_every_command() {
    let outcome = myq(&["--help"]).success();
    let text = String::from_utf8_lossy(&outcome.get_output().stdout).into_owned();
    for part in [
        "Examples:",
        "import",
        "quantize",
        "inspect",
        "relayout",
        "verify",
        "quickstart",
        "calibrate",
        "eval",
        "compare",
        "export",
    ] {
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn wrong_flags_and_files_end_with_code_2() {
    for args in [
        &["quantize"][..],
        &["quantize", "no-such-file.gguf", "--bits", "3"],
        &["quantize", "Cargo.toml", "--bits", "3"],
        &["inspect", "no-such-file.myq"],
        &["verify", "src"],
        &["quickstart", "--bits", "x"],
    ] {
        myq(args).code(2);
    }
}
