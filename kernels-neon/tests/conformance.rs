//! The suite of myq-blocks on this crate's kernels; says so where there are none.

use kernels_neon::Neon;
use myq_blocks::conformance::{Columns, Random, bench_matrix, run};
use myq_blocks::scalar::Scalar;
use myq_blocks::{DType, Kernels, Rows};

/// The kernels, which must exist exactly on 64-bit Arm.
fn neon() -> Option<Neon> {
    let neon = Neon::new();
    let expected = cfg!(all(target_arch = "aarch64", target_endian = "little"));
    assert_eq!(neon.is_some(), expected);
    if neon.is_none() {
        println!("skipped: no NEON on {}", std::env::consts::ARCH);
    }
    neon
}

#[test]
fn every_kernel_equals_the_reference() {
    if let Some(neon) = neon() {
        println!("{}", run(neon).unwrap_or_else(|e| panic!("{e}")));
    }
}

/// Ordinary scales, random blocks, partial superblocks: not within a tolerance but the same
/// floats, for any number of columns.
#[test]
fn ternary_products_equal_the_reference_to_the_bit() {
    let Some(neon) = neon() else { return };
    for dtype in [DType::Tq1_0, DType::Tq2_0] {
        for cols in [32, 160, 256, 288, 1536] {
            let rows = 7;
            let data = bench_matrix(dtype, rows, cols).expect("a length of the format");
            let w = Rows::new(dtype, cols, &data).expect("whole rows");
            let mut random = Random::new(cols as u64);
            let vectors = (0..7).map(|_| random.vector(cols, 3.0)).collect();
            let columns = Columns::quantize(neon, vectors);
            for n in [1, 2, 3, 4, 7] {
                let product = |k: &dyn Fn(&mut [&mut [f32]])| {
                    let mut out = vec![vec![f32::NAN; rows]; n];
                    k(&mut out.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
                    out.concat().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
                };
                let columns = &columns.all()[..n];
                let got = product(&|out| neon.matmul(w, columns, out));
                let want = product(&|out| Scalar.matmul(w, columns, out));
                assert_eq!(got, want, "{dtype:?}, {cols} cols, {n} columns");
            }
        }
    }
}
