//! The host side: import, quantise, re-lay, inspect and verify model files.
#![forbid(unsafe_code)]

pub mod error;
mod hub;
pub mod import;
pub mod inspect;
pub mod layout;
pub mod logits;
pub mod model;
pub mod progress;
pub mod quantize;
pub mod quickstart;
pub mod recipe;
pub mod relayout;
pub mod verify;

pub use error::ToolError;
