//! Some panels times some columns, once: what `mca/cycles` traces. Types without panels, as F16,
//! are rows.
//!
//! usage: once LEVEL FORMAT COLS COLUMNS PANELS

use kernels_neon::{Level, Neon};
use myq_blocks::conformance::{Columns, Random};
use myq_blocks::panels::PANEL;
use myq_blocks::{DType, Kernels, Layout, Rows};

fn run(arguments: &[String]) -> Result<(), String> {
    let [level, format, cols, columns, panels] = arguments else {
        return Err("usage: once LEVEL FORMAT COLS COLUMNS PANELS".to_owned());
    };
    let number = |s: &String| s.parse::<usize>().map_err(|e| format!("{s}: {e}"));
    let (cols, count, panels) = (number(cols)?, number(columns)?, number(panels)?);
    let rows = PANEL * panels;
    let level = Level::ALL.into_iter().find(|l| l.name() == level);
    let level = level.ok_or("no such level: neon, neon-dotprod or neon-i8mm")?;
    let neon = Neon::with(level).ok_or("this processor lacks the level")?;
    let dtype = DType::from_name(format).ok_or("no such format")?;
    let bytes = dtype.row_bytes(cols).ok_or("no such row length")?;
    let data = vec![0; rows * bytes];
    let w = Rows::in_layout(Layout::Rows8.of(dtype, cols), dtype, cols, &data)
        .map_err(|e| e.to_string())?;
    let mut random = Random::new(1);
    let vectors = (0..count).map(|_| random.vector(cols, 1.0)).collect();
    let columns = Columns::quantize(neon, vectors);
    let mut out = vec![vec![0.0; rows]; count];
    let mut out: Vec<&mut [f32]> = out.iter_mut().map(|o| o.as_mut_slice()).collect();
    neon.matmul(w, &columns.all(), &mut out);
    std::hint::black_box(out);
    Ok(())
}

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("once: {e}");
            std::process::ExitCode::FAILURE
        }
    }
}
