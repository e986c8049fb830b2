//! Matrix products: activations to 8 bits, rows split over the pool.
//!
//! With two planes the rounding error of the first 8-bit column becomes a second one, with
//! scales of its own, and the products of both are added: about 15 bits for each activation,
//! in one pass over the weights.

use std::ops::Range;
use std::sync::Mutex;

use myq_blocks::{ActBuffer, Column, Kernels, MAX_COLUMNS, Rows};
use myq_model::state::{PARTIAL_COLUMNS, PARTIAL_ROWS};
use myq_model::weights::{Matrix, Store};

use crate::cpu::Disjoint;
use crate::pool::Pool;

/// Rows of a matrix that one task multiplies at least, and a multiple of which it multiplies:
/// smaller pieces cost more in hand-out than they gain in balance, and panels are not cut.
const MIN_ROWS: usize = 16;
/// The same where they meet many tokens: as many panels as kernels take at once.
const MIN_ROWS_OF_PROMPTS: usize = 32;
/// Bytes of weights in a task that is worth handing out: memory is read faster in long pieces.
const TASK_BYTES: usize = 128 << 10;
/// The same where they meet many tokens: half of a small core's second-level cache, in which the
/// weights wait for the next columns.
const TASK_BYTES_OF_PROMPTS: usize = 256 << 10;
/// Rows that make a task of a prompt worth it, however long: columns are prepared, and come from
/// memory where they are long, once a task. 192 rows were 1.1 to 1.3 times as fast as 48.
const TASK_ROWS_OF_PROMPTS: usize = 192;
/// Fewer columns than this are quantised by the caller alone.
const SHARED_COLUMNS: usize = 4;

/// The input of matrices, and room for its 8-bit form.
pub(crate) struct Input<'a> {
    /// Tokens × cols.
    pub(crate) x: &'a [f32],
    pub(crate) cols: usize,
    /// 8-bit columns of a token: 1 or 2.
    pub(crate) planes: usize,
    pub(crate) codes: &'a mut ActBuffer,
    /// Threads × the longest column.
    pub(crate) residual: &'a mut [f32],
    /// Threads × `PARTIAL_COLUMNS` × `PARTIAL_ROWS`.
    pub(crate) partial: &'a mut [f32],
}

/// A matrix and where its product goes: tokens × rows.
pub(crate) struct Job<'a> {
    matrix: Option<Matrix>,
    out: Disjoint<'a>,
}

impl<'a> Job<'a> {
    pub(crate) const NONE: Job<'static> = Job {
        matrix: None,
        out: Disjoint::EMPTY,
    };

    pub(crate) fn new(matrix: &Matrix, out: &'a mut [f32]) -> Job<'a> {
        Job {
            matrix: Some(*matrix),
            out: Disjoint::new(out),
        }
    }
}

impl Input<'_> {
    /// Multiplies every token by the matrices of the jobs, at most three.
    pub(crate) fn multiply<K: Kernels>(
        &mut self,
        k: K,
        store: Store<'_>,
        pool: &mut Pool,
        jobs: &[Job<'_>],
    ) {
        let matrices = || jobs.iter().filter_map(|j| j.matrix.map(|m| (m, &j.out)));
        if matrices().any(|(m, _)| k.wants_codes(m.dtype)) {
            self.quantize(k, pool);
        }
        let tokens = self.x.len() / self.cols;
        // Rows per task, and the number of the first task of each matrix.
        let mut tasks = [(0usize, 0usize); 3];
        let mut total = 0;
        for ((m, _), t) in matrices().zip(&mut tasks) {
            let rows = rows_of_task(&m, pool.threads(), tokens);
            *t = (rows, total);
            total += m.rows.div_ceil(rows);
        }
        let partial = Disjoint::new(self.partial);
        let (codes, x, cols, planes) = (&*self.codes, self.x, self.cols, self.planes);
        let some = |range: Range<usize>, thread: usize| {
            for ((m, out), &(rows, first)) in matrices().zip(&tasks) {
                let here = |task: usize| (task.saturating_sub(first) * rows).min(m.rows);
                let rows = here(range.start)..here(range.end);
                if rows.is_empty() {
                    continue;
                }
                let product = Product {
                    w: m.view(store).slice(rows.clone()),
                    out,
                    first: rows.start,
                    stride: m.rows,
                    codes,
                    x,
                    cols,
                };
                if planes == 1 || !k.wants_codes(m.dtype) {
                    product.one_plane(k, planes);
                } else {
                    let size = PARTIAL_COLUMNS * PARTIAL_ROWS;
                    // SAFETY: each thread has a part of its own.
                    product.two_planes(k, unsafe { partial.part(thread * size, size) });
                }
            }
        };
        if tokens > MAX_COLUMNS {
            // Tasks are as large as caches like them.
            pool.run(total, &|task, thread| some(task..task + 1, thread));
        } else {
            pool.run_ranges(total, &some);
        }
    }

    /// The 8-bit form of every token.
    fn quantize<K: Kernels>(&mut self, k: K, pool: &mut Pool) {
        let (cols, planes) = (self.cols, self.planes);
        let tokens = self.x.len() / cols;
        let longest = self.residual.len() / pool.threads();
        let residual = Disjoint::new(self.residual);
        let columns = Mutex::new((self.x.chunks(cols), self.codes.columns_mut(cols)));
        let token = |_: usize, thread: usize| {
            // A lock allocates nothing, and is short beside a column.
            let next = columns.lock().ok().and_then(|mut c| {
                let (x, first) = (c.0.next()?, c.1.next()?);
                let second = if planes == 2 { c.1.next() } else { None };
                Some((x, first, second))
            });
            let Some((x, mut codes, second)) = next else {
                return;
            };
            k.quantize(x, codes.reborrow());
            if let Some(second) = second {
                // SAFETY: each thread has a part of its own.
                let rest = unsafe { residual.part(thread * longest, cols) };
                codes.residual(x, rest);
                k.quantize(rest, second);
            }
        };
        if tokens < SHARED_COLUMNS {
            (0..tokens).for_each(|t| token(t, 0));
        } else {
            pool.run(tokens, &token);
        }
    }
}

/// Rows of one task: enough weights to be worth handing out, and a few tasks for each thread.
fn rows_of_task(m: &Matrix, threads: usize, tokens: usize) -> usize {
    let fair = m.rows.div_ceil(threads * 4);
    let row = m.bytes() / m.rows;
    let (worth, least) = if tokens > MAX_COLUMNS {
        let worth = TASK_BYTES_OF_PROMPTS.div_ceil(row);
        (worth.max(TASK_ROWS_OF_PROMPTS), MIN_ROWS_OF_PROMPTS)
    } else {
        (TASK_BYTES.div_ceil(row), MIN_ROWS)
    };
    let rows = worth.min(fair).max(1);
    rows.next_multiple_of(least)
}

/// Some rows of a matrix times every token.
struct Product<'a> {
    w: Rows<'a>,
    out: &'a Disjoint<'a>,
    /// Number of the first row, and of all rows: where a token's values go.
    first: usize,
    stride: usize,
    codes: &'a ActBuffer,
    x: &'a [f32],
    cols: usize,
}

impl Product<'_> {
    fn tokens(&self) -> usize {
        self.x.len() / self.cols
    }

    /// Column `plane` of a token.
    fn column(&self, token: usize, plane: usize, planes: usize) -> Column<'_> {
        let x = &self.x[token * self.cols..(token + 1) * self.cols];
        self.codes.column(token * planes + plane, x)
    }

    /// Where the values of a token go.
    ///
    /// # Safety
    /// The caller holds no other reference to them.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    unsafe fn values(&self, token: usize) -> &mut [f32] {
        // SAFETY: these rows belong to this task alone; the rest is the caller's promise.
        unsafe {
            self.out
                .part(token * self.stride + self.first, self.w.rows())
        }
    }

    /// The first plane alone, [`MAX_COLUMNS`] tokens at a time.
    fn one_plane<K: Kernels>(&self, k: K, planes: usize) {
        if self.tokens() == 1 {
            // SAFETY: the only reference.
            return k.matmul(
                self.w,
                &[self.column(0, 0, planes)],
                &mut [unsafe { self.values(0) }],
            );
        }
        for token in (0..self.tokens()).step_by(MAX_COLUMNS) {
            let n = MAX_COLUMNS.min(self.tokens() - token);
            let mut columns = [Column::EMPTY; MAX_COLUMNS];
            let mut out: [&mut [f32]; MAX_COLUMNS] = std::array::from_fn(|_| Default::default());
            for i in 0..n {
                columns[i] = self.column(token + i, 0, planes);
                // SAFETY: one reference for each token.
                out[i] = unsafe { self.values(token + i) };
            }
            k.matmul(self.w, &columns[..n], &mut out[..n]);
        }
    }

    /// Both planes of a token side by side; the second goes to `partial` and is added.
    fn two_planes<K: Kernels>(&self, k: K, partial: &mut [f32]) {
        for start in (0..self.w.rows()).step_by(PARTIAL_ROWS) {
            let rows = start..self.w.rows().min(start + PARTIAL_ROWS);
            for token in (0..self.tokens()).step_by(PARTIAL_COLUMNS) {
                let tokens = token..self.tokens().min(token + PARTIAL_COLUMNS);
                self.both_planes(k, rows.clone(), tokens, partial);
            }
        }
    }

    /// As many rows and tokens as `partial` holds.
    fn both_planes<K: Kernels>(
        &self,
        k: K,
        rows: Range<usize>,
        tokens: Range<usize>,
        partial: &mut [f32],
    ) {
        let n = tokens.len();
        let mut columns = [Column::EMPTY; MAX_COLUMNS];
        let mut out: [&mut [f32]; MAX_COLUMNS] = std::array::from_fn(|_| Default::default());
        let parts = partial.chunks_exact_mut(PARTIAL_ROWS);
        for (i, (token, part)) in tokens.zip(parts).enumerate() {
            columns[2 * i] = self.column(token, 0, 2);
            columns[2 * i + 1] = self.column(token, 1, 2);
            // SAFETY: one reference for each token.
            out[2 * i] = unsafe { &mut self.values(token)[rows.clone()] };
            out[2 * i + 1] = &mut part[..rows.len()];
        }
        let w = self.w.slice(rows);
        k.matmul(w, &columns[..2 * n], &mut out[..2 * n]);
        for [a, b] in out.as_chunks_mut::<2>().0.iter_mut().take(n) {
            a.iter_mut().zip(b.iter()).for_each(|(a, b)| *a += b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use myq_blocks::scalar::Scalar;
    use myq_blocks::{DType, Layout, panels};

    /// A made-up but valid matrix, its bytes in both layouts.
    fn matrix(dtype: DType, rows: usize, cols: usize) -> (Vec<u8>, Vec<u8>) {
        let x: Vec<f32> = (0..rows * cols)
            .map(|i| ((i * 7919 + 13) % 257) as f32 / 128.0 - 1.0)
            .collect();
        let bytes = dtype.row_bytes(cols).expect("a length of the format");
        let mut plain = vec![0; rows * bytes];
        let method = myq_blocks::encode::Method::Round;
        myq_blocks::encode::encode_rows(dtype, method, cols, &x, None, &mut plain).expect("finite");
        let mut packed = plain.clone();
        let panel = panels::PANEL * bytes;
        for (from, to) in plain
            .chunks_exact(panel)
            .zip(packed.chunks_exact_mut(panel))
        {
            panels::pack(dtype, cols, from, to);
        }
        (plain, packed)
    }

    fn product<K: Kernels>(
        k: K,
        m: Matrix,
        file: &[u8],
        x: &[f32],
        (threads, planes): (usize, usize),
    ) -> Vec<f32> {
        let tokens = x.len() / m.cols;
        let mut out = vec![f32::NAN; tokens * m.rows];
        let mut pool = Pool::new(threads).expect("threads");
        let mut input = Input {
            x,
            cols: m.cols,
            planes,
            codes: &mut ActBuffer::new(tokens * planes, m.cols),
            residual: &mut vec![0.0; threads * m.cols],
            partial: &mut vec![0.0; threads * PARTIAL_COLUMNS * PARTIAL_ROWS],
        };
        let job = [Job::new(&m, &mut out)];
        input.multiply(k, Store::of_file(file), &mut pool, &job);
        out
    }

    #[test]
    fn threads_layouts_and_odd_shapes_change_nothing() {
        let best = kernels_avx2::Avx2::new();
        for (rows, cols) in [
            (1, 256),
            (7, 288),
            (13, 576),
            (37, 64),
            (77, 320),
            (130, 96),
        ] {
            for dtype in [DType::Q2K, DType::Q4K, DType::Q6K, DType::Q8_0] {
                let (plain, packed) = matrix(dtype, rows, cols);
                let layout = |l| Matrix::at_start(dtype, cols, rows, l);
                for tokens in [1, 3, 21] {
                    let x: Vec<f32> = (0..tokens * cols)
                        .map(|i| (i as f32 * 0.37).sin())
                        .collect();
                    let want = product(Scalar, layout(Layout::Plain), &plain, &x, (1, 1));
                    for threads in 1..=9 {
                        let got = product(Scalar, layout(Layout::Plain), &plain, &x, (threads, 1));
                        assert_eq!(got, want, "{rows}×{cols}, {threads} threads");
                    }
                    let Some(k) = best else { continue };
                    let one = product(k, layout(Layout::Rows8), &packed, &x, (1, 1));
                    for threads in 2..=9 {
                        let got = product(k, layout(Layout::Rows8), &packed, &x, (threads, 1));
                        assert_eq!(got, one, "{rows}×{cols} in panels, {threads} threads");
                    }
                    let size = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    let close = |a: &[f32], b: &[f32], share: f32| {
                        a.iter().zip(b).all(|(a, b)| (a - b).abs() <= share * size)
                    };
                    assert!(
                        close(&one, &want, 1e-5),
                        "{rows}×{cols} of {}",
                        dtype.name()
                    );
                }
            }
        }
    }

    /// The second plane takes the rounding of the first away.
    #[test]
    fn two_planes_are_a_hundred_times_closer() {
        let (rows, cols, tokens) = (40, 576, 5);
        let x: Vec<f32> = (0..tokens * cols)
            .map(|i| (i as f32 * 0.71).sin())
            .collect();
        let (plain, _) = matrix(DType::Q4K, rows, cols);
        let m = Matrix::at_start(DType::Q4K, cols, rows, Layout::Plain);
        let exact = product(myq_blocks::scalar::Exact, m, &plain, &x, (2, 1));
        let off = |planes| {
            let got = product(Scalar, m, &plain, &x, (2, planes));
            let errors = got
                .iter()
                .zip(&exact)
                .map(|(a, b)| f64::from(a - b).powi(2));
            errors.sum::<f64>().sqrt()
        };
        let (one, two) = (off(1), off(2));
        assert!(two * 100.0 < one, "{one:e} and {two:e}");
    }
}
