//! Activation columns with chosen codes and scales.

use super::Random;
use crate::layout::SUPER;
use crate::{Column, ColumnMut, Kernels};

/// Columns that own their values, one behind the other.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    cols: usize,
    x: Vec<f32>,
    q: Vec<i8>,
    d: Vec<f32>,
    sums: Vec<i16>,
    scaled_sums: Vec<f32>,
}

impl Columns {
    /// Quantises each vector with `k`; all are as long as the first.
    pub fn quantize<K: Kernels>(k: K, vectors: Vec<Vec<f32>>) -> Columns {
        let mut columns = Columns::default();
        for x in vectors {
            let i = columns.grow(x.len());
            let n = columns.padded();
            k.quantize(
                &x,
                ColumnMut {
                    q: &mut columns.q[i * n..],
                    d: &mut columns.d[i * n / 32..],
                    sums: &mut columns.sums[i * n / 16..],
                    scaled_sums: &mut columns.scaled_sums[i * n / 32..],
                },
            );
            columns.x.extend(x);
        }
        columns
    }

    /// One column from codes and scales; the values are their exact products.
    pub(super) fn push(&mut self, q: Vec<i8>, d: Vec<f32>) {
        let i = self.grow(q.len());
        let n = self.padded();
        for (g, q) in q.chunks(32).enumerate() {
            // A group of zeros has no scale.
            let scale = if q.iter().all(|&q| q == 0) { 0.0 } else { d[g] };
            self.x.extend(q.iter().map(|&q| f32::from(q) * scale));
            self.d[i * n / 32 + g] = scale;
        }
        self.q[i * n..i * n + q.len()].copy_from_slice(&q);
        let (q, sums) = (&self.q[i * n..], &mut self.sums[i * n / 16..]);
        for (sum, q) in sums.iter_mut().zip(q.chunks(16)) {
            *sum = q.iter().map(|&q| i16::from(q)).sum();
        }
        let scales = sums.as_chunks::<2>().0.iter().zip(&self.d[i * n / 32..]);
        for (to, ([a, b], d)) in self.scaled_sums[i * n / 32..].iter_mut().zip(scales) {
            *to = d * f32::from(a + b);
        }
    }

    /// Values of the padded form of a column.
    fn padded(&self) -> usize {
        self.cols.next_multiple_of(SUPER)
    }

    /// Room for the 8-bit form of one more column; gives its number.
    fn grow(&mut self, cols: usize) -> usize {
        let i = self.len();
        self.cols = if i == 0 { cols } else { self.cols };
        assert_eq!(self.cols, cols, "columns of one length");
        let n = (i + 1) * self.padded();
        self.q.resize(n, 0);
        self.d.resize(n / 32, 0.0);
        self.sums.resize(n / 16, 0);
        self.scaled_sums.resize(n / 32, 0.0);
        i
    }

    /// Number of columns.
    pub fn len(&self) -> usize {
        self.x.len().checked_div(self.cols).unwrap_or(0)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Column `i`.
    pub fn get(&self, i: usize) -> Column<'_> {
        let n = self.padded();
        Column {
            x: &self.x[i * self.cols..(i + 1) * self.cols],
            q: &self.q[i * n..(i + 1) * n],
            d: &self.d[i * n / 32..(i + 1) * n / 32],
            sums: &self.sums[i * n / 16..(i + 1) * n / 16],
            scaled_sums: &self.scaled_sums[i * n / 32..(i + 1) * n / 32],
        }
    }

    /// All of them.
    pub fn all(&self) -> Vec<Column<'_>> {
        (0..self.len()).map(|i| self.get(i)).collect()
    }

    /// Fills the 8-bit forms with nonsense, for kernels that say that they read none.
    pub(super) fn spoil(&mut self) {
        self.q.fill(77);
        self.d.fill(1e9);
        self.sums.fill(777);
        self.scaled_sums.fill(1e9);
    }
}

/// How the codes of a test column look.
pub(super) fn codes(pattern: usize, cols: usize, random: &mut Random) -> Vec<i8> {
    let mut up_to = |m: i32| random.int(-m, m) as i8;
    let threes = |i: usize| (i / 3).is_multiple_of(2);
    (0..cols)
        .map(|i| match pattern % 8 {
            0 => up_to(3),
            1 => 127,
            2 => -127,
            3 => up_to(127),
            4 => [127, -127][i % 2],
            5 => up_to(1),
            6 => up_to(15),
            _ => [127, -127][usize::from(threes(i))],
        })
        .collect()
}
