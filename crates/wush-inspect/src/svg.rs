//! One layer × head heat map as inline SVG. Colours are mixed by the style sheet from two variables, so that one drawing
//! serves light and dark pages; every cell has a title that a pointer shows and a screen reader speaks.

use crate::number::shown;
use crate::report::{HeadAudit, Report};

/// A figure of every head.
pub(crate) struct HeatMap {
    pub(crate) title: &'static str,
    /// One sentence: what the figure is, and which end is good.
    pub(crate) caption: &'static str,
    pub(crate) figure: fn(&HeadAudit) -> Option<f64>,
    /// Colours follow the logarithm.
    pub(crate) logarithmic: bool,
    /// Hue: `key`, `value` or `fold`, classes of the style sheet.
    pub(crate) class: &'static str,
}

/// Pixels of a cell at most, and of the labels around the map.
const CELL: usize = 22;
const LEFT: usize = 34;
const TOP: usize = 6;
const BOTTOM: usize = 34;
/// Widest map in pixels: cells shrink for models with many layers.
const MAX_WIDTH: usize = 640;

/// The map as a `<figure>`; none when no head has the figure.
pub(crate) fn heat_map(report: &Report, map: &HeatMap) -> Option<String> {
    let figures = report.layers.iter().flat_map(|layer| &layer.heads).filter_map(map.figure).filter(|x| x.is_finite());
    let (least, largest) = figures.fold(None, |range: Option<(f64, f64)>, x| {
        Some(range.map_or((x, x), |(least, largest)| (least.min(x), largest.max(x))))
    })?;
    let n_heads = report.layers.iter().map(|layer| layer.heads.len()).max().unwrap_or(0);
    let width = (MAX_WIDTH / report.layers.len().max(1)).clamp(4, CELL);
    let height = (MAX_WIDTH / 2 / n_heads.max(1)).clamp(6, CELL);
    let (map_width, map_height) = (width * report.layers.len(), height * n_heads);
    let mut svg = format!(
        "<svg role=\"img\" aria-label=\"{}\" viewBox=\"0 0 {} {}\" style=\"max-width:{}px\">",
        map.title,
        LEFT + map_width + 4,
        TOP + map_height + BOTTOM,
        LEFT + map_width + 4,
    );
    for (column, layer) in report.layers.iter().enumerate() {
        for (row, head) in layer.heads.iter().enumerate() {
            let (x, y) = (LEFT + column * width, TOP + row * height);
            svg.push_str(&cell(map, layer.layer, head, (least, largest), [x, y, width - 1, height - 1]));
        }
    }
    svg.push_str(&axes(report, n_heads, width, height));
    svg.push_str("</svg>");
    Some(format!(
        "<figure class=\"{}\"><figcaption><b>{}</b><span>{}</span></figcaption>{svg}\
         <div class=\"scale\"><span>{}</span><i></i><span>{}</span></div></figure>",
        map.class,
        map.title,
        map.caption,
        shown(least),
        shown(largest),
    ))
}

fn cell(map: &HeatMap, layer: usize, head: &HeadAudit, range: (f64, f64), [x, y, width, height]: [usize; 4]) -> String {
    let figure = (map.figure)(head).filter(|x| x.is_finite());
    let text = figure.map_or_else(|| "unknown".to_owned(), shown);
    let title = format!("<title>layer {layer}, KV head {}: {text}</title>", head.head);
    let place = format!("x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"2\"");
    match figure {
        Some(figure) => {
            let percent = (100.0 * position(figure, range, map.logarithmic)).round();
            format!("<rect {place} style=\"fill:color-mix(in oklab,var(--lo),var(--hi) {percent}%)\">{title}</rect>")
        }
        None => format!("<rect {place} class=\"none\">{title}</rect>"),
    }
}

/// 0 at the least figure, 1 at the largest; one half when all are the same.
fn position(x: f64, (least, largest): (f64, f64), logarithmic: bool) -> f64 {
    let scale = |x: f64| if logarithmic && least > 0.0 { x.ln() } else { x };
    let span = scale(largest) - scale(least);
    if span > 0.0 { ((scale(x) - scale(least)) / span).clamp(0.0, 1.0) } else { 0.5 }
}

/// Layer ids below, head numbers at the left, not closer together than they can be read.
fn axes(report: &Report, n_heads: usize, width: usize, height: usize) -> String {
    let bottom = TOP + n_heads * height;
    let mut out = String::new();
    let every = 22_usize.div_ceil(width);
    for (column, layer) in report.layers.iter().enumerate().step_by(every) {
        let x = LEFT + column * width + width / 2;
        out.push_str(&format!("<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{}</text>", bottom + 13, layer.layer));
    }
    for head in (0..n_heads).step_by(12_usize.div_ceil(height)) {
        let y = TOP + head * height + height / 2 + 4;
        out.push_str(&format!("<text x=\"{}\" y=\"{y}\" text-anchor=\"end\">{head}</text>", LEFT - 6));
    }
    let middle = TOP + n_heads * height / 2;
    out.push_str(&format!("<text x=\"{}\" y=\"{}\" class=\"axis\">layer</text>", LEFT, bottom + 28));
    out.push_str(&format!("<text x=\"9\" y=\"{middle}\" class=\"axis\" text-anchor=\"middle\" transform=\"rotate(-90 9 {middle})\">head</text>"));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_span_zero_to_one() {
        assert_eq!(position(1.0, (1.0, 100.0), true), 0.0);
        assert!((position(10.0, (1.0, 100.0), true) - 0.5).abs() < 1e-12);
        assert_eq!(position(100.0, (1.0, 100.0), false), 1.0);
        assert_eq!(position(3.0, (3.0, 3.0), true), 0.5);
        assert_eq!(position(0.0, (0.0, 2.0), true), 0.0);
    }
}
