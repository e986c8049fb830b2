//! Every kernel against the scalar reference.

use kernels_avx2::Avx2;
use myq_blocks::conformance::run;

#[test]
fn avx2_equals_the_reference() {
    let Some(k) = Avx2::new() else {
        let expected =
            cfg!(target_arch = "x86_64") && std::env::var_os("MYQ_EXPECT_AVX2").is_some();
        assert!(!expected, "AVX2 was expected on this machine");
        println!("skipped: this processor has no AVX2, FMA and F16C");
        return;
    };
    match run(k) {
        Ok(report) => println!("{report}"),
        Err(mismatch) => panic!("{mismatch}"),
    }
}
