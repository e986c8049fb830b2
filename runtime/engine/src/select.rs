//! Which kernels run, and on how many threads; decided once, at the start.

use kernels_avx2::{Avx2, Level};
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
    /// ARMv8 NEON.
    Neon,
    /// Plain Rust, 8-bit activations.
    Scalar,
    /// Plain Rust, fp32 activations: slow and exact.
    Exact,
}

impl KernelChoice {
    /// All choices by the names that [`available`] prints.
    pub const NAMES: [(&'static str, KernelChoice); 8] = [
        ("auto", KernelChoice::Auto),
        ("avx2", KernelChoice::Avx2),
        ("avx-vnni", KernelChoice::AvxVnni),
        ("avx512", KernelChoice::Avx512),
        ("amx", KernelChoice::Amx),
        ("neon", KernelChoice::Neon),
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

/// Names of the kernels that can run here, the fastest first.
pub fn available() -> Vec<&'static str> {
    let mut names = Vec::new();
    names.extend(
        Level::ALL
            .into_iter()
            .filter(|&l| Avx2::with(l).is_some())
            .map(Level::name),
    );
    if Neon::new().is_some() {
        names.push("neon");
    }
    names.extend(["scalar", "exact"]);
    names
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
