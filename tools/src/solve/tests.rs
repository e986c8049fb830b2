//! The solver against plain definitions, and on matrices that are hard for it.

use super::*;
use crate::linalg::add_cross;
use crate::testing::numbers;

/// Inputs of `n` values of very different size that follow each other, as those of a model.
fn inputs(n: usize, tokens: usize) -> Vec<f32> {
    let mut x = numbers(tokens * n, 7);
    for row in x.chunks_exact_mut(n) {
        for i in 1..n {
            row[i] = 0.6 * row[i - 1] + row[i] * (0.2 + (i * 37 % 11) as f32 * 0.2);
        }
    }
    x
}

fn moments(n: usize, tokens: usize) -> Vec<f32> {
    let x = inputs(n, tokens);
    let mut h = vec![0.0; n * n];
    add_cross(&x, &x, n, &mut h);
    h
}

const SEARCH: Effort = Effort {
    scales: Method::Search,
    compensate: false,
    sweeps: 0,
};
const GPTQ: Effort = Effort {
    compensate: true,
    ..SEARCH
};
const BEST: Effort = Effort { sweeps: 3, ..GPTQ };

fn solved(dtype: DType, effort: Effort, h: &[f32], n: usize, w: &[f32]) -> Solution {
    let mut h = h.to_vec();
    let factor = Factor::new(&mut h, n, 0.01, Order::Activation).expect("positive");
    let curvature = Curvature {
        n,
        h: &h,
        factor: &factor,
        pull: None,
    };
    solve(dtype, effort, &curvature, w, &|_| {}).expect("finite")
}

/// Rows as fp32.
fn values(dtype: DType, n: usize, bytes: &[u8]) -> Vec<f32> {
    let rows = myq_blocks::Rows::new(dtype, n, bytes).expect("whole rows");
    let count = bytes.len() / dtype.row_bytes(n).expect("a length of the format");
    let mut out = vec![0.0; count * n];
    for (r, out) in out.chunks_exact_mut(n).enumerate() {
        rows.dequantize(r, out);
    }
    out
}

/// Σ (w − ŵ)ᵀH(w − ŵ) in double precision.
fn loss(h: &[f32], n: usize, w: &[f32], stored: &[f32]) -> f64 {
    let rows = w.chunks_exact(n).zip(stored.chunks_exact(n));
    rows.map(|(w, s)| {
        let e: Vec<f64> = w.iter().zip(s).map(|(w, s)| f64::from(w - s)).collect();
        (0..n)
            .map(|i| e[i] * (0..n).map(|j| f64::from(h[i * n + j]) * e[j]).sum::<f64>())
            .sum::<f64>()
    })
    .sum()
}

#[test]
fn the_factor_solves_what_it_was_made_of() {
    let n = 96;
    let mut h = moments(n, 400);
    let factor = Factor::new(&mut h, n, 0.01, Order::Activation).expect("positive");
    let want = numbers(3 * n, 9);
    let mut x = vec![0.0; 3 * n];
    multiply(matrix_mut(&mut x, n), matrix(&want, n), matrix(&h, n));
    let mut in_order: Vec<f32> = x
        .chunks_exact(n)
        .flat_map(|row| factor.order.iter().map(|&c| row[c]))
        .collect();
    factor.solve(&mut in_order);
    for (row, want) in in_order.chunks_exact(n).zip(want.chunks_exact(n)) {
        for (got, &column) in row.iter().zip(&factor.order) {
            assert!((got - want[column]).abs() < 1e-3);
        }
    }
}

/// Optimal brain quantisation by its definition: after each column the whole inverse is updated
/// and the other columns move. Three blocks of columns, so that errors cross their borders.
#[test]
fn compensation_is_the_plain_column_by_column_method() {
    let (n, dtype) = (320, DType::Q4K);
    let mut h = moments(n, 900);
    let w = numbers(2 * n, 11);
    let factor = Factor::new(&mut h, n, 0.01, Order::Activation).expect("positive");
    assert!(!factor.order.is_sorted());
    let curvature = Curvature {
        n,
        h: &h,
        factor: &factor,
        pull: None,
    };
    let grid = Grid::of(dtype).expect("a block format");
    let mut chunk = Chunk::fit(dtype, grid, GPTQ, &curvature, &w).expect("finite");
    let steps: Vec<Decoded> = chunk.blocks.clone();
    order::compensate(&mut chunk, &curvature);
    let mut inverse = inverse(&h, n);
    let mut wanted: Vec<f64> = w.iter().map(|x| f64::from(*x)).collect();
    let mut differing = 0;
    for &k in &factor.order {
        let pivot = inverse[k * n + k];
        for r in 0..2 {
            let block = &steps[r * chunk.per_row + k / 256];
            let at = k % 256;
            let step = f64::from(block.d * f32::from(block.scale[at / 16]));
            let low = f64::from(block.dmin * f32::from(block.min[at / 16]));
            let real = (wanted[r * n + k] + low) / step;
            let code = real.round_ties_even().clamp(0.0, 15.0);
            let got = chunk.blocks[r * chunk.per_row + k / 256].q[at];
            if f64::from(got) != code {
                // Both are right where single precision cannot tell the sides of a half apart;
                // from there on the two rows go different ways.
                assert!(
                    (real - real.floor() - 0.5).abs() < 1e-3,
                    "{k}: {real} {got}"
                );
                differing += 1;
            }
            let code = f64::from(got);
            let error = (wanted[r * n + k] - (step * code - low)) / pivot;
            for j in 0..n {
                wanted[r * n + j] -= error * inverse[k * n + j];
            }
        }
        let row: Vec<f64> = inverse[k * n..][..n].to_vec();
        for i in 0..n {
            let share = inverse[i * n + k] / pivot;
            for j in 0..n {
                inverse[i * n + j] -= share * row[j];
            }
        }
        // Done: it moves no more.
        for j in 0..n {
            inverse[k * n + j] = 0.0;
            inverse[j * n + k] = 0.0;
        }
        inverse[k * n + k] = 1.0;
    }
    assert!(differing <= 4, "{differing}");
}

fn inverse(h: &[f32], n: usize) -> Vec<f64> {
    let mut a: Vec<f64> = h.iter().map(|x| f64::from(*x)).collect();
    let mut out = vec![0.0; n * n];
    (0..n).for_each(|i| out[i * n + i] = 1.0);
    for k in 0..n {
        let pivot = a[k * n + k];
        for j in 0..n {
            a[k * n + j] /= pivot;
            out[k * n + j] /= pivot;
        }
        for i in (0..n).filter(|i| *i != k) {
            let share = a[i * n + k];
            for j in 0..n {
                a[i * n + j] -= share * a[k * n + j];
                out[i * n + j] -= share * out[k * n + j];
            }
        }
    }
    out
}

#[test]
fn each_step_of_effort_lowers_the_error_at_every_width() {
    let (n, rows) = (576, 70);
    let h = moments(n, 2000);
    let w = numbers(rows * n, 13);
    for dtype in [DType::Q2K, DType::Q3K, DType::Q4K, DType::Q5K, DType::Q6K] {
        let round = Effort {
            scales: Method::Round,
            ..SEARCH
        };
        let losses: Vec<f64> = [round, SEARCH, GPTQ, BEST]
            .iter()
            .map(|effort| {
                let s = solved(dtype, *effort, &h, n, &w);
                s.loss.iter().sum()
            })
            .collect();
        for pair in losses.windows(2) {
            assert!(pair[1] < 0.97 * pair[0], "{} {losses:?}", dtype.name());
        }
        assert!(losses[3] < 0.6 * losses[1], "{} {losses:?}", dtype.name());
    }
}

#[test]
fn the_reported_error_is_that_of_the_stored_rows() {
    let (n, rows) = (288, 66);
    let mut h = moments(n, 700);
    let w = numbers(rows * n, 17);
    let factor = Factor::new(&mut h, n, 0.01, Order::Stored).expect("positive");
    let curvature = Curvature {
        n,
        h: &h,
        factor: &factor,
        pull: None,
    };
    for dtype in [
        DType::Q2K,
        DType::Q3K,
        DType::Q6K,
        DType::Q8_0,
        DType::Q4_1,
        DType::Tq2_0,
    ] {
        let s = solve(dtype, BEST, &curvature, &w, &|_| {}).expect("finite");
        let stored = values(dtype, n, &s.bytes);
        let want = loss(&h, n, &w, &stored);
        let got: f64 = s.loss.iter().sum();
        assert!(
            (got / want - 1.0).abs() < 1e-3,
            "{} {got} {want}",
            dtype.name()
        );
        assert_eq!(s.loss.len(), rows);
    }
}

#[test]
fn the_result_does_not_depend_on_threads() {
    let (n, rows) = (320, 200);
    let h = moments(n, 500);
    let w = numbers(rows * n, 19);
    let mut all = Vec::new();
    for threads in [1, 2, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let s = pool
            .expect("threads")
            .install(|| solved(DType::Q3K, BEST, &h, n, &w));
        all.push((s.bytes, s.loss));
    }
    assert!(all[0] == all[1] && all[0] == all[2]);
}

/// Case 7: no silent rounding where there are fewer samples than columns.
#[test]
fn fewer_samples_than_columns_are_compensated_all_the_same() {
    let (n, rows) = (512, 32);
    for tokens in [1, 20, 200] {
        let h = moments(n, tokens);
        let w = numbers(rows * n, 23);
        let search = solved(DType::Q3K, SEARCH, &h, n, &w);
        let gptq = solved(DType::Q3K, GPTQ, &h, n, &w);
        assert_ne!(search.bytes, gptq.bytes);
        let (a, b): (f64, f64) = (search.loss.iter().sum(), gptq.loss.iter().sum());
        assert!(b < 0.8 * a, "{tokens}: {a} {b}");
    }
}

#[test]
fn damping_rises_until_the_factor_exists_and_is_told() {
    let n = 64;
    // Symmetric, with a negative eigenvalue of a twentieth of the mean.
    let mut h = vec![0.0; n * n];
    for i in 0..n {
        h[i * n + i] = 1.0;
    }
    h[1] = 1.05;
    h[n] = 1.05;
    let factor = Factor::new(&mut h, n, 0.01, Order::Stored).expect("damped");
    assert!((factor.damping - 0.1).abs() < 1e-6);
    assert!((h[0] - 1.1).abs() < 1e-6);
    let mut zeros = vec![0.0; n * n];
    assert!(Factor::new(&mut zeros, n, 0.01, Order::Stored).is_none());
    let mut broken = vec![f32::NAN; n * n];
    assert!(Factor::new(&mut broken, n, 0.01, Order::Stored).is_none());
}

/// Case 5: columns that no input reaches.
#[test]
fn dead_columns_keep_their_weights_near_and_finite() {
    let (n, rows) = (256, 16);
    let mut x = inputs(n, 600);
    for row in x.chunks_exact_mut(n) {
        row[3..40].fill(0.0);
    }
    let mut h = vec![0.0; n * n];
    add_cross(&x, &x, n, &mut h);
    let mut damped = h.clone();
    let factor = Factor::new(&mut damped, n, 0.01, Order::Activation).expect("positive");
    assert_eq!(factor.dead, 37);
    let w = numbers(rows * n, 29);
    for effort in [SEARCH, GPTQ, BEST] {
        let s = solved(DType::Q4K, effort, &h, n, &w);
        let stored = values(DType::Q4K, n, &s.bytes);
        for (row, w) in stored.chunks_exact(n).zip(w.chunks_exact(n)) {
            for i in 0..n {
                assert!((row[i] - w[i]).abs() < 0.5, "{i}: {} {}", row[i], w[i]);
            }
        }
    }
}

#[test]
fn one_huge_weight_gives_a_finite_row_and_leaves_other_blocks_alone() {
    let n = 512;
    let h = moments(n, 1500);
    let mut w = numbers(4 * n, 31);
    w[100] = 1e6;
    for dtype in [DType::Q2K, DType::Q3K, DType::Q4K, DType::Q5K, DType::Q6K] {
        let s = solved(dtype, BEST, &h, n, &w);
        let stored = values(dtype, n, &s.bytes);
        assert!(stored.iter().all(|x| x.is_finite()));
        let far = stored[n..].iter().zip(&w[n..]).map(|(a, b)| (a - b).abs());
        assert!(far.fold(0.0, f32::max) < 3.0, "{}", dtype.name());
    }
    w[7] = f32::NAN;
    let mut damped = h.clone();
    let factor = Factor::new(&mut damped, n, 0.01, Order::Stored).expect("positive");
    let curvature = Curvature {
        n,
        h: &damped,
        factor: &factor,
        pull: None,
    };
    let outcome = solve(DType::Q3K, BEST, &curvature, &w, &|_| {});
    assert!(matches!(outcome, Err(EncodeError::NonFinite { .. })));
}
