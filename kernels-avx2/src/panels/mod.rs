//! Panels of eight rows times columns (see `myq_blocks::panels`).
//!
//! ```text
//! for each panel (or two), for each chunk:
//!     scales of the chunk
//!     for each group of 32 weights:
//!         codes = eight vectors, unpacked once
//!         for each column:
//!             products = Σ over quads of codes · activations      32-bit lanes, one a row
//!             total   += activation scale · scale · fp32(products) − offset · sums
//! ```
//!
//! A lane of a vector is a row, so that activations are broadcast by the load unit, scales are
//! vectors as they lie in memory, and no sum crosses lanes.
//!
//! Bounds: sums of 32 products are at most 32·255·127 = 1,036,320, exact in fp32; with
//! sub-scales (AVX2, Q6_K) 32·63·127·128 < 2^25, rounded once. Offsets of sixteens are at most
//! 4,096 and sums of 16 codes at most 2,032: two products are below 2^24.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of one loop that needs its instruction set and checked lengths"
)]

mod formats;
mod isa;

use crate::Level;
use formats::{Dense, Format, Sixteens, Thirties, WithMinimum};
use isa::Isa;
use myq_blocks::panels::{PANEL, chunk_bytes, head_bytes};
use myq_blocks::{Column, DType, MAX_COLUMNS, Rows};

/// Products of the panels of `w` with all columns; rows behind the panels are left out.
///
/// # Panics
/// If a column or an output is too short.
pub(crate) fn matmul(level: Level, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    let padded = w.cols().next_multiple_of(256);
    assert!(
        columns.len() <= MAX_COLUMNS && columns.len() == out.len(),
        "columns of a call"
    );
    for (c, out) in columns.iter().zip(out.iter()) {
        let groups = padded / 32;
        assert!(
            c.q.len() >= padded
                && c.d.len() >= groups
                && c.scaled_sums.len() >= groups
                && c.sums.len() >= 2 * groups
                && out.len() >= w.rows(),
            "the lengths of a column"
        );
    }
    // SAFETY: a `Level` is made where the processor has its instructions; lengths are checked.
    unsafe {
        match level {
            Level::Avx2 => avx2(w, columns, out),
            Level::AvxVnni => avx_vnni(w, columns, out),
            Level::Avx512 => avx512(w, columns, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    by_format::<isa::Avx2, isa::Avx2>(w, columns, out)
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn avx_vnni(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    by_format::<isa::AvxVnni, isa::AvxVnni>(w, columns, out)
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn avx512(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    by_format::<isa::Avx512, isa::Avx512Half>(w, columns, out)
}

/// `S` takes `S::PANELS` panels at a time, `T` one that is left.
#[inline(always)]
unsafe fn by_format<S: Isa, T: Isa>(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    match w.dtype() {
        DType::Q2K => all::<S, T, _>(formats::Q2K, w, columns, out),
        DType::Q3K => all::<S, T, _>(formats::Q3K, w, columns, out),
        DType::Q4K => all::<S, T, _>(formats::Q4K, w, columns, out),
        DType::Q5K => all::<S, T, _>(formats::Q5K, w, columns, out),
        DType::Q6K => all::<S, T, _>(formats::Q6K, w, columns, out),
        DType::Tq2_0 => all::<S, T, _>(formats::Tq2, w, columns, out),
        DType::Q4_0 => all::<S, T, _>(formats::Q4_0, w, columns, out),
        DType::Q5_0 => all::<S, T, _>(formats::Q5_0, w, columns, out),
        DType::Q8_0 => all::<S, T, _>(formats::Q8_0, w, columns, out),
        DType::Iq4Nl => all::<S, T, _>(formats::Iq4Nl, w, columns, out),
        DType::Q4_1 => all::<S, T, _>(WithMinimum::<0>, w, columns, out),
        DType::Q5_1 => all::<S, T, _>(WithMinimum::<1>, w, columns, out),
        DType::Linear(l) => match l.bits() {
            2 => all::<S, T, _>(Dense::<2, 0>(l), w, columns, out),
            3 => all::<S, T, _>(Dense::<2, 1>(l), w, columns, out),
            5 => all::<S, T, _>(Dense::<4, 1>(l), w, columns, out),
            _ => all::<S, T, _>(Dense::<4, 2>(l), w, columns, out),
        },
        DType::F32 | DType::F16 | DType::BF16 | DType::Tq1_0 => {
            unreachable!("formats without panels")
        }
    }
}

/// All panels. Kept out of line: one function for each format and instruction set.
#[inline(always)]
unsafe fn all<S: Isa, T: Isa, F: Format>(
    f: F,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    let (n, bytes) = (w.panels(), PANEL * w.row_bytes());
    let whole = n / S::PANELS * S::PANELS;
    for p in (0..whole).step_by(S::PANELS) {
        some::<S, F>(
            f,
            w.panel(p).as_ptr(),
            bytes,
            w.cols(),
            columns,
            out,
            PANEL * p,
        );
    }
    for p in whole..n {
        some::<T, F>(
            f,
            w.panel(p).as_ptr(),
            bytes,
            w.cols(),
            columns,
            out,
            PANEL * p,
        );
    }
}

/// `S::PANELS` panels, `stride` bytes apart, whose first row is `at`.
#[inline(always)]
unsafe fn some<S: Isa, F: Format>(
    f: F,
    panel: *const u8,
    stride: usize,
    cols: usize,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
    at: usize,
) {
    if let [column] = columns {
        let mut total = [S::zero(); 1];
        chunks::<S, F, 1>(
            f,
            panel,
            stride,
            cols,
            std::array::from_ref(column),
            &mut total,
        );
        S::store(total[0], out[0][at..at + PANEL * S::PANELS].as_mut_ptr());
        return;
    }
    let mut total = [S::zero(); MAX_COLUMNS];
    chunks::<S, F, MAX_COLUMNS>(f, panel, stride, cols, columns, &mut total);
    for (out, total) in out.iter_mut().zip(&total) {
        S::store(*total, out[at..at + PANEL * S::PANELS].as_mut_ptr());
    }
}

/// What one group of a column gives to a product.
#[derive(Clone, Copy)]
struct Acts {
    q: *const u8,
    d: *const f32,
    sums: *const u8,
    scaled_sums: *const f32,
}

impl Acts {
    /// Group `g` of a column; its slices have been checked to reach so far.
    #[inline(always)]
    unsafe fn new(c: &Column<'_>, g: usize) -> Acts {
        Acts {
            q: c.q.as_ptr().add(32 * g).cast(),
            d: c.d.as_ptr().add(g),
            sums: c.sums.as_ptr().add(2 * g).cast(),
            scaled_sums: c.scaled_sums.as_ptr().add(g),
        }
    }
}

/// All chunks of a panel with up to `N` columns.
#[inline(always)]
unsafe fn chunks<S: Isa, F: Format, const N: usize>(
    f: F,
    panel: *const u8,
    stride: usize,
    cols: usize,
    columns: &[Column<'_>],
    total: &mut [S::F; N],
) {
    let step = chunk_bytes(f.dtype(), 8);
    let (whole, rest) = (cols / 256, cols % 256 / 32);
    for i in 0..whole {
        chunk::<S, F, N>(f, panel.add(step * i), stride, 8, 8 * i, columns, total);
    }
    if rest > 0 {
        chunk::<S, F, N>(
            f,
            panel.add(step * whole),
            stride,
            rest,
            8 * whole,
            columns,
            total,
        );
    }
}

/// One chunk of `groups` groups; `first` is the number of its first group in the row.
#[inline(always)]
unsafe fn chunk<S: Isa, F: Format, const N: usize>(
    f: F,
    p: *const u8,
    stride: usize,
    groups: usize,
    first: usize,
    columns: &[Column<'_>],
    total: &mut [S::F; N],
) {
    let group_bytes = 32 * (F::LOW + F::HIGH) as usize;
    let codes_at = p.add(head_bytes(f.dtype(), groups));
    let (zero, none) = (S::zero(), S::splat(0));
    if F::SIXTEENS {
        let mut scales = Sixteens::<S> {
            d: zero,
            m: zero,
            scales: [none; 8],
            offsets: [none; 8],
        };
        f.sixteens(p, stride, groups, &mut scales);
        let mut parts = [(zero, zero); N];
        for g in 0..groups {
            let codes = f.codes::<S>(codes_at.add(group_bytes * g), stride);
            let (pair, offsets) = (S::pair(scales.scales[g]), scales.offsets[g]);
            for (c, (d, m)) in columns.iter().zip(&mut parts) {
                let a = Acts::new(c, first + g);
                let scale = S::splat_f(*a.d);
                let dot = S::dot_pair(&codes, a.q, pair, F::BITS);
                let minima = S::float(S::madd(offsets, S::all(a.sums)));
                if F::OWN_MINIMA {
                    *d = S::fma(dot, scale, *d);
                    *m = S::fma(minima, scale, *m);
                } else {
                    *d = S::fma(S::sub(dot, minima), scale, *d);
                }
            }
        }
        for ((d, m), total) in parts.iter().zip(total).take(columns.len()) {
            *total = S::fma(scales.d, *d, *total);
            if F::OWN_MINIMA {
                *total = S::fnma(scales.m, *m, *total);
            }
        }
    } else {
        let mut scales = Thirties::<S> {
            scales: [zero; 8],
            offsets: [zero; 8],
        };
        f.thirties(p, stride, groups, &mut scales);
        for g in 0..groups {
            let codes = f.codes::<S>(codes_at.add(group_bytes * g), stride);
            let (scale, offset) = (scales.scales[g], scales.offsets[g]);
            for (c, total) in columns.iter().zip(total.iter_mut()) {
                let a = Acts::new(c, first + g);
                let dot = if F::SIGNED {
                    S::dot_signed(&codes, a.q)
                } else {
                    S::dot(&codes, a.q, F::BITS)
                };
                let dot = S::mul(S::float(dot), scale);
                *total = S::fma(dot, S::splat_f(*a.d), *total);
                if F::OFFSETS || F::SIGNED && !S::SIGNED {
                    *total = S::fnma(offset, S::splat_f(*a.scaled_sums), *total);
                }
            }
        }
    }
}
