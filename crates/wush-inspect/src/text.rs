//! A report as text for a terminal: facts, checks, one line a layer, the worst heads, the verdict last.

use crate::number::{count, shown, worse};
use crate::report::{HeadAudit, Kind, LayerAudit, Report, State, Verdict};

/// Heads named under "worst heads".
const WORST: usize = 3;

/// The report as aligned plain text with a final newline.
pub fn to_text(report: &Report) -> String {
    let mut out = format!("{}: {}", report.path, report.kind.name());
    if let Some(base) = &report.base {
        out.push_str(&format!(", compared with {base}"));
    }
    out.push('\n');
    let facts: Vec<_> = report.facts.iter().map(|fact| vec![fact.name.clone(), fact.value.clone()]).collect();
    if !facts.is_empty() {
        out.push_str(&format!("\n{}", table(&facts, &[])));
    }
    let check = |check: &crate::Check| {
        let state = match report.state(check) {
            State::Ok => "ok",
            State::Noted => "note",
            State::Failed => "FAILED",
        };
        vec![state.to_owned(), check.name.clone(), check.detail.clone()]
    };
    let checks: Vec<_> = report.checks.iter().map(check).collect();
    out.push_str(&section("Checks", &table(&checks, &[])));
    out.push_str(&section(layers_title(report), &layers(report)));
    out.push_str(&section("Worst heads", &worst_heads(report)));
    out.push_str(&verdict(report));
    out
}

fn section(title: &str, body: &str) -> String {
    if body.is_empty() { String::new() } else { format!("\n{title}\n{body}") }
}

/// The last line.
fn verdict(report: &Report) -> String {
    let failed: Vec<&str> = report.checks.iter().filter(|check| !check.ok).map(|check| check.name.as_str()).collect();
    match report.verdict {
        Verdict::Ok => format!("\nVerdict: ok{} ({} passed)\n", noted(report), count(report.checks.len(), "check")),
        Verdict::Failed => format!(
            "\nVerdict: FAILED ({} of {}: {})\n",
            failed.len(),
            count(report.checks.len(), "check"),
            failed.join(", ")
        ),
    }
}

/// ", 1 warning" after an "ok" that has some.
pub(crate) fn noted(report: &Report) -> String {
    if report.notes.is_empty() { String::new() } else { format!(", {}", count(report.notes.len(), "warning")) }
}

pub(crate) fn layers_title(report: &Report) -> &'static str {
    match report.kind {
        Kind::Statistics => {
            "Layers (gain: what the transform of the paper would give on the calibration text itself, worst to \
                             best head; the rest: worst head)"
        }
        _ if columns(report).iter().any(|column| column.range) => {
            "Layers (gain: predicted on the calibration text itself, worst to best head; the rest: worst head)"
        }
        _ => "Layers (worst head)",
    }
}

/// One column: a title, a figure of a head, and whether the range is shown or the worst.
struct Column {
    title: &'static str,
    figure: fn(&HeadAudit) -> Option<f64>,
    range: bool,
}

const COLUMNS: &[Column] = &[
    Column { title: "key gain", figure: |head| head.key.as_ref().map(|key| key.gain()), range: true },
    Column { title: "key cond", figure: key_condition, range: false },
    Column { title: "key imbalance", figure: |head| head.key.as_ref().map(|key| key.imbalance), range: false },
    Column { title: "value gain", figure: |head| head.value.as_ref().map(|value| value.gain()), range: true },
    Column { title: "value cond", figure: value_condition, range: false },
    Column { title: "value imbalance", figure: |head| head.value.as_ref().map(|value| value.imbalance), range: false },
    Column { title: "mean-key energy", figure: |head| head.mean_key_energy, range: false },
    Column { title: "fold error", figure: |head| head.fold.as_ref().and_then(|fold| fold.rel_error), range: false },
    Column {
        title: "of rounding",
        figure: |head| head.fold.as_ref().and_then(|fold| fold.weights_excess),
        range: false,
    },
];

/// Condition number of the stored key transform, else what the solver reported.
pub(crate) fn key_condition(head: &HeadAudit) -> Option<f64> {
    head.key_condition.or(head.key.as_ref().map(|key| key.cond_transform))
}

/// As [`key_condition`], of values.
pub(crate) fn value_condition(head: &HeadAudit) -> Option<f64> {
    head.value_condition.or(head.value.as_ref().map(|value| value.cond_transform))
}

/// The columns of which some head has the figure.
fn columns(report: &Report) -> Vec<&'static Column> {
    let known = |column: &&Column| {
        report.layers.iter().flat_map(|layer| &layer.heads).any(|head| (column.figure)(head).is_some())
    };
    COLUMNS.iter().filter(known).collect()
}

fn layers(report: &Report) -> String {
    let rows = layer_rows(report);
    let right: Vec<usize> = (0..rows.first().map_or(0, Vec::len)).collect();
    table(&rows, &right)
}

/// The titles and one row a layer; nothing when there are no figures.
pub(crate) fn layer_rows(report: &Report) -> Vec<Vec<String>> {
    let columns = columns(report);
    let with_ranks = report.kind == Kind::Statistics;
    if columns.is_empty() {
        return Vec::new();
    }
    let mut rows = vec![vec!["layer".to_owned(), "heads".to_owned()]];
    rows[0].extend(columns.iter().map(|column| column.title.to_owned()));
    if with_ranks {
        rows[0].extend(["rank K, Q, V, O".to_owned(), "dead channels".to_owned()]);
    }
    for layer in &report.layers {
        let mut row = vec![layer.layer.to_string(), layer.heads.len().to_string()];
        row.extend(columns.iter().map(|column| cell(layer, column)));
        if with_ranks {
            row.extend(ranks(layer));
        }
        rows.push(row);
    }
    rows
}

fn cell(layer: &LayerAudit, column: &Column) -> String {
    let figures: Vec<f64> = layer.heads.iter().filter_map(column.figure).collect();
    let Some(&first) = figures.first() else { return "–".to_owned() };
    let largest = figures.iter().copied().fold(first, worse);
    let least = figures.iter().copied().fold(first, f64::min);
    if column.range && figures.len() > 1 { format!("{} – {}", shown(least), shown(largest)) } else { shown(largest) }
}

/// Smallest numerical ranks of a layer's four matrices, and its dead channels.
fn ranks(layer: &LayerAudit) -> [String; 2] {
    let least = |figure: &dyn Fn(&HeadAudit) -> Option<usize>| {
        layer.heads.iter().filter_map(figure).min().map_or_else(|| "–".to_owned(), |rank| rank.to_string())
    };
    let ranks = [
        least(&|head| head.key.as_ref().map(|key| key.rank_gram)),
        least(&|head| head.key.as_ref().map(|key| key.rank_hessian)),
        least(&|head| head.value.as_ref().map(|value| value.rank_gram)),
        least(&|head| head.value.as_ref().map(|value| value.rank_hessian)),
    ];
    let dead =
        layer.heads.iter().flat_map(|head| [&head.key, &head.value]).flatten().map(|measures| measures.dead_channels);
    [ranks.join(", "), dead.sum::<usize>().to_string()]
}

/// The heads with the least gain, the largest condition numbers and the largest fold error.
fn worst_heads(report: &Report) -> String {
    let all: Vec<(usize, &HeadAudit)> =
        report.layers.iter().flat_map(|layer| layer.heads.iter().map(move |head| (layer.layer, head))).collect();
    if all.len() <= WORST {
        return String::new();
    }
    let mut rows = Vec::new();
    let mut add = |title: &str, figure: &dyn Fn(&HeadAudit) -> Option<f64>, least: bool| {
        let mut found: Vec<_> =
            all.iter().filter_map(|&(layer, head)| Some((figure(head)?, layer, head.head))).collect();
        found.sort_by(|a, b| if least { a.0.total_cmp(&b.0) } else { b.0.total_cmp(&a.0) });
        let named: Vec<String> = found
            .iter()
            .take(WORST)
            .map(|(figure, layer, head)| format!("{layer}.{head}: {}", shown(*figure)))
            .collect();
        if !named.is_empty() {
            rows.push(vec![title.to_owned(), named.join("   ")]);
        }
    };
    add("least key gain", &|head| head.key.as_ref().map(|key| key.gain()), true);
    add("least value gain", &|head| head.value.as_ref().map(|value| value.gain()), true);
    add("largest key condition", &key_condition, false);
    add("largest value condition", &value_condition, false);
    add("largest fold error", &|head| head.fold.as_ref().and_then(|fold| fold.rel_error), false);
    if rows.is_empty() { String::new() } else { format!("{}  (layer.head: figure)\n", table(&rows, &[])) }
}

/// Rows with aligned columns, indented; columns in `right` are flushed right. The last column is not padded.
fn table(rows: &[Vec<String>], right: &[usize]) -> String {
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len)).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .enumerate()
            .map(|(at, cell)| match widths[at] {
                width if right.contains(&at) => format!("{cell:>width$}"),
                width if at + 1 < row.len() => format!("{cell:<width$}"),
                _ => cell.clone(),
            })
            .collect();
        out.push_str(&format!("  {}\n", cells.join("  ")));
    }
    out
}
