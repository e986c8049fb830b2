//! Choosing the next token: greedy, or by temperature, top-k, top-p, min-p and penalties.

/// Settings of a [`Sampler`]; the default is greedy without penalties.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f32,
    /// Keep the k likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the likeliest tokens that together reach this probability; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens (arXiv 1909.05858);
    /// 1 is none.
    pub repeat_penalty: f32,
    /// Taken from the logit of every recent token.
    pub presence_penalty: f32,
    /// Taken from the logit for each time the token came recently.
    pub frequency_penalty: f32,
    /// How many of the last tokens are recent.
    pub penalty_window: usize,
    /// Seed; the same seed gives the same choices.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: 64,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Names the first setting that makes no sense.
    pub fn check(&self) -> Result<(), String> {
        let wrong = |name: &str, value: f32, range: &str| {
            Err(format!("{name} is {value}; it must be {range}"))
        };
        if !(0.0..=100.0).contains(&self.temperature) {
            return wrong("temperature", self.temperature, "between 0 and 100");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top-p", self.top_p, "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return wrong("min-p", self.min_p, "between 0 and 1");
        }
        if !(0.01..=100.0).contains(&self.repeat_penalty) {
            return wrong(
                "repeat-penalty",
                self.repeat_penalty,
                "between 0.01 and 100",
            );
        }
        if self.penalty_window > 65_535 {
            return wrong(
                "penalty-window",
                self.penalty_window as f32,
                "at most 65535",
            );
        }
        for (name, value) in [
            ("presence-penalty", self.presence_penalty),
            ("frequency-penalty", self.frequency_penalty),
        ] {
            if !(-100.0..=100.0).contains(&value) {
                return wrong(name, value, "between -100 and 100");
            }
        }
        Ok(())
    }
}

/// Draws tokens; all its memory is taken at the start.
#[derive(Debug)]
pub struct Sampler {
    settings: Sampling,
    random: fastrand::Rng,
    candidates: Vec<(f32, u32)>,
    /// Ring of the last tokens.
    recent: Vec<u32>,
    next: usize,
    /// How often each token is in the ring.
    counts: Vec<u16>,
}

impl Sampler {
    /// For a vocabulary of `vocab` tokens.
    pub fn new(settings: Sampling, vocab: usize) -> Sampler {
        Sampler {
            settings,
            random: fastrand::Rng::with_seed(settings.seed),
            candidates: Vec::with_capacity(vocab),
            recent: Vec::with_capacity(settings.penalty_window),
            next: 0,
            counts: vec![0; vocab],
        }
    }

    /// Tells the sampler of a token of the prompt or of its own choice.
    pub fn accept(&mut self, token: u32) {
        let window = self.settings.penalty_window;
        if window == 0 || token as usize >= self.counts.len() {
            return;
        }
        if self.recent.len() < window {
            self.recent.push(token);
        } else {
            let old = std::mem::replace(&mut self.recent[self.next], token);
            self.counts[old as usize] -= 1;
            self.next = (self.next + 1) % window;
        }
        self.counts[token as usize] += 1;
    }

    /// The next token; `None` where no logit is finite, the sign of a broken model. Logits
    /// that are not finite are never chosen.
    pub fn sample(&mut self, logits: &[f32]) -> Option<u32> {
        let s = self.settings;
        if s.temperature == 0.0 && !self.penalties() {
            let best = argmax(logits);
            return logits
                .get(best as usize)
                .filter(|l| l.is_finite())
                .map(|_| best);
        }
        self.collect(logits);
        if self.candidates.is_empty() {
            return None;
        }
        if s.temperature == 0.0 {
            let best = self
                .candidates
                .iter()
                .copied()
                .reduce(|a, b| if b.0 > a.0 { b } else { a });
            return best.map(|c| c.1);
        }
        self.keep_top_k();
        self.make_probabilities();
        self.keep_top_p();
        Some(self.draw())
    }

    fn penalties(&self) -> bool {
        let s = &self.settings;
        s.repeat_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0
    }

    fn collect(&mut self, logits: &[f32]) {
        let (s, counts) = (self.settings, &self.counts);
        self.candidates.clear();
        self.candidates.extend(
            logits
                .iter()
                .zip(counts)
                .zip(0..)
                .filter(|((l, _), _)| l.is_finite())
                .map(|((&logit, &count), id)| {
                    if count == 0 {
                        return (logit, id);
                    }
                    let scaled = if logit > 0.0 {
                        logit / s.repeat_penalty
                    } else {
                        logit * s.repeat_penalty
                    };
                    (
                        scaled - s.presence_penalty - s.frequency_penalty * f32::from(count),
                        id,
                    )
                }),
        );
    }

    /// Sorts by falling logit what is kept.
    fn keep_top_k(&mut self) {
        let falling = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let k = self.settings.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, falling);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(falling);
    }

    fn make_probabilities(&mut self) {
        let max = self.candidates[0].0;
        let mut sum = 0.0;
        for c in &mut self.candidates {
            c.0 = ((c.0 - max) / self.settings.temperature).exp();
            sum += c.0;
        }
        let floor = self.settings.min_p;
        self.candidates.retain(|c| c.0 >= floor);
        self.candidates.iter_mut().for_each(|c| c.0 /= sum);
    }

    fn keep_top_p(&mut self) {
        if self.settings.top_p >= 1.0 {
            return;
        }
        let total: f32 = self.candidates.iter().map(|c| c.0).sum();
        let mut sum = 0.0;
        let enough = self.candidates.iter().position(|c| {
            sum += c.0;
            sum >= self.settings.top_p * total
        });
        self.candidates
            .truncate(enough.map_or(usize::MAX, |n| n + 1));
    }

    fn draw(&mut self) -> u32 {
        let total: f32 = self.candidates.iter().map(|c| c.0).sum();
        let mut left = self.random.f32() * total;
        for &(p, id) in &self.candidates {
            left -= p;
            if left < 0.0 {
                return id;
            }
        }
        self.candidates.last().map_or(0, |c| c.1)
    }
}

/// The likeliest token; the lowest id of several.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, &l) in logits.iter().enumerate() {
        if l > best.0 {
            best = (l, i);
        }
    }
    best.1 as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(settings: Sampling) -> Sampler {
        Sampler::new(settings, 5)
    }

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, f32::NAN, -1.0];

    #[test]
    fn greedy_takes_the_likeliest() {
        assert_eq!(sampler(Sampling::default()).sample(&LOGITS), Some(1));
    }

    #[test]
    fn penalties_move_greedy_on() {
        let mut s = sampler(Sampling {
            presence_penalty: 5.0,
            ..Sampling::default()
        });
        s.accept(1);
        assert_eq!(s.sample(&LOGITS), Some(2));
        let mut s = sampler(Sampling {
            repeat_penalty: 2.0,
            ..Sampling::default()
        });
        s.accept(1);
        assert_eq!(s.sample(&LOGITS), Some(2));
    }

    #[test]
    fn the_window_forgets() {
        let mut s = sampler(Sampling {
            presence_penalty: 5.0,
            penalty_window: 2,
            ..Sampling::default()
        });
        s.accept(1);
        s.accept(0);
        s.accept(0);
        assert_eq!(s.sample(&LOGITS), Some(1));
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let open = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 3,
            ..Sampling::default()
        };
        let mut s = sampler(open);
        let mut seen = [0u32; 5];
        let n = 40_000;
        (0..n).for_each(|_| seen[s.sample(&LOGITS).expect("a token") as usize] += 1);
        let weights = LOGITS.map(|l| if l.is_nan() { 0.0 } else { l.exp() });
        let total: f32 = weights.iter().sum();
        for (count, w) in seen.iter().zip(weights) {
            let p = w / total;
            // Five standard deviations of a binomial.
            let tolerance = 5.0 * (p * (1.0 - p) / n as f32).sqrt();
            assert!((*count as f32 / n as f32 - p).abs() <= tolerance);
        }
    }

    #[test]
    fn each_cut_drops_what_it_says() {
        let draws = |settings: Sampling| {
            let mut s = sampler(Sampling {
                temperature: 1.0,
                top_k: 0,
                top_p: 1.0,
                min_p: 0.0,
                ..settings
            });
            (0..500)
                .map(|_| s.sample(&LOGITS))
                .collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(draws(Sampling::default()).len(), 4);
        let one = |s: Sampling| {
            let mut s = sampler(Sampling {
                temperature: 1.0,
                ..s
            });
            (0..500).map(|_| s.sample(&LOGITS)).all(|t| t == Some(1))
        };
        let all = Sampling {
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..Sampling::default()
        };
        assert!(one(Sampling { top_k: 1, ..all }));
        assert!(one(Sampling { top_p: 0.5, ..all }));
        assert!(one(Sampling { min_p: 0.5, ..all }));
    }

    #[test]
    fn a_broken_model_gives_no_token() {
        for temperature in [0.0, 1.0] {
            let mut s = sampler(Sampling {
                temperature,
                ..Sampling::default()
            });
            assert_eq!(s.sample(&[f32::NAN; 5]), None);
        }
    }

    #[test]
    fn the_same_seed_draws_the_same() {
        let run = |seed| {
            let mut s = sampler(Sampling {
                temperature: 2.0,
                seed,
                ..Sampling::default()
            });
            (0..50).map(|_| s.sample(&LOGITS)).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn senseless_settings_are_named() {
        for s in [
            Sampling {
                temperature: -1.0,
                ..Sampling::default()
            },
            Sampling {
                temperature: f32::NAN,
                ..Sampling::default()
            },
            Sampling {
                top_p: 0.0,
                ..Sampling::default()
            },
            Sampling {
                min_p: 2.0,
                ..Sampling::default()
            },
            Sampling {
                repeat_penalty: 0.0,
                ..Sampling::default()
            },
        ] {
            assert!(s.check().is_err());
        }
        assert!(Sampling::default().check().is_ok());
    }
}
