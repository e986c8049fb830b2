//! A plot of quality against size, as SVG.

use std::path::Path;

use plotters::prelude::*;

use crate::ToolError;

/// A point: a file, its size in megabytes, and its figure.
#[derive(Clone, Debug)]
pub struct Point {
    /// Beside the point.
    pub label: String,
    /// Megabytes.
    pub size: f64,
    /// Divergence or perplexity.
    pub figure: f64,
}

/// Draws `points` into `out`; a divergence on a logarithmic axis.
///
/// # Errors
/// No points; a file that cannot be written.
pub fn plot(points: &[Point], title: &str, what: &str, out: &Path) -> Result<(), ToolError> {
    let mut text = String::new();
    draw(points, title, what, &mut text)
        .map_err(|e| ToolError::Setting(format!("the plot cannot be drawn: {e}")))?;
    crate::write_whole(out, text.as_bytes())
}

fn draw(
    points: &[Point],
    title: &str,
    what: &str,
    to: &mut String,
) -> Result<(), Box<dyn std::error::Error>> {
    let drawn: Vec<&Point> = points.iter().filter(|p| p.figure > 0.0).collect();
    let (Some(least), Some(most)) = (
        drawn.iter().map(|p| p.figure).min_by(f64::total_cmp),
        drawn.iter().map(|p| p.figure).max_by(f64::total_cmp),
    ) else {
        return Err("no model has a figure above 0".into());
    };
    let widest = drawn.iter().map(|p| p.size).fold(0.0, f64::max);
    let narrowest = drawn.iter().map(|p| p.size).fold(f64::INFINITY, f64::min);
    let room = (widest - narrowest).max(0.05 * widest) * 0.15;
    let root = SVGBackend::with_string(to, (900, 600)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(15)
        .x_label_area_size(45)
        .y_label_area_size(70)
        .build_cartesian_2d(
            narrowest - room..widest + 2.0 * room,
            (least / 1.3..most * 1.3).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("size, MB")
        .y_desc(what)
        .light_line_style(WHITE)
        .draw()?;
    chart.draw_series(
        drawn
            .iter()
            .map(|p| Circle::new((p.size, p.figure), 4, BLUE.filled())),
    )?;
    chart.draw_series(drawn.iter().map(|p| {
        Text::new(
            p.label.clone(),
            (p.size + room * 0.1, p.figure),
            ("sans-serif", 13),
        )
    }))?;
    root.present()?;
    drop(chart);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_every_point_and_escapes_names() {
        let point = |label: &str, size, figure| Point {
            label: label.into(),
            size,
            figure,
        };
        let points = [
            point("a<b>&", 60.0, 0.2),
            point("b", 90.0, 0.003),
            point("source", 200.0, 0.0),
        ];
        let mut svg = String::new();
        draw(&points, "title", "KL, nats", &mut svg).expect("two points");
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains("a&lt;b&gt;&amp;") && svg.contains("title"));
        assert!(draw(&points[2..], "t", "KL", &mut String::new()).is_err());
    }
}
