//! Maps a model file and runs it on the processor's cores.
//!
//! [`Engine::open`] maps the file, checks it, chooses the kernels once, allocates every
//! buffer and brings the file into the page cache; after that no call allocates or fails on
//! a shape. Text stays outside: the engine takes and gives token ids and logits.

pub mod bandwidth;
mod cpu;
mod error;
mod futex;
pub mod generate;
pub mod map;
mod matmul;
pub mod memory;
pub mod numa;
mod place;
mod pool;
pub mod prewarm;
pub mod repack;
mod select;
mod session;
pub mod topology;
pub mod tune;

pub use error::EngineError;
pub use generate::{Stats, Stop, generate};
pub use map::Mapped;
pub use select::{KernelChoice, available as available_kernels, default_threads};
pub use session::{Engine, Options};
