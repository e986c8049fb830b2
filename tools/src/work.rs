//! The work directory of a quantisation: what each stage has finished, so that a run goes on.
//!
//! ```text
//! manifest.json         what the job is: source, recipe, method, samples
//! samples.bin           token ids                                    (load and split)
//! moments-NAME.bin      second moments of one input, until used      (Hessian)
//! rows-NAME.bin         quantised rows of a matrix, packed           (quantise, pack)
//! states-LAYER.bin      hidden states before a layer, the last one   (pass on)
//! ```
//!
//! Every file appears whole or not at all, and all but the manifest end with the hash of what is
//! before. Numbers are stored to the bit, so a run that was killed ends with the bytes of one
//! that was not.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use myq_blocks::DType;
use myq_format::atomic::AtomicFile;
use serde_json::Value;

use crate::ToolError;

/// A directory for one job, or memory that stands for one.
#[derive(Debug)]
pub struct Work {
    folder: Option<PathBuf>,
    /// What would be in the folder.
    memory: RefCell<BTreeMap<String, Vec<u8>>>,
}

impl Work {
    /// In memory: nothing outlives the process.
    pub fn in_memory() -> Work {
        Work {
            folder: None,
            memory: RefCell::default(),
        }
    }

    /// Opens or makes `folder` for the job that `manifest` describes. What is there of another
    /// job goes; the answer tells whether it was one of this job.
    ///
    /// # Errors
    /// A folder that cannot be used, or that holds files which are not a job's.
    pub fn open(folder: &Path, manifest: &Value) -> Result<(Work, bool), ToolError> {
        let work = Work {
            folder: Some(folder.to_owned()),
            memory: RefCell::default(),
        };
        let path = folder.join("manifest.json");
        let wanted = format!("{manifest:#}\n");
        let found = fs::read_to_string(&path).ok();
        if found.as_deref() == Some(&wanted) {
            return Ok((work, true));
        }
        let read = |error| ToolError::Read {
            path: folder.to_owned(),
            error,
        };
        fs::create_dir_all(folder).map_err(read)?;
        for entry in fs::read_dir(folder).map_err(read)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !is_ours(&name) {
                return Err(ToolError::Setting(format!(
                    "{} holds {name}, which is not of a quantisation; name an empty folder with --work",
                    folder.display()
                )));
            }
            fs::remove_file(entry.path()).map_err(read)?;
        }
        crate::write_whole(&path, wanted.as_bytes())?;
        Ok((work, false))
    }

    /// Removes the folder and all of the job in it.
    ///
    /// # Errors
    /// A file that cannot be removed.
    pub fn remove(self) -> Result<(), ToolError> {
        let Some(folder) = self.folder else {
            return Ok(());
        };
        fs::remove_dir_all(&folder).map_err(|error| ToolError::Read {
            path: folder,
            error,
        })
    }

    /// Keeps `data` under `name`.
    pub(crate) fn keep(&self, name: &str, data: &[u8]) -> Result<(), ToolError> {
        if self.folder.is_none() {
            self.memory.borrow_mut().insert(name.into(), data.to_vec());
            return Ok(());
        }
        self.keep_parts(name, [Ok(data)])
    }

    /// What was kept under `name`, if it is whole.
    pub(crate) fn kept(&self, name: &str) -> Option<Vec<u8>> {
        let Some(folder) = &self.folder else {
            return self.memory.borrow().get(name).cloned();
        };
        let mut data = fs::read(folder.join(name)).ok()?;
        let hash: [u8; 32] = *data.last_chunk()?;
        data.truncate(data.len() - hash.len());
        if *blake3::hash(&data).as_bytes() == hash {
            Some(data)
        } else {
            log::warn!("{name} in the work folder is damaged and computed again");
            None
        }
    }

    /// Where a file of the folder lies; none without a folder.
    pub(crate) fn path(&self, name: &str) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(name))
    }

    /// Keeps parts one after the other under `name`, the hash behind them, without holding all.
    pub(crate) fn keep_parts(
        &self,
        name: &str,
        parts: impl IntoIterator<Item = Result<impl AsRef<[u8]>, ToolError>>,
    ) -> Result<(), ToolError> {
        let Some(path) = self.path(name) else {
            return Ok(());
        };
        let fail = |error| ToolError::Write {
            path: path.clone(),
            error,
        };
        let mut file = AtomicFile::create(&path).map_err(fail)?;
        let mut hasher = blake3::Hasher::new();
        let mut write = |data: &[u8]| {
            let written = file.write_all(data);
            written.map_err(|source| ToolError::write(&path, source))
        };
        for part in parts {
            let part = part?;
            hasher.update(part.as_ref());
            write(part.as_ref())?;
        }
        write(hasher.finalize().as_bytes())?;
        file.commit().map_err(fail)
    }

    /// Hands out parts of these sizes; `false` where `name` is not there, not whole, or of
    /// another size, and then what was handed out is nothing.
    pub(crate) fn kept_parts(
        &self,
        name: &str,
        sizes: &[usize],
        take: &mut dyn FnMut(&[u8]) -> Result<(), ToolError>,
    ) -> Result<bool, ToolError> {
        let Some(mut file) = self.path(name).and_then(|p| fs::File::open(p).ok()) else {
            return Ok(false);
        };
        let total = sizes.iter().sum::<usize>() as u64 + 32;
        if file.metadata().map(|m| m.len()).ok() != Some(total) {
            return Ok(false);
        }
        let mut hasher = blake3::Hasher::new();
        let mut part = Vec::new();
        for &size in sizes {
            part.resize(size, 0);
            if file.read_exact(&mut part).is_err() {
                return Ok(false);
            }
            hasher.update(&part);
            take(&part)?;
        }
        let mut hash = [0; 32];
        let read = file.read_exact(&mut hash).is_ok();
        Ok(read && hash == *hasher.finalize().as_bytes())
    }

    /// Forgets what was kept under `name`.
    pub(crate) fn forget(&self, name: &str) {
        match &self.folder {
            // It is only space.
            Some(folder) => drop(fs::remove_file(folder.join(name))),
            None => drop(self.memory.borrow_mut().remove(name)),
        }
    }

    /// Rows of a matrix with their format.
    pub fn rows(&self, name: &str) -> Option<(DType, Vec<u8>)> {
        let (note, rows) = self.noted(name)?;
        Some((DType::from_name(note["dtype"].as_str()?)?, rows))
    }

    /// What was said about the rows of a matrix when they were kept.
    pub(crate) fn note(&self, name: &str) -> Option<Value> {
        Some(self.noted(name)?.0)
    }

    fn noted(&self, name: &str) -> Option<(Value, Vec<u8>)> {
        let mut data = self.kept(&rows_file(name))?;
        let text = data.iter().position(|b| *b == b'\n')?;
        let note = serde_json::from_slice(&data[..text]).ok()?;
        Some((note, data.split_off(text + 1)))
    }

    /// Keeps rows of a matrix, with an object that has the name of their format as `dtype` and
    /// whatever else there is to say.
    pub(crate) fn keep_rows(&self, name: &str, note: &Value, rows: &[u8]) -> Result<(), ToolError> {
        let mut data = format!("{note}\n").into_bytes();
        data.extend_from_slice(rows);
        self.keep(&rows_file(name), &data)
    }

    /// Whether what is kept outlives the process.
    pub(crate) fn lasts(&self) -> bool {
        self.folder.is_some()
    }
}

fn rows_file(name: &str) -> String {
    format!("rows-{name}.bin")
}

fn is_ours(name: &str) -> bool {
    let known = ["rows-", "moments-", "states-", "samples."];
    let name = name.strip_prefix('.').unwrap_or(name);
    name.starts_with("manifest.json")
        || known.iter().any(|k| name.starts_with(k)) && name.contains(".bin")
}

/// Floats as bytes, and back.
pub(crate) fn bytes_of(parts: &[&[f32]]) -> Vec<u8> {
    let mut out = Vec::with_capacity(parts.iter().map(|p| p.len() * 4).sum());
    for part in parts {
        part.iter()
            .for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
    }
    out
}

/// See [`bytes_of`].
pub(crate) fn floats_of(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_folder_belongs_to_one_job() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("work");
        let (work, known) = Work::open(&folder, &json!({ "bits": 3 })).expect("a new folder");
        assert!(!known);
        let note = json!({ "dtype": "Q3_K", "tokens": 7 });
        work.keep_rows("a", &note, &[1, 2, 3]).expect("space");
        let (work, known) = Work::open(&folder, &json!({ "bits": 3 })).expect("the same job");
        assert!(known);
        assert_eq!(work.rows("a"), Some((DType::Q3K, vec![1, 2, 3])));
        assert_eq!(work.note("a"), Some(note));
        let (work, known) = Work::open(&folder, &json!({ "bits": 2 })).expect("another job");
        assert!(!known);
        assert_eq!(work.rows("a"), None);
        fs::write(folder.join("letter.txt"), "dear").expect("space");
        let error = Work::open(&folder, &json!({ "bits": 4 })).expect_err("not ours");
        assert!(error.to_string().contains("letter.txt"), "{error}");
        assert!(folder.join("letter.txt").exists());
    }

    #[test]
    fn damage_is_seen() {
        let dir = tempfile::tempdir().expect("a folder");
        let (work, _) = Work::open(dir.path(), &json!({})).expect("an empty folder");
        work.keep("moments-x.bin", &[7; 100]).expect("space");
        let path = dir.path().join("moments-x.bin");
        let whole = fs::read(&path).expect("it is there");
        for bad in [&whole[..131], &whole[..10], &[]] {
            fs::write(&path, bad).expect("space");
            assert_eq!(work.kept("moments-x.bin"), None);
        }
        fs::write(&path, &whole).expect("space");
        assert_eq!(work.kept("moments-x.bin"), Some(vec![7; 100]));
    }
}
