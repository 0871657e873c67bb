//! What looks on while the decoder runs: queries, keys and values as the attention product gets them.

use crate::backend::Backend;
use crate::error::{ModelError, Result};

/// Sees post-norm, post-RoPE queries `[tokens, n_heads * d]`, keys and values `[tokens, n_kv_heads * d]`.
///
/// Seeing is apart from adding up: sequences are seen by several threads at once and added in their order, so that
/// neither waits for the other and sums do not depend on the thread count.
pub trait Observer<B: Backend>: Sync {
    /// What one sequence shows in one layer.
    type Seen: Send;

    /// Called before the sequences of a group are seen in a layer: for what a layer needs once.
    ///
    /// # Errors
    /// Whatever stops the forward pass.
    fn begin(&mut self, _layer: usize) -> Result<()> {
        Ok(())
    }

    /// Called once for every sequence and layer, in any order.
    ///
    /// # Errors
    /// Whatever stops the forward pass.
    fn see(&self, backend: &B, layer: usize, q: &B::Tensor, k: &B::Tensor, v: &B::Tensor) -> Result<Self::Seen>;

    /// Called once for every sequence and layer; sequences in order within a layer.
    ///
    /// # Errors
    /// Whatever stops the forward pass, such as [`NonFinite`](crate::ModelError::NonFinite).
    fn add(&mut self, layer: usize, seen: Self::Seen) -> Result<()>;
}

/// Second moments of one sequence's queries, keys and values in one layer, and the sum of its keys; f64.
#[derive(Debug, Clone, PartialEq)]
pub struct Moments {
    /// Σ_t Σ_g q qᵀ over the group of each KV head, `[n_kv, d, d]`.
    pub query_gram: Vec<f64>,
    /// Σ_t k kᵀ, `[n_kv, d, d]`.
    pub key_gram: Vec<f64>,
    /// Σ_t v vᵀ, `[n_kv, d, d]`.
    pub value_gram: Vec<f64>,
    /// Σ_t k, `[n_kv * d]`.
    pub key_sum: Vec<f64>,
}

impl Moments {
    /// Sums over all positions (Algorithm 1, line 4).
    ///
    /// # Errors
    /// The device's own.
    pub fn of<B: Backend>(backend: &B, n_kv_heads: usize, head_dim: usize, [q, k, v]: [&B::Tensor; 3]) -> Result<Self> {
        let gram = |x: &B::Tensor| {
            let mut sum = vec![0.0; n_kv_heads * head_dim * head_dim];
            backend.gram(x, n_kv_heads, head_dim, &mut sum)?;
            Ok::<_, ModelError>(sum)
        };
        let mut key_sum = vec![0.0; n_kv_heads * head_dim];
        backend.column_sum(k, &mut key_sum)?;
        Ok(Self { query_gram: gram(q)?, key_gram: gram(k)?, value_gram: gram(v)?, key_sum })
    }
}
