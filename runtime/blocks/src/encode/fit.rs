//! One group of weights: the step (and minimum) with the least weighted squared error.
//!
//! For fixed codes the best step is the solution of a linear least-squares problem, and for
//! a fixed step the best codes are the nearest ones. Neither alone finds the optimum, so
//! steps around the one that covers the range are tried, each followed by the least-squares
//! step of its codes; from the best of them the two are alternated while the error falls.

/// The codes a step can be multiplied by.
pub(super) trait Codes: Copy {
    /// Smallest, at most 0.
    fn lo(self) -> f32;
    /// Largest, at least 0.
    fn hi(self) -> f32;
    /// The code nearest to `v`.
    fn nearest(self, v: f32) -> f32;
}

/// Whole numbers from `lo` to `hi`.
#[derive(Clone, Copy)]
pub(super) struct Uniform {
    pub(super) lo: f32,
    pub(super) hi: f32,
}

impl Codes for Uniform {
    fn lo(self) -> f32 {
        self.lo
    }

    fn hi(self) -> f32 {
        self.hi
    }

    #[inline(always)]
    fn nearest(self, v: f32) -> f32 {
        // Comparisons, not `clamp`, and a sum that leaves no fraction, not `round`: both
        // forms become vector instructions on every processor.
        let v = if v > self.lo { v } else { self.lo };
        let v = if v < self.hi { v } else { self.hi };
        whole(v)
    }
}

/// Nearest whole number, ties to even; |v| below 2²².
#[inline(always)]
pub(super) fn whole(v: f32) -> f32 {
    // At 1.5·2²³ the spacing of f32 is one.
    const SHIFT: f32 = 12_582_912.0;
    (v + SHIFT) - SHIFT
}

/// A group: `len` a multiple of 8, with sums that no code changes.
#[derive(Clone, Copy)]
pub(super) struct Group<'a> {
    pub(super) x: &'a [f32],
    pub(super) w: &'a [f32],
    /// Σ w
    pub(super) w1: f32,
    /// Σ w·x
    pub(super) x1: f32,
    /// Smallest and largest weight.
    pub(super) min: f32,
    pub(super) max: f32,
}

/// Sums over the codes q that a grid `step·q − min` gives a group.
#[derive(Clone, Copy, Default)]
pub(super) struct Sums {
    /// Σ w·(x − (step·q − min))²
    pub(super) error: f32,
    /// Σ w·q
    pub(super) q1: f32,
    /// Σ w·q²
    pub(super) qq: f32,
    /// Σ w·x·q
    pub(super) xq: f32,
}

/// `1/v`, and 0 for 0: the codes of a zero step are zeros.
#[inline]
pub(super) fn inverse(v: f32) -> f32 {
    if v == 0.0 { 0.0 } else { 1.0 / v }
}

impl<'a> Group<'a> {
    pub(super) fn new((x, w): (&'a [f32], &'a [f32])) -> Group<'a> {
        let mut g = Group {
            x,
            w,
            w1: 0.0,
            x1: 0.0,
            min: f32::INFINITY,
            max: f32::NEG_INFINITY,
        };
        for (&x, &w) in x.iter().zip(w) {
            g.w1 += w;
            g.x1 += w * x;
            g.min = g.min.min(x);
            g.max = g.max.max(x);
        }
        g
    }

    /// The weight farthest from zero.
    pub(super) fn extreme(&self) -> f32 {
        if self.max > -self.min {
            self.max
        } else {
            self.min
        }
    }

    /// Quantises on the grid `step·q − min`.
    #[inline]
    pub(super) fn measure(&self, codes: impl Codes, step: f32, min: f32) -> Sums {
        let inv = inverse(step);
        let off = min * inv;
        let mut e = [[0.0f32; 8]; 4];
        for (x, w) in self
            .x
            .as_chunks::<8>()
            .0
            .iter()
            .zip(self.w.as_chunks::<8>().0)
        {
            for i in 0..8 {
                let q = codes.nearest(x[i] * inv + off);
                let r = x[i] - (step * q - min);
                let wq = w[i] * q;
                e[0][i] += w[i] * r * r;
                e[1][i] += wq;
                e[2][i] += wq * q;
                e[3][i] += wq * x[i];
            }
        }
        let [error, q1, qq, xq] = e.map(sum8);
        Sums { error, q1, qq, xq }
    }

    /// [`Group::measure`] without the error, of codes `x·inv + off`.
    #[inline]
    fn moments(&self, codes: impl Codes, inv: f32, off: f32) -> Sums {
        let mut e = [[0.0f32; 8]; 3];
        for (x, w) in self
            .x
            .as_chunks::<8>()
            .0
            .iter()
            .zip(self.w.as_chunks::<8>().0)
        {
            for i in 0..8 {
                let q = codes.nearest(x[i] * inv + off);
                let wq = w[i] * q;
                e[0][i] += wq;
                e[1][i] += wq * q;
                e[2][i] += wq * x[i];
            }
        }
        let [q1, qq, xq] = e.map(sum8);
        Sums {
            error: 0.0,
            q1,
            qq,
            xq,
        }
    }

    /// Writes the codes on the grid `step·q − min`.
    pub(super) fn write(
        &self,
        codes: impl Codes,
        step: f32,
        min: f32,
        mut put: impl FnMut(usize, f32),
    ) {
        let inv = inverse(step);
        let off = min * inv;
        for (i, &x) in self.x.iter().enumerate() {
            put(i, codes.nearest(x * inv + off));
        }
    }

    /// The step that brings the farthest weights to the ends of `codes`; negative with
    /// `flip`, where positive weights get negative codes. Zero for a group of zeros.
    pub(super) fn cover(&self, codes: impl Codes, flip: bool) -> f32 {
        let (min, max) = if flip {
            (-self.max, -self.min)
        } else {
            (self.min, self.max)
        };
        let high = if codes.hi() > 0.0 {
            max / codes.hi()
        } else {
            0.0
        };
        let low = if codes.lo() < 0.0 {
            min / codes.lo()
        } else {
            0.0
        };
        let step = high.max(low).max(0.0);
        if flip { -step } else { step }
    }
}

/// Adds lanes in pairs: a fixed order.
#[inline(always)]
fn sum8(a: [f32; 8]) -> f32 {
    ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
}

/// The best step of a group without a minimum.
#[derive(Clone, Copy, Default)]
pub(super) struct Step {
    pub(super) step: f32,
    /// Σ w·q²: how fast the error grows when the step moves.
    pub(super) weight: f32,
    /// How much of Σ w·x² the codes explain.
    pub(super) gain: f32,
}

impl Step {
    fn of(s: &Sums) -> Step {
        if s.qq > 0.0 {
            Step {
                step: s.xq / s.qq,
                weight: s.qq,
                gain: s.xq * s.xq / s.qq,
            }
        } else {
            Step::default()
        }
    }
}

/// Candidates of a range: how many codes beyond (negative: short of) the ends the farthest
/// weight would get.
fn overshoot(half_range: f32, count: usize) -> impl Iterator<Item = f32> {
    // Four levels are best with nearly a whole code clipped, many levels with several.
    let (from, to) = (-0.25 * half_range.min(2.5), half_range.min(4.0) * 0.85);
    (0..count).map(move |k| 1.0 + (from + (to - from) * k as f32 / (count - 1) as f32) / half_range)
}

/// Searches the step with the least weighted error; with `signed`, of either sign.
pub(super) fn best_step(g: &Group<'_>, codes: impl Codes, signed: bool) -> Step {
    let half_range = 0.5 * (codes.hi() - codes.lo());
    let mut best = Step::default();
    for flip in [false, true].into_iter().take(1 + usize::from(signed)) {
        let cover = g.cover(codes, flip);
        if cover == 0.0 {
            continue;
        }
        for factor in overshoot(half_range, 10) {
            let s = Step::of(&g.moments(codes, factor / cover, 0.0));
            if s.gain > best.gain {
                best = s;
            }
        }
    }
    for _ in 0..3 {
        let s = Step::of(&g.moments(codes, inverse(best.step), 0.0));
        if s.gain <= best.gain {
            break;
        }
        best = s;
    }
    best
}

/// The best step and minimum of a group on the grid `step·q − min`.
#[derive(Clone, Copy, Default)]
pub(super) struct Affine {
    pub(super) step: f32,
    pub(super) min: f32,
    /// How fast the error grows when the step moves and the minimum follows.
    pub(super) weight: f32,
    /// Sums of the codes.
    pub(super) sums: Sums,
    gain: f32,
}

impl Affine {
    /// Least squares for given codes; `None` where the codes do not span a step. The minimum
    /// is kept at or above zero unless `free`.
    fn of(g: &Group<'_>, s: Sums, free: bool) -> Option<Affine> {
        let det = g.w1 * s.qq - s.q1 * s.q1;
        // Equal codes leave only rounding errors in the determinant.
        if det <= 1e-5 * g.w1 * s.qq {
            let step = if free || s.qq == 0.0 {
                0.0
            } else {
                s.xq / s.qq
            };
            let gain = step * s.xq;
            return (step > 0.0).then_some(Affine {
                step,
                min: 0.0,
                weight: s.qq,
                sums: s,
                gain,
            });
        }
        let mut step = (g.w1 * s.xq - s.q1 * g.x1) / det;
        let mut min = (s.q1 * s.xq - s.qq * g.x1) / det;
        if min < 0.0 && !free {
            (step, min) = (s.xq / s.qq, 0.0);
        }
        let gain = step * s.xq - min * g.x1;
        (step > 0.0).then_some(Affine {
            step,
            min,
            weight: det / g.w1,
            sums: s,
            gain,
        })
    }
}

/// Searches step and minimum with the least weighted error for codes `0 ..= hi`.
///
/// The minimum is at least zero, as in the superblock formats, unless `free`.
pub(super) fn best_affine(g: &Group<'_>, hi: f32, free: bool) -> Affine {
    let codes = Uniform { lo: 0.0, hi };
    let low = if free { g.min } else { g.min.min(0.0) };
    let range = g.max - low;
    // One value: the minimum alone holds it.
    let mut best = Affine {
        min: -low,
        ..Affine::default()
    };
    if range <= 0.0 {
        return best;
    }
    // Gains may be negative only through rounding; the first candidate always counts.
    best.gain = f32::NEG_INFINITY;
    for factor in overshoot(0.5 * hi, 13) {
        let step = range / hi / factor;
        // What the shrunken range leaves out goes to the lower end, both, or the upper.
        for share in [0.0, 0.5, 1.0] {
            let start = low + (range - step * hi) * share;
            if let Some(a) = Affine::of(g, g.moments(codes, 1.0 / step, -start / step), free)
                && a.gain > best.gain
            {
                best = a;
            }
        }
    }
    for _ in 0..3 {
        let inv = inverse(best.step);
        match Affine::of(g, g.moments(codes, inv, best.min * inv), free) {
            Some(a) if a.gain > best.gain => best = a,
            _ => break,
        }
    }
    best
}
