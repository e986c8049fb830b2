//! The kernel type on processors of other architectures: it has no values.

use myq_blocks::{Column, Kernels, Rows};

/// AVX2 kernels; no value exists on this architecture.
#[derive(Clone, Copy, Debug)]
pub enum Avx2 {}

impl Avx2 {
    /// `None`: this is not an x86-64 processor.
    pub fn new() -> Option<Avx2> {
        None
    }

    /// `None`: this is not an x86-64 processor.
    pub fn with(_: crate::Level) -> Option<Avx2> {
        None
    }
}

impl Kernels for Avx2 {
    fn name(self) -> &'static str {
        match self {}
    }

    fn matmul(self, _: Rows<'_>, _: &[Column<'_>], _: &mut [&mut [f32]]) {
        match self {}
    }
}
