//! Scales and codes of each format in panels.
//!
//! ```text
//! sixteens    d · (s0·Σ of the first 16 products + s1·Σ of the others) − offsets · sums of 16
//! thirties    scale · Σ of 32 products − offset · scaled sum of 32
//! ```
//!
//! Deviations:
//! 1. Sub-scales of 32 weights become fp32, super-scale included, once per chunk; those of
//!    sixteens stay integers, where products of a group are added with one multiplication.
//! 2. Signed codes get 128 added where the instruction set multiplies unsigned ones only.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of one loop that needs its instruction set and checked lengths"
)]

use super::isa::Isa;
use myq_blocks::layout::IQ4NL_LEVELS;
use myq_blocks::{DType, Linear, panels};

/// Scales of a chunk with sub-scales of sixteen.
#[derive(Clone, Copy)]
pub(crate) struct Sixteens<S: Isa> {
    pub(crate) d: S::F,
    /// Scale of the offsets; `d` where they are multiples of the sub-scales.
    pub(crate) m: S::F,
    /// i16 pairs: sub-scales of each group.
    pub(crate) scales: [S::I; 8],
    /// i16 pairs: offsets of each group.
    pub(crate) offsets: [S::I; 8],
}

impl<S: Isa> Sixteens<S> {
    #[inline(always)]
    pub(crate) unsafe fn zero() -> Self {
        let (d, scales) = (S::zero(), [S::splat(0); 8]);
        Sixteens {
            d,
            m: d,
            scales,
            offsets: scales,
        }
    }
}

impl<S: Isa> Thirties<S> {
    #[inline(always)]
    pub(crate) unsafe fn zero() -> Self {
        Thirties {
            scales: [S::zero(); 8],
            offsets: [S::zero(); 8],
        }
    }
}

/// Scales of a chunk with one scale for each group.
#[derive(Clone, Copy)]
pub(crate) struct Thirties<S: Isa> {
    pub(crate) scales: [S::F; 8],
    pub(crate) offsets: [S::F; 8],
}

/// An integer format in panels. The pointers are to the first of `S::PANELS` panels, `stride`
/// bytes apart, and readable for the chunk.
pub(crate) trait Format: Copy {
    /// Bits of the low and of the high plane.
    const LOW: u32;
    const HIGH: u32 = 0;
    /// Bits of an unsigned code, as bounds count them.
    const BITS: u32 = Self::LOW + Self::HIGH;
    /// Codes are signed bytes.
    const SIGNED: bool = false;
    /// Scales are [`Sixteens`], else [`Thirties`].
    const SIXTEENS: bool = false;
    /// Offsets have a scale of their own (only sixteens).
    const OWN_MINIMA: bool = false;
    /// Fixed offset of the codes as `codes` gives them to sets that multiply unsigned ones, if
    /// it is all the offset there is.
    const FIXED: u8 = 0;
    /// There are offsets (only thirties).
    const OFFSETS: bool = true;

    fn dtype(self) -> DType;

    unsafe fn sixteens<S: Isa>(self, _: *const u8, _: usize, _: usize, _: &mut Sixteens<S>) {}
    unsafe fn thirties<S: Isa>(self, _: *const u8, _: usize, _: usize, _: &mut Thirties<S>) {}

    /// The quads of a group.
    #[inline(always)]
    unsafe fn codes<S: Isa>(self, p: *const u8, stride: usize) -> [S::I; 8] {
        plane_codes::<S, Self>(p, stride)
    }
}

/// Quads from a low plane of 2 or 4 bits and a high one.
#[inline(always)]
unsafe fn plane_codes<S: Isa, F: Format>(p: *const u8, stride: usize) -> [S::I; 8] {
    let high = p.add(32 * F::LOW as usize);
    let mut out = if F::LOW == 2 {
        let (a, b) = (S::load(p, stride), S::load(p.add(32), stride));
        let three = S::splat(3);
        [
            S::and(a, three),
            S::and(S::right::<2>(a), three),
            S::and(S::right::<4>(a), three),
            S::and(S::right::<6>(a), three),
            S::and(b, three),
            S::and(S::right::<2>(b), three),
            S::and(S::right::<4>(b), three),
            S::and(S::right::<6>(b), three),
        ]
    } else {
        let low = S::splat(15);
        let v = [
            S::load(p, stride),
            S::load(p.add(32), stride),
            S::load(p.add(64), stride),
            S::load(p.add(96), stride),
        ];
        [
            S::and(v[0], low),
            S::and(S::right::<4>(v[0]), low),
            S::and(v[1], low),
            S::and(S::right::<4>(v[1]), low),
            S::and(v[2], low),
            S::and(S::right::<4>(v[2]), low),
            S::and(v[3], low),
            S::and(S::right::<4>(v[3]), low),
        ]
    };
    if F::HIGH == 1 {
        let v = S::load(high, stride);
        if F::LOW == 2 {
            let m = S::splat(4);
            out[0] = S::or(out[0], S::and(S::left::<2>(v), m));
            out[1] = S::or(out[1], S::and(S::left::<1>(v), m));
            out[2] = S::or(out[2], S::and(v, m));
            out[3] = S::or(out[3], S::and(S::right::<1>(v), m));
            out[4] = S::or(out[4], S::and(S::right::<2>(v), m));
            out[5] = S::or(out[5], S::and(S::right::<3>(v), m));
            out[6] = S::or(out[6], S::and(S::right::<4>(v), m));
            out[7] = S::or(out[7], S::and(S::right::<5>(v), m));
        } else {
            let m = S::splat(16);
            out[0] = S::or(out[0], S::and(S::left::<4>(v), m));
            out[1] = S::or(out[1], S::and(S::left::<3>(v), m));
            out[2] = S::or(out[2], S::and(S::left::<2>(v), m));
            out[3] = S::or(out[3], S::and(S::left::<1>(v), m));
            out[4] = S::or(out[4], S::and(v, m));
            out[5] = S::or(out[5], S::and(S::right::<1>(v), m));
            out[6] = S::or(out[6], S::and(S::right::<2>(v), m));
            out[7] = S::or(out[7], S::and(S::right::<3>(v), m));
        }
    }
    if F::HIGH == 2 {
        let m = S::splat(0x30);
        let (a, b) = (S::load(high, stride), S::load(high.add(32), stride));
        out[0] = S::or(out[0], S::and(S::left::<4>(a), m));
        out[1] = S::or(out[1], S::and(S::left::<2>(a), m));
        out[2] = S::or(out[2], S::and(a, m));
        out[3] = S::or(out[3], S::and(S::right::<2>(a), m));
        out[4] = S::or(out[4], S::and(S::left::<4>(b), m));
        out[5] = S::or(out[5], S::and(S::left::<2>(b), m));
        out[6] = S::or(out[6], S::and(b, m));
        out[7] = S::or(out[7], S::and(S::right::<2>(b), m));
    }
    out
}

/// The fields of 6 bits of one panel, `16 · groups` of them.
#[inline(always)]
unsafe fn sixes(p: *const u8, groups: usize, out: &mut [u8; 128]) {
    if groups == 8 {
        // Four planes of 32 fields: see `panels::sixes`.
        let (mut low, mut high, mut top) = ([0u8; 64], [0u8; 64], [0u8; 32]);
        low.copy_from_slice(std::slice::from_raw_parts(p, 64));
        top.copy_from_slice(std::slice::from_raw_parts(p.add(64), 32));
        for i in 0..64 {
            high[i] = low[i] >> 4;
            low[i] &= 15;
        }
        for i in 0..32 {
            out[i] = low[i] | top[i] << 4 & 0x30;
            out[32 + i] = low[32 + i] | top[i] << 2 & 0x30;
            out[64 + i] = high[i] | top[i] & 0x30;
            out[96 + i] = high[32 + i] | top[i] >> 2 & 0x30;
        }
    } else {
        for (i, out) in out.iter_mut().enumerate().take(16 * groups) {
            let (at, shift, high, top) = panels::sixes(groups, i);
            *out = *p.add(at) >> shift & 15 | (*p.add(high) >> top & 3) << 4;
        }
    }
}

/// The fields of each panel, one after another.
#[inline(always)]
unsafe fn all_sixes<S: Isa>(p: *const u8, stride: usize, groups: usize) -> [[u8; 128]; 2] {
    let mut out = [[0; 128]; 2];
    sixes(p, groups, &mut out[0]);
    if S::PANELS == 2 {
        sixes(p.add(stride), groups, &mut out[1]);
    }
    out
}

/// 2 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q2K;
/// 3 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q3K;
/// 4 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q4K;
/// 5 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q5K;
/// 6 bits.
#[derive(Clone, Copy)]
pub(crate) struct Q6K;
/// Ternary.
#[derive(Clone, Copy)]
pub(crate) struct Tq2;

impl Format for Q2K {
    const LOW: u32 = 2;
    const SIXTEENS: bool = true;
    const OWN_MINIMA: bool = true;

    fn dtype(self) -> DType {
        DType::Q2K
    }

    #[inline(always)]
    unsafe fn sixteens<S: Isa>(
        self,
        p: *const u8,
        stride: usize,
        groups: usize,
        out: &mut Sixteens<S>,
    ) {
        out.d = S::load_halves(p, stride);
        out.m = S::load_halves(p.add(16), stride);
        for g in 0..groups {
            let v = S::load_pairs_unsigned(p.add(32 + 16 * g), stride);
            out.scales[g] = S::and(v, S::splat16(15));
            out.offsets[g] = S::right::<4>(v);
        }
    }
}

impl Format for Q3K {
    const LOW: u32 = 2;
    const HIGH: u32 = 1;
    const FIXED: u8 = 4;
    const SIXTEENS: bool = true;

    fn dtype(self) -> DType {
        DType::Q3K
    }

    #[inline(always)]
    unsafe fn sixteens<S: Isa>(
        self,
        p: *const u8,
        stride: usize,
        groups: usize,
        out: &mut Sixteens<S>,
    ) {
        out.d = S::load_halves(p, stride);
        out.m = out.d;
        let mut fields = all_sixes::<S>(p.add(16), stride, groups);
        for f in fields.as_flattened_mut() {
            *f = f.wrapping_sub(32);
        }
        let at = fields.as_ptr().cast::<u8>();
        for g in 0..groups {
            out.scales[g] = S::load_pairs(at.add(16 * g), 128);
            out.offsets[g] = S::left::<2>(out.scales[g]);
        }
    }
}

impl Format for Q6K {
    const LOW: u32 = 4;
    const HIGH: u32 = 2;
    const FIXED: u8 = 32;
    const SIXTEENS: bool = true;

    fn dtype(self) -> DType {
        DType::Q6K
    }

    #[inline(always)]
    unsafe fn sixteens<S: Isa>(
        self,
        p: *const u8,
        stride: usize,
        groups: usize,
        out: &mut Sixteens<S>,
    ) {
        out.d = S::load_halves(p, stride);
        out.m = out.d;
        for g in 0..groups {
            out.scales[g] = S::load_pairs(p.add(16 + 16 * g), stride);
            out.offsets[g] = S::left::<5>(out.scales[g]);
        }
    }
}

/// Scales and minima of Q4_K and Q5_K.
#[inline(always)]
unsafe fn scales_k4<S: Isa>(p: *const u8, stride: usize, groups: usize, out: &mut Thirties<S>) {
    let (d, m) = (S::load_halves(p, stride), S::load_halves(p.add(16), stride));
    let fields = all_sixes::<S>(p.add(32), stride, groups);
    let at = fields.as_ptr().cast::<u8>();
    for g in 0..groups {
        let s = S::load_bytes(at.add(8 * g), 128);
        let o = S::load_bytes(at.add(8 * (groups + g)), 128);
        out.scales[g] = S::mul(d, S::float(s));
        out.offsets[g] = S::mul(m, S::float(o));
    }
}

impl Format for Q4K {
    const LOW: u32 = 4;

    fn dtype(self) -> DType {
        DType::Q4K
    }

    #[inline(always)]
    unsafe fn thirties<S: Isa>(
        self,
        p: *const u8,
        stride: usize,
        groups: usize,
        out: &mut Thirties<S>,
    ) {
        scales_k4(p, stride, groups, out)
    }
}

impl Format for Q5K {
    const LOW: u32 = 4;
    const HIGH: u32 = 1;

    fn dtype(self) -> DType {
        DType::Q5K
    }

    #[inline(always)]
    unsafe fn thirties<S: Isa>(
        self,
        p: *const u8,
        stride: usize,
        groups: usize,
        out: &mut Thirties<S>,
    ) {
        scales_k4(p, stride, groups, out)
    }
}

impl Format for Tq2 {
    const LOW: u32 = 2;
    const FIXED: u8 = 1;

    fn dtype(self) -> DType {
        DType::Tq2_0
    }

    #[inline(always)]
    unsafe fn thirties<S: Isa>(self, p: *const u8, stride: usize, _: usize, out: &mut Thirties<S>) {
        let d = S::load_halves(p, stride);
        (out.scales, out.offsets) = ([d; 8], [d; 8]);
    }
}

/// The formats of 32 weights with a scale alone: name, format, planes, constants, fixed offset.
macro_rules! small {
    ($(#[$doc:meta])* $name:ident $dtype:ident $offset:literal { $($constants:tt)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Format for $name {
            $($constants)*

            fn dtype(self) -> DType {
                DType::$dtype
            }

            #[inline(always)]
            unsafe fn thirties<S: Isa>(
                self,
                p: *const u8,
                stride: usize,
                groups: usize,
                out: &mut Thirties<S>,
            ) {
                    // Deviation 2.
                    let offset = if Self::SIGNED && !S::SIGNED { 128.0 } else { $offset };
                    for g in 0..groups {
                        out.scales[g] = S::load_halves(p.add(16 * g), stride);
                        out.offsets[g] = S::mul(S::splat_f(offset), out.scales[g]);
                    }
            }
        }
    };
}

small! {
    /// 4 bits.
    Q4_0 Q4_0 8.0 { const LOW: u32 = 4; const FIXED: u8 = 8; }
}
small! {
    /// 5 bits.
    Q5_0 Q5_0 16.0 { const LOW: u32 = 4; const HIGH: u32 = 1; const FIXED: u8 = 16; }
}
small! {
    /// 8 bits, signed.
    Q8_0 Q8_0 0.0 {
        const LOW: u32 = 8;
        const FIXED: u8 = 128;
        const SIGNED: bool = true;
        const OFFSETS: bool = false;

        #[inline(always)]
        unsafe fn codes<S: Isa>(self, p: *const u8, stride: usize) -> [S::I; 8] {
                let mut out = [S::load(p, stride); 8];
                let flip = S::splat(if S::SIGNED { 0 } else { 128 });
                for (t, out) in out.iter_mut().enumerate() {
                    *out = S::xor(S::load(p.add(32 * t), stride), flip);
                }
                out
        }
    }
}
small! {
    /// 4 bits through a table, signed.
    Iq4Nl Iq4Nl 0.0 {
        const LOW: u32 = 4;
        const BITS: u32 = 8;
        const FIXED: u8 = 128;
        const SIGNED: bool = true;
        const OFFSETS: bool = false;

        #[inline(always)]
        unsafe fn codes<S: Isa>(self, p: *const u8, stride: usize) -> [S::I; 8] {
                let mut out = plane_codes::<S, Self>(p, stride);
                let table = if S::SIGNED { &LEVELS } else { &RAISED };
                for c in &mut out {
                    *c = S::look_up(table, *c);
                }
                out
        }
    }
}

/// The levels of IQ4_NL, plus `raise`.
const fn levels(raise: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut i = 0;
    while i < 16 {
        bytes[i] = (IQ4NL_LEVELS[i] as u8).wrapping_add(raise);
        i += 1;
    }
    bytes
}

static LEVELS: [u8; 16] = levels(0);
static RAISED: [u8; 16] = levels(128);

/// 4 bits and a minimum, or 5.
#[derive(Clone, Copy)]
pub(crate) struct WithMinimum<const HIGH: u32>;

impl<const HIGH: u32> Format for WithMinimum<HIGH> {
    const LOW: u32 = 4;
    const HIGH: u32 = HIGH;

    fn dtype(self) -> DType {
        if HIGH == 0 { DType::Q4_1 } else { DType::Q5_1 }
    }

    #[inline(always)]
    unsafe fn thirties<S: Isa>(
        self,
        p: *const u8,
        stride: usize,
        groups: usize,
        out: &mut Thirties<S>,
    ) {
        for g in 0..groups {
            out.scales[g] = S::load_halves(p.add(16 * g), stride);
            // The minimum is added.
            let m = S::load_halves(p.add(16 * (groups + g)), stride);
            out.offsets[g] = S::sub(S::zero(), m);
        }
    }
}

/// Groups of 32, 64 or 128 weights of `LOW + HIGH` bits.
#[derive(Clone, Copy)]
pub(crate) struct Dense<const LOW: u32, const HIGH: u32>(pub(crate) Linear);

impl<const LOW: u32, const HIGH: u32> Format for Dense<LOW, HIGH> {
    const LOW: u32 = LOW;
    const HIGH: u32 = HIGH;

    fn dtype(self) -> DType {
        DType::Linear(self.0)
    }

    #[inline(always)]
    unsafe fn thirties<S: Isa>(
        self,
        p: *const u8,
        stride: usize,
        groups: usize,
        out: &mut Thirties<S>,
    ) {
        let per = self.0.group() / 32;
        let zeros = p.add(16 * groups.div_ceil(per));
        let fixed = S::splat_f((1u32 << (LOW + HIGH - 1)) as f32);
        for g in 0..groups {
            let s = g / per;
            out.scales[g] = S::load_halves(p.add(16 * s), stride);
            let zero = if self.0.asymmetric() {
                S::float(S::load_bytes(zeros.add(8 * s), stride))
            } else {
                fixed
            };
            out.offsets[g] = S::mul(out.scales[g], zero);
        }
    }
}
