//! Hidden states of all calibration tokens: in memory where they fit, else in the work folder.
//!
//! Of each sample there are two, by the source's weights and by the quantised ones, tokens × width
//! each. A layer goes through them sample by sample, so that never more than a few are in memory
//! when they lie on the disk.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use crate::ToolError;
use crate::work::{Work, bytes_of, floats_of};

/// Bytes of states that are kept in memory; there are two of them, before and within a layer.
const IN_MEMORY: usize = 1 << 28;

/// The states of a sample: by the source, by the quantised weights.
pub type Pair = [Vec<f32>; 2];

/// Hidden states at one place of the model.
pub struct States {
    /// Floats of each of a sample's two states.
    lens: Vec<usize>,
    place: Place,
}

enum Place {
    Memory(Vec<Pair>),
    Disk { file: File, path: PathBuf },
}

impl States {
    /// Empty ones for samples of so many floats, for [`States::set`]; `name` is the file's in the
    /// work folder, if they go there.
    ///
    /// # Errors
    /// A folder that cannot be written to.
    pub fn new(lens: Vec<usize>, work: &Work, name: &str) -> Result<States, ToolError> {
        let total = 8 * lens.iter().sum::<usize>();
        States::within(IN_MEMORY, total, lens, work, name)
    }

    fn within(
        limit: usize,
        total: usize,
        lens: Vec<usize>,
        work: &Work,
        name: &str,
    ) -> Result<States, ToolError> {
        let place = match work.path(name).filter(|_| total > limit) {
            None => Place::Memory(vec![Pair::default(); lens.len()]),
            Some(path) => {
                let mut options = OpenOptions::new();
                options.read(true).write(true).create(true).truncate(true);
                let file = options.open(&path).map_err(|error| ToolError::Read {
                    path: path.clone(),
                    error,
                })?;
                Place::Disk { file, path }
            }
        };
        Ok(States { lens, place })
    }

    /// Samples.
    pub fn len(&self) -> usize {
        self.lens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lens.is_empty()
    }

    /// Floats of one kind before sample `i`.
    fn start(&self, i: usize) -> usize {
        self.lens[..i].iter().sum()
    }

    /// The states of sample `i`.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn get(&mut self, i: usize) -> Result<Pair, ToolError> {
        let start = 8 * self.start(i) as u64;
        match &mut self.place {
            Place::Memory(all) => Ok(all[i].clone()),
            Place::Disk { file, path } => {
                let mut bytes = vec![0; 8 * self.lens[i]];
                let read = file
                    .seek(SeekFrom::Start(start))
                    .and_then(|_| file.read_exact(&mut bytes));
                read.map_err(|error| ToolError::Read {
                    path: path.clone(),
                    error,
                })?;
                let mut first = floats_of(&bytes);
                let second = first.split_off(self.lens[i]);
                Ok([first, second])
            }
        }
    }

    /// Replaces the states of sample `i`.
    ///
    /// # Errors
    /// A full disk.
    pub fn set(&mut self, i: usize, pair: Pair) -> Result<(), ToolError> {
        let start = 8 * self.start(i) as u64;
        match &mut self.place {
            Place::Memory(all) => all[i] = pair,
            Place::Disk { file, path } => {
                let bytes = bytes_of(&[&pair[0], &pair[1]]);
                let written = file
                    .seek(SeekFrom::Start(start))
                    .and_then(|_| file.write_all(&bytes));
                written.map_err(|source| ToolError::write(path, source))?;
            }
        }
        Ok(())
    }

    /// Keeps all of them under `name` in the work folder, for a run that goes on.
    ///
    /// # Errors
    /// A full disk.
    pub fn keep(&mut self, work: &Work, name: &str) -> Result<(), ToolError> {
        if !work.lasts() {
            return Ok(());
        }
        let pairs = (0..self.len()).map(|i| self.get(i).map(|p| bytes_of(&[&p[0], &p[1]])));
        work.keep_parts(name, pairs)
    }

    /// What was kept under `name`, if it is whole and of samples of these lengths.
    ///
    /// # Errors
    /// A full disk, where they are copied.
    pub fn kept(
        lens: &[usize],
        work: &Work,
        name: &str,
        copy: &str,
    ) -> Result<Option<States>, ToolError> {
        let mut states = States::new(lens.to_vec(), work, copy)?;
        let mut next = 0;
        let sizes: Vec<usize> = lens.iter().map(|n| 8 * n).collect();
        let whole = work.kept_parts(name, &sizes, &mut |bytes| {
            let mut first = floats_of(bytes);
            let second = first.split_off(lens[next]);
            states.set(next, [first, second])?;
            next += 1;
            Ok(())
        })?;
        Ok(whole.then_some(states))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_disk_hold_the_same() {
        let dir = tempfile::tempdir().expect("a folder");
        let (work, _) = Work::open(dir.path(), &serde_json::json!({})).expect("an empty folder");
        let lens = vec![3, 1, 4];
        for limit in [0, 1 << 20] {
            let mut states =
                States::within(limit, 64, lens.clone(), &work, "states-x.bin").expect("space");
            let pair = |i: usize, by: f32| -> Pair {
                [1.0, -1.0].map(|sign| (0..lens[i]).map(|k| sign * (k as f32 + by)).collect())
            };
            for i in [2, 0, 1] {
                states.set(i, pair(i, 0.5)).expect("space");
            }
            states.set(0, pair(0, 7.25)).expect("space");
            assert_eq!(states.get(0).expect("there"), pair(0, 7.25));
            assert_eq!(states.get(2).expect("there"), pair(2, 0.5));
            states.keep(&work, "states-5.bin").expect("space");
            let kept = States::kept(&lens, &work, "states-5.bin", "states-y.bin");
            let mut kept = kept.expect("it can be read").expect("it is whole");
            assert_eq!(kept.get(1).expect("there"), pair(1, 0.5));
            let other = States::kept(&[3, 1, 5], &work, "states-5.bin", "states-y.bin");
            assert!(other.expect("it can be read").is_none());
        }
    }
}
