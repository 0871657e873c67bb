//! Calibration's sums on the device: running f64 Gram matrices of every layer, downloaded when they are wanted and not before.
//!
//! Enters: queries, keys and values of a forward pass on a [`Gpu`]. Leaves: sums over all sequences so far, and the layer and
//! tensor in which something was not finite. The sums go on from those of an earlier run, so that neither a stop nor the times of
//! saving leave a trace in the bits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use wush_checkpoint::Checkpoint;
use wush_model::backend::Backend;
use wush_model::observer::{Moments, Observer};
use wush_model::spec::ModelSpec;
use wush_model::{ModelError, Result as ModelResult};
use wush_stats::{AttentionHessians, LayerSums, Statistics, StatsError, couplings};

use crate::attention::Attention;
use crate::backend::{Compute, Gpu, attention_of};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::gram::GramParts;
use crate::hessian::{self, HessianInputs};
use crate::sums::FiniteCheck;
use crate::tensor::Tensor;

/// Running sums of all layers.
#[derive(Debug)]
pub struct RunningSums<'a> {
    device: Device,
    weights: (&'a Checkpoint, &'a ModelSpec),
    layers: Vec<Mutex<Layer>>,
    finite: Mutex<FiniteCheck>,
    order: Order,
    /// Sequences that were summed entirely, those of earlier runs included.
    n_sequences: usize,
}

/// In which order activations are seen; the device is waited for at the end of each round, to learn whether all were finite.
#[derive(Debug)]
enum Order {
    /// All layers of a sequence make a round.
    BySequence,
    /// So many sequences in a layer make a round, of which some are seen and some are added.
    ByLayer { n_sequences: usize, n_seen: AtomicUsize, n_added: usize },
}

/// Of one layer; see [`Moments`].
#[derive(Debug)]
struct Layer {
    head_dim: usize,
    /// Widths of queries, keys and values: where in a joined row something was not finite.
    widths: [usize; 3],
    query_gram: Buffer<f64>,
    key_gram: Buffer<f64>,
    value_gram: Buffer<f64>,
    key_sum: Buffer<f64>,
    hessians: Option<Hessians>,
}

/// Sums of Appendix C in one layer.
#[derive(Debug)]
struct Hessians {
    /// Γ, once the layer was begun.
    couplings: Option<Buffer<f32>>,
    key: Buffer<f64>,
    value: Buffer<f64>,
}

/// Names of the three tensors, as errors state them.
const ROLES: [&str; 3] = ["queries", "keys", "values"];

impl<'a> RunningSums<'a> {
    /// Goes on from `statistics`, of a model with these weights.
    ///
    /// # Errors
    /// `OutOfMemory`, `Driver`.
    pub fn new(device: &Device, weights: (&'a Checkpoint, &'a ModelSpec), statistics: &Statistics) -> Result<Self> {
        let hessians = |sums: &AttentionHessians| {
            let (key, value) = (device.upload(&sums.key.data)?, device.upload(&sums.value.data)?);
            Ok(Hessians { couplings: None, key, value })
        };
        let layers = statistics.layers.values().map(|sums| {
            Ok(Mutex::new(Layer {
                head_dim: sums.head_dim(),
                widths: [0; 3],
                query_gram: device.upload(&sums.query_gram.data)?,
                key_gram: device.upload(&sums.key_gram.data)?,
                value_gram: device.upload(&sums.value_gram.data)?,
                key_sum: device.upload(&sums.key_sum)?,
                hessians: sums.attention.as_ref().map(hessians).transpose()?,
            }))
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let finite = Mutex::new(FiniteCheck::new(device, layers.len() * ROLES.len())?);
        let n_sequences = statistics.info.sequence_hashes.len();
        Ok(Self { device: device.clone(), weights, layers, finite, order: Order::BySequence, n_sequences })
    }

    /// From here on every layer sees `n_sequences` before the next layer does.
    ///
    /// # Errors
    /// `TooLarge`, `OutOfMemory`, `Driver`.
    pub fn by_layer(&mut self, n_sequences: usize) -> Result<()> {
        self.order = Order::ByLayer { n_sequences, n_seen: AtomicUsize::new(0), n_added: 0 };
        self.finite = Mutex::new(FiniteCheck::new(&self.device, n_sequences * ROLES.len())?);
        Ok(())
    }

    /// The sums of all layers, in order; waits for the device.
    ///
    /// # Errors
    /// `Driver`, also for what an earlier kernel did.
    pub fn download(&self) -> Result<Vec<LayerSums>> {
        self.layers.iter().map(|layer| layer.lock().unwrap_or_else(PoisonError::into_inner).download()).collect()
    }

    /// Notes where one sequence was not finite, without waiting.
    fn look<T: Compute>(&self, layer: usize, qkv: [&Tensor<T>; 3]) -> Result<()> {
        let mut finite = self.finite.lock().unwrap_or_else(PoisonError::into_inner);
        let place = match &self.order {
            Order::BySequence => layer,
            Order::ByLayer { n_seen, .. } => n_seen.fetch_add(1, Ordering::Relaxed),
        };
        if let Some(joined) = Tensor::joined(qkv) {
            return finite.look(place * ROLES.len(), joined);
        }
        let slots = (place * ROLES.len()..).zip(qkv);
        slots.into_iter().try_for_each(|(slot, x)| finite.look(slot, x.matrix()))
    }

    /// What was not finite in the round that `layer` ends; waits for the device.
    fn check(&self, layer: usize) -> ModelResult<()> {
        let mut finite = self.finite.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(found) = finite.first()? else { return Ok(()) };
        finite.clear()?;
        let place = found.slot / ROLES.len();
        let (layer, sequence) = match self.order {
            Order::BySequence => (place, self.n_sequences),
            Order::ByLayer { .. } => (layer, self.n_sequences + place),
        };
        let widths = self.layers[layer].lock().unwrap_or_else(PoisonError::into_inner).widths;
        let role = role(found.slot % ROLES.len(), found.index, widths);
        Err(ModelError::NonFinite { layer, what: ROLES[role], sequence })
    }
}

impl Layer {
    fn download(&self) -> Result<LayerSums> {
        let moments = Moments {
            query_gram: self.query_gram.to_host()?,
            key_gram: self.key_gram.to_host()?,
            value_gram: self.value_gram.to_host()?,
            key_sum: self.key_sum.to_host()?,
        };
        let symmetric = |sums: &Buffer<f64>| Ok::<_, GpuError>(symmetrized(sums.to_host()?, self.head_dim));
        let hessians = self.hessians.as_ref().map(|sums| Ok([symmetric(&sums.key)?, symmetric(&sums.value)?]));
        Ok(LayerSums { moments, hessians: hessians.transpose()? })
    }

    /// Appendix C's sums over one sequence, where they are asked for.
    fn add_hessians<T: Compute>(&mut self, gpu: &Gpu<T>, attention: Attention<'_, T>) -> Result<()> {
        let Some(Hessians { couplings, key, value }) = &mut self.hessians else { return Ok(()) };
        let attention = T::for_hessians(attention).ok_or(GpuError::HessianPrecision)?;
        let couplings = couplings.as_ref().expect("a layer is begun before its sequences are seen").view();
        let mut sums = [key.view_mut(), value.view_mut()];
        let [key, value] = &mut sums;
        gpu.device().add_hessians(&HessianInputs { attention, couplings }, &mut hessian::Hessians { key, value })
    }

    fn add<T: Compute>(&mut self, device: &Device, qkv: [&Tensor<T>; 3]) -> Result<()> {
        let [q, k, v] = qkv;
        let heads = qkv.map(|x| x.width / self.head_dim);
        let mut into = [&mut self.query_gram, &mut self.key_gram, &mut self.value_gram];
        if let Some(joined) = Tensor::joined(qkv) {
            let parts: GramParts = device.gram_parts(joined, self.head_dim)?;
            let mut first = 0;
            for (into, n_heads) in into.iter_mut().zip(heads) {
                device.add_gram(&parts, first..first + n_heads, &mut into.view_mut())?;
                first += n_heads;
            }
        } else {
            for (into, x) in into.iter_mut().zip([q, k, v]) {
                let parts = device.gram_parts(x.matrix(), self.head_dim)?;
                device.add_gram(&parts, 0..parts.n_heads(), &mut into.view_mut())?;
            }
        }
        self.widths = if Tensor::joined(qkv).is_some() { qkv.map(|x| x.width) } else { [0; 3] };
        device.column_sums(k.matrix(), &mut self.key_sum.view_mut())
    }
}

/// Which of the three tensors an element belongs to: of a row that joins them, its column tells; else its slot. `widths` are those
/// of a joined row, or zeros.
fn role(slot: usize, index: usize, widths: [usize; 3]) -> usize {
    let [queries, keys, values] = widths;
    match queries + keys + values {
        0 => slot,
        width => usize::from(index % width >= queries) + usize::from(index % width >= queries + keys),
    }
}

/// Head matrices whose triangles differ by the rounding of their sums: the mean of both.
fn symmetrized(mut matrices: Vec<f64>, dim: usize) -> Vec<f64> {
    for matrix in matrices.chunks_exact_mut(dim * dim) {
        for i in 0..dim {
            for j in 0..i {
                let mean = 0.5 * (matrix[i * dim + j] + matrix[j * dim + i]);
                (matrix[i * dim + j], matrix[j * dim + i]) = (mean, mean);
            }
        }
    }
    matrices
}

impl<T: Compute> Observer<Gpu<T>> for RunningSums<'_> {
    type Seen = ();

    /// Brings the products of a layer's output projections to the device, once a run.
    fn begin(&mut self, layer: usize) -> ModelResult<()> {
        let (checkpoint, spec) = self.weights;
        let (Some(sums), Some(spec)) = (self.layers.get_mut(layer), spec.layers.get(layer)) else { return Ok(()) };
        let sums = sums.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(hessians) = sums.hessians.as_mut().filter(|hessians| hessians.couplings.is_none()) {
            let exact = couplings(checkpoint, layer, &spec.attn).map_err(|error| match error {
                StatsError::Model(error) => error,
                other => ModelError::Sequence { sequence: 0, detail: other.to_string() },
            })?;
            let rounded: Vec<f32> = exact.data.iter().map(|&x| x as f32).collect();
            hessians.couplings = Some(self.device.upload(&rounded)?);
        }
        Ok(())
    }

    fn see(&self, gpu: &Gpu<T>, layer: usize, q: &Tensor<T>, k: &Tensor<T>, v: &Tensor<T>) -> ModelResult<()> {
        const { assert!(!<Gpu<T> as Backend>::SIDE_BY_SIDE, "sequences are summed in the order in which they are seen") };
        let Some(sums) = self.layers.get(layer) else {
            let detail = format!("layer {layer} is not in the statistics");
            return Err(ModelError::Sequence { sequence: self.n_sequences, detail });
        };
        gpu.stage("finite check", || self.look(layer, [q, k, v]))?;
        let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
        gpu.stage("statistics", || sums.add(gpu.device(), [q, k, v]))?;
        let attention = attention_of([q, k, v], &self.weights.1.layers[layer].attn.shape());
        Ok(gpu.stage("Hessians", || sums.add_hessians(gpu, attention))?)
    }

    /// At the end of a round the device is waited for.
    fn add(&mut self, layer: usize, (): ()) -> ModelResult<()> {
        let n_round = match &mut self.order {
            Order::BySequence if layer + 1 < self.layers.len() => return Ok(()),
            Order::BySequence => 1,
            Order::ByLayer { n_sequences, n_seen, n_added } => {
                *n_added += 1;
                if *n_added < *n_sequences {
                    return Ok(());
                }
                (*n_added, *n_seen.get_mut()) = (0, 0);
                *n_sequences
            }
        };
        self.check(layer)?;
        if layer + 1 == self.layers.len() {
            self.n_sequences += n_round;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_element_belongs_to_the_tensor_whose_column_it_is_in() {
        let widths = [8, 4, 4];
        assert_eq!([0, 7, 8, 11, 12, 15, 16, 29].map(|index| role(0, index, widths)), [0, 0, 1, 1, 2, 2, 0, 2]);
        assert_eq!([0, 1, 2].map(|slot| role(slot, 5, [0; 3])), [0, 1, 2]);
    }

    #[test]
    fn triangles_meet_in_their_mean() {
        assert_eq!(symmetrized(vec![1.0, 2.0, 4.0, 1.0], 2), [1.0, 3.0, 3.0, 1.0]);
    }
}
