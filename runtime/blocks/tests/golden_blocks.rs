//! Dequantised blocks equal the `gguf` Python package's values to the bit.

use myq_blocks::decode::{decode, dequantize_row};
use myq_blocks::dtype::{DType, TABLE};
use myq_blocks::encode::store_block;
use serde_json::Value;

struct Golden {
    dtype: DType,
    label: String,
    bytes: Vec<u8>,
    weights: Vec<u32>,
}

fn hex(v: &Value) -> Vec<u8> {
    let s = v
        .as_str()
        .expect("a string of hexadecimal digits")
        .as_bytes();
    s.chunks(2)
        .map(|d| u8::from_str_radix(str::from_utf8(d).unwrap(), 16).unwrap())
        .collect()
}

fn golden() -> Vec<Golden> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/data/golden/blocks.json"
    );
    let text = std::fs::read_to_string(path).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let mut all = Vec::new();
    for t in json["types"].as_array().unwrap() {
        let dtype = DType::from_gguf_id(t["id"].as_u64().unwrap() as u32).unwrap();
        let facts = dtype.facts().unwrap();
        assert_eq!(t["name"], facts.name);
        assert_eq!(
            (t["block_weights"].as_u64(), t["block_bytes"].as_u64()),
            (Some(facts.block as u64), Some(facts.bytes as u64))
        );
        for b in t["blocks"].as_array().unwrap() {
            let weights = hex(&b["f32"])
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| u32::from_le_bytes(*b))
                .collect();
            all.push(Golden {
                dtype,
                label: b["label"].to_string(),
                bytes: hex(&b["bytes"]),
                weights,
            });
        }
    }
    all
}

#[test]
fn every_type_dequantises_to_the_bit() {
    let golden = golden();
    for g in &golden {
        let mut y = vec![0.0; g.weights.len()];
        assert_eq!(g.dtype.row_bytes(y.len()), Some(g.bytes.len()));
        dequantize_row(g.dtype, &g.bytes, &mut y);
        for (i, (y, want)) in y.iter().zip(&g.weights).enumerate() {
            let want = f32::from_bits(*want);
            assert!(
                y.to_bits() == want.to_bits(),
                "{:?} {} weight {i}: {y} for {want}",
                g.dtype,
                g.label
            );
        }
    }
    // F32 is the one type that needs no golden blocks.
    for f in TABLE.iter().filter(|f| f.dtype != DType::F32) {
        let count = golden.iter().filter(|g| g.dtype == f.dtype).count();
        assert!(
            count >= if f.block == 1 { 2 } else { 8 },
            "{}: only {count} golden blocks",
            f.name
        );
    }
}

#[test]
fn decoded_blocks_store_back_to_the_same_bytes() {
    let mut stored = 0;
    for g in golden().iter().filter(|g| g.dtype.block_len() > 1) {
        let mut again = vec![0; g.bytes.len()];
        store_block(g.dtype, &decode(g.dtype, &g.bytes), &mut again);
        if g.dtype == DType::Tq1_0 {
            // 243 of 256 bytes are numbers of five digits; others read as one of those.
            let mut y = vec![0.0; 256];
            dequantize_row(g.dtype, &again, &mut y);
            let bits: Vec<u32> = y.iter().map(|y| y.to_bits()).collect();
            assert_eq!(bits, g.weights, "{:?} {}", g.dtype, g.label);
        } else {
            assert_eq!(again, g.bytes, "{:?} {}", g.dtype, g.label);
        }
        stored += 1;
    }
    assert!(stored >= 13 * 8);
}
