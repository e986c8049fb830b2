//! Maps a model file and runs it on the processor's cores.
//!
//! [`Engine::open`] maps the file, checks it, chooses the kernels once, allocates every
//! buffer and brings the file into the page cache; after that no call allocates or fails on
//! a shape. Text stays outside: the engine takes and gives token ids and logits.

mod cpu;
mod error;
pub mod generate;
pub mod map;
pub mod memory;
mod pool;
pub mod prewarm;
mod select;
mod session;

pub use error::EngineError;
pub use generate::{Stats, Stop, generate};
pub use map::Mapped;
pub use select::{KernelChoice, available as available_kernels, default_threads};
pub use session::{Engine, Options};
