//! Activation columns: the fp32 values and their 8-bit form, which kernels multiply.
//!
//! One scale for each 32 values serves every weight format. That costs a multiply-add per
//! 32 weights more than one scale per 256 and takes most of the rounding error of wide
//! superblock formats away (docs/decisions/0003-activations.md).

use crate::layout::SUPER;

/// Values that share a scale.
pub const GROUP: usize = 32;

/// One activation vector. `q`, `d` and `sums` are padded with zeros to whole superblocks:
/// value i is about `d[i/32] · q[i]`.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a> {
    /// The values, `cols` of them.
    pub x: &'a [f32],
    /// Codes −127 … 127, `cols` rounded up to a multiple of 256.
    pub q: &'a [i8],
    /// Scale of each 32 codes.
    pub d: &'a [f32],
    /// Sum of each 16 codes.
    pub sums: &'a [i16],
    /// Sum of each 32 codes times their scale: what meets minima and offsets.
    pub scaled_sums: &'a [f32],
}

/// The quantised parts of a [`Column`], to be written.
#[derive(Debug)]
pub struct ColumnMut<'a> {
    /// Codes.
    pub q: &'a mut [i8],
    /// Scale of each 32 codes.
    pub d: &'a mut [f32],
    /// Sum of each 16 codes.
    pub sums: &'a mut [i16],
    /// `d[i] · (sums[2i] + sums[2i + 1])`.
    pub scaled_sums: &'a mut [f32],
}

impl Column<'_> {
    /// A column of no values.
    pub const EMPTY: Column<'static> = Column {
        x: &[],
        q: &[],
        d: &[],
        sums: &[],
        scaled_sums: &[],
    };
}

impl ColumnMut<'_> {
    /// The same column, for a shorter time.
    pub fn reborrow(&mut self) -> ColumnMut<'_> {
        ColumnMut {
            q: self.q,
            d: self.d,
            sums: self.sums,
            scaled_sums: self.scaled_sums,
        }
    }

    /// `x` less what the codes stand for, into `rest`; both of the column's length.
    pub fn residual(&self, x: &[f32], rest: &mut [f32]) {
        let groups = x.chunks(GROUP).zip(rest.chunks_mut(GROUP));
        for (((x, rest), q), &d) in groups.zip(self.q.chunks(GROUP)).zip(self.d.iter()) {
            for ((rest, x), &q) in rest.iter_mut().zip(x).zip(q) {
                *rest = x - d * f32::from(q);
            }
        }
    }

    /// Writes `scaled_sums` from `d` and `sums`.
    pub fn scale_sums(&mut self) {
        let sums = self.sums.as_chunks::<2>().0;
        for ((out, [a, b]), d) in self.scaled_sums.iter_mut().zip(sums).zip(self.d.iter()) {
            *out = d * f32::from(a + b);
        }
    }
}

/// Room for the quantised form of `columns` vectors of up to `cols` values.
#[derive(Debug)]
pub struct ActBuffer {
    padded: usize,
    q: Vec<i8>,
    d: Vec<f32>,
    sums: Vec<i16>,
    scaled_sums: Vec<f32>,
}

impl ActBuffer {
    /// Allocates once; later calls only slice.
    pub fn new(columns: usize, cols: usize) -> ActBuffer {
        let padded = cols.next_multiple_of(SUPER);
        ActBuffer {
            padded,
            q: vec![0; columns * padded],
            d: vec![0.0; columns * padded / GROUP],
            sums: vec![0; columns * padded / 16],
            scaled_sums: vec![0.0; columns * padded / GROUP],
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.q.len() + 4 * (self.d.len() + self.scaled_sums.len()) + 2 * self.sums.len()
    }

    /// Column `i` with its first `cols` values taken from `x`.
    pub fn column<'a>(&'a self, i: usize, x: &'a [f32]) -> Column<'a> {
        let n = x.len().next_multiple_of(SUPER);
        let at = i * self.padded;
        Column {
            x,
            q: &self.q[at..at + n],
            d: &self.d[at / GROUP..(at + n) / GROUP],
            sums: &self.sums[at / 16..(at + n) / 16],
            scaled_sums: &self.scaled_sums[at / GROUP..(at + n) / GROUP],
        }
    }

    /// Column `i`, to be written for a vector of `cols` values.
    pub fn column_mut(&mut self, i: usize, cols: usize) -> ColumnMut<'_> {
        self.columns_mut(cols)
            .nth(i)
            .expect("column within the buffer")
    }

    /// Every column, to be written for vectors of `cols` values.
    pub fn columns_mut(&mut self, cols: usize) -> impl Iterator<Item = ColumnMut<'_>> {
        let n = cols.next_multiple_of(SUPER);
        let p = self.padded;
        self.q
            .chunks_mut(p)
            .zip(self.d.chunks_mut(p / GROUP))
            .zip(self.sums.chunks_mut(p / 16))
            .zip(self.scaled_sums.chunks_mut(p / GROUP))
            .map(move |(((q, d), sums), scaled_sums)| ColumnMut {
                q: &mut q[..n],
                d: &mut d[..n / GROUP],
                sums: &mut sums[..n / 16],
                scaled_sums: &mut scaled_sums[..n / GROUP],
            })
    }
}
