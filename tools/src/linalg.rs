//! Products and factorisations of fp32 matrices, the same to the bit on any number of threads.
//!
//! faer multiplies tiles of a fixed size in one thread each; rayon hands the tiles out. So no
//! sum depends on how many threads there are. All matrices are row-major.

use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::cholesky::llt::factor::{LltParams, LltRegularization};
use faer::linalg::cholesky::llt::factor::{cholesky_in_place, cholesky_in_place_scratch};
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par, Spec};
use rayon::prelude::*;

/// Rows of a tile of a product.
const TILE: usize = 128;
/// Columns of a tile of a product with far more columns than rows: the other factor, which is the
/// larger one, is then packed once and not for each tile.
const WIDE: usize = 512;

/// `data` as a matrix of rows of `cols` values.
pub fn matrix(data: &[f32], cols: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(data, data.len() / cols, cols)
}

/// See [`matrix`].
pub fn matrix_mut(data: &mut [f32], cols: usize) -> MatMut<'_, f32> {
    MatMut::from_row_major_slice_mut(data, data.len() / cols, cols)
}

/// `out = a · b` in the calling thread.
pub fn multiply(out: MatMut<'_, f32>, a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    matmul(out, Accum::Replace, a, b, 1.0, Par::Seq);
}

/// `out += factor · a · b` in the calling thread.
pub fn multiply_add(out: MatMut<'_, f32>, a: MatRef<'_, f32>, b: MatRef<'_, f32>, factor: f32) {
    matmul(out, Accum::Add, a, b, factor, Par::Seq);
}

/// `out = a · b` in tiles that do not depend on the number of threads.
fn product(out: &mut [f32], a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    let (rows, cols) = (a.nrows(), b.ncols());
    if cols > 4 * rows {
        let mut tiles = Vec::with_capacity(cols.div_ceil(WIDE));
        let mut rest = matrix_mut(out, cols);
        while rest.ncols() > 0 {
            let wide = WIDE.min(rest.ncols());
            let (tile, behind) = rest.split_at_col_mut(wide);
            tiles.push(tile);
            rest = behind;
        }
        tiles.into_par_iter().enumerate().for_each(|(i, out)| {
            let b = b.subcols(i * WIDE, out.ncols());
            multiply(out, a, b);
        });
    } else {
        let tiles = out.par_chunks_mut(TILE * cols);
        tiles.enumerate().for_each(|(i, out)| {
            let out = matrix_mut(out, cols);
            let a = a.subrows(i * TILE, out.nrows());
            multiply(out, a, b);
        });
    }
}

/// Each row of `x` through a linear layer: `out = x · wᵀ`, `w` rows × `cols`.
pub fn linear(x: &[f32], w: &[f32], cols: usize, out: &mut [f32]) {
    product(out, matrix(x, cols), matrix(w, cols).transpose());
}

/// Back through a linear layer: `by · w`, tokens × `cols`, from the gradient `by` of its output.
pub fn linear_back(by: &[f32], w: &[f32], cols: usize) -> Vec<f32> {
    let rows = w.len() / cols;
    let mut out = vec![0.0; by.len() / rows * cols];
    product(&mut out, matrix(by, rows), matrix(w, cols));
    out
}

/// `sum += aᵀ · a` for rows of `n` values, on and above the diagonal blocks.
pub fn add_gram(a: &[f32], n: usize, sum: &mut [f32]) {
    let a = matrix(a, n);
    sum.par_chunks_mut(TILE * n)
        .enumerate()
        .for_each(|(i, sum)| {
            let (first, rows) = (i * TILE, sum.len() / n);
            let left = a.subcols(first, rows).transpose();
            let out = matrix_mut(sum, n).subcols_mut(first, n - first);
            multiply_add(out, left, a.subcols(first, n - first), 1.0);
        });
}

/// `sum += aᵀ · b` for rows of any width in `a` and of `n` values in `b`.
pub fn add_cross(a: &[f32], b: &[f32], n: usize, sum: &mut [f32]) {
    let (a, b) = (matrix(a, sum.len() / n), matrix(b, n));
    sum.par_chunks_mut(TILE * n)
        .enumerate()
        .for_each(|(i, sum)| {
            let left = a.subcols(i * TILE, sum.len() / n).transpose();
            multiply_add(matrix_mut(sum, n), left, b, 1.0);
        });
}

/// Copies what is above the diagonal below it.
pub fn mirror(h: &mut [f32], n: usize) {
    for i in 1..n {
        let (above, row) = h.split_at_mut(i * n);
        for (j, x) in row[..i].iter_mut().enumerate() {
            *x = above[j * n + i];
        }
    }
}

/// The lower Cholesky factor in place of a symmetric matrix, of which the lower triangle is
/// read; what is above the diagonal stays. `false` where the matrix is not positive definite.
pub fn cholesky(a: &mut [f32], n: usize) -> bool {
    let params = Spec::<LltParams, f32>::default();
    let mut memory = MemBuffer::new(cholesky_in_place_scratch::<f32>(n, Par::Seq, params));
    let outcome = cholesky_in_place(
        matrix_mut(a, n),
        LltRegularization::default(),
        Par::Seq,
        MemStack::new(&mut memory),
        params,
    );
    // Rounding can leave a pivot that is positive and still nonsense.
    outcome.is_ok() && (0..n).all(|i| a[i * n + i].is_normal())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    #[test]
    fn a_linear_layer_is_the_plain_sum_on_any_number_of_threads() {
        let (tokens, cols, rows) = (300, 40, 70);
        let (x, w) = (numbers(tokens * cols, 1), numbers(rows * cols, 2));
        let mut outs = Vec::new();
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let mut out = vec![0.0; tokens * rows];
            pool.expect("threads")
                .install(|| linear(&x, &w, cols, &mut out));
            outs.push(out);
        }
        assert_eq!(outs[0], outs[1]);
        assert_eq!(outs[0], outs[2]);
        for (t, r) in [(0, 0), (17, 69), (299, 33)] {
            let want: f64 = (0..cols)
                .map(|c| f64::from(x[t * cols + c]) * f64::from(w[r * cols + c]))
                .sum();
            assert!((f64::from(outs[0][t * rows + r]) - want).abs() < 1e-5);
        }
    }

    #[test]
    fn a_gram_matrix_is_the_sum_of_outer_products() {
        let (tokens, n) = (50, 300);
        let (a, b) = (numbers(tokens * n, 3), numbers(tokens * n, 4));
        let mut half = vec![0.0; n * n];
        add_gram(&a, n, &mut half);
        mirror(&mut half, n);
        let (mut whole, mut cross) = (vec![0.0; n * n], vec![0.0; n * n]);
        add_cross(&a, &a, n, &mut whole);
        add_cross(&a, &b, n, &mut cross);
        for (i, j) in [(0, 0), (5, 299), (299, 5), (200, 130)] {
            let sum = |b: &[f32]| -> f64 {
                (0..tokens)
                    .map(|t| f64::from(a[t * n + i]) * f64::from(b[t * n + j]))
                    .sum()
            };
            assert!((f64::from(half[i * n + j]) - sum(&a)).abs() < 1e-4);
            assert!((f64::from(whole[i * n + j]) - sum(&a)).abs() < 1e-4);
            assert!((f64::from(cross[i * n + j]) - sum(&b)).abs() < 1e-4);
        }
    }

    #[test]
    fn cholesky_factors_what_is_positive_and_refuses_the_rest() {
        let n = 150;
        let x = numbers(2 * n * n, 5);
        let mut h = vec![0.0; n * n];
        add_cross(&x, &x, n, &mut h);
        let mut l = h.clone();
        assert!(cholesky(&mut l, n));
        for (i, j) in [(0, 0), (149, 3), (77, 77)] {
            let want: f32 = (0..=j).map(|k| l[i * n + k] * l[j * n + k]).sum();
            assert!((want - h[i * n + j]).abs() < 1e-3 * h[i * n + i]);
        }
        h[70 * n + 70] = -1.0;
        assert!(!cholesky(&mut h, n));
    }
}
