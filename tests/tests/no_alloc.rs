//! D2: after start-up, prompt and decode allocate nothing, workers included.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use myq_blocks::encode::Method;
use myq_engine::{Engine, Options};
use myq_model::{Activations, Sampler, Sampling};

/// Counts allocations of every thread while armed.
struct Counting;

static ARMED: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);

fn count() {
    if ARMED.load(SeqCst) {
        COUNT.fetch_add(1, SeqCst);
    }
}

// SAFETY: every call is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(p, layout, size) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of all threads while `f` runs.
fn counted(f: impl FnOnce()) -> u64 {
    COUNT.store(0, SeqCst);
    ARMED.store(true, SeqCst);
    f();
    ARMED.store(false, SeqCst);
    COUNT.load(SeqCst)
}

fn main() {
    // The counter sees an allocation of this thread, and one of another.
    assert_eq!(counted(|| drop(std::hint::black_box(vec![1u8]))), 1);
    let (go, went) = std::sync::mpsc::sync_channel::<()>(1);
    let (done, finished) = std::sync::mpsc::sync_channel::<()>(1);
    let other = std::thread::spawn(move || {
        went.recv().expect("told to go");
        drop(std::hint::black_box(Box::new([0u64; 4])));
        done.send(()).expect("heard");
    });
    let on_another = counted(|| {
        go.send(()).expect("alive");
        finished.recv().expect("done");
    });
    other.join().expect("no panic");
    assert!(on_another >= 1, "the counter does not see other threads");

    let dir = tempfile::tempdir().expect("a folder");
    for bits in [2, 3, 4, 5, 6] {
        for name in ["target", "draft"] {
            let path = myq_tests::quantised(name, bits, Method::Round, dir.path());
            run(
                &path,
                &format!("{name} at {bits} bits"),
                Activations::default(),
            );
        }
    }
    let path = myq_tests::quantised("draft", 4, Method::Round, dir.path());
    for activations in [Activations::Mixed, Activations::Int8x2] {
        run(&path, &format!("draft, {activations:?}"), activations);
    }
}

fn run(path: &std::path::Path, what: &str, activations: Activations) {
    let options = Options {
        activations,
        threads: Some(2),
        context: Some(1024),
        ..Options::default()
    };
    let mut engine = Engine::open(path, &options, &mut |_, _| {}).expect("it opens");
    let settings = Sampling {
        temperature: 0.8,
        repeat_penalty: 1.1,
        seed: 1,
        ..Sampling::default()
    };
    let mut sampler = Sampler::new(settings, engine.source().config.vocab);
    let prompt: Vec<u32> = (0..512).map(|i| 3 + i * 7 % 2000).collect();
    let mut token = 0;
    let in_prompt = counted(|| {
        prompt.iter().for_each(|&t| sampler.accept(t));
        token = sampler
            .sample(engine.feed(&prompt, 1).expect("it fits"))
            .expect("a token");
    });
    let in_decode = counted(|| {
        for _ in 0..200 {
            sampler.accept(token);
            token = sampler
                .sample(engine.step(token).expect("it fits"))
                .expect("a token");
        }
    });
    println!(
        "{what}, 2 threads: {in_prompt} allocations over a prompt of 512, {in_decode} over 200 tokens"
    );
    assert_eq!((in_prompt, in_decode), (0, 0), "{what}");
}
