//! What a bundle holds for the runtime: the key sidecar and its two products, `T_K (k − μ)` for new keys and `T_K^{-T} q` for
//! queries, both after RoPE (Algorithm 2, line 3), and the encoder's feedback. Enters: batches `[tokens, heads, d]`, f32. Leaves:
//! the same, in place.

use std::collections::BTreeMap;
use std::path::Path;

use wush_format::bundle::{KEY_TRANSFORMS, KeyLayer, KeySidecar, MANIFEST, VALUE_FEEDBACK, ValueFeedback, WUSH_DIR};
use wush_format::hash::Sha;
use wush_format::manifest::Manifest;
use wush_quant::MAX_MAGNITUDE;

use crate::cache::check_length;
use crate::config::CacheConfig;
use crate::{KvCache, Result, RuntimeError, kernels, threads};

/// Tokens whose keys or queries of one head are gathered at a time.
const BLOCK_TOKENS: usize = 64;

/// The key transforms of a model.
#[derive(Debug, Clone)]
pub struct KeyTransforms {
    layers: BTreeMap<usize, LayerTransforms>,
    model_hash: Sha,
}

#[derive(Debug, Clone)]
struct LayerTransforms {
    n_kv_heads: usize,
    head_dim: usize,
    /// `T_K`, `[n_kv, d, d]` row-major.
    key: Vec<f32>,
    /// `T_K^{-T}`.
    query: Vec<f32>,
    /// μ, `[n_kv, d]`, where keys are centred.
    mean: Option<Vec<f32>>,
}

impl KeyTransforms {
    /// Reads a bundle's `wush/key_transforms.safetensors`.
    ///
    /// `model_hash`: of the folded model's weights, as the bundle's manifest states it (`wush_format::manifest`).
    ///
    /// # Errors
    /// `Format`; `OtherModel`; `NotInverse` when queries would not undo what keys got; `Mean` for a mean key that is no key.
    pub fn load(path: &Path, model_hash: Sha) -> Result<Self> {
        Self::from_sidecar(path, &load_sidecar(path, model_hash)?)
    }

    /// The transforms of a bundle, whose manifest names the weights that they must belong to. The weights themselves are not
    /// read: `wush inspect` does that.
    ///
    /// # Errors
    /// As [`KeyTransforms::load`].
    pub fn of_bundle(bundle: &Path) -> Result<Self> {
        let folder = bundle.join(WUSH_DIR);
        let manifest = Manifest::load(&folder.join(MANIFEST))?;
        Self::load(&folder.join(KEY_TRANSFORMS), manifest.basis.model_hash)
    }

    /// From a sidecar that is read already; `path` is what messages call it.
    ///
    /// # Errors
    /// `NotInverse`; `Mean`, `Length` for mean keys that are no keys.
    pub fn from_sidecar(path: &Path, sidecar: &KeySidecar) -> Result<Self> {
        let mut layers = BTreeMap::new();
        for (&layer, entry) in &sidecar.layers {
            check_inverse(path, layer, entry)?;
            check_means(path, layer, entry)?;
            layers.insert(layer, LayerTransforms::new(entry));
        }
        Ok(Self { layers, model_hash: sidecar.model_hash })
    }

    /// Hash of the weights that they belong to: [`CacheConfig::model_hash`] of a cache of theirs.
    pub fn model_hash(&self) -> Sha {
        self.model_hash
    }

    /// Layers that have transforms, rising.
    pub fn layers(&self) -> impl Iterator<Item = usize> {
        self.layers.keys().copied()
    }

    /// Whether a layer has transforms.
    pub fn has(&self, layer: usize) -> bool {
        self.layers.contains_key(&layer)
    }

    /// Checks that a cache has these layers with these heads.
    ///
    /// # Errors
    /// `NoLayer`, `OtherHeads`.
    pub fn check(&self, config: &CacheConfig) -> Result<()> {
        let mut layers = self.layers.iter();
        layers.try_for_each(|(&layer, entry)| check_heads(config, layer, (entry.n_kv_heads, entry.head_dim)))
    }

    /// `T_K (k − μ)` in place; `keys`: `[tokens, n_kv, d]`, after RoPE. Sums in f32.
    ///
    /// # Errors
    /// `NoTransforms`; `Length` unless whole tokens are given.
    pub fn transform_keys(&self, layer: usize, keys: &mut [f32]) -> Result<()> {
        let entry = self.layer(layer)?;
        let width = entry.n_kv_heads * entry.head_dim;
        check_length(layer, "keys [tokens, KV heads, head dimension]", keys.len() / width * width, keys.len())?;
        if let Some(mean) = &entry.mean {
            // Before the product: what is left of a key is small beside its mean, and would drown in the sums' rounding.
            keys.chunks_exact_mut(width).for_each(|key| key.iter_mut().zip(mean).for_each(|(k, m)| *k -= m));
        }
        entry.apply(&entry.key, keys, width);
        Ok(())
    }

    /// `T_K^{-T} q` in place; `queries`: `[tokens, n_heads, d]`, after RoPE. Query head n takes KV head
    /// `n / (n_heads / n_kv)`'s matrix. Sums in f32.
    ///
    /// # Errors
    /// `NoTransforms`; `Length` unless whole tokens of whole groups are given.
    pub fn transform_queries(&self, layer: usize, n_heads: usize, queries: &mut [f32]) -> Result<()> {
        let entry = self.layer(layer)?;
        let group = (n_heads / entry.n_kv_heads).max(1);
        let width = group * entry.n_kv_heads * entry.head_dim;
        check_length(layer, "heads of queries", group * entry.n_kv_heads, n_heads)?;
        check_length(layer, "queries [tokens, heads, head dimension]", queries.len() / width * width, queries.len())?;
        entry.apply(&entry.query, queries, width);
        Ok(())
    }

    fn layer(&self, layer: usize) -> Result<&LayerTransforms> {
        self.layers.get(&layer).ok_or(RuntimeError::NoTransforms { layer })
    }
}

impl KvCache {
    /// Gives the encoder the feedback matrices of a bundle, where it has some: see [`KvCache::set_feedback`]. Returns whether
    /// it has.
    ///
    /// # Errors
    /// `Format`; `OtherModel` for files of other weights than the manifest's; `NoLayer`, `OtherHeads`; `Quant` for a matrix that
    /// is not unit lower triangular, or has elements that no metric's factor has. Layers before the one at fault have their matrices then.
    pub fn set_feedback_of_bundle(&mut self, bundle: &Path) -> Result<bool> {
        let folder = bundle.join(WUSH_DIR);
        let path = folder.join(VALUE_FEEDBACK);
        if !path.exists() {
            return Ok(false);
        }
        let hash = Manifest::load(&folder.join(MANIFEST))?.basis.model_hash;
        let values = ValueFeedback::load(&path)?;
        check_model(&path, hash, values.model_hash)?;
        let keys = load_sidecar(&folder.join(KEY_TRANSFORMS), hash)?;
        for (&layer, entry) in &values.layers {
            check_heads(self.config(), layer, (entry.n_kv_heads, entry.head_dim))?;
            let of_keys = keys.layers.get(&layer).and_then(|entry| entry.key_feedback.as_deref());
            self.set_feedback(layer, of_keys, Some(&entry.value_feedback))?;
        }
        Ok(true)
    }
}

impl LayerTransforms {
    fn new(entry: &KeyLayer) -> Self {
        Self {
            n_kv_heads: entry.n_kv_heads,
            head_dim: entry.head_dim,
            key: entry.key.clone(),
            query: entry.query.clone(),
            mean: entry.key_mean.clone(),
        }
    }

    /// Every vector of KV head h's group becomes `matrices[h]` times it. `x`: `[tokens, width]`, width a multiple of n_kv d.
    fn apply(&self, matrices: &[f32], x: &mut [f32], width: usize) {
        let (d, per_head) = (self.head_dim, width / self.n_kv_heads);
        for x in x.chunks_mut(BLOCK_TOKENS * width) {
            let read = &*x;
            let of_heads = threads::map(self.n_kv_heads, |head| {
                let tokens = read.chunks_exact(width);
                let rows: Vec<f32> = tokens.flat_map(|token| &token[head * per_head..][..per_head]).copied().collect();
                let mut product = vec![0.0; rows.len()];
                kernels::dot(&rows, &matrices[head * d * d..][..d * d], d, &mut product);
                product
            });
            for (head, product) in of_heads.iter().enumerate() {
                for (token, product) in x.chunks_exact_mut(width).zip(product.chunks_exact(per_head)) {
                    token[head * per_head..][..per_head].copy_from_slice(product);
                }
            }
        }
    }
}

fn load_sidecar(path: &Path, model_hash: Sha) -> Result<KeySidecar> {
    let sidecar = KeySidecar::load(path)?;
    check_model(path, model_hash, sidecar.model_hash)?;
    Ok(sidecar)
}

fn check_model(path: &Path, expected: Sha, found: Sha) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(RuntimeError::OtherModel { path: path.to_owned(), expected, found })
}

/// `(KV heads, head dimension)` of a file against the cache's.
fn check_heads(config: &CacheConfig, layer: usize, found: (usize, usize)) -> Result<()> {
    let last = config.layers.len().saturating_sub(1);
    let of_cache = config.layers.get(layer).ok_or(RuntimeError::NoLayer { layer, last })?;
    let expected = (of_cache.n_kv_heads, of_cache.head_dim);
    if expected == found { Ok(()) } else { Err(RuntimeError::OtherHeads { layer, expected, found }) }
}

/// Refuses a head whose `key · queryᵀ` is not the identity within the rounding of both.
fn check_inverse(path: &Path, layer: usize, entry: &KeyLayer) -> Result<()> {
    let size = entry.head_dim * entry.head_dim;
    let excess = threads::map(entry.n_kv_heads, |head| {
        let of_head =
            |matrices: &[f32]| matrices[head * size..][..size].iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        inverse_excess(&of_head(&entry.key), &of_head(&entry.query), entry.head_dim)
    });
    match excess.iter().position(|&excess| excess > 1.0 || excess.is_nan()) {
        Some(head) => Err(RuntimeError::NotInverse { path: path.to_owned(), layer, head, excess: excess[head] }),
        None => Ok(()),
    }
}

/// Refuses a mean key that could not be a key itself, as it is or transformed: no key less it would be cached.
fn check_means(path: &Path, layer: usize, entry: &KeyLayer) -> Result<()> {
    let Some(means) = &entry.key_mean else { return Ok(()) };
    let d = entry.head_dim;
    check_length(layer, "mean keys [KV heads, head dimension]", entry.n_kv_heads * d, means.len())?;
    let fits = |x: f64| x.abs() <= f64::from(MAX_MAGNITUDE);
    let heads = means.chunks_exact(d).zip(entry.key.chunks_exact(d * d)).enumerate();
    for (head, (mean, key)) in heads {
        let dot = |row: &[f32]| row.iter().zip(mean).map(|(t, m)| f64::from(*t) * f64::from(*m)).sum::<f64>();
        let plain = mean.iter().map(|&x| ("the mean key", f64::from(x)));
        let transformed = key.chunks_exact(d).map(|row| ("the transformed mean key", dot(row)));
        let beyond = plain.chain(transformed).enumerate().find(|&(_, (_, value))| !fits(value));
        if let Some((at, (what, value))) = beyond {
            let path = path.to_owned();
            return Err(RuntimeError::Mean { path, layer, head, what, coordinate: at % d, value });
        }
    }
    Ok(())
}

/// Largest `|Σ_k key_ik query_jk − δ_ij|` over its bound `3u Σ_k |key_ik query_jk|`, u = 2⁻²⁴: both matrices were rounded once
/// to f32, so to first order the sum is off by at most 2u of its terms; the third u leaves room for the second order and
/// for the f64 inverse that was rounded.
fn inverse_excess(key: &[f64], query: &[f64], d: usize) -> f64 {
    const LANES: usize = 8;
    const BOUND: f64 = 1.5 * f32::EPSILON as f64;
    let mut excess = 0.0;
    for (i, row) in key.chunks_exact(d).enumerate() {
        for (j, other) in query.chunks_exact(d).enumerate() {
            let (mut sums, mut sizes) = ([0.0; LANES], [0.0; LANES]);
            for (a, b) in row.chunks(LANES).zip(other.chunks(LANES)) {
                for ((sum, size), (a, b)) in sums.iter_mut().zip(&mut sizes).zip(a.iter().zip(b)) {
                    *sum += a * b;
                    *size += f64::abs(a * b);
                }
            }
            let target = if i == j { 1.0 } else { 0.0 };
            let difference = f64::abs(sums.iter().sum::<f64>() - target);
            let ratio = difference / (BOUND * sizes.iter().sum::<f64>()).max(f64::MIN_POSITIVE);
            if ratio > excess || ratio.is_nan() {
                excess = ratio;
            }
        }
    }
    excess
}
