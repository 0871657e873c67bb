//! What a cache is made for: layers, precision, windows, pages. Checked once, by [`KvCache::new`](crate::KvCache::new).

use serde::{Deserialize, Serialize};
use wush_format::hash::Sha;
use wush_quant::{Bits, MAX_HEAD_DIM, Method, Quantizer, Role, ScaleDtype};

use crate::{Result, RuntimeError, Windows};

/// Most layers, heads, or tokens of a window or page: far above every model, small enough that products of two and a head
/// dimension stay within 64 bits.
const MAX_COUNT: usize = 1 << 20;
/// Largest page, in tokens.
const MAX_PAGE_TOKENS: usize = 1 << 14;

/// How keys or values outside the windows are stored.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// As in the windows ("16 bits").
    Full,
    /// Packed by a quantizer.
    Packed(Quantizer),
}

impl Precision {
    /// From a number of bits as users give it: 2, 3, 4, 8, or 16 for [`Precision::Full`].
    ///
    /// # Errors
    /// `Bits`; `Config` when the method's parameter is out of range.
    pub fn new(bits: u8, method: &Method, role: Role, scales: ScaleDtype) -> Result<Self> {
        if bits == 16 {
            return Ok(Self::Full);
        }
        let bits = Bits::try_from(bits).map_err(|_| RuntimeError::Bits { found: bits })?;
        let made = method.quantizer(bits, role, scales);
        made.map(Self::Packed).map_err(|e| invalid("quantizer", "a parameter in range", e))
    }

    /// Bits a coordinate, 16 for [`Precision::Full`].
    pub fn bits(&self) -> u8 {
        match self {
            Self::Full => 16,
            Self::Packed(quantizer) => quantizer.bits().get(),
        }
    }
}

/// How tokens in full precision are stored; arithmetic is in f32 either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FullDtype {
    /// bfloat16, rounded to nearest even when appended.
    Bf16,
    /// Single precision: what was appended, bit for bit.
    #[default]
    F32,
}

/// One attention layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerConfig {
    /// Query heads, a multiple of `n_kv_heads`; query head n reads KV head `n / (n_heads / n_kv_heads)`.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Coordinates of a head, d.
    pub head_dim: usize,
    /// A query at position t reads positions `t + 1 − window ..= t`; all of `..= t` when none.
    pub sliding_window: Option<usize>,
    /// Multiplies q·k; usually `d^{-1/2}`.
    pub scale: f32,
    /// Logits become `cap · tanh(logits / cap)`.
    pub softcap: Option<f32>,
    /// Keys outside the windows.
    pub keys: Precision,
    /// Values outside the windows.
    pub values: Precision,
}

impl LayerConfig {
    /// Plain attention with scale `d^{-1/2}`, nothing quantized.
    pub fn new(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> Self {
        let scale = (head_dim as f64).powf(-0.5) as f32;
        let (keys, values) = (Precision::Full, Precision::Full);
        Self { n_heads, n_kv_heads, head_dim, sliding_window: None, scale, softcap: None, keys, values }
    }

    /// The same with keys and values stored so.
    pub fn stored(self, keys: Precision, values: Precision) -> Self {
        Self { keys, values, ..self }
    }

    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Elements of one token's keys: `n_kv_heads · head_dim`.
    pub(crate) fn kv_width(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Elements of one token's queries: `n_heads · head_dim`.
    pub(crate) fn query_width(&self) -> usize {
        self.n_heads * self.head_dim
    }

    fn check(&self, layer: usize) -> Result<()> {
        let at = |field: &str| format!("layer {layer}, {field}");
        range(&at("n_kv_heads"), self.n_kv_heads, 1, MAX_COUNT)?;
        range(&at("n_heads"), self.n_heads, 1, MAX_COUNT)?;
        range(&at("head_dim"), self.head_dim, 1, MAX_HEAD_DIM)?;
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(invalid(at("n_heads"), format!("a multiple of {} KV heads", self.n_kv_heads), self.n_heads));
        }
        if self.sliding_window == Some(0) {
            return Err(invalid(at("sliding_window"), "at least 1, or none", 0));
        }
        let positive = |x: f32| x.is_finite() && x > 0.0;
        if !positive(self.scale) {
            return Err(invalid(at("scale"), "a finite number above 0", self.scale));
        }
        match self.softcap {
            Some(cap) if !positive(cap) => Err(invalid(at("softcap"), "a finite number above 0, or none", cap)),
            _ => Ok(()),
        }
    }
}

/// A whole cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheConfig {
    /// Attention layers, by global layer id.
    pub layers: Vec<LayerConfig>,
    /// Windows in full precision.
    pub windows: Windows,
    /// How the windows (and what is not quantized) are stored.
    pub full: FullDtype,
    /// Tokens of a page, the unit of sharing between forks. A page is allocated whole; a last page is half empty on average,
    /// and attention reads whole pages fastest at 64 tokens or more.
    pub page_tokens: usize,
    /// Tokens that [`KvCache::truncate`](crate::KvCache::truncate) can always take back in layers with a sliding window; all
    /// in other layers.
    pub rewind: usize,
    /// Weights that the cache belongs to: a saved cache of other weights is refused.
    pub model_hash: Option<Sha>,
    /// [`KeyTransforms::hash`](crate::KeyTransforms::hash) of what keys go through before they are appended; none where they are
    /// cached as they are. [`KvCache::set_transforms`](crate::KvCache::set_transforms) sets it; a saved cache of other transforms is
    /// refused.
    pub key_transforms: Option<Sha>,
    /// How positions enter keys, in words that differ where the keys do ("yarn:4", say): nothing here reads it, and a saved cache
    /// with other words is refused.
    pub rope: Option<String>,
}

impl CacheConfig {
    /// Default pages: 9 KiB of keys at d = 128 and 2 bits.
    pub const PAGE_TOKENS: usize = 256;
    /// Default of `rewind`: above the longest speculative drafts.
    pub const REWIND: usize = 64;

    /// The given layers with the defaults of the paper's serving runs: [`Windows::SERVING`], f32 windows.
    pub fn new(layers: Vec<LayerConfig>) -> Self {
        Self {
            layers,
            windows: Windows::SERVING,
            full: FullDtype::F32,
            page_tokens: Self::PAGE_TOKENS,
            rewind: Self::REWIND,
            model_hash: None,
            key_transforms: None,
            rope: None,
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// `Config`, naming the field.
    pub fn check(&self) -> Result<()> {
        range("layers", self.layers.len(), 1, MAX_COUNT)?;
        range("windows.sink", self.windows.sink, 0, MAX_COUNT)?;
        range("windows.keep", self.windows.keep, 0, MAX_COUNT)?;
        range("windows.flush", self.windows.flush, 1, MAX_COUNT)?;
        range("page_tokens", self.page_tokens, 1, MAX_PAGE_TOKENS)?;
        range("rewind", self.rewind, 0, MAX_COUNT)?;
        self.layers.iter().enumerate().try_for_each(|(id, layer)| layer.check(id))
    }
}

fn range(field: &str, found: usize, least: usize, most: usize) -> Result<()> {
    if (least..=most).contains(&found) {
        return Ok(());
    }
    Err(invalid(field, format!("{least} to {most}"), found))
}

fn invalid(place: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> RuntimeError {
    RuntimeError::Config { place: place.into(), expected: expected.into(), found: found.to_string() }
}
