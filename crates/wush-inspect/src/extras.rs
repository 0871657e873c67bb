//! What goes beyond the transforms themselves, mean keys and feedback matrices, against what the solver's record says.
//! What they should be takes the statistics; here they are held to be possible, and to be there exactly when they were
//! asked for.

use wush_transform::Role;

use crate::files::list;
use crate::number::count;
use crate::report::Report;
use crate::solver::Record;

/// What `center_keys` of a record may be.
const CENTER_KEYS: [&str; 3] = ["never", "always", "auto"];

/// The centred keys of one layer.
pub(crate) struct Centered {
    pub(crate) layer: usize,
    /// KV heads.
    pub(crate) n_heads: usize,
    /// Whether there are means at all.
    pub(crate) has_means: bool,
    /// KV heads whose mean is not all zero.
    pub(crate) heads: Vec<usize>,
}

/// One head's feedback matrix, widened.
pub(crate) struct Feedback {
    pub(crate) layer: usize,
    pub(crate) head: usize,
    pub(crate) dim: usize,
    /// Row-major `[dim, dim]`.
    pub(crate) matrix: Vec<f64>,
}

impl Feedback {
    /// All heads of a layer, `[n_kv, d, d]` f32.
    pub(crate) fn of_layer(layer: usize, n_heads: usize, dim: usize, data: &[f32]) -> Vec<Self> {
        let widen = |head: usize| data.iter().skip(head * dim * dim).take(dim * dim).map(|&x| f64::from(x)).collect();
        (0..n_heads).map(|head| Self { layer, head, dim, matrix: widen(head) }).collect()
    }
}

/// Means are there unless no key is to be centred; the heads that have one are those of the solver's report, and all where
/// every key is to be centred.
pub(crate) fn check_centered(report: &mut Report, found: Vec<Centered>, record: &Record<'_>) {
    for layer in &found {
        for head in 0..layer.n_heads {
            report.head(layer.layer, head).key_centered = Some(layer.heads.contains(&head));
        }
    }
    report.check_result("centred keys", centered_result(&found, record));
}

fn centered_result(found: &[Centered], record: &Record<'_>) -> Result<String, String> {
    let rule = record.solve.center_keys.as_str();
    if !CENTER_KEYS.contains(&rule) {
        return Err(format!("expected center_keys to be {}, found {rule:?}", CENTER_KEYS.join(", ")));
    }
    let wanted = rule != "never";
    if let Some(layer) = found.iter().find(|layer| layer.has_means != wanted) {
        let (layer, state) = (layer.layer, if wanted { "no means" } else { "means" });
        return Err(format!("layer {layer} has {state}, center_keys is {rule}"));
    }
    let stated = |layer: usize| record.layers.iter().find(|report| report.layer == layer);
    let differs = |layer: &&Centered| stated(layer.layer).is_some_and(|report| report.centered_keys != layer.heads);
    if let Some(layer) = found.iter().find(differs) {
        let stated = stated(layer.layer).map_or(&[][..], |report| &report.centered_keys);
        return Err(format!("layer {}: heads {:?}, the solver's report says {stated:?}", layer.layer, layer.heads));
    }
    if wanted && record.layers.is_empty() {
        return Err("there are means, and no statistics that they could be of".to_owned());
    }
    if rule == "always" && found.iter().any(|layer| layer.heads.len() != layer.n_heads) {
        return Err("every head is to be centred, and some have no mean".to_owned());
    }
    let n_heads: usize = found.iter().map(|layer| layer.n_heads).sum();
    let n_centered: usize = found.iter().map(|layer| layer.heads.len()).sum();
    Ok(if wanted { format!("{rule}: {n_centered} of {}", count(n_heads, "head")) } else { "never".to_owned() })
}

/// Feedback is there exactly when the record says so, and is what [`check_factors`] asks.
pub(crate) fn check_feedback(report: &mut Report, role: Role, found: &[Feedback], record: &Record<'_>) {
    let wanted = record.solve.feedback;
    if found.is_empty() != wanted {
        return check_factors(report, role, found);
    }
    let state = if wanted { "asked for, and not there" } else { "there, and not asked for" };
    report.check(check_name(role), false, state);
}

/// Every feedback matrix is unit lower triangular; no check without any.
pub(crate) fn check_factors(report: &mut Report, role: Role, found: &[Feedback]) {
    if found.is_empty() {
        return;
    }
    let problems: Vec<String> = found.iter().filter_map(not_unit_lower).collect();
    let good = format!("{}, unit lower triangular", count(found.len(), "head"));
    report.check(check_name(role), problems.is_empty(), if problems.is_empty() { good } else { list(&problems) });
}

fn check_name(role: Role) -> &'static str {
    match role {
        Role::Key => "key feedback",
        Role::Value => "value feedback matrices",
    }
}

fn not_unit_lower(feedback: &Feedback) -> Option<String> {
    let Feedback { layer, head, dim, matrix } = feedback;
    let fits = |(at, &x): (usize, &f64)| match (at / dim).cmp(&(at % dim)) {
        std::cmp::Ordering::Less => x == 0.0,
        std::cmp::Ordering::Equal => x == 1.0,
        std::cmp::Ordering::Greater => x.is_finite(),
    };
    let at = matrix.iter().enumerate().position(|element| !fits(element))?;
    Some(format!("layer {layer}, KV head {head}: element [{}, {}] is {}", at / dim, at % dim, matrix[at]))
}
