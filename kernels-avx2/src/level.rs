//! Which instructions a processor has beside AVX2.

/// Instructions that matrix products in panels use, the fewest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// AVX2, FMA and F16C.
    Avx2,
    /// The same, and dot products of bytes in 256 bits (AVX-VNNI).
    AvxVnni,
    /// AVX-512 with dot products of bytes (F, BW, DQ, VL, VNNI).
    Avx512,
    /// The same, and tiles (AMX-INT8 and AMX-BF16) for twelve columns or more.
    Amx,
}

impl Level {
    /// All levels, the best first.
    pub const ALL: [Level; 4] = [Level::Amx, Level::Avx512, Level::AvxVnni, Level::Avx2];

    /// The name, as kernels print it.
    pub fn name(self) -> &'static str {
        match self {
            Level::Avx2 => "avx2",
            Level::AvxVnni => "avx-vnni",
            Level::Avx512 => "avx512",
            Level::Amx => "amx",
        }
    }

    /// Whether this processor has the instructions.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn here(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        avx2 && match self {
            Level::Avx2 => true,
            Level::AvxVnni => is_x86_feature_detected!("avxvnni"),
            Level::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            Level::Amx => Level::Avx512.here() && crate::tiles::available(),
        }
    }
}
