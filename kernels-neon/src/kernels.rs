//! From a format to its kernel.

use std::marker::PhantomData;

use myq_blocks::panels::PANEL;
use myq_blocks::{Column, ColumnMut, DType, Kernels, Layout, MAX_COLUMNS, Rows, f16};

use crate::Level;
use crate::dense::Dense;
use crate::dot::{Base, Dot, DotProd};
use crate::flat::{Iq4Nl, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::float::{BF16, F16, F32, Floats};
use crate::format::Format;
use crate::kquants::{Q2K, Q3K, Q4K, Q5K, Q6K};
use crate::rows::{Coded, sweep};
use crate::ternary::{Tq1_0, Tq2_0};
use crate::{attention, panels, quantize, vector};

/// Kernels of 64-bit Arm processors.
#[derive(Clone, Copy, Debug)]
pub struct Neon {
    level: Level,
}

impl Neon {
    /// The kernels of the best level that this processor has; NEON itself is in every one.
    pub fn new() -> Option<Neon> {
        Level::ALL.into_iter().find_map(Neon::with)
    }

    /// The kernels of that level, if this processor has the instructions.
    pub fn with(level: Level) -> Option<Neon> {
        level.here().then_some(Neon { level })
    }

    /// Rows in the plain layout.
    fn plain(self, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
        match self.level {
            Level::Base => plain::<Base>(w, columns, out),
            // Matrix products would need pairs of rows woven into each other.
            Level::DotProd | Level::I8mm => plain::<DotProd>(w, columns, out),
        }
    }
}

/// One function for each format and instruction set, not inlined into the dispatch.
#[inline(never)]
fn coded<F: Format, D: Dot>(
    format: F,
    w: Rows<'_>,
    columns: &[Column<'_>],
    out: &mut [&mut [f32]],
) {
    sweep(&Coded(format, PhantomData::<D>), w, columns, out);
}

fn plain<D: Dot>(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
    match w.dtype() {
        DType::F32 => sweep(&Floats(PhantomData::<F32>), w, columns, out),
        DType::F16 => sweep(&Floats(PhantomData::<F16>), w, columns, out),
        DType::BF16 => sweep(&Floats(PhantomData::<BF16>), w, columns, out),
        DType::Q4_0 => coded::<_, D>(Q4_0, w, columns, out),
        DType::Q4_1 => coded::<_, D>(Q4_1, w, columns, out),
        DType::Q5_0 => coded::<_, D>(Q5_0, w, columns, out),
        DType::Q5_1 => coded::<_, D>(Q5_1, w, columns, out),
        DType::Q8_0 => coded::<_, D>(Q8_0, w, columns, out),
        DType::Iq4Nl => coded::<_, D>(Iq4Nl, w, columns, out),
        DType::Q2K => coded::<_, D>(Q2K, w, columns, out),
        DType::Q3K => coded::<_, D>(Q3K, w, columns, out),
        DType::Q4K => coded::<_, D>(Q4K, w, columns, out),
        DType::Q5K => coded::<_, D>(Q5K, w, columns, out),
        DType::Q6K => coded::<_, D>(Q6K, w, columns, out),
        DType::Tq1_0 => coded::<_, D>(Tq1_0, w, columns, out),
        DType::Tq2_0 => coded::<_, D>(Tq2_0, w, columns, out),
        DType::Linear(l) => match l.bits() {
            2 => coded::<_, D>(Dense::<2>::new(l, w.cols()), w, columns, out),
            3 => coded::<_, D>(Dense::<3>::new(l, w.cols()), w, columns, out),
            5 => coded::<_, D>(Dense::<5>::new(l, w.cols()), w, columns, out),
            _ => coded::<_, D>(Dense::<6>::new(l, w.cols()), w, columns, out),
        },
    }
}

impl Kernels for Neon {
    fn name(self) -> &'static str {
        self.level.name()
    }

    fn layout(self) -> Layout {
        Layout::Rows8
    }

    fn quantize(self, x: &[f32], out: ColumnMut<'_>) {
        quantize::quantize(x, out);
    }

    fn matmul(self, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
        match self.level {
            _ if w.panels() == 0 => return self.plain(w, columns, out),
            Level::Base => panels::matmul::<panels::Base>(w, columns, out),
            Level::DotProd => panels::matmul::<panels::DotProd>(w, columns, out),
            Level::I8mm => panels::matmul::<panels::I8mm>(w, columns, out),
        }
        let (behind, first) = (w.behind_panels(), w.panels() * PANEL);
        if behind.rows() > 0 {
            let mut rest: [&mut [f32]; MAX_COLUMNS] = std::array::from_fn(|_| Default::default());
            for (rest, out) in rest.iter_mut().zip(out.iter_mut()) {
                *rest = &mut out[first..];
            }
            self.plain(behind, columns, &mut rest[..columns.len()]);
        }
    }

    fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        vector::rms_norm(x, weight, eps, out);
    }

    fn swiglu(self, gate: &mut [f32], up: &[f32]) {
        vector::swiglu(gate, up);
    }

    fn to_f16(self, x: &[f32], out: &mut [f16]) {
        vector::to_f16(x, out);
    }

    fn to_f32(self, x: &[f16], out: &mut [f32]) {
        attention::to_f32(x, out);
    }

    fn transpose(self, keys: &[f16], dim: usize, out: &mut [f32]) {
        attention::transpose(keys, dim, out);
    }

    fn product(self, a: &[f32], b: &[f32], inner: usize, out: &mut [f32]) {
        attention::product(a, b, inner, out);
    }

    fn exp_block(self, x: &mut [f32], max: f32) -> (f32, f32) {
        vector::exp_block(x, max)
    }

    fn scores(self, q: &[f32], keys: &[f16], dim: usize, out: &mut [f32]) {
        attention::scores(q, keys, dim, out);
    }

    fn mix(self, p: &[f32], values: &[f16], dim: usize, out: &mut [f32]) {
        attention::mix(p, values, dim, out);
    }
}
