//! Which kernels run, and on how many threads; decided once, at the start.

use kernels_avx2::Avx2;
use kernels_neon::Neon;

use crate::topology::{Machine, Mask, Want};

/// The kernels to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KernelChoice {
    /// The fastest that this processor has.
    #[default]
    Auto,
    /// AVX2, FMA and F16C, and no more than those.
    Avx2,
    /// AVX2 and dot products of bytes.
    AvxVnni,
    /// AVX-512 with dot products of bytes.
    Avx512,
    /// The same, and tiles (AMX) for prompts.
    Amx,
    /// ARMv8 NEON, and no more than that.
    Neon,
    /// NEON with dot products of bytes.
    NeonDotprod,
    /// The same, and products of small matrices of bytes for prompts.
    NeonI8mm,
    /// Plain Rust, 8-bit activations.
    Scalar,
    /// Plain Rust, fp32 activations: slow and exact.
    Exact,
}

impl KernelChoice {
    /// All choices by the names that [`available`] prints.
    pub const NAMES: [(&'static str, KernelChoice); 10] = [
        ("auto", KernelChoice::Auto),
        ("avx2", KernelChoice::Avx2),
        ("avx-vnni", KernelChoice::AvxVnni),
        ("avx512", KernelChoice::Avx512),
        ("amx", KernelChoice::Amx),
        ("neon", KernelChoice::Neon),
        ("neon-dotprod", KernelChoice::NeonDotprod),
        ("neon-i8mm", KernelChoice::NeonI8mm),
        ("scalar", KernelChoice::Scalar),
        ("exact", KernelChoice::Exact),
    ];

    /// The name of this choice.
    pub fn name(self) -> &'static str {
        Self::NAMES
            .iter()
            .find(|(_, c)| *c == self)
            .map_or("auto", |(n, _)| n)
    }

    /// The choice with this name.
    pub fn from_name(name: &str) -> Option<KernelChoice> {
        Self::NAMES
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, c)| *c)
    }
}

/// The x86 kernels of this choice; `None` where it is of others, or the processor lacks them.
pub(crate) fn avx2(choice: KernelChoice) -> Option<Avx2> {
    use kernels_avx2::Level;
    match choice {
        KernelChoice::Auto => Avx2::new(),
        KernelChoice::Avx2 => Avx2::with(Level::Avx2),
        KernelChoice::AvxVnni => Avx2::with(Level::AvxVnni),
        KernelChoice::Avx512 => Avx2::with(Level::Avx512),
        KernelChoice::Amx => Avx2::with(Level::Amx),
        _ => None,
    }
}

/// The Arm kernels of this choice; `None` where it is of others, or the processor lacks them.
pub(crate) fn neon(choice: KernelChoice) -> Option<Neon> {
    use kernels_neon::Level;
    match choice {
        KernelChoice::Auto => Neon::new(),
        KernelChoice::Neon => Neon::with(Level::Base),
        KernelChoice::NeonDotprod => Neon::with(Level::DotProd),
        KernelChoice::NeonI8mm => Neon::with(Level::I8mm),
        _ => None,
    }
}

/// Names of the kernels that can run here, the fastest first.
pub fn available() -> Vec<&'static str> {
    let x86 = kernels_avx2::Level::ALL
        .into_iter()
        .filter(|&l| Avx2::with(l).is_some());
    let arm = kernels_neon::Level::ALL
        .into_iter()
        .filter(|&l| Neon::with(l).is_some());
    x86.map(|l| l.name())
        .chain(arm.map(|l| l.name()))
        .chain(["scalar", "exact"])
        .collect()
}

/// Threads when none are asked for: two thirds of the physical cores, rounded up, at most 16,
/// big cores only, within affinity mask and control-group quota; see [`crate::topology`].
pub fn default_threads() -> usize {
    let affinity = Mask::current().map(|m| m.cpus());
    let want = Want {
        affinity: affinity.as_deref(),
        ..Want::default()
    };
    Machine::here().place(&want).threads
}
