//! From a format to its kernel.

use std::marker::PhantomData;

use myq_blocks::{Column, ColumnMut, DType, Kernels, Rows, f16};

use crate::dense::Dense;
use crate::dot::{Base, Dot};
use crate::flat::{Iq4Nl, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::float::{BF16, F16, F32, Floats};
use crate::format::Format;
use crate::kquants::{Q2K, Q3K, Q4K, Q5K, Q6K};
use crate::rows::{Coded, sweep};
use crate::ternary::{Tq1_0, Tq2_0};
use crate::{quantize, vector};

/// Kernels for the instructions that every Armv8-A core has.
#[derive(Clone, Copy, Debug)]
pub struct Neon {
    _private: (),
}

impl Neon {
    /// The kernels, if this processor has NEON: every 64-bit Arm processor does.
    pub fn new() -> Option<Neon> {
        cfg!(target_feature = "neon").then_some(Neon { _private: () })
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

fn matmul<D: Dot>(w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
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
        "neon"
    }

    fn quantize(self, x: &[f32], out: ColumnMut<'_>) {
        quantize::quantize(x, out);
    }

    fn matmul(self, w: Rows<'_>, columns: &[Column<'_>], out: &mut [&mut [f32]]) {
        matmul::<Base>(w, columns, out);
    }

    fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        vector::rms_norm(x, weight, eps, out);
    }

    fn swiglu(self, gate: &mut [f32], up: &[f32]) {
        vector::swiglu(gate, up);
    }

    fn softmax(self, x: &mut [f32]) {
        vector::softmax(x);
    }

    fn scores(self, q: &[f32], keys: &[f16], scale: f32, out: &mut [f32]) {
        vector::scores(q, keys, scale, out);
    }

    fn mix(self, p: &[f32], values: &[f16], out: &mut [f32]) {
        vector::mix(p, values, out);
    }

    fn to_f16(self, x: &[f32], out: &mut [f16]) {
        vector::to_f16(x, out);
    }
}
