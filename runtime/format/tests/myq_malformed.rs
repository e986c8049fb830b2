//! One test per malformation of a `.myq` file: the right error, with the place in it.

mod common;

use common::{edit, reseal, small_myq, with_json};
use myq_format::Error;
use myq_format::myq::Myq;
use serde_json::{Value, json};

fn error(file: &[u8]) -> Error {
    Myq::parse(file).expect_err("the file is malformed")
}

/// The error after an edit of the header.
fn edited(change: impl FnOnce(&mut Value)) -> Error {
    error(&edit(&small_myq(), change))
}

fn header_end(file: &[u8]) -> usize {
    64 + u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize
}

#[test]
fn an_edit_without_a_change_loads() {
    Myq::parse(&edit(&small_myq(), |_| {}))
        .unwrap()
        .verify_all()
        .unwrap();
}

#[test]
fn another_magic() {
    assert!(matches!(
        error(b"GGUF\x03\0\0\0"),
        Error::Magic {
            expected: ".myq",
            ..
        }
    ));
    assert!(matches!(error(b""), Error::Truncated { offset: 0, .. }));
}

#[test]
fn another_version() {
    let mut file = small_myq();
    file[4] = 2;
    assert!(matches!(error(&file), Error::Version { found: 2, .. }));
}

#[test]
fn cut_short() {
    let file = small_myq();
    let e = error(&file[..file.len() - 1]);
    assert!(
        matches!(
            e,
            Error::Truncated {
                what: "the whole file",
                ..
            }
        ),
        "{e}"
    );
}

#[test]
fn bytes_after_the_end() {
    let mut file = small_myq();
    file.push(0);
    assert!(matches!(
        error(&file),
        Error::TrailingBytes { excess: 1, .. }
    ));
    // Also where the file's length was made to include them.
    reseal(&mut file);
    assert!(matches!(
        error(&file),
        Error::TrailingBytes { excess: 1, .. }
    ));
}

#[test]
fn a_header_too_large() {
    for len in [1u64 << 25, 1 << 60, u64::MAX] {
        let mut file = small_myq();
        file[16..24].copy_from_slice(&len.to_le_bytes());
        assert!(matches!(error(&file), Error::HeaderTooLarge { found, .. } if found == len));
    }
}

#[test]
fn a_header_beyond_the_file() {
    let mut file = small_myq();
    file[16..24].copy_from_slice(&(1u64 << 20).to_le_bytes());
    assert!(matches!(
        error(&file),
        Error::Truncated {
            what: "the header",
            offset: 64,
            ..
        }
    ));
}

#[test]
fn reserved_bytes_in_use() {
    let mut file = small_myq();
    file[24] = 1;
    reseal(&mut file);
    assert!(matches!(error(&file), Error::Reserved { offset: 24 }));
}

#[test]
fn a_bit_of_the_header_flipped() {
    let file = small_myq();
    for at in [32, 64, header_end(&file) - 1] {
        let mut flipped = file.clone();
        flipped[at] ^= 4;
        assert!(
            matches!(error(&flipped), Error::HeaderChecksum { .. }),
            "at {at}"
        );
    }
}

#[test]
fn a_header_that_is_not_json() {
    for text in [
        &b""[..],
        b"{",
        b"[]",
        b"\xff\xfe",
        b"{} {}",
        b"{\"config\":{}}",
    ] {
        assert!(matches!(
            error(&with_json(&small_myq(), text)),
            Error::HeaderJson { .. }
        ));
    }
    let mut deep = br#"{"config":"#.to_vec();
    deep.extend([b'['; 300]);
    assert!(matches!(
        error(&with_json(&small_myq(), &deep)),
        Error::HeaderJson { .. }
    ));
}

#[test]
fn header_fields_missing_unknown_twice_or_of_another_type() {
    assert!(matches!(
        edited(|h| h["extra"] = json!(1)),
        Error::HeaderJson { .. }
    ));
    assert!(matches!(
        edited(|h| h["layout"] = json!(1)),
        Error::HeaderJson { .. }
    ));
    assert!(matches!(
        edited(|h| h["tensors"][0]["offset"] = json!(-1)),
        Error::HeaderJson { .. }
    ));
    assert!(matches!(
        edited(|h| h["tensors"][0]["bytes"] = json!(1.5)),
        Error::HeaderJson { .. }
    ));
    let gone = |h: &mut Value| h.as_object_mut().unwrap().remove("tokenizer").is_some();
    assert!(matches!(
        edited(|h| assert!(gone(h))),
        Error::HeaderJson { .. }
    ));
    let twice = br#"{"layout":"plain","layout":"plain"}"#;
    assert!(matches!(
        error(&with_json(&small_myq(), twice)),
        Error::HeaderJson { .. }
    ));
}

#[test]
fn a_configuration_that_is_no_object() {
    let e = edited(|h| h["config"] = json!([1]));
    assert!(matches!(e, Error::HeaderField { field, .. } if field == "config"));
}

#[test]
fn a_layout_unknown() {
    let e = edited(|h| h["layout"] = json!("rows5"));
    assert!(matches!(e, Error::UnknownLayout { layout } if layout == "rows5"));
}

#[test]
fn checksums_that_are_none() {
    for bad in ["", "zz", &"AB".repeat(32), &"ab".repeat(33)] {
        let e = edited(|h| h["tensors"][1]["blake3"] = json!(bad));
        assert!(matches!(e, Error::HeaderField { field, .. } if field == "blake3 of norm"));
        let e = edited(|h| h["tokenizer"]["blake3"] = json!(bad));
        assert!(matches!(e, Error::HeaderField { .. }));
        let e = edited(|h| h["provenance"]["calibration"] = json!(bad));
        assert!(matches!(e, Error::HeaderField { .. }));
    }
}

#[test]
fn a_type_unknown() {
    let e = edited(|h| h["tensors"][2]["dtype"] = json!("Q9_Z"));
    assert!(matches!(e, Error::UnknownDType { dtype, .. } if dtype == "Q9_Z"));
}

#[test]
fn shapes_that_cannot_be() {
    let shaped = |shape: Value| edited(move |h| h["tensors"][0]["shape"] = shape);
    assert!(matches!(
        shaped(json!([])),
        Error::Dimensions { dims: 0, .. }
    ));
    assert!(matches!(
        shaped(json!([64, 1, 1, 1, 1])),
        Error::Dimensions { dims: 5, .. }
    ));
    assert!(matches!(
        shaped(json!([64, 0])),
        Error::ZeroDimension { .. }
    ));
    assert!(matches!(
        shaped(json!([64, u64::MAX])),
        Error::ShapeOverflow { .. }
    ));
    assert!(matches!(
        shaped(json!([33])),
        Error::RowLength { multiple: 32, .. }
    ));
}

#[test]
fn bytes_that_do_not_fit_the_shape() {
    let e = edited(|h| h["tensors"][0]["bytes"] = json!(203));
    assert!(
        matches!(
            e,
            Error::ByteCount {
                expected: 204,
                found: 203,
                ..
            }
        ),
        "{e}"
    );
    let e = edited(|h| h["tensors"][0]["shape"] = json!([64, 4]));
    assert!(
        matches!(
            e,
            Error::ByteCount {
                expected: 272,
                found: 204,
                ..
            }
        ),
        "{e}"
    );
}

#[test]
fn names_empty_or_twice() {
    let e = edited(|h| h["tensors"][3]["name"] = json!("up"));
    assert!(matches!(e, Error::DuplicateTensor { tensor } if tensor == "up"));
    assert!(matches!(
        edited(|h| h["tensors"][3]["name"] = json!("")),
        Error::EmptyName { index: 3 }
    ));
}

#[test]
fn sections_that_overlap() {
    let e = edited(|h| h["tensors"][1]["offset"] = h["tensors"][0]["offset"].clone());
    assert!(matches!(e, Error::Overlap { second, .. } if second == "norm"));
    assert!(matches!(
        edited(|h| h["tokenizer"]["offset"] = json!(0)),
        Error::Overlap { .. }
    ));
}

#[test]
fn sections_out_of_order() {
    let swapped = |h: &mut Value| h["tensors"].as_array_mut().unwrap().swap(0, 1);
    assert!(matches!(edited(swapped), Error::Hole { section, .. } if section == "norm"));
}

#[test]
fn holes_between_sections() {
    let moved = |by: u64| {
        edited(move |h| {
            let at = h["tensors"][1]["offset"].as_u64().unwrap();
            h["tensors"][1]["offset"] = json!(at + by);
        })
    };
    assert!(matches!(moved(64), Error::Hole { .. }));
    assert!(matches!(moved(1), Error::Hole { .. }), "not aligned");
    assert!(matches!(
        edited(|h| h["tokenizer"]["offset"] = json!(u64::MAX)),
        Error::Hole { .. }
    ));
}

#[test]
fn a_section_beyond_the_file() {
    for bytes in [1u64 << 40, u64::MAX] {
        let e = edited(|h| h["tokenizer"]["bytes"] = json!(bytes));
        assert!(
            matches!(
                e,
                Error::Truncated {
                    what: "a section",
                    ..
                }
            ),
            "{e}"
        );
    }
}

#[test]
fn padding_that_is_not_zero() {
    let file = small_myq();
    let m = Myq::parse(&file).unwrap();
    let after = |i: usize| (m.tensors()[i].offset + m.tensors()[i].bytes) as usize;
    for at in [
        header_end(&file),
        m.tensors()[0].offset as usize - 1,
        after(0),
    ] {
        let mut damaged = file.clone();
        damaged[at] = 1;
        assert!(matches!(error(&damaged), Error::Padding { offset } if offset == at as u64));
    }
}

#[test]
fn a_bit_of_the_data_flipped_is_found_by_verification() {
    let file = small_myq();
    let m = Myq::parse(&file).unwrap();
    let at = m.tensor("up").unwrap().offset;
    let mut damaged = file.clone();
    damaged[at as usize + 3] ^= 0x20;
    let d = Myq::parse(&damaged).unwrap();
    d.verify_tensor(d.tensor("norm").unwrap()).unwrap();
    d.verify_tokenizer().unwrap();
    let e = d.verify_tensor(d.tensor("up").unwrap()).unwrap_err();
    assert!(matches!(&e, Error::Checksum { section, offset } if section == "up" && *offset == at));
    assert!(matches!(d.verify_all(), Err(Error::Checksum { .. })));

    let mut damaged = file.clone();
    damaged[m.tokenizer_offset() as usize] ^= 1;
    let d = Myq::parse(&damaged).unwrap();
    assert!(matches!(d.verify_tokenizer(), Err(Error::Checksum { .. })));
}

#[test]
fn a_tensor_of_another_file_gives_no_bytes() {
    let file = small_myq();
    let m = Myq::parse(&file).unwrap();
    let mut t = m.tensors()[0].clone();
    t.offset = u64::MAX - 2;
    assert!(m.data(&t).is_empty());
    assert!(m.verify_tensor(&t).is_err());
    t.checksum = None;
    assert!(matches!(m.verify_tensor(&t), Err(Error::NoChecksum { .. })));
}
