//! `.myq` files written and read: contents, layout, determinism, nothing left behind.

mod common;

use std::path::Path;

use common::{header, small_myq, tensors};
use myq_blocks::{Layout, dtype::DType};
use myq_format::myq::{MyqWriter, TensorSpec, to_vec};
use myq_format::{Error, Kind, myq::Myq, sniff};

fn specs() -> Vec<TensorSpec> {
    tensors().into_iter().map(|(spec, _)| spec).collect()
}

fn create(path: &Path) -> Result<MyqWriter, Error> {
    MyqWriter::create(path, &header(), b"tokenizer bytes", &specs())
}

fn entries(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap();
    names
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn what_was_written_is_read() {
    let file = small_myq();
    assert_eq!(sniff(&file), Some(Kind::Myq));
    let m = Myq::parse(&file).unwrap();
    m.verify_all().unwrap();
    assert_eq!(m.header(), &header());
    assert_eq!(m.tokenizer(), b"tokenizer bytes");
    assert_eq!(m.tokenizer_offset() % 64, 0);
    for (spec, data) in tensors() {
        let t = m.tensor(&spec.name).unwrap();
        assert_eq!(
            (t.dtype, &t.shape, m.data(t)),
            (spec.dtype, &spec.shape, &data[..])
        );
        assert_eq!(t.checksum, Some(*blake3::hash(&data).as_bytes()));
        assert_eq!(t.offset % 64, 0);
    }
    assert_eq!(m.tensors()[0].offset % 4096, 0);
    let last = m.tensors().last().unwrap();
    assert_eq!(last.offset + last.bytes, file.len() as u64);
}

/// The first bytes are what docs/format.md says.
#[test]
fn the_preamble_is_as_documented() {
    let file = small_myq();
    let word = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    assert_eq!(&file[..8], b"MYQ\x1a\x01\0\0\0");
    assert_eq!(word(8), file.len() as u64);
    let end = 64 + word(16) as usize;
    assert_eq!(word(24), 0);
    let hash = blake3::Hasher::new()
        .update(&file[..32])
        .update(&file[64..end])
        .finalize();
    assert_eq!(&file[32..64], hash.as_bytes());
    assert!(file[64..end].starts_with(br#"{"config":{"arch":"llama","n_layers":1,"rope":"#));
    assert_eq!(
        Myq::parse(&file).unwrap().file_hash(),
        hash.to_hex().to_string()
    );
}

#[test]
fn the_layout_is_the_headers() {
    for (name, layout) in Layout::NAMES {
        let mut h = header();
        h.layout = name.into();
        let file = to_vec(&h, b"", &[]).unwrap();
        let m = Myq::parse(&file).unwrap();
        assert_eq!((m.layout(), m.header()), (layout, &h));
    }
}

#[test]
fn a_file_without_tensors_ends_with_the_tokenizer() {
    for tokenizer in [&b""[..], b"x"] {
        let file = to_vec(&header(), tokenizer, &[]).unwrap();
        let m = Myq::parse(&file).unwrap();
        assert_eq!((m.tensors().len(), m.tokenizer()), (0, tokenizer));
    }
}

#[test]
fn the_stream_in_any_order_equals_the_bytes_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let expected = small_myq();
    for (name, order) in [("a.myq", [0, 1, 2, 3]), ("b.myq", [3, 1, 0, 2])] {
        let path = folder.path().join(name);
        let mut writer = create(&path).unwrap();
        for i in order {
            writer.write_tensor(i, &tensors()[i].1).unwrap();
        }
        assert!(!path.exists(), "the name appears at the end only");
        let hash = writer.finish().unwrap();
        let file = std::fs::read(&path).unwrap();
        assert_eq!(file, expected);
        assert_eq!(Myq::parse(&file).unwrap().file_hash(), hash);
    }
    assert_eq!(entries(folder.path()).len(), 2);
}

#[test]
fn a_file_read_and_written_again_is_the_same() {
    let file = small_myq();
    let m = Myq::parse(&file).unwrap();
    let spec = |t: &myq_format::TensorInfo| TensorSpec {
        name: t.name.clone(),
        dtype: t.dtype,
        shape: t.shape.clone(),
    };
    let tensors: Vec<_> = m.tensors().iter().map(|t| (spec(t), m.data(t))).collect();
    assert_eq!(to_vec(m.header(), m.tokenizer(), &tensors).unwrap(), file);
}

#[test]
fn the_offsets_settle_whatever_the_header_length() {
    // Lengths around the powers of ten where an offset gains a digit and moves itself.
    for n in (0..300).chain(8_400..9_000) {
        let mut h = header();
        h.chat_template = Some("x".repeat(n));
        let spec = TensorSpec {
            name: "w".into(),
            dtype: DType::F32,
            shape: vec![1],
        };
        let file = to_vec(&h, b"", &[(spec, &[0; 4])]).unwrap();
        Myq::parse(&file).unwrap().verify_all().unwrap();
    }
}

#[test]
fn a_writer_dropped_or_failed_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.myq");
    std::fs::write(&path, b"the old file").unwrap();
    let mut writer = create(&path).unwrap();
    writer.write_tensor(0, &tensors()[0].1).unwrap();
    let pid = std::process::id();
    assert!(entries(folder.path()).contains(&format!(".m.myq.tmp-{pid}")));
    assert!(matches!(writer.finish(), Err(Error::NeverWritten { tensor }) if tensor == "norm"));
    drop(create(&path).unwrap());
    assert_eq!(entries(folder.path()), ["m.myq"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"the old file");
}

#[test]
fn two_writers_of_one_name_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.myq");
    let mut writers = [create(&path).unwrap(), create(&path).unwrap()];
    for i in 0..4 {
        for writer in &mut writers {
            writer.write_tensor(i, &tensors()[i].1).unwrap();
        }
    }
    for writer in writers {
        writer.finish().unwrap();
    }
    assert_eq!(entries(folder.path()), ["m.myq"]);
    Myq::parse(&std::fs::read(&path).unwrap())
        .unwrap()
        .verify_all()
        .unwrap();
}

#[test]
fn a_folder_that_does_not_exist_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let e = create(&folder.path().join("none/m.myq")).unwrap_err();
    assert!(e.to_string().contains("none/m.myq"), "{e}");
    assert!(matches!(
        create(Path::new("/")).unwrap_err(),
        Error::Io { .. }
    ));
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.myq");
    let fails = |change: &dyn Fn(&mut myq_format::myq::Header, &mut Vec<TensorSpec>)| {
        let (mut h, mut s) = (header(), specs());
        change(&mut h, &mut s);
        let e = MyqWriter::create(&path, &h, b"", &s).expect_err("must be refused");
        assert!(entries(folder.path()).is_empty());
        e
    };
    assert!(matches!(
        fails(&|h, _| h.config = 1.into()),
        Error::HeaderField { .. }
    ));
    assert!(matches!(
        fails(&|h, _| h.layout = "x".into()),
        Error::UnknownLayout { .. }
    ));
    let calibration = |h: &mut myq_format::myq::Header| h.provenance.calibration = Some("x".into());
    assert!(matches!(
        fails(&|h, _| calibration(h)),
        Error::HeaderField { .. }
    ));
    assert!(matches!(
        fails(&|_, s| s[1].name = "up".into()),
        Error::DuplicateTensor { .. }
    ));
    assert!(matches!(
        fails(&|_, s| s[1].name.clear()),
        Error::EmptyName { index: 1 }
    ));
    assert!(matches!(
        fails(&|_, s| s[0].shape[0] = 33),
        Error::RowLength { .. }
    ));
    assert!(matches!(
        fails(&|_, s| s[0].shape[1] = 1 << 60),
        Error::ShapeOverflow { .. }
    ));
    let long = |h: &mut myq_format::myq::Header| h.chat_template = Some("x".repeat(17 << 20));
    assert!(matches!(
        fails(&|h, _| long(h)),
        Error::HeaderTooLarge { .. }
    ));

    let mut writer = create(&path).unwrap();
    assert!(matches!(
        writer.write_tensor(9, &[]),
        Err(Error::NoSuchTensor { index: 9, count: 4 })
    ));
    assert!(matches!(
        writer.write_tensor(1, &[0; 3]),
        Err(Error::ByteCount { .. })
    ));
    writer.write_tensor(1, &[0; 20]).unwrap();
    assert!(matches!(
        writer.write_tensor(1, &[0; 20]),
        Err(Error::WrittenTwice { .. })
    ));
}
