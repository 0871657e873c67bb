//! Line charts: titled series over named places, such as perplexity over bits or an error over layers. Enters: names and
//! numbers. Leaves: the text of an SVG, the same for the same input. Knows nothing of what the numbers mean.
//!
//! ```
//! use wush_eval::plot::{Chart, Series};
//!
//! let wush = Series { name: "wush".into(), values: vec![Some(22.0), Some(20.7), Some(20.4)] };
//! let chart = Chart {
//!     title: "QuEST".into(),
//!     x_label: "bits".into(),
//!     y_label: "perplexity".into(),
//!     places: ["2", "3", "4"].map(str::to_owned).to_vec(),
//!     series: vec![wush],
//!     level: Some(("unquantized".into(), 20.36)),
//!     logarithmic: true,
//! };
//! assert!(wush_eval::plot::svg(&chart)?.starts_with("<svg"));
//! # Ok::<(), wush_eval::EvalError>(())
//! ```

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::types::RangedCoordi32;
use plotters::prelude::*;
use plotters::series::{DashedLineSeries, LineSeries};

use crate::Result;

/// Pixels of a chart with its legend, which stands at the right, where no line is.
const SIZE: (u32, u32) = (720, 360);
/// Of these, the legend's; and of one line of it.
const LEGEND: (u32, i32) = (190, 18);
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
/// Of the level, which must be seen beside the lines; and its dashes and gaps, pixels.
const LEVEL: RGBColor = RGBColor(128, 128, 128);
const DASH: (u32, u32) = (6, 4);
/// Steps along x from one bar to the next.
const BAR: i32 = 3;
/// Room above and below the numbers, as a part of their range.
const MARGIN: f64 = 0.06;
/// At most as many ticks are on an axis.
const TICKS: usize = 8;
/// From this ratio of its ends on a logarithmic axis has ticks that are a part of each decade, and even steps below.
const DECADES: f64 = 20.0;
/// What is taken of each decade, the first that is not too much.
const OF_DECADE: [&[f64]; 3] = [&[1.0, 2.0, 5.0], &[1.0, 3.0], &[1.0]];
/// Beyond so many decimals, and from such a number on, powers of ten are shorter.
const MOST_DECIMALS: usize = 4;
const LARGE: f64 = 1e6;
/// Least range, so that equal numbers have one.
const LEAST_RANGE: f64 = 1e-3;

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Context<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordi32, Axis>>;

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
        let (lines, legend) = area.split_horizontally(SIZE.0 - LEGEND.0);
        chart.draw(&lines)?;
        chart.draw_legend(&legend)?;
        area.present()?;
    }
    Ok(text)
}

impl Chart {
    /// Lines; where there is but one place, a bar for each series.
    fn draw(&self, area: &Area<'_>) -> Result<()> {
        let mut builder = ChartBuilder::on(area);
        builder.margin(10).x_label_area_size(LABELS.0).y_label_area_size(LABELS.1).caption(&self.title, TITLE);
        let (n_places, n_series) = (self.places.len() as i32, self.series.len() as i32);
        // Steps of a bar, which is two wide and one from the next; a range of no place has no length.
        let x = if self.has_bars() { -1..BAR * n_series.max(1) } else { 0..(n_places - 1).max(1) };
        let y = self.axis();
        let labels = y.ticks.clone();
        let label = |y: &f64| labels.iter().find(|(at, _)| at == y).map(|(_, label)| label.clone()).unwrap_or_default();
        let mut context = builder.build_cartesian_2d(x.clone(), y)?;
        // The one place of bars is below their middle.
        let first = if self.has_bars() { (x.start + x.end) / 2 } else { 0 };
        let place =
            |at: &i32| usize::try_from(at - first).ok().and_then(|at| self.places.get(at)).cloned().unwrap_or_default();
        let mut mesh = context.configure_mesh();
        mesh.disable_x_mesh().axis_style(LINE).bold_line_style(GRID).light_line_style(TRANSPARENT);
        mesh.x_desc(&self.x_label).y_desc(&self.y_label).label_style(FONT).axis_desc_style(FONT);
        mesh.x_label_formatter(&place).y_label_formatter(&label).draw()?;
        if self.has_bars() {
            self.draw_bars(&mut context)?
        } else {
            self.draw_lines(&mut context)?
        }
        // Over the bars.
        if let Some((_, level)) = &self.level
            && let Some(level) = self.scaled(*level)
        {
            let ends = [(x.start, level), (x.end, level)];
            context.draw_series(DashedLineSeries::new(ends, DASH.0, DASH.1, LEVEL.stroke_width(2)))?;
        }
        Ok(())
    }

    /// Lines through one place would be dots.
    fn has_bars(&self) -> bool {
        self.places.len() == 1
    }

    fn colored(&self) -> impl Iterator<Item = (&Series, RGBColor)> {
        self.series.iter().zip(COLORS.into_iter().cycle())
    }

    fn draw_bars(&self, context: &mut Context<'_, '_>) -> Result<()> {
        let floor = context.y_range().start;
        for (at, (series, color)) in self.colored().enumerate() {
            let top = series.values.first().copied().flatten().and_then(|y| self.scaled(y));
            let left = BAR * at as i32;
            let bar = top.map(|top| Rectangle::new([(left, floor), (left + BAR - 1, top)], color.filled()));
            context.draw_series(bar)?;
        }
        Ok(())
    }

    fn draw_lines(&self, context: &mut Context<'_, '_>) -> Result<()> {
        for (series, color) in self.colored() {
            let points = series.values.iter().enumerate().filter_map(|(at, &y)| Some((at as i32, self.scaled(y?)?)));
            let points: Vec<(i32, f64)> = points.collect();
            context.draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?;
            context.draw_series(points.into_iter().map(|point| Circle::new(point, MARK, color.filled())))?;
        }
        Ok(())
    }

    /// A line for each series, and for the level.
    fn draw_legend(&self, area: &Area<'_>) -> Result<()> {
        let level = self.level.iter().map(|(name, _)| (name, LEVEL.stroke_width(2)));
        let series = self.colored().map(|(series, color)| (&series.name, color.stroke_width(2)));
        let (height, top) = (LEGEND.1, LABELS.0 as i32);
        for (at, (name, style)) in level.chain(series).enumerate() {
            let y = top + i32::try_from(at).unwrap_or(i32::MAX / height) * height;
            area.draw(&PathElement::new([(0, y), (SAMPLE, y)], style))?;
            area.draw(&Text::new(name.as_str(), (SAMPLE + 6, y - height / 3), FONT))?;
        }
        Ok(())
    }

    /// The y axis: all numbers, and round ones to read them by.
    fn axis(&self) -> Axis {
        let range = self.y_range();
        let (least, most) = (self.read(range.start), self.read(range.end));
        let ticks = match self.logarithmic && most >= DECADES * least {
            true => decade_ticks(least, most),
            false => even_ticks(least, most),
        };
        let label = |&(y, decimals): &(f64, usize)| Some((self.scaled(y)?, shown(y, decimals)));
        Axis { range, ticks: ticks.iter().filter_map(label).collect() }
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

/// A y axis with ticks of our own.
struct Axis {
    range: Range<f64>,
    /// Where, and with which label.
    ticks: Vec<(f64, String)>,
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let part = (value - self.range.start) / (self.range.end - self.range.start);
        limit.0 + (part * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        // Ticks are bold lines; there are no light ones between them.
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.ticks.iter().map(|(at, _)| *at).collect(),
        }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// Multiples of 1, 2 or 5 times a power of ten from `least` to `most`, [`TICKS`] at most, with the decimals that show them.
fn even_ticks(least: f64, most: f64) -> Vec<(f64, usize)> {
    let rough = (most - least) / TICKS as f64;
    if !(rough > 0.0 && rough.is_finite()) {
        return Vec::new();
    }
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|&step| step >= rough).unwrap_or(10.0 * power);
    let first = (least / step).ceil();
    let multiples = (0..=TICKS).map(|n| (first + n as f64) * step);
    // A multiple may be rounded beyond an end that it is.
    multiples.take_while(|&y| y <= most + step * 1e-9).map(|y| (y, decimals_of(step))).collect()
}

/// The same parts of each decade from `least` to `most`, both positive; of many decades some, alike far apart.
fn decade_ticks(least: f64, most: f64) -> Vec<(f64, usize)> {
    let (first, last) = (least.log10().floor() as i32, most.log10().ceil() as i32);
    let of = |parts: &'static [f64], every: usize| -> Vec<(f64, usize)> {
        let ticks = (first..=last).step_by(every).flat_map(|power| parts.iter().map(move |n| n * 10f64.powi(power)));
        ticks.filter(|y| (least..=most).contains(y)).map(|y| (y, decimals_of(y))).collect()
    };
    let few = OF_DECADE.iter().map(|parts| of(parts, 1)).find(|ticks| ticks.len() <= TICKS);
    few.unwrap_or_else(|| of(&[1.0], (last - first) as usize / TICKS + 1))
}

/// A tick's number.
fn shown(y: f64, decimals: usize) -> String {
    if decimals > MOST_DECIMALS || y.abs() >= LARGE { format!("{y:.1e}") } else { format!("{y:.decimals$}") }
}

/// Decimals that show a number whose last digit is its first.
fn decimals_of(y: f64) -> usize {
    (-y.abs().log10() - 1e-9).ceil().max(0.0) as usize
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
        assert_eq!(svg(&one).expect("drawn").matches("<rect").count(), 1, "one place has bars");
        for chart in [nothing, one, equal] {
            let text = svg(&chart).expect("drawn");
            assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
            assert_eq!(text, svg(&chart).expect("drawn"), "the same input, the same text");
        }
    }

    #[test]
    fn ticks_are_round_numbers_evenly_spread_and_told_apart() {
        let even = |least, most| even_ticks(least, most).into_iter().map(|(y, n)| shown(y, n)).collect::<Vec<_>>();
        assert_eq!(even(19.9, 23.1), ["20.0", "20.5", "21.0", "21.5", "22.0", "22.5", "23.0"]);
        assert_eq!(even(35.17, 35.3), ["35.18", "35.20", "35.22", "35.24", "35.26", "35.28", "35.30"]);
        assert_eq!(even(0.0, 800.0), ["0", "100", "200", "300", "400", "500", "600", "700", "800"]);
        assert_eq!(even(3.0, 3.0), [""; 0]);
        let decades = |least, most| decade_ticks(least, most).into_iter().map(|(y, n)| shown(y, n)).collect::<Vec<_>>();
        assert_eq!(decades(20.0, 800.0), ["20", "50", "100", "200", "500"]);
        assert_eq!(decades(0.004, 0.9), ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5"]);
        assert_eq!(decades(0.02, 200.0), ["0.03", "0.1", "0.3", "1", "3", "10", "30", "100"]);
        assert_eq!(decades(1e-7, 2e7), ["1.0e-7", "1.0e-5", "0.001", "0.1", "10", "1000", "100000", "1.0e7"]);
    }

    #[test]
    fn the_legend_stands_beside_the_lines() {
        let text = svg(&chart(vec![series("wush", [Some(21.0), Some(25.0), Some(190.0)])])).expect("drawn");
        let beside = f64::from(SIZE.0 - LEGEND.0);
        let at = |end: usize| {
            let tag = &text[text[..end].rfind("<text").expect("a text")..end];
            tag.split(" x=\"").nth(1).and_then(|x| x.split('"').next()?.parse::<f64>().ok()).expect("its place")
        };
        for name in ["wush", "unquantized"] {
            assert!(at(text.find(name).expect("in the legend")) > beside, "{name}: {text}");
        }
        let marks = text.split("<circle cx=\"").skip(1).filter_map(|tag| tag.split('"').next()?.parse::<f64>().ok());
        assert!(marks.into_iter().all(|x| x < beside), "{text}");
    }
}
