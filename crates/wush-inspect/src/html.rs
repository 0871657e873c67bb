//! A report as one HTML page: no script, no font, no picture from elsewhere; light or dark as the reader's system is.

use crate::number::{count, digest};
use crate::report::{Kind, Report, State, Verdict};
use crate::svg::{HeatMap, heat_map};
use crate::text::{key_condition, layer_rows, layers_title, noted, value_condition};

/// The maps in order of the page.
const MAPS: &[HeatMap] = &[
    HeatMap {
        title: "Keys: predicted gain",
        caption: "By how much the rounding loss shrinks at equal bits, against any orthogonal transform: a figure on the \
                  calibration text itself. More is better.",
        figure: |head| head.key.as_ref().map(|key| key.predicted_gain),
        logarithmic: true,
        class: "key",
    },
    HeatMap {
        title: "Values: predicted gain",
        caption: "The same for values, on the calibration text itself.",
        figure: |head| head.value.as_ref().map(|value| value.predicted_gain),
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
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>{}: {}</title><style>{STYLE}</style></head>\n\
         <body><main>{}{}{}{maps}</main></body></html>\n",
        report.kind.name(),
        escape(&report.path),
        header(report),
        facts(report),
        checks(report),
    )
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
    let pairs = report.facts.iter().map(|fact| (fact.name.clone(), fact.value.clone())).chain(hash);
    let rows: String =
        pairs.map(|(name, value)| format!("<dt>{}</dt><dd>{}</dd>", escape(&name), escape(&value))).collect();
    if rows.is_empty() { String::new() } else { format!("<dl>{rows}</dl>") }
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
    let cells = |tag: &str, row: &[String]| -> String {
        let cells: String = row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
        format!("<tr>{cells}</tr>")
    };
    let body: String = rows.iter().map(|row| cells("td", row)).collect();
    format!(
        "<h2>Numbers</h2><p class=\"note\">{}</p><div class=\"wide\"><table class=\"numbers\">{}{body}</table></div>",
        layers_title(report),
        cells("th", titles),
    )
}

/// Text of a file or a path, safe inside an element and an attribute.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

const STYLE: &str = "\
:root{color-scheme:light dark;--bg:#fbfbfd;--card:#fff;--ink:#1c1e26;--dim:#646b7a;--line:#e3e5ec;--ok:#14794a;--warn:#8a6100;--bad:#b3261e}\
@media(prefers-color-scheme:dark){:root{--bg:#14161c;--card:#1b1e26;--ink:#e8eaf0;--dim:#9aa1b2;--line:#2d313d;--ok:#5fd39b;--warn:#e8c15a;--bad:#ff8a80}}\
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}\
main{max-width:1120px;margin:0 auto;padding:32px 20px 64px}h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 12px}\
p{margin:0}code,dd{font-family:ui-monospace,monospace;font-size:13px;overflow-wrap:anywhere}\
header{display:flex;gap:24px;justify-content:space-between;align-items:flex-start;flex-wrap:wrap}header p{color:var(--dim)}\
.verdict{padding:10px 18px;border:1px solid;border-radius:12px;text-align:right}.verdict b{display:block;font-size:20px}\
.verdict span{font-size:13px}.verdict.ok{color:var(--ok)}.verdict.bad{color:var(--bad)}\
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 18px;margin:24px 0 0;padding:16px 20px;background:var(--card);border:1px solid var(--line);border-radius:12px}\
dt{color:var(--dim)}dd{margin:0;padding-top:1px}\
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:12px}\
table{border-collapse:collapse;width:100%}td,th{padding:8px 14px;text-align:left;vertical-align:top;border-top:1px solid var(--line);font-weight:400}\
tr:first-child td,tr:first-child th{border-top:0}.checks td:first-child{white-space:nowrap;font-weight:600}.checks td:last-child{color:var(--dim);overflow-wrap:anywhere}\
.checks th{min-width:8em}.note{color:var(--dim);font-size:13px;margin-bottom:10px}\
.numbers td,.numbers th{padding:4px 12px;text-align:right;white-space:nowrap;font-size:13px;font-variant-numeric:tabular-nums}.numbers th{color:var(--dim)}\
tr.ok td:first-child{color:var(--ok)}tr.warn td:first-child{color:var(--warn)}tr.bad td{color:var(--bad)}\
.maps{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:18px}\
figure{margin:0;padding:16px 18px;background:var(--card);border:1px solid var(--line);border-radius:12px}\
figcaption b{display:block}figcaption span{display:block;color:var(--dim);font-size:13px;margin-bottom:10px}\
svg{display:block;width:100%;height:auto}svg text{fill:var(--dim);font:10px system-ui,sans-serif}svg .axis{font-size:11px}\
svg rect.none{fill:none;stroke:var(--line)}svg rect:hover{stroke:var(--ink);stroke-width:1.5}\
.key{--lo:#e3eefb;--hi:#0b4a9e}.value{--lo:#e2f4ee;--hi:#0a6b52}.fold{--lo:#fdeedd;--hi:#a3470b}\
@media(prefers-color-scheme:dark){.key{--lo:#1d2b42;--hi:#8ec5ff}.value{--lo:#17322b;--hi:#7be3bf}.fold{--lo:#3a2617;--hi:#ffb57a}}\
.scale{display:flex;align-items:center;gap:8px;font-size:12px;color:var(--dim);margin-top:8px}\
.scale i{height:8px;width:120px;border-radius:4px;background:linear-gradient(in oklab to right,var(--lo),var(--hi))}\
@media(max-width:640px){main{padding:20px 12px 40px}.verdict{text-align:left}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:8px}\
.checks tr,.checks td,.checks th{display:block;border:0;padding:0}.checks tr{padding:8px 12px;border-top:1px solid var(--line)}.checks tr:first-child{border-top:0}}\
@media print{body{background:none}figure,.wide,dl{break-inside:avoid}}";

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
