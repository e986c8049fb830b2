//! Sleeping until a word changes: Linux's futex, within one process.

use std::sync::atomic::AtomicU32;

/// Sleeps while `word` is `value`, until a [`wake`]. `true` if this thread was woken, `false`
/// if the word was another one or a signal came.
pub(crate) fn wait(word: &AtomicU32, value: u32) -> bool {
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let no_limit = std::ptr::null::<libc::timespec>();
    // SAFETY: the word is live and aligned for the whole call; a null time is no limit.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, value, no_limit) == 0 }
}

/// Wakes up to `count` threads that sleep on `word`; gives the number woken.
pub(crate) fn wake(word: &AtomicU32, count: i32) -> i32 {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is live and aligned; waking touches only the kernel's queue of it.
    let woken = unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, count) };
    i32::try_from(woken).unwrap_or(0).max(0)
}
