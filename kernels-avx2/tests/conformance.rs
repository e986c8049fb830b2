//! Every kernel against the scalar reference, at every level that this processor has.

use kernels_avx2::{Avx2, Level};
use myq_blocks::conformance::run;

fn check(level: Level) {
    let Some(k) = Avx2::with(level) else {
        // A comma-separated list of the levels that must be there.
        let expected = std::env::var("MYQ_EXPECT_AVX2").unwrap_or_default();
        let names = || expected.split(',').filter(|e| !e.is_empty());
        for name in names() {
            let known = Level::ALL.iter().any(|l| l.name() == name);
            assert!(known, "MYQ_EXPECT_AVX2 names {name}, which is no level");
        }
        let expected = cfg!(target_arch = "x86_64") && names().any(|e| e == level.name());
        assert!(!expected, "{} was expected on this machine", level.name());
        println!("skipped: this processor has no {}", level.name());
        return;
    };
    match run(k) {
        Ok(report) => println!("{report}"),
        Err(mismatch) => panic!("{mismatch}"),
    }
}

#[test]
fn avx2_equals_the_reference() {
    check(Level::Avx2);
}

#[test]
fn avx_vnni_equals_the_reference() {
    check(Level::AvxVnni);
}

#[test]
fn avx512_equals_the_reference() {
    check(Level::Avx512);
}

#[test]
fn amx_equals_the_reference() {
    check(Level::Amx);
}
