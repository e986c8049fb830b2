//! Rows of fp32, fp16 and bf16 times fp32 columns.
//!
//! ```text
//! for each part of the columns that fits the first-level cache, for each R rows:
//!     widen the weights of the part to fp32, once
//!     for each tile of N columns: R × N sums in registers, each LEN partial sums
//! ```
//!
//! Deviations:
//! 1. One or two columns (decode) need no widened copy: weights go from memory to registers, two
//!    rows at a time, two partial sums each: more of either read memory more slowly.
//! 2. R × N is 3 × 4 with 256 bits: seven loads for twelve multiply-adds, in the sixteen
//!    registers there are. With AVX-512 it is 6 × 4.
//! 3. Weights of fp32 are not copied.
//! 4. Where there are tiles, twelve columns of fp16 or bf16 or more use them: see [`amx`].

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of a loop that needs its instruction set and checked lengths"
)]

mod amx;

use crate::Level;
use crate::lanes::{Eight, Lanes, Sixteen};
use myq_blocks::{Column, DType, MAX_COLUMNS, Rows, f16};
use std::arch::x86_64::*;

/// Most weights of a row in a part: four columns and six rows of it take 40 KiB.
const PART: usize = 1024;

/// A float format. Pointers must be readable for the weights named.
trait Float: Copy {
    /// Bytes of a weight.
    const BYTES: usize;
    /// A vector of weights.
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V;
    /// One weight.
    unsafe fn one(p: *const u8) -> f32;
}

#[derive(Clone, Copy)]
enum F32 {}
#[derive(Clone, Copy)]
enum F16 {}
#[derive(Clone, Copy)]
enum Bf16 {}

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V {
        L::load(p.cast())
    }
    #[inline(always)]
    unsafe fn one(p: *const u8) -> f32 {
        p.cast::<f32>().read_unaligned()
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V {
        L::load_f16(p.cast())
    }
    #[inline(always)]
    unsafe fn one(p: *const u8) -> f32 {
        p.cast::<f16>().read_unaligned().to_f32()
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V {
        L::load_bf16(p.cast())
    }
    #[inline(always)]
    unsafe fn one(p: *const u8) -> f32 {
        f32::from_bits(u32::from(p.cast::<u16>().read_unaligned()) << 16)
    }
}

/// Products of all rows with all columns.
///
/// # Panics
/// If the format is none of floats, or a column or an output is too short.
pub(crate) fn matmul(level: Level, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    assert!(
        columns.len() <= MAX_COLUMNS && columns.len() == out.len(),
        "columns of a call"
    );
    for (c, out) in columns.iter().zip(out.iter()) {
        assert!(
            c.x.len() == w.cols() && out.len() >= w.rows(),
            "the lengths of a column"
        );
    }
    // SAFETY: a `Level` is made where the processor has its instructions; lengths are checked.
    unsafe {
        match level {
            Level::Amx if w.dtype() != DType::F32 && columns.len() >= amx::FEWEST => {
                tiles(w, columns, out);
            }
            Level::Avx512 | Level::Amx => avx512(w, columns, out),
            _ => avx2(w, columns, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    match w.dtype() {
        DType::F32 => all::<F32, Eight, 3>(w, columns, out),
        DType::F16 => all::<F16, Eight, 3>(w, columns, out),
        DType::BF16 => all::<Bf16, Eight, 3>(w, columns, out),
        other => unreachable!("{} is no float", other.name()),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn avx512(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    match w.dtype() {
        DType::F32 => all::<F32, Sixteen, 6>(w, columns, out),
        DType::F16 => all::<F16, Sixteen, 6>(w, columns, out),
        DType::BF16 => all::<Bf16, Sixteen, 6>(w, columns, out),
        other => unreachable!("{} is no float", other.name()),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tiles(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    match w.dtype() {
        DType::F16 => amx::matmul::<F16>(w, columns, out),
        DType::BF16 => amx::matmul::<Bf16>(w, columns, out),
        other => unreachable!("{} has no planes", other.name()),
    }
}

/// Bytes between what is multiplied and what is asked for.
const AHEAD: usize = 3072;

/// Rows up to `MOST` at a time.
#[inline(always)]
unsafe fn all<F: Float, L: Lanes, const MOST: usize>(
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    let cols = w.cols();
    let parts = if columns.len() > 2 {
        cols.div_ceil(PART)
    } else {
        1
    };
    // Parts of about the same length, each whole vectors but for the last.
    let len = cols.div_ceil(parts).next_multiple_of(16);
    for from in (0..cols).step_by(len) {
        let part = (from, len.min(cols - from));
        let mut r = 0;
        while r < w.rows() {
            let left = w.rows() - r;
            r += match columns.len() {
                1 if left >= 2 => straight::<F, L, 2, 1, 2>(w, r, columns, out),
                1 => straight::<F, L, 1, 1, 4>(w, r, columns, out),
                2 if left >= 2 => straight::<F, L, 2, 2, 2>(w, r, columns, out),
                2 => straight::<F, L, 1, 2, 2>(w, r, columns, out),
                _ if MOST == 6 && left >= 6 => widened::<F, L, 6>(w, r, part, columns, out),
                // Four are two twos: a single row would leave half of the time unused.
                _ if left == 3 || left >= 5 => widened::<F, L, 3>(w, r, part, columns, out),
                _ if left >= 2 => widened::<F, L, 2>(w, r, part, columns, out),
                _ => widened::<F, L, 1>(w, r, part, columns, out),
            };
        }
    }
}

/// `R` rows with `N` columns, `S` partial sums each, without a copy; gives R.
#[inline(always)]
unsafe fn straight<F: Float, L: Lanes, const R: usize, const N: usize, const S: usize>(
    w: Rows<'_>,
    first: usize,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) -> usize {
    let cols = w.cols();
    let mut rows = [std::ptr::null(); R];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = w.row(first + r).as_ptr();
    }
    let mut total = [[[L::zero(); S]; N]; R];
    let mut at = 0;
    while at + S * L::LEN <= cols {
        for row in rows {
            // Rows follow one another, so that what lies behind this one is wanted too.
            let p = row.wrapping_add(at * F::BYTES + AHEAD);
            for line in (0..S * L::LEN * F::BYTES).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(line).cast());
            }
        }
        for s in 0..S {
            step::<F, L, R, N, S>(rows, columns, at + s * L::LEN, s, &mut total);
        }
        at += S * L::LEN;
    }
    while at + L::LEN <= cols {
        step::<F, L, R, N, S>(rows, columns, at, 0, &mut total);
        at += L::LEN;
    }
    for r in 0..R {
        for n in 0..N {
            let mut all = total[r][n][0];
            for part in &total[r][n][1..] {
                all = L::add(all, *part);
            }
            let mut sum = L::sum(all);
            for i in at..cols {
                sum += F::one(rows[r].add(i * F::BYTES)) * columns[n].x[i];
            }
            out[n][first + r] = sum;
        }
    }
    R
}

/// A vector of weights of each row with those values of each column.
#[inline(always)]
unsafe fn step<F: Float, L: Lanes, const R: usize, const N: usize, const S: usize>(
    rows: [*const u8; R],
    columns: &[Column<'_>],
    at: usize,
    s: usize,
    total: &mut [[[L::V; S]; N]; R],
) {
    for r in 0..R {
        let v = F::load::<L>(rows[r].add(at * F::BYTES));
        for n in 0..N {
            let x = L::load(columns[n].x.as_ptr().add(at));
            total[r][n][s] = L::fma(v, x, total[r][n][s]);
        }
    }
}

/// A copy of weights, whose vectors cross no lines of the cache.
#[repr(align(64))]
struct Aligned<const R: usize>([[std::mem::MaybeUninit<f32>; PART]; R]);

/// `R` rows with all columns in a part of their length; gives R.
#[inline(always)]
unsafe fn widened<F: Float, L: Lanes, const R: usize>(
    w: Rows<'_>,
    first: usize,
    (from, len): (usize, usize),
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) -> usize {
    let mut buffer = Aligned([[std::mem::MaybeUninit::<f32>::uninit(); PART]; R]);
    let copies = buffer.0.as_mut_ptr().cast::<f32>();
    // Copies lie behind each other, so that they take different lines of the cache.
    let stride = len.next_multiple_of(16);
    let mut rows = [std::ptr::null::<f32>(); R];
    for (r, row) in rows.iter_mut().enumerate() {
        let bytes = w.row(first + r)[from * F::BYTES..(from + len) * F::BYTES].as_ptr();
        *row = if F::BYTES == 4 {
            bytes.cast()
        } else {
            // Within the buffer: stride ≤ PART.
            let copy = copies.add(r * stride);
            widen::<F, L>(bytes, len, copy);
            copy
        };
    }
    let mut c = 0;
    while c < columns.len() {
        let (x, out) = (&columns[c..], &mut out[c..]);
        let at = (first, from, len);
        c += match columns.len() - c {
            4 | 7.. => tile::<L, R, 4>(rows, x, at, out),
            3 | 5.. => tile::<L, R, 3>(rows, x, at, out),
            2 => tile::<L, R, 2>(rows, x, at, out),
            _ => tile::<L, R, 1>(rows, x, at, out),
        };
    }
    R
}

/// `len` weights as fp32.
#[inline(always)]
unsafe fn widen<F: Float, L: Lanes>(weights: *const u8, len: usize, to: *mut f32) {
    let mut i = 0;
    while i + L::LEN <= len {
        L::store(F::load::<L>(weights.add(i * F::BYTES)), to.add(i));
        i += L::LEN;
    }
    while i < len {
        to.add(i).write(F::one(weights.add(i * F::BYTES)));
        i += 1;
    }
}

/// `R` rows with `N` columns; gives N. `at`: first row, first weight, weights.
#[inline(always)]
unsafe fn tile<L: Lanes, const R: usize, const N: usize>(
    rows: [*const f32; R],
    columns: &[Column<'_>],
    (first, from, len): (usize, usize, usize),
    out: &mut [&mut [f32]],
) -> usize {
    let mut x = [std::ptr::null(); N];
    for (x, c) in x.iter_mut().zip(columns) {
        *x = c.x[from..from + len].as_ptr();
    }
    let mut total = [[L::zero(); 4]; R];
    let mut i = 0;
    while i + L::LEN <= len {
        // The fewer ones stay in registers for the others.
        if R < N {
            let mut w = [L::zero(); R];
            for (w, row) in w.iter_mut().zip(rows) {
                *w = L::load(row.add(i));
            }
            for (n, x) in x.into_iter().enumerate() {
                let v = L::load(x.add(i));
                for (total, w) in total.iter_mut().zip(w) {
                    total[n] = L::fma(w, v, total[n]);
                }
            }
        } else {
            let mut v = [L::zero(); N];
            for (v, x) in v.iter_mut().zip(x) {
                *v = L::load(x.add(i));
            }
            for (total, row) in total.iter_mut().zip(rows) {
                let w = L::load(row.add(i));
                for (total, v) in total.iter_mut().zip(v) {
                    *total = L::fma(w, v, *total);
                }
            }
        }
        i += L::LEN;
    }
    let mut sums = [[0.0f32; 4]; R];
    for (sums, total) in sums.iter_mut().zip(total) {
        _mm_storeu_ps(sums.as_mut_ptr(), L::sums(total));
    }
    while i < len {
        for (sums, row) in sums.iter_mut().zip(rows) {
            let w = row.add(i).read_unaligned();
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum += w * *x.add(i);
            }
        }
        i += 1;
    }
    for (n, out) in out.iter_mut().take(N).enumerate() {
        let place = &mut out[first..first + R];
        for (out, sums) in place.iter_mut().zip(sums) {
            *out = if from == 0 { sums[n] } else { *out + sums[n] };
        }
    }
    N
}
