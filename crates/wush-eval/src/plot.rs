//! Line charts: titled series over named places, such as perplexity over bits or an error over layers. Enters: names and
//! numbers. Leaves: the text of an SVG, the same for the same input. Knows nothing of what the numbers mean.
//!
//! ```
//! use wush_eval::plot::{Chart, Series};
//!
//! let wush = Series { name: "wush".into(), values: vec![Some(20.4), Some(20.7), Some(22.0)] };
//! let chart = Chart {
//!     title: "QuEST".into(),
//!     x_label: "bits".into(),
//!     y_label: "perplexity".into(),
//!     places: ["4", "3", "2"].map(str::to_owned).to_vec(),
//!     series: vec![wush],
//!     level: Some(("unquantized".into(), 20.36)),
//!     logarithmic: true,
//! };
//! assert!(wush_eval::plot::svg(&chart)?.starts_with("<svg"));
//! # Ok::<(), wush_eval::EvalError>(())
//! ```

use std::ops::Range;

use plotters::prelude::*;
use plotters::series::LineSeries;

use crate::Result;

/// Pixels of a chart.
const SIZE: (u32, u32) = (560, 360);
/// Pixels of the labels below and at the left.
const LABELS: (u32, u32) = (40, 64);
const FONT: (&str, u32) = ("sans-serif", 12);
const TITLE: (&str, u32) = ("sans-serif", 15);
/// Of a place on the line.
const MARK: u32 = 3;
/// Of a line in the legend.
const SAMPLE: i32 = 16;
/// Okabe and Ito's colours but yellow, told apart by most eyes, on light and dark ground.
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(140, 110, 80),
];
/// Of axes and grid: visible on light and dark ground.
const LINE: RGBAColor = RGBAColor(128, 128, 128, 0.7);
const GRID: RGBAColor = RGBAColor(128, 128, 128, 0.25);
/// Room above and below the numbers, as a part of their range.
const MARGIN: f64 = 0.06;
/// About as many ticks are on an axis.
const TICKS: f64 = 8.0;
/// Least range, so that equal numbers have one.
const LEAST_RANGE: f64 = 1e-3;

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// A line chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Below it.
    pub x_label: String,
    /// At its left.
    pub y_label: String,
    /// Names of the places along x, in order.
    pub places: Vec<String>,
    /// The lines; after seven, colours repeat.
    pub series: Vec<Series>,
    /// A level to compare with, and its name.
    pub level: Option<(String, f64)>,
    /// Whether y is; numbers that are not positive are left out then.
    pub logarithmic: bool,
}

/// One line.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// In the legend.
    pub name: String,
    /// One a place; none, or a number that is not finite, leaves a gap in the marks.
    pub values: Vec<Option<f64>>,
}

/// The chart as an `<svg>` element.
///
/// # Errors
/// `Plot` when it cannot be laid out.
pub fn svg(chart: &Chart) -> Result<String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        chart.draw(&area)?;
        area.present()?;
    }
    Ok(text)
}

impl Chart {
    fn draw(&self, area: &Area<'_>) -> Result<()> {
        let mut builder = ChartBuilder::on(area);
        builder.margin(10).x_label_area_size(LABELS.0).y_label_area_size(LABELS.1).caption(&self.title, TITLE);
        let n_places = self.places.len() as i32;
        // A range of one place has no length.
        let x = if n_places > 1 { 0..n_places - 1 } else { -1..1 };
        let y = self.y_range();
        let step = (self.read(y.end) - self.read(y.start)) / TICKS;
        let mut context = builder.build_cartesian_2d(x.clone(), y)?;
        let place =
            |at: &i32| usize::try_from(*at).ok().and_then(|at| self.places.get(at)).cloned().unwrap_or_default();
        let mut mesh = context.configure_mesh();
        mesh.disable_x_mesh().axis_style(LINE).bold_line_style(GRID).light_line_style(TRANSPARENT);
        mesh.x_desc(&self.x_label).y_desc(&self.y_label).label_style(FONT).axis_desc_style(FONT);
        mesh.x_label_formatter(&place).y_label_formatter(&|y| shown(self.read(*y), step)).draw()?;
        if let Some((name, level)) = &self.level
            && let Some(level) = self.scaled(*level)
        {
            let line = LineSeries::new([(x.start, level), (x.end, level)], LINE.stroke_width(1));
            context.draw_series(line)?.label(name).legend(|(x, y)| PathElement::new([(x, y), (x + SAMPLE, y)], LINE));
        }
        for (series, color) in self.series.iter().zip(COLORS.into_iter().cycle()) {
            let points = series.values.iter().enumerate().filter_map(|(at, &y)| Some((at as i32, self.scaled(y?)?)));
            let points: Vec<(i32, f64)> = points.collect();
            let style = color.stroke_width(2);
            let line = context.draw_series(LineSeries::new(points.iter().copied(), style))?;
            line.label(&series.name).legend(move |(x, y)| PathElement::new([(x, y), (x + SAMPLE, y)], style));
            context.draw_series(points.into_iter().map(|point| Circle::new(point, MARK, color.filled())))?;
        }
        let mut legend = context.configure_series_labels();
        legend.position(SeriesLabelPosition::UpperLeft).label_font(FONT).border_style(TRANSPARENT).draw()?;
        Ok(())
    }

    /// Where a number lies; none where it cannot be shown.
    fn scaled(&self, y: f64) -> Option<f64> {
        let y = if self.logarithmic { y.log10() } else { y };
        y.is_finite().then_some(y)
    }

    /// The number at a place of the axis.
    fn read(&self, y: f64) -> f64 {
        if self.logarithmic { 10f64.powf(y) } else { y }
    }

    /// All numbers with room around them.
    fn y_range(&self) -> Range<f64> {
        let numbers = self.series.iter().flat_map(|series| series.values.iter().flatten().copied());
        let numbers = numbers.chain(self.level.iter().map(|(_, level)| *level)).filter_map(|y| self.scaled(y));
        let (least, most) = numbers.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), y| (a.min(y), b.max(y)));
        if least > most {
            return 0.0..1.0;
        }
        let room = MARGIN * (most - least).max(LEAST_RANGE * least.abs().max(1.0));
        least - room..most + room
    }
}

/// A tick's number, with as many decimals as tell it from the next one, `step` away or more, and at least its first digits.
fn shown(y: f64, step: f64) -> String {
    let least = step.min(if y == 0.0 { step } else { y.abs() / 10.0 });
    match (-(least / 2.0).log10()).ceil() {
        _ if y.abs() >= 1e6 => format!("{y:.1e}"),
        decimals if decimals <= 4.0 => format!("{y:.0$}", decimals.max(0.0) as usize),
        _ => format!("{y:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: Vec<Series>) -> Chart {
        Chart {
            title: "a <title>".into(),
            x_label: "bits".into(),
            y_label: "perplexity".into(),
            places: ["4", "3", "2"].map(str::to_owned).to_vec(),
            series,
            level: Some(("unquantized".into(), 20.0)),
            logarithmic: true,
        }
    }

    fn series(name: &str, values: [Option<f64>; 3]) -> Series {
        Series { name: name.into(), values: values.to_vec() }
    }

    #[test]
    fn every_number_that_can_be_shown_has_a_mark() {
        let lines = vec![
            series("one", [Some(21.0), Some(25.0), Some(190.0)]),
            series("two", [Some(f64::INFINITY), None, Some(-1.0)]),
        ];
        let text = svg(&chart(lines)).expect("drawn");
        assert_eq!(text.matches("<circle").count(), 3, "{text}");
        for word in ["one", "two", "unquantized", "bits", "perplexity", "a &lt;title&gt;"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn higher_numbers_lie_higher_and_places_to_the_right() {
        let text = svg(&chart(vec![series("one", [Some(21.0), Some(25.0), Some(190.0)])])).expect("drawn");
        let number = |tag: &str, key: &str| -> f64 {
            let from = tag.find(&format!(" {key}=\"")).expect("an attribute") + key.len() + 3;
            tag[from..].split('"').next().and_then(|x| x.parse().ok()).expect("a number")
        };
        let marks: Vec<(f64, f64)> =
            text.split("<circle").skip(1).map(|tag| (number(tag, "cx"), number(tag, "cy"))).collect();
        assert!(marks.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 > pair[1].1), "{marks:?}");
    }

    #[test]
    fn charts_of_nothing_of_one_place_and_of_equal_numbers_are_drawn() {
        let nothing = Chart { level: None, places: vec![], ..chart(vec![]) };
        let one =
            Chart { places: vec!["2".into()], ..chart(vec![Series { name: "x".into(), values: vec![Some(3.0)] }]) };
        let equal = Chart { logarithmic: false, ..chart(vec![series("x", [Some(20.0); 3])]) };
        for chart in [nothing, one, equal] {
            let text = svg(&chart).expect("drawn");
            assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
            assert_eq!(text, svg(&chart).expect("drawn"), "the same input, the same text");
        }
    }

    #[test]
    fn ticks_are_told_apart_and_no_longer_than_that() {
        let wide = [20.36, 777.2, 0.01234, 1e-7, 12_345.6, 0.0, 3e7].map(|y| shown(y, 100.0));
        assert_eq!(wide, ["20", "777", "0.0123", "1.0e-7", "12346", "0", "3.0e7"]);
        let narrow = [35.17, 35.23, 35.3].map(|y| shown(y, 0.06));
        assert_eq!(narrow, ["35.17", "35.23", "35.30"]);
    }
}
