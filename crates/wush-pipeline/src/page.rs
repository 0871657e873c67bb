//! Reports of evaluations as self-contained pages, and how a page is written.

use std::io::Read;
use std::path::Path;

use wush_eval::Protocol;
use wush_eval::plot::{Chart, Series, svg};
use wush_format::FormatError;
use wush_format::atomic::write_file;
use wush_format::manifest::Calibration;
use wush_format::monitor::Monitor;
use wush_inspect::page::{charts, escape, number_table, page, pair_list};

use crate::human::{counted, human_bits};
use crate::notes::{describe_allotment, describe_bits, describe_solves};
use crate::report::{AllottedBits, EvalPplReport, EvalReconReport, ModuleRow, PerplexityRow, ReconRow};
use crate::{PipelineError, Result};

/// What every page begins with, in either case.
const PAGE_START: &[u8] = b"<!doctype html>";

/// A report that can also be a page.
pub trait AsPage {
    /// Self-contained HTML.
    ///
    /// # Errors
    /// `Eval` when a chart cannot be laid out.
    fn page(&self) -> Result<String>;
}

impl AsPage for wush_inspect::Report {
    fn page(&self) -> Result<String> {
        Ok(wush_inspect::to_html(self))
    }
}

impl AsPage for EvalPplReport {
    fn page(&self) -> Result<String> {
        perplexity_page(self)
    }
}

impl AsPage for EvalReconReport {
    fn page(&self) -> Result<String> {
        recon_page(self)
    }
}

/// A perplexity report: a chart a quantizer, with a line a transform over bits, and the table.
///
/// # Errors
/// `Eval` when a chart cannot be laid out.
fn perplexity_page(report: &EvalPplReport) -> Result<String> {
    let Protocol { chunk, sink, keep, flush } = report.protocol;
    let windows = counted(report.sequences, "window");
    let text = format!("{}: {windows} of up to {} tokens", report.text, report.seq_len);
    let scales = &report.scale_dtype;
    let cache = format!("chunks of {chunk}, sink {sink}, keep {keep}, flush {flush}; scales in {scales}");
    let how = describe_solves(&report.solves).join("; ");
    let calibration = calibration(report.calibration.as_ref());
    let facts = [
        ("text", text),
        ("cache", cache),
        ("device", report.device.clone()),
        ("solve", how),
        ("calibration", calibration),
    ];
    let allotted = report.rows.iter().map(|row| Allotted {
        name: format!("{}, {}", row.transform, row.quantizer),
        bits: (row.bits, row.asked_bits),
        allotment: &row.allotment,
    });
    let facts = facts_and_notes(&facts, &report.notes, allotted);
    let plots = perplexity_charts(&report.rows).iter().map(svg).collect::<Result<Vec<_>, _>>();
    let plots = plots.map_err(PipelineError::from)?;
    let header =
        format!("<header><div><h1>Perplexity</h1><p><code>{}</code></p></div></header>", escape(&report.model.id));
    let parts =
        [header, pair_list(&facts), heading("By bits"), charts(&plots), heading("Numbers"), table(&report.rows)];
    Ok(page(&format!("perplexity: {}", report.model.id), &parts.concat()))
}

/// What the transforms were made from.
fn calibration(calibration: Option<&Calibration>) -> String {
    let Some(calibration) = calibration else { return "none: no transform needed statistics".to_owned() };
    let sequences = counted(calibration.sequences, "sequence");
    format!("{}: {sequences} of up to {} tokens", calibration.source, calibration.max_seq_len)
}

/// A row of a report as far as its bits go.
struct Allotted<'a> {
    name: String,
    /// Their average, and the one that was asked for.
    bits: (f64, Option<f64>),
    /// Empty where they were not allotted.
    allotment: &'a [AllottedBits],
}

/// What stands above the charts: facts, notes, and the bits of rows that were allotted some.
fn facts_and_notes<'a>(
    facts: &[(&str, String)],
    notes: &[String],
    rows: impl Iterator<Item = Allotted<'a>>,
) -> Vec<(String, String)> {
    let notes = notes.iter().map(|note| ("note", note.clone()));
    let of_row = |Allotted { name, bits: (bits, asked), allotment }: Allotted<'_>| {
        let lines = describe_allotment(allotment).join("; ");
        ("allotted bits", format!("{name}, {}: {lines}", describe_bits(bits, asked)))
    };
    let allotted = rows.filter(|row| !row.allotment.is_empty()).map(of_row);
    facts.iter().cloned().chain(notes).chain(allotted).map(|(name, text)| (name.to_owned(), text)).collect()
}

/// What is measured of a module: its name and how a row has it.
type Measure = (&'static str, fn(&ModuleRow) -> f64);

/// The quantities of Section 5.1, in the order of its figures.
const MEASURES: [Measure; 5] = [
    ("module output, keys and values quantized", |row| row.both),
    ("module output, keys quantized", |row| row.keys),
    ("module output, values quantized", |row| row.values),
    ("softmax probabilities, keys quantized", |row| row.probabilities),
    ("query-key products, keys quantized", |row| row.products),
];

/// A report of reconstruction errors: charts over layers, a line a cache, for each number of bits, and the table of means.
///
/// # Errors
/// `Eval` when a chart cannot be laid out.
fn recon_page(report: &EvalReconReport) -> Result<String> {
    let sequences = counted(report.sequences, "sequence");
    let text = format!("{}: {sequences} of up to {} tokens", report.text, report.seq_len);
    let cache = format!("every token quantized; scales in {}", report.scale_dtype);
    let how = describe_solves(&report.solves).join("; ");
    let calibration = calibration(report.calibration.as_ref());
    let facts = [("text", text), ("cache", cache), ("solve", how), ("calibration", calibration)];
    let allotted = report.rows.iter().map(|row| Allotted {
        name: format!("{}, {}", row.transform, row.quantizer),
        bits: (row.bits, row.asked_bits),
        allotment: &row.allotment,
    });
    let facts = facts_and_notes(&facts, &report.notes, allotted);
    let header = format!(
        "<header><div><h1>Reconstruction errors</h1><p><code>{}</code></p></div></header>",
        escape(&report.model.id)
    );
    let bits = ascending(report.rows.iter().map(|row| row.bits));
    let mut parts = vec![header, pair_list(&facts), heading("Geometric means over layers"), recon_table(&report.rows)];
    for bits in bits {
        let rows: Vec<&ReconRow> = report.rows.iter().filter(|row| row.bits == bits).collect();
        let plots = MEASURES.iter().map(|measure| svg(&recon_chart(&rows, *measure))).collect::<Result<Vec<_>, _>>();
        parts.push(heading(&format!("By layer, {} bits", human_bits(bits))));
        parts.push(charts(&plots.map_err(PipelineError::from)?));
    }
    Ok(page(&format!("reconstruction errors: {}", report.model.id), &parts.concat()))
}

/// One quantity over layers.
fn recon_chart(rows: &[&ReconRow], (title, value): Measure) -> Chart {
    let n_layers = rows.iter().map(|row| row.layers.len()).max().unwrap_or(0);
    let series = |row: &&ReconRow| Series {
        name: format!("{}, {}", row.transform, row.quantizer),
        values: row.layers.iter().map(|layer| Some(value(layer))).collect(),
    };
    Chart {
        title: title.to_owned(),
        x_label: "layer".to_owned(),
        y_label: "relative squared error".to_owned(),
        places: (0..n_layers).map(|layer| layer.to_string()).collect(),
        series: rows.iter().map(series).collect(),
        level: None,
        logarithmic: true,
    }
}

fn recon_table(rows: &[ReconRow]) -> String {
    let titles = ["transform", "quantizer", "bits", "products", "probabilities", "keys", "values", "both"];
    let cells = |row: &ReconRow| {
        let errors = [row.products, row.probabilities, row.keys, row.values, row.both];
        let names = [row.transform.clone(), row.quantizer.clone(), human_bits(row.bits)];
        names.into_iter().chain(errors.iter().map(|error| format!("{error:.4}"))).collect()
    };
    number_table(&titles.map(str::to_owned), &rows.iter().map(cells).collect::<Vec<_>>())
}

fn heading(text: &str) -> String {
    format!("<h2>{}</h2>", escape(text))
}

fn table(rows: &[PerplexityRow]) -> String {
    let titles = ["transform", "quantizer", "bits", "perplexity", "nll", "tokens"].map(str::to_owned);
    let cells = |row: &PerplexityRow| {
        let PerplexityRow { transform, quantizer, bits, ppl, nll, tokens, .. } = row;
        vec![
            transform.clone(),
            quantizer.clone(),
            human_bits(*bits),
            format!("{ppl:.4}"),
            format!("{nll:.5}"),
            tokens.to_string(),
        ]
    };
    number_table(&titles, &rows.iter().map(cells).collect::<Vec<_>>())
}

/// A chart a quantizer, or one for all where each transform has but one; the row without quantization is the level of each.
fn perplexity_charts(rows: &[PerplexityRow]) -> Vec<Chart> {
    let (unquantized, rows): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.bits == crate::eval::UNQUANTIZED_BITS);
    let level = unquantized.first().map(|row| ("unquantized".to_owned(), row.ppl));
    let bits = ascending(rows.iter().map(|row| row.bits));
    let chart = |title: &str, rows: Vec<&PerplexityRow>| {
        let series = distinct(rows.iter().map(|row| row.transform.as_str())).into_iter().map(|transform| {
            let at =
                |bits: &f64| rows.iter().find(|row| row.transform == transform && row.bits == *bits).map(|row| row.ppl);
            Series { name: transform.to_owned(), values: bits.iter().map(at).collect() }
        });
        Chart {
            title: title.to_owned(),
            x_label: "bits".to_owned(),
            y_label: "perplexity".to_owned(),
            places: bits.iter().map(|&bits| human_bits(bits)).collect(),
            series: series.collect(),
            level: level.clone(),
            logarithmic: true,
        }
    };
    let quantizers_of = |transform: &str| {
        distinct(rows.iter().filter(|row| row.transform == transform).map(|row| row.quantizer.as_str())).len()
    };
    if rows.iter().all(|row| quantizers_of(&row.transform) == 1) {
        return vec![chart("each with its quantizer", rows)];
    }
    let of_quantizer =
        |quantizer| chart(quantizer, rows.iter().copied().filter(|row| row.quantizer == quantizer).collect());
    distinct(rows.iter().map(|row| row.quantizer.as_str())).into_iter().map(of_quantizer).collect()
}

/// Each once, rising.
fn ascending(numbers: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers.dedup();
    numbers
}

/// Each once, in the order of its first appearance.
fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    names.for_each(|name| {
        if !seen.contains(&name) {
            seen.push(name);
        }
    });
    seen
}

/// Writes a report's page, over an older page if there is one. Comes after the report is out: what was measured is not lost where
/// the page cannot be written.
///
/// # Errors
/// `Exists` for anything else at `path`; `Io`; as [`AsPage::page`].
pub fn write_page(report: &impl AsPage, path: &Path, monitor: &dyn Monitor) -> Result<()> {
    let page = report.page()?;
    let is_there = require_replaceable(path)?;
    write_file(path, page.as_bytes())?;
    let replaced = if is_there { ", in place of an older one" } else { "" };
    monitor.note(&format!("page: {}{replaced}", path.display()));
    Ok(())
}

/// Whether a page is at `path`, which a new one may replace.
///
/// # Errors
/// `Exists` for anything else there.
pub(crate) fn require_replaceable(path: &Path) -> Result<bool> {
    let Ok(metadata) = path.symlink_metadata() else { return Ok(false) };
    let mut start = [0; PAGE_START.len()];
    let mut read = || std::fs::File::open(path)?.read_exact(&mut start);
    if metadata.is_file() && read().is_ok() && start.eq_ignore_ascii_case(PAGE_START) {
        return Ok(true);
    }
    Err(FormatError::Exists { path: path.to_owned() }.into())
}
