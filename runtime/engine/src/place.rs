//! Where an engine's threads and memory go: machine, measured settings, node of the file.

use std::time::Duration;

use crate::Options;
use crate::map::Mapped;
use crate::numa::{self, Bound};
use crate::pool::Settings;
use crate::topology::{Machine, Mask, Placement, Want};
use crate::tune::{Key, Store, Tuned};

/// More threads than any machine runs well.
pub(crate) const MOST_THREADS: usize = 1024;

/// The choice, and the memory policy that goes with it.
pub(crate) struct Seat {
    pub(crate) placement: Placement,
    pub(crate) settings: Settings,
    /// Ends with the engine.
    _bound: Option<Bound>,
}

impl Seat {
    /// Flags win over what `runner tune` stored, and that over the rule of
    /// [`Machine::place`]. From here on this thread's memory comes from the chosen node.
    pub(crate) fn choose(file: &Mapped, options: &Options) -> Seat {
        let machine = Machine::here();
        let affinity = Mask::current().map(|m| m.cpus());
        let several = machine.nodes.len() > 1;
        let mut want = Want {
            affinity: affinity.as_deref(),
            threads: options.threads.map(|n| n.min(MOST_THREADS)),
            node: several.then(|| file_home(file, options)).flatten(),
            tuned: false,
            share: !options.pin,
        };
        let tuned = tuned(&machine, file, options);
        let mut placement = machine.place(&want);
        if let Some(tuned) = &tuned {
            // Measured without the affinity mask of this run, perhaps.
            if want.threads.is_none() && tuned.threads <= placement.available {
                (want.threads, want.tuned) = (Some(tuned.threads), true);
                placement = machine.place(&want);
            }
        }
        let tuned = tuned.filter(|t| t.threads == placement.threads);
        let settings = Settings {
            spin: options
                .spin
                .or(tuned.map(|t| t.spin()))
                .unwrap_or(Settings::default().spin),
            pin: options.pin,
        };
        log::info!("{}; {}", placement.why, waiting(settings.spin));
        placement.warnings.iter().for_each(|w| log::warn!("{w}"));
        let bound = placement.node.and_then(Bound::to);
        if options.renew_pages {
            renew(file, placement.node);
        }
        Seat {
            placement,
            settings,
            _bound: bound,
        }
    }

    /// Warns where the file's pages lie on another node, if most of them are in memory.
    pub(crate) fn check_pages(&self, file: &Mapped) {
        let Some(node) = self.placement.node else {
            return;
        };
        // Touching pages that are not there would read them from the disk.
        if file.residency().is_none_or(|r| r < 0.5) {
            return;
        }
        numa::touch(file, numa::SAMPLES);
        let nodes = numa::page_nodes(file, numa::SAMPLES).unwrap_or_default();
        if let Some(share) = numa::share(&nodes, node) {
            log::info!(
                "{:.0} % of the model's pages lie on node {node}",
                share * 100.0
            );
        }
        if let Some(advice) = numa::advice(&nodes, node) {
            log::warn!("{advice}");
        }
    }
}

/// The node of the file's pages, if most of them are in memory to stay.
fn file_home(file: &Mapped, options: &Options) -> Option<usize> {
    if options.renew_pages || file.residency()? < 0.5 {
        return None;
    }
    numa::touch(file, numa::SAMPLES);
    numa::home(&numa::page_nodes(file, numa::SAMPLES)?)
}

fn renew(file: &Mapped, node: Option<usize>) {
    match (node, numa::drop_pages(file)) {
        (_, Err(error)) => log::warn!("the model's pages are not renewed: {error}"),
        (Some(node), _) => log::info!("the model is read again, into node {node}"),
        (None, _) => log::info!("the model is read again"),
    }
}

fn waiting(spin: Duration) -> String {
    format!(
        "a thread without work spins {} µs and sleeps",
        spin.as_micros()
    )
}

fn tuned(machine: &Machine, file: &Mapped, options: &Options) -> Option<Tuned> {
    if options.threads.is_some() && options.spin.is_some() {
        return None;
    }
    let path = Store::path().filter(|p| p.exists())?;
    let key = Key::of(machine, file.bytes(), options.kernels);
    let tuned = Store::load(&path).get(&key).cloned()?;
    log::info!(
        "`runner tune` measured {} threads and {} µs of spinning as the best for this model ({})",
        tuned.threads,
        tuned.spin_us,
        path.display()
    );
    Some(tuned)
}
