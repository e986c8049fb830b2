//! The NEON instructions in use, as safe functions, and loads from arrays.
//!
//! The instructions keep the names of their intrinsics. `core::arch` asks for `unsafe` (or
//! a `target_feature` on every caller) although no build for this target is without NEON;
//! the wrappers state that once, so that the kernels themselves are safe code. They are
//! `inline(always)`, which `target_feature` does not allow: left to its heuristics the
//! compiler keeps calls in the inner loops.

use core::arch::aarch64 as arch;
pub(crate) use core::arch::aarch64::{
    float16x4_t, float32x4_t, int8x8_t, int8x16_t, int16x4_t, int16x8_t, int32x4_t, int64x2_t,
    uint8x8_t, uint8x16_t, uint16x4_t, uint16x8_t, uint32x4_t,
};

const _: () = assert!(
    cfg!(target_feature = "neon"),
    "this crate needs a target with NEON"
);

macro_rules! instructions {
    ($($name:ident($($a:ident: $t:ty),*) -> $r:ty;)*) => {$(
        #[inline(always)]
        pub(crate) fn $name($($a: $t),*) -> $r {
            // SAFETY: the intrinsic's only condition is NEON, which the assertion above
            // shows to be part of the target.
            unsafe { arch::$name($($a),*) }
        }
    )*};
}

macro_rules! shifts {
    ($($name:ident($t:ty) -> $r:ty;)*) => {$(
        #[inline(always)]
        pub(crate) fn $name<const N: i32>(a: $t) -> $r {
            // SAFETY: the intrinsic's only condition is NEON, which the assertion above
            // shows to be part of the target.
            unsafe { arch::$name::<N>(a) }
        }
    )*};
}

macro_rules! lanes {
    ($($name:ident($($a:ident: $t:ty),*) -> $r:ty;)*) => {$(
        #[inline(always)]
        pub(crate) fn $name<const LANE: i32>($($a: $t),*) -> $r {
            // SAFETY: the intrinsic's only condition is NEON, which the assertion above
            // shows to be part of the target.
            unsafe { arch::$name::<LANE>($($a),*) }
        }
    )*};
}

macro_rules! memory {
    ($($load:ident $store:ident $ld:ident $st:ident $e:ty, $n:literal, $v:ty;)*) => {$(
        #[inline(always)]
        #[allow(dead_code, reason = "made in pairs; some types are only loaded")]
        pub(crate) fn $load(from: &[$e; $n]) -> $v {
            // SAFETY: the array has as many readable elements as the vector; NEON as above.
            unsafe { arch::$ld(from.as_ptr()) }
        }

        #[inline(always)]
        #[allow(dead_code, reason = "made in pairs; some types are only loaded")]
        pub(crate) fn $store(to: &mut [$e; $n], v: $v) {
            // SAFETY: the array has as many writable elements as the vector; NEON as above.
            unsafe { arch::$st(to.as_mut_ptr(), v) }
        }
    )*};
}

memory! {
    load_s8 store_s8 vld1q_s8 vst1q_s8 i8, 16, int8x16_t;
    load_u8 store_u8 vld1q_u8 vst1q_u8 u8, 16, uint8x16_t;
    load_s16x4 store_s16x4 vld1_s16 vst1_s16 i16, 4, int16x4_t;
    load_s16 store_s16 vld1q_s16 vst1q_s16 i16, 8, int16x8_t;
    load_u16x4 store_u16x4 vld1_u16 vst1_u16 u16, 4, uint16x4_t;
    load_s32 store_s32 vld1q_s32 vst1q_s32 i32, 4, int32x4_t;
    load_f32 store_f32 vld1q_f32 vst1q_f32 f32, 4, float32x4_t;
}

shifts! {
    vshrq_n_u8(uint8x16_t) -> uint8x16_t;
    vshlq_n_u8(uint8x16_t) -> uint8x16_t;
    vshlq_n_s32(int32x4_t) -> int32x4_t;
    vshll_n_u16(uint16x4_t) -> uint32x4_t;
    vshlq_n_s16(int16x8_t) -> int16x8_t;
    vshrq_n_s16(int16x8_t) -> int16x8_t;
    vshrq_n_u16(uint16x8_t) -> uint16x8_t;
}

// The last argument's lane `LANE` meets all lanes of the others.
lanes! {
    vdupq_laneq_s32(a: int32x4_t) -> int32x4_t;
    vmull_laneq_s16(a: int16x4_t, b: int16x8_t) -> int32x4_t;
    vmlal_high_laneq_s16(a: int32x4_t, b: int16x8_t, c: int16x8_t) -> int32x4_t;
    vmlsl_laneq_s16(a: int32x4_t, b: int16x4_t, c: int16x8_t) -> int32x4_t;
    vmlsl_high_laneq_s16(a: int32x4_t, b: int16x8_t, c: int16x8_t) -> int32x4_t;
    vmulq_laneq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vfmaq_laneq_f32(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t;
}

instructions! {
    // Fill, combine, reinterpret.
    vdupq_n_u8(a: u8) -> uint8x16_t;
    vdup_n_u8(a: u8) -> uint8x8_t;
    vdupq_n_s32(a: i32) -> int32x4_t;
    vdupq_n_u32(a: u32) -> uint32x4_t;
    vdupq_n_f32(a: f32) -> float32x4_t;
    vcreate_u8(a: u64) -> uint8x8_t;
    vcombine_u8(a: uint8x8_t, b: uint8x8_t) -> uint8x16_t;
    vget_low_s8(a: int8x16_t) -> int8x8_t;
    vget_low_u8(a: uint8x16_t) -> uint8x8_t;
    vget_low_s16(a: int16x8_t) -> int16x4_t;
    vget_low_u16(a: uint16x8_t) -> uint16x4_t;
    vget_high_u16(a: uint16x8_t) -> uint16x4_t;
    vreinterpretq_f32_u8(a: uint8x16_t) -> float32x4_t;
    vreinterpretq_s8_u8(a: uint8x16_t) -> int8x16_t;
    vreinterpretq_u8_s8(a: int8x16_t) -> uint8x16_t;
    vreinterpretq_u8_u32(a: uint32x4_t) -> uint8x16_t;
    vreinterpretq_u8_u16(a: uint16x8_t) -> uint8x16_t;
    vreinterpretq_u16_u8(a: uint8x16_t) -> uint16x8_t;
    vreinterpretq_s16_u16(a: uint16x8_t) -> int16x8_t;
    vreinterpretq_f32_u32(a: uint32x4_t) -> float32x4_t;
    vreinterpretq_f32_s32(a: int32x4_t) -> float32x4_t;
    vreinterpretq_f32_s16(a: int16x8_t) -> float32x4_t;
    vreinterpretq_s32_f32(a: float32x4_t) -> int32x4_t;
    vreinterpretq_s64_s32(a: int32x4_t) -> int64x2_t;
    vreinterpretq_s32_s64(a: int64x2_t) -> int32x4_t;
    vreinterpretq_u32_f32(a: float32x4_t) -> uint32x4_t;
    vreinterpretq_s16_u8(a: uint8x16_t) -> int16x8_t;
    vreinterpretq_s16_s8(a: int8x16_t) -> int16x8_t;
    vreinterpretq_s32_s8(a: int8x16_t) -> int32x4_t;
    vreinterpretq_s8_s32(a: int32x4_t) -> int8x16_t;
    vreinterpretq_s64_s16(a: int16x8_t) -> int64x2_t;
    vreinterpretq_s16_s64(a: int64x2_t) -> int16x8_t;
    vreinterpretq_s64_s8(a: int8x16_t) -> int64x2_t;
    vreinterpretq_s8_s64(a: int64x2_t) -> int8x16_t;
    vreinterpretq_s16_s32(a: int32x4_t) -> int16x8_t;
    vdup_n_s16(a: i16) -> int16x4_t;
    vdupq_n_s16(a: i16) -> int16x8_t;
    vdupq_n_u16(a: u16) -> uint16x8_t;
    vreinterpret_f16_u16(a: uint16x4_t) -> float16x4_t;
    vreinterpret_f16_u8(a: uint8x8_t) -> float16x4_t;
    vreinterpret_u16_f16(a: float16x4_t) -> uint16x4_t;
    // Bits and bytes.
    vandq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vandq_s8(a: int8x16_t, b: int8x16_t) -> int8x16_t;
    vorrq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vbicq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vbicq_u32(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t;
    vtstq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vcgeq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vsubq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vaddq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vmulq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vshlq_u8(a: uint8x16_t, b: int8x16_t) -> uint8x16_t;
    vshlq_u16(a: uint16x8_t, b: int16x8_t) -> uint16x8_t;
    vqtbl1q_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vqtbl1q_s8(a: int8x16_t, b: uint8x16_t) -> int8x16_t;
    vuzp1q_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vuzp1q_s16(a: int16x8_t, b: int16x8_t) -> int16x8_t;
    vuzp2q_s16(a: int16x8_t, b: int16x8_t) -> int16x8_t;
    vzip1q_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vzip2q_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vzip1q_s16(a: int16x8_t, b: int16x8_t) -> int16x8_t;
    vzip2q_s16(a: int16x8_t, b: int16x8_t) -> int16x8_t;
    vuzp1q_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vuzp2q_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vzip1q_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vzip2q_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vtrn1q_s64(a: int64x2_t, b: int64x2_t) -> int64x2_t;
    vtrn2q_s64(a: int64x2_t, b: int64x2_t) -> int64x2_t;
    vandq_u16(a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vsubq_s8(a: int8x16_t, b: int8x16_t) -> int8x16_t;
    vdupq_n_s8(a: i8) -> int8x16_t;
    // Widening and narrowing.
    vmovl_u8(a: uint8x8_t) -> uint16x8_t;
    vmovl_high_u8(a: uint8x16_t) -> uint16x8_t;
    vmovl_s8(a: int8x8_t) -> int16x8_t;
    vmovl_high_s8(a: int8x16_t) -> int16x8_t;
    vmovl_s16(a: int16x4_t) -> int32x4_t;
    vmovl_high_s16(a: int16x8_t) -> int32x4_t;
    vqmovn_s32(a: int32x4_t) -> int16x4_t;
    vqmovn_high_s32(a: int16x4_t, b: int32x4_t) -> int16x8_t;
    vqmovn_s16(a: int16x8_t) -> int8x8_t;
    vqmovn_high_s16(a: int8x8_t, b: int16x8_t) -> int8x16_t;
    // Integer products and sums.
    vmull_s8(a: int8x8_t, b: int8x8_t) -> int16x8_t;
    vmull_high_s8(a: int8x16_t, b: int8x16_t) -> int16x8_t;
    vmlal_s8(a: int16x8_t, b: int8x8_t, c: int8x8_t) -> int16x8_t;
    vmlal_high_s8(a: int16x8_t, b: int8x16_t, c: int8x16_t) -> int16x8_t;
    vmull_s16(a: int16x4_t, b: int16x4_t) -> int32x4_t;
    vmull_high_s16(a: int16x8_t, b: int16x8_t) -> int32x4_t;
    vmlal_s16(a: int32x4_t, b: int16x4_t, c: int16x4_t) -> int32x4_t;
    vmlal_high_s16(a: int32x4_t, b: int16x8_t, c: int16x8_t) -> int32x4_t;
    vmulq_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vmlaq_s32(a: int32x4_t, b: int32x4_t, c: int32x4_t) -> int32x4_t;
    vmlsq_s32(a: int32x4_t, b: int32x4_t, c: int32x4_t) -> int32x4_t;
    vaddq_s16(a: int16x8_t, b: int16x8_t) -> int16x8_t;
    vaddq_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vsubq_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vpaddq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vpaddq_s16(a: int16x8_t, b: int16x8_t) -> int16x8_t;
    vpaddq_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vpaddlq_s16(a: int16x8_t) -> int32x4_t;
    vpadalq_s16(a: int32x4_t, b: int16x8_t) -> int32x4_t;
    vpaddlq_s8(a: int8x16_t) -> int16x8_t;
    vpadalq_s8(a: int16x8_t, b: int8x16_t) -> int16x8_t;
    vaddlvq_s8(a: int8x16_t) -> i16;
    // Floats.
    vcvtq_f32_s32(a: int32x4_t) -> float32x4_t;
    vcvtnq_s32_f32(a: float32x4_t) -> int32x4_t;
    vcvt_f32_f16(a: float16x4_t) -> float32x4_t;
    vcvt_f16_f32(a: float32x4_t) -> float16x4_t;
    vrndnq_f32(a: float32x4_t) -> float32x4_t;
    vabsq_f32(a: float32x4_t) -> float32x4_t;
    vnegq_f32(a: float32x4_t) -> float32x4_t;
    vaddq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vsubq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vmulq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vmulq_n_f32(a: float32x4_t, b: f32) -> float32x4_t;
    vdivq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vfmaq_f32(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t;
    vfmaq_n_f32(a: float32x4_t, b: float32x4_t, c: f32) -> float32x4_t;
    vfmsq_f32(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t;
    vminq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vmaxq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vmaxnmq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vmaxnmvq_f32(a: float32x4_t) -> f32;
    vaddvq_f32(a: float32x4_t) -> f32;
    vcltq_f32(a: float32x4_t, b: float32x4_t) -> uint32x4_t;
}

/// Instructions of extensions, whose intrinsics are not stable.
macro_rules! extension {
    ($($(#[$doc:meta])* $name:ident $(<$lane:ident>)?: $feature:literal, $text:literal;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(crate) fn $name<$(const $lane: usize)?>(
            mut a: int32x4_t,
            b: int8x16_t,
            c: int8x16_t,
        ) -> int32x4_t {
            // SAFETY: registers only. A processor without the extension stops here, but only
            // code of a level that `Level::here` found in it comes here.
            unsafe {
                std::arch::asm!(
                    concat!(".arch_extension ", $feature),
                    $text,
                    a = inout(vreg) a,
                    b = in(vreg) b,
                    c = in(vreg) c,
                    $($lane = const $lane,)?
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            a
        }
    )*};
}

extension! {
    /// `a[i] + Σ b[4i + j] · c[4i + j]`, j in 0..4.
    sdot: "dotprod", "sdot {a:v}.4s, {b:v}.16b, {c:v}.16b";
    /// `a[i] + Σ b[4i + j] · c[4·LANE + j]`, j in 0..4.
    sdot_lane<LANE>: "dotprod", "sdot {a:v}.4s, {b:v}.16b, {c:v}.4b[{LANE}]";
    /// `a[2i + k] + Σ b[8i + j] · c[8k + j]`, j in 0..8.
    smmla: "i8mm", "smmla {a:v}.4s, {b:v}.16b, {c:v}.16b";
}

/// `low` with the bits of `high` where `mask` is set. The intrinsic would be taken apart into
/// three instructions where the mask is a constant.
#[inline(always)]
pub(crate) fn insert(mut low: uint8x16_t, high: uint8x16_t, mask: uint8x16_t) -> uint8x16_t {
    // SAFETY: an instruction of NEON on registers.
    unsafe {
        std::arch::asm!(
            "bit {low:v}.16b, {high:v}.16b, {mask:v}.16b",
            low = inout(vreg) low,
            high = in(vreg) high,
            mask = in(vreg) mask,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    low
}

/// Asks for the cache line `AHEAD` bytes behind `from`'s start, to be read once.
macro_rules! prefetch {
    ($from:expr, $ahead:expr) => {{
        let from: *const u8 = <[u8]>::as_ptr($from);
        // SAFETY: a hint, which has no effect but on caches and faults at no address.
        unsafe {
            std::arch::asm!(
                "prfm pldl1strm, [{from}, #{ahead}]",
                from = in(reg) from,
                ahead = const $ahead,
                options(readonly, nostack, preserves_flags)
            );
        }
    }};
}
pub(crate) use prefetch;

/// Asks for the cache line `ahead` bytes behind `from`'s start.
#[inline(always)]
pub(crate) fn prefetch_far(from: &[u8], ahead: usize) {
    let from = from.as_ptr().wrapping_add(ahead);
    // SAFETY: a hint, which has no effect but on caches and faults at no address.
    unsafe {
        std::arch::asm!(
            "prfm pldl1strm, [{from}]",
            from = in(reg) from,
            options(readonly, nostack, preserves_flags)
        );
    }
}

/// `N` elements of `from` at `at`. Panics where they are not all there; every caller's
/// arrays have a fixed length, so that the check is gone after inlining.
#[inline(always)]
pub(crate) fn part<const N: usize, T>(from: &[T], at: usize) -> &[T; N] {
    from[at..]
        .first_chunk()
        .expect("kernel reads within its block")
}

/// As [`part`], to write to.
#[inline(always)]
pub(crate) fn part_mut<const N: usize, T>(to: &mut [T], at: usize) -> &mut [T; N] {
    to[at..]
        .first_chunk_mut()
        .expect("kernel writes within its block")
}

/// Bytes 16·`i` … of `from`.
#[inline(always)]
pub(crate) fn bytes(from: &[u8], at: usize) -> uint8x16_t {
    load_u8(part(from, at))
}

/// The little-endian fp16 number at `at`.
#[inline(always)]
pub(crate) fn half(from: &[u8], at: usize) -> f32 {
    let [v, ..] = halves([u16::from_le_bytes(*part(from, at)), 0, 0, 0]);
    v
}

#[inline(always)]
fn halves(bits: [u16; 4]) -> [f32; 4] {
    let mut out = [0.0; 4];
    store_f32(&mut out, widen_half(&bits));
    out
}

/// Four fp16 numbers, given by their bits.
#[inline(always)]
pub(crate) fn widen_half(bits: &[u16; 4]) -> float32x4_t {
    vcvt_f32_f16(vreinterpret_f16_u16(load_u16x4(bits)))
}

/// Sixteen unsigned bytes as four vectors.
#[inline(always)]
pub(crate) fn widen_u8(v: uint8x16_t) -> [[int32x4_t; 2]; 2] {
    let widen = |v| [vmovl_s16(vget_low_s16(v)), vmovl_high_s16(v)];
    [
        widen(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(v)))),
        widen(vreinterpretq_s16_u16(vmovl_high_u8(v))),
    ]
}

/// Sixteen signed bytes as four vectors.
#[inline(always)]
pub(crate) fn widen_s8(v: int8x16_t) -> [[int32x4_t; 2]; 2] {
    let widen = |v| [vmovl_s16(vget_low_s16(v)), vmovl_high_s16(v)];
    [widen(vmovl_s8(vget_low_s8(v))), widen(vmovl_high_s8(v))]
}
