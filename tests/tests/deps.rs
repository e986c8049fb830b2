//! The arrows between crates: anything else than the architecture's fails.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

/// Each crate and the workspace crates it may use.
const ALLOWED: [(&str, &[&str]); 9] = [
    ("myq-blocks", &[]),
    ("myq-format", &["myq-blocks"]),
    ("myq-model", &["myq-blocks", "myq-format"]),
    ("kernels-avx2", &["myq-blocks"]),
    ("kernels-neon", &["myq-blocks"]),
    (
        "myq-engine",
        &[
            "myq-blocks",
            "myq-format",
            "myq-model",
            "kernels-avx2",
            "kernels-neon",
        ],
    ),
    (
        "runner",
        &["myq-blocks", "myq-format", "myq-model", "myq-engine"],
    ),
    (
        "myq",
        &["myq-blocks", "myq-format", "myq-model", "myq-engine"],
    ),
    (
        "myq-tests",
        &["myq-blocks", "myq-format", "myq-model", "myq-engine", "myq"],
    ),
];

#[test]
fn crates_depend_on_each_other_in_one_direction() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "metadata",
            "--format-version",
            "1",
            "--no-deps",
            "--offline",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let allowed: BTreeMap<_, _> = ALLOWED.into_iter().collect();
    let packages = json["packages"].as_array().expect("packages");
    assert_eq!(
        packages.len(),
        allowed.len(),
        "a crate was added: give it its arrows"
    );
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let arrows = allowed
            .get(name)
            .unwrap_or_else(|| panic!("{name} has no arrows here"));
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let other = dependency["name"].as_str().expect("a name");
            // Tests may look at themselves through another feature.
            if allowed.contains_key(other) && other != name {
                assert!(arrows.contains(&other), "{name} must not depend on {other}");
            }
        }
    }
}

#[test]
fn the_host_tool_and_the_model_crate_forbid_unsafe_code() {
    for file in [
        "../runtime/model/src/lib.rs",
        "../runtime/format/src/lib.rs",
        "../tools/src/lib.rs",
        "../tools/src/main.rs",
        "../runtime/blocks/src/scalar.rs",
    ] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let text = std::fs::read_to_string(&path).expect("it is there");
        assert!(text.contains("#![forbid(unsafe_code)]"), "{file}");
    }
}
