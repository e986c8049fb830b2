//! How far a weight may be from what it becomes, at every width and length.

use super::*;

/// Every weight gets the nearest value of its group, so the error is at most half a step
/// wherever the range is covered.
#[test]
fn errors_stay_below_half_a_step_at_every_length() {
    for dtype in quantised() {
        let group = if let DType::Linear(l) = dtype {
            l.group()
        } else {
            16
        };
        for cols in (32..=1536).step_by(32) {
            let x = weights(KINDS[cols / 32 % 3], cols, cols as u64);
            for method in METHODS {
                let (row, _) = encode(dtype, method, &x, None);
                let mut y = vec![0.0; cols];
                dequantize_row(dtype, &row, &mut y);
                let levels = levels(dtype, &row, cols);
                for (i, (x, y)) in x.iter().zip(&y).enumerate() {
                    let (step, values) = &levels[i / group];
                    let error = (x - y).abs();
                    // Rounding of x/step and of the products, in units of the largest value.
                    let slack = 4e-7 * values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    let nearest = values
                        .iter()
                        .map(|v| (x - v).abs())
                        .fold(f32::INFINITY, f32::min);
                    assert!(
                        error <= nearest + slack,
                        "{dtype:?} {method:?} {cols} weight {i}: {x} became {y}"
                    );
                    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
                    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    if dtype != DType::Iq4Nl && (low..=high).contains(x) {
                        assert!(
                            error <= 0.5 * step + slack,
                            "{dtype:?} {method:?} {cols} weight {i}: {x} became {y}"
                        );
                    }
                }
            }
        }
    }
}

/// By rounding, formats whose scales take the whole range leave no weight outside it by more
/// than the step that their codes lack on one side.
#[test]
fn rounding_covers_the_range() {
    for dtype in [
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
    ] {
        let x = weights(Kind::HeavyTail, 4096, 5);
        let (row, _) = encode(dtype, Method::Round, &x, None);
        let y = through(dtype, Method::Round, &x, None);
        let levels = levels(dtype, &row, x.len());
        for (i, (x, y)) in x.iter().zip(&y).enumerate() {
            // Scales and minima are rounded to 11 bits, and codes multiply that error.
            let bound = if matches!(dtype, DType::Q4_0 | DType::Q5_0) {
                1.01
            } else {
                0.57
            };
            assert!(
                (x - y).abs() <= bound * levels[i / 16].0 + 1e-3 * x.abs(),
                "{dtype:?} weight {i}: {x} became {y}"
            );
        }
    }
}

#[test]
fn error_falls_with_width() {
    let mut families = vec![vec![
        DType::Q2K,
        DType::Q3K,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::Q8_0,
        DType::F16,
        DType::F32,
    ]];
    for group in [32, 64, 128] {
        for zero in [false, true] {
            families.push(
                [2, 3, 5, 6]
                    .map(|b| DType::Linear(Linear::new(b, group, zero).unwrap()))
                    .to_vec(),
            );
        }
    }
    for family in families {
        for cols in [64, 96, 256, 576, 640, 896, 1536] {
            for kind in KINDS {
                let x = weights(kind, cols, 77);
                for method in METHODS {
                    let errors: Vec<f64> = family
                        .iter()
                        .map(|&t| relative_rms(&x, &through(t, method, &x, None)))
                        .collect();
                    assert!(
                        errors.is_sorted_by(|a, b| a > b),
                        "{family:?} {method:?} {cols} {kind:?}: {errors:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn partial_superblocks_are_as_good_as_whole_ones() {
    for dtype in all().filter(|t| t.is_super()) {
        for rest in (32..256).step_by(32) {
            for method in METHODS {
                let (mut whole, mut part) = (0.0, 0.0);
                for seed in 0..24 {
                    let x = weights(Kind::Gauss, 256 + rest, seed + 1);
                    let y = through(dtype, method, &x, None);
                    let ones = vec![1.0; 256];
                    whole += squares(&x[..256], &y[..256], &ones) / 256.0;
                    part += squares(&x[256..], &y[256..], &ones) / rest as f64;
                }
                assert!(
                    part < 1.15 * whole,
                    "{dtype:?} {rest} {method:?}: {part} against {whole}"
                );
            }
        }
    }
}

#[test]
fn a_partial_superblock_is_the_start_of_a_padded_one() {
    for dtype in all().filter(|t| t.is_super()) {
        for rest in (32..256).step_by(32) {
            let x = weights(Kind::Laplace, rest, rest as u64);
            let mut padded = x.clone();
            padded.resize(256, 0.0);
            // Zeros change no range. The search shares its fit with `fit_block` instead.
            let (whole, _) = encode(dtype, Method::Round, &padded, None);
            let mut part = vec![0; tail::bytes(dtype, rest).unwrap()];
            tail::compact(dtype, &whole, rest, &mut part);
            assert_eq!(
                part,
                encode(dtype, Method::Round, &x, None).0,
                "{dtype:?} {rest}"
            );

            let (fitted, _) = fit_block(dtype, Method::Search, &x, None).unwrap();
            let mut whole = vec![0; whole.len()];
            store_block(dtype, &fitted, &mut whole);
            tail::compact(dtype, &whole, rest, &mut part);
            assert_eq!(
                part,
                encode(dtype, Method::Search, &x, None).0,
                "{dtype:?} {rest}"
            );
        }
    }
}

#[test]
fn float_formats_round_to_nearest() {
    let x = weights(Kind::HeavyTail, 512, 1);
    assert_eq!(through(DType::F32, Method::Search, &x, None), x);
    for (dtype, epsilon) in [(DType::F16, 2f32.powi(-11)), (DType::BF16, 2f32.powi(-8))] {
        for (x, y) in x.iter().zip(through(dtype, Method::Round, &x, None)) {
            assert!(
                (x - y).abs() <= epsilon * x.abs() + 3e-8,
                "{dtype:?} {x} {y}"
            );
        }
    }
}

#[test]
fn ternary_sources_are_kept_as_they_are() {
    let mut r = Random(5);
    let d = f16::from_f32(0.0371).to_f32();
    let x: Vec<f32> = (0..576)
        .map(|_| d * (3.0 * r.unit()).floor() as f32 - d)
        .collect();
    for dtype in [DType::Tq1_0, DType::Tq2_0] {
        for method in METHODS {
            assert_eq!(through(dtype, method, &x, None), x, "{dtype:?} {method:?}");
        }
    }
}

#[test]
fn rows_are_independent_and_runs_equal() {
    let (rows, cols) = (5, 576);
    let x = weights(Kind::HeavyTail, rows * cols, 3);
    for dtype in all() {
        for method in METHODS {
            let bytes = dtype.row_bytes(cols).unwrap();
            let mut together = vec![1; rows * bytes];
            encode_rows(dtype, method, cols, &x, None, &mut together).unwrap();
            let apart: Vec<u8> = x
                .chunks(cols)
                .flat_map(|x| encode(dtype, method, x, None).0)
                .collect();
            assert_eq!(together, apart, "{dtype:?} {method:?}");
        }
    }
}
