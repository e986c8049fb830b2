//! Writes the fuzz targets' seeds: `fuzz_seeds CORPUS` fills CORPUS/gguf and CORPUS/myq.

#[path = "../tests/common/mod.rs"]
mod common;

use std::error::Error;
use std::path::Path;

use common::{Rng, mutate, small_gguf, small_myq, walk};
use myq_blocks::dtype::DType;
use myq_format::myq::{TensorSpec, to_vec};

fn main() -> Result<(), Box<dyn Error>> {
    let corpus = std::env::args_os()
        .nth(1)
        .ok_or("usage: fuzz_seeds CORPUS")?;
    let corpus = Path::new(&corpus);
    let header = framed_header()?;
    walk::myq(&walk::frame(&header).ok_or("header of the seed too long")?)?;

    let gguf = [small_gguf(2), small_gguf(3)];
    let myq = [small_myq(), header];
    for (name, files) in [("gguf", gguf), ("myq", myq)] {
        let folder = corpus.join(name);
        std::fs::create_dir_all(&folder)?;
        let mut rng = Rng(5);
        for (i, file) in files.iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{i}")), file)?;
            for j in 0..50 {
                std::fs::write(folder.join(format!("seed-{i}-{j}")), mutate(&mut rng, file))?;
            }
        }
    }
    Ok(())
}

/// The header of a file that [`walk::frame`] can put around it.
fn framed_header() -> Result<Vec<u8>, Box<dyn Error>> {
    let spec = |name: &str, dtype, shape: &[u64], bytes| {
        let shape = shape.to_vec();
        (
            TensorSpec {
                name: name.into(),
                dtype,
                shape,
            },
            vec![0u8; bytes],
        )
    };
    // From 8192 on to exactly the end of the frame, the padding counted.
    let tensors = [
        spec("a", DType::F32, &[960], 3840),
        spec("b", DType::Q8_0, &[64, 4], 272),
        spec("c", DType::F32, &[1008], 4032),
    ];
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(s, d)| (s.clone(), d.as_slice()))
        .collect();
    // The template grows until the header reaches into the last 64 bytes before its end, from
    // where on all offsets are those of the frame.
    let mut header = common::header();
    loop {
        let file = to_vec(&header, &[0; 10], &tensors)?;
        let end = 64 + u64::from_le_bytes(file[16..24].try_into()?) as usize;
        if end > walk::FRAME_HEADER_END - 64 {
            let mut json: serde_json::Value = serde_json::from_slice(&file[64..end])?;
            json["chat_template"] = "{{ messages }}".into();
            return Ok(serde_json::to_vec(&json)?);
        }
        header
            .chat_template
            .get_or_insert_default()
            .push_str("padding ");
    }
}
