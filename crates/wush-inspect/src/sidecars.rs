//! Sidecars against themselves and the model: shapes, conditioning, and whether the query side undoes the key side.

use wush_fold::{condition_limit, invert};
use wush_format::bundle::{FeedbackLayer, KeyLayer, KeySidecar, ValueFeedback, ValueSidecar};
use wush_format::hash::Sha;
use wush_model::spec::ModelSpec;
use wush_transform::{Role, condition_number};

use crate::extras::{Centered, Feedback, check_factors};
use crate::number::{count, digest, finite, shown, worse};
use crate::report::Report;
use crate::solver::Stored;

/// Unit roundoff of f32.
const F32_ROUNDOFF: f64 = f32::EPSILON as f64 / 2.0;

/// Largest 1-norm condition number of a key transform that f32 can hold: 0.1 / (d·u), u = 2⁻²⁴. The two stored factors miss the
/// identity by up to about 2·u·cond in norm; at this limit an attention logit may be off by 20 %, divided by d's root.
fn key_condition_limit(head_dim: usize) -> f64 {
    0.1 / (head_dim.max(1) as f64 * F32_ROUNDOFF)
}

/// What a sidecar's layers must fit: the model's spec and the hash of its weights.
#[derive(Clone, Copy)]
pub(crate) struct Model<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) hash: Option<Sha>,
}

/// Whether transforms may be inverted, and the condition number that is shown.
///
/// Shown is the condition number in the 2-norm, as everywhere in wush: 1 for an orthogonal transform. What decides is the
/// 1-norm one, up to d times larger: it bounds the error of the inverse that LU finds.
#[derive(Default)]
pub(crate) struct Conditions {
    /// The largest shown, and its layer and head.
    worst: Option<(f64, (usize, usize))>,
    /// The first that may not be inverted: 1-norm condition number, limit, layer and head.
    beyond: Option<(f64, f64, (usize, usize))>,
}

impl Conditions {
    /// Takes in one row-major `[dim, dim]` transform; its condition number, none when it is not finite.
    pub(crate) fn add(&mut self, matrix: &[f64], dim: usize, limit: f64, place: (usize, usize)) -> Option<f64> {
        let bound = invert(matrix, dim).condition;
        if bound.is_nan() || bound > limit {
            self.beyond.get_or_insert((bound, limit, place));
        }
        let shown = condition_number(matrix, dim).unwrap_or(f64::INFINITY);
        if self.worst.is_none_or(|(largest, _)| shown > largest) {
            self.worst = Some((shown, place));
        }
        finite(shown)
    }

    /// The check over all that were taken in.
    pub(crate) fn check(&self, report: &mut Report, name: &str) {
        let place = |(layer, head): (usize, usize)| format!("layer {layer}, KV head {head}");
        let detail = match (self.beyond, self.worst) {
            (Some((bound, limit, at)), _) => {
                format!("{}: 1-norm condition number {}, at most {} allowed", place(at), shown(bound), shown(limit))
            }
            (None, Some((largest, at))) => format!("condition number at most {} ({})", shown(largest), place(at)),
            (None, None) => "none".to_owned(),
        };
        report.check(name, self.beyond.is_none(), detail);
    }
}

/// Checks of a key sidecar; conditions and errors go to the report's heads.
pub(crate) fn check_key(report: &mut Report, sidecar: &KeySidecar, model: Option<Model<'_>>) {
    let shapes = sidecar.layers.iter().map(|(&layer, entry)| (layer, [entry.n_kv_heads, entry.head_dim]));
    check_fit(report, "key sidecar", shapes.collect(), sidecar.model_hash, model);
    let (mut excess, mut worst, mut conditions) = (0.0, String::new(), Conditions::default());
    for (&layer, entry) in &sidecar.layers {
        for head in 0..entry.n_kv_heads {
            let (key, query) = head_of(entry, head);
            let dim = entry.head_dim;
            let found = key_query_excess(&key, &query, dim);
            if found.is_nan() || found > excess || worst.is_empty() {
                worst = format!("layer {layer}, KV head {head}");
            }
            excess = worse(excess, found);
            let audit = report.head(layer, head);
            audit.key_query_excess = finite(found);
            audit.key_condition = conditions.add(&key, dim, key_condition_limit(dim), (layer, head));
        }
    }
    let detail = format!("largest |key·queryᵀ − I| is {} of its rounding bound ({worst})", shown(excess));
    report.check("query = key^{-T}", excess <= 1.0, detail);
    conditions.check(report, "key conditioning");
}

/// Checks of a key sidecar that is alone: what its means and feedback can be without a record of the solver.
pub(crate) fn check_key_extras(report: &mut Report, sidecar: &KeySidecar) {
    let n_centered: usize = centered(sidecar).iter().map(|layer| layer.heads.len()).sum();
    report.fact("centred keys", count(n_centered, "head"));
    check_factors(report, Role::Key, &key_feedback(sidecar));
}

/// A key sidecar's means.
pub(crate) fn centered(sidecar: &KeySidecar) -> Vec<Centered> {
    let widen = |means: &[f32]| means.iter().map(|&x| f64::from(x)).collect();
    let of_layer = |(&layer, entry): (&usize, &KeyLayer)| {
        Centered::new(layer, entry.n_kv_heads, entry.key_mean.as_deref().map(widen))
    };
    sidecar.layers.iter().map(of_layer).collect()
}

/// A key sidecar's feedback matrices.
pub(crate) fn key_feedback(sidecar: &KeySidecar) -> Vec<Feedback> {
    let of_layer = |(&layer, entry): (&usize, &KeyLayer)| {
        Some(Feedback::of_layer(layer, entry.n_kv_heads, entry.head_dim, entry.key_feedback.as_deref()?))
    };
    sidecar.layers.iter().filter_map(of_layer).flatten().collect()
}

/// The values' feedback matrices.
pub(crate) fn value_feedback(feedback: &ValueFeedback) -> Vec<Feedback> {
    let of_layer = |(&layer, entry): (&usize, &FeedbackLayer)| {
        Feedback::of_layer(layer, entry.n_kv_heads, entry.head_dim, &entry.value_feedback)
    };
    feedback.layers.iter().flat_map(of_layer).collect()
}

/// Checks of the values' feedback.
pub(crate) fn check_value_feedback(report: &mut Report, feedback: &ValueFeedback, model: Option<Model<'_>>) {
    let shapes = feedback.layers.iter().map(|(&layer, entry)| (layer, [entry.n_kv_heads, entry.head_dim]));
    check_fit(report, "value feedback", shapes.collect(), feedback.model_hash, model);
    check_factors(report, Role::Value, &value_feedback(feedback));
}

/// T_K and T_K^{-T} of one head, widened.
fn head_of(layer: &KeyLayer, head: usize) -> (Vec<f64>, Vec<f64>) {
    let n = layer.head_dim * layer.head_dim;
    let widen = |data: &[f32]| data.iter().skip(head * n).take(n).map(|&x| f64::from(x)).collect();
    (widen(&layer.key), widen(&layer.query))
}

/// Largest |key·queryᵀ − I| over its bound, elementwise.
///
/// Both factors were rounded once to f32, so each element is off by at most u of itself (u = 2⁻²⁴, or half the smallest
/// subnormal) and the product by at most 2u·(|key||queryᵀ|), to first order; 3u leaves room for the second order and for
/// the f64 inverse and product. A change of one element by a relative 10⁻⁵ of its row's size is found.
pub(crate) fn key_query_excess(key: &[f64], query: &[f64], dim: usize) -> f64 {
    let mut excess = 0.0;
    for i in 0..dim {
        let row = &key[i * dim..(i + 1) * dim];
        for j in 0..dim {
            let other = &query[j * dim..(j + 1) * dim];
            let (mut sum, mut size) = (0.0, 0.0);
            for (a, b) in row.iter().zip(other) {
                sum += a * b;
                size += (a * b).abs();
            }
            let target = if i == j { 1.0 } else { 0.0 };
            let difference = f64::abs(sum - target);
            // A NaN compares unequal to zero and makes the ratio NaN.
            let ratio = if difference == 0.0 { 0.0 } else { difference / (3.0 * F32_ROUNDOFF * size) };
            excess = worse(excess, ratio);
        }
    }
    excess
}

/// Checks of a value sidecar.
pub(crate) fn check_value(report: &mut Report, sidecar: &ValueSidecar, model: Option<Model<'_>>) {
    let shapes = sidecar.layers.iter().map(|(&layer, entry)| (layer, [entry.n_kv_heads, entry.head_dim]));
    check_fit(report, "value sidecar", shapes.collect(), sidecar.model_hash, model);
    let mut conditions = Conditions::default();
    for (&layer, entry) in &sidecar.layers {
        for head in 0..entry.n_kv_heads {
            let (matrix, dim) = (value_head(sidecar, layer, head), entry.head_dim);
            report.head(layer, head).value_condition =
                conditions.add(&matrix, dim, condition_limit(dim), (layer, head));
        }
    }
    conditions.check(report, "value transforms invertible");
}

/// All key transforms, widened.
pub(crate) fn stored_keys(sidecar: &KeySidecar) -> Vec<Stored> {
    let heads =
        sidecar.layers.iter().flat_map(|(&layer, entry)| (0..entry.n_kv_heads).map(move |head| (layer, entry, head)));
    heads
        .map(|(layer, entry, head)| Stored { layer, head, dim: entry.head_dim, matrix: head_of(entry, head).0 })
        .collect()
}

/// All value transforms, widened.
pub(crate) fn stored_values(sidecar: &ValueSidecar) -> Vec<Stored> {
    let heads =
        sidecar.layers.iter().flat_map(|(&layer, entry)| (0..entry.n_kv_heads).map(move |head| (layer, entry, head)));
    heads
        .map(|(layer, entry, head)| Stored {
            layer,
            head,
            dim: entry.head_dim,
            matrix: value_head(sidecar, layer, head),
        })
        .collect()
}

/// T_V of one head, widened; all zero when the sidecar has none, which no check takes for a transform.
pub(crate) fn value_head(sidecar: &ValueSidecar, layer: usize, head: usize) -> Vec<f64> {
    let Some(entry) = sidecar.layers.get(&layer) else { return Vec::new() };
    let n = entry.head_dim * entry.head_dim;
    entry.value.iter().skip(head * n).take(n).map(|&x| f64::from(x)).collect()
}

/// L of one value head, widened; empty when there is none.
pub(crate) fn feedback_head(feedback: &ValueFeedback, layer: usize, head: usize) -> Vec<f64> {
    let Some(entry) = feedback.layers.get(&layer) else { return Vec::new() };
    let n = entry.head_dim * entry.head_dim;
    entry.value_feedback.iter().skip(head * n).take(n).map(|&x| f64::from(x)).collect()
}

/// Layers, heads and dimensions as the model's, and the hash of its weights.
fn check_fit(report: &mut Report, name: &str, shapes: Vec<(usize, [usize; 2])>, hash: Sha, model: Option<Model<'_>>) {
    let Some(Model { spec, hash: weights }) = model else {
        report.model_hash = Some(hash);
        let n_heads: usize = shapes.iter().map(|(_, [heads, _])| heads).sum();
        let ok = !shapes.is_empty();
        return report.check(
            name,
            ok,
            format!("{} and {}, all finite", count(shapes.len(), "layer"), count(n_heads, "head")),
        );
    };
    let expected: Vec<_> =
        spec.layers.iter().map(|layer| [layer.attn.n_kv_heads, layer.attn.head_dim]).enumerate().collect();
    let result = if shapes == expected {
        Ok(format!("{}, shapes as the model's, all finite", count(shapes.len(), "layer")))
    } else {
        let differs = |at: &usize| shapes.get(*at) != expected.get(*at);
        let at = (0..shapes.len().max(expected.len())).find(differs).unwrap_or(0);
        let show = |entry: Option<&(usize, [usize; 2])>| match entry {
            Some((layer, [heads, dim])) => format!("layer {layer} with {heads} KV heads of dimension {dim}"),
            None => "no further layer".to_owned(),
        };
        Err(format!("expected {}, found {}", show(expected.get(at)), show(shapes.get(at))))
    };
    report.check_result(name, result);
    let belongs = format!("{name} belongs to the weights");
    match weights {
        Some(weights) if weights == hash => report.check(&belongs, true, format!("model hash {}", digest(&hash))),
        Some(weights) => report.check(
            &belongs,
            false,
            format!("names model {}, the weights are {}", digest(&hash), digest(&weights)),
        ),
        None => report.check(&belongs, false, "the weights could not be hashed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_orthogonal_transform_has_condition_one_and_a_singular_one_is_refused() {
        let mut conditions = Conditions::default();
        let shown = conditions.add(&[0.6, 0.8, -0.8, 0.6], 2, 100.0, (0, 0)).expect("finite");
        assert!((shown - 1.0).abs() < 1e-12, "{shown}: the 1-norm one is 1.96");
        let mut report = Report::new(std::path::Path::new("x"), crate::Kind::KeySidecar);
        conditions.check(&mut report, "conditioning");
        assert_eq!(report.checks[0].detail, "condition number at most 1.00 (layer 0, KV head 0)");
        for matrix in [[1.0, 2.0, 2.0, 4.0], [1.0, f64::NAN, 0.0, 1.0]] {
            let mut conditions = Conditions::default();
            conditions.add(&matrix, 2, 100.0, (3, 1));
            conditions.check(&mut report, "conditioning");
            let check = report.checks.last().expect("there");
            assert!(!check.ok && check.detail.starts_with("layer 3, KV head 1: "), "{check:?}");
        }
    }

    #[test]
    fn rounding_passes_and_a_small_change_does_not() {
        // T = [[1, 1/3], [0, 3]], T^{-T} = [[1, 0], [-1/9, 1/3]].
        let f32s = |values: [f64; 4]| values.map(|x| f64::from(x as f32));
        let key = f32s([1.0, 1.0 / 3.0, 0.0, 3.0]);
        let query = f32s([1.0, 0.0, -1.0 / 9.0, 1.0 / 3.0]);
        assert!(key_query_excess(&key, &query, 2) <= 1.0);
        let mut changed = query;
        changed[3] *= 1.0 + 1e-6;
        assert!(key_query_excess(&key, &changed, 2) > 1.0);
        changed[3] = f64::NAN;
        assert!(key_query_excess(&key, &changed, 2).is_nan());
    }
}
