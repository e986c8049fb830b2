//! Every task once, at any size and whatever sleeps, panics or is kept off its CPU.

use super::*;

/// What the kernel lets this thread use: at least one CPU.
fn cpus() -> Vec<usize> {
    Mask::current().expect("Linux tells").cpus()
}

fn placement(threads: usize) -> Placement {
    let (group, available) = (cpus(), cpus().len());
    Placement {
        cpus: group.iter().copied().cycle().take(threads).collect(),
        threads,
        group,
        available,
        node: None,
        why: String::new(),
        warnings: Vec::new(),
    }
}

#[test]
fn every_task_runs_once_at_any_size() {
    for threads in [1, 2, 3, 8] {
        let mut pool = Pool::new(threads).expect("threads");
        assert_eq!(pool.threads(), threads);
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

/// Ranges never cross from one thread's share to another's, where a range is one stretch of memory.
#[test]
fn ranges_cover_every_task_once() {
    for threads in [1, 2, 3, 8] {
        let mut pool = Pool::new(threads).expect("threads");
        let shared = pool.shared.clone();
        for tasks in [1, 2, 3, 7, 64, 1000] {
            let seen: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run_ranges(tasks, &|some, thread| {
                assert!(thread < threads && !some.is_empty());
                let whole = |of: usize| {
                    let share = shared.share(of);
                    share.start <= some.start && some.end <= share.end
                };
                // Nothing is shared out with one task, or one thread.
                let shared_out = tasks > 1 && threads > 1;
                assert!(
                    !shared_out || (0..threads).any(whole),
                    "{some:?} of {tasks}"
                );
                seen[some].iter().for_each(|n| {
                    n.fetch_add(1, Relaxed);
                });
            });
            assert!(
                seen.iter().all(|n| n.load(Relaxed) == 1),
                "{threads} threads, {tasks} tasks"
            );
        }
    }
}

#[test]
fn shares_are_even_and_cover_all_tasks() {
    for threads in 1..=9 {
        let pool = Pool::new(threads).expect("threads");
        for tasks in 0..40 {
            pool.shared.tasks.store(tasks, Relaxed);
            let shares: Vec<_> = (0..threads).map(|t| pool.shared.share(t)).collect();
            assert_eq!(
                shares.iter().cloned().flatten().collect::<Vec<_>>(),
                (0..tasks).collect::<Vec<_>>()
            );
            let lengths = shares.iter().map(|s| s.len());
            assert!(
                lengths.clone().max() <= lengths.min().map(|n| n + 1),
                "{shares:?}"
            );
        }
    }
}

#[test]
fn workers_wake_after_they_slept() {
    let mut pool = Pool::start(4, 4, None, SPIN).expect("threads");
    let (count, others) = (AtomicUsize::new(0), AtomicUsize::new(0));
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        pool.run(16, &|_, thread| {
            std::thread::sleep(Duration::from_micros(200));
            count.fetch_add(1, Relaxed);
            others.fetch_add(usize::from(thread != 0), Relaxed);
        });
    }
    assert_eq!(count.load(Relaxed), 320);
    // A task sleeps for longer than it takes to wake.
    assert!(others.load(Relaxed) > 0, "no worker ever helped");
}

/// Tiny loops in numbers, with pauses around the time at which workers fall asleep: where a
/// wake-up, an entry or an exit could be missed, this hangs or counts wrong.
#[test]
fn no_task_is_lost_under_stress() {
    let mut random = 88_172_645_463_325_252u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for threads in 1..=9 {
        for spin in [Duration::ZERO, Duration::from_micros(20)] {
            // More threads than CPUs, and as many.
            for cpus in [1, 2, threads] {
                let mut pool = Pool::start(threads, cpus, None, spin).expect("threads");
                let mut sums = vec![0u64; 16];
                for round in 0..400u64 {
                    let tasks = (next() % 17) as usize;
                    let cells = sums.as_mut_ptr() as usize;
                    let task = |t: usize| {
                        assert!(t < 16);
                        // SAFETY: each task has its own cell of the live vector.
                        unsafe { *(cells as *mut u64).add(t) += round };
                    };
                    match round % 2 {
                        0 => pool.run(tasks, &|t, _| task(t)),
                        _ => pool.run_ranges(tasks, &|some, _| some.for_each(task)),
                    }
                    let before: u64 = sums.iter().sum();
                    assert_eq!(before, tasks as u64 * round, "{threads} threads");
                    sums.fill(0);
                    if next() % 16 == 0 {
                        std::thread::sleep(Duration::from_micros(next() % 60));
                    }
                }
            }
        }
    }
}

#[test]
fn a_panic_in_a_task_reaches_the_caller() {
    // On a worker or on the caller: by chance, so a few times.
    for bad in 0..20 {
        let mut pool = Pool::new(3).expect("threads");
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(20, &|t, _| assert!(t != bad))
        }));
        assert!(result.is_err());
    }
}

#[test]
fn nobody_enters_a_closed_or_full_loop() {
    let mut pool = Pool::start(1, 3, None, SPIN).expect("no threads");
    let s = Arc::get_mut(&mut pool.shared).expect("no worker has it");
    s.limit = 2;
    assert_eq!(s.enter(0), None, "not opened yet");
    s.state.0.store(EPOCH | OPEN, Relaxed);
    assert_eq!(s.enter(0), Some(1));
    assert_eq!(s.enter(1), None, "it was in this loop");
    assert_eq!(s.enter(0), Some(1));
    assert_eq!(s.enter(0), None, "two are inside");
    s.leave();
    s.state.0.fetch_and(!OPEN, Relaxed);
    assert_eq!(s.enter(0), None, "closed");
    s.leave();
    assert_eq!(s.state.0.load(Relaxed), EPOCH);
}

/// Nothing of this thread's CPUs changes for good.
#[test]
fn threads_stay_on_their_cpus_until_these_are_short() {
    for threads in [1, 2, 3] {
        let test = move || stay_until_short(threads.min(cpus().len()));
        std::thread::spawn(test).join().expect("no panic");
    }
}

fn stay_until_short(threads: usize) {
    let (before, settings) = (cpus(), Settings::default());
    let mut pool = Pool::with(&placement(threads), settings).expect("threads");
    assert_eq!(cpus(), before, "the caller moves at its first loop");
    let alone = threads == 1;
    let tasks = threads * 64;
    pool.run(tasks, &|_, thread| {
        assert!(alone || cpus() == [before[thread]]);
    });
    pool.window.since = Instant::now() - WINDOW;
    pool.window.lost = WINDOW;
    pool.watch(Instant::now(), Duration::ZERO);
    assert!(pool.shared.crowded.load(Relaxed));
    assert_eq!(cpus(), before, "it may move over the group");
    pool.run(tasks, &|_, _| {});
    pool.window.holds = HOLDS;
    pool.shared.crowded.store(true, Relaxed);
    for _ in 0..HOLDS {
        assert!(pool.shared.crowded.load(Relaxed));
        pool.window = Window {
            since: Instant::now() - WINDOW,
            holds: pool.window.holds,
            ..Window::new()
        };
        pool.watch(Instant::now(), Duration::ZERO);
    }
    assert!(!pool.shared.crowded.load(Relaxed), "it recovers");
    drop(pool);
    assert_eq!(cpus(), before);

    let unpinned = Settings {
        pin: false,
        ..settings
    };
    for (threads, settings) in [(threads, unpinned), (before.len() + 1, settings)] {
        let mut pool = Pool::with(&placement(threads), settings).expect("threads");
        pool.run(tasks, &|_, _| assert_eq!(cpus(), before));
    }
}
