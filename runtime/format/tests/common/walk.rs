//! Touches all that a parsed file hands out; shared with the fuzz targets.
#![allow(dead_code, reason = "each test and fuzz target uses a part of this")]

use std::hint::black_box;

use myq_format::gguf::{Array, Gguf, Value};
use myq_format::myq::Myq;
use myq_format::{Error, TensorInfo};

/// Parses GGUF and reads every value and every tensor byte; returns the number of tensors.
pub(crate) fn gguf(bytes: &[u8]) -> Result<usize, Error> {
    let file = Gguf::parse(bytes)?;
    for (key, value) in file.keys() {
        // Not `==`: a value may be NaN.
        assert!(file.get(key).is_some_and(|v| std::ptr::eq(v, value)));
        if let Value::Array(a) = value {
            array(a);
        }
        black_box((value.as_integer(), value.as_float(), value.as_str()));
    }
    for t in file.tensors() {
        assert_eq!(file.tensor(&t.name), Some(t));
        tensor(t, file.data(t));
    }
    Ok(file.tensors().len())
}

/// Parses `.myq`, verifies all checksums and reads every tensor byte.
pub(crate) fn myq(bytes: &[u8]) -> Result<usize, Error> {
    let file = Myq::parse(bytes)?;
    for t in file.tensors() {
        assert_eq!(file.tensor(&t.name), Some(t));
        tensor(t, file.data(t));
        black_box(file.verify_tensor(t).is_ok());
    }
    assert!(file.header().config.is_object());
    assert_eq!(file.file_hash().len(), 64);
    black_box(file.tokenizer());
    file.verify_all()?;
    Ok(file.tensors().len())
}

fn tensor(t: &TensorInfo, data: &[u8]) {
    assert_eq!(data.len() as u64, t.bytes);
    assert_eq!(t.row_bytes() * t.rows(), t.bytes);
    assert_eq!(t.cols() * t.rows(), t.elements());
    black_box(data.iter().fold(0u8, |sum, b| sum.wrapping_add(*b)));
}

fn array(a: &Array<'_>) {
    let mut count = 0;
    for value in a.values() {
        count += 1;
        if let Value::Array(inner) = value {
            array(&inner);
        }
    }
    assert_eq!(count, a.len());
    for typed in [
        a.strings().map(|s| {
            s.filter(|s| s.to_str().is_ok() || !s.bytes().is_empty())
                .count()
        }),
        a.f32s().map(|i| i.count()),
        a.i32s().map(|i| i.count()),
        a.u32s().map(|i| i.count()),
        a.bools().map(|i| i.count()),
        a.integers().map(|i| i.count()),
    ] {
        assert!(typed.is_none_or(|n| n == a.len()));
    }
}

/// Makes the file length and the checksum of the header right again after damage, so that
/// the damage reaches the checks behind them.
pub(crate) fn reseal(file: &mut [u8]) {
    if file.len() < 64 {
        return;
    }
    let len = file.len() as u64;
    file[..8].copy_from_slice(b"MYQ\x1a\x01\0\0\0");
    file[8..16].copy_from_slice(&len.to_le_bytes());
    let header = u64::from_le_bytes(file[16..24].try_into().unwrap());
    let end = usize::try_from(header.saturating_add(64)).unwrap_or(usize::MAX);
    let Some(json) = file.get(64..end) else {
        return;
    };
    let hash = blake3::Hasher::new()
        .update(&file[..32])
        .update(json)
        .finalize();
    file[32..64].copy_from_slice(hash.as_bytes());
}

/// Length of the files that [`frame`] makes, and where their header ends.
pub(crate) const FRAME: usize = 16_384;
/// Offset of the tokenizer in those files: the header is padded with blanks up to it.
pub(crate) const FRAME_HEADER_END: usize = 4096;

/// A `.myq` file of zeros around this header, so that a fuzzer can change its length without
/// moving the sections; `None` if it is too long.
pub(crate) fn frame(json: &[u8]) -> Option<Vec<u8>> {
    let mut file = vec![0; FRAME];
    let header = &mut file[64..FRAME_HEADER_END];
    header.fill(b' ');
    header.get_mut(..json.len())?.copy_from_slice(json);
    file[16..24].copy_from_slice(&(FRAME_HEADER_END as u64 - 64).to_le_bytes());
    reseal(&mut file);
    Some(file)
}
