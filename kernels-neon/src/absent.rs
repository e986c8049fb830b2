//! What stands for the kernels where there is no NEON: a type without values.

use std::convert::Infallible;

use myq_blocks::{Column, Kernels, Rows};

/// Kernels of 64-bit Arm processors; no value of it exists on this architecture.
#[derive(Clone, Copy, Debug)]
pub struct Neon {
    _private: Infallible,
}

impl Neon {
    /// None: this is not a 64-bit Arm processor.
    pub fn new() -> Option<Neon> {
        None
    }

    /// None: this is not a 64-bit Arm processor.
    pub fn with(_: crate::Level) -> Option<Neon> {
        None
    }
}

impl Kernels for Neon {
    fn name(self) -> &'static str {
        match self._private {}
    }

    fn matmul(self, _: Rows<'_>, _: &[Column<'_>], _: &mut [&mut [f32]]) {
        match self._private {}
    }
}
