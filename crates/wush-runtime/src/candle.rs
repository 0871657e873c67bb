//! The cache for models written with candle: tensors in and out. Enters: queries, keys and values after RoPE, as candle's
//! models have them. Leaves: what their own attention would have computed. Computes on the CPU, whatever the tensors' device.

use candle_core::{DType, Tensor};

use crate::{CacheConfig, Chunk, KeyTransforms, KvCache, Part, Result, RuntimeError, SequenceId};

/// The cache of a candle model: a batch of sequences that grow together. Stands in for the model's concatenated keys and values
/// and for the attention over them.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use wush_runtime::{CacheConfig, LayerConfig, candle::BatchCache};
///
/// let mut cache = BatchCache::new(CacheConfig::new(vec![LayerConfig::new(4, 2, 16)]), None, 1)?;
/// // In a model's attention, after RoPE: [batch, heads, tokens, head dimension].
/// let q = Tensor::randn(0f32, 1., (1, 4, 5, 16), &Device::Cpu)?;
/// let kv = Tensor::randn(0f32, 1., (1, 2, 5, 16), &Device::Cpu)?;
/// let attended = cache.attend(0, &q, &kv, &kv)?;
/// assert_eq!(attended.dims(), [1, 4, 5, 16]);
/// assert_eq!(cache.len(0)?, 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct BatchCache {
    cache: KvCache,
    transforms: Option<KeyTransforms>,
    sequences: Vec<SequenceId>,
}

impl BatchCache {
    /// For `batch` sequences; with key transforms where the model is a bundle whose keys are to be quantized.
    ///
    /// # Errors
    /// `Config`; `NoLayer`, `OtherHeads` for transforms of another model.
    pub fn new(config: CacheConfig, transforms: Option<KeyTransforms>, batch: usize) -> Result<Self> {
        Self::over(KvCache::new(config)?, transforms, batch)
    }

    /// The same over a cache that was made before: one that has a bundle's error feedback
    /// ([`KvCache::set_feedback_of_bundle`]), or was loaded. Its own sequences stay in it, apart.
    ///
    /// # Errors
    /// `NoLayer`, `OtherHeads` for transforms of another model.
    pub fn over(mut cache: KvCache, transforms: Option<KeyTransforms>, batch: usize) -> Result<Self> {
        if let Some(transforms) = &transforms {
            cache.set_transforms(transforms)?;
        }
        let sequences = (0..batch).map(|_| cache.add()).collect();
        Ok(Self { cache, transforms, sequences })
    }

    /// Algorithm 2, lines 3 to 12: appends keys and values `[batch, n_kv_heads, tokens, d]` and attends with `queries`,
    /// `[batch, n_heads, tokens, d]`, causally. The result has the queries' shape, dtype and device. No mask and no repeated
    /// keys: neither is needed.
    ///
    /// # Errors
    /// `NoLayer`, `Shape`; `Candle` when a tensor cannot be read; as [`KvCache::step`].
    pub fn attend(&mut self, layer: usize, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Tensor> {
        let (batch, _, n_tokens, _) = queries.dims4()?;
        let last = self.cache.config().layers.len() - 1;
        let config = self.cache.config().layers.get(layer).ok_or(RuntimeError::NoLayer { layer, last })?;
        let (n_heads, n_kv_heads, d) = (config.n_heads, config.n_kv_heads, config.head_dim);
        for (what, tensor, heads) in
            [("queries", queries, n_heads), ("keys", keys, n_kv_heads), ("values", values, n_kv_heads)]
        {
            check_shape(layer, what, [self.sequences.len(), heads, n_tokens, d], tensor)?;
        }
        let [mut q, mut k, v] = [rows(queries)?, rows(keys)?, rows(values)?];
        if let Some(transforms) = self.transforms.as_ref().filter(|transforms| transforms.has(layer)) {
            transforms.transform_queries(layer, n_heads, &mut q)?;
            transforms.transform_keys(layer, &mut k)?;
        }
        let parts: Vec<_> = self.sequences.iter().map(|&sequence| Part { sequence, n_tokens }).collect();
        let mut out = vec![0.0; q.len()];
        self.cache.step(layer, &parts, Chunk { queries: &q, keys: &k, values: &v }, &mut out)?;
        let out = Tensor::from_vec(out, (batch, n_tokens, n_heads, d), queries.device())?;
        Ok(out.transpose(1, 2)?.contiguous()?.to_dtype(queries.dtype())?)
    }

    /// Tokens of each sequence in a layer.
    ///
    /// # Errors
    /// `NoLayer`.
    pub fn len(&self, layer: usize) -> Result<usize> {
        self.sequences.first().map_or(Ok(0), |&sequence| self.cache.len(sequence, layer))
    }

    /// Takes back all tokens from `len` on, of every sequence.
    ///
    /// # Errors
    /// `Freed`, see [`KvCache::truncate`].
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        self.sequences.iter().try_for_each(|&sequence| self.cache.truncate(sequence, len))
    }

    /// The cache below.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }
}

fn check_shape(layer: usize, what: &'static str, expected: [usize; 4], tensor: &Tensor) -> Result<()> {
    if tensor.dims() == expected {
        return Ok(());
    }
    Err(RuntimeError::Shape { layer, what, expected, found: tensor.dims().to_vec() })
}

/// `[batch, heads, tokens, d]` as rows `[batch, tokens, heads, d]` in f32.
fn rows(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.transpose(1, 2)?.to_dtype(DType::F32)?.contiguous()?.flatten_all()?.to_vec1()?)
}
