//! What a bundle holds for the runtime: the key sidecar and its two products, `T_K (k − μ)` for new keys and `T_K^{-T} q` for
//! queries, both after RoPE (Algorithm 2, line 3), and the encoder's feedback. Enters: batches `[tokens, heads, d]`, f32. Leaves:
//! the same, in place.

use std::collections::BTreeMap;
use std::path::Path;

use wush_format::bundle::{KeyLayer, KeySidecar};
use wush_format::hash::Sha;
use wush_format::sidecars::Sidecars;
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
    hash: Sha,
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
        let sidecar = KeySidecar::load(path)?;
        if sidecar.model_hash != model_hash {
            return Err(RuntimeError::OtherModel {
                path: path.to_owned(),
                expected: model_hash,
                found: sidecar.model_hash,
            });
        }
        Self::from_sidecar(path, &sidecar)
    }

    /// The transforms of a bundle, whose manifest names the weights that they must belong to. The weights themselves are not
    /// read: `wush inspect` does that.
    ///
    /// # Errors
    /// `Format`, also for sidecars that do not fit the bundle's manifest ([`Sidecars::load`]); as [`KeyTransforms::from_sidecar`].
    pub fn of_bundle(bundle: &Path) -> Result<Self> {
        let sidecars = Sidecars::load(bundle)?;
        Self::from_sidecar(&sidecars.key_path(), &sidecars.keys)
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
        Ok(Self { layers, model_hash: sidecar.model_hash, hash: sidecar.content_hash() })
    }

    /// Hash of the weights that they belong to: [`CacheConfig::model_hash`] of a cache of theirs.
    pub fn model_hash(&self) -> Sha {
        self.model_hash
    }

    /// Hash over the matrices and mean keys: [`CacheConfig::key_transforms`] of a cache of theirs.
    pub fn hash(&self) -> Sha {
        self.hash
    }

    /// Layers that have transforms, rising.
    pub fn layers(&self) -> impl Iterator<Item = usize> {
        self.layers.keys().copied()
    }

    /// Whether a layer has transforms.
    pub fn has(&self, layer: usize) -> bool {
        self.layers.contains_key(&layer)
    }

    /// Checks that a cache has these layers with these heads, and no others: keys that are cached as they are beside queries that
    /// are transformed give another softmax, and the reverse.
    ///
    /// # Errors
    /// `NoLayer`, `OtherHeads`, `NoTransforms`; `OtherTransforms` where the configuration names others.
    pub fn check(&self, config: &CacheConfig) -> Result<()> {
        let mut layers = self.layers.iter();
        layers.try_for_each(|(&layer, entry)| check_heads(config, layer, (entry.n_kv_heads, entry.head_dim)))?;
        (0..config.layers.len()).try_for_each(|layer| self.layer(layer).map(drop))?;
        match config.key_transforms {
            Some(expected) if expected != self.hash => {
                Err(RuntimeError::OtherTransforms { expected, found: self.hash })
            }
            _ => Ok(()),
        }
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
    /// An empty cache of a bundle's model, with all that the bundle has for it: key transforms, which the caller applies, and the
    /// encoder's feedback. `config.model_hash`: of the weights in use; where it is none, the manifest is believed.
    ///
    /// # Errors
    /// `Config`; `Format`, also for sidecars that do not fit the bundle's manifest or this model ([`Sidecars`]); as
    /// [`KeyTransforms::from_sidecar`] and [`KvCache::set_feedback`].
    pub fn of_bundle(config: CacheConfig, bundle: &Path) -> Result<(Self, KeyTransforms)> {
        let sidecars = Sidecars::load(bundle)?;
        let model_hash = config.model_hash.unwrap_or(sidecars.manifest.basis.model_hash);
        let mut cache = Self::new(CacheConfig { model_hash: Some(model_hash), ..config })?;
        cache.set_feedback_of(&sidecars)?;
        let transforms = KeyTransforms::from_sidecar(&sidecars.key_path(), &sidecars.keys)?;
        cache.set_transforms(&transforms)?;
        Ok((cache, transforms))
    }

    /// Says that all keys go through these transforms before they are appended: saved caches of others are refused from now on.
    ///
    /// # Errors
    /// As [`KeyTransforms::check`].
    pub fn set_transforms(&mut self, transforms: &KeyTransforms) -> Result<()> {
        transforms.check(&self.config)?;
        self.config.key_transforms = Some(transforms.hash);
        Ok(())
    }

    /// Gives the encoder the feedback matrices of a bundle, where it has some: see [`KvCache::set_feedback`]. Returns whether
    /// it has.
    ///
    /// # Errors
    /// `Format`, also for sidecars that do not fit the bundle's manifest or this cache's layers ([`Sidecars`]); `Quant` for a matrix
    /// that is not unit lower triangular, or has elements that no metric's factor has. Layers before the one at fault have their
    /// matrices then.
    pub fn set_feedback_of_bundle(&mut self, bundle: &Path) -> Result<bool> {
        self.set_feedback_of(&Sidecars::load(bundle)?)
    }

    fn set_feedback_of(&mut self, sidecars: &Sidecars) -> Result<bool> {
        let heads: Vec<_> = self.config.layers.iter().map(|layer| (layer.n_kv_heads, layer.head_dim)).collect();
        let model_hash = self.config.model_hash.unwrap_or(sidecars.manifest.basis.model_hash);
        sidecars.check_model(model_hash, &heads)?;
        let Some(values) = &sidecars.values else { return Ok(false) };
        for (&layer, entry) in &values.layers {
            let of_keys = sidecars.keys.layers.get(&layer).and_then(|entry| entry.key_feedback.as_deref());
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
