//! The vector operations against references in fp64 and to the bit.

use super::{Mismatch, Random, UNIT, attention};
use crate::layout::SUPER;
use crate::{ColumnMut, Kernels, scalar};
use half::f16;

const LENGTHS: [usize; 12] = [1, 2, 7, 8, 9, 16, 31, 64, 80, 100, 256, 1000];

/// Smallest value that exponentials must reach: about exp(−87), where fp32 is about to
/// leave the normal numbers. Kernels may flush what is below.
pub(super) const TINY: f64 = 1.7e-38;

pub(super) type Counts = Vec<(String, u64)>;

pub(super) fn check<K: Kernels>(k: K) -> Result<Counts, Mismatch> {
    let mut counts = Vec::new();
    let mut add = |name: &str, n: u64| counts.push((name.to_owned(), n));
    add("quantize", quantize(k)?);
    add("rms_norm", rms_norm(k)?);
    add("swiglu", swiglu(k)?);
    add("to_f16", to_f16(k)?);
    counts.extend(attention::check(k)?);
    Ok(counts)
}

/// Fails unless `got` is within `tolerance(i)` of `want`.
pub(super) fn near<K: Kernels>(
    k: K,
    what: &str,
    got: &[f32],
    want: &[f64],
    tolerance: impl Fn(usize) -> f64,
) -> Result<u64, Mismatch> {
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(got) - want).abs();
        if !(off <= tolerance(i) || f64::from(got) == want) {
            let detail = format!(
                "value {i}: got {got:e}, want {want:e}, allowed ±{:e}",
                tolerance(i)
            );
            return Err(Mismatch {
                kernel: k.name(),
                what: what.to_owned(),
                detail,
            });
        }
    }
    Ok(got.len() as u64)
}

/// Codes, scales and sums to the bit, padding included.
fn quantize<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut random = Random::new(21);
    let mut inputs: Vec<Vec<f32>> = Vec::new();
    for cols in [8, 24, 32, 40, 100, 256, 288, 576, 1000, 1536] {
        for size in [1.0, 1e-3, 1e3, 1e30, 1e-30, 1e-37, 1e-42] {
            inputs.push(random.vector(cols, size));
        }
        // Ties: with a largest value of 127 the scale is one and halves lie between codes.
        let mut ties: Vec<f32> = (0..cols)
            .map(|_| random.int(-253, 253) as f32 / 2.0)
            .collect();
        ties.iter_mut().step_by(32).for_each(|v| *v = -127.0);
        inputs.push(ties);
        // Whole groups of zeros between others, and one value among zeros.
        inputs.push(
            (0..cols)
                .map(|i| if i / 32 % 2 == 0 { 0.0 } else { random.bell() })
                .collect(),
        );
        inputs.push(
            (0..cols)
                .map(|i| if i % 37 == 5 { -3.0 } else { -0.0 })
                .collect(),
        );
        inputs.push(vec![f32::MAX; cols]);
    }
    let mut compared = 0;
    for x in &inputs {
        let n = x.len().next_multiple_of(SUPER);
        let form = |fill: i8, f: &dyn Fn(&[f32], ColumnMut<'_>)| {
            let (mut q, mut d, mut sums) = (
                vec![fill; n],
                vec![f32::from(fill); n / 32],
                vec![i16::from(fill); n / 16],
            );
            let mut scaled_sums = vec![f32::from(fill); n / 32];
            f(
                x,
                ColumnMut {
                    q: &mut q,
                    d: &mut d,
                    sums: &mut sums,
                    scaled_sums: &mut scaled_sums,
                },
            );
            let bits = |v: Vec<f32>| v.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
            (q, bits(d), sums, bits(scaled_sums))
        };
        let got = form(55, &|x, out| k.quantize(x, out));
        let want = form(0, &|x, out| scalar::quantize(x, out));
        if got != want {
            let first = (0..n).find(|&i| got.0[i] != want.0[i] || got.1[i / 32] != want.1[i / 32]);
            let detail = match first {
                Some(i) => format!(
                    "value {i} ({:?}): code {} scale {:#x}, want {} {:#x}",
                    x.get(i),
                    got.0[i],
                    got.1[i / 32],
                    want.0[i],
                    want.1[i / 32]
                ),
                None => format!(
                    "sums {:?} and, scaled, {:x?}, want {:?} and {:x?}",
                    got.2, got.3, want.2, want.3
                ),
            };
            return Err(Mismatch {
                kernel: k.name(),
                what: format!("quantize of {} values", x.len()),
                detail,
            });
        }
        compared += n as u64;
    }
    Ok(compared)
}

/// The sum of n squares, all positive, is off by at most n·u of itself, its root by half of
/// that; mean, root, reciprocal and the two products add their own roundings.
fn rms_norm<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut random = Random::new(22);
    let mut compared = 0;
    for n in LENGTHS {
        for (size, eps) in [
            (1.0, 1e-5),
            (1000.0, 1e-6),
            (1e-4, 1e-5),
            (1e15, 1e-6),
            (0.0, 1e-6),
        ] {
            let (x, w) = (random.vector(n, size), random.vector(n, 2.0));
            let mut out = vec![f32::NAN; n];
            k.rms_norm(&x, &w, eps, &mut out);
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            let want: Vec<f64> = x
                .iter()
                .zip(&w)
                .map(|(x, w)| f64::from(*x) * scale * f64::from(*w))
                .collect();
            let tolerance = |i: usize| (n as f64 / 2.0 + 8.0) * UNIT * want[i].abs();
            compared += near(
                k,
                &format!("rms_norm of {n} × {size:e}"),
                &out,
                &want,
                tolerance,
            )?;
        }
    }
    Ok(compared)
}

/// Relative error: 16 roundings cover an exponential good to a few units, the sum, the
/// division and the products. Where silu itself is below [`TINY`] any smaller value will do.
fn swiglu<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut random = Random::new(23);
    let mut compared = 0;
    for n in LENGTHS {
        for size in [1.0, 10.0, 60.0, 1e4] {
            let up = random.vector(n, 3.0);
            let mut gate = random.vector(n, size);
            let extremes = [
                100.0, -100.0, 0.0, -0.0, 88.8, -88.8, -87.0, 1e30, -1e30, 1e-30,
            ];
            for (i, e) in extremes.into_iter().enumerate().filter(|_| size > 50.0) {
                gate[(i * 3) % n] = e;
            }
            let silu = |g: f32| f64::from(g) / (1.0 + (-f64::from(g)).exp());
            let want: Vec<f64> = gate
                .iter()
                .zip(&up)
                .map(|(g, u)| silu(*g) * f64::from(*u))
                .collect();
            let slack: Vec<f64> = gate
                .iter()
                .zip(&up)
                .map(|(g, u)| g.abs().clamp(1.0, 128.0) as f64 * f64::from(u.abs()))
                .collect();
            k.swiglu(&mut gate, &up);
            let tolerance = |i: usize| 16.0 * UNIT * want[i].abs() + TINY * slack[i].max(1.0);
            compared += near(
                k,
                &format!("swiglu of {n} × {size}"),
                &gate,
                &want,
                tolerance,
            )?;
        }
    }
    Ok(compared)
}

pub(super) fn halves(random: &mut Random, n: usize, size: f32) -> Vec<f16> {
    (0..n)
        .map(|i| match i % 23 {
            11 => f16::from_bits(random.int(-0x3ff, 0x3ff) as u16 & 0x83ff),
            _ => f16::from_f32((size * random.bell()).clamp(-65504.0, 65504.0)),
        })
        .collect()
}

/// To the bit: rounding to even, subnormals, and the clamp.
fn to_f16<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut random = Random::new(27);
    let mut compared = 0;
    let edges = [
        65504.0,
        65519.996,
        65520.0,
        -65520.0,
        1e30,
        -1e30,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
    ];
    for n in LENGTHS {
        for size in [1.0, 1e-5, 3e-8, 4e4, 1e9] {
            let mut x = random.vector(n, size);
            for (i, e) in edges.into_iter().enumerate().filter(|_| size > 1e8) {
                x[i * 5 % n] = e;
            }
            // Half-way between two fp16 numbers.
            for (i, v) in x.iter_mut().enumerate().filter(|(i, _)| i % 4 == 3) {
                *v = 1.0 + (2 * i + 1) as f32 / 2048.0;
            }
            let (mut got, mut want) = (vec![f16::NAN; n], vec![f16::NAN; n]);
            k.to_f16(&x, &mut got);
            scalar::to_f16(&x, &mut want);
            if let Some(i) = (0..n).find(|&i| got[i].to_bits() != want[i].to_bits()) {
                let detail = format!(
                    "value {i}, {:e}: got {:e}, want {:e}",
                    x[i], got[i], want[i]
                );
                return Err(Mismatch {
                    kernel: k.name(),
                    what: format!("to_f16 of {n} × {size:e}"),
                    detail,
                });
            }
            compared += n as u64;
        }
    }
    Ok(compared)
}
