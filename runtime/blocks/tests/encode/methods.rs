//! The order of the methods, importance, zero points.

use super::*;

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
