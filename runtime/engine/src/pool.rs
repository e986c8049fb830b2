//! Worker threads that share one loop at a time: spin, then sleep; never allocate.
//!
//! [`Pool::run`] opens a loop, takes tasks like every worker that joins, closes the loop and waits
//! for the workers that are still inside. A worker that was asleep, or that another process keeps
//! off its CPU, finds the loop closed and is not waited for. Each thread has a share of the tasks,
//! neighbours of one another, and takes them from front to back, as memory is read faster so; with
//! none left it takes from the shares of others. After a loop workers spin for a while, since the
//! next one of a decode step follows within microseconds, and then sleep, so that an idle machine
//! is not kept busy.
//!
//! All of a loop's life is in one word, `state`: a number that changes with each loop, a bit
//! for "open", and how many workers are inside.
//!
//! 1. The caller stores body, shares and number of tasks, then the word with the open bit.
//!    That store releases; a worker enters by a compare-exchange that acquires, and only
//!    while the bit is set. So whoever is inside sees the fields of this loop. (Entries and
//!    exits of others in between are read-modify-writes, which continue the release sequence.)
//! 2. The caller clears the bit; nobody can enter any more. Then it waits until the number
//!    inside is zero. Exits release and the wait acquires: all that workers wrote is visible
//!    to the caller, and none of them reads body or shares after it.
//! 3. The loop's number has 16 bits, and may come round while a worker is descheduled. That
//!    does no harm: entering is decided by the compare-exchange on the word as it is then.
//! 4. Going to sleep: a worker counts itself in `sleepers`, then sleeps only if the word is
//!    still the one it saw. The caller changes the word, then reads `sleepers`. Both orders
//!    are sequentially consistent, so one of the two sees the other. The caller's own sleep,
//!    on `waiting`, is the same the other way round.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering::*};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::futex;
use crate::topology::{Mask, Placement};

/// Spinning before a thread sleeps, if nothing else is set: longer than the gap between two
/// loops of a decode step, and than the time to sleep and wake.
pub(crate) const SPIN: Duration = Duration::from_micros(100);
/// The same where CPUs are short: others need them.
const SHORT_SPIN: Duration = Duration::from_micros(5);
/// Over this time it is judged whether CPUs are short.
const WINDOW: Duration = Duration::from_millis(20);
/// A thread that loses its CPU more often shares it with another.
const TAKEN_EVERY: Duration = Duration::from_millis(10);
/// Windows for which a finding holds.
const HOLDS: u32 = 10;

const OPEN: u32 = 1 << 15;
const INSIDE: u32 = OPEN - 1;
const EPOCH: u32 = 1 << 16;

type Task<'a> = &'a (dyn Fn(Range<usize>, usize) + Sync);

/// A value with cache lines of its own.
#[repr(align(128))]
struct Apart<T>(T);

struct Shared {
    /// Epoch, open bit, workers inside: see the head of this file.
    state: Apart<AtomicU32>,
    /// Next task of each thread's share.
    next: Vec<Apart<AtomicUsize>>,
    /// The loop's body, on the stack of [`Pool::run`], with its lifetime erased.
    body: AtomicPtr<Task<'static>>,
    tasks: AtomicUsize,
    /// Most tasks that are taken at once.
    most: AtomicUsize,
    /// Most workers inside: with the caller not more threads than CPUs.
    limit: u32,
    /// Workers asleep, or about to be.
    sleepers: AtomicI32,
    /// 1 while the caller sleeps, or is about to.
    waiting: AtomicU32,
    spin: Duration,
    /// CPUs are short: spin little, and leave the own CPU.
    crowded: AtomicBool,
    started: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// The CPUs of the threads, if they are pinned.
    pins: Option<Pins>,
}

struct Pins {
    own: Vec<Mask>,
    /// Where a thread may go when its own CPU is taken.
    group: Mask,
}

/// How threads wait and where they stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Time that a thread without work spins before it sleeps.
    pub(crate) spin: Duration,
    /// Keep each thread on its CPU, where there is one for each.
    pub(crate) pin: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            spin: SPIN,
            pin: true,
        }
    }
}

/// A fixed set of worker threads.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// More threads than CPUs from the start.
    oversubscribed: bool,
    window: Window,
    /// The caller's CPUs before its first loop.
    before: Option<Mask>,
    pinned: bool,
    /// Stays on its thread, whose CPUs it changes and gives back.
    here: std::marker::PhantomData<*const ()>,
}

impl Pool {
    /// Threads that run where the system puts them. `threads` counts the caller.
    ///
    /// # Errors
    /// The system's, where it gives no more threads.
    #[cfg(test)]
    pub(crate) fn new(threads: usize) -> std::io::Result<Pool> {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        Pool::start(threads, cpus, None, SPIN)
    }

    /// Threads for this placement; one less than its number is started, as the caller is one.
    ///
    /// With [`Settings::pin`], and a CPU for each thread, a worker stays on its CPU, and the
    /// caller's thread is moved to the first one at the first loop, for as long as the pool
    /// lives: threads that it starts meanwhile inherit that. When other processes take these
    /// CPUs, all may move over [`Placement::group`].
    ///
    /// # Errors
    /// The system's, where it gives no more threads.
    pub(crate) fn with(placement: &Placement, settings: Settings) -> std::io::Result<Pool> {
        let pin = settings.pin && placement.apart();
        let pins = pin.then(|| Pins {
            own: match placement.threads {
                // One thread needs no CPU of its own.
                1 => vec![Mask::of(&placement.group)],
                _ => placement.cpus.iter().map(|&c| Mask::of(&[c])).collect(),
            },
            group: Mask::of(&placement.group),
        });
        Pool::start(placement.threads, placement.available, pins, settings.spin)
    }

    fn start(
        threads: usize,
        cpus: usize,
        pins: Option<Pins>,
        spin: Duration,
    ) -> std::io::Result<Pool> {
        let extra = threads.max(1) - 1;
        let oversubscribed = threads > cpus;
        // Read now, as a loop must not allocate.
        let before = pins.as_ref().and_then(|_| Mask::current());
        let shared = Arc::new(Shared {
            state: Apart(AtomicU32::new(0)),
            next: (0..=extra).map(|_| Apart(AtomicUsize::new(0))).collect(),
            body: AtomicPtr::new(std::ptr::null_mut()),
            tasks: AtomicUsize::new(0),
            most: AtomicUsize::new(1),
            limit: extra.min(cpus.max(2) - 1).min(INSIDE as usize) as u32,
            sleepers: AtomicI32::new(0),
            waiting: AtomicU32::new(0),
            spin,
            crowded: AtomicBool::new(oversubscribed),
            started: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            pins,
        });
        let mut pool = Pool {
            shared: shared.clone(),
            workers: Vec::with_capacity(extra),
            oversubscribed,
            window: Window::new(),
            before,
            pinned: false,
            here: std::marker::PhantomData,
        };
        for i in 0..extra {
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name(format!("myq-{}", i + 1));
            // Where this fails, dropping the pool stops the threads that did start.
            pool.workers
                .push(thread.spawn(move || work(&shared, i + 1))?);
        }
        // A thread allocates as it starts, and nothing may allocate later.
        while shared.started.load(Acquire) < extra {
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(pool)
    }

    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(task, thread)` once for each task of `0..tasks`, on all threads.
    ///
    /// # Panics
    /// If a body panicked on a worker.
    pub(crate) fn run(&mut self, tasks: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        self.hand_out(tasks, 1, &|some, thread| some.for_each(|t| body(t, thread)));
    }

    /// As [`Pool::run`], several neighbouring tasks at once: half of what is left of a share.
    pub(crate) fn run_ranges(&mut self, tasks: usize, body: Task<'_>) {
        self.hand_out(tasks, usize::MAX, body);
    }

    fn hand_out(&mut self, tasks: usize, most: usize, body: Task<'_>) {
        if !self.pinned {
            self.pin_caller();
        }
        if self.workers.is_empty() || tasks <= 1 {
            if tasks > 0 {
                body(0..tasks, 0);
            }
            return;
        }
        let s = &*self.shared;
        let start = Instant::now();
        s.body.store((&raw const body).cast_mut().cast(), Relaxed);
        s.tasks.store(tasks, Relaxed);
        s.most.store(most, Relaxed);
        for (thread, next) in s.next.iter().enumerate() {
            next.0.store(s.share(thread).start, Relaxed);
        }
        // Nobody is inside and the bit is clear, so only this thread writes the word now.
        let epoch = s.state.0.load(Relaxed) & !(EPOCH - 1);
        s.state.0.store(epoch.wrapping_add(EPOCH) | OPEN, SeqCst);
        s.wake_for(tasks, self.workers.len());
        // Closes the loop and waits, also while unwinding: this function does not end before
        // the last worker is out, so the body and what it refers to outlive their use.
        let mut finish = Finish {
            s,
            start,
            lost: Duration::ZERO,
        };
        take_tasks(s, body, 0);
        finish.wait();
        let lost = finish.lost;
        drop(finish);
        self.watch(start, lost);
        assert!(
            !self.shared.panicked.load(Acquire),
            "a worker panicked; the model's state is lost"
        );
    }

    /// Judges from time to time whether CPUs are short.
    fn watch(&mut self, now: Instant, lost: Duration) {
        self.window.lost += lost;
        if now.duration_since(self.window.since) < WINDOW {
            return;
        }
        let crowded = self.oversubscribed || self.window.judge(now);
        let before = self.shared.crowded.swap(crowded, Relaxed);
        // Once off its CPU a thread does not go back: who took it may still be there.
        if crowded && !before {
            self.shared.leave_cpu();
        }
    }

    fn pin_caller(&mut self) {
        self.pinned = true;
        let pins = self.shared.pins.as_ref();
        if let Some(Err(error)) = pins.map(|p| p.own[0].apply()) {
            log::debug!("the calling thread is not pinned: {error}");
        }
    }
}

/// What tells that other processes want the same CPUs.
struct Window {
    since: Instant,
    /// Time that the caller waited for threads that did not run.
    lost: Duration,
    /// Times that the caller's CPU was taken from it, since it started.
    taken: i64,
    /// Windows for which the last finding still holds: waiting little hides the signs.
    holds: u32,
}

impl Window {
    fn new() -> Window {
        Window {
            since: Instant::now(),
            lost: Duration::ZERO,
            taken: times_taken(),
            holds: 0,
        }
    }

    /// Ends the window and begins the next.
    fn judge(&mut self, now: Instant) -> bool {
        let (time, taken) = (now.duration_since(self.since), times_taken());
        let often = i64::try_from(time.as_millis() / TAKEN_EVERY.as_millis()).unwrap_or(i64::MAX);
        self.holds = match self.lost > time / 8 || taken - self.taken > often {
            true => HOLDS,
            false => self.holds.saturating_sub(1),
        };
        (self.since, self.lost, self.taken) = (now, Duration::ZERO, taken);
        self.holds > 0
    }
}

/// Involuntary context switches of this thread.
fn times_taken() -> i64 {
    // SAFETY: all-zero is a valid value of this struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes to the live struct.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nivcsw
}

impl Shared {
    /// Wakes as many sleepers as this loop can use beside those awake.
    fn wake_for(&self, tasks: usize, workers: usize) {
        let sleepers = self.sleepers.load(SeqCst).max(0);
        if sleepers == 0 {
            return;
        }
        let useful = (tasks - 1).min(self.limit as usize) as i32;
        let missing = (useful - (workers as i32 - sleepers)).min(sleepers);
        if missing > 0 {
            let woken = futex::wake(&self.state.0, missing);
            // On behalf of the woken, so that the next loop does not wake them again.
            self.sleepers.fetch_sub(woken, SeqCst);
        }
    }

    /// Enters the loop if it is open, new to this worker and not full.
    fn enter(&self, seen: u32) -> Option<u32> {
        let mut now = self.state.0.load(Relaxed);
        while self.invites(now, seen) {
            match self
                .state
                .0
                .compare_exchange_weak(now, now + 1, Acquire, Relaxed)
            {
                Ok(_) => return Some(now / EPOCH),
                Err(other) => now = other,
            }
        }
        None
    }

    fn invites(&self, state: u32, seen: u32) -> bool {
        state & OPEN != 0 && state / EPOCH != seen && state & INSIDE < self.limit
    }

    fn leave(&self) {
        let before = self.state.0.fetch_sub(1, SeqCst);
        let last = before & (OPEN | INSIDE) == 1;
        if last && self.waiting.load(SeqCst) != 0 && self.waiting.swap(0, SeqCst) != 0 {
            futex::wake(&self.waiting, 1);
        }
    }

    /// Lets the calling thread move over the group.
    fn leave_cpu(&self) {
        if let Some(pins) = &self.pins {
            // Without the right to move, it stays where it is.
            drop(pins.group.apply());
        }
    }

    /// The tasks of a thread at the start of a loop.
    fn share(&self, thread: usize) -> Range<usize> {
        let tasks = self.tasks.load(Relaxed);
        let at = |thread: usize| {
            let threads = self.next.len();
            tasks / threads * thread + (tasks % threads).min(thread)
        };
        at(thread)..at(thread + 1)
    }

    /// Some tasks of the share of thread `of`.
    fn take(&self, of: usize) -> Option<Range<usize>> {
        let (next, end) = (&self.next[of].0, self.share(of).end);
        let mut start = next.load(Relaxed);
        while start < end {
            let n = ((end - start) / 2).clamp(1, self.most.load(Relaxed));
            match next.compare_exchange_weak(start, start + n, Relaxed, Relaxed) {
                Ok(_) => return Some(start..start + n),
                Err(other) => start = other,
            }
        }
        None
    }

    fn wait_time(&self) -> Duration {
        match self.crowded.load(Relaxed) {
            true => self.spin.min(SHORT_SPIN),
            false => self.spin,
        }
    }
}

/// Closes the loop and waits for those inside, also while unwinding.
struct Finish<'a> {
    s: &'a Shared,
    start: Instant,
    /// Time waited for threads that did not run.
    lost: Duration,
}

impl Finish<'_> {
    fn wait(&mut self) {
        let s = self.s;
        let inside = |state: u32| state & INSIDE != 0;
        if !inside(s.state.0.fetch_and(!OPEN, SeqCst)) {
            return;
        }
        if spin_until(s.wait_time(), || !inside(s.state.0.load(Acquire))) {
            return;
        }
        let closed = Instant::now();
        loop {
            s.waiting.store(1, SeqCst);
            let now = s.state.0.load(SeqCst);
            if !inside(now) {
                break;
            }
            futex::wait(&s.waiting, 1);
        }
        s.waiting.store(0, Relaxed);
        // The others draw from the same tasks, so that they need about as long for their last
        // one as this thread for all of its own at most: longer means that they did not run.
        let own = closed - self.start;
        self.lost = Some(closed.elapsed())
            .filter(|&t| t > 2 * own)
            .unwrap_or_default();
    }
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The tasks left are not wanted any more.
            self.s.tasks.store(0, Relaxed);
            for next in &self.s.next {
                next.0.store(usize::MAX, Relaxed);
            }
            self.wait();
        }
    }
}

fn take_tasks(s: &Shared, body: Task<'_>, thread: usize) {
    let threads = s.next.len();
    for of in (thread..threads).chain(0..thread) {
        while let Some(some) = s.take(of) {
            body(some, thread);
        }
    }
}

fn work(s: &Shared, thread: usize) {
    let mut pinned = false;
    if let Some(pins) = &s.pins {
        match pins.own[thread].apply() {
            Ok(()) => pinned = true,
            Err(error) => log::debug!("thread {thread} is not pinned: {error}"),
        }
    }
    let mut seen = s.state.0.load(Relaxed) / EPOCH;
    s.started.fetch_add(1, Release);
    while let Some(epoch) = wait_for_loop(s, seen) {
        seen = epoch;
        // SAFETY: this worker is inside, so that `run` has stored a pointer to a live
        // reference (1 in the head of this file) and keeps it and the body alive until this
        // worker is out (2).
        let body: Task<'_> = unsafe { *s.body.load(Relaxed) };
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| take_tasks(s, body, thread)));
        if outcome.is_err() {
            s.panicked.store(true, Release);
        }
        s.leave();
        if pinned && s.crowded.load(Relaxed) {
            pinned = false;
            s.leave_cpu();
        }
    }
}

/// Enters the next loop after `seen`; `None` when the pool stops.
fn wait_for_loop(s: &Shared, seen: u32) -> Option<u32> {
    loop {
        let ready = || s.invites(s.state.0.load(Relaxed), seen) || s.stop.load(Relaxed);
        if !spin_until(s.wait_time(), ready) {
            s.sleepers.fetch_add(1, SeqCst);
            let now = s.state.0.load(SeqCst);
            let asleep = !s.invites(now, seen) && !s.stop.load(SeqCst);
            // Who was woken was taken off the count by the waker.
            if !(asleep && futex::wait(&s.state.0, now)) {
                s.sleepers.fetch_sub(1, SeqCst);
            }
        }
        if s.stop.load(Acquire) {
            return None;
        }
        if let Some(epoch) = s.enter(seen) {
            return Some(epoch);
        }
    }
}

/// Spins until `ready`, or for about `time`; says whether it became ready.
fn spin_until(time: Duration, ready: impl Fn() -> bool) -> bool {
    // The clock costs as much as some rounds of spinning.
    const ROUNDS: u32 = 16;
    if ready() {
        return true;
    }
    if time.is_zero() {
        return false;
    }
    let start = Instant::now();
    loop {
        for _ in 0..ROUNDS {
            std::hint::spin_loop();
            if ready() {
                return true;
            }
        }
        if start.elapsed() >= time {
            return false;
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let s = &*self.shared;
        s.stop.store(true, SeqCst);
        // The word changes, so that who has not seen `stop` does not fall asleep.
        s.state.0.fetch_add(EPOCH, SeqCst);
        futex::wake(&s.state.0, i32::MAX);
        for worker in self.workers.drain(..) {
            // A panic of a worker was reported by `run`.
            drop(worker.join());
        }
        let before = self.before.take().filter(|_| self.pinned);
        if let Some(Err(error)) = before.map(|m| m.apply()) {
            log::debug!("the calling thread stays on its CPU: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
