//! The quantisers: error bounds, order of the methods, partial superblocks, bad input.

use myq_blocks::decode::{dequantize_row, for_each_block};
use myq_blocks::dtype::{DType, TABLE};
use myq_blocks::encode::{
    EncodeError, Method, RowReport, code_range, encode_row, encode_rows, fit_block, store_block,
};
use myq_blocks::{Linear, f16, tail};

const METHODS: [Method; 2] = [Method::Round, Method::Search];

/// Random numbers that are the same everywhere.
struct Random(u64);

impl Random {
    /// In (0, 1).
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    fn gauss(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    fn laplace(&mut self) -> f64 {
        let u = self.unit() - 0.5;
        -u.signum() * (1.0 - 2.0 * u.abs()).ln()
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Gauss,
    Laplace,
    HeavyTail,
}

const KINDS: [Kind; 3] = [Kind::Gauss, Kind::Laplace, Kind::HeavyTail];

fn weights(kind: Kind, n: usize, seed: u64) -> Vec<f32> {
    let mut r = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut one = || match kind {
        Kind::Gauss => r.gauss(),
        Kind::Laplace => r.laplace(),
        Kind::HeavyTail => r.gauss() * (0.7 * r.gauss()).exp(),
    };
    (0..n).map(|_| (0.02 * one()) as f32).collect()
}

/// All formats, float ones too.
fn all() -> impl Iterator<Item = DType> {
    TABLE
        .iter()
        .map(|f| f.dtype)
        .chain(Linear::all().map(DType::Linear))
}

/// All formats with scales.
fn quantised() -> impl Iterator<Item = DType> {
    all().filter(|t| t.block_len() > 1)
}

fn encode(
    dtype: DType,
    method: Method,
    x: &[f32],
    importance: Option<&[f32]>,
) -> (Vec<u8>, RowReport) {
    let mut row = vec![0xAA; dtype.row_bytes(x.len()).unwrap()];
    let report = encode_row(dtype, method, x, importance, &mut row).unwrap();
    (row, report)
}

fn through(dtype: DType, method: Method, x: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len()];
    dequantize_row(dtype, &encode(dtype, method, x, importance).0, &mut y);
    y
}

fn squares(x: &[f32], y: &[f32], w: &[f32]) -> f64 {
    x.iter()
        .zip(y)
        .zip(w)
        .map(|((x, y), w)| f64::from(*w) * f64::from(x - y).powi(2))
        .sum()
}

fn relative_rms(x: &[f32], y: &[f32]) -> f64 {
    let ones = vec![1.0; x.len()];
    (squares(x, y, &ones) / squares(x, &vec![0.0; x.len()], &ones)).sqrt()
}

/// The values that each 16 (linear: each group) of a row can take: (step, all values).
fn levels(dtype: DType, row: &[u8], cols: usize) -> Vec<(f32, Vec<f32>)> {
    let mut out = Vec::new();
    if let DType::Linear(l) = dtype {
        let (_, scales, zeros) = l.split(row, cols);
        for g in 0..cols.div_ceil(l.group()) {
            let (scale, zero) = l.scale_zero(scales, zeros, g);
            out.push((
                scale.abs(),
                (0..1 << l.bits())
                    .map(|q| scale * (q - zero) as f32)
                    .collect(),
            ));
        }
        return out;
    }
    let (lo, hi) = code_range(dtype).unwrap();
    for_each_block(dtype, row, cols, |_, b| {
        for j in 0..b.len / 16 {
            let (step, min) = (b.d * f32::from(b.scale[j]), b.dmin * f32::from(b.min[j]));
            let is_level =
                |q: &i8| dtype != DType::Iq4Nl || myq_blocks::layout::IQ4NL_LEVELS.contains(q);
            out.push((
                step.abs(),
                (lo..=hi)
                    .filter(is_level)
                    .map(|q| step * f32::from(q) - min)
                    .collect(),
            ));
        }
    });
    out
}

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

/// The weights of the error when none are given, as the module documents them.
fn default_importance(x: &[f32], block: usize) -> Vec<f32> {
    let mean = |c: &[f32]| c.iter().map(|v| v * v).sum::<f32>() / c.len() as f32;
    x.chunks(block)
        .flat_map(|c| {
            let square = mean(c);
            c.iter().map(move |v| v * v + 8.0 * square)
        })
        .collect()
}

#[test]
fn search_is_never_worse_than_rounding_and_better_on_average() {
    for dtype in quantised() {
        let (mut round, mut search) = (0.0, 0.0);
        for kind in KINDS {
            for seed in 0..8 {
                let x = weights(kind, [256, 576, 640, 896][seed % 4], seed as u64 + 100);
                let mut r = Random(seed as u64 + 1);
                let given: Vec<f32> = (0..x.len())
                    .map(|_| (0.1 + 4.0 * r.unit().powi(3)) as f32)
                    .collect();
                let standing_in = default_importance(&x, dtype.block_len());
                for (importance, w) in [(None, &standing_in), (Some(&given[..]), &given)] {
                    let error = |m| squares(&x, &through(dtype, m, &x, importance), w);
                    let (a, b) = (error(Method::Round), error(Method::Search));
                    assert!(
                        b <= a * (1.0 + 1e-6),
                        "{dtype:?} {kind:?} {seed}: {b} above {a}"
                    );
                    let size = squares(&x, &vec![0.0; x.len()], w);
                    round += a / size;
                    search += b / size;
                }
            }
        }
        let few_bits = matches!(dtype, DType::Q2K | DType::Q3K)
            || matches!(dtype, DType::Linear(l) if l.bits() < 4);
        let factor = if few_bits { 0.95 } else { 0.99 };
        assert!(search < factor * round, "{dtype:?}: {search} of {round}");
    }
}

/// An unimportant half is what a search gives up first.
#[test]
fn importance_moves_the_error() {
    for dtype in quantised().filter(|t| *t != DType::Q8_0) {
        let x = weights(Kind::Gauss, 1024, 9);
        let w: Vec<f32> = (0..1024)
            .map(|i| if i % 2 == 0 { 1.0 } else { 0.02 })
            .collect();
        let even = |y: &[f32]| {
            x.iter()
                .zip(y)
                .step_by(2)
                .map(|(a, b)| f64::from(a - b).powi(2))
                .sum::<f64>()
        };
        let ones = vec![1.0; 1024];
        let (with, without) = (
            through(dtype, Method::Search, &x, Some(&w)),
            through(dtype, Method::Search, &x, Some(&ones)),
        );
        // One scale for many weights of few bits leaves little to move.
        let factor = if dtype.block_len() == 32
            || matches!(code_range(dtype), Some((lo, hi)) if hi - lo > 2)
        {
            0.97
        } else {
            1.0
        };
        assert!(
            even(&with) < factor * even(&without),
            "{dtype:?} {} {}",
            even(&with),
            even(&without)
        );
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
fn zero_points_pay_on_skewed_laplace_weights_at_two_and_three_bits() {
    // A tail twice as long above zero as below.
    let x: Vec<f32> = weights(Kind::Laplace, 1 << 16, 11)
        .iter()
        .map(|v| if *v > 0.0 { 2.0 * v } else { *v })
        .collect();
    let ones = vec![1.0; x.len()];
    for bits in [2, 3] {
        for group in [32, 64, 128] {
            for method in METHODS {
                let error = |zero| {
                    let dtype = DType::Linear(Linear::new(bits, group, zero).unwrap());
                    relative_rms(&x, &through(dtype, method, &x, Some(&ones)))
                };
                let (symmetric, asymmetric) = (error(false), error(true));
                println!(
                    "{bits} bits, group {group}, {method:?}: {:.1} % lower",
                    100.0 * (1.0 - asymmetric / symmetric)
                );
                assert!(
                    asymmetric < symmetric,
                    "{bits} bits, group {group}, {method:?}: {asymmetric} {symmetric}"
                );
            }
        }
    }
}
