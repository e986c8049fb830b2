//! `matmul` of one format against the reference.

use super::columns::{Columns, codes};
use super::rows::{self, Sizes, constant, extremes, ordinary, sizes};
use super::{COLS, COLUMNS, Mismatch, ROWS, Random, SHORT, UNIT};
use crate::decode::dequantize_row;
use crate::panels::{self, PANEL};
use crate::scalar::{self, Scalar};
use crate::{DType, Kernels, Layout, MAX_COLUMNS, Rows};
use half::f16;

/// Largest whole number up to which fp32 holds every whole number.
const EXACT: f64 = 16_777_216.0;

/// A matrix, its columns, and what the products are.
struct Case {
    what: String,
    dtype: DType,
    cols: usize,
    layout: Layout,
    data: Vec<u8>,
    columns: Columns,
    /// `[column][row]`: value and allowed difference.
    expected: Vec<Vec<(f32, f64)>>,
}

pub(super) fn check<K: Kernels>(k: K, dtype: DType) -> Result<u64, Mismatch> {
    let short = SHORT
        .iter()
        .filter(|&&cols| dtype.row_bytes(cols).is_some());
    let mut compared = 0;
    for &cols in short.chain(&COLS) {
        compared += exact(k, dtype, cols).both_layouts(k)?;
        compared += dense(k, dtype, cols).both_layouts(k)?;
        compared += random(k, dtype, cols).both_layouts(k)?;
    }
    compared += large(k, dtype).both_layouts(k)?;
    compared += long(k, dtype).both_layouts(k)?;
    Ok(compared)
}

impl Case {
    /// Fills in what the reference gives; `tolerance(row, column)`.
    fn new<K: Kernels>(
        k: K,
        what: &str,
        (dtype, cols): (DType, usize),
        data: Vec<u8>,
        mut columns: Columns,
        tolerance: impl Fn(usize, usize) -> f64,
    ) -> Case {
        let row_bytes = dtype.row_bytes(cols).expect("a length of the format");
        let product = |row: &[u8], c: usize| {
            let column = columns.get(c);
            if k.wants_codes(dtype) || is_float(dtype) {
                return scalar::dot(dtype, row, &column);
            }
            let mut w = vec![0.0; cols];
            dequantize_row(dtype, row, &mut w);
            w.iter()
                .zip(column.x)
                .map(|(w, x)| f64::from(*w) * f64::from(*x))
                .sum::<f64>() as f32
        };
        let column = |c: usize| {
            let rows = data.chunks_exact(row_bytes).enumerate();
            rows.map(|(r, row)| (product(row, c), tolerance(r, c)))
                .collect()
        };
        let expected = (0..columns.len()).map(column).collect();
        if !k.wants_codes(dtype) {
            columns.spoil();
        }
        Case {
            what: format!("{} {what}", dtype.name()),
            dtype,
            cols,
            layout: Layout::Plain,
            data,
            columns,
            expected,
        }
    }

    /// As it is, and in panels where the format has them.
    fn both_layouts<K: Kernels>(mut self, k: K) -> Result<u64, Mismatch> {
        let compared = self.run(k)?;
        if !panels::has_panels(self.dtype, self.cols) {
            return Ok(compared);
        }
        let bytes = PANEL * self.dtype.row_bytes(self.cols).expect("checked");
        let plain = std::mem::take(&mut self.data);
        self.data = plain.clone();
        let whole = self.data.chunks_exact_mut(bytes);
        for (panel, rows) in whole.zip(plain.chunks_exact(bytes)) {
            panels::pack(self.dtype, self.cols, rows, panel);
        }
        self.layout = Layout::Rows8;
        Ok(compared + self.run(k)?)
    }

    /// Calls the kernel with every number of rows and columns.
    fn run<K: Kernels>(&self, k: K) -> Result<u64, Mismatch> {
        let w = Rows::in_layout(self.layout, self.dtype, self.cols, &self.data);
        let w = w.expect("whole rows");
        let mut compared = 0;
        let mut call = |rows: std::ops::Range<usize>, columns: &[usize]| {
            compared += (rows.len() * columns.len()) as u64;
            self.call(k, w.slice(rows.clone()), rows.start, columns)
        };
        let all: [usize; MAX_COLUMNS] = std::array::from_fn(|c| c);
        // Runs of panels, with and without the rows behind them.
        for first in 0..w.panels() {
            let ends = (first + 1..=w.panels()).map(|p| PANEL * p);
            for (i, end) in ends.chain([w.rows()]).enumerate() {
                let columns = COLUMNS[(3 * first + i) % COLUMNS.len()];
                call(PANEL * first..end, &all[..columns])?;
            }
        }
        let plain = self.layout == Layout::Plain;
        let fits = |&(_, n): &(usize, &usize)| plain && *n <= w.rows();
        for (i, &rows) in ROWS.iter().enumerate().filter(fits) {
            for (j, &columns) in COLUMNS.iter().enumerate() {
                // Different places of the matrix in turn, so that alignment varies.
                let row = (i + j) % (w.rows() - rows + 1);
                let column = (3 * i + j) % (MAX_COLUMNS - columns + 1);
                call(row..row + rows, &all[column..column + columns])?;
            }
        }
        // Every value with every number of columns, and with as many as there can be, in memory
        // one behind the other and not.
        for &columns in COLUMNS.iter().filter(|_| !plain) {
            call(0..w.rows(), &all[MAX_COLUMNS - columns..])?;
        }
        call(0..w.rows(), &all)?;
        let scattered = all.map(|c| 7 * c % MAX_COLUMNS);
        call(0..w.rows(), &scattered)?;
        Ok(compared)
    }

    /// Products of rows from number `row` on with those columns.
    fn call<K: Kernels>(
        &self,
        k: K,
        w: Rows<'_>,
        row: usize,
        which: &[usize],
    ) -> Result<(), Mismatch> {
        let columns: Vec<_> = which.iter().map(|&c| self.columns.get(c)).collect();
        let mut out = vec![vec![f32::NAN; w.rows()]; columns.len()];
        let mut slices: Vec<&mut [f32]> = out.iter_mut().map(Vec::as_mut_slice).collect();
        k.matmul(w, &columns, &mut slices);
        for (c, out) in out.iter().enumerate() {
            for (r, &got) in out.iter().enumerate() {
                let (want, tolerance) = self.expected[which[c]][row + r];
                let off = f64::from(got) - f64::from(want);
                if !(got == want || off.abs() <= tolerance) {
                    let shape = format!(
                        "{} rows × {} cols, {} columns",
                        w.rows(),
                        self.cols,
                        columns.len()
                    );
                    return Err(Mismatch {
                        kernel: k.name(),
                        what: format!("matmul {}, {}, {shape}", self.what, self.layout.name()),
                        detail: format!(
                            "row {r} (of test row {}), column {c} (of {}): got {got}, want {want}, allowed ±{tolerance:e}",
                            row + r,
                            which[c]
                        ),
                    });
                }
            }
        }
        Ok(())
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Extreme and random blocks with super-scales ±1/4 … ±2.
fn extreme_rows(dtype: DType, cols: usize, random: &mut Random) -> Vec<Vec<u8>> {
    let power = |r: &mut Random| {
        let v = [0.25, 0.5, 1.0, 2.0, -1.0][r.int(0, 4) as usize];
        f16::from_f32(if r.int(0, 15) == 0 { 0.0 } else { v })
    };
    extremes()
        .into_iter()
        .map(|e| rows::row(dtype, cols, e, random, power))
        .collect()
}

/// Every operation exact in any order.
///
/// All factors of a row are whole multiples of its quantum, activation scales are 1, 2 or 4,
/// so every partial sum in any order is a whole number of quanta. If the sizes of all terms
/// add up to less than 2^24 quanta, fp32 holds every partial sum exactly. Codes are set to
/// zero, eight at a time, where the sum would pass that.
fn exact<K: Kernels>(k: K, dtype: DType, cols: usize) -> Case {
    let mut random = Random::new(1 + cols as u64);
    let matrix = extreme_rows(dtype, cols, &mut random);
    let sizes: Vec<Sizes> = matrix.iter().map(|row| sizes(dtype, row, cols)).collect();
    let mut columns = Columns::default();
    for c in 0..MAX_COLUMNS {
        let mut q = codes(c, cols, &mut random);
        let d: Vec<f32> = (0..cols.div_ceil(32))
            .map(|_| [1.0, 2.0, 4.0][random.int(0, 2) as usize])
            .collect();
        let eights = cols.div_ceil(8);
        let start = random.int(0, eights as i32 - 1) as usize;
        let mut totals = vec![0.0; sizes.len()];
        for e in (0..eights).map(|e| 8 * ((start + e) % eights)) {
            let term = |s: &Sizes| {
                let of = |i: usize| s.factors[i] * f64::from(q[i]).abs() * f64::from(d[i / 32]);
                (e..cols.min(e + 8)).map(of).sum::<f64>() / s.quantum
            };
            let terms: Vec<f64> = sizes.iter().map(term).collect();
            if terms.iter().zip(&totals).all(|(a, b)| a + b < EXACT) {
                totals
                    .iter_mut()
                    .zip(&terms)
                    .for_each(|(t, term)| *t += term);
            } else {
                q[e..cols.min(e + 8)].fill(0);
            }
        }
        columns.push(q, d);
    }
    Case::new(
        k,
        "exact",
        (dtype, cols),
        matrix.concat(),
        columns,
        |_, _| 0.0,
    )
}

/// Allowed difference of two correct computations whose terms have sizes that add up to
/// `total`.
///
/// A computation in fp32 of a sum differs from the true value by at most `n·u·Σ|terms|`, n
/// the number of roundings on the longest path of a term to the result, u = 2^-24. Of integer
/// formats each 32 weights enter as one exact integer sum: rounded at most when it becomes
/// fp32, when scaled by the activation and the block, and when added to its block and the
/// total. Float formats add one weight after another in at least four partial sums. The
/// last 8 are for the horizontal sum. Both sides err, hence 2.
fn allowed(dtype: DType, cols: usize, total: f64) -> f64 {
    let path = if is_float(dtype) {
        cols as f64 / 4.0
    } else {
        5.0 * (cols as f64 / 32.0).ceil()
    };
    2.0 * (path + 8.0) * UNIT * total
}

fn tolerances(
    dtype: DType,
    cols: usize,
    matrix: &[Vec<u8>],
    columns: &Columns,
) -> impl Fn(usize, usize) -> f64 + use<> {
    let sizes: Vec<Sizes> = matrix.iter().map(|row| sizes(dtype, row, cols)).collect();
    let x: Vec<Vec<f32>> = columns.all().iter().map(|c| c.x.to_vec()).collect();
    move |r, c| {
        // Rounding to codes moves an activation by at most half a step of 1/127 of the
        // group's largest: 1 % covers it as the terms are only used times 1e-4 and less.
        let total: f64 = sizes[r]
            .factors
            .iter()
            .zip(&x[c])
            .map(|(w, x)| w * f64::from(x.abs()))
            .sum();
        let steps: f64 = sizes[r]
            .factors
            .chunks(32)
            .zip(x[c].chunks(32))
            .map(|(w, x)| {
                let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                w.iter().sum::<f64>() * f64::from(largest) / 254.0
            })
            .sum();
        allowed(dtype, cols, total + steps)
    }
}

/// The extreme blocks against columns that are large throughout.
fn dense<K: Kernels>(k: K, dtype: DType, cols: usize) -> Case {
    let mut random = Random::new(1000 + cols as u64);
    let matrix = extreme_rows(dtype, cols, &mut random);
    let mut columns = Columns::default();
    for c in 0..MAX_COLUMNS {
        let q = codes([1, 2, 3, 4, 7][c % 5], cols, &mut random);
        let d = (0..cols.div_ceil(32))
            .map(|_| 0.01 + random.signed().abs())
            .collect();
        columns.push(q, d);
    }
    let tolerance = tolerances(dtype, cols, &matrix, &columns);
    Case::new(
        k,
        "dense",
        (dtype, cols),
        matrix.concat(),
        columns,
        tolerance,
    )
}

/// Ordinary rows and activations, half of the columns quantised by the kernel itself.
fn random<K: Kernels>(k: K, dtype: DType, cols: usize) -> Case {
    let mut random = Random::new(2000 + cols as u64);
    // Five panels and four rows: more panels than any kernel takes at once.
    let matrix: Vec<_> = (0..44)
        .map(|_| ordinary(dtype, cols, &mut random))
        .collect();
    let vectors: Vec<_> = (0..MAX_COLUMNS)
        .map(|c| {
            let mut x = random.vector(cols, [1.0, 30.0, 0.01, 1000.0][c % 4]);
            // An outlier, as real activations have them.
            x[c * 7 % cols] *= 20.0;
            x
        })
        .collect();
    let columns = if cols.is_multiple_of(64) {
        Columns::quantize(Scalar, vectors)
    } else {
        Columns::quantize(k, vectors)
    };
    let tolerance = tolerances(dtype, cols, &matrix, &columns);
    Case::new(
        k,
        "random",
        (dtype, cols),
        matrix.concat(),
        columns,
        tolerance,
    )
}

/// Rows longer than the parts in which kernels take the columns.
fn long<K: Kernels>(k: K, dtype: DType) -> Case {
    let cols = 4352;
    let mut random = Random::new(5);
    let matrix: Vec<_> = (0..17)
        .map(|_| ordinary(dtype, cols, &mut random))
        .collect();
    let vectors = (0..MAX_COLUMNS).map(|_| random.vector(cols, 1.0)).collect();
    let columns = Columns::quantize(k, vectors);
    let tolerance = tolerances(dtype, cols, &matrix, &columns);
    Case::new(
        k,
        "long",
        (dtype, cols),
        matrix.concat(),
        columns,
        tolerance,
    )
}

/// Activations of a thousand and dot products of 3e5 and far above, which fp16 sums would
/// not hold.
fn large<K: Kernels>(k: K, dtype: DType) -> Case {
    let cols = 1536;
    let matrix: Vec<_> = (0..9)
        .map(|r| constant(dtype, cols, 0.25 * (r + 1) as f32))
        .collect();
    let mut random = Random::new(4);
    let vectors = (0..MAX_COLUMNS)
        .map(|c| {
            (0..cols)
                .map(|_| [1000.0, 500.0][c % 2] + 100.0 * random.signed())
                .collect()
        })
        .collect();
    let columns = Columns::quantize(k, vectors);
    let tolerance = tolerances(dtype, cols, &matrix, &columns);
    let case = Case::new(
        k,
        "large activations",
        (dtype, cols),
        matrix.concat(),
        columns,
        tolerance,
    );
    let huge = case
        .expected
        .iter()
        .flatten()
        .filter(|e| e.0.abs() > 3e5)
        .count();
    assert!(
        huge > 0,
        "the suite lost its large sums for {}",
        dtype.name()
    );
    case
}
