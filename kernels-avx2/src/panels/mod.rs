//! Panels of eight rows times columns (see `myq_blocks::panels`).
//!
//! ```text
//! for each panel, or more at once, for each chunk:
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

mod amx;
mod chunks;
mod formats;
mod isa;
mod isa512;

use crate::Level;
use chunks::chunks;
use formats::{Dense, Format, WithMinimum};
use isa::Isa;
use myq_blocks::panels::PANEL;
use myq_blocks::{Column, DType, MAX_COLUMNS, Rows};
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

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
            Level::Amx if columns.len() < amx::FEWEST => avx512(w, columns, out),
            Level::Amx => {
                // Sixteens first, and what is left where it is worth tiles.
                let (whole, left) = columns.split_at(columns.len() / amx::TOKENS * amx::TOKENS);
                let (first, last) = out.split_at_mut(whole.len());
                if !whole.is_empty() {
                    tiles(w, whole, first);
                }
                match left.len() {
                    0 => {}
                    1..amx::FEWEST => avx512(w, left, last),
                    _ => tiles(w, left, last),
                }
            }
        }
    }
}

/// The entry of one instruction set: name, features, vectors, vectors for a panel that is left.
///
/// Each format gets a function of its own, which keeps functions, and so compile times, small.
macro_rules! entry {
    ($name:ident, $features:literal, $all:ident, $left:ident $(, $first:path)?) => {
        #[target_feature(enable = $features)]
        unsafe fn $name(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
            #[inline(never)]
            #[target_feature(enable = $features)]
            unsafe fn one<F: Format>(
                f: F,
                w: Rows<'_>,
                columns: &[Column<'_>],
                out: &mut [&mut [f32]],
            ) {
                #[allow(unused_mut, unused_assignments, reason = "only tiles come first")]
                let mut done = 0;
                $(done = $first(f, w, columns, out);)?
                all::<isa::$all, isa::$left, F>(f, w, done, columns, out);
            }
            match w.dtype() {
                DType::Q2K => one(formats::Q2K, w, columns, out),
                DType::Q3K => one(formats::Q3K, w, columns, out),
                DType::Q4K => one(formats::Q4K, w, columns, out),
                DType::Q5K => one(formats::Q5K, w, columns, out),
                DType::Q6K => one(formats::Q6K, w, columns, out),
                DType::Tq2_0 => one(formats::Tq2, w, columns, out),
                DType::Q4_0 => one(formats::Q4_0, w, columns, out),
                DType::Q5_0 => one(formats::Q5_0, w, columns, out),
                DType::Q8_0 => one(formats::Q8_0, w, columns, out),
                DType::Iq4Nl => one(formats::Iq4Nl, w, columns, out),
                DType::Q4_1 => one(WithMinimum::<0>, w, columns, out),
                DType::Q5_1 => one(WithMinimum::<1>, w, columns, out),
                DType::Linear(l) => match l.bits() {
                    2 => one(Dense::<2, 0>(l), w, columns, out),
                    3 => one(Dense::<2, 1>(l), w, columns, out),
                    5 => one(Dense::<4, 1>(l), w, columns, out),
                    _ => one(Dense::<4, 2>(l), w, columns, out),
                },
                DType::F32 | DType::F16 | DType::BF16 | DType::Tq1_0 => {
                    unreachable!("formats without panels")
                }
            }
        }
    };
}

entry!(avx2, "avx2,fma,f16c", Avx2, Avx2);
entry!(avx_vnni, "avx2,fma,f16c,avxvnni", AvxVnni, AvxVnni);
entry!(
    avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
    Avx512,
    Avx512Half
);
entry!(
    tiles,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
    Avx512,
    Avx512Half,
    amx::pairs
);

/// All panels from `p` on: as many at once as registers hold, then what is left.
#[inline(always)]
unsafe fn all<S: Isa, T: Isa, F: Format>(
    f: F,
    w: Rows<'_>,
    mut p: usize,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    let n = w.panels();
    if columns.len() == 1 {
        p = match S::PANELS {
            2 => two_streams::<S, F, 1>(f, w, p, columns, out[0]),
            _ => two_streams::<S, F, 2>(f, w, p, columns, out[0]),
        };
    } else if S::BLOCKS == 2 {
        // Each activation that is loaded meets two vectors.
        while p + 2 * S::PANELS <= n {
            some::<S, F, 2>(f, w, p, columns, out);
            p += 2 * S::PANELS;
        }
    }
    while p + S::PANELS <= n {
        some::<S, F, 1>(f, w, p, columns, out);
        p += S::PANELS;
    }
    while p < n {
        some::<T, F, 1>(f, w, p, columns, out);
        p += 1;
    }
}

/// Panels from `p` on with one column, in two halves side by side, each from its first panel to
/// its last: two panels at once, in `W` vectors. Gives the number of the first panel that is left.
///
/// Memory is read in two long streams so, which a core does up to 1.4 times as fast as in one, or
/// as in two that each jump over the other's panel.
#[inline(always)]
unsafe fn two_streams<S: Isa, F: Format, const W: usize>(
    f: F,
    w: Rows<'_>,
    p: usize,
    columns: &[Column<'_>],
    out: &mut [f32],
) -> usize {
    let half = (w.panels() - p) / 2;
    let stride = half * PANEL * w.row_bytes();
    for i in p..p + half {
        let mut total = [[S::zero(); W]; 1];
        let panel = w.panel(i).as_ptr();
        chunks::<S, F, 1, W>(f, panel, stride, w.cols(), columns, &mut total);
        let mut rows = [0.0; 2 * PANEL];
        store::<S, W>(total[0], &mut rows, 0);
        for (rows, i) in rows.chunks_exact(PANEL).zip([i, i + half]) {
            out[PANEL * i..PANEL * (i + 1)].copy_from_slice(rows);
        }
    }
    p + 2 * half
}

/// `W` vectors of panels, the first of which is `p`.
#[inline(always)]
unsafe fn some<S: Isa, F: Format, const W: usize>(
    f: F,
    w: Rows<'_>,
    p: usize,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    let (panel, stride, at) = (w.panel(p).as_ptr(), PANEL * w.row_bytes(), PANEL * p);
    if let [column] = columns {
        let mut total = [[S::zero(); W]; 1];
        let column = std::array::from_ref(column);
        chunks::<S, F, 1, W>(f, panel, stride, w.cols(), column, &mut total);
        store::<S, W>(total[0], out[0], at);
        return;
    }
    soon::<S, W>(out, at);
    let mut total = [[S::zero(); W]; MAX_COLUMNS];
    chunks::<S, F, MAX_COLUMNS, W>(f, panel, stride, w.cols(), columns, &mut total);
    for (out, total) in out.iter_mut().zip(&total) {
        store::<S, W>(*total, out, at);
    }
}

/// Asks for where the values of `W` vectors go: columns of a wide matrix lie far apart, each on a
/// page of its own.
#[inline(always)]
unsafe fn soon<S: Isa, const W: usize>(out: &[&mut [f32]], at: usize) {
    for out in out {
        for line in (0..PANEL * S::PANELS * W).step_by(16) {
            _mm_prefetch::<_MM_HINT_T0>(out[at + line..].as_ptr().cast());
        }
    }
}

/// The values of some panels, from row `at` on.
#[inline(always)]
unsafe fn store<S: Isa, const W: usize>(total: [S::F; W], out: &mut [f32], at: usize) {
    let rows = PANEL * S::PANELS;
    for (total, out) in total
        .iter()
        .zip(out[at..at + rows * W].chunks_exact_mut(rows))
    {
        S::store(*total, out.as_mut_ptr());
    }
}
