//! The kernel type on processors of other architectures: it has no values.

use myq_blocks::{Column, ColumnMut, Kernels, Rows, f16};

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

    fn quantize(self, _: &[f32], _: ColumnMut<'_>) {
        match self {}
    }

    fn matmul(self, _: Rows<'_>, _: &[Column<'_>], _: &mut [&mut [f32]]) {
        match self {}
    }

    fn rms_norm(self, _: &[f32], _: &[f32], _: f32, _: &mut [f32]) {
        match self {}
    }

    fn swiglu(self, _: &mut [f32], _: &[f32]) {
        match self {}
    }

    fn softmax(self, _: &mut [f32]) {
        match self {}
    }

    fn scores(self, _: &[f32], _: &[f16], _: f32, _: &mut [f32]) {
        match self {}
    }

    fn mix(self, _: &[f32], _: &[f16], _: &mut [f32]) {
        match self {}
    }

    fn to_f16(self, _: &[f32], _: &mut [f16]) {
        match self {}
    }
}
