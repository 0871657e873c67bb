//! A quantized cache as an attention product: what a pass reads instead of its own keys and values.
//!
//! Tokens go through the runtime's codec, bytes included, but a whole sequence at a time and not in pages: the same codes,
//! scales and zero points, and so the same numbers as the runtime's cache but for the order of sums. `tests/parity.rs`
//! holds it to that.

use std::ops::Range;

use rayon::prelude::*;
use wush_model::attention::{AttentionProduct, KeysValues, Place, Windowed};
use wush_model::backend::{AttentionShape, Backend};
use wush_model::cpu::{Cpu, Rows, transform_heads};
use wush_model::spec::ModelSpec;
use wush_model::{ModelError, Result as ModelResult};
use wush_quant::{Codec, Feedback, QuantError};

use crate::windows::Protocol;
use crate::{EvalError, Result};

/// Tokens that one task packs.
const TOKENS_PER_TASK: usize = 64;

/// How keys or values of one layer are cached.
#[derive(Debug, Clone)]
pub struct Side {
    /// T, `[n_kv, d, d]`.
    pub transform: Vec<f32>,
    /// What undoes it for the reader, `[n_kv, d, d]`: T_K^{-T} for queries, T_V^{-1} for outputs.
    pub reader: Vec<f32>,
    /// Subtracted from every key first, `[n_kv, d]`.
    pub mean: Option<Vec<f32>>,
    /// The quantizer.
    pub codec: Codec,
    /// Error feedback, one a KV head.
    pub feedback: Option<Vec<Feedback>>,
}

/// How one layer is cached; a side that is absent stays as it is.
#[derive(Debug, Clone)]
pub struct LayerCache {
    /// Keys.
    pub keys: Option<Side>,
    /// Values.
    pub values: Option<Side>,
}

/// A cache for every layer of a model, in a pass of device `B`. Its codec works on the CPU.
pub struct QuantizedCache<B: Backend = Cpu> {
    /// Keys and values.
    layers: Vec<[Option<OnDevice<B>>; 2]>,
    protocol: Protocol,
}

/// Keys or values of a sequence in the cache's coordinates, `[tokens, n_kv_heads * d]`.
#[derive(Debug, Clone)]
pub struct Cached {
    /// `T (x − μ)`.
    pub exact: Rows,
    /// The same as its codes read, at the positions that were asked for; zero elsewhere.
    pub quantized: Rows,
}

/// A side with its matrices where they are used: the writer's with the codec, the reader's with the queries.
struct OnDevice<B: Backend> {
    transform: Rows,
    reader: B::Matrix,
    mean: Option<Vec<f32>>,
    codec: Codec,
    feedback: Option<Vec<Feedback>>,
}

impl<B: Backend> QuantizedCache<B> {
    /// Checks every matrix against the model and brings the reader's to the device.
    ///
    /// # Errors
    /// `Shape` naming layer and tensor; the device's own.
    pub fn new(spec: &ModelSpec, layers: Vec<LayerCache>, protocol: Protocol, backend: &B) -> Result<Self> {
        if layers.len() != spec.layers.len() {
            let (expected, found) = (spec.layers.len(), layers.len());
            return Err(EvalError::Shape { layer: found, what: "the list of layers", expected, found });
        }
        let on_device = |layer: usize, side: Option<Side>| {
            let attn = &spec.layers[layer].attn;
            side.map(|side| OnDevice::new(layer, side, (attn.n_kv_heads, attn.head_dim), backend)).transpose()
        };
        let checked = layers.into_iter().enumerate().map(|(id, layer)| {
            let LayerCache { keys, values } = layer;
            Ok([on_device(id, keys)?, on_device(id, values)?])
        });
        Ok(Self { layers: checked.collect::<Result<_>>()?, protocol })
    }
}

impl QuantizedCache {
    /// One layer's keys `[tokens, n_kv_heads * d]` as the cache holds them; none where they stay as they are.
    ///
    /// # Errors
    /// `OutOfRange` for numbers that cannot be quantized.
    pub fn keys(&self, layer: usize, keys: &Rows, quantized: Range<usize>) -> Result<Option<Cached>, QuantError> {
        self.layers[layer][0].as_ref().map(|side| side.cached(keys, quantized)).transpose()
    }

    /// The same of values.
    ///
    /// # Errors
    /// As [`QuantizedCache::keys`].
    pub fn values(&self, layer: usize, values: &Rows, quantized: Range<usize>) -> Result<Option<Cached>, QuantError> {
        self.layers[layer][1].as_ref().map(|side| side.cached(values, quantized)).transpose()
    }

    /// Queries `[tokens, n_heads * d]` as one layer's cached keys meet them; none where keys stay as they are.
    pub fn queries(&self, layer: usize, queries: &Rows, head_dim: usize) -> Option<Rows> {
        self.layers[layer][0].as_ref().map(|side| transform_heads(queries, &side.reader, head_dim))
    }

    /// Attention outputs `[tokens, n_heads * d]` from the coordinates of cached values to the model's.
    pub fn outputs(&self, layer: usize, outputs: Rows, head_dim: usize) -> Rows {
        match &self.layers[layer][1] {
            None => outputs,
            Some(side) => transform_heads(&outputs, &side.reader, head_dim),
        }
    }
}

impl<B: Backend> OnDevice<B> {
    fn new(layer: usize, side: Side, (n_kv_heads, dim): (usize, usize), backend: &B) -> Result<Self> {
        let Side { transform, reader, mean, codec, feedback } = side;
        let check = |what, expected: usize, found: usize| match expected == found {
            true => Ok(()),
            false => Err(EvalError::Shape { layer, what, expected, found }),
        };
        check("the transform", n_kv_heads * dim * dim, transform.len())?;
        check("the reader's transform", n_kv_heads * dim * dim, reader.len())?;
        check("the mean key", n_kv_heads * dim, mean.as_ref().map_or(n_kv_heads * dim, Vec::len))?;
        check("the head dimension of the quantizer", dim, codec.layout().head_dim())?;
        check("the list of feedback matrices", n_kv_heads, feedback.as_ref().map_or(n_kv_heads, Vec::len))?;
        let transform = Cpu.head_matrices(n_kv_heads, dim, &transform)?;
        let reader = backend.head_matrices(n_kv_heads, dim, &reader)?;
        Ok(Self { transform, reader, mean, codec, feedback })
    }

    /// Exact and quantized, as [`Cached`] has them, of activations of the device; `refused` names what cannot be quantized.
    fn cached_on(
        &self,
        backend: &B,
        x: &B::Tensor,
        positions: Range<usize>,
        refused: impl Fn(QuantError) -> ModelError,
    ) -> ModelResult<[B::Tensor; 2]>
    where
        B: Windowed,
    {
        let (n_rows, data) = (backend.n_rows(x), backend.to_host(x)?);
        let x = Rows { n_rows, width: data.len() / n_rows, data };
        let Cached { exact, quantized } = self.cached(&x, positions).map_err(refused)?;
        Ok([backend.to_device(n_rows, exact.data)?, backend.to_device(n_rows, quantized.data)?])
    }

    fn cached(&self, x: &Rows, positions: Range<usize>) -> Result<Cached, QuantError> {
        let exact = self.transformed(x);
        let quantized = self.quantized(&exact, positions)?;
        Ok(Cached { exact, quantized })
    }

    /// `T (x − μ)`, exact.
    fn transformed(&self, x: &Rows) -> Rows {
        let dim = self.codec.layout().head_dim();
        match &self.mean {
            None => transform_heads(x, &self.transform, dim),
            Some(mean) => {
                let mut centred = x.clone();
                centred.data.par_chunks_mut(TOKENS_PER_TASK * x.width).for_each(|rows| {
                    rows.chunks_exact_mut(mean.len())
                        .for_each(|row| row.iter_mut().zip(mean).for_each(|(x, m)| *x -= m));
                });
                transform_heads(&centred, &self.transform, dim)
            }
        }
    }

    /// The rows at `positions` as the packed cache gives them back; the others are left zero.
    fn quantized(&self, x: &Rows, positions: Range<usize>) -> Result<Rows, QuantError> {
        let dim = self.codec.layout().head_dim();
        let mut out = Rows::zeros(x.n_rows, x.width);
        let into = &mut out.data[positions.start * x.width..positions.end * x.width];
        let tasks = into
            .par_chunks_mut(TOKENS_PER_TASK * x.width)
            .zip(x.slice(positions).par_chunks(TOKENS_PER_TASK * x.width));
        tasks.try_for_each_init(Vec::new, |scratch: &mut Vec<f32>, (out, x_rows)| {
            let n_rows = x_rows.len() / x.width;
            let mut packed = vec![0; n_rows * self.codec.layout().n_bytes()];
            for head in 0..x.width / dim {
                let column = head * dim..(head + 1) * dim;
                scratch.clear();
                x_rows.chunks_exact(x.width).for_each(|row| scratch.extend_from_slice(&row[column.clone()]));
                match &self.feedback {
                    Some(feedback) => self.codec.pack_with_feedback(scratch, &feedback[head], &mut packed)?,
                    None => self.codec.pack(scratch, &mut packed)?,
                }
                self.codec.unpack(&packed, scratch)?;
                let rows = out.chunks_exact_mut(x.width).zip(scratch.chunks_exact(dim));
                rows.for_each(|(row, head)| row[column.clone()].copy_from_slice(head));
            }
            Ok(())
        })?;
        Ok(out)
    }
}

impl<B: Windowed> AttentionProduct<B> for QuantizedCache<B> {
    fn attend(
        &self,
        backend: &B,
        place: Place,
        qkv: [&B::Tensor; 3],
        shape: &AttentionShape,
    ) -> ModelResult<B::Tensor> {
        let [q, k, v] = qkv;
        let chunks = self.protocol.chunks(backend.n_rows(q));
        let positions = self.protocol.sink..chunks.last().map_or(0, |chunk| chunk.quantized.end);
        let [keys, values] = &self.layers[place.layer];
        if positions.is_empty() || (keys.is_none() && values.is_none()) {
            return backend.attention(q, k, v, shape);
        }
        let cached = |what, side: &Option<OnDevice<B>>, x| {
            let refused = move |_| ModelError::NonFinite { layer: place.layer, what, sequence: place.sequence };
            side.as_ref().map(|side| side.cached_on(backend, x, positions.clone(), refused)).transpose()
        };
        let (cached_keys, cached_values) = (cached("keys", keys, k)?, cached("values", values, v)?);
        let (k, kq) = cached_keys.as_ref().map_or((k, k), |[exact, quantized]| (exact, quantized));
        let (v, vq) = cached_values.as_ref().map_or((v, v), |[exact, quantized]| (exact, quantized));
        let read = |x, side: &Option<OnDevice<B>>| {
            side.as_ref().map(|side| backend.transform_heads(x, &side.reader, shape.head_dim)).transpose()
        };
        let queries = read(q, keys)?;
        let (exact, quantized) = (KeysValues { keys: k, values: v }, KeysValues { keys: kq, values: vq });
        let out = backend.windowed(queries.as_ref().unwrap_or(q), exact, quantized, shape, &chunks)?;
        Ok(read(&out, values)?.unwrap_or(out))
    }
}
