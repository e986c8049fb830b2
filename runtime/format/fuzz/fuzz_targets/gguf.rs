//! GGUF from any bytes: an error, or a file all of whose parts can be read.
#![no_main]

#[path = "../../tests/common/walk.rs"]
mod walk;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = walk::gguf(bytes);
});
