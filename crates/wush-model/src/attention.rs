//! The attention product of a pass, and what may stand in for it.

use std::collections::BTreeMap;
use std::ops::Range;

use wush_format::bundle::KeySidecar;

use crate::backend::{AttentionShape, Backend};
use crate::error::{ModelError, Result};
use crate::spec::ModelSpec;

/// Which product of a pass it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Global layer id.
    pub layer: usize,
    /// Index of the sequence among those of the pass.
    pub sequence: usize,
}

/// What is done between queries, keys and values and the output projection: exact attention, or what a server with
/// another cache does.
pub trait AttentionProduct<B: Backend>: Sync {
    /// `[tokens, n_heads * d]` from one whole sequence's queries `[tokens, n_heads * d]`, keys and values
    /// `[tokens, n_kv_heads * d]`, after bias, norm and RoPE. Called by several threads at once; layers in order for each
    /// sequence.
    ///
    /// # Errors
    /// Whatever stops the pass.
    fn attend(&self, backend: &B, place: Place, qkv: [&B::Tensor; 3], shape: &AttentionShape) -> Result<B::Tensor>;
}

/// Attention of a chunk of queries over a cache that holds some of its tokens quantized (Algorithm 2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Positions of the queries.
    pub queries: Range<usize>,
    /// Positions whose quantized keys and values they read; at the others they read the exact ones.
    pub quantized: Range<usize>,
}

/// Keys and values `[tokens, n_kv_heads * d]`.
#[derive(Debug)]
pub struct KeysValues<'a, T> {
    /// The keys.
    pub keys: &'a T,
    /// The values.
    pub values: &'a T,
}

impl<T> Clone for KeysValues<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for KeysValues<'_, T> {}

/// A device that attends to what a windowed cache holds, and takes activations from the host: for evaluations.
pub trait Windowed: Backend {
    /// Tokens of `x`.
    fn n_rows(&self, x: &Self::Tensor) -> usize;
    /// Activations `[n_rows, width]` from the host, rounded where the device's are narrower.
    ///
    /// # Panics
    /// When `data` is no whole number of rows: the caller's invariant.
    fn to_device(&self, n_rows: usize, data: Vec<f32>) -> Result<Self::Tensor>;
    /// Attention of one whole sequence, chunk by chunk; `chunks` cover the queries in order, and what a chunk reads quantized
    /// lies before its first query.
    ///
    /// # Panics
    /// When they do not.
    fn windowed(
        &self,
        q: &Self::Tensor,
        exact: KeysValues<'_, Self::Tensor>,
        quantized: KeysValues<'_, Self::Tensor>,
        shape: &AttentionShape,
        chunks: &[Chunk],
    ) -> Result<Self::Tensor>;
}

/// Checks the invariants of [`Windowed::windowed`].
///
/// # Panics
/// When `chunks` do not cover `n_queries` queries in order, or one reads quantized what does not lie before it.
pub fn assert_covers(chunks: &[Chunk], n_queries: usize) {
    let mut at = 0;
    for chunk in chunks {
        assert!(chunk.queries.start == at && chunk.quantized.end <= at, "chunks cover the queries in order");
        at = chunk.queries.end;
    }
    assert_eq!(at, n_queries, "chunks cover the queries");
}

/// Attention itself (Eq. 2).
#[derive(Debug, Clone, Copy, Default)]
pub struct Exact;

impl<B: Backend> AttentionProduct<B> for Exact {
    fn attend(&self, backend: &B, _: Place, [q, k, v]: [&B::Tensor; 3], shape: &AttentionShape) -> Result<B::Tensor> {
        backend.attention(q, k, v, shape)
    }
}

/// Attention as a key-transforming server computes it: T_K (k − μ) for keys and T_K^{-T} q for queries, after RoPE.
pub struct TransformedKeys<B: Backend> {
    layers: BTreeMap<usize, Transform<B>>,
}

struct Transform<B: Backend> {
    key: B::Matrix,
    query: B::Matrix,
    /// μ, `[n_kv * d]`, where keys are centred.
    mean: Option<Vec<f32>>,
}

impl<B: Windowed> TransformedKeys<B> {
    /// A sidecar's matrices on the device.
    ///
    /// # Errors
    /// `Tensor` when the sidecar's heads are not the model's; the device's own.
    pub fn new(sidecar: &KeySidecar, spec: &ModelSpec, backend: &B) -> Result<Self> {
        let mut layers = BTreeMap::new();
        for (&id, layer) in &sidecar.layers {
            let found = (layer.n_kv_heads, layer.head_dim);
            let expected = spec.layers.get(id).map(|l| (l.attn.n_kv_heads, l.attn.head_dim));
            if expected != Some(found) {
                return Err(ModelError::Tensor {
                    name: format!("layers.{id}.key"),
                    expected: format!("(KV heads, head dim) {expected:?}"),
                    found: format!("{found:?}"),
                });
            }
            let on_device = |data| backend.head_matrices(layer.n_kv_heads, layer.head_dim, data);
            let (key, query) = (on_device(&layer.key)?, on_device(&layer.query)?);
            layers.insert(id, Transform { key, query, mean: layer.key_mean.clone() });
        }
        Ok(Self { layers })
    }
}

impl<B: Windowed> AttentionProduct<B> for TransformedKeys<B> {
    fn attend(
        &self,
        backend: &B,
        place: Place,
        [q, k, v]: [&B::Tensor; 3],
        shape: &AttentionShape,
    ) -> Result<B::Tensor> {
        let Some(transform) = self.layers.get(&place.layer) else { return backend.attention(q, k, v, shape) };
        let q = backend.transform_heads(q, &transform.query, shape.head_dim)?;
        let centred = transform.mean.as_ref().map(|mean| centred(backend, k, mean)).transpose()?;
        let k = backend.transform_heads(centred.as_ref().unwrap_or(k), &transform.key, shape.head_dim)?;
        backend.attention(&q, &k, v, shape)
    }
}

/// `k - mean` of every row.
fn centred<B: Windowed>(backend: &B, k: &B::Tensor, mean: &[f32]) -> Result<B::Tensor> {
    let mut data = backend.to_host(k)?;
    data.chunks_exact_mut(mean.len()).for_each(|row| row.iter_mut().zip(mean).for_each(|(x, m)| *x -= m));
    backend.to_device(backend.n_rows(k), data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Cpu, Rows};

    /// Softmax does not see a mean that is taken from every key; a cap on its arguments does.
    #[test]
    fn a_mean_key_is_subtracted_and_does_not_change_what_softmax_makes_of_it() {
        let value = |i: usize| ((i * 7919 + 13) % 97) as f32 / 97.0 - 0.5;
        let rows = |width: usize, from: usize| Rows {
            n_rows: 9,
            width,
            data: (0..9 * width).map(|i| value(i + from)).collect(),
        };
        let (q, k, v) = (rows(8, 0), rows(4, 500), rows(4, 900));
        let identity = || [1.0, 0.0, 0.0, 1.0].repeat(2);
        let (key, query, mean) = (identity(), identity(), Some(vec![3.0, -2.0, 0.5, 4.0]));
        let transformed = TransformedKeys { layers: BTreeMap::from([(0, transform(key, query, mean))]) };
        let largest = |softcap| {
            let shape = AttentionShape { n_heads: 4, n_kv_heads: 2, head_dim: 2, window: None, scale: 1.0, softcap };
            let place = Place { layer: 0, sequence: 0 };
            let attend = |product: &dyn AttentionProduct<Cpu>| {
                product.attend(&Cpu, place, [&q, &k, &v], &shape).expect("the CPU does not fail").data
            };
            let (plain, centred) = (attend(&Exact), attend(&transformed));
            plain.iter().zip(&centred).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
        };
        // Scores of a few units, in f32.
        assert!(largest(None) <= 1e-5 && largest(Some(1.0)) > 1e-2);
    }

    fn transform(key: Vec<f32>, query: Vec<f32>, mean: Option<Vec<f32>>) -> Transform<Cpu> {
        let matrices = |data: Vec<f32>| Cpu.head_matrices(2, 2, &data).expect("the CPU does not fail");
        Transform { key: matrices(key), query: matrices(query), mean }
    }
}
