//! A model: configuration, tokenizer, chat template, weights, forward pass, sampling.
//!
//! Nothing here knows a file system or a processor. [`forward`] is the transformer,
//! generic over a [`Backend`]; [`Source`] is everything read from a file.
#![forbid(unsafe_code)]

pub mod backend;
pub mod cache;
pub mod config;
pub mod error;
mod forward;
pub mod plan;
pub mod rope;
pub mod sample;
pub mod source;
pub mod state;
pub mod template;
pub mod tokenizer;
pub mod weights;

pub use backend::{Backend, Batch, Slot};
pub use cache::{Cache, CacheType};
pub use config::Config;
pub use error::ModelError;
pub use forward::forward;
pub use plan::{Activations, Plan};
pub use sample::{Sampler, Sampling};
pub use source::Source;
pub use state::State;
pub use weights::Weights;
