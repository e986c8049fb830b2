//! Matrices in the layout of this machine's kernels, where the file has them in another.
//!
//! The copy takes as much memory as the matrices do in the file, and cannot be dropped and
//! read again as file pages can. So it is made only where there is room, and whoever wants
//! neither the memory nor the wait writes the file in this layout once (`myq relayout`).

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use myq_blocks::panels::{self, PANEL};
use myq_blocks::{DType, Layout};
use myq_model::Weights;
use myq_model::weights::{Matrix, Store};

use crate::EngineError;
use crate::prewarm::Progress;

/// Whether matrices are copied into the layout that the kernels want.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Repack {
    /// Where four fifths of the memory that is left hold the copy.
    #[default]
    Auto,
    /// In any case.
    Always,
    /// Not at all: slower, and no memory beside the file.
    Never,
}

impl Repack {
    /// All choices by name.
    pub const NAMES: [(&'static str, Repack); 3] = [
        ("auto", Repack::Auto),
        ("always", Repack::Always),
        ("never", Repack::Never),
    ];

    /// The choice with this name.
    pub fn from_name(name: &str) -> Option<Repack> {
        Self::NAMES
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, r)| *r)
    }
}

/// What became of matrices that are not in the layout that the kernels want.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Report {
    /// Bytes of those matrices, and so of the copy.
    pub bytes: u64,
    /// Time that the copy took; `None` if there was none.
    pub time: Option<Duration>,
    /// Bytes that were available, where that decided against a copy.
    pub available: Option<u64>,
}

/// Copies of matrices, from multiples of 64 bytes on.
pub(crate) struct Packed {
    memory: MmapMut,
}

impl Packed {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory
    }

    pub(crate) fn lock(&self) -> Result<(), EngineError> {
        self.memory.lock().map_err(EngineError::Lock)
    }
}

/// Bytes that a copy of all matrices of `weights` that are not in `layout` takes.
pub(crate) fn needed(weights: &mut Weights, layout: Layout) -> u64 {
    let other = weights.matrices_mut().filter(|m| wants(m, layout));
    other.map(|m| m.bytes().next_multiple_of(64) as u64).sum()
}

fn wants(m: &Matrix, layout: Layout) -> bool {
    m.layout == Layout::Plain && layout.of(m.dtype, m.cols) != Layout::Plain && m.rows >= PANEL
}

/// A run of panels of one matrix: from the file, to the copy.
struct Piece<'a> {
    dtype: DType,
    cols: usize,
    from: &'a [u8],
    to: &'a mut [u8],
}

/// About how many bytes a thread packs before it takes the next piece.
const PIECE: usize = 1 << 20;

/// Copies every matrix that is not in `layout`, and makes `weights` refer to the copies.
///
/// # Errors
/// If the system does not give the memory.
pub(crate) fn repack(
    weights: &mut Weights,
    file: &[u8],
    layout: Layout,
    threads: usize,
    progress: Progress<'_>,
) -> Result<(Packed, Duration), EngineError> {
    let start = Instant::now();
    let bytes = needed(weights, layout);
    let length = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut memory = MmapMut::map_anon(length).map_err(|e| EngineError::Repack(bytes, e))?;
    #[cfg(target_os = "linux")]
    if let Err(error) = memory.advise(memmap2::Advice::HugePage) {
        log::debug!("madvise(HUGEPAGE): {error}");
    }
    let mut rest: &mut [u8] = &mut memory;
    let (mut pieces, mut at) = (Vec::new(), 0);
    for m in weights.matrices_mut().filter(|m| wants(m, layout)) {
        let length = m.bytes().next_multiple_of(64);
        let (to, behind) = rest.split_at_mut(length);
        rest = behind;
        let from = m.view(Store::of_file(file)).data();
        cut(m, from, &mut to[..from.len()], &mut pieces);
        *m = m.repacked(layout, at);
        at += length;
    }
    pack_all(pieces, threads, bytes, progress);
    Ok((Packed { memory }, start.elapsed()))
}

/// Cuts a matrix into pieces; rows behind its panels become one that is only copied.
fn cut<'a>(m: &Matrix, from: &'a [u8], to: &'a mut [u8], pieces: &mut Vec<Piece<'a>>) {
    let panel = from.len() / m.rows * PANEL;
    let step = (PIECE / panel).max(1) * panel;
    let (dtype, cols) = (m.dtype, m.cols);
    for (from, to) in from.chunks(step).zip(to.chunks_mut(step)) {
        pieces.push(Piece {
            dtype,
            cols,
            from,
            to,
        });
    }
}

fn pack_all(pieces: Vec<Piece<'_>>, threads: usize, total: u64, progress: Progress<'_>) {
    let queue = Mutex::new(pieces.into_iter());
    let done = AtomicU64::new(0);
    let next = || queue.lock().ok()?.next();
    let work = || {
        while let Some(piece) = next() {
            done.fetch_add(piece.to.len() as u64, Relaxed);
            pack(piece);
        }
    };
    std::thread::scope(|scope| {
        // Fewer threads than asked for only take longer.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let workers: Vec<_> = (1..threads).filter_map(spawn).collect();
        let mut shown = Instant::now();
        while let Some(piece) = next() {
            done.fetch_add(piece.to.len() as u64, Relaxed);
            pack(piece);
            if shown.elapsed() > Duration::from_millis(100) {
                progress(done.load(Relaxed), total);
                shown = Instant::now();
            }
        }
        drop(workers);
    });
    progress(total, total);
}

fn pack(piece: Piece<'_>) {
    let Piece {
        dtype,
        cols,
        from,
        to,
        ..
    } = piece;
    let panel = PANEL * dtype.row_bytes(cols).unwrap_or(from.len());
    let (whole, behind) = to.split_at_mut(to.len() / panel * panel);
    behind.copy_from_slice(&from[whole.len()..]);
    for (from, to) in from.chunks_exact(panel).zip(whole.chunks_exact_mut(panel)) {
        panels::pack(dtype, cols, from, to);
    }
}
