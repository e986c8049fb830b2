//! Mapping a model file, and what happens when it shrinks under the map.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Once;

use memmap2::{Mmap, MmapOptions};

use crate::EngineError;

/// A file mapped read-only and shared with every process that maps it.
#[derive(Debug)]
pub struct Mapped {
    map: Mmap,
    path: PathBuf,
    tells_residency: bool,
    large_pages: bool,
}

impl Mapped {
    /// Maps the whole file.
    pub fn open(path: &Path) -> Result<Mapped, EngineError> {
        let fail = |error| EngineError::Open {
            path: path.to_owned(),
            error,
        };
        // Asked before opening: to open a pipe would wait for its writer.
        let meta = std::fs::metadata(path).map_err(fail)?;
        if meta.is_dir() {
            return Err(fail(std::io::Error::other(
                "it is a directory; give a .myq or .gguf file, or `myq import` it first",
            )));
        }
        if !meta.is_file() {
            return Err(fail(std::io::Error::other(
                "it is not a regular file, and cannot be mapped",
            )));
        }
        let file = File::open(path).map_err(fail)?;
        if meta.len() == 0 {
            return Err(EngineError::Empty(path.to_owned()));
        }
        end_cleanly_when_the_file_shrinks();
        // SAFETY: the map is only read. Another process may still write or cut the file; a cut
        // is caught by the handler above, a change of bytes can give wrong numbers but no
        // undefined layout, as every byte pattern is valid for the integer types read.
        let map = unsafe { MmapOptions::new().map(&file) }.map_err(fail)?;
        let large_pages = advise_large_pages(&map);
        Ok(Mapped {
            map,
            path: path.to_owned(),
            tells_residency: tells_residency(path, &meta),
            large_pages,
        })
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Share of the file's pages that are in memory now, 0 to 1; `None` where the system does
    /// not say: since Linux 5.2 `mincore` calls every page resident for a process that neither
    /// owns the file nor may write it.
    pub fn residency(&self) -> Option<f64> {
        if !self.tells_residency {
            return None;
        }
        let page = page_size();
        let pages = self.map.len().div_ceil(page);
        let mut present = vec![0u8; pages];
        // SAFETY: address and length are those of a live mapping, whose start is page-aligned;
        // `present` has a byte for each of its pages.
        let ok = unsafe {
            libc::mincore(
                self.map.as_ptr().cast_mut().cast(),
                self.map.len(),
                present.as_mut_ptr().cast(),
            )
        };
        let count = present.iter().filter(|&&p| p & 1 == 1).count();
        (ok == 0).then(|| count as f64 / pages as f64)
    }

    /// Asks the system to read ahead the whole file, where touching pages would read few at once.
    pub fn read_ahead(&self) {
        // What is read ahead comes in small pages, what is touched in large ones.
        if self.large_pages {
            return;
        }
        if let Err(error) = self.map.advise(memmap2::Advice::WillNeed) {
            log::debug!("madvise(WILLNEED): {error}");
        }
    }

    /// Gives the pages up as this process's; they stay in the page cache while there is room,
    /// and come back when they are read.
    pub fn release(&self) {
        // SAFETY: for a read-only map of a file, dropping pages changes nothing that is read.
        let done = unsafe {
            self.map
                .unchecked_advise(memmap2::UncheckedAdvice::DontNeed)
        };
        if let Err(error) = done {
            log::debug!("madvise(DONTNEED): {error}");
        }
    }

    /// Keeps the file's pages in memory.
    pub fn lock(&self) -> Result<(), EngineError> {
        self.map.lock().map_err(EngineError::Lock)
    }
}

/// Asks for large pages, and says whether the system reads ahead for them: a file system that has
/// them (ext4 since Linux 6.16, XFS since 5.18) then reads what is touched in pieces of a large
/// page, from which cores read up to 1.5 times as fast; others read that much at once. Before
/// Linux 5.18 the advice changes nothing for files.
#[cfg(target_os = "linux")]
fn advise_large_pages(map: &Mmap) -> bool {
    let done = map.advise(memmap2::Advice::HugePage);
    if let Err(error) = &done {
        log::debug!("madvise(HUGEPAGE): {error}");
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    done.is_ok() && version(&release) >= Some((5, 18))
}

/// Major and minor number of `6.1.0-18-arm64`.
#[cfg(target_os = "linux")]
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

#[cfg(not(target_os = "linux"))]
fn advise_large_pages(_: &Mmap) -> bool {
    false
}

/// See [`Mapped::residency`].
fn tells_residency(path: &Path, meta: &std::fs::Metadata) -> bool {
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    // Opened for writing and closed again: nothing is written.
    user == 0 || user == meta.uid() || File::options().write(true).open(path).is_ok()
}

/// Bytes of a page.
pub fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Reading a page that the file no longer has raises SIGBUS, whose default is a crash with a
/// core dump. This ends the process with a message and exit code 2 instead.
fn end_cleanly_when_the_file_shrinks() {
    extern "C" fn on_bus_error(_: libc::c_int) {
        const MESSAGE: &[u8] =
            b"error: the model file became shorter (or its disk failed) while it was in use; \
            stop whatever rewrites it and start again\n";
        // SAFETY: write and _exit are async-signal-safe; the message is static.
        unsafe {
            libc::write(2, MESSAGE.as_ptr().cast(), MESSAGE.len());
            libc::_exit(2);
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let handler: extern "C" fn(libc::c_int) = on_bus_error;
        // SAFETY: the handler only calls async-signal-safe functions and never returns.
        unsafe { libc::signal(libc::SIGBUS, handler as libc::sighandler_t) };
    });
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn versions_as_boards_have_them() {
        assert_eq!(version("5.10.160-rockchip-rk3588"), Some((5, 10)));
        assert_eq!(version("6.12.25+rpt-rpi-2712"), Some((6, 12)));
        assert_eq!(version("5.18"), Some((5, 18)));
        assert_eq!(version(""), None);
        assert!(version("5.9.1") < Some((5, 18)) && version("") < Some((5, 18)));
    }
}
