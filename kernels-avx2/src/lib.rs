//! AVX2 kernels of myq.
//!
//! [`Avx2::new`] gives a value where the processor has AVX2, FMA and F16C; the value is the
//! proof that its methods may run. Reading order: `format` (what a format must say), `rows`
//! (the one product of rows and columns that all integer formats share), then the formats;
//! `panels` is the same for matrices stored in panels of eight rows, and faster.
//!
//! On other architectures the type exists, has no values, and `new` returns `None`.

#[cfg(target_arch = "x86_64")]
mod attention;
#[cfg(target_arch = "x86_64")]
mod dense;
#[cfg(target_arch = "x86_64")]
mod flat;
#[cfg(target_arch = "x86_64")]
mod float;
#[cfg(target_arch = "x86_64")]
mod format;
#[cfg(target_arch = "x86_64")]
mod kernels;
#[cfg(target_arch = "x86_64")]
mod kquants;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "x86_64")]
mod panels;
#[cfg(target_arch = "x86_64")]
mod quantize;
#[cfg(target_arch = "x86_64")]
mod rows;
#[cfg(target_arch = "x86_64")]
mod ternary;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod vector;

mod level;

#[cfg(not(target_arch = "x86_64"))]
mod absent;
#[cfg(not(target_arch = "x86_64"))]
pub use absent::Avx2;
#[cfg(target_arch = "x86_64")]
pub use kernels::Avx2;
pub use level::Level;
