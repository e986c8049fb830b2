//! A file that appears whole under its name, or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::Error;

/// Names tried before giving up; only files left by a killed process take any.
const ATTEMPTS: u32 = 64;

/// A file being written as `.NAME.tmp-PID` beside `NAME`.
///
/// [`AtomicFile::commit`] flushes it to the disk and renames it; dropping it before that
/// removes it. A reader so never sees half a file, whatever happens to the writer.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl AtomicFile {
    /// Opens the temporary file in the directory of `target`.
    pub fn create(target: &Path) -> Result<Self, Error> {
        let fail = |source| Error::Io {
            action: "create",
            path: target.to_owned(),
            source,
        };
        let Some(name) = target.file_name() else {
            return Err(fail(io::Error::new(
                io::ErrorKind::InvalidInput,
                "path names no file",
            )));
        };
        if target
            .symlink_metadata()
            .is_ok_and(|m| !m.is_file() && !m.is_symlink())
        {
            let problem = "something that is not a regular file has this name; choose another";
            return Err(fail(io::Error::new(io::ErrorKind::AlreadyExists, problem)));
        }
        remove_leftovers(target, name);
        for attempt in 0..ATTEMPTS {
            let mut hidden = std::ffi::OsString::from(".");
            hidden.push(name);
            hidden.push(format!(".tmp-{}", std::process::id()));
            if attempt > 0 {
                hidden.push(format!("-{attempt}"));
            }
            let temporary = target.with_file_name(hidden);
            match OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(&temporary)
            {
                Ok(file) => {
                    let target = target.to_owned();
                    return Ok(AtomicFile {
                        file,
                        temporary,
                        target,
                        committed: false,
                    });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(fail(e)),
            }
        }
        Err(fail(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "too many temporary files of earlier runs lie beside it; remove them",
        )))
    }

    /// Sets the length; bytes not written read as zero.
    pub fn set_len(&self, len: u64) -> Result<(), Error> {
        self.file.set_len(len).map_err(|e| self.error("write", e))
    }

    /// Writes all of `data` at `offset`.
    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let wrote = self
            .file
            .seek(SeekFrom::Start(offset))
            .and_then(|_| self.file.write_all(data));
        wrote.map_err(|e| self.error("write", e))
    }

    /// Makes the file durable and gives it its name.
    pub fn commit(mut self) -> Result<(), Error> {
        self.file.sync_all().map_err(|e| self.error("write", e))?;
        fs::rename(&self.temporary, &self.target).map_err(|e| self.error("rename", e))?;
        self.committed = true;
        // The name is durable once the directory is. Some file systems cannot do that; the
        // file itself is safe by then.
        let parent = self.target.parent().filter(|p| !p.as_os_str().is_empty());
        if let Ok(directory) = File::open(parent.unwrap_or(Path::new("."))) {
            let _ = directory.sync_all();
        }
        Ok(())
    }

    fn error(&self, action: &'static str, source: io::Error) -> Error {
        Error::Io {
            action,
            path: self.target.clone(),
            source,
        }
    }
}

impl Write for AtomicFile {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.file.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing can be done if this fails, and the error that led here matters more.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Removes the temporary files of this target whose process was killed.
fn remove_leftovers(target: &Path, name: &std::ffi::OsStr) {
    let prefix = format!(".{}.tmp-", name.to_string_lossy());
    let folder = target
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let file = entry.file_name();
        let process = file.to_str().and_then(|f| f.strip_prefix(&prefix));
        let process = process.and_then(|p| p.split('-').next()?.parse::<u32>().ok());
        // Without /proc nothing is known of the process, and nothing is removed.
        let dead =
            |p: u32| Path::new("/proc/self").exists() && !Path::new(&format!("/proc/{p}")).exists();
        if process.is_some_and(dead) {
            drop(std::fs::remove_file(entry.path()));
        }
    }
}
