//! Loops over fp32 slices, compiled for the widest vectors that the processor has.
//!
//! pulp picks the instruction set at run time; the loops themselves are plain Rust that the
//! compiler turns into vectors. It also matters behind faer's products, whose kernels leave the
//! upper halves of the vector registers in use: old-style scalar code is ten times slower there.

/// Runs `body` compiled for this processor; what it calls must be `#[inline(always)]`.
#[inline(always)]
pub fn wide<R>(body: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(body)
}

/// e to the power of `x`, relative error under 2e-7; zero below −87.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // x = n·ln 2 + r, |r| ≤ ln 2 / 2; Cephes' coefficients of the remainder.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-88.0, 88.0);
    let n = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for c in [
        1.398_2e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        p = p * r + c;
    }
    let p = p * r * r + r + 1.0;
    let scale = f32::from_bits(((n as i32 + 127) as u32) << 23);
    if x < -87.0 { 0.0 } else { p * scale }
}

/// Sum in sixteen lanes and, for each few thousand values, double precision.
#[inline(always)]
pub fn sum(x: &[f32], of: impl Fn(f32) -> f32) -> f64 {
    let mut all = 0.0;
    for part in x.chunks(4096) {
        let mut lanes = [0.0f32; 16];
        let (chunks, rest) = part.as_chunks::<16>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane += of(*x);
            }
        }
        all += lanes.iter().map(|l| f64::from(*l)).sum::<f64>();
        all += rest.iter().map(|x| f64::from(of(*x))).sum::<f64>();
    }
    all
}

/// The largest value.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    lanes
        .iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |m, x| m.max(*x))
}

/// Softmax of the first `seen` scores times `scale`; zero behind them.
pub fn softmax(scores: &mut [f32], seen: usize, scale: f32) {
    wide(
        #[inline(always)]
        || {
            let (row, rest) = scores.split_at_mut(seen);
            rest.fill(0.0);
            let max = max(row);
            row.iter_mut().for_each(|s| *s = exp((*s - max) * scale));
            let inverse = (1.0 / sum(row, |x| x)) as f32;
            row.iter_mut().for_each(|s| *s *= inverse);
        },
    );
}

/// `out = x / √(mean x² + eps) · weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    wide(
        #[inline(always)]
        || {
            let mean = sum(x, |x| x * x) / x.len() as f64;
            let scale = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
            for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
                *o = x * scale * w;
            }
        },
    );
}

/// `gate = gate / (1 + e^−gate) · up`.
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    wide(
        #[inline(always)]
        || {
            for (g, u) in gate.iter_mut().zip(up) {
                *g = *g / (1.0 + exp(-*g)) * u;
            }
        },
    );
}

/// From the gradient by what [`swiglu`] gives, in both `by_gate` and `by_up`, to those by its
/// arguments.
pub fn swiglu_back(gate: &[f32], up: &[f32], by_gate: &mut [f32], by_up: &mut [f32]) {
    wide(
        #[inline(always)]
        || {
            let by = by_gate.iter_mut().zip(by_up);
            for ((by_gate, by_up), (g, u)) in by.zip(gate.iter().zip(up)) {
                let s = 1.0 / (1.0 + exp(-*g));
                *by_up *= g * s;
                *by_gate *= u * s * (1.0 + g * (1.0 - s));
            }
        },
    );
}

/// `grad +=` the gradient by `x` of what [`rms_norm`] gives, whose own is `by`.
pub fn rms_norm_back(x: &[f32], weight: &[f32], eps: f32, by: &[f32], grad: &mut [f32]) {
    wide(
        #[inline(always)]
        || {
            let n = x.len() as f64;
            let scale = (1.0 / (sum(x, |x| x * x) / n + f64::from(eps)).sqrt()) as f32;
            let terms = x.iter().zip(weight).zip(by);
            let along: f64 = terms.map(|((x, w), by)| f64::from(x * w * by)).sum();
            let along = (along / n) as f32 * scale * scale * scale;
            for ((g, x), (w, by)) in grad.iter_mut().zip(x).zip(weight.iter().zip(by)) {
                *g += scale * w * by - along * x;
            }
        },
    );
}

/// From the gradient `by` of softmax values `p` of scores times `scale` to that of the scores.
pub fn softmax_back(p: &[f32], scale: f32, by: &mut [f32]) {
    wide(
        #[inline(always)]
        || {
            let mut lanes = [0.0f32; 16];
            let (ps, p_rest) = p.as_chunks::<16>();
            let (bys, by_rest) = by.as_chunks::<16>();
            for (p, by) in ps.iter().zip(bys) {
                for ((lane, p), by) in lanes.iter_mut().zip(p).zip(by) {
                    *lane += p * by;
                }
            }
            let rest = p_rest.iter().zip(by_rest).map(|(p, by)| p * by);
            let mean = lanes.iter().sum::<f32>() + rest.sum::<f32>();
            for (by, p) in by.iter_mut().zip(p) {
                *by = p * (*by - mean) * scale;
            }
        },
    );
}

/// `x += y`.
pub fn add(x: &mut [f32], y: &[f32]) {
    wide(
        #[inline(always)]
        || x.iter_mut().zip(y).for_each(|(x, y)| *x += y),
    );
}

/// `sums += x²` value by value; gives the sum of all of them.
pub fn add_squares(x: &[f32], sums: &mut [f32]) -> f64 {
    wide(
        #[inline(always)]
        || {
            sums.iter_mut().zip(x).for_each(|(s, x)| *s += x * x);
            sum(x, |x| x * x)
        },
    )
}

/// Rows of `n` values times the square roots of their weights; as they are without weights.
pub fn scale_rows(x: &[f32], n: usize, weights: &[f32]) -> Vec<f32> {
    let mut out = x.to_vec();
    for (row, weight) in out.chunks_exact_mut(n).zip(weights) {
        let root = weight.sqrt();
        wide(
            #[inline(always)]
            || row.iter_mut().for_each(|x| *x *= root),
        );
    }
    out
}

/// `x − y`.
pub fn difference(x: &[f32], y: &[f32]) -> Vec<f32> {
    wide(
        #[inline(always)]
        || x.iter().zip(y).map(|(x, y)| x - y).collect(),
    )
}

/// ln Σ e^x.
pub fn log_sum_exp(x: &[f32]) -> f64 {
    wide(
        #[inline(always)]
        || {
            let max = max(x);
            f64::from(max) + sum(x, |x| exp(x - max)).ln()
        },
    )
}

/// Σ p·(ln p − (x − `log_sum`)), of `log_p` = ln p.
pub fn divergence(log_p: &[f32], x: &[f32], log_sum: f64) -> f64 {
    let log_sum = log_sum as f32;
    wide(
        #[inline(always)]
        || {
            let mut all = 0.0;
            for (p, x) in log_p.chunks(4096).zip(x.chunks(4096)) {
                let mut lanes = [0.0f32; 16];
                let (ps, p_rest) = p.as_chunks::<16>();
                let (xs, x_rest) = x.as_chunks::<16>();
                for (p, x) in ps.iter().zip(xs) {
                    for ((lane, p), x) in lanes.iter_mut().zip(p).zip(x) {
                        *lane += exp(*p) * (p - (x - log_sum));
                    }
                }
                all += lanes.iter().map(|l| f64::from(*l)).sum::<f64>();
                for (p, x) in p_rest.iter().zip(x_rest) {
                    all += f64::from(exp(*p) * (p - (x - log_sum)));
                }
            }
            all
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_right_to_the_last_bits() {
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) / want - 1.0).abs() < 2.5e-7, "{x}");
        }
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn a_softmax_sums_to_one_and_ends_where_it_should() {
        let mut row: Vec<f32> = (0..100).map(|i| (i as f32).sin()).collect();
        softmax(&mut row, 37, 2.0);
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!(row[37..].iter().all(|x| *x == 0.0));
        let ratio = f64::from(row[3] / row[5]);
        let want = (2.0 * (3f64.sin() - 5f64.sin())).exp();
        assert!((ratio / want - 1.0).abs() < 1e-5);
    }
}
