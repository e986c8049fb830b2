//! One test per malformation of a GGUF file: the right error, with the place in it.

mod common;

use common::{array, assemble, entry, row, small_gguf};
use myq_format::Error;
use myq_format::gguf::Gguf;

fn error(file: &[u8]) -> Error {
    Gguf::parse(file).expect_err("the file is malformed")
}

/// The error of a file with one metadata entry.
fn entry_error(key: &[u8], value_type: u32, payload: &[u8]) -> Error {
    error(&assemble(&[entry(key, value_type, payload)], &[], 0))
}

/// The error of a file with these rows and 1024 bytes of data.
fn rows_error(rows: &[Vec<u8>]) -> Error {
    error(&assemble(&[], rows, 1024))
}

#[test]
fn another_magic() {
    assert!(matches!(
        error(b"GGML\x03\0\0\0"),
        Error::Magic {
            expected: "GGUF",
            ..
        }
    ));
    let html = error(b"<!DOCTYPE html>");
    assert!(html.to_string().contains("not a GGUF file"), "{html}");
}

#[test]
fn another_version() {
    for found in [0, 1, 4, u32::MAX] {
        let mut file = small_gguf(3);
        file[4..8].copy_from_slice(&found.to_le_bytes());
        assert!(matches!(error(&file), Error::Version { found: f, .. } if f == found));
    }
}

#[test]
fn big_endian() {
    assert!(matches!(error(b"GGUF\0\0\0\x03"), Error::BigEndian));
}

#[test]
fn cut_in_the_preamble() {
    let e = error(b"GGUF\x03\0\0\0\0\0");
    assert!(matches!(
        e,
        Error::Truncated {
            what: "tensors",
            offset: 8,
            need: 8,
            file: 10
        }
    ));
    assert!(matches!(error(b"GG"), Error::Truncated { offset: 0, .. }));
}

#[test]
fn absurd_counts() {
    for (at, name) in [(8, "tensors"), (16, "metadata keys")] {
        let mut file = small_gguf(3);
        file[at..at + 8].copy_from_slice(&(1u64 << 60).to_le_bytes());
        let e = error(&file);
        assert!(
            matches!(e, Error::TooMany { what, .. } if what == name),
            "{e}"
        );
    }
}

#[test]
fn more_keys_or_tensors_than_bytes() {
    for (at, name) in [(8, "the tensor table"), (16, "the metadata")] {
        let mut file = assemble(&[], &[], 0);
        file[at..at + 8].copy_from_slice(&1000u64.to_le_bytes());
        let e = error(&file);
        assert!(
            matches!(e, Error::CountBeyondFile { what, .. } if what == name),
            "{e}"
        );
    }
}

#[test]
fn a_key_too_long() {
    let e = entry_error(&[b'k'; 65_536], 0, &[0]);
    assert!(matches!(
        e,
        Error::NameTooLong {
            bytes: 65_536,
            offset: 24,
            ..
        }
    ));
}

#[test]
fn a_key_not_utf8() {
    assert!(matches!(
        entry_error(b"k\xff", 0, &[0]),
        Error::NameNotUtf8 { offset: 24, .. }
    ));
}

#[test]
fn a_key_twice() {
    let file = assemble(&[entry(b"k", 0, &[0]), entry(b"k", 0, &[0])], &[], 0);
    assert!(matches!(error(&file), Error::DuplicateKey { key, offset: 38 } if key == "k"));
}

#[test]
fn an_unknown_value_type() {
    let e = entry_error(b"k", 13, &[0; 8]);
    assert!(matches!(
        e,
        Error::UnknownValueType {
            id: 13,
            offset: 33,
            ..
        }
    ));
    let e = entry_error(b"k", 9, &array(99, 0, &[]));
    assert!(matches!(
        e,
        Error::UnknownValueType {
            id: 99,
            offset: 37,
            ..
        }
    ));
}

#[test]
fn a_string_beyond_the_file() {
    for len in [1000, 1 << 60, u64::MAX] {
        let e = entry_error(b"k", 8, &len.to_le_bytes());
        assert!(matches!(e, Error::Truncated { what: "a string value", need, .. } if need == len));
    }
}

#[test]
fn an_array_beyond_the_file() {
    let e = entry_error(b"k", 9, &array(6, 1000, &[0; 16]));
    assert!(matches!(
        e,
        Error::CountBeyondFile {
            what: "an array",
            count: 1000,
            ..
        }
    ));
    for count in [1 << 60, u64::MAX] {
        let e = entry_error(b"k", 9, &array(8, count, &[0; 16]));
        assert!(matches!(e, Error::TooMany { .. }), "{e}");
    }
}

#[test]
fn arrays_nested_too_deep() {
    let mut nested = array(0, 1, &[5]);
    for _ in 0..7 {
        nested = array(9, 1, &nested);
    }
    Gguf::parse(&assemble(&[entry(b"k", 9, &nested)], &[], 0)).unwrap();
    let one_more = array(9, 1, &nested);
    assert!(matches!(
        entry_error(b"k", 9, &one_more),
        Error::TooDeep { limit: 8, .. }
    ));
    // Heads alone: the depth is refused before the stack could overflow.
    nested = array(9, 1, &[]).repeat(60_000);
    assert!(matches!(
        entry_error(b"k", 9, &nested),
        Error::TooDeep { limit: 8, .. }
    ));
}

#[test]
fn a_truth_value_of_two() {
    assert!(matches!(
        entry_error(b"k", 7, &[2]),
        Error::BadBool {
            value: 2,
            offset: 37,
            ..
        }
    ));
    let e = entry_error(b"k", 9, &array(7, 3, &[0, 1, 7]));
    assert!(
        matches!(
            e,
            Error::BadBool {
                value: 7,
                offset: 51,
                ..
            }
        ),
        "{e}"
    );
}

#[test]
fn an_alignment_of_no_use() {
    for n in [0u32, 1, 24, 33, 1 << 17, u32::MAX] {
        let e = entry_error(b"general.alignment", 4, &n.to_le_bytes());
        assert!(matches!(e, Error::Alignment { value } if value == n.to_string()));
    }
    assert!(matches!(
        entry_error(b"general.alignment", 7, &[1]),
        Error::Alignment { .. }
    ));
}

#[test]
fn a_tensor_name_empty_twice_or_not_utf8() {
    assert!(matches!(
        rows_error(&[row(b"", &[1], 0, 0)]),
        Error::EmptyName { index: 0 }
    ));
    assert!(matches!(
        rows_error(&[row(b"\xfe", &[1], 0, 0)]),
        Error::NameNotUtf8 { .. }
    ));
    let e = rows_error(&[row(b"w", &[1], 0, 0), row(b"w", &[1], 0, 32)]);
    assert!(matches!(e, Error::DuplicateTensor { tensor } if tensor == "w"));
}

#[test]
fn dimensions_none_too_many_or_zero() {
    assert!(matches!(
        rows_error(&[row(b"w", &[], 0, 0)]),
        Error::Dimensions { dims: 0, .. }
    ));
    assert!(matches!(
        rows_error(&[row(b"w", &[1; 5], 0, 0)]),
        Error::Dimensions { dims: 5, .. }
    ));
    let e = rows_error(&[row(b"w", &[4, 0], 0, 0)]);
    assert!(matches!(e, Error::ZeroDimension { shape, .. } if shape == [4, 0]));
}

#[test]
fn a_shape_that_overflows() {
    for shape in [
        &[1 << 32, 1 << 32][..],
        &[u64::MAX],
        &[1 << 40, 1 << 40, 1 << 40],
    ] {
        assert!(matches!(
            rows_error(&[row(b"w", shape, 0, 0)]),
            Error::ShapeOverflow { .. }
        ));
    }
}

#[test]
fn a_type_not_supported_is_named() {
    let e = rows_error(&[row(b"blk.0.w", &[256], 17, 0)]);
    assert!(matches!(
        e,
        Error::UnsupportedTensorType { name: "IQ2_XS", .. }
    ));
    assert!(
        e.to_string().contains("blk.0.w") && e.to_string().contains("requantise"),
        "{e}"
    );
}

#[test]
fn a_type_unknown() {
    let e = rows_error(&[row(b"w", &[256], 4711, 0)]);
    assert!(matches!(e, Error::UnknownTensorType { id: 4711, .. }));
}

#[test]
fn rows_the_type_cannot_hold() {
    // 576 = 2.25 superblocks: our own files hold such rows, GGUF does not.
    for (type_id, cols, multiple) in [(10, 576, 256), (12, 100, 32), (2, 33, 32)] {
        let e = rows_error(&[row(b"w", &[cols, 1], type_id, 0)]);
        assert!(
            matches!(e, Error::RowLength { multiple: m, .. } if m == multiple),
            "{e}"
        );
    }
}

#[test]
fn an_offset_not_aligned() {
    let e = rows_error(&[row(b"w", &[1], 0, 8)]);
    assert!(matches!(
        e,
        Error::Misaligned {
            offset: 8,
            alignment: 32,
            ..
        }
    ));
}

#[test]
fn a_tensor_beyond_the_file() {
    for (cols, offset) in [(257, 0), (1, 1024), (1, 1 << 60), (1, u64::MAX - 31)] {
        let e = rows_error(&[row(b"w", &[cols], 0, offset)]);
        assert!(
            matches!(e, Error::TensorBeyondFile { data: 1024, .. }),
            "{e}"
        );
    }
}

#[test]
fn tensors_that_overlap() {
    let e = rows_error(&[row(b"b", &[8], 0, 32), row(b"a", &[16], 0, 0)]);
    let Error::Overlap { first, second, .. } = e else {
        panic!("{e}");
    };
    assert_eq!((first.as_str(), second.as_str()), ("a", "b"));
}
