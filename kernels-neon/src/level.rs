//! The instruction set extensions that kernels know.

/// What a processor has beyond NEON, the best first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Level {
    /// Products of 2 × 8 by 8 × 2 bytes (Armv8.6, FEAT_I8MM), and dot products.
    I8mm,
    /// Dot products of four bytes (Armv8.2, FEAT_DotProd): Cortex-A76, A55 and later.
    DotProd,
    /// What every Armv8-A core has: Cortex-A53, A72.
    Base,
}

impl Level {
    /// All levels, the best first.
    pub const ALL: [Level; 3] = [Level::I8mm, Level::DotProd, Level::Base];

    /// Name as printed and as flags have it.
    pub fn name(self) -> &'static str {
        match self {
            Level::I8mm => "neon-i8mm",
            Level::DotProd => "neon-dotprod",
            Level::Base => "neon",
        }
    }

    /// Whether this processor has the instructions.
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    pub(crate) fn here(self) -> bool {
        use std::arch::is_aarch64_feature_detected as has;
        match self {
            Level::I8mm => has!("i8mm") && has!("dotprod"),
            Level::DotProd => has!("dotprod"),
            Level::Base => cfg!(target_feature = "neon"),
        }
    }
}
