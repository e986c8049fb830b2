//! NEON kernels of myq, for every 64-bit Arm core.
//!
//! A [`Neon`] is the proof that the processor has the instructions of its [`Level`]. Reading
//! order for the layout `rows8`: `panels` (one column, decoding), `panels::many` (prompts),
//! `panels::lanes` (what the levels do differently), `panels::formats`. For the plain layout:
//! `format` (what a format must say), `dot` (128 codes times 128 activations), `rows` (the
//! product), then the formats. `simd` has the instructions as safe functions.
//!
//! On other architectures the type exists, has no values, and `new` returns `None`.

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod attention;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod dense;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod dot;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod flat;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod float;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod format;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod kernels;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod kquants;
mod level;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod panels;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod quantize;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod rows;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod simd;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod ternary;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod vector;

#[cfg(not(all(target_arch = "aarch64", target_endian = "little")))]
mod absent;

#[cfg(not(all(target_arch = "aarch64", target_endian = "little")))]
pub use absent::Neon;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
pub use kernels::Neon;
pub use level::Level;
