//! Block formats, scalar reference and kernel contract of myq.
//!
//! No I/O, no threads, no mmap. A tensor is rows of weights in one [`DType`]; a kernel
//! crate implements [`Kernels`] over those rows and runs the module `conformance` (a feature)
//! in its tests.

pub mod acts;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod decode;
pub mod dense;
pub mod dtype;
pub mod encode;
pub mod kernels;
pub mod layout;
pub mod panels;
pub mod scalar;
pub mod tail;

pub use acts::{ActBuffer, Column, ColumnMut};
pub use dense::Linear;
pub use dtype::DType;
pub use half::f16;
pub use kernels::{Kernels, MAX_COLUMNS, Rows, RowsError};
pub use panels::Layout;
