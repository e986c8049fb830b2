//! The steps of attention in blocks against references in fp64 and to the bit.

use super::vectors::{Counts, TINY, halves, near};
use super::{Mismatch, Random, UNIT};
use crate::{Kernels, f16, scalar};

/// Values of a head.
const DIMS: [usize; 9] = [1, 7, 8, 24, 64, 80, 100, 128, 256];
/// Queries of a tile; more than one kernel takes at once.
const QUERIES: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 11, 16, 23];
/// Keys of a block.
const KEYS: [usize; 8] = [1, 3, 4, 9, 16, 31, 48, 64];

pub(super) fn check<K: Kernels>(k: K) -> Result<Counts, Mismatch> {
    let mut counts = Vec::new();
    let mut add = |name: &str, n: u64| counts.push((name.to_owned(), n));
    add("to_f32", to_f32(k)?);
    add("transpose", transpose(k)?);
    add("product", product(k)?);
    add("exp_block", exp_block(k)?);
    add("scores", scores(k)?);
    add("mix", mix(k)?);
    Ok(counts)
}

fn same<K: Kernels>(k: K, what: String, got: &[f32], want: &[f32]) -> Result<u64, Mismatch> {
    let differs = |(_, (g, w)): &(usize, (&f32, &f32))| g.to_bits() != w.to_bits();
    match got.iter().zip(want).enumerate().find(differs) {
        Some((i, (got, want))) => Err(Mismatch {
            kernel: k.name(),
            what,
            detail: format!("value {i}: got {got:e}, want {want:e}"),
        }),
        None => Ok(got.len() as u64),
    }
}

/// Every finite fp16 number has one fp32 form.
fn to_f32<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut compared = 0;
    let all: Vec<f16> = (0..=u16::MAX)
        .map(f16::from_bits)
        .filter(|h| h.is_finite())
        .collect();
    for n in [1, 7, 8, 15, 16, 31, 64, 100, all.len()] {
        let mut got = vec![f32::NAN; n];
        k.to_f32(&all[..n], &mut got);
        let want: Vec<f32> = all[..n].iter().map(|h| h.to_f32()).collect();
        compared += same(k, format!("to_f32 of {n}"), &got, &want)?;
    }
    Ok(compared)
}

/// Keys in number and room: as many, or up to a multiple of 16.
fn transpose<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut random = Random::new(31);
    let mut compared = 0;
    for dim in DIMS {
        for keys in KEYS {
            for m in [keys, keys.next_multiple_of(16), 64] {
                let stored = halves(&mut random, dim * keys, 1.0);
                let (mut got, mut want) = (vec![f32::NAN; dim * m], vec![f32::NAN; dim * m]);
                k.transpose(&stored, dim, &mut got);
                scalar::transpose(&stored, dim, &mut want);
                let what = format!("transpose of {keys} keys of {dim} into {m}");
                compared += same(k, what, &got, &want)?;
            }
        }
    }
    Ok(compared)
}

/// `inner` products and the value before, added in any order: at most `inner` + 2 roundings
/// on a path, of sizes up to the sum of all terms' sizes. Activations of 1e3 give sums of 1e8,
/// which fp16 could not hold.
fn product<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut random = Random::new(32);
    let mut compared = 0;
    for n in QUERIES {
        for inner in [1, 2, 16, 37, 64, 128] {
            for m in [1, 4, 8, 16, 17, 32, 48, 64, 80, 100, 128] {
                let size = [1.0, 1000.0][m % 3 % 2];
                let (a, b) = (
                    random.vector(n * inner, size),
                    random.vector(inner * m, size),
                );
                let before = random.vector(n * m, size);
                let mut out = before.clone();
                k.product(&a, &b, inner, &mut out);
                let terms = |i: usize| {
                    let products = (0..inner).map({
                        let (a, b) = (&a, &b);
                        move |t| f64::from(a[i / m * inner + t]) * f64::from(b[t * m + i % m])
                    });
                    products.chain([f64::from(before[i])])
                };
                let want: Vec<f64> = (0..n * m).map(|i| terms(i).sum()).collect();
                let tolerance =
                    |i: usize| (inner + 2) as f64 * UNIT * terms(i).map(f64::abs).sum::<f64>();
                let what = format!("product of {n} × {inner} and {inner} × {m}");
                compared += near(k, &what, &out, &want, tolerance)?;
            }
        }
    }
    Ok(compared)
}

/// The difference to the maximum is rounded, u·|x − m| in
/// the exponent; 16 for the exponential; the sum is off by n·u of itself at most. Below −87 a
/// kernel may give zero, which takes up to [`TINY`] each from the sum.
fn exp_block<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut random = Random::new(33);
    let mut compared = 0;
    for n in [1, 3, 8, 15, 16, 17, 31, 64, 100] {
        for (size, before) in [
            (1.0, f32::NEG_INFINITY),
            (10.0, 5.0),
            (100.0, -1e3),
            (1.0, 50.0),
            (1.0, 1e3),
            (1e4, 1e6),
        ] {
            let mut x = random.vector(n, size);
            let max = x.iter().copied().fold(before, f32::max);
            let below: Vec<f64> = x.iter().map(|v| f64::from(*v) - f64::from(max)).collect();
            let want: Vec<f64> = below.iter().map(|b| b.exp()).collect();
            let (m, sum) = k.exp_block(&mut x, before);
            let what = format!("exp_block of {n} × {size:e} with {before:e} before");
            let slack = |i: usize| (below[i].abs().min(100.0) + 20.0) * UNIT * want[i] + TINY;
            compared += near(k, &what, &x, &want, slack)?;
            compared += same(k, format!("{what}, the largest"), &[m], &[max])?;
            let total: f64 = want.iter().sum();
            let allowed = (0..n).map(slack).sum::<f64>() + n as f64 * UNIT * total;
            compared += near(k, &format!("{what}, the sum"), &[sum], &[total], |_| {
                allowed
            })?;
        }
    }
    Ok(compared)
}

/// `dim` products added in any order: at most `dim` + 2 roundings on a path, of sizes up to the sum
/// of all terms' sizes.
fn scores<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut random = Random::new(34);
    let mut compared = 0;
    for dim in DIMS {
        for n in QUERIES {
            for keys in KEYS {
                let size = [1.0, 1000.0][keys % 2];
                let q = random.vector(n * dim, size);
                let stored = halves(&mut random, dim * keys, size);
                let mut out = vec![f32::NAN; n * keys];
                k.scores(&q, &stored, dim, &mut out);
                let terms = |i: usize| {
                    let (q, key) = (&q[i / keys * dim..], &stored[i % keys * dim..]);
                    let pairs = q.iter().zip(key).take(dim);
                    pairs.map(|(q, k)| f64::from(*q) * k.to_f64())
                };
                let want: Vec<f64> = (0..n * keys).map(|i| terms(i).sum()).collect();
                let tolerance =
                    |i: usize| (dim + 2) as f64 * UNIT * terms(i).map(f64::abs).sum::<f64>();
                let what = format!("scores of {n} queries, {keys} keys of {dim}");
                compared += near(k, &what, &out, &want, tolerance)?;
            }
        }
    }
    Ok(compared)
}

/// As `product`, with values in fp16.
fn mix<K: Kernels>(k: K) -> Result<u64, Mismatch> {
    let mut random = Random::new(35);
    let mut compared = 0;
    for dim in DIMS.into_iter().chain([264]) {
        for n in QUERIES {
            for count in KEYS {
                let p: Vec<f32> = (0..n * count).map(|_| random.signed().abs()).collect();
                let stored = halves(&mut random, dim * count, [1.0, 60000.0][count % 2]);
                let before = random.vector(n * dim, 1.0);
                let mut out = before.clone();
                k.mix(&p, &stored, dim, &mut out);
                let terms = |i: usize| {
                    let (p, stored) = (&p[i / dim * count..], &stored);
                    let products = (0..count)
                        .map(move |j| f64::from(p[j]) * stored[j * dim + i % dim].to_f64());
                    products.chain([f64::from(before[i])])
                };
                let want: Vec<f64> = (0..n * dim).map(|i| terms(i).sum()).collect();
                let tolerance =
                    |i: usize| (count + 2) as f64 * UNIT * terms(i).map(f64::abs).sum::<f64>();
                let what = format!("mix of {n} queries, {count} values of {dim}");
                compared += near(k, &what, &out, &want, tolerance)?;
            }
        }
    }
    Ok(compared)
}
