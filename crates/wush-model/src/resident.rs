//! A decoder whose weights stay on the device, for passes that continue a sequence token by token.
//!
//! Enters: token ids, where in their sequence they stand, and who computes attention (it holds the keys and values of the
//! tokens before). Leaves: final hidden states, logits. Knows nothing of how keys and values are kept.

use std::ops::Range;

use wush_checkpoint::Checkpoint;
use wush_format::monitor::Monitor;

use crate::backend::Backend;
use crate::decoder::Decoder;
use crate::error::{ModelError, Result};
use crate::layer::{Layer, Norm, Qkv};
use crate::rope::{RopeSpec, Span};
use crate::spec::{LayerSpec, ModelSpec};
use crate::weights;

/// A decoder with all its layers on the device.
pub struct Resident<'a, B: Backend> {
    decoder: Decoder<'a, B>,
    layers: Vec<Layer<B>>,
    final_norm: Norm<B>,
}

impl<'a, B: Backend> Resident<'a, B> {
    /// Brings every layer's weights to the device; the embedding and the output head stay in the map. `spec` as for
    /// [`Decoder::new`]. Counts layers into `monitor`'s current stage.
    ///
    /// # Errors
    /// A tensor that is absent or has another shape; `Interrupted`.
    pub fn load(
        checkpoint: &'a Checkpoint,
        spec: &'a ModelSpec,
        backend: &'a B,
        monitor: &dyn Monitor,
    ) -> Result<Self> {
        let load = |layer: &LayerSpec| {
            if monitor.interrupted() {
                return Err(ModelError::Interrupted);
            }
            let layer = Layer::load(checkpoint, layer, backend)?;
            monitor.advance(1);
            Ok(layer)
        };
        let layers = spec.layers.iter().map(load).collect::<Result<_>>()?;
        let final_norm = Norm::load(checkpoint, &spec.final_norm, backend)?;
        Ok(Self { decoder: Decoder::new(checkpoint, spec, backend), layers, final_norm })
    }

    /// The model's shapes.
    pub fn spec(&self) -> &'a ModelSpec {
        self.decoder.spec
    }

    /// Final hidden states `[tokens, hidden]`, after the last norm, of `ids` at the positions of `spans`: tokens of one sequence or of
    /// several, those of one span after those of another. `attend` gets a layer's id and the queries `[tokens, n_heads * d]`, keys
    /// and values `[tokens, n_kv_heads * d]` of these tokens, after bias, norm and RoPE; it returns `[tokens, n_heads * d]`. Layers
    /// in order. Runs on `backend`, whose tensors are those of the weights' own. All of it but `attend` is a row's own work: what a row
    /// becomes depends on other rows only where `backend`'s products do.
    ///
    /// # Errors
    /// `Sequence` for ids that the model does not have; `NonFinite`; what `attend` returns.
    ///
    /// # Panics
    /// When the spans are not as long as `ids`.
    pub fn step<E: From<ModelError>>(
        &self,
        backend: &B,
        ids: &[u32],
        spans: &[Span],
        mut attend: impl FnMut(usize, [&B::Tensor; 3]) -> Result<B::Tensor, E>,
    ) -> Result<B::Tensor, E> {
        assert_eq!(ids.len(), spans.iter().map(|span| span.n_tokens).sum::<usize>(), "one position an id");
        let spec = self.decoder.spec;
        self.decoder.check(&[ids])?;
        let mut x = self.decoder.embed(&[ids])?.pop().expect("one list in, one out");
        let mut tables: Vec<(&RopeSpec, B::Rope)> = Vec::new();
        for (id, (layer, spec)) in self.layers.iter().zip(&spec.layers).enumerate() {
            let rope = spec.attn.rope.as_ref();
            if let Some(rope) = rope.filter(|rope| table_of(&tables, rope).is_none()) {
                tables.push((rope, backend.rope(rope.table_of_all(spans))?));
            }
            let table = rope.and_then(|rope| table_of(&tables, rope));
            let Qkv { q, k, v } = layer.qkv(backend, &spec.attn, &x, table)?;
            let attended = attend(id, [&q, &k, &v])?;
            drop((q, k, v));
            layer.finish(backend, spec, &mut x, &attended)?;
            self.decoder.check_finite(&x, "hidden states", id, 0)?;
        }
        let hidden = backend.norm(&x, self.final_norm.as_ref())?;
        self.decoder.check_finite(&hidden, "states after the final norm", spec.layers.len() - 1, 0)?;
        Ok(hidden)
    }

    /// Logits of rows `rows` of [`Resident::step`]'s result: `[rows, vocab]`.
    ///
    /// # Errors
    /// As [`Decoder::logits`].
    pub fn logits(&self, hidden: &B::Tensor, rows: Range<usize>) -> Result<Vec<f32>> {
        self.decoder.logits(hidden, rows)
    }

    /// The same on `backend`, as for [`Resident::step`].
    ///
    /// # Errors
    /// As [`Decoder::logits`].
    pub fn logits_of(&self, backend: &B, hidden: &B::Tensor, rows: Range<usize>) -> Result<Vec<f32>> {
        self.decoder.logits_on(backend, hidden, rows)
    }
}

/// The table of a layer's RoPE, where there is one already.
fn table_of<'t, T>(tables: &'t [(&RopeSpec, T)], rope: &RopeSpec) -> Option<&'t T> {
    tables.iter().find(|(other, _)| *other == rope).map(|(_, table)| table)
}

/// Bytes of the layers' weights as they are stored: what [`Resident::load`] with [`Stored`](crate::cpu::Stored) weights keeps.
///
/// # Errors
/// A tensor that is absent or has another shape.
pub fn stored_bytes(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<u64> {
    let slices = spec.layers.iter().flat_map(LayerSpec::slices);
    slices
        .map(|slice| {
            let element = weights::view(checkpoint, slice)?.dtype.bitsize() as u64 / 8;
            Ok(slice.rows.len() as u64 * slice.cols as u64 * element)
        })
        .sum()
}
