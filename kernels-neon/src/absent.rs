//! What stands for the kernels where there is no NEON: a type without values.

use std::convert::Infallible;

use myq_blocks::{Column, ColumnMut, Kernels, Rows, f16};

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

    fn quantize(self, _: &[f32], _: ColumnMut<'_>) {
        match self._private {}
    }

    fn matmul(self, _: Rows<'_>, _: &[Column<'_>], _: &mut [&mut [f32]]) {
        match self._private {}
    }

    fn rms_norm(self, _: &[f32], _: &[f32], _: f32, _: &mut [f32]) {
        match self._private {}
    }

    fn swiglu(self, _: &mut [f32], _: &[f32]) {
        match self._private {}
    }

    fn softmax(self, _: &mut [f32]) {
        match self._private {}
    }

    fn scores(self, _: &[f32], _: &[f16], _: f32, _: &mut [f32]) {
        match self._private {}
    }

    fn mix(self, _: &[f32], _: &[f16], _: &mut [f32]) {
        match self._private {}
    }

    fn to_f16(self, _: &[f32], _: &mut [f16]) {
        match self._private {}
    }
}
