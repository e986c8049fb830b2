//! Worker threads that share one loop at a time: spin, then sleep; never allocate.
//!
//! [`Pool::run`] hands out task numbers from a shared counter to the caller and the workers
//! and returns when all tasks are done. Workers spin for [`SPIN`] rounds after a loop, since
//! the next one of a decode step follows within microseconds, and park after that, so that
//! an idle or oversubscribed machine is not kept busy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::thread::{JoinHandle, Thread};

/// Rounds of spinning before a thread parks: about 20 to 50 microseconds.
pub(crate) const SPIN: u32 = 4_000;

type Task<'a> = &'a (dyn Fn(usize, usize) + Sync);

struct Shared {
    /// Number of the current loop; a change wakes the workers.
    epoch: AtomicU64,
    /// The loop's body, on the stack of [`Pool::run`], with its lifetime erased.
    body: AtomicPtr<Task<'static>>,
    /// Next task and number of tasks.
    next: AtomicUsize,
    tasks: AtomicUsize,
    /// Workers that have not finished the current loop.
    busy: AtomicUsize,
    sleeping: Vec<AtomicBool>,
    caller_sleeps: AtomicBool,
    stop: AtomicBool,
    panicked: AtomicU32,
}

/// A fixed set of worker threads.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    threads: Vec<Thread>,
}

impl Pool {
    /// `threads` counts the caller: one thread less is started.
    ///
    /// # Errors
    /// The system's, where it gives no more threads.
    pub(crate) fn new(threads: usize) -> std::io::Result<Pool> {
        let extra = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            body: AtomicPtr::new(std::ptr::null_mut()),
            next: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            sleeping: (0..extra).map(|_| AtomicBool::new(false)).collect(),
            caller_sleeps: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            panicked: AtomicU32::new(0),
        });
        let start = |i: usize| {
            let (shared, caller) = (shared.clone(), std::thread::current());
            let name = format!("myq-{}", i + 1);
            std::thread::Builder::new()
                .name(name)
                .spawn(move || work(&shared, i, &caller))
        };
        let mut pool = Pool {
            shared: shared.clone(),
            workers: Vec::new(),
            threads: Vec::new(),
        };
        for i in 0..extra {
            // Where this fails, dropping the pool stops the threads that did start.
            let worker = start(i)?;
            pool.threads.push(worker.thread().clone());
            pool.workers.push(worker);
        }
        // Every worker takes part in a loop, so an empty one returns when all have started: a
        // thread allocates as it starts, and nothing may allocate later.
        pool.run(2, &|_, _| {});
        Ok(pool)
    }

    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(task, thread)` once for each task of `0..tasks`, on all threads.
    ///
    /// Must be called from the thread that made the pool (it is the one that is woken).
    ///
    /// # Panics
    /// If a body panicked on a worker.
    pub(crate) fn run(&mut self, tasks: usize, body: Task<'_>) {
        let extra = self.workers.len();
        if extra == 0 || tasks <= 1 {
            (0..tasks).for_each(|t| body(t, 0));
            return;
        }
        let s = &*self.shared;
        // The workers read through this pointer only between the change of `epoch` below and
        // their decrement of `busy`; this function does not return, nor unwind, before `busy`
        // is zero, so that the reference and what it refers to outlive their use.
        s.body.store((&raw const body).cast_mut().cast(), Relaxed);
        s.next.store(0, Relaxed);
        s.tasks.store(tasks, Relaxed);
        s.busy.store(extra, Relaxed);
        s.epoch.fetch_add(1, SeqCst);
        for (flag, thread) in s.sleeping.iter().zip(&self.threads) {
            if flag.load(SeqCst) {
                thread.unpark();
            }
        }
        let guard = Finish(s);
        take_tasks(s, body, 0);
        drop(guard);
        assert!(
            s.panicked.load(Acquire) == 0,
            "a worker panicked; the model's state is lost"
        );
    }
}

/// Waits for the workers, also while unwinding.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let s = self.0;
        if std::thread::panicking() {
            // The tasks left are not wanted any more.
            s.next.store(usize::MAX / 2, Relaxed);
        }
        let mut rounds = 0;
        while s.busy.load(Acquire) != 0 {
            if rounds < SPIN {
                rounds += 1;
                std::hint::spin_loop();
                continue;
            }
            s.caller_sleeps.store(true, SeqCst);
            if s.busy.load(SeqCst) != 0 {
                std::thread::park();
            }
            s.caller_sleeps.store(false, SeqCst);
        }
    }
}

fn take_tasks(s: &Shared, body: Task<'_>, thread: usize) {
    let tasks = s.tasks.load(Relaxed);
    loop {
        let task = s.next.fetch_add(1, Relaxed);
        if task >= tasks {
            return;
        }
        body(task, thread);
    }
}

fn work(s: &Shared, index: usize, caller: &Thread) {
    let mut seen = 0;
    loop {
        seen = wait_for_change(s, index, seen);
        if s.stop.load(Acquire) {
            return;
        }
        // SAFETY: `run` stored a pointer to a live reference before it changed `epoch`, and
        // keeps the reference and the body alive until `busy` falls to zero below.
        let body: Task<'_> = unsafe { *s.body.load(Relaxed) };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            take_tasks(s, body, index + 1)
        }));
        if outcome.is_err() {
            s.panicked.fetch_add(1, Release);
        }
        if s.busy.fetch_sub(1, SeqCst) == 1 && s.caller_sleeps.load(SeqCst) {
            caller.unpark();
        }
    }
}

fn wait_for_change(s: &Shared, index: usize, seen: u64) -> u64 {
    let mut rounds = 0;
    loop {
        let now = s.epoch.load(SeqCst);
        if now != seen {
            return now;
        }
        if rounds < SPIN {
            rounds += 1;
            std::hint::spin_loop();
            continue;
        }
        s.sleeping[index].store(true, SeqCst);
        if s.epoch.load(SeqCst) == seen {
            std::thread::park();
        }
        s.sleeping[index].store(false, SeqCst);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.epoch.fetch_add(1, SeqCst);
        self.threads.iter().for_each(Thread::unpark);
        for worker in self.workers.drain(..) {
            // A panic of a worker was reported by `run`.
            drop(worker.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_task_runs_once_at_any_size() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Pool::new(threads).expect("threads");
            for tasks in [0, 1, 2, 3, 7, 64, 1000] {
                let seen: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|t, thread| {
                    assert!(thread < threads);
                    seen[t].fetch_add(1, Relaxed);
                });
                assert!(
                    seen.iter().all(|n| n.load(Relaxed) == 1),
                    "{threads} threads, {tasks} tasks"
                );
            }
        }
    }

    #[test]
    fn workers_wake_after_they_slept() {
        let mut pool = Pool::new(4).expect("threads");
        let count = AtomicUsize::new(0);
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            pool.run(16, &|_, _| {
                std::thread::sleep(std::time::Duration::from_micros(50));
                count.fetch_add(1, Relaxed);
            });
        }
        assert_eq!(count.load(Relaxed), 320);
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller() {
        let mut pool = Pool::new(3).expect("threads");
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(100, &|t, _| assert!(t != 50))
        }));
        assert!(result.is_err());
    }
}
