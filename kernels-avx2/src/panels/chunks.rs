//! The chunks of some panels times columns: the inner loops.
//!
//! Deviation: where columns share it, the conversion of sub-scales of sixteen to fp32 is done once
//! a chunk, super-scale included, so that totals need no parts of their own; and a fixed offset of
//! the codes is taken off by where the sums of a half start, −offset · sum of the activations,
//! which costs a load instead of a multiplication, a conversion and a subtraction.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of one loop that needs its instruction set and checked lengths"
)]

use super::formats::{Format, Sixteens, Thirties};
use super::isa::Isa;
use myq_blocks::Column;
use myq_blocks::panels::{chunk_bytes, head_bytes};
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::mem::MaybeUninit;

/// Bytes between what is multiplied and what is asked for. Of 1 to 8 KiB, 1.5 and 2 read fastest.
const AHEAD: usize = 2048;

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

    /// Asks for the same group of the next chunk, where there are so many columns that they come
    /// from another cache: they lie too far apart for the processor's own prefetching.
    #[inline(always)]
    unsafe fn ahead<const N: usize>(self) {
        if N > 1 {
            _mm_prefetch::<_MM_HINT_T0>(self.q.wrapping_add(256).cast());
        }
    }
}

/// All chunks of `W` vectors of panels with up to `N` columns.
#[inline(always)]
pub(super) unsafe fn chunks<S: Isa, F: Format, const N: usize, const W: usize>(
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
        let at = Chunk {
            p,
            stride,
            step,
            first: 8 * i,
            groups,
        };
        if !F::SIXTEENS {
            chunk_32::<S, F, N, W>(f, at, columns, total);
        } else if N == 1 || !S::STARTS {
            chunk_16::<S, F, N, W>(f, at, columns, total);
        } else {
            chunk_16_float::<S, F, N, W>(f, at, columns, total);
        }
    }
}

/// Asks for the bytes that are read some chunks later: the processor's own prefetching stops at
/// the end of a page. Panels follow one another, so that what lies behind the last chunk of one
/// is wanted too. Group by group, as a core waits for no more than a dozen lines at once.
#[inline(always)]
pub(super) unsafe fn ahead<S: Isa, const W: usize>(
    p: *const u8,
    stride: usize,
    group: usize,
    step: usize,
) {
    for w in 0..W * S::PANELS {
        let p = p.wrapping_add(w * stride + step * group + AHEAD);
        for line in (0..step).step_by(64) {
            // Prefetching reads nothing, so that any address will do.
            _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(line).cast());
        }
    }
}

/// A chunk of a panel, and where it is in the row.
#[derive(Clone, Copy)]
struct Chunk {
    p: *const u8,
    /// Bytes to the next panel.
    stride: usize,
    /// Bytes to the next chunk.
    step: usize,
    /// Number of its first group in the row.
    first: usize,
    groups: usize,
}

impl Chunk {
    /// Where vector `w` of the panels begins.
    #[inline(always)]
    unsafe fn vector<S: Isa>(self, w: usize) -> *const u8 {
        self.p.add(w * S::PANELS * self.stride)
    }

    /// The quads of group `g` of each vector; asks for what comes later.
    #[inline(always)]
    unsafe fn codes<S: Isa, F: Format, const W: usize>(self, f: F, g: usize) -> [[S::I; 8]; W] {
        ahead::<S, W>(self.p, self.stride, g, self.step / 8);
        let at = head_bytes(f.dtype(), self.groups) + 32 * (F::LOW + F::HIGH) as usize * g;
        let mut codes = [[S::splat(0); 8]; W];
        for (w, codes) in codes.iter_mut().enumerate() {
            *codes = f.codes::<S>(self.vector::<S>(w).add(at), self.stride);
        }
        codes
    }
}

/// One chunk with sub-scales of sixteen, which stay integers: for one column, where nothing would
/// share their conversion, and for AVX2, which has too few registers for both.
#[inline(always)]
unsafe fn chunk_16<S: Isa, F: Format, const N: usize, const W: usize>(
    f: F,
    chunk: Chunk,
    columns: &[Column<'_>],
    total: &mut [[S::F; W]; N],
) {
    let Chunk { stride, groups, .. } = chunk;
    let mut scales = [Sixteens::<S>::zero(); W];
    for (w, scales) in scales.iter_mut().enumerate() {
        f.sixteens(chunk.vector::<S>(w), stride, groups, scales);
    }
    let by_start = S::STARTS && F::FIXED != 0;
    let start = starts::<S, F>(&columns[0], chunk.first);
    let mut parts = [[(S::zero(), S::zero()); W]; N];
    for g in 0..groups {
        let codes = chunk.codes::<S, F, W>(f, g);
        for (c, parts) in columns.iter().zip(&mut parts) {
            let a = Acts::new(c, chunk.first + g);
            a.ahead::<N>();
            let (scale, sums) = (S::splat_f(*a.d), S::all(a.sums));
            let start = [start[2 * g], start[2 * g + 1]];
            for w in 0..W {
                let (d, m) = &mut parts[w];
                let dot = S::dot_pair(&codes[w], a.q, scales[w].scales[g], start, F::BITS);
                if by_start {
                    *d = S::fma(dot, scale, *d);
                    continue;
                }
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

/// Where the sums of a chunk's halves start, so that a fixed offset of the codes is taken off.
#[inline(always)]
unsafe fn starts<S: Isa, F: Format>(column: &Column<'_>, first: usize) -> [i32; 16] {
    let mut start = [0; 16];
    if S::STARTS && F::FIXED != 0 {
        for (start, sum) in start.iter_mut().zip(&column.sums[2 * first..][..16]) {
            *start = -i32::from(F::FIXED) * i32::from(*sum);
        }
    }
    start
}

/// Sums of a chunk's halves times the activation scale of their group.
#[inline(always)]
fn scaled_halves(column: &Column<'_>, first: usize) -> [f32; 16] {
    let (sums, d) = (&column.sums[2 * first..][..16], &column.d[first..][..8]);
    std::array::from_fn(|i| d[i / 2] * f32::from(sums[i]))
}

/// One chunk with sub-scales of sixteen and columns that share their conversion to fp32.
#[inline(always)]
unsafe fn chunk_16_float<S: Isa, F: Format, const N: usize, const W: usize>(
    f: F,
    chunk: Chunk,
    columns: &[Column<'_>],
    total: &mut [[S::F; W]; N],
) {
    let Chunk { stride, groups, .. } = chunk;
    let (mut scales, mut offsets) = ([[[S::zero(); 2]; 8]; W], [[[S::zero(); 2]; 8]; W]);
    for w in 0..W {
        let mut s = Sixteens::<S>::zero();
        f.sixteens(chunk.vector::<S>(w), stride, groups, &mut s);
        for g in 0..groups {
            scales[w][g] = S::halves(s.scales[g]).map(|v| S::mul(v, s.d));
            offsets[w][g] = S::halves(s.offsets[g]).map(|v| S::mul(v, s.m));
        }
    }
    let by_start = S::STARTS && F::FIXED != 0;
    let mut start = [MaybeUninit::uninit(); N];
    let mut sums = [MaybeUninit::uninit(); N];
    for ((c, start), sums) in columns.iter().zip(&mut start).zip(&mut sums) {
        if by_start {
            start.write(starts::<S, F>(c, chunk.first));
        } else {
            sums.write(scaled_halves(c, chunk.first));
        }
    }
    for g in 0..groups {
        let codes = chunk.codes::<S, F, W>(f, g);
        for (i, (c, total)) in columns.iter().zip(total.iter_mut()).enumerate() {
            let a = Acts::new(c, chunk.first + g);
            a.ahead::<N>();
            let scale = S::splat_f(*a.d);
            if by_start {
                let start = start[i].assume_init_ref();
                let start = [start[2 * g], start[2 * g + 1]];
                for w in 0..W {
                    let dot = S::dot_scaled(&codes[w], a.q, scales[w][g], start);
                    total[w] = S::fma(dot, scale, total[w]);
                }
            } else {
                let sums = sums[i].assume_init_ref();
                let sums = [S::splat_f(sums[2 * g]), S::splat_f(sums[2 * g + 1])];
                for w in 0..W {
                    let dot = S::dot_scaled(&codes[w], a.q, scales[w][g], [0, 0]);
                    let [o0, o1] = offsets[w][g];
                    total[w] = S::fma(dot, scale, total[w]);
                    total[w] = S::fnma(o0, sums[0], total[w]);
                    total[w] = S::fnma(o1, sums[1], total[w]);
                }
            }
        }
    }
}

/// One chunk with a scale for each group.
#[inline(always)]
unsafe fn chunk_32<S: Isa, F: Format, const N: usize, const W: usize>(
    f: F,
    chunk: Chunk,
    columns: &[Column<'_>],
    total: &mut [[S::F; W]; N],
) {
    let Chunk { stride, groups, .. } = chunk;
    let mut scales = [Thirties::<S>::zero(); W];
    for (w, scales) in scales.iter_mut().enumerate() {
        f.thirties(chunk.vector::<S>(w), stride, groups, scales);
    }
    for g in 0..groups {
        let codes = chunk.codes::<S, F, W>(f, g);
        for (c, total) in columns.iter().zip(total.iter_mut()) {
            let a = Acts::new(c, chunk.first + g);
            a.ahead::<N>();
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
