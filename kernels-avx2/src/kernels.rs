//! The kernel type: proof of the instructions, and the choice of code per format.

use crate::Level;
use crate::dense::Dense;
use crate::{attention, flat, float, kquants, panels, quantize, rows, ternary, vector};
use myq_blocks::panels::PANEL;
use myq_blocks::{Column, ColumnMut, DType, Kernels, Layout, MAX_COLUMNS, Rows, f16};

/// Kernels for processors with AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2 {
    level: Level,
}

impl Avx2 {
    /// A value with the best level, if this processor has the instructions.
    pub fn new() -> Option<Avx2> {
        Level::ALL.into_iter().find_map(Avx2::with)
    }

    /// A value of that level, if this processor has the instructions.
    pub fn with(level: Level) -> Option<Avx2> {
        level.here().then_some(Avx2 { level })
    }

    /// Rows in the plain layout.
    fn plain(self, w: Rows<'_>, c: &[Column<'_>], out: &mut [&mut [f32]]) {
        // SAFETY: `self` was made by `with`, which found the instructions.
        unsafe {
            match w.dtype() {
                DType::F32 | DType::F16 | DType::BF16 => float::matmul(self.level, w, c, out),
                DType::Q4_0 => rows::matmul(flat::Q4_0, w, c, out),
                DType::Q4_1 => rows::matmul(flat::Q4_1, w, c, out),
                DType::Q5_0 => rows::matmul(flat::Q5_0, w, c, out),
                DType::Q5_1 => rows::matmul(flat::Q5_1, w, c, out),
                DType::Q8_0 => rows::matmul(flat::Q8_0, w, c, out),
                DType::Iq4Nl => rows::matmul(flat::Iq4Nl, w, c, out),
                DType::Q2K => rows::matmul(kquants::Q2K, w, c, out),
                DType::Q3K => rows::matmul(kquants::Q3K, w, c, out),
                DType::Q4K => rows::matmul(kquants::Q4K, w, c, out),
                DType::Q5K => rows::matmul(kquants::Q5K, w, c, out),
                DType::Q6K => rows::matmul(kquants::Q6K, w, c, out),
                DType::Tq1_0 => rows::matmul(ternary::Tq1, w, c, out),
                DType::Tq2_0 => rows::matmul(ternary::Tq2, w, c, out),
                DType::Linear(l) => match l.bits() {
                    2 => rows::matmul(Dense::<2>::new(l, w.cols()), w, c, out),
                    3 => rows::matmul(Dense::<3>::new(l, w.cols()), w, c, out),
                    5 => rows::matmul(Dense::<5>::new(l, w.cols()), w, c, out),
                    _ => rows::matmul(Dense::<6>::new(l, w.cols()), w, c, out),
                },
            }
        }
    }
}

impl Kernels for Avx2 {
    fn name(self) -> &'static str {
        self.level.name()
    }

    fn layout(self) -> Layout {
        Layout::Rows8
    }

    fn quantize(self, x: &[f32], out: ColumnMut<'_>) {
        // SAFETY: `self` was made by `with`, which found the instructions.
        unsafe { quantize::quantize(x, out) }
    }

    fn matmul(self, w: Rows<'_>, c: &[Column<'_>], out: &mut [&mut [f32]]) {
        if w.panels() == 0 {
            return self.plain(w, c, out);
        }
        panels::matmul(self.level, w, c, out);
        let (behind, first) = (w.behind_panels(), w.panels() * PANEL);
        if behind.rows() > 0 {
            let mut rest: [&mut [f32]; MAX_COLUMNS] = std::array::from_fn(|_| Default::default());
            for (rest, out) in rest.iter_mut().zip(out.iter_mut()) {
                *rest = &mut out[first..];
            }
            self.plain(behind, c, &mut rest[..c.len()]);
        }
    }

    fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        // SAFETY: `self` was made by `with`, which found the instructions.
        unsafe { vector::rms_norm(x, weight, eps, out) }
    }

    fn swiglu(self, gate: &mut [f32], up: &[f32]) {
        vector::swiglu(self.level, gate, up);
    }

    fn to_f16(self, x: &[f32], out: &mut [f16]) {
        // SAFETY: `self` was made by `with`, which found the instructions.
        unsafe { vector::to_f16(x, out) }
    }

    fn to_f32(self, x: &[f16], out: &mut [f32]) {
        // SAFETY: `self` was made by `with`, which found the instructions.
        unsafe { attention::to_f32(x, out) }
    }

    fn transpose(self, keys: &[f16], dim: usize, out: &mut [f32]) {
        // SAFETY: `self` was made by `with`, which found the instructions.
        unsafe { attention::transpose(keys, dim, out) }
    }

    fn product(self, a: &[f32], b: &[f32], inner: usize, out: &mut [f32]) {
        attention::product(self.level, a, b, inner, out);
    }

    fn exp_block(self, x: &mut [f32], max: f32) -> (f32, f32) {
        vector::exp_block(self.level, x, max)
    }

    fn scores(self, q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
        attention::scores(self.level, q, keys, dim, out);
    }

    fn mix(self, p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
        attention::mix(self.level, p, values, dim, out);
    }
}
