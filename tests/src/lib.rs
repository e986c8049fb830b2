//! What several workspace-level tests need: the fixtures, and models made from them.

use std::path::{Path, PathBuf};

use myq_blocks::Layout;
use myq_blocks::encode::Method;
use myq_tools::{import, model::Model, quantize, recipe::Recipe};

/// A file or folder under `tests/data`.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name)
}

/// Imports the fixture `name` (`target` or `draft`) into `dir`.
pub fn imported(name: &str, dir: &Path) -> PathBuf {
    let path = dir.join(format!("{name}.myq"));
    let model = Model::open(&data(name)).expect("the fixture opens");
    import::import(&model, Layout::Plain, &path).expect("it imports");
    path
}

/// Quantises the fixture `name` to `bits` into `dir`, in the layout that `myq quantize` writes.
pub fn quantised(name: &str, bits: u8, method: Method, dir: &Path) -> PathBuf {
    let path = dir.join(format!("{name}-{bits}.myq"));
    quantised_in(Layout::Rows8, name, bits, method, &path);
    path
}

/// Quantises the fixture `name` to `bits` into the file `path`, in this layout.
pub fn quantised_in(layout: Layout, name: &str, bits: u8, method: Method, path: &Path) {
    let model = Model::open(&data(name)).expect("the fixture opens");
    let recipe = Recipe::uniform(bits, method).expect("a width class");
    let plan = recipe.plan(&model, true).expect("a plan");
    quantize::quantize(
        &model,
        &recipe,
        &plan,
        layout,
        &quantize::Calibrated::none(),
        path,
    )
    .expect("it quantises");
}

/// The repository's own documents as a calibration set in `dir`, some paragraphs a record.
pub fn calibration(dir: &Path) -> PathBuf {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let mut records = String::new();
    for name in ["format.md", "guide.md", "topology.md", "benchmarks.md"] {
        let text = std::fs::read_to_string(docs.join(name)).expect("a document");
        let parts: Vec<&str> = text.split("\n\n").collect();
        for part in parts.chunks(8) {
            let record = serde_json::json!({ "text": part.join("\n\n") });
            records.push_str(&format!("{record}\n"));
        }
    }
    let file = dir.join("calibration.jsonl");
    std::fs::write(&file, records).expect("space");
    file
}

/// The program `name` of this workspace, built beside the running test.
///
/// # Panics
/// If it is not built: `cargo test --workspace` builds it, `cargo test -p myq-tests` alone
/// does not.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a path");
    let folder = test
        .parent()
        .and_then(Path::parent)
        .expect("target/PROFILE/deps/TEST");
    let path = folder.join(name);
    assert!(
        path.exists(),
        "{} is not built; run `cargo test --workspace`",
        path.display()
    );
    path
}

/// A random number generator that needs no crate: xorshift64.
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
}
