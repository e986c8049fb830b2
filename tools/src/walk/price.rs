//! How long parts of the walk take beside each other, for the time that is left.

use indicatif::ProgressBar;
use myq_blocks::DType;

use super::Method;
use crate::model::Model;
use crate::pass::Part;
use crate::progress;

/// Multiplications for each weight and sweep of the descent beside the products.
const DESCENT: u64 = 2000;
/// A bar in thousands of multiplications, by the sizes of the model.
pub(super) struct Price {
    bar: ProgressBar,
    /// For each group of a layer, and then the output: sums of one token, and one row quantised.
    each: [(u64, u64); 5],
    /// All of each.
    groups: [u64; 5],
}

impl Price {
    pub(super) fn new(
        model: &Model,
        method: &Method,
        format: &dyn Fn(&str) -> Option<DType>,
        tokens: usize,
        label: &str,
    ) -> Price {
        let c = &model.config;
        let size = |name: &str| {
            let t = model.tensor(name);
            t.map_or((0, 0), |t| (t.rows() as u64, t.cols() as u64))
        };
        let parts = Part::GROUPS.map(|parts| {
            let sizes: Vec<_> = parts.iter().map(|p| size(&p.tensor(0))).collect();
            (sizes.iter().map(|s| s.0).sum(), sizes[0].1)
        });
        let cross = u64::from(method.propagate != 0.0);
        let effort = 2 + u64::from(method.effort.compensate) + method.effort.sweeps as u64;
        let price = |(rows, n): (u64, u64)| {
            // The source's state once, the quantised one twice.
            let token = 3 * rows * n + n * n / 2 + cross * n * n.min(2 * rows);
            let row = effort * n * n + DESCENT * n * method.effort.sweeps as u64;
            (token / 1000, row / 1000)
        };
        let output = if format(model.output_name()).is_some() {
            size(model.output_name())
        } else {
            (0, 0)
        };
        let (_, n) = output;
        let each = [
            price(parts[0]),
            price(parts[1]),
            price(parts[2]),
            price(parts[3]),
            (n * n * (1 + cross) / 1000, price(output).1),
        ];
        let rows = [parts[0].0, parts[1].0, parts[2].0, parts[3].0, output.0];
        let groups = std::array::from_fn(|g| each[g].0 * tokens as u64 + each[g].1 * rows[g]);
        let total = groups[..4].iter().sum::<u64>() * c.layers as u64 + groups[4];
        Price {
            bar: progress::bar(total, label),
            each,
            groups,
        }
    }

    /// A group of a layer begins; the output is group 0 of the layer behind the last.
    pub(super) fn begin(&self, layer: usize, group: usize) {
        let before = self.groups[..4].iter().sum::<u64>() * layer as u64;
        let before = before + self.groups[..group].iter().sum::<u64>();
        self.bar.set_position(before);
    }

    /// The sums of some tokens of a group are in; 4 is the output.
    pub(super) fn tokens(&self, group: usize, tokens: usize) {
        self.bar.inc(self.each[group].0 * tokens as u64);
    }

    /// Some rows of a group are quantised.
    pub(super) fn rows(&self, group: usize, rows: usize) {
        self.bar.inc(self.each[group].1 * rows as u64);
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
