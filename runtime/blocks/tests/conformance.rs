//! The suite passes the references and catches small faults.

use myq_blocks::conformance::{Mismatch, formats, matmul, run, vectors};
use myq_blocks::scalar::{Exact, Scalar};
use myq_blocks::{Column, ColumnMut, DType, Kernels, Rows, f16};

#[test]
fn the_reference_passes() {
    let report = run(Scalar).unwrap();
    println!("{report}");
    assert_eq!(report.lines.len(), 40 + 10);
    assert!(report.lines.iter().all(|(_, n)| *n > 1000), "{report}");
}

#[test]
fn fp32_activations_pass_and_read_no_codes() {
    run(Exact).unwrap();
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    LastRow,
    LastColumn,
    Code,
    Sum,
    Narrow,
    Scale,
    Padding,
    TiesAway,
    Rms,
    Silu,
    Exponent,
    Transposed,
    Product,
    Score,
    Mix,
    Overflow,
}

/// The scalar kernel with one thing wrong.
#[derive(Clone, Copy)]
struct Wrong(Fault);

impl Kernels for Wrong {
    fn name(self) -> &'static str {
        "wrong"
    }

    fn quantize(self, x: &[f32], out: ColumnMut<'_>) {
        let ColumnMut {
            q,
            d,
            sums,
            scaled_sums,
        } = out;
        Scalar.quantize(
            x,
            ColumnMut {
                q,
                d,
                sums,
                scaled_sums,
            },
        );
        if self.0 == Fault::Padding && x.len() < q.len() {
            q[x.len()] = 1;
        }
        for (g, x) in x
            .chunks(32)
            .enumerate()
            .filter(|(g, _)| self.0 == Fault::TiesAway && d[*g] > 0.0)
        {
            let inverse = 1.0 / d[g];
            x.iter()
                .zip(&mut q[32 * g..])
                .for_each(|(x, q)| *q = (x * inverse).round() as i8);
        }
    }

    fn matmul(self, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
        let (mut q, mut sums): (Vec<_>, Vec<_>) = columns
            .iter()
            .map(|c| (c.q.to_vec(), c.sums.to_vec()))
            .unzip();
        for (q, sums) in q.iter_mut().zip(&mut sums) {
            match self.0 {
                Fault::Code => q[5] = q[5].saturating_add(1),
                Fault::Sum => sums[1] += 1,
                _ => {}
            }
        }
        let changed: Vec<_> = columns
            .iter()
            .zip(q.iter().zip(&sums))
            .map(|(c, (q, sums))| Column { q, sums, ..*c })
            .collect();
        Scalar.matmul(w, &changed, out);
        let last = out.len() - 1;
        match self.0 {
            Fault::LastRow if w.rows() % 2 == 1 => out[0][w.rows() - 1] = 0.0,
            Fault::LastColumn if last > 2 => out[last][0] += 1.0,
            Fault::Scale => out[0]
                .iter_mut()
                .for_each(|v| *v *= 1.0 + 2.0 * f32::EPSILON),
            // As a sum of 16-bit products that saturates.
            Fault::Narrow => out
                .iter_mut()
                .flat_map(|o| o.iter_mut())
                .for_each(|v| *v = v.clamp(-32768.0, 32767.0)),
            _ => {}
        }
    }

    fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let eps = if self.0 == Fault::Rms { 0.9 * eps } else { eps };
        Scalar.rms_norm(x, weight, eps, out);
    }

    fn swiglu(self, gate: &mut [f32], up: &[f32]) {
        Scalar.swiglu(gate, up);
        if self.0 == Fault::Silu {
            gate.iter_mut()
                .for_each(|g| *g *= 1.0 + 20.0 * f32::EPSILON);
        }
    }

    fn exp_block(self, x: &mut [f32], max: f32) -> (f32, f32) {
        let (max, sum) = Scalar.exp_block(x, max);
        let last = if self.0 == Fault::Exponent {
            x[x.len() - 1]
        } else {
            0.0
        };
        (max, sum - last)
    }

    fn transpose(self, keys: &[f16], dim: usize, out: &mut [f32]) {
        // Leaves the places without a key as they are.
        let before = out.to_vec();
        Scalar.transpose(keys, dim, out);
        let (n, m) = (keys.len() / dim, out.len() / dim);
        for (i, (o, before)) in out.iter_mut().zip(before).enumerate() {
            if self.0 == Fault::Transposed && i % m >= n {
                *o = before;
            }
        }
    }

    fn product(self, a: &[f32], b: &[f32], inner: usize, out: &mut [f32]) {
        if self.0 == Fault::Product {
            out.fill(0.0);
        }
        Scalar.product(a, b, inner, out);
    }

    fn scores(self, q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
        Scalar.scores(q, keys, dim, out);
        if self.0 == Fault::Score && !dim.is_multiple_of(8) {
            out[0] -= q[dim - 1] * keys[dim - 1].to_f32();
        }
    }

    fn mix(self, p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
        let (n, last) = (values.len() / dim, p.len() - 1);
        let mut p = p.to_vec();
        // The last query's weight of the last value.
        if self.0 == Fault::Mix && n > 1 {
            p[last] = 0.0;
        }
        Scalar.mix(&p, values, dim, out);
    }

    fn to_f16(self, x: &[f32], out: &mut [f16]) {
        Scalar.to_f16(x, out);
        if self.0 == Fault::Overflow {
            x.iter().zip(out).for_each(|(x, o)| *o = f16::from_f32(*x));
        }
    }
}

#[test]
fn a_wrong_matrix_product_is_found_in_every_format() {
    for dtype in formats() {
        for fault in [
            Fault::LastRow,
            Fault::LastColumn,
            Fault::Narrow,
            Fault::Scale,
        ] {
            let found: Result<u64, Mismatch> = matmul(Wrong(fault), dtype);
            assert!(found.is_err(), "{fault:?} {dtype:?}");
        }
        if Scalar.wants_codes(dtype) {
            assert!(matmul(Wrong(Fault::Code), dtype).is_err(), "{dtype:?}");
        }
    }
    for dtype in [DType::Q2K, DType::Q4K, DType::Q5K, DType::Q4_1, DType::Q5_1] {
        assert!(matmul(Wrong(Fault::Sum), dtype).is_err(), "{dtype:?}");
    }
}

#[test]
fn a_wrong_vector_operation_is_found() {
    use Fault::*;
    for (fault, operation) in [
        (Padding, "quantize"),
        (TiesAway, "quantize"),
        (Rms, "rms_norm"),
        (Silu, "swiglu"),
        (Exponent, "exp_block"),
        (Transposed, "transpose"),
        (Product, "product"),
        (Score, "scores"),
        (Mix, "mix"),
        (Overflow, "to_f16"),
    ] {
        let error = vectors(Wrong(fault)).expect_err("a fault");
        assert!(error.what.starts_with(operation), "{fault:?}: {error}");
    }
}
