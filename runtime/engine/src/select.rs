//! Which kernels run, and on how many threads; decided once, at the start.

use kernels_avx2::Avx2;
use kernels_neon::Neon;

/// The kernels to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KernelChoice {
    /// The fastest that this processor has.
    #[default]
    Auto,
    /// AVX2, FMA and F16C.
    Avx2,
    /// ARMv8 NEON.
    Neon,
    /// Plain Rust, 8-bit activations.
    Scalar,
    /// Plain Rust, fp32 activations: slow and exact.
    Exact,
}

impl KernelChoice {
    /// All choices by the names that [`available`] prints.
    pub const NAMES: [(&'static str, KernelChoice); 5] = [
        ("auto", KernelChoice::Auto),
        ("avx2", KernelChoice::Avx2),
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
    if Avx2::new().is_some() {
        names.push("avx2");
    }
    if Neon::new().is_some() {
        names.push("neon");
    }
    names.extend(["scalar", "exact"]);
    names
}

/// Threads when none are asked for: the processors this process may use, within affinity
/// mask and control-group quota, at most 16.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(16))
}
