//! Activation columns with chosen codes and scales.

use super::Random;
use crate::layout::SUPER;
use crate::{Column, ColumnMut, Kernels};

/// Columns that own their values.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    x: Vec<Vec<f32>>,
    q: Vec<Vec<i8>>,
    d: Vec<Vec<f32>>,
    sums: Vec<Vec<i16>>,
    scaled_sums: Vec<Vec<f32>>,
}

impl Columns {
    /// Quantises each vector with `k`.
    pub fn quantize<K: Kernels>(k: K, vectors: Vec<Vec<f32>>) -> Columns {
        let mut columns = Columns::default();
        for x in vectors {
            let n = x.len().next_multiple_of(SUPER);
            let (mut q, mut d, mut sums) = (vec![0; n], vec![0.0; n / 32], vec![0; n / 16]);
            let mut scaled_sums = vec![0.0; n / 32];
            k.quantize(
                &x,
                ColumnMut {
                    q: &mut q,
                    d: &mut d,
                    sums: &mut sums,
                    scaled_sums: &mut scaled_sums,
                },
            );
            columns.x.push(x);
            columns.q.push(q);
            columns.d.push(d);
            columns.sums.push(sums);
            columns.scaled_sums.push(scaled_sums);
        }
        columns
    }

    /// One column from codes and scales; the values are their exact products.
    pub(super) fn push(&mut self, mut q: Vec<i8>, mut d: Vec<f32>) {
        let n = q.len().next_multiple_of(SUPER);
        for (q, d) in q.chunks(32).zip(&mut d) {
            // A group of zeros has no scale.
            if q.iter().all(|&q| q == 0) {
                *d = 0.0;
            }
        }
        self.x.push(
            q.iter()
                .enumerate()
                .map(|(i, &q)| f32::from(q) * d[i / 32])
                .collect(),
        );
        q.resize(n, 0);
        d.resize(n / 32, 0.0);
        let sums: Vec<i16> = q
            .chunks(16)
            .map(|q| q.iter().map(|&q| i16::from(q)).sum())
            .collect();
        let scaled = sums.as_chunks::<2>().0.iter().zip(&d);
        self.scaled_sums
            .push(scaled.map(|([a, b], d)| d * f32::from(a + b)).collect());
        self.sums.push(sums);
        self.q.push(q);
        self.d.push(d);
    }

    /// Number of columns.
    pub fn len(&self) -> usize {
        self.x.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.x.is_empty()
    }

    /// Column `i`.
    pub fn get(&self, i: usize) -> Column<'_> {
        Column {
            x: &self.x[i],
            q: &self.q[i],
            d: &self.d[i],
            sums: &self.sums[i],
            scaled_sums: &self.scaled_sums[i],
        }
    }

    /// All of them.
    pub fn all(&self) -> Vec<Column<'_>> {
        (0..self.len()).map(|i| self.get(i)).collect()
    }

    /// Fills the 8-bit forms with nonsense, for kernels that say that they read none.
    pub(super) fn spoil(&mut self) {
        self.q.iter_mut().for_each(|q| q.fill(77));
        self.d.iter_mut().for_each(|d| d.fill(1e9));
        self.sums.iter_mut().for_each(|s| s.fill(777));
        self.scaled_sums.iter_mut().for_each(|s| s.fill(1e9));
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
