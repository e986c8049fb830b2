//! The set of CPUs that a thread may run on.

use std::io;

/// A set of CPUs, in the kernel's form: made once, applied without allocating.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask(Vec<libc::c_ulong>);

const BITS: usize = libc::c_ulong::BITS as usize;

impl Mask {
    /// The set with these CPUs.
    pub fn of(cpus: &[usize]) -> Mask {
        let words = cpus.iter().max().map_or(1, |c| c / BITS + 1);
        let mut mask = vec![0; words];
        for c in cpus {
            mask[c / BITS] |= 1 << (c % BITS);
        }
        Mask(mask)
    }

    /// What the calling thread may run on; `None` where the system does not say.
    pub fn current() -> Option<Mask> {
        // The kernel refuses a buffer smaller than its own mask, of at most 8,192 CPUs today.
        let mut mask = vec![0 as libc::c_ulong; 1 << 16 >> BITS.trailing_zeros()];
        // SAFETY: the buffer has as many bytes as are told; thread 0 is the calling one.
        let outcome =
            unsafe { libc::sched_getaffinity(0, size_of_val(&mask[..]), mask.as_mut_ptr().cast()) };
        if outcome != 0 {
            return None;
        }
        let used = mask.iter().rposition(|w| *w != 0).map_or(1, |i| i + 1);
        mask.truncate(used);
        Some(Mask(mask))
    }

    /// The CPUs in the set, in order.
    pub fn cpus(&self) -> Vec<usize> {
        let bit = |i: &usize| self.0[i / BITS] >> (i % BITS) & 1 == 1;
        (0..self.0.len() * BITS).filter(bit).collect()
    }

    /// Moves the calling thread to these CPUs.
    ///
    /// # Errors
    /// The system's: none of the CPUs is online and allowed, or it forbids the call.
    pub fn apply(&self) -> io::Result<()> {
        // SAFETY: the buffer has as many bytes as are told; thread 0 is the calling one.
        let outcome =
            unsafe { libc::sched_setaffinity(0, size_of_val(&self.0[..]), self.0.as_ptr().cast()) };
        match outcome {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_holds_its_cpus() {
        for cpus in [vec![0], vec![1, 63, 64, 200]] {
            assert_eq!(Mask::of(&cpus).cpus(), cpus);
        }
    }

    #[test]
    fn a_thread_moves_and_comes_back() {
        std::thread::spawn(|| {
            let before = Mask::current().expect("Linux tells");
            let one = Mask::of(&before.cpus()[..1]);
            one.apply().expect("an allowed CPU");
            assert_eq!(Mask::current(), Some(one));
            before.apply().expect("it was allowed before");
            assert_eq!(Mask::current(), Some(before));
            assert!(Mask::of(&[60_000]).apply().is_err());
        })
        .join()
        .expect("no panic");
    }
}
