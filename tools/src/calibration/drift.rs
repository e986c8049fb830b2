//! Whether a series keeps its level over time: the augmented Dickey–Fuller test.
//!
//! ```text
//! Δyₜ = a + b·yₜ₋₁ + Σᵢ cᵢ·Δyₜ₋ᵢ + eₜ;  statistic = b / its standard error
//! ```
//!
//! Below the critical value (MacKinnon 2010, constant, 5 %) the series returns to its level:
//! stationary. Above, it may wander off, or follow a trend, which is what a set that changes over
//! time does. Lags up to Schwert's ⌊12·(n/100)^¼⌋, fewest by the Bayesian information criterion.

use faer::Mat;
use faer::linalg::solvers::{DenseSolveCore, Solve};
use serde::Serialize;

/// Fewest values that say anything.
pub(super) const FEWEST: usize = 20;

/// Outcome of the test on one series.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Drift {
    /// Values.
    pub n: usize,
    /// Lagged differences taken in.
    pub lags: usize,
    /// The statistic.
    pub statistic: f64,
    /// Its critical value at 5 %.
    pub critical: f64,
    /// Whether the series may drift.
    pub drifts: bool,
}

/// Tests a series in the order of time; `None` where it is shorter than [`FEWEST`].
pub(super) fn test(y: &[f64]) -> Option<Drift> {
    let n = y.len();
    if n < FEWEST {
        return None;
    }
    let critical = critical(n);
    let spread = y.iter().fold(f64::NEG_INFINITY, |m, v| m.max(*v))
        - y.iter().fold(f64::INFINITY, |m, v| m.min(*v));
    if spread == 0.0 {
        return Some(Drift {
            n,
            lags: 0,
            statistic: f64::NEG_INFINITY,
            critical,
            drifts: false,
        });
    }
    let most = (12.0 * (n as f64 / 100.0).powf(0.25)).floor() as usize;
    let most = most.min(n / 2 - 3);
    // All on the same values, so that the criterion compares like with like.
    let (lags, _) = (0..=most)
        .filter_map(|lags| Some((lags, regression(y, lags, most)?.1)))
        .min_by(|a, b| a.1.total_cmp(&b.1))?;
    let (statistic, _) = regression(y, lags, lags)?;
    Some(Drift {
        n,
        lags,
        statistic,
        critical,
        drifts: statistic > critical,
    })
}

/// MacKinnon's response surface for a constant and no trend, 5 %.
fn critical(n: usize) -> f64 {
    let n = n as f64;
    -2.86154 - 2.8903 / n - 4.234 / (n * n) - 40.04 / (n * n * n)
}

/// The statistic and the information criterion with `lags`, the first `skip` differences left out.
fn regression(y: &[f64], lags: usize, skip: usize) -> Option<(f64, f64)> {
    let difference: Vec<f64> = y.windows(2).map(|w| w[1] - w[0]).collect();
    let rows = difference.len() - skip;
    let columns = 2 + lags;
    if rows <= columns {
        return None;
    }
    let x = Mat::from_fn(rows, columns, |i, j| {
        let t = i + skip;
        match j {
            0 => y[t],
            1 => 1.0,
            _ => difference[t - (j - 1)],
        }
    });
    let d = Mat::from_fn(rows, 1, |i, _| difference[i + skip]);
    let normal = x.transpose() * &x;
    let factor = normal.full_piv_lu();
    let b = factor.solve(x.transpose() * &d);
    let left = &d - &x * &b;
    let squares: f64 = (0..rows).map(|i| left[(i, 0)] * left[(i, 0)]).sum();
    let variance = squares / (rows - columns) as f64;
    let error = (variance * factor.inverse()[(0, 0)]).sqrt();
    let statistic = b[(0, 0)] / error;
    let criterion = rows as f64 * (squares / rows as f64).max(1e-300).ln()
        + columns as f64 * (rows as f64).ln();
    statistic.is_finite().then_some((statistic, criterion))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    fn noise(seed: u64) -> Vec<f64> {
        numbers(200, seed).into_iter().map(f64::from).collect()
    }

    #[test]
    fn stationary_and_drifting_series_are_told_apart() {
        let count = |make: &dyn Fn(Vec<f64>) -> Vec<f64>| {
            let drifts = |seed| test(&make(noise(seed))).expect("long enough").drifts;
            (1..=40).filter(|seed| drifts(*seed)).count()
        };
        let level = count(&|e| e.iter().map(|e| 100.0 + e).collect());
        let returning = count(&|e| {
            let mut y = 0.0;
            e.iter()
                .map(|e| {
                    y = 0.5 * y + e;
                    y
                })
                .collect()
        });
        let walk = count(&|e| {
            let mut y = 0.0;
            e.iter()
                .map(|e| {
                    y += e;
                    y
                })
                .collect()
        });
        let trend = count(&|e| {
            e.iter()
                .enumerate()
                .map(|(i, e)| i as f64 * 0.1 + e)
                .collect()
        });
        assert_eq!((level, returning), (0, 0));
        // One in twenty walks looks stationary at 5 %.
        assert!(walk >= 34, "{walk}");
        assert!(trend >= 34, "{trend}");
    }

    #[test]
    fn short_and_constant_series_have_an_end() {
        assert_eq!(test(&[1.0; 19]), None);
        assert!(!test(&[1.0; 50]).expect("long enough").drifts);
    }

    /// Values of statsmodels 0.14's table for a constant: −2.89 at 100, −2.86 without end.
    #[test]
    fn critical_values_are_mackinnons() {
        assert!((critical(100) + 2.891).abs() < 1e-3);
        assert!((critical(1_000_000) + 2.8615).abs() < 1e-4);
    }
}
