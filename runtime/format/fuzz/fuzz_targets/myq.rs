//! `.myq` from any bytes: an error, or a file all of whose parts can be read.
//!
//! The checksum of the header stops a fuzzer at the door. So each input is tried as it is and
//! with its checksum made right, and text that begins like JSON as the header of a file.
#![no_main]

#[path = "../../tests/common/walk.rs"]
mod walk;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = walk::myq(bytes);
    let mut sealed = bytes.to_vec();
    walk::reseal(&mut sealed);
    let _ = walk::myq(&sealed);
    if bytes.starts_with(b"{")
        && let Some(framed) = walk::frame(bytes)
    {
        let _ = walk::myq(&framed);
    }
});
