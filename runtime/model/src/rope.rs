//! Angles of the rotary position embedding, for every scaling.

use crate::config::{Config, Pairing, Scaling, yarn_temperature};
use std::f32::consts::PI;

/// Angular frequencies of one head and the factor that sine and cosine get.
#[derive(Clone, Debug)]
pub struct RopeTable {
    frequencies: Vec<f32>,
    magnitude: f32,
    pairing: Pairing,
}

impl RopeTable {
    /// From the configuration; `factors` divides the frequencies further (GGUF's
    /// `rope_freqs.weight`, `dims/2` values), where the file has it.
    pub fn new(config: &Config, factors: Option<&[f32]>) -> RopeTable {
        let rope = &config.rope;
        let half = rope.dims / 2;
        let base = |i: usize| rope.theta.powf(-2.0 * i as f32 / rope.dims as f32);
        let mut frequencies: Vec<f32> = (0..half)
            .map(|i| scaled(rope.scaling, base(i), i, rope.dims, rope.theta))
            .collect();
        if let Some(factors) = factors {
            frequencies
                .iter_mut()
                .zip(factors)
                .for_each(|(f, factor)| *f /= factor);
        }
        let magnitude = match rope.scaling {
            Scaling::Yarn {
                factor, attention, ..
            } => attention * yarn_temperature(factor),
            _ => 1.0,
        };
        RopeTable {
            frequencies,
            magnitude,
            pairing: rope.pairing,
        }
    }

    /// Writes the cosines of all pairs at `position` into the first half of `out`, the sines
    /// into the second: `dims` values.
    pub fn angles(&self, position: usize, out: &mut [f32]) {
        let (cosines, sines) = out.split_at_mut(self.frequencies.len());
        let places = cosines.iter_mut().zip(sines);
        for ((cos, sin), f) in places.zip(&self.frequencies) {
            let (s, c) = (position as f32 * f).sin_cos();
            (*cos, *sin) = (c * self.magnitude, s * self.magnitude);
        }
    }

    /// Turns one head in place by the angles that [`RopeTable::angles`] wrote.
    pub fn turn(&self, head: &mut [f32], angles: &[f32]) {
        let half = self.frequencies.len();
        let (cosines, sines) = angles.split_at(half);
        let angles = cosines.iter().zip(sines);
        // Loops that the compiler makes vectors of.
        match self.pairing {
            Pairing::Interleaved => {
                let pairs = head[..2 * half].as_chunks_mut::<2>().0.iter_mut();
                for ([x, y], (cos, sin)) in pairs.zip(angles) {
                    (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
                }
            }
            Pairing::Half => {
                let (first, second) = head.split_at_mut(half);
                for ((x, y), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                    (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
                }
            }
        }
    }

    /// The angle of each pair at position 1.
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// Values that [`RopeTable::angles`] writes.
    pub fn dims(&self) -> usize {
        2 * self.frequencies.len()
    }
}

fn scaled(scaling: Scaling, f: f32, i: usize, dims: usize, theta: f32) -> f32 {
    match scaling {
        Scaling::None => f,
        Scaling::Linear { factor } => f / factor,
        Scaling::Llama3 {
            factor,
            low,
            high,
            original,
        } => {
            let turns = original as f32 * f / (2.0 * PI);
            if turns < low {
                f / factor
            } else if turns > high {
                f
            } else {
                let keep = (turns - low) / (high - low);
                (1.0 - keep) * f / factor + keep * f
            }
        }
        Scaling::Yarn {
            factor,
            original,
            beta_fast,
            beta_slow,
            ..
        } => {
            // The pair that makes `turns` rotations over the trained context.
            let pair = |turns: f32| {
                dims as f32 * (original as f32 / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln())
            };
            let low = pair(beta_fast).floor().max(0.0);
            let high = pair(beta_slow).ceil().min(dims as f32 - 1.0);
            let stretch = ((i as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            f / factor * stretch + f * (1.0 - stretch)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(scaling: Scaling) -> Vec<f32> {
        (0..32)
            .map(|i| {
                scaled(
                    scaling,
                    500_000f32.powf(-2.0 * i as f32 / 64.0),
                    i,
                    64,
                    500_000.0,
                )
            })
            .collect()
    }

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let plain = frequencies(Scaling::None);
        let s = frequencies(Scaling::Llama3 {
            factor: 8.0,
            low: 1.0,
            high: 4.0,
            original: 8192,
        });
        assert_eq!(s[0], plain[0]);
        assert_eq!(s[31], plain[31] / 8.0);
        assert!(s.iter().zip(&plain).all(|(s, p)| s <= p && *s >= p / 8.0));
    }

    #[test]
    fn yarn_lies_between_plain_and_linear() {
        let plain = frequencies(Scaling::None);
        let s = frequencies(Scaling::Yarn {
            factor: 4.0,
            original: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention: 1.0,
        });
        assert_eq!(s[0], plain[0]);
        assert_eq!(s[31], plain[31] / 4.0);
        assert!((yarn_temperature(4.0) - 1.138_629_4).abs() < 1e-6);
    }

    #[test]
    fn both_pairings_turn_the_same_pairs() {
        let table = |pairing| RopeTable {
            frequencies: vec![1.0, 0.1],
            magnitude: 1.0,
            pairing,
        };
        let mut angles = [0.0; 4];
        table(Pairing::Half).angles(3, &mut angles);
        let (mut a, mut b) = ([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]);
        table(Pairing::Interleaved).turn(&mut a, &angles);
        table(Pairing::Half).turn(&mut b, &angles);
        assert_eq!(a, [b[0], b[2], b[1], b[3]]);
    }
}
