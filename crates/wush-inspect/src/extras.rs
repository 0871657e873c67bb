//! What goes beyond the transforms themselves, mean keys and feedback matrices, against what the solver's record says: there
//! exactly when they were asked for, as long as the report says, and possible. What feedback matrices can be beyond that is
//! decided with their transforms, and not here.

use rayon::prelude::*;
use wush_checkpoint::Checkpoint;
use wush_format::manifest::LayerReport;
use wush_model::spec::ModelSpec;
use wush_transform::{Role, find};

use crate::files::list;
use crate::keys::longest_keys;
use crate::number::{count, shown};
use crate::report::Report;
use crate::solver::{REL_TOL, Record};

/// What `center_keys` of a record may be.
const CENTER_KEYS: [&str; 3] = ["never", "always", "auto"];

/// The centred keys of one layer.
pub(crate) struct Centered {
    pub(crate) layer: usize,
    /// KV heads.
    pub(crate) n_heads: usize,
    /// Whether there are means at all.
    pub(crate) has_means: bool,
    /// KV heads whose mean is not all zero, rising, and the norms of their means.
    pub(crate) heads: Vec<(usize, f64)>,
}

impl Centered {
    /// Of means `[n_kv, d]`, where there are some.
    pub(crate) fn new(layer: usize, n_heads: usize, means: Option<Vec<f64>>) -> Self {
        let has_means = means.is_some();
        let means = means.unwrap_or_default();
        let norms = means.chunks_exact((means.len() / n_heads.max(1)).max(1)).map(norm).enumerate();
        Self { layer, n_heads, has_means, heads: norms.filter(|&(_, norm)| norm != 0.0).collect() }
    }
}

/// Euclidean norm. Means are finite, and far from where their squares are not.
fn norm(vector: &[f64]) -> f64 {
    vector.iter().map(|x| x * x).sum::<f64>().sqrt()
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
pub(crate) fn check_centered(report: &mut Report, found: &[Centered], record: &Record<'_>) {
    for layer in found {
        for head in 0..layer.n_heads {
            report.head(layer.layer, head).key_centered =
                Some(layer.heads.iter().any(|&(centered, _)| centered == head));
        }
    }
    report.check_result("centred keys", centered_result(found, record));
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
    let mut of_layers = found.iter().filter_map(|layer| Some((layer, stated(layer.layer)?)));
    of_layers.try_for_each(|(layer, stated)| same_means(layer, stated))?;
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

/// The heads of a layer that have a mean, and how long the means are, against the solver's report.
fn same_means(layer: &Centered, stated: &LayerReport) -> Result<(), String> {
    let Centered { layer, heads, .. } = layer;
    let found: Vec<usize> = heads.iter().map(|&(head, _)| head).collect();
    if found != stated.centered_keys {
        return Err(format!("layer {layer}: heads {found:?}, the solver's report says {:?}", stated.centered_keys));
    }
    let norms = heads.iter().map(|&(head, norm)| (head, norm, stated.key.get(head).and_then(|key| key.mean_norm)));
    let differs = |&(_, norm, stated): &(usize, f64, Option<f64>)| {
        let same = stated.is_some_and(|stated| (norm - stated).abs() <= REL_TOL * stated);
        !same
    };
    match norms.into_iter().find(differs) {
        Some((head, norm, stated)) => {
            let (norm, stated) = (shown(norm), stated.map_or("nothing".to_owned(), shown));
            Err(format!("layer {layer}, KV head {head}: a mean of norm {norm}, the solver's report says {stated}"))
        }
        None => Ok(()),
    }
}

/// Every mean is at most as long as the longest key that the weights can make.
pub(crate) fn check_means(report: &mut Report, found: &[Centered], checkpoint: &Checkpoint, spec: &ModelSpec) {
    let problem = |layer: &Centered| {
        let longest = longest_keys(checkpoint, spec.layers.get(layer.layer)?);
        let longest = match longest {
            Ok(longest) => longest,
            Err(error) => return Some(error.to_string()),
        };
        let beyond = |&&(head, norm): &&(usize, f64)| longest.get(head).is_none_or(|&longest| norm > longest);
        let (head, norm) = layer.heads.iter().find(beyond)?;
        let (norm, most) = (shown(*norm), shown(longest.get(*head).copied().unwrap_or(0.0)));
        Some(format!("layer {}, KV head {head}: a mean of norm {norm}, and no key is longer than {most}", layer.layer))
    };
    let n_centered: usize = found.iter().map(|layer| layer.heads.len()).sum();
    if n_centered == 0 {
        return;
    }
    let problems: Vec<String> = found.par_iter().filter_map(problem).collect();
    let good = format!("{}, none longer than the longest key that its weights can make", count(n_centered, "mean"));
    report.check("mean keys", problems.is_empty(), if problems.is_empty() { good } else { list(&problems) });
}

/// Feedback is there exactly when the record says so, and is what [`check_factors`] asks.
pub(crate) fn check_feedback(report: &mut Report, role: Role, found: &[Feedback], record: &Record<'_>) {
    let wanted = record.solve.feedback;
    if found.is_empty() != wanted {
        return check_elements(report, role, found, |at| largest_element(record, role, at));
    }
    let state = if wanted { "asked for, and not there" } else { "there, and not asked for" };
    report.check(check_name(role), false, state);
}

/// Every feedback matrix is unit lower triangular, and no element beyond what any metric's factor has; no check without any.
pub(crate) fn check_factors(report: &mut Report, role: Role, found: &[Feedback]) {
    check_elements(report, role, found, |_| MAX_ELEMENT);
}

/// With L_ij² D_j a part of G_ii, and D_j at least G's smallest eigenvalue, |L_ij| is at most cond(G)^½; beyond a condition number
/// of 2⁵² f64 factors nothing.
const MAX_ELEMENT: f64 = (1u64 << 26) as f64;

/// What the report's figures allow: cond(G) is cond(Λ)^{2p} in Eq. 1's family, and cond(Λ) at most cond(H') cond(M'); and cond(H')
/// where T is orthogonal.
fn largest_element(record: &Record<'_>, role: Role, Feedback { layer, head, .. }: &Feedback) -> f64 {
    let (Ok(kind), Some(stated)) = (find(&record.solve.transform), record.head(role, *layer, *head)) else {
        return MAX_ELEMENT;
    };
    let bound = match kind.is_orthogonal {
        true => stated.cond_hessian.sqrt(),
        false => (stated.cond_gram * stated.cond_hessian).powf(record.solve.exponent),
    };
    // NaN is no bound.
    (bound * (1.0 + REL_TOL)).min(MAX_ELEMENT)
}

fn check_elements(report: &mut Report, role: Role, found: &[Feedback], most: impl Fn(&Feedback) -> f64) {
    if found.is_empty() {
        return;
    }
    let problems: Vec<String> = found.iter().filter_map(|feedback| not_unit_lower(feedback, most(feedback))).collect();
    let good = format!("{}, unit lower triangular", count(found.len(), "head"));
    report.check(check_name(role), problems.is_empty(), if problems.is_empty() { good } else { list(&problems) });
}

fn check_name(role: Role) -> &'static str {
    match role {
        Role::Key => "key feedback",
        Role::Value => "value feedback matrices",
    }
}

fn not_unit_lower(feedback: &Feedback, most: f64) -> Option<String> {
    let Feedback { layer, head, dim, matrix } = feedback;
    let fits = |(at, &x): (usize, &f64)| match (at / dim).cmp(&(at % dim)) {
        std::cmp::Ordering::Less => x == 0.0,
        std::cmp::Ordering::Equal => x == 1.0,
        std::cmp::Ordering::Greater => x.abs() <= most,
    };
    let at = matrix.iter().enumerate().position(|element| !fits(element))?;
    let (row, col, found) = (at / dim, at % dim, matrix[at]);
    let bound = if row > col { format!(", at most {} is possible", shown(most)) } else { String::new() };
    Some(format!("layer {layer}, KV head {head}: element [{row}, {col}] is {found}{bound}"))
}
