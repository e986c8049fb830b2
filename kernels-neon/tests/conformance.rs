//! The suite of myq-blocks on this crate's kernels, at every level that this processor has.

use kernels_neon::{Level, Neon};
use myq_blocks::conformance::{Columns, Random, bench_matrix, formats, run};
use myq_blocks::panels::{self, PANEL};
use myq_blocks::scalar::Scalar;
use myq_blocks::{DType, Kernels, Layout, Rows};

/// The kernels of a level. `MYQ_EXPECT_NEON` names the best level that this processor has: all
/// below must be there, and none above.
fn neon(level: Level) -> Option<Neon> {
    let neon = Neon::with(level);
    if !cfg!(all(target_arch = "aarch64", target_endian = "little")) {
        assert!(neon.is_none() && Neon::new().is_none());
    } else if let Ok(best) = std::env::var("MYQ_EXPECT_NEON") {
        let place = |name: &str| Level::ALL.iter().position(|l| l.name() == name);
        let best = place(&best).unwrap_or_else(|| panic!("MYQ_EXPECT_NEON: no level {best}"));
        let expected = place(level.name()) >= Some(best);
        assert_eq!(
            neon.is_some(),
            expected,
            "{} on this processor",
            level.name()
        );
        assert_eq!(
            Neon::new().map(Kernels::name),
            Some(Level::ALL[best].name())
        );
    } else {
        assert!(neon.is_some() || level != Level::Base);
    }
    if neon.is_none() {
        println!(
            "skipped: no {} on this {}",
            level.name(),
            std::env::consts::ARCH
        );
    }
    neon
}

fn check(level: Level) {
    if let Some(neon) = neon(level) {
        assert_eq!(neon.name(), level.name());
        println!("{}", run(neon).unwrap_or_else(|e| panic!("{e}")));
    }
}

#[test]
fn base_equals_the_reference() {
    check(Level::Base);
}

#[test]
fn dotprod_equals_the_reference() {
    check(Level::DotProd);
}

#[test]
fn i8mm_equals_the_reference() {
    check(Level::I8mm);
}

/// Ordinary scales, random blocks, partial superblocks: not within a tolerance but the same
/// floats, for any number of columns, in both layouts.
#[test]
fn ternary_products_equal_the_reference_to_the_bit() {
    for neon in Level::ALL.into_iter().filter_map(neon) {
        for dtype in [DType::Tq1_0, DType::Tq2_0] {
            for cols in [32, 160, 256, 288, 1536] {
                check_bits(neon, dtype, cols);
            }
        }
    }
}

/// A prompt in one piece, in pieces, and token by token gives the same floats.
#[test]
fn products_do_not_depend_on_the_number_of_columns() {
    for neon in Level::ALL.into_iter().filter_map(neon) {
        for dtype in formats() {
            for cols in [64, 544] {
                check_columns(neon, dtype, cols);
            }
        }
    }
}

/// Two panels of ordinary weights and three rows behind them, in the layout of the kernels;
/// plain where there is none.
fn two_panels(dtype: DType, cols: usize) -> Option<(Layout, Vec<u8>)> {
    let rows = 2 * PANEL + 3;
    let plain = bench_matrix(dtype, rows, cols)?;
    let mut data = plain.clone();
    let layout = Layout::Rows8.of(dtype, cols);
    if layout == Layout::Rows8 {
        let bytes = PANEL * plain.len() / rows;
        for (panel, rows) in data.chunks_exact_mut(bytes).zip(plain.chunks_exact(bytes)) {
            panels::pack(dtype, cols, rows, panel);
        }
    }
    Some((layout, data))
}

fn check_columns(neon: Neon, dtype: DType, cols: usize) {
    let Some((layout, data)) = two_panels(dtype, cols) else {
        return;
    };
    let w = Rows::in_layout(layout, dtype, cols, &data).expect("whole rows");
    let mut random = Random::new(cols as u64);
    let vectors = (0..7).map(|_| random.vector(cols, 3.0)).collect();
    let columns = Columns::quantize(neon, vectors);
    let product = |step: usize| {
        let mut out = vec![vec![f32::NAN; w.rows()]; columns.len()];
        for (columns, out) in columns.all().chunks(step).zip(out.chunks_mut(step)) {
            let mut out: Vec<_> = out.iter_mut().map(Vec::as_mut_slice).collect();
            neon.matmul(w, columns, &mut out);
        }
        out
    };
    let one = product(1);
    for step in [2, 3, 4, 7] {
        let name = neon.name();
        assert_eq!(product(step), one, "{name}, {dtype:?}, {cols} cols, {step}");
    }
}

fn check_bits(neon: Neon, dtype: DType, cols: usize) {
    let rows = 11;
    let plain = bench_matrix(dtype, rows, cols).expect("a length of the format");
    let mut data = plain.clone();
    let layout = Layout::Rows8.of(dtype, cols);
    if layout == Layout::Rows8 {
        let bytes = PANEL * plain.len() / rows;
        panels::pack(dtype, cols, &plain[..bytes], &mut data[..bytes]);
    }
    let mut random = Random::new(cols as u64);
    let vectors = (0..7).map(|_| random.vector(cols, 3.0)).collect();
    let columns = Columns::quantize(neon, vectors);
    for n in [1, 2, 3, 4, 7] {
        let columns = &columns.all()[..n];
        let product = |k: &dyn Fn(&mut [&mut [f32]])| {
            let mut out = vec![vec![f32::NAN; rows]; n];
            k(&mut out.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
            out.concat().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        let w = Rows::new(dtype, cols, &plain).expect("whole rows");
        let want = product(&|out| Scalar.matmul(w, columns, out));
        for (layout, data) in [(Layout::Plain, &plain), (layout, &data)] {
            let w = Rows::in_layout(layout, dtype, cols, data).expect("whole rows");
            let got = product(&|out| neon.matmul(w, columns, out));
            let what = format!("{}, {layout:?} {dtype:?}", neon.name());
            assert_eq!(got, want, "{what}, {cols} cols, {n} columns");
        }
    }
}
