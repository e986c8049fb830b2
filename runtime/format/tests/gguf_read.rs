//! GGUF read and written: values, tensors, versions, alignment, round trip.

mod common;

use common::{array, assemble, entry, row, small_gguf};
use myq_blocks::dtype::DType;
use myq_format::gguf::{Builder, Gguf, Value, ValueType};
use myq_format::{Error, Kind, sniff};

#[test]
fn both_versions_read_alike() {
    for version in [2, 3] {
        let file = small_gguf(version);
        let g = Gguf::parse(&file).unwrap();
        assert_eq!(g.version(), version);
        assert_eq!(g.str("general.architecture"), Some("llama"));
        assert_eq!(g.u32("llama.block_count"), Some(1));
        assert_eq!(g.u64("t.u64"), Some(1 << 40));
        assert_eq!(g.u32("t.u64"), None, "does not fit");
        assert_eq!(g.u32("t.i64"), None, "negative");
        assert_eq!((g.u32("t.u8"), g.u32("t.u16")), (Some(200), Some(60_000)));
        assert_eq!(g.f32("llama.rope.freq_base"), Some(1e4));
        assert_eq!(g.f32("t.f64"), Some(0.1));
        assert_eq!(g.bool("tokenizer.ggml.add_bos_token"), Some(true));
        assert_eq!(g.get("t.i16"), Some(&Value::I16(-3)));
        assert_eq!(g.str("absent"), None);
        assert_eq!(g.keys().len(), 15);
        assert_eq!(g.keys().next().unwrap().0, "general.architecture");
        let t = g.tensor("blk.0.ffn_up_exps.weight").unwrap();
        assert_eq!(
            (t.cols(), t.rows(), t.elements(), t.bytes),
            (32, 4, 128, 80)
        );
        assert_eq!(
            (t.row_bytes(), t.dtype, t.checksum),
            (20, DType::Q4_1, None)
        );
        assert_eq!(g.data(t).len(), 80);
        assert_eq!(sniff(&file), Some(Kind::Gguf));
    }
}

#[test]
fn arrays_are_walked_without_being_stored() {
    let file = small_gguf(3);
    let g = Gguf::parse(&file).unwrap();
    let tokens = g.array("tokenizer.ggml.tokens").unwrap();
    let strings: Vec<_> = tokens.strings().unwrap().collect();
    assert_eq!(strings[2].to_str().unwrap(), "\u{120}h\u{e9}");
    assert!(matches!(
        strings[3].to_str(),
        Err(Error::StringNotUtf8 { at: 0, .. })
    ));
    assert_eq!(
        (tokens.len(), tokens.element_type()),
        (4, ValueType::String)
    );
    assert!(tokens.f32s().is_none() && tokens.integers().is_none());
    let scores = g.array("tokenizer.ggml.scores").unwrap();
    assert_eq!(scores.f32s().unwrap().collect::<Vec<_>>(), [0.0, -1.5]);
    assert!(scores.strings().is_none() && !scores.is_empty());
    let types = g.array("tokenizer.ggml.token_type").unwrap();
    assert_eq!(types.i32s().unwrap().collect::<Vec<_>>(), [3, 1, 1, 6]);
    assert_eq!(types.integers().unwrap().collect::<Vec<_>>(), [3, 1, 1, 6]);
}

#[test]
fn nested_arrays_are_walked() {
    let inner = [array(7, 2, &[1, 0]), array(4, 1, &9u32.to_le_bytes())].concat();
    let file = assemble(&[entry(b"k", 9, &array(9, 2, &inner))], &[], 0);
    let g = Gguf::parse(&file).unwrap();
    let inner: Vec<_> = g.array("k").unwrap().values().collect();
    let [Value::Array(bools), Value::Array(words)] = inner[..] else {
        panic!("{inner:?}");
    };
    assert_eq!(bools.bools().unwrap().collect::<Vec<_>>(), [true, false]);
    assert_eq!(words.u32s().unwrap().collect::<Vec<_>>(), [9]);
}

#[test]
fn the_alignment_of_the_file_is_honoured() {
    let mut b = Builder::new();
    b.u32("general.alignment", 256).unwrap();
    b.tensor("a", DType::F32, &[3])
        .unwrap()
        .tensor("b", DType::F32, &[1])
        .unwrap();
    let file = b.to_vec(&[&[1; 12], &[2; 4]]).unwrap();
    let g = Gguf::parse(&file).unwrap();
    assert_eq!(
        (g.alignment(), g.tensors()[0].offset, g.tensors()[1].offset),
        (256, 256, 512)
    );
    assert_eq!(g.data(&g.tensors()[1]), [2; 4]);
}

#[test]
fn a_file_without_tensors_needs_no_padding() {
    let file = assemble(&[entry(b"k", 0, &[1])], &[], 0);
    // 24 bytes of preamble, 8 + 1 + 4 + 1 of entry.
    assert_eq!(Gguf::parse(&file[..38]).unwrap().tensors().len(), 0);
}

#[test]
fn a_row_of_the_table_is_what_the_specification_says() {
    let file = assemble(&[], &[row(b"w", &[256, 2], 12, 0)], 288);
    let g = Gguf::parse(&file).unwrap();
    assert_eq!(
        (g.tensors()[0].dtype, g.tensors()[0].bytes),
        (DType::Q4K, 288)
    );
}

/// Row A1: what is read and written again is the same to the byte, metadata included.
#[test]
fn read_written_and_read_again_is_byte_identical() {
    let file = small_gguf(3);
    let g = Gguf::parse(&file).unwrap();
    let mut b = Builder::new();
    for (key, value) in g.keys() {
        b.value(key, value).unwrap();
    }
    for t in g.tensors() {
        b.tensor(&t.name, t.dtype, &t.shape).unwrap();
    }
    let contents: Vec<&[u8]> = g.tensors().iter().map(|t| g.data(t)).collect();
    let again = b.to_vec(&contents).unwrap();
    assert_eq!(again, file);
    let h = Gguf::parse(&again).unwrap();
    for (old, new) in g.tensors().iter().zip(h.tensors()) {
        assert_eq!((old, g.data(old)), (new, h.data(new)));
    }
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let mut b = Builder::new();
    b.tensor("a", DType::Q4K, &[256, 2]).unwrap();
    assert!(matches!(
        b.tensor("a", DType::F32, &[1]),
        Err(Error::DuplicateTensor { .. })
    ));
    assert!(matches!(
        b.tensor("", DType::F32, &[1]),
        Err(Error::EmptyName { .. })
    ));
    assert!(matches!(
        b.tensor("b", DType::Q4K, &[288]),
        Err(Error::RowLength { .. })
    ));
    assert!(matches!(
        b.tensor("b", DType::F32, &[]),
        Err(Error::Dimensions { .. })
    ));
    let linear = DType::from_name("L3G64Z").unwrap();
    assert!(matches!(
        b.tensor("b", linear, &[64]),
        Err(Error::NotInGguf { .. })
    ));
    b.u32("k", 1).unwrap();
    assert!(matches!(b.u32("k", 1), Err(Error::DuplicateKey { .. })));
    let long = "k".repeat(70_000);
    assert!(matches!(b.u32(&long, 1), Err(Error::NameTooLong { .. })));
    assert!(matches!(
        b.u32("general.alignment", 24),
        Err(Error::Alignment { .. })
    ));
    assert!(matches!(
        b.clone().to_vec(&[]),
        Err(Error::NeverWritten { .. })
    ));
    assert!(matches!(
        b.clone().to_vec(&[&[0; 5]]),
        Err(Error::ByteCount { .. })
    ));
    let data = [0u8; 288];
    assert!(matches!(
        b.to_vec(&[&data, &data]),
        Err(Error::NoSuchTensor { .. })
    ));
}

#[test]
fn a_vocabulary_costs_no_memory_per_token() {
    let mut b = Builder::new();
    b.strings("tokens", (0..150_000).map(|i| format!("token{i}")))
        .unwrap();
    let file = b.to_vec(&[]).unwrap();
    let g = Gguf::parse(&file).unwrap();
    let tokens = g.array("tokens").unwrap();
    assert_eq!(tokens.len(), 150_000);
    let last = tokens.strings().unwrap().last().unwrap();
    assert_eq!(last.to_str().unwrap(), "token149999");
    // A view: the array's bytes are the file's.
    assert!(file.as_ptr_range().contains(&tokens.bytes().as_ptr()));
}
