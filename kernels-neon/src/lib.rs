//! NEON kernels of myq, for every 64-bit Arm core.
//!
//! A [`Neon`] is the proof that the processor has the instructions. On other architectures
//! the crate compiles, and [`Neon::new`] gives none.
//!
//! Reading order: `dot` (128 codes times 128 activations, what extensions replace),
//! `driver` (rows times columns), one file for each family of formats, `vector` and
//! `attention`; `simd` has the instructions as safe functions.

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod attention;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod blocks32;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod dot;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod driver;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod floats;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod linear;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod simd;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod superblocks;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod ternary;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod vector;

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
pub use neon::Neon;

#[cfg(not(all(target_arch = "aarch64", target_endian = "little")))]
mod absent;
#[cfg(not(all(target_arch = "aarch64", target_endian = "little")))]
pub use absent::Neon;
