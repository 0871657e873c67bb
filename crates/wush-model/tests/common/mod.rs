//! What the tests of the forward pass share.

use std::collections::BTreeMap;

use wush_model::Result;
use wush_model::backend::Backend;
use wush_model::observer::{Moments, Observer};
use wush_model::spec::ModelSpec;

/// Everything that was seen, by layer, in the order in which it was added.
pub struct Collector<'a> {
    spec: &'a ModelSpec,
    pub layers: BTreeMap<usize, Vec<Moments>>,
}

impl<'a> Collector<'a> {
    /// Nothing yet.
    pub fn new(spec: &'a ModelSpec) -> Self {
        Self { spec, layers: BTreeMap::new() }
    }
}

impl<B: Backend> Observer<B> for Collector<'_> {
    type Seen = Moments;

    fn see(&self, backend: &B, layer: usize, q: &B::Tensor, k: &B::Tensor, v: &B::Tensor) -> Result<Moments> {
        let attn = &self.spec.layers[layer].attn;
        Moments::of(backend, attn.n_kv_heads, attn.head_dim, [q, k, v])
    }

    fn add(&mut self, layer: usize, seen: Moments) -> Result<()> {
        self.layers.entry(layer).or_default().push(seen);
        Ok(())
    }
}
