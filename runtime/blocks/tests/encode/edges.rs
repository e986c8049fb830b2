//! Outliers, zeros, tiny weights, and what is no input.

use super::*;

#[test]
fn outliers_stay_finite() {
    for dtype in all().filter(|t| *t != DType::F32) {
        for (outlier, at) in [(1e6, 5), (-1e6, 300), (f32::MAX, 100), (f32::MIN, 575)] {
            let mut x = weights(Kind::Gauss, 576, 8);
            x[at] = outlier;
            for method in METHODS {
                let (row, report) = encode(dtype, method, &x, None);
                let mut y = vec![0.0; x.len()];
                dequantize_row(dtype, &row, &mut y);
                assert!(
                    y.iter().all(|y| y.is_finite()),
                    "{dtype:?} {method:?} {outlier}"
                );
                assert!(
                    y[at].signum() == outlier.signum() && y[at].abs() > 1e4,
                    "{dtype:?} {method:?} {outlier}: {}",
                    y[at]
                );
                let beyond = outlier.abs() > 1e9 && dtype != DType::BF16;
                assert!(
                    report.clipped == 1 || !beyond,
                    "{dtype:?} {method:?} {outlier}"
                );
                if matches!(dtype, DType::F16 | DType::Q4_0 | DType::Tq1_0) {
                    assert_eq!(report.clipped, 1, "{dtype:?}");
                }
            }
        }
        let (_, report) = encode(
            dtype,
            Method::Search,
            &weights(Kind::HeavyTail, 576, 8),
            None,
        );
        assert_eq!(report, RowReport::default(), "{dtype:?}");
    }
}

#[test]
fn bad_input_is_an_error_with_its_place() {
    let mut x = weights(Kind::Gauss, 2 * 256, 4);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        x[300] = bad;
        for dtype in all() {
            let mut out = vec![0; 2 * dtype.row_bytes(256).unwrap()];
            let got = encode_rows(dtype, Method::Search, 256, &x, None, &mut out).unwrap_err();
            assert!(
                matches!(got, EncodeError::NonFinite { index: 300, .. }),
                "{dtype:?}: {got}"
            );
        }
    }
    x[300] = 0.0;
    let mut out = vec![0; 168];
    let columns = encode_row(DType::Q2K, Method::Round, &x[..100], None, &mut out).unwrap_err();
    assert_eq!(
        columns,
        EncodeError::Columns {
            dtype: DType::Q2K,
            cols: 100
        }
    );
    assert!(columns.to_string().contains("Q2_K") && columns.to_string().contains("100"));
    let short = encode_row(DType::Q2K, Method::Round, &x, None, &mut out[..167]).unwrap_err();
    assert_eq!(
        short,
        EncodeError::Length {
            what: "the output row",
            got: 167,
            want: 168
        }
    );
    let few = encode_row(DType::Q2K, Method::Search, &x, Some(&x[..511]), &mut out).unwrap_err();
    assert_eq!(
        few,
        EncodeError::Length {
            what: "the importance",
            got: 511,
            want: 512
        }
    );
    assert!(encode_rows(DType::Q2K, Method::Round, 0, &x, None, &mut out).is_err());
    assert!(encode_rows(DType::Q2K, Method::Round, 384, &x, None, &mut out).is_err());
    assert!(fit_block(DType::F16, Method::Round, &x[..32], None).is_err());
    assert!(fit_block(DType::Q4_0, Method::Round, &x[..64], None).is_err());
}

/// A calibration set that leaves columns unused gives no NaN scales.
#[test]
fn unusable_importance_is_floored() {
    let x = weights(Kind::Laplace, 576, 6);
    for dtype in quantised() {
        let uniform = encode(dtype, Method::Search, &x, Some(&[1.0; 576]));
        for useless in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let got = encode(dtype, Method::Search, &x, Some(&[useless; 576]));
            assert_eq!(got.0, uniform.0, "{dtype:?} {useless}");
            assert_eq!(got.1.floored, 576);
        }
        for w in [
            [0.0, 1e-30],
            [f32::NAN, 1e30],
            [-5.0, f32::MIN_POSITIVE],
            [0.0, f32::MAX],
        ] {
            let w: Vec<f32> = (0..576).map(|i| w[usize::from(i % 3 == 0)]).collect();
            let (row, report) = encode(dtype, Method::Search, &x, Some(&w));
            assert_eq!(report.floored, 384, "{dtype:?}");
            let mut y = vec![0.0; 576];
            dequantize_row(dtype, &row, &mut y);
            assert!(relative_rms(&x, &y) < 1.0, "{dtype:?} {w:?}");
        }
    }
}

#[test]
fn rows_of_zeros_and_of_vanishing_weights() {
    for dtype in all() {
        for method in METHODS {
            let zeros = through(dtype, method, &[0.0; 576], None);
            assert!(zeros.iter().all(|y| *y == 0.0), "{dtype:?} {method:?}");
            for tiny in [1e-45, 1e-38, 1e-20, 1e-9] {
                let x: Vec<f32> = weights(Kind::Gauss, 576, 2)
                    .iter()
                    .map(|v| v * 50.0 * tiny)
                    .collect();
                let y = through(dtype, method, &x, None);
                assert!(
                    y.iter().all(|y| y.abs() <= 1e-7),
                    "{dtype:?} {method:?} {tiny}"
                );
            }
            // One value throughout, of either sign.
            for value in [0.5, -0.5] {
                let y = through(dtype, method, &[value; 576], None);
                assert!(
                    y.iter().all(|y| (y - value).abs() < 0.02),
                    "{dtype:?} {method:?} {value}: {}",
                    y[0]
                );
            }
        }
    }
}

/// Weights of 1e-5 need super-scales among fp16's subnormal numbers.
#[test]
fn small_weights_keep_their_precision() {
    let x = weights(Kind::Gauss, 576, 12);
    let small: Vec<f32> = x.iter().map(|v| v * 1e-5 / 0.02).collect();
    for dtype in quantised() {
        for method in METHODS {
            let (usual, got) = (
                relative_rms(&x, &through(dtype, method, &x, None)),
                relative_rms(&small, &through(dtype, method, &small, None)),
            );
            assert!(
                got < 1.5 * usual + 0.02,
                "{dtype:?} {method:?}: {got}, usually {usual}"
            );
        }
    }
}
