//! Sidecars against themselves and the model: shapes, conditioning, and whether the query side undoes the key side.

use wush_fold::{condition_limit, invert};
use wush_format::bundle::{KeyLayer, KeySidecar, ValueSidecar};
use wush_format::hash::Sha;
use wush_model::spec::ModelSpec;

use crate::number::{count, finite, shown, worse};
use crate::report::Report;

/// Unit roundoff of f32.
const F32_ROUNDOFF: f64 = f32::EPSILON as f64 / 2.0;

/// Largest condition number of a key transform that f32 can hold: 0.1 / (d·u), u = 2⁻²⁴. The two stored factors miss the
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

/// Checks of a key sidecar; conditions and errors go to the report's heads.
pub(crate) fn check_key(report: &mut Report, sidecar: &KeySidecar, model: Option<Model<'_>>) {
    let shapes = sidecar.layers.iter().map(|(&layer, entry)| (layer, [entry.n_kv_heads, entry.head_dim]));
    check_fit(report, "key sidecar", shapes.collect(), sidecar.model_hash, model);
    let (mut excess, mut condition, mut worst, mut worst_cond) = (0.0, 0.0, String::new(), String::new());
    let mut within = true;
    for (&layer, entry) in &sidecar.layers {
        for head in 0..entry.n_kv_heads {
            let (key, query) = head_of(entry, head);
            let (dim, place) = (entry.head_dim, format!("layer {layer}, KV head {head}"));
            let found = key_query_excess(&key, &query, dim);
            let cond = invert(&key, dim).condition;
            if found.is_nan() || found > excess || worst.is_empty() {
                worst = place.clone();
            }
            if cond.is_nan() || cond > condition || worst_cond.is_empty() {
                worst_cond = place;
            }
            (excess, condition) = (worse(excess, found), worse(condition, cond));
            within &= cond <= key_condition_limit(dim);
            let audit = report.head(layer, head);
            audit.key_query_excess = finite(found);
            audit.key_condition = finite(cond);
        }
    }
    let detail = format!("largest |key·queryᵀ − I| is {} of its rounding bound ({worst})", shown(excess));
    report.check("query = key^{-T}", excess <= 1.0, detail);
    report.check("key conditioning", within, format!("condition number at most {} ({worst_cond})", shown(condition)));
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
    let (mut condition, mut worst, mut within) = (0.0, String::new(), true);
    for &layer in sidecar.layers.keys() {
        let entry = &sidecar.layers[&layer];
        for head in 0..entry.n_kv_heads {
            let found = invert(&value_head(sidecar, layer, head), entry.head_dim).condition;
            if found.is_nan() || found > condition || worst.is_empty() {
                worst = format!("layer {layer}, KV head {head}");
            }
            condition = worse(condition, found);
            within &= found <= condition_limit(entry.head_dim);
            report.head(layer, head).value_condition = finite(found);
        }
    }
    report.check(
        "value transforms invertible",
        within,
        format!("condition number at most {} ({worst})", shown(condition)),
    );
}

/// T_V of one head, widened; all zero when the sidecar has none, which no check takes for a transform.
pub(crate) fn value_head(sidecar: &ValueSidecar, layer: usize, head: usize) -> Vec<f64> {
    let Some(entry) = sidecar.layers.get(&layer) else { return Vec::new() };
    let n = entry.head_dim * entry.head_dim;
    entry.value.iter().skip(head * n).take(n).map(|&x| f64::from(x)).collect()
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
        Some(weights) if weights == hash => report.check(&belongs, true, format!("model hash {hash}")),
        Some(weights) => report.check(&belongs, false, format!("names model {hash}, the weights are {weights}")),
        None => report.check(&belongs, false, "the weights could not be hashed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
