//! Small valid files, the pieces of broken ones, and damage by chance.
#![allow(
    dead_code,
    reason = "each test, and the seed generator, uses a part of this"
)]

pub(crate) mod walk;

use myq_blocks::dtype::DType;
use myq_format::gguf::{Builder, Value};
use myq_format::myq::{Header, Provenance, Source, TensorSpec};

pub(crate) use walk::reseal;

/// SplitMix64 (Steele, Lea, Flood 2014): tests must not depend on a crate's generator.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not zero.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// Numbers that break unchecked arithmetic.
const EXTREMES: [u64; 12] = [
    0,
    1,
    7,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    1 << 60,
    u64::MAX >> 1,
    u64::MAX - 31,
    u64::MAX,
];

/// One to three random changes: bits, bytes, words, cuts, duplicated and moved ranges.
pub(crate) fn mutate(rng: &mut Rng, file: &[u8]) -> Vec<u8> {
    let mut bytes = file.to_vec();
    for _ in 0..=rng.below(3) {
        if bytes.is_empty() {
            break;
        }
        let at = rng.below(bytes.len());
        let len = rng.below(64).min(bytes.len() - at);
        match rng.below(7) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes[at] = rng.next() as u8,
            2 => splat(
                &mut bytes,
                at,
                &EXTREMES[rng.below(EXTREMES.len())].to_le_bytes(),
            ),
            3 => splat(
                &mut bytes,
                at,
                &(EXTREMES[rng.below(12)] as u32).to_le_bytes(),
            ),
            4 => bytes.truncate(at),
            5 => {
                let copy = bytes[at..at + len].to_vec();
                bytes.splice(at..at, copy);
            }
            _ => {
                bytes.drain(at..at + len);
            }
        }
    }
    bytes
}

fn splat(bytes: &mut [u8], at: usize, value: &[u8]) {
    for (to, from) in bytes[at..].iter_mut().zip(value) {
        *to = *from;
    }
}

/// A GGUF file with every kind of value and several types of tensor; the version is 2 or 3.
pub(crate) fn small_gguf(version: u32) -> Vec<u8> {
    let mut b = Builder::new();
    fill_metadata(&mut b).unwrap();
    let mut rng = Rng(7);
    let mut contents = Vec::new();
    for (name, dtype, shape) in [
        ("token_embd.weight", DType::Q4K, vec![256, 3]),
        ("blk.0.attn_norm.weight", DType::F32, vec![5]),
        ("blk.0.attn_q.weight", DType::Q8_0, vec![64, 2]),
        ("blk.0.ffn_up_exps.weight", DType::Q4_1, vec![32, 2, 2]),
        ("output.weight", DType::Q2K, vec![512, 1]),
    ] {
        b.tensor(name, dtype, &shape).unwrap();
        let rows: u64 = shape[1..].iter().product();
        contents.push(rng.bytes(dtype.row_bytes(shape[0] as usize).unwrap() * rows as usize));
    }
    let contents: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
    let mut file = b.to_vec(&contents).unwrap();
    file[4..8].copy_from_slice(&version.to_le_bytes());
    file
}

fn fill_metadata(b: &mut Builder) -> Result<(), myq_format::Error> {
    b.str("general.architecture", "llama")?;
    b.value("t.u8", &Value::U8(200))?
        .value("t.i8", &Value::I8(-3))?;
    b.value("t.u16", &Value::U16(60_000))?
        .value("t.i16", &Value::I16(-3))?;
    b.u32("llama.block_count", 1)?
        .value("t.i32", &Value::I32(-9))?;
    b.f32("llama.rope.freq_base", 1e4)?
        .value("t.f64", &Value::F64(0.1))?;
    b.value("t.u64", &Value::U64(1 << 40))?
        .value("t.i64", &Value::I64(-1))?;
    b.bool("tokenizer.ggml.add_bos_token", true)?;
    b.strings(
        "tokenizer.ggml.tokens",
        [&b"<s>"[..], b"", "\u{120}h\u{e9}".as_bytes(), b"\xff"],
    )?;
    b.f32s("tokenizer.ggml.scores", [0.0, -1.5])?;
    b.i32s("tokenizer.ggml.token_type", [3, 1, 1, 6])?;
    Ok(())
}

/// A metadata entry from its raw parts.
pub(crate) fn entry(key: &[u8], value_type: u32, payload: &[u8]) -> Vec<u8> {
    [&text(key), &value_type.to_le_bytes()[..], payload].concat()
}

/// Length and bytes of a string.
pub(crate) fn text(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

/// Element type and count of an array, then the elements.
pub(crate) fn array(element: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

/// A row of the tensor table from its raw parts.
pub(crate) fn row(name: &[u8], shape: &[u64], type_id: u32, offset: u64) -> Vec<u8> {
    let mut out = text(name);
    out.extend((shape.len() as u32).to_le_bytes());
    out.extend(shape.iter().flat_map(|d| d.to_le_bytes()));
    out.extend(type_id.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

/// A GGUF file from raw entries and rows, aligned to 32, with `data` bytes of data.
pub(crate) fn assemble(entries: &[Vec<u8>], rows: &[Vec<u8>], data: usize) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((rows.len() as u64).to_le_bytes());
    out.extend((entries.len() as u64).to_le_bytes());
    out.extend(entries.concat());
    out.extend(rows.concat());
    out.resize(out.len().next_multiple_of(32) + data, 0);
    out
}

/// A header for tests; the template is long so that edits have room.
pub(crate) fn header() -> Header {
    Header {
        config: serde_json::json!({"n_layers": 1, "arch": "llama", "rope": {"base": 10000.1}}),
        chat_template: Some("{{ messages }} ".repeat(40)),
        recipe: serde_json::json!({"name": "small", "types": ["Q2_K", "Q8_0"]}),
        provenance: Provenance {
            tool: "myq 0.1.0".into(),
            recipe: "small".into(),
            sources: vec![Source {
                name: "model.gguf".into(),
                blake3: "ab".repeat(32),
            }],
            calibration: None,
        },
        layout: "plain".into(),
        tokenizer_kind: "test".into(),
    }
}

/// The tensors of the small `.myq` file and their contents.
pub(crate) fn tensors() -> Vec<(TensorSpec, Vec<u8>)> {
    let mut rng = Rng(11);
    let linear = DType::from_name("L3G64Z").expect("a linear format");
    [
        ("embed", DType::Q8_0, vec![64, 3]),
        ("norm", DType::F32, vec![5]),
        ("up", DType::Q2K, vec![288, 2]),
        ("down", linear, vec![128, 2]),
    ]
    .into_iter()
    .map(|(name, dtype, shape)| {
        let rows: u64 = shape[1..].iter().product();
        let bytes = dtype.row_bytes(shape[0] as usize).unwrap() * rows as usize;
        (
            TensorSpec {
                name: name.into(),
                dtype,
                shape,
            },
            rng.bytes(bytes),
        )
    })
    .collect()
}

/// A `.myq` file with several types of tensor, a partial superblock among them.
pub(crate) fn small_myq() -> Vec<u8> {
    let tensors = tensors();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(s, d)| (s.clone(), d.as_slice()))
        .collect();
    myq_format::myq::to_vec(&header(), b"tokenizer bytes", &tensors).unwrap()
}

/// The file with its header replaced by `json`, padded with blanks to the old length.
pub(crate) fn with_json(file: &[u8], json: &[u8]) -> Vec<u8> {
    let mut file = file.to_vec();
    let len = u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    assert!(json.len() <= len, "the new header is longer");
    file[64..64 + len].fill(b' ');
    file[64..64 + json.len()].copy_from_slice(json);
    reseal(&mut file);
    file
}

/// The file with its header edited; the template goes, to make room.
pub(crate) fn edit(file: &[u8], change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let len = u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    let mut json: serde_json::Value = serde_json::from_slice(&file[64..64 + len]).unwrap();
    json["chat_template"] = serde_json::Value::Null;
    change(&mut json);
    with_json(file, &serde_json::to_vec(&json).unwrap())
}
