//! Products per format and vector operations, on the conformance shapes.
//!
//! One column is given in bytes of weights a second, more in multiply-adds. Run with
//! `--test` (as `cargo test --benches` does) it tries everything once.

use criterion::{Bencher, Criterion, Throughput, criterion_group, criterion_main};
use kernels_avx2::Avx2;
use myq_blocks::conformance::{BENCH_SHAPES, Columns, Random, bench_matrix, formats};
use myq_blocks::panels::{self, PANEL};
use myq_blocks::{ColumnMut, DType, Kernels, Layout, Rows, f16};
use std::hint::black_box;
use std::time::Duration;

/// One linear format of each width stands for its group lengths.
fn benched() -> impl Iterator<Item = DType> {
    formats().filter(|d| !matches!(d, DType::Linear(l) if l.group() != 64))
}

fn products<K: Kernels>(b: &mut Bencher<'_>, k: K, w: Rows<'_>, columns: usize) {
    let mut random = Random::new(9);
    let columns = Columns::quantize(
        k,
        (0..columns).map(|_| random.vector(w.cols(), 1.0)).collect(),
    );
    let columns = columns.all();
    let mut out = vec![vec![0.0; w.rows()]; columns.len()];
    let mut out: Vec<&mut [f32]> = out.iter_mut().map(Vec::as_mut_slice).collect();
    b.iter(|| k.matmul(black_box(w), black_box(&columns), &mut out));
}

fn matrices(c: &mut Criterion) {
    let Some(k) = Avx2::new() else { return };
    for (rows, cols) in BENCH_SHAPES {
        for dtype in benched() {
            let Some(data) = bench_matrix(dtype, rows, cols) else {
                continue;
            };
            let mut packed = data.clone();
            let mut layouts = vec![(Layout::Plain, &data)];
            if panels::has_panels(dtype, cols) {
                let panel = PANEL * data.len() / rows;
                for (from, to) in data.chunks_exact(panel).zip(packed.chunks_exact_mut(panel)) {
                    panels::pack(dtype, cols, from, to);
                }
                layouts.push((Layout::Rows8, &packed));
            }
            for (layout, data) in layouts {
                let w = Rows::in_layout(layout, dtype, cols, data).expect("whole rows");
                let mut group = c.benchmark_group(format!("{rows}x{cols}, {}", layout.name()));
                for columns in [1, 16, 32] {
                    group.throughput(match columns {
                        1 => Throughput::Bytes(data.len() as u64),
                        n => Throughput::Elements((n * rows * cols) as u64),
                    });
                    let name = format!("{}/{columns}", dtype.name());
                    group.bench_function(name, |b| products(b, k, w, columns));
                }
            }
        }
    }
}

fn vectors(c: &mut Criterion) {
    let Some(k) = Avx2::new() else { return };
    let mut random = Random::new(10);
    let x = random.vector(4096, 1.0);
    let mut group = c.benchmark_group("vector of 4096");
    group.throughput(Throughput::Elements(4096));
    let (mut q, mut d, mut sums) = (vec![0; 4096], vec![0.0; 128], vec![0; 256]);
    let mut scaled_sums = vec![0.0; 128];
    group.bench_function("quantize", |b| {
        b.iter(|| {
            k.quantize(
                black_box(&x),
                ColumnMut {
                    q: &mut q,
                    d: &mut d,
                    sums: &mut sums,
                    scaled_sums: &mut scaled_sums,
                },
            )
        });
    });
    let mut out = vec![0.0; 4096];
    group.bench_function("rms_norm", |b| {
        b.iter(|| k.rms_norm(black_box(&x), &x, 1e-5, &mut out))
    });
    let mut y = x.clone();
    group.bench_function("swiglu", |b| {
        b.iter(|| {
            y.copy_from_slice(&x);
            k.swiglu(black_box(&mut y), &x);
        });
    });
    group.bench_function("exp_block", |b| {
        b.iter(|| {
            y.copy_from_slice(&x);
            k.exp_block(black_box(&mut y), f32::NEG_INFINITY)
        });
    });
    let mut halves = vec![f16::ZERO; 4096];
    group.bench_function("to_f16", |b| {
        b.iter(|| k.to_f16(black_box(&x), &mut halves))
    });
    group.finish();
    let mut group = c.benchmark_group("attention, 512 positions of 64, 3 queries");
    let mut cache = vec![f16::ZERO; 512 * 64];
    k.to_f16(&random.vector(512 * 64, 1.0), &mut cache);
    group.throughput(Throughput::Bytes(2 * cache.len() as u64));
    let mut p = vec![0.0; 3 * 512];
    group.bench_function("scores", |b| {
        b.iter(|| k.scores(black_box(&x[..3 * 64]), &cache, 64, &mut p))
    });
    group.bench_function("mix", |b| {
        b.iter(|| k.mix(black_box(&x[..3 * 512]), &cache, 64, &mut out[..3 * 64]))
    });
}

fn short() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .sample_size(10)
}

criterion_group! { name = benches; config = short(); targets = matrices, vectors }
criterion_main!(benches);
