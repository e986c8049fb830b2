//! What an integer format says about its bytes, and what formats share.
//!
//! A *chunk* is 256 weights: a superblock, eight blocks of 32, or 256 codes of a bit stream.
//! A *group* is 32 of them, as many as share an activation scale and as fill a register of
//! bytes.

use std::arch::x86_64::*;

/// Scales of a chunk: weight i of group g is
/// `d[g] · scales[i] · code − m[g] · offsets[i]`.
#[derive(Clone, Copy)]
pub(crate) struct Head {
    /// Eight fp32: scale of each group.
    pub(crate) d: __m256,
    /// Eight fp32: scale of the offsets of each group.
    pub(crate) m: __m256,
    /// Sixteen i16: sub-scales of the even sixteens in the low half, of the odd in the high.
    pub(crate) scales: __m256i,
    /// Sixteen i16 in order: offset or minimum of each 16 weights.
    pub(crate) offsets: __m256i,
}

/// Codes of a chunk that ends a row, groups of 32; what it lacks is zero.
pub(crate) type Codes = [__m256i; 8];

/// The part of a row behind its chunks.
#[derive(Clone, Copy)]
pub(crate) struct Rest<'a> {
    /// Bytes from the first that no whole chunk takes.
    pub(crate) bytes: &'a [u8],
    /// Weights in it: 1 to 255, a multiple of what the format allows.
    pub(crate) weights: usize,
    /// Number of whole chunks before it.
    pub(crate) index: usize,
}

/// An integer format whose chunks take `B` bytes.
///
/// # Safety
///
/// The methods need AVX2, FMA and F16C. Nothing else: lengths are checked.
pub(crate) trait Format<const B: usize>: Copy {
    /// Codes are signed bytes of −128 … 127; else unsigned ones of 0 … 63.
    const SIGNED: bool = false;
    /// Each 16 weights have a sub-scale; else `Head::scales` is not read.
    const SCALED: bool = false;
    /// There are offsets; else `Head::m` and `Head::offsets` are not read.
    const OFFSET: bool = true;

    /// The bytes of a row that lie outside of chunks (scales of bit streams).
    fn side(self, _row: &[u8]) -> &[u8] {
        &[]
    }

    /// Scales of chunk `index`.
    unsafe fn head(self, chunk: &[u8; B], side: &[u8], index: usize) -> Head;

    /// Codes of group `G`.
    unsafe fn codes<const G: usize>(self, chunk: &[u8; B]) -> __m256i;

    /// Scales and codes of what follows the last whole chunk.
    unsafe fn rest(self, rest: Rest<'_>, side: &[u8], codes: &mut Codes) -> Head;
}

/// 32 bytes from `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn load32(bytes: &[u8], at: usize) -> __m256i {
    let part = &bytes[at..at + 32];
    // SAFETY: `part` has the 32 bytes that the load reads; it needs no alignment.
    unsafe { _mm256_loadu_si256(part.as_ptr().cast()) }
}

/// Writes 32 bytes to `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn store32(bytes: &mut [u8], at: usize, v: __m256i) {
    let part = &mut bytes[at..at + 32];
    // SAFETY: `part` has room for the 32 bytes of the store; it needs no alignment.
    unsafe { _mm256_storeu_si256(part.as_mut_ptr().cast(), v) }
}

/// 16 bytes from `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn load16(bytes: &[u8], at: usize) -> __m128i {
    let part = &bytes[at..at + 16];
    // SAFETY: `part` has the 16 bytes that the load reads; it needs no alignment.
    unsafe { _mm_loadu_si128(part.as_ptr().cast()) }
}

/// Eight fp32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn load_f32(values: &[f32], at: usize) -> __m256 {
    let part = &values[at..at + 8];
    // SAFETY: `part` has the eight values that the load reads; it needs no alignment.
    unsafe { _mm256_loadu_ps(part.as_ptr()) }
}

/// Writes eight fp32 to `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn store_f32(values: &mut [f32], at: usize, v: __m256) {
    let part = &mut values[at..at + 8];
    // SAFETY: `part` has room for the eight values of the store; it needs no alignment.
    unsafe { _mm256_storeu_ps(part.as_mut_ptr(), v) }
}

/// Four bytes from `at`, little-endian.
#[inline]
pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    // A copy of the slice, as four indexed bytes would become four loads.
    let mut own = [0; 4];
    own.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(own)
}

/// Two bytes from `at`, as they are.
#[inline]
pub(crate) fn short(bytes: &[u8], at: usize) -> i16 {
    let mut own = [0; 2];
    own.copy_from_slice(&bytes[at..at + 2]);
    i16::from_le_bytes(own)
}

/// The fp16 number at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn half(bytes: &[u8], at: usize) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(short(bytes, at)))))
}

/// Every byte's bits `shift ..`, cut by `mask`, which must fit a byte after the shift.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn bits<const SHIFT: i32>(v: __m256i, mask: i8) -> __m256i {
    let v = if SHIFT == 0 {
        v
    } else {
        _mm256_srli_epi16::<SHIFT>(v)
    };
    _mm256_and_si256(v, _mm256_set1_epi8(mask))
}

/// Sixteen bytes: low nibbles in the low half, high ones in the high.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn nibbles(v: __m128i) -> __m256i {
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(v), v);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// Byte i is `value` where bit i of `stream` is set, else zero.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn bit_stream(stream: u32, value: i8) -> __m256i {
    let spread = _mm256_setr_epi64x(
        0,
        0x0101_0101_0101_0101,
        0x0202_0202_0202_0202,
        0x0303_0303_0303_0303,
    );
    let one = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(stream as i32), spread);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, one), one);
    _mm256_and_si256(set, _mm256_set1_epi8(value))
}

/// Sub-scales as [`Head::scales`] wants them, from sixteen signed bytes in order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn sub_scales(s: __m128i) -> __m256i {
    let split = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    _mm256_cvtepi8_epi16(_mm_shuffle_epi8(s, split))
}

/// For each group the bytes of [`Head::scales`] that make its scales: bytes 2g and 2g + 1.
pub(crate) static PLACES: [[u8; 32]; 8] = {
    let mut places = [[0; 32]; 8];
    let mut i = 0;
    while i < 256 {
        places[i / 32][i % 32] = (i / 32 * 2 + i % 2) as u8;
        i += 1;
    }
    places
};

/// The sub-scales of the group with that place (see [`PLACES`]), one for each pair of
/// products: what the multiply-add takes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn pair_scales(scales: __m256i, place: &[u8; 32]) -> __m256i {
    _mm256_shuffle_epi8(scales, load32(place, 0))
}

/// Sixteen bytes whose first `count` are all ones, the others zero.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn first_bytes(count: usize) -> __m128i {
    static ONES: [u8; 32] = {
        let mut ones = [0; 32];
        let mut i = 0;
        while i < 16 {
            ones[i] = 0xff;
            i += 1;
        }
        ones
    };
    load16(&ONES, 16 - count)
}

/// The `count` bytes that end at `end`, then zeros; there are sixteen bytes before `end`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn bytes_before(bytes: &[u8], end: usize, count: usize) -> __m128i {
    static DOWN: [u8; 32] = {
        let mut down = [0x80; 32];
        let mut i = 0;
        while i < 16 {
            down[i] = i as u8;
            i += 1;
        }
        down
    };
    _mm_shuffle_epi8(load16(bytes, end - 16), load16(&DOWN, 16 - count))
}

/// Group `g` of a 2-bit plane of a partial superblock of `n` weights.
///
/// The plane is cut into chunks of 128, 64 and 32 weights (`myq_blocks::tail`).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn partial_pairs(plane: &[u8], n: usize, g: usize) -> __m256i {
    let (whole, rest) = (n / 128, n % 128);
    let three = _mm256_set1_epi8(3);
    if g < 4 * whole {
        let shift = _mm_cvtsi32_si128(2 * (g % 4) as i32);
        let v = load32(plane, 32 * (g / 4));
        return _mm256_and_si256(_mm256_srl_epi16(v, shift), three);
    }
    let (base, g) = (32 * whole, g - 4 * whole);
    let v = if rest >= 64 && g < 2 {
        let v = _mm256_broadcastsi128_si256(load16(plane, base));
        let low = 4 * g as i32;
        let shifts = _mm256_set_m128i(_mm_set1_epi32(low + 2), _mm_set1_epi32(low));
        _mm256_srlv_epi32(v, shifts)
    } else {
        let base = if rest >= 64 { base + 16 } else { base };
        let v = u64::from(word(plane, base)) | u64::from(word(plane, base + 4)) << 32;
        _mm256_srlv_epi64(_mm256_set1_epi64x(v as i64), _mm256_setr_epi64x(0, 2, 4, 6))
    };
    _mm256_and_si256(v, three)
}

/// Group `g` of a nibble plane of a partial superblock of `n` weights; `chunk` is the whole
/// block's own chunk, 64 (Q4_K, Q5_K) or 128 (Q6_K).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn partial_nibbles(plane: &[u8], n: usize, chunk: usize, g: usize) -> __m256i {
    let (whole, rest, groups) = (n / chunk, n % chunk, chunk / 32);
    let half = groups / 2;
    let (at, high) = if g < whole * groups {
        let j = g % groups;
        (chunk / 2 * (g / groups) + 32 * (j % half), j >= half)
    } else {
        let (base, g) = (chunk / 2 * whole, g - whole * groups);
        if rest < 64 || g >= 2 {
            let base = if rest >= 64 { base + 32 } else { base };
            return nibbles(load16(plane, base));
        }
        (base, g == 1)
    };
    let v = load32(plane, at);
    if high {
        bits::<4>(v, 15)
    } else {
        bits::<0>(v, 15)
    }
}
