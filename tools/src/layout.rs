//! How tensors are stored in a file of some layout, and their bytes in another one.

use std::collections::BTreeSet;

use myq_blocks::panels::{self, PANEL};
use myq_blocks::{DType, Layout};

use crate::model::Tensor;

/// How a tensor of this type and shape is stored in a file of this layout.
///
/// Plain are vectors, matrices that do not fill a panel, and those whose type or row length
/// has no panels.
pub fn stored(layout: Layout, dtype: DType, shape: &[u64]) -> Layout {
    match shape {
        &[cols, rows] if rows >= PANEL as u64 => layout.of(dtype, cols as usize),
        _ => Layout::Plain,
    }
}

/// The layout that is fastest on this machine.
pub fn of_this_machine() -> Layout {
    // The vector kernels want panels, and the scalar ones take rows as they come.
    match myq_engine::available_kernels().first() {
        None | Some(&"scalar") => Layout::Plain,
        Some(_) => Layout::Rows8,
    }
}

/// Stores rows of `cols` weights in another layout; `bytes` and `out` are as long as each
/// other, and begin at a row whose number is a multiple of eight. Rows that do not fill a
/// panel are taken over as they are: they must be the tensor's last.
pub(crate) fn convert(
    dtype: DType,
    cols: usize,
    from: Layout,
    bytes: &[u8],
    to: Layout,
    out: &mut [u8],
) {
    let row_bytes = dtype.row_bytes(cols).unwrap_or(0);
    if from == to || row_bytes == 0 {
        return out.copy_from_slice(bytes);
    }
    let change = match to {
        Layout::Rows8 => panels::pack,
        Layout::Plain => panels::unpack,
    };
    let panel = PANEL * row_bytes;
    let (inside, behind) = bytes.split_at(bytes.len() / panel * panel);
    let (out, rest) = out.split_at_mut(inside.len());
    for (from, to) in inside.chunks_exact(panel).zip(out.chunks_exact_mut(panel)) {
        change(dtype, cols, from, to);
    }
    rest.copy_from_slice(behind);
}

/// How many tensors a file of some layout stores in which way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Matrices in panels.
    pub panels: usize,
    /// Those of them whose last rows do not fill a panel, and are plain.
    pub rests: usize,
    /// Vectors, which are plain.
    pub vectors: usize,
    /// Plain matrices that do not fill a panel.
    pub short: usize,
    /// Plain matrices whose type or row length has no panels.
    pub without: usize,
    /// Their types.
    pub types: BTreeSet<String>,
}

impl Census {
    /// Counts tensors by type and shape.
    pub fn of<'a>(layout: Layout, tensors: impl Iterator<Item = (DType, &'a [u64])>) -> Census {
        let mut c = Census::default();
        for (dtype, shape) in tensors {
            let rows: u64 = shape.iter().skip(1).product();
            if stored(layout, dtype, shape) == Layout::Rows8 {
                c.panels += 1;
                c.rests += usize::from(!rows.is_multiple_of(PANEL as u64));
            } else if shape.len() < 2 {
                c.vectors += 1;
            } else if rows < PANEL as u64 {
                c.short += 1;
            } else {
                c.without += 1;
                c.types.insert(dtype.name());
            }
        }
        c
    }

    /// Counts the tensors of a model as a file of this layout stores them.
    pub fn of_tensors(layout: Layout, tensors: &[Tensor]) -> Census {
        Census::of(layout, tensors.iter().map(|t| (t.dtype, &t.shape[..])))
    }

    /// The counts as a sentence for people.
    pub fn text(&self, layout: Layout) -> String {
        if layout == Layout::Plain {
            return "plain: one row after another".into();
        }
        let mut plain = vec![counted(self.vectors, "vector", "vectors")];
        if self.short > 0 {
            let kind = "of fewer than eight rows";
            plain.push(format!(
                "{} {kind}",
                counted(self.short, "matrix", "matrices")
            ));
        }
        if self.without > 0 {
            let types: Vec<&str> = self.types.iter().map(String::as_str).collect();
            plain.push(format!(
                "{} of a type or row length without panels ({})",
                counted(self.without, "matrix", "matrices"),
                types.join(", ")
            ));
        }
        let rests = match self.rests {
            0 => String::new(),
            n => format!(" ({n} with a few plain rows behind them)"),
        };
        format!(
            "{}: {} in panels of eight rows{rests}; plain: {}",
            layout.name(),
            counted(self.panels, "matrix", "matrices"),
            plain.join(", ")
        )
    }
}

fn counted(n: usize, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;
    use myq_blocks::decode::dequantize_row;
    use myq_blocks::encode::{Method, encode_rows};

    /// Every type of `myq quantize`, a linear and an older one; rows that fill two panels and
    /// a half, and end in a partial superblock.
    #[test]
    fn rows_go_into_panels_and_back() {
        let types = [
            "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "L3G64Z",
        ];
        for name in types {
            let dtype = DType::from_name(name).expect("a type");
            for cols in [32, 192, 256, 576] {
                let rows = 20;
                let x: Vec<f32> = (0..rows * cols)
                    .map(|i| ((i * 7919 % 1013) as f32 - 500.0) / 100.0)
                    .collect();
                let Some(bytes) = dtype.row_bytes(cols) else {
                    continue;
                };
                let mut plain = vec![0; rows * bytes];
                encode_rows(dtype, Method::Round, cols, &x, None, &mut plain).expect("finite");
                let (mut packed, mut back) = (plain.clone(), plain.clone());
                convert(
                    dtype,
                    cols,
                    Layout::Plain,
                    &plain,
                    Layout::Rows8,
                    &mut packed,
                );
                convert(
                    dtype,
                    cols,
                    Layout::Rows8,
                    &packed,
                    Layout::Plain,
                    &mut back,
                );
                assert_eq!(plain, back, "{name} of {cols}");
                assert_ne!(plain, packed, "{name} of {cols}");
                assert_eq!(plain[16 * bytes..], packed[16 * bytes..], "rows behind");
                let view = myq_blocks::Rows::in_layout(Layout::Rows8, dtype, cols, &packed)
                    .expect("whole rows");
                let (mut a, mut b) = (vec![0.0; cols], vec![0.0; cols]);
                for (r, row) in plain.chunks_exact(bytes).enumerate() {
                    dequantize_row(dtype, row, &mut a);
                    view.dequantize(r, &mut b);
                    assert_eq!(a, b, "{name} of {cols}, row {r}");
                }
            }
        }
    }

    #[test]
    fn what_has_no_panels_is_counted() {
        let q4 = DType::Q4K;
        let tensors: [(DType, &[u64]); 5] = [
            (q4, &[576, 20]),
            (q4, &[256, 8]),
            (q4, &[256, 7]),
            (DType::F16, &[256, 8]),
            (DType::F32, &[256]),
        ];
        let c = Census::of(Layout::Rows8, tensors.into_iter());
        assert_eq!((c.panels, c.rests, c.short, c.without), (2, 1, 1, 1));
        assert_eq!(
            c.text(Layout::Rows8),
            "rows8: 2 matrices in panels of eight rows (1 with a few plain rows behind them); \
             plain: 1 vector, 1 matrix of fewer than eight rows, \
             1 matrix of a type or row length without panels (F16)"
        );
        let plain = Census::of(Layout::Plain, tensors.into_iter());
        assert_eq!(plain.panels, 0);
    }
}
