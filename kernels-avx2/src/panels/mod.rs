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
mod formats;
mod isa;

use crate::Level;
use formats::{Dense, Format, Sixteens, Thirties, WithMinimum};
use isa::Isa;
use myq_blocks::panels::{PANEL, chunk_bytes, head_bytes};
use myq_blocks::{Column, DType, MAX_COLUMNS, Rows};
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Bytes between what is multiplied and what is asked for.
const AHEAD: usize = 3072;

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
    let mut total = [[S::zero(); W]; MAX_COLUMNS];
    chunks::<S, F, MAX_COLUMNS, W>(f, panel, stride, w.cols(), columns, &mut total);
    for (out, total) in out.iter_mut().zip(&total) {
        store::<S, W>(*total, out, at);
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

/// All chunks of `W` vectors of panels with up to `N` columns.
#[inline(always)]
unsafe fn chunks<S: Isa, F: Format, const N: usize, const W: usize>(
    f: F,
    panel: *const u8,
    stride: usize,
    cols: usize,
    columns: &[Column<'_>],
    total: &mut [[S::F; W]; N],
) {
    let step = chunk_bytes(f.dtype(), 8);
    let (whole, rest) = (cols / 256, cols % 256 / 32);
    for i in 0..=whole {
        let groups = if i < whole { 8 } else { rest };
        let p = panel.add(step * i);
        if groups == 0 {
            break;
        }
        ahead::<S, W>(p, stride, step);
        if F::SIXTEENS {
            chunk_16::<S, F, N, W>(f, p, stride, (8 * i, groups), columns, total);
        } else {
            chunk_32::<S, F, N, W>(f, p, stride, (8 * i, groups), columns, total);
        }
    }
}

/// Asks for the bytes that are read some chunks later: the processor's own prefetching stops at
/// the end of a page. Panels follow one another, so that what lies behind the last chunk of one
/// is wanted too.
#[inline(always)]
unsafe fn ahead<S: Isa, const W: usize>(p: *const u8, stride: usize, step: usize) {
    for w in 0..W * S::PANELS {
        let p = p.wrapping_add(w * stride + AHEAD);
        for line in (0..step).step_by(64) {
            // Prefetching reads nothing, so that any address will do.
            _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(line).cast());
        }
    }
}

/// The quads of a group of each vector of panels.
#[inline(always)]
unsafe fn codes<S: Isa, F: Format, const W: usize>(
    f: F,
    p: *const u8,
    stride: usize,
) -> [[S::I; 8]; W] {
    let mut codes = [[S::splat(0); 8]; W];
    for (w, codes) in codes.iter_mut().enumerate() {
        *codes = f.codes::<S>(p.add(w * S::PANELS * stride), stride);
    }
    codes
}

/// One chunk with sub-scales of sixteen; `groups` are the number of its first group in the row
/// and how many it has.
#[inline(always)]
unsafe fn chunk_16<S: Isa, F: Format, const N: usize, const W: usize>(
    f: F,
    p: *const u8,
    stride: usize,
    (first, groups): (usize, usize),
    columns: &[Column<'_>],
    total: &mut [[S::F; W]; N],
) {
    let mut scales = [Sixteens::<S>::zero(); W];
    for (w, scales) in scales.iter_mut().enumerate() {
        f.sixteens(p.add(w * S::PANELS * stride), stride, groups, scales);
    }
    let group_bytes = 32 * (F::LOW + F::HIGH) as usize;
    let at = p.add(head_bytes(f.dtype(), groups));
    let mut parts = [[(S::zero(), S::zero()); W]; N];
    for g in 0..groups {
        let codes = codes::<S, F, W>(f, at.add(group_bytes * g), stride);
        let mut pairs = [S::pair(scales[0].scales[g]); W];
        for w in 1..W {
            pairs[w] = S::pair(scales[w].scales[g]);
        }
        for (c, parts) in columns.iter().zip(&mut parts) {
            let a = Acts::new(c, first + g);
            let (scale, sums) = (S::splat_f(*a.d), S::all(a.sums));
            for w in 0..W {
                let (d, m) = &mut parts[w];
                let dot = S::dot_pair(&codes[w], a.q, pairs[w], F::BITS);
                let minima = S::float(S::madd(scales[w].offsets[g], sums));
                if F::OWN_MINIMA {
                    *d = S::fma(dot, scale, *d);
                    *m = S::fma(minima, scale, *m);
                } else {
                    *d = S::fma(S::sub(dot, minima), scale, *d);
                }
            }
        }
    }
    for (parts, total) in parts.iter().zip(total).take(columns.len()) {
        for w in 0..W {
            total[w] = S::fma(scales[w].d, parts[w].0, total[w]);
            if F::OWN_MINIMA {
                total[w] = S::fnma(scales[w].m, parts[w].1, total[w]);
            }
        }
    }
}

/// One chunk with a scale for each group; arguments as of `chunk_16`.
#[inline(always)]
unsafe fn chunk_32<S: Isa, F: Format, const N: usize, const W: usize>(
    f: F,
    p: *const u8,
    stride: usize,
    (first, groups): (usize, usize),
    columns: &[Column<'_>],
    total: &mut [[S::F; W]; N],
) {
    let mut scales = [Thirties::<S>::zero(); W];
    for (w, scales) in scales.iter_mut().enumerate() {
        f.thirties(p.add(w * S::PANELS * stride), stride, groups, scales);
    }
    let group_bytes = 32 * (F::LOW + F::HIGH) as usize;
    let at = p.add(head_bytes(f.dtype(), groups));
    for g in 0..groups {
        let codes = codes::<S, F, W>(f, at.add(group_bytes * g), stride);
        for (c, total) in columns.iter().zip(total.iter_mut()) {
            let a = Acts::new(c, first + g);
            let (scale, sum) = (S::splat_f(*a.d), S::splat_f(*a.scaled_sums));
            for w in 0..W {
                let dot = if F::SIGNED {
                    S::dot_signed(&codes[w], a.q)
                } else {
                    S::dot(&codes[w], a.q, F::BITS)
                };
                let dot = S::mul(S::float(dot), scales[w].scales[g]);
                total[w] = S::fma(dot, scale, total[w]);
                if F::OFFSETS || F::SIGNED && !S::SIGNED {
                    total[w] = S::fnma(scales[w].offsets[g], sum, total[w]);
                }
            }
        }
    }
}
