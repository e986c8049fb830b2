//! The layouts of a file: there and back, the same weights in both, and what says so.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use myq_blocks::encode::Method;
use myq_blocks::{DType, Layout, panels};
use myq_format::myq::{Myq, TensorSpec, to_vec};
use myq_tools::model::Model;
use myq_tools::recipe::Recipe;
use myq_tools::{import, quantize, relayout, verify};

/// The small model of the repository: rows of 128 and 384 weights, no whole superblocks.
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/draft")
}

fn quantised(model: &Model, bits: u8, layout: Layout, path: &Path) {
    let recipe = Recipe::uniform(bits, Method::Round).expect("a width class");
    let plan = recipe.plan(model, true).expect("a plan");
    quantize::quantize(
        model,
        &recipe,
        &plan,
        layout,
        &quantize::Calibrated::none(),
        path,
    )
    .expect("it quantises");
}

fn myq(args: &[&str], dir: &Path) -> assert_cmd::assert::Assert {
    let mut command = Command::new(env!("CARGO_BIN_EXE_myq"));
    command.args(args).current_dir(dir).assert()
}

fn relaid(from: &Path, layout: Layout, to: &Path) -> Vec<u8> {
    let model = Model::open(from).expect("it opens");
    relayout::relayout(&model, layout, to).expect("it is written");
    std::fs::read(to).expect("a file")
}

/// A `.myq` file of the fixture whose embedding has three rows more than panels can take.
fn odd_rows(path: &Path) {
    let folder = tempfile::tempdir().expect("a folder");
    let whole = folder.path().join("whole.myq");
    let model = Model::open(&fixture()).expect("the fixture opens");
    import::import(&model, Layout::Plain, &whole).expect("it imports");
    let bytes = std::fs::read(&whole).expect("a file");
    let m = Myq::parse(&bytes).expect("a model");
    let mut header = m.header().clone();
    let vocab = header.config["vocab"].as_u64().expect("a number");
    header.config["vocab"] = (vocab + 3).into();
    let mut tensors = Vec::new();
    for t in m.tensors() {
        let (mut shape, mut data) = (t.shape.clone(), m.data(t).to_vec());
        if t.name == "token_embd.weight" {
            shape[1] += 3;
            data.extend_from_within(..3 * t.row_bytes() as usize);
        }
        let spec = TensorSpec {
            name: t.name.clone(),
            dtype: t.dtype,
            shape,
        };
        tensors.push((spec, data));
    }
    let tensors: Vec<_> = tensors.iter().map(|(s, d)| (s.clone(), &d[..])).collect();
    let file = to_vec(&header, m.tokenizer(), &tensors).expect("it fits");
    std::fs::write(path, file).expect("it writes");
}

#[test]
fn both_layouts_hold_the_same_weights_and_become_each_other() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    odd_rows(&at("odd.myq"));
    for source in [fixture(), at("odd.myq")] {
        let source = Model::open(&source).expect("it opens");
        for bits in [2, 3, 4, 5, 6] {
            let (plain, rows8) = (at("plain.myq"), at("rows8.myq"));
            quantised(&source, bits, Layout::Plain, &plain);
            quantised(&source, bits, Layout::Rows8, &rows8);
            let bytes = [&plain, &rows8].map(|p| std::fs::read(p).expect("a file"));
            assert_eq!(bytes[0].len(), bytes[1].len());
            assert!(bytes[0] != bytes[1]);
            assert!(relaid(&plain, Layout::Rows8, &at("a")) == bytes[1]);
            assert!(relaid(&rows8, Layout::Plain, &at("b")) == bytes[0]);
            assert!(relaid(&rows8, Layout::Rows8, &at("c")) == bytes[1]);
            let models = [&plain, &rows8].map(|p| Model::open(p).expect("it opens"));
            assert_eq!(verify::digests(&models[0]), verify::digests(&models[1]));
            let [a, b] = models.map(|m| verify::verify(&m, Some(&source)).expect("sound"));
            assert!(a.panels == 0 && b.panels > 100);
            assert_eq!(a.partial_blocks, b.partial_blocks);
            for (a, b) in a.distances.iter().zip(&b.distances) {
                assert_eq!((&a.name, a.relative_rms), (&b.name, b.relative_rms));
            }
        }
    }
}

#[test]
fn quantising_again_copies_from_either_layout() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    odd_rows(&at("odd.myq"));
    let source = Model::open(&at("odd.myq")).expect("it opens");
    quantised(&source, 4, Layout::Rows8, &at("4"));
    let four = Model::open(&at("4")).expect("it opens");
    quantised(&four, 4, Layout::Plain, &at("again"));
    let again = Model::open(&at("again")).expect("it opens");
    assert_eq!(verify::digests(&four), verify::digests(&again));
    import::import(&four, Layout::Plain, &at("imported")).expect("it imports");
    let imported = Model::open(&at("imported")).expect("it opens");
    assert_eq!(verify::digests(&four), verify::digests(&imported));
}

/// Scale `j` of a plain Q3_K row of 288 weights: of its whole block, or of the tail of 32.
fn plain_scale(row: &[u8], whole: bool, j: usize) -> u8 {
    if whole {
        let s = &row[96..108];
        (s[j % 8] >> (4 * (j / 8)) & 15) | (s[8 + j % 4] >> (2 * (j / 4)) & 3) << 4
    } else {
        // A stream of 6-bit fields behind 12 bytes of codes.
        let s = u16::from_le_bytes([row[122], row[123]]);
        (s >> (6 * j) & 63) as u8
    }
}

/// Code `n` of the same parts.
fn plain_code(row: &[u8], whole: bool, n: usize) -> u8 {
    if whole {
        let low = row[32 + 32 * (n / 128) + n % 32] >> (2 * (n % 128 / 32)) & 3;
        low | (row[n % 32] >> (n / 32) & 1) << 2
    } else {
        let low = row[114 + n % 8] >> (2 * (n / 8)) & 3;
        low | (row[110 + n / 8] >> (n % 8) & 1) << 2
    }
}

/// The formulas of docs/format.md, written out for three bits and a last chunk of one group.
#[test]
fn the_bytes_are_as_documented() {
    let (cols, chunk) = (288, 8 * 110);
    let bytes = DType::Q3K.row_bytes(cols).expect("a row");
    // Any bytes are codes and scales.
    let rows: Vec<u8> = (0..8 * bytes).map(|i| (i * 131 % 251) as u8).collect();
    let mut panel = vec![0; 8 * bytes];
    panels::pack(DType::Q3K, cols, &rows, &mut panel);
    for (part, d, groups) in [(0, 108, 8), (chunk, 124, 1usize)] {
        let (c, whole) = (&panel[part..], part == 0);
        let (half, high) = (8 * groups, 8 * groups.div_ceil(2));
        let (sixes, planes) = c[16..].split_at(half + high);
        for (r, row) in rows.chunks_exact(bytes).enumerate() {
            assert_eq!(c[2 * r..2 * r + 2], row[d..d + 2], "d of row {r}");
            for j in 0..2 * groups {
                let i = 16 * (j / 2) + 2 * r + j % 2;
                let low = sixes[i % half] >> if i < half { 0 } else { 4 } & 15;
                let scale = low | (sixes[half + i % high] >> (2 * (i / high)) & 3) << 4;
                assert_eq!(scale, plain_scale(row, whole, j), "scale {j} of row {r}");
            }
            for n in 0..32 * groups {
                let (group, t, j) = (&planes[96 * (n / 32)..], n % 32 / 4, n % 4);
                let low = group[32 * (t / 4) + 4 * r + j] >> (2 * (t % 4)) & 3;
                let code = low | (group[64 + 4 * r + j] >> t & 1) << 2;
                assert_eq!(code, plain_code(row, whole, n), "weight {n} of row {r}");
            }
        }
    }
}

#[test]
fn the_command_says_what_is_where_and_spares_its_source() {
    let dir = tempfile::tempdir().expect("a folder");
    let fixture = fixture();
    let source = fixture.to_str().expect("a path");
    let told = |args: &[&str]| {
        let outcome = myq(args, dir.path()).success();
        String::from_utf8_lossy(&outcome.get_output().stdout).into_owned()
    };
    told(&["quantize", source, "--bits", "3", "--out", "m.myq"]);
    let text = told(&["relayout", "m.myq", "--layout", "plain"]);
    assert!(
        text.contains("m-plain.myq") && text.contains("one row after"),
        "{text}"
    );
    let text = told(&["relayout", "m-plain.myq"]);
    let panels = "15 matrices in panels of eight rows; plain: 5 vectors";
    assert!(
        text.contains("m-plain-rows8.myq") && text.contains(panels),
        "{text}"
    );
    let read = |name: &str| std::fs::read(dir.path().join(name)).expect("a file");
    assert!(read("m.myq") == read("m-plain-rows8.myq"));
    assert!(read("m.myq") != read("m-plain.myq"));
    // Another kind of source is imported on the way; its 16-bit rows have no panels.
    let text = told(&["relayout", source, "--layout", "auto", "--out", "hub.myq"]);
    assert!(text.contains("hub.myq"), "{text}");

    let text = told(&["inspect", "m.myq", "--tensors"]);
    let layout = text.lines().find(|l| l.trim().starts_with("layout"));
    assert!(layout.is_some_and(|l| l.contains(panels)), "{text}");
    let line = |name: &str| text.lines().find(|l| l.trim().starts_with(name));
    assert!(line("blk.0.attn_q.weight").is_some_and(|l| l.contains("rows8")));
    assert!(line("blk.0.attn_norm.weight").is_some_and(|l| l.contains("plain")));
    let json: serde_json::Value =
        serde_json::from_str(&told(&["inspect", "m.myq", "--json"])).expect("JSON");
    assert_eq!(json["layout"], "rows8");
    let tensors = json["tensors"].as_array().expect("a list");
    let rows8 = tensors.iter().filter(|t| t["layout"] == "rows8").count();
    assert_eq!((rows8, tensors.len()), (15, 20));

    myq(&["relayout", "m.myq", "--out", "m.myq"], dir.path()).code(2);
    myq(&["relayout", "m.myq", "--layout", "rows5"], dir.path()).code(2);
    assert!(read("m.myq") == read("m-plain-rows8.myq"));
}

#[test]
fn damage_in_the_source_is_not_passed_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = Model::open(&fixture()).expect("the fixture opens");
    let path = dir.path().join("m.myq");
    quantised(&model, 4, Layout::Rows8, &path);
    let mut bytes = std::fs::read(&path).expect("a file");
    let (name, middle) = {
        let m = Myq::parse(&bytes).expect("a model");
        let t = &m.tensors()[3];
        (t.name.clone(), (t.offset + t.bytes / 2) as usize)
    };
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).expect("it writes");
    for args in [
        &["relayout", "m.myq", "--layout", "plain", "--out", "o.myq"][..],
        &["import", "m.myq", "--out", "o.myq"],
        &["quantize", "m.myq", "--bits", "2", "--out", "o.myq"],
        &["verify", "m.myq"],
    ] {
        let outcome = myq(args, dir.path()).code(2);
        let text = String::from_utf8_lossy(&outcome.get_output().stderr).into_owned();
        assert!(text.contains(&name) && text.contains("m.myq"), "{text}");
        assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 1);
    }
}
