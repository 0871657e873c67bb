//! A self-contained HTML page and its pieces: no script, no font, no picture from elsewhere; light or dark as the reader's
//! system is. Knows nothing of what stands on it.

/// A page of a title and a body, which is HTML already.
pub fn page(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>{}</title><style>{STYLE}</style></head>\n\
         <body><main>{body}</main></body></html>\n",
        escape(title),
    )
}

/// Names with their values; nothing of none.
pub fn pair_list(pairs: &[(String, String)]) -> String {
    let row = |(name, value): &(String, String)| format!("<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
    let rows: String = pairs.iter().map(row).collect();
    if rows.is_empty() { String::new() } else { format!("<dl>{rows}</dl>") }
}

/// A table of numbers below their titles.
pub fn number_table(titles: &[String], rows: &[Vec<String>]) -> String {
    let cells = |tag: &str, row: &[String]| -> String {
        let cells: String = row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
        format!("<tr>{cells}</tr>")
    };
    let body: String = rows.iter().map(|row| cells("td", row)).collect();
    format!("<div class=\"wide\"><table class=\"numbers\">{}{body}</table></div>", cells("th", titles))
}

/// Charts side by side, each an `<svg>`.
pub fn charts(svgs: &[String]) -> String {
    let figures: String = svgs.iter().map(|svg| format!("<figure>{svg}</figure>")).collect();
    if figures.is_empty() { String::new() } else { format!("<div class=\"charts\">{figures}</div>") }
}

/// Text of a file or a path, safe inside an element and an attribute.
pub fn escape(text: &str) -> String {
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
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:18px}.charts svg text{font-size:12px}\
@media print{body{background:none}figure,.wide,dl{break-inside:avoid}}";
