//! Sums over predictions: likelihood of the next token, and distance to expected predictions.

use myq_model::sample::argmax;
use rayon::prelude::*;
use serde::Serialize;

use crate::vector::{divergence, log_sum_exp};

/// What a position adds.
#[derive(Clone, Copy, Default, Debug)]
struct One {
    /// −ln p of the token that follows.
    surprise: f64,
    /// Σ p·ln(p/q) of the expected p and the model's q, nats.
    divergence: f64,
    same_top: bool,
}

/// Predictions so far, in the order of the text.
#[derive(Clone, Default, Debug)]
pub struct Scores {
    all: Vec<One>,
    compared: bool,
}

/// Distance of a model's predictions to the source's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Distance {
    /// Mean Kullback–Leibler divergence from the source, nats, and its standard error.
    pub kl: f64,
    /// See `kl`.
    pub kl_error: f64,
    /// Median.
    pub kl_median: f64,
    /// What one position in a hundred exceeds.
    pub kl_99: f64,
    /// Share of positions whose likeliest token is the source's.
    pub top1: f64,
}

/// ln of the softmax of one row.
pub fn log_softmax(row: &[f32]) -> Vec<f32> {
    let log_sum = log_sum_exp(row);
    row.iter()
        .map(|x| (f64::from(*x) - log_sum) as f32)
        .collect()
}

impl Scores {
    /// Takes logits, rows × `vocab`, of positions followed by `next`; `expected` are the
    /// logarithms of the expected probabilities, or nothing.
    pub fn add(&mut self, logits: &[f32], vocab: usize, next: &[u32], expected: &[f32]) {
        self.compared |= !expected.is_empty();
        let ones: Vec<One> = logits
            .par_chunks_exact(vocab)
            .zip(next)
            .enumerate()
            .map(|(i, (row, &next))| {
                let log_sum = log_sum_exp(row);
                let mut one = One {
                    surprise: log_sum - f64::from(row[next as usize]),
                    ..One::default()
                };
                if let Some(expected) = expected.get(i * vocab..(i + 1) * vocab) {
                    one.divergence = divergence(expected, row, log_sum).max(0.0);
                    one.same_top = argmax(expected) == argmax(row);
                }
                one
            })
            .collect();
        self.all.extend(ones);
    }

    /// Predictions.
    pub fn tokens(&self) -> usize {
        self.all.len()
    }

    /// Perplexity and its standard error.
    pub fn perplexity(&self) -> (f64, f64) {
        let (mean, error) = mean(self.all.iter().map(|o| o.surprise));
        (mean.exp(), mean.exp() * error)
    }

    /// Distance to the expected predictions, where there were any.
    pub fn distance(&self) -> Option<Distance> {
        if !self.compared {
            return None;
        }
        let (kl, kl_error) = mean(self.all.iter().map(|o| o.divergence));
        let mut sorted: Vec<f64> = self.all.iter().map(|o| o.divergence).collect();
        sorted.sort_by(f64::total_cmp);
        let same = self.all.iter().filter(|o| o.same_top).count();
        Some(Distance {
            kl,
            kl_error,
            kl_median: sorted[sorted.len() / 2],
            kl_99: sorted[(sorted.len() * 99 / 100).min(sorted.len() - 1)],
            top1: same as f64 / self.all.len() as f64,
        })
    }
}

/// Mean and its standard error.
fn mean(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    let variance = values.map(|v| (v - mean) * (v - mean)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean, (variance / n).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_what_their_formulas_say() {
        let logits = [0.0f32, 1.0, 2.0, 2.0, 0.0, -1.0];
        let p: [f32; 6] = [0.2, 0.3, 0.5, 0.7, 0.2, 0.1];
        let expected = p.map(f32::ln);
        let mut scores = Scores::default();
        scores.add(&logits, 3, &[2, 1], &expected);
        let sums = [logits[..3].iter(), logits[3..].iter()]
            .map(|row| row.map(|x| f64::from(*x).exp()).sum::<f64>());
        let surprise = (sums[0].ln() - 2.0 + sums[1].ln()) / 2.0;
        assert!((scores.perplexity().0 - surprise.exp()).abs() < 1e-6);
        let kl: f64 = (0..6)
            .map(|i| {
                f64::from(p[i]) * (f64::from(p[i]).ln() - f64::from(logits[i]) + sums[i / 3].ln())
            })
            .sum();
        let distance = scores.distance().expect("expected ones were given");
        assert!((distance.kl - kl / 2.0).abs() < 1e-6);
        assert_eq!(distance.top1, 1.0);
        assert_eq!(scores.tokens(), 2);
    }

    #[test]
    fn a_model_is_at_no_distance_from_itself() {
        let logits: Vec<f32> = (0..5000).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
        let mut scores = Scores::default();
        scores.add(&logits, 5000, &[17], &log_softmax(&logits));
        let d = scores.distance().expect("given");
        assert!(d.kl < 1e-7 && d.top1 == 1.0);
        let mut alone = Scores::default();
        alone.add(&logits, 5000, &[17], &[]);
        assert_eq!(alone.distance(), None);
    }
}
