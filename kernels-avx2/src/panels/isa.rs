//! The vectors that panel kernels are written in: a lane of 32 bits is a row.
//!
//! [`Isa`] names the dozen operations; 256 bits hold one panel, 512 bits two. Instruction sets
//! differ in one thing only, the dot product of four codes and four activations of each row:
//!
//! ```text
//! Avx2    u8 × i8, pairs added to i16; summed in i16 as long as it fits; pairs added to i32
//! Vnni    u8 × i8, fours added to i32, in one instruction
//! ```
//!
//! All methods are `inline(always)`, so that they end up in the one function that enables the
//! instructions (see `super::matmul`).
//!
//! Bounds of the i16 sums: four codes of b bits and activations of at most 127 give
//! 2·(2^b − 1)·127 in each i16: 3,810 for 4 bits, eight of which fit; 7,874 for 5 bits, four;
//! 16,002 for 6 bits, two.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "every function here is part of one loop that needs its instruction set and checked lengths"
)]

use std::arch::x86_64::*;

/// Panel vectors of one instruction set.
///
/// # Safety
///
/// Every method needs the instruction set; pointers must be readable for the bytes named. With
/// two panels, `p` is in the first and `p + stride` the same place in the second.
pub(crate) trait Isa: Copy {
    /// Panels that a vector holds: 1 or 2.
    const PANELS: usize;
    /// Vectors of panels that registers hold beside each other, for several columns.
    const BLOCKS: usize = 1;
    /// Whether codes of −128 … 127 can be multiplied; if not, 128 is added to them.
    const SIGNED: bool;
    /// Whether sums of halves start at something else than zero for nothing.
    const STARTS: bool;
    /// Bytes, i16 or i32.
    type I: Copy;
    /// One fp32 for each row.
    type F: Copy;

    /// A vector of 32 bytes of each panel.
    unsafe fn load(p: *const u8, stride: usize) -> Self::I;
    /// Eight bytes of each panel, widened to i32.
    unsafe fn load_bytes(p: *const u8, stride: usize) -> Self::I;
    /// Sixteen signed bytes of each panel, widened to i16.
    unsafe fn load_pairs(p: *const u8, stride: usize) -> Self::I;
    /// Sixteen unsigned bytes of each panel, widened to i16.
    unsafe fn load_pairs_unsigned(p: *const u8, stride: usize) -> Self::I;
    /// Eight fp16 of each panel.
    unsafe fn load_halves(p: *const u8, stride: usize) -> Self::F;
    /// The 32 bits at `p` for every row.
    unsafe fn all(p: *const u8) -> Self::I;
    /// A byte everywhere.
    unsafe fn splat(byte: u8) -> Self::I;
    /// An i16 everywhere.
    unsafe fn splat16(v: i16) -> Self::I;
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn xor(a: Self::I, b: Self::I) -> Self::I;
    /// i16 lanes, right by constants.
    unsafe fn right<const N: u32>(a: Self::I) -> Self::I;
    /// i16 lanes, left by constants.
    unsafe fn left<const N: u32>(a: Self::I) -> Self::I;
    /// `table[code]` of sixteen bytes.
    unsafe fn look_up(table: &[u8; 16], codes: Self::I) -> Self::I;
    /// Pairs of i16 products added to i32.
    unsafe fn madd(a: Self::I, b: Self::I) -> Self::I;

    /// Products of eight quads of unsigned codes of `bits` bits with 32 activations, for each row.
    unsafe fn dot(codes: &[Self::I; 8], q: *const u8, bits: u32) -> Self::I;
    /// As `dot`, for signed codes; only where `SIGNED`.
    unsafe fn dot_signed(codes: &[Self::I; 8], q: *const u8) -> Self::I;
    /// As `dot`, each half times its sub-scale, of pairs of i16; the sums of the halves start at
    /// `start`, which is zeros unless `STARTS`.
    unsafe fn dot_pair(
        codes: &[Self::I; 8],
        q: *const u8,
        scales: Self::I,
        start: [i32; 2],
        bits: u32,
    ) -> Self::F;
    /// As `dot_pair`, for sub-scales in fp32; only where `STARTS`.
    unsafe fn dot_scaled(
        codes: &[Self::I; 8],
        q: *const u8,
        scales: [Self::F; 2],
        start: [i32; 2],
    ) -> Self::F;
    /// The lower and the upper i16 of each lane.
    unsafe fn halves(pairs: Self::I) -> [Self::F; 2];

    unsafe fn float(v: Self::I) -> Self::F;
    unsafe fn zero() -> Self::F;
    unsafe fn splat_f(v: f32) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c − a · b`
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// One fp32 for each row.
    unsafe fn store(v: Self::F, to: *mut f32);
}

/// 256 bits, products through i16.
#[derive(Clone, Copy)]
pub(crate) enum Avx2 {}

/// 256 bits, VNNI in its VEX form.
#[derive(Clone, Copy)]
pub(crate) enum AvxVnni {}

/// 256 bits, VNNI of AVX-512.
#[derive(Clone, Copy)]
pub(crate) enum Avx512Half {}

/// 512 bits, two panels.
#[derive(Clone, Copy)]
pub(crate) enum Avx512 {}

/// What all sets of 256 bits share.
macro_rules! shared_256 {
    () => {
        const PANELS: usize = 1;
        type I = __m256i;
        type F = __m256;

        #[inline(always)]
        unsafe fn load(p: *const u8, _: usize) -> __m256i {
            _mm256_loadu_si256(p.cast())
        }
        #[inline(always)]
        unsafe fn load_bytes(p: *const u8, _: usize) -> __m256i {
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))
        }
        #[inline(always)]
        unsafe fn load_pairs(p: *const u8, _: usize) -> __m256i {
            _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()))
        }
        #[inline(always)]
        unsafe fn load_pairs_unsigned(p: *const u8, _: usize) -> __m256i {
            _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()))
        }
        #[inline(always)]
        unsafe fn load_halves(p: *const u8, _: usize) -> __m256 {
            _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))
        }
        #[inline(always)]
        unsafe fn all(p: *const u8) -> __m256i {
            _mm256_set1_epi32(p.cast::<i32>().read_unaligned())
        }
        #[inline(always)]
        unsafe fn splat(byte: u8) -> __m256i {
            _mm256_set1_epi8(byte as i8)
        }
        #[inline(always)]
        unsafe fn splat16(v: i16) -> __m256i {
            _mm256_set1_epi16(v)
        }
        #[inline(always)]
        unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
            _mm256_and_si256(a, b)
        }
        #[inline(always)]
        unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
            _mm256_or_si256(a, b)
        }
        #[inline(always)]
        unsafe fn xor(a: __m256i, b: __m256i) -> __m256i {
            _mm256_xor_si256(a, b)
        }
        #[inline(always)]
        unsafe fn right<const N: u32>(a: __m256i) -> __m256i {
            _mm256_srl_epi16(a, _mm_cvtsi32_si128(N as i32))
        }
        #[inline(always)]
        unsafe fn left<const N: u32>(a: __m256i) -> __m256i {
            _mm256_sll_epi16(a, _mm_cvtsi32_si128(N as i32))
        }
        #[inline(always)]
        unsafe fn look_up(table: &[u8; 16], codes: __m256i) -> __m256i {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, codes)
        }
        #[inline(always)]
        unsafe fn madd(a: __m256i, b: __m256i) -> __m256i {
            _mm256_madd_epi16(a, b)
        }
        #[inline(always)]
        unsafe fn float(v: __m256i) -> __m256 {
            _mm256_cvtepi32_ps(v)
        }
        #[inline(always)]
        unsafe fn halves(pairs: __m256i) -> [__m256; 2] {
            let low = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(pairs));
            [low, _mm256_srai_epi32::<16>(pairs)].map(|v| _mm256_cvtepi32_ps(v))
        }
        #[inline(always)]
        unsafe fn zero() -> __m256 {
            _mm256_setzero_ps()
        }
        #[inline(always)]
        unsafe fn splat_f(v: f32) -> __m256 {
            _mm256_set1_ps(v)
        }
        #[inline(always)]
        unsafe fn mul(a: __m256, b: __m256) -> __m256 {
            _mm256_mul_ps(a, b)
        }
        #[inline(always)]
        unsafe fn sub(a: __m256, b: __m256) -> __m256 {
            _mm256_sub_ps(a, b)
        }
        #[inline(always)]
        unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            _mm256_fmadd_ps(a, b, c)
        }
        #[inline(always)]
        unsafe fn fnma(a: __m256, b: __m256, c: __m256) -> __m256 {
            _mm256_fnmadd_ps(a, b, c)
        }
        #[inline(always)]
        unsafe fn store(v: __m256, to: *mut f32) {
            _mm256_storeu_ps(to, v)
        }
    };
}

impl Isa for Avx2 {
    shared_256!();
    const SIGNED: bool = true;
    const STARTS: bool = false;

    #[inline(always)]
    unsafe fn dot(codes: &[__m256i; 8], q: *const u8, bits: u32) -> __m256i {
        let one = _mm256_set1_epi16(1);
        let mut sum = _mm256_madd_epi16(Self::some(codes, q, 0, Self::fits(bits)), one);
        let step = Self::fits(bits);
        let mut t = step;
        while t < 8 {
            let part = _mm256_madd_epi16(Self::some(codes, q, t, Self::fits(bits)), one);
            sum = _mm256_add_epi32(sum, part);
            t += step;
        }
        sum
    }

    #[inline(always)]
    unsafe fn dot_signed(codes: &[__m256i; 8], q: *const u8) -> __m256i {
        let one = _mm256_set1_epi16(1);
        let mut sum = _mm256_setzero_si256();
        let mut t = 0;
        while t < 8 {
            // AVX2 multiplies unsigned by signed bytes: the sign moves to the activation.
            let a = _mm256_sign_epi8(Self::all(q.add(4 * t)), codes[t]);
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[t]), a);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, one));
            t += 1;
        }
        sum
    }

    #[inline(always)]
    unsafe fn dot_pair(
        codes: &[__m256i; 8],
        q: *const u8,
        scales: __m256i,
        _: [i32; 2],
        bits: u32,
    ) -> __m256 {
        // Each sub-scale twice in its row's lane. Lanes of 64 bits repeat within the sixteen bytes
        // that a shuffle sees.
        let upper = _mm256_set_epi64x(0x0808_0808_0808_0808, 0, 0x0808_0808_0808_0808, 0);
        let low = _mm256_set1_epi64x(0x0504_0504_0100_0100);
        let high = _mm256_set1_epi64x(0x0706_0706_0302_0302);
        let s0 = _mm256_shuffle_epi8(scales, _mm256_add_epi8(low, upper));
        let s1 = _mm256_shuffle_epi8(scales, _mm256_add_epi8(high, upper));
        let sum = Self::half(codes, q, 0, s0, bits);
        _mm256_cvtepi32_ps(_mm256_add_epi32(sum, Self::half(codes, q, 4, s1, bits)))
    }

    #[inline(always)]
    unsafe fn dot_scaled(_: &[__m256i; 8], _: *const u8, _: [__m256; 2], _: [i32; 2]) -> __m256 {
        unreachable!("sums start at zero")
    }
}

impl Avx2 {
    /// Quads whose products can be added in an i16.
    #[inline(always)]
    const fn fits(bits: u32) -> usize {
        match bits {
            0..=4 => 8,
            5 => 4,
            _ => 2,
        }
    }

    /// Sums of four quads from `t` on, times `scale` in i16.
    #[inline(always)]
    unsafe fn half(
        codes: &[__m256i; 8],
        q: *const u8,
        t: usize,
        scale: __m256i,
        bits: u32,
    ) -> __m256i {
        let step = Self::fits(bits).min(4);
        let mut sum = _mm256_madd_epi16(Self::some(codes, q, t, step), scale);
        let mut i = step;
        while i < 4 {
            let part = _mm256_madd_epi16(Self::some(codes, q, t + i, step), scale);
            sum = _mm256_add_epi32(sum, part);
            i += step;
        }
        sum
    }

    /// Sums in i16 of `n` quads from `t` on.
    #[inline(always)]
    unsafe fn some(codes: &[__m256i; 8], q: *const u8, t: usize, n: usize) -> __m256i {
        let mut sum = _mm256_maddubs_epi16(codes[t], Self::all(q.add(4 * t)));
        let mut i = 1;
        while i < n {
            let part = _mm256_maddubs_epi16(codes[t + i], Self::all(q.add(4 * (t + i))));
            sum = _mm256_add_epi16(sum, part);
            i += 1;
        }
        sum
    }
}

/// 256 bits with a dot product of bytes.
macro_rules! vnni_256 {
    ($name:ident, $dpbusd:ident) => {
        impl Isa for $name {
            shared_256!();
            const SIGNED: bool = false;
            const STARTS: bool = true;

            #[inline(always)]
            unsafe fn dot(codes: &[__m256i; 8], q: *const u8, _: u32) -> __m256i {
                let mut sum = _mm256_setzero_si256();
                let mut t = 0;
                while t < 8 {
                    sum = $dpbusd(sum, codes[t], Self::all(q.add(4 * t)));
                    t += 1;
                }
                sum
            }

            #[inline(always)]
            unsafe fn dot_signed(codes: &[__m256i; 8], q: *const u8) -> __m256i {
                Self::dot(codes, q, 8)
            }

            #[inline(always)]
            unsafe fn dot_pair(
                codes: &[__m256i; 8],
                q: *const u8,
                scales: __m256i,
                start: [i32; 2],
                bits: u32,
            ) -> __m256 {
                if bits <= 3 {
                    // At most 16·7·127 = 14,224 either way: both sums fit an i16 of the lane.
                    let [a, b] = Self::sums(codes, q, start);
                    let both = _mm256_blend_epi16::<0xaa>(a, _mm256_slli_epi32::<16>(b));
                    return _mm256_cvtepi32_ps(_mm256_madd_epi16(both, scales));
                }
                Self::dot_scaled(codes, q, Self::halves(scales), start)
            }

            #[inline(always)]
            unsafe fn dot_scaled(
                codes: &[__m256i; 8],
                q: *const u8,
                [s0, s1]: [__m256; 2],
                start: [i32; 2],
            ) -> __m256 {
                let [a, b] = Self::sums(codes, q, start).map(|v| _mm256_cvtepi32_ps(v));
                _mm256_fmadd_ps(a, s0, _mm256_mul_ps(b, s1))
            }
        }

        impl $name {
            /// Products of both halves.
            #[inline(always)]
            unsafe fn sums(codes: &[__m256i; 8], q: *const u8, start: [i32; 2]) -> [__m256i; 2] {
                let mut sums = start.map(|v| _mm256_set1_epi32(v));
                let mut t = 0;
                while t < 4 {
                    sums[0] = $dpbusd(sums[0], codes[t], Self::all(q.add(4 * t)));
                    sums[1] = $dpbusd(sums[1], codes[t + 4], Self::all(q.add(4 * t + 16)));
                    t += 1;
                }
                sums
            }
        }
    };
}

vnni_256!(AvxVnni, _mm256_dpbusd_avx_epi32);
vnni_256!(Avx512Half, _mm256_dpbusd_epi32);
