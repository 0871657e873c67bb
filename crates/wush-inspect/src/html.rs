//! A report as one HTML page.

use crate::number::{count, digest};
use crate::page::{escape, number_table, page, pair_list};
use crate::report::{Kind, Report, State, Verdict};
use crate::svg::{HeatMap, heat_map};
use crate::text::{key_condition, layer_rows, layers_title, noted, value_condition};

/// The maps in order of the page.
const MAPS: &[HeatMap] = &[
    HeatMap {
        title: "Keys: predicted gain",
        caption: "By how much the rounding loss shrinks at equal bits, against any orthogonal transform: a figure on the \
                  calibration text itself. More is better.",
        figure: |head| head.key.as_ref().map(|key| key.gain()),
        logarithmic: true,
        class: "key",
    },
    HeatMap {
        title: "Values: predicted gain",
        caption: "The same for values, on the calibration text itself.",
        figure: |head| head.value.as_ref().map(|value| value.gain()),
        logarithmic: true,
        class: "value",
    },
    HeatMap {
        title: "Keys: condition number of T",
        caption: "How much T and its inverse may amplify rounding (2-norm; 1 is the least). Less is better; logarithmic.",
        figure: key_condition,
        logarithmic: true,
        class: "key",
    },
    HeatMap {
        title: "Values: condition number of T",
        caption: "The same for values, whose T is folded into the weights.",
        figure: value_condition,
        logarithmic: true,
        class: "value",
    },
    HeatMap {
        title: "Keys: sensitivity imbalance",
        caption: "How unequally the transformed coordinates matter. 0 is the optimum.",
        figure: |head| head.key.as_ref().map(|key| key.imbalance),
        logarithmic: false,
        class: "key",
    },
    HeatMap {
        title: "Values: sensitivity imbalance",
        caption: "The same for values.",
        figure: |head| head.value.as_ref().map(|value| value.imbalance),
        logarithmic: false,
        class: "value",
    },
    HeatMap {
        title: "Keys: energy of the mean",
        caption: "Share of the keys' energy that lies in their mean.",
        figure: |head| head.mean_key_energy,
        logarithmic: false,
        class: "key",
    },
    HeatMap {
        title: "Keys: numerical rank",
        caption: "Of the Gram matrix of the keys.",
        figure: |head| head.key.as_ref().map(|key| key.rank_gram as f64),
        logarithmic: false,
        class: "key",
    },
    HeatMap {
        title: "Values: numerical rank",
        caption: "Of the Gram matrix of the values.",
        figure: |head| head.value.as_ref().map(|value| value.rank_gram as f64),
        logarithmic: false,
        class: "value",
    },
    HeatMap {
        title: "Fold error",
        caption: "Relative change of W_O·W_V by the rounding of the stored weights. Less is better; logarithmic.",
        figure: |head| head.fold.as_ref().and_then(|fold| fold.rel_error),
        logarithmic: true,
        class: "fold",
    },
    HeatMap {
        title: "Fold: deviation over rounding",
        caption: "Largest deviation of the folded weights, as a share of what rounding explains. Above 1 fails.",
        figure: |head| head.fold.as_ref().and_then(|fold| fold.weights_excess),
        logarithmic: false,
        class: "fold",
    },
];

/// The report as one self-contained page.
pub fn to_html(report: &Report) -> String {
    let maps: Vec<String> = MAPS.iter().filter_map(|map| heat_map(report, map)).collect();
    let maps = if maps.is_empty() {
        String::new()
    } else {
        format!("<h2>Layers and heads</h2><div class=\"maps\">{}</div>{}", maps.concat(), layers(report))
    };
    let title = format!("{}: {}", report.kind.name(), report.path);
    page(&title, &[header(report), facts(report), checks(report), maps].concat())
}

fn header(report: &Report) -> String {
    let (class, word) = match report.verdict {
        Verdict::Ok => ("ok", format!("ok{}", noted(report))),
        Verdict::Failed => ("bad", "failed".to_owned()),
    };
    let n_failed = report.checks.iter().filter(|check| !check.ok).count();
    let summary = match n_failed {
        0 => format!("{} passed", count(report.checks.len(), "check")),
        _ => format!("{n_failed} of {} failed", count(report.checks.len(), "check")),
    };
    let base = report
        .base
        .as_ref()
        .map(|base| format!("<p>compared with <code>{}</code></p>", escape(base)))
        .unwrap_or_default();
    format!(
        "<header><div><h1>{}</h1><p><code>{}</code></p>{base}</div>\
         <p class=\"verdict {class}\"><b>{word}</b><span>{summary}</span></p></header>",
        if report.kind == Kind::Bundle { "WUSH-KV bundle" } else { report.kind.name() },
        escape(&report.path),
    )
}

fn facts(report: &Report) -> String {
    let hash = report.model_hash.map(|hash| ("model hash".to_owned(), digest(&hash)));
    let pairs: Vec<_> = report.facts.iter().map(|fact| (fact.name.clone(), fact.value.clone())).chain(hash).collect();
    pair_list(&pairs)
}

fn checks(report: &Report) -> String {
    let row = |check: &crate::Check| {
        let (class, mark) = match report.state(check) {
            State::Ok => ("ok", "✓ ok"),
            State::Noted => ("warn", "! note"),
            State::Failed => ("bad", "✗ failed"),
        };
        format!(
            "<tr class=\"{class}\"><td>{mark}</td><th scope=\"row\">{}</th><td>{}</td></tr>",
            escape(&check.name),
            escape(&check.detail)
        )
    };
    let rows: String = report.checks.iter().map(row).collect();
    format!("<h2>Checks</h2><div class=\"wide\"><table class=\"checks\">{rows}</table></div>")
}

/// The numbers of the maps, one row a layer.
fn layers(report: &Report) -> String {
    let rows = layer_rows(report);
    let Some((titles, rows)) = rows.split_first() else { return String::new() };
    format!("<h2>Numbers</h2><p class=\"note\">{}</p>{}", layers_title(report), number_table(titles, rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_stay_text() {
        let mut report = Report::new(std::path::Path::new("<img src=x onerror='a'>"), Kind::Bundle);
        report.check("files", false, "\"><script>alert(1)</script>");
        report.fact("source", "<b>&");
        let page = to_html(&report);
        assert!(!page.contains("<script") && !page.contains("<img") && !page.contains("<b>&<"));
        assert!(page.contains("&quot;&gt;&lt;script&gt;") && page.contains("&lt;b&gt;&amp;"));
    }

    #[test]
    fn nothing_is_loaded_from_elsewhere() {
        let mut report = Report::new(std::path::Path::new("x"), Kind::Statistics);
        report.head(0, 0).mean_key_energy = Some(0.25);
        report.head(3, 1).mean_key_energy = Some(0.5);
        let page = to_html(&report);
        for foreign in ["http", "url(", "src=", "<link", "@import", "<script"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        assert!(page.contains("<title>layer 3, KV head 1: 0.50</title>"));
    }
}
