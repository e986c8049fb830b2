//! The best settings that `runner tune` measured, kept for each machine and model.
//!
//! One JSON file in the user's configuration directory, `myq/tune.json`. A file that cannot be
//! read is warned about and passed over: it holds nothing that cannot be measured again.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use myq_format::atomic::AtomicFile;
use serde::{Deserialize, Serialize};

use crate::topology::Machine;
use crate::{EngineError, KernelChoice, available_kernels};

/// Settings that were measured to be the best.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    /// Threads.
    pub threads: usize,
    /// Time that a thread without work spins, in microseconds.
    pub spin_us: u64,
    /// Decoded tokens a second with them.
    pub tokens_per_second: f64,
}

impl Tuned {
    /// [`Self::spin_us`] as a time.
    pub fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }
}

/// Which machine and model a setting is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// [`Machine::fingerprint`].
    pub machine: String,
    /// Length of the file, kernels, and a hash of the file's first bytes.
    pub model: String,
}

impl Key {
    /// The key of a model file's bytes with these kernels.
    pub fn of(machine: &Machine, file: &[u8], kernels: KernelChoice) -> Key {
        let kernels = match kernels {
            KernelChoice::Auto => available_kernels()[0],
            other => other.name(),
        };
        // Names and shapes of the tensors are in the first bytes, or follow from them.
        let head = &file[..file.len().min(64 << 10)];
        let hash = blake3::hash(head).to_hex();
        Key {
            machine: machine.fingerprint(),
            model: format!("{} bytes, {kernels}, {}", file.len(), &hash[..16]),
        }
    }
}

/// All settings: of each machine, of each model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Store {
    /// Machine, model, settings.
    pub machines: BTreeMap<String, BTreeMap<String, Tuned>>,
}

impl Store {
    /// Where the settings are kept: `$XDG_CONFIG_HOME/myq/tune.json`, or the same below
    /// `~/.config`; `None` for a user without either.
    pub fn path() -> Option<PathBuf> {
        // The standard for these directories has relative paths ignored.
        let set = |name: &str| {
            let path = PathBuf::from(std::env::var_os(name)?);
            path.is_absolute().then_some(path)
        };
        let config = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))?;
        Some(config.join("myq").join("tune.json"))
    }

    /// Reads the file; empty where it is not there, and with a warning where it is broken.
    pub fn load(path: &Path) -> Store {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                if error.kind() != std::io::ErrorKind::NotFound {
                    log::warn!("{}: {error}; its settings are not used", path.display());
                }
                return Store::default();
            }
        };
        serde_json::from_str(&text).unwrap_or_else(|error| {
            log::warn!(
                "{}: {error}; its settings are not used; `runner tune --forget` removes it",
                path.display()
            );
            Store::default()
        })
    }

    /// The settings for a key, if they make sense.
    pub fn get(&self, key: &Key) -> Option<&Tuned> {
        let tuned = self.machines.get(&key.machine)?.get(&key.model)?;
        let sane = (1..=1024).contains(&tuned.threads) && tuned.spin_us <= 1_000_000;
        sane.then_some(tuned)
    }

    /// Puts settings in the place of earlier ones.
    pub fn set(&mut self, key: Key, tuned: Tuned) {
        let models = self.machines.entry(key.machine).or_default();
        models.insert(key.model, tuned);
    }

    /// Takes settings out; says whether there were any.
    pub fn forget(&mut self, key: &Key) -> bool {
        let models = self.machines.get_mut(&key.machine);
        let found = models.is_some_and(|m| m.remove(&key.model).is_some());
        self.machines.retain(|_, models| !models.is_empty());
        found
    }

    /// Writes the file, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), EngineError> {
        let fail = |what: &dyn std::fmt::Display| {
            EngineError::Setting(format!(
                "cannot store settings in {}: {what}",
                path.display()
            ))
        };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| fail(&e))?;
        }
        let mut text = serde_json::to_string_pretty(self).map_err(|e| fail(&e))?;
        text.push('\n');
        let mut file = AtomicFile::create(path).map_err(|e| fail(&e))?;
        file.write_all(text.as_bytes()).map_err(|e| fail(&e))?;
        file.commit().map_err(|e| fail(&e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(file: &[u8]) -> Key {
        Key::of(&Machine::here(), file, KernelChoice::Scalar)
    }

    fn tuned(threads: usize) -> Tuned {
        Tuned {
            threads,
            spin_us: 20,
            tokens_per_second: 3.5,
        }
    }

    #[test]
    fn settings_come_back_for_their_model_alone() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("new").join("tune.json");
        let mut store = Store::load(&path);
        assert_eq!(store, Store::default());
        store.set(key(b"one"), tuned(3));
        store.set(key(b"other"), tuned(2));
        store.save(&path).expect("saved");
        let mut store = Store::load(&path);
        assert_eq!(store.get(&key(b"one")), Some(&tuned(3)));
        assert_eq!(store.get(&key(b"three")), None);
        assert!(store.forget(&key(b"one")) && !store.forget(&key(b"one")));
        assert_eq!(store.get(&key(b"other")), Some(&tuned(2)));
        assert!(store.forget(&key(b"other")));
        assert_eq!(store, Store::default());
    }

    #[test]
    fn a_broken_file_is_passed_over() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("tune.json");
        for text in ["", "{", "[1]", "{\"machines\": 3}", "\u{0}"] {
            std::fs::write(&path, text).expect("written");
            assert_eq!(Store::load(&path), Store::default(), "{text}");
        }
        assert_eq!(Store::load(dir.path()), Store::default());
        let mut store = Store::default();
        store.set(key(b"x"), tuned(0));
        assert_eq!(store.get(&key(b"x")), None, "0 threads make no sense");
    }

    #[test]
    fn where_nothing_can_be_written_is_an_error() {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("file"), "").expect("written");
        let error = Store::default().save(&dir.path().join("file").join("tune.json"));
        assert!(
            error
                .expect_err("a file is no folder")
                .to_string()
                .contains("tune.json")
        );
    }
}
