//! OSCAR's second pass on the device: `Σ_t w_h[t] v_t v_tᵀ` with `w_h[t] = k_tᵀ A_h k_t`, summed in f64 and downloaded once.
//!
//! Enters: A_h of every layer, keys and values of a forward pass on a [`Gpu`]. Leaves: one more Gram matrix a head; see
//! `wush_stats::SecondPass`, whose sums these are. Products of two activations are exact in f64, so both agree but for the order of
//! their sums.

use std::sync::{Mutex, PoisonError};

use wush_format::transforms::HeadMatrices;
use wush_model::observer::Observer;
use wush_model::{ModelError, Result as ModelResult};

use crate::backend::{Compute, Gpu};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor;

/// Running sums of all layers.
#[derive(Debug)]
pub struct WeightedSums {
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    head_dim: usize,
    /// A_h, `[n_kv, d, d]`.
    means: Buffer<f64>,
    /// `[n_kv, d, d]`.
    sums: Mutex<Buffer<f64>>,
}

impl WeightedSums {
    /// Begins at zero, with the A_h of every layer in order.
    ///
    /// # Errors
    /// `OutOfMemory`, `Driver`.
    pub fn new<'a>(device: &Device, means: impl Iterator<Item = &'a HeadMatrices>) -> Result<Self> {
        let layers = means.map(|means| {
            let sums = Mutex::new(device.filled(means.data.len(), 0)?);
            Ok(Layer { head_dim: means.dim, means: device.upload(&means.data)?, sums })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }

    /// The sums of all layers, in order; waits for the device.
    ///
    /// # Errors
    /// `Driver`, also for what an earlier kernel did.
    pub fn download(&self) -> Result<Vec<Vec<f64>>> {
        self.layers.iter().map(|layer| layer.sums.lock().unwrap_or_else(PoisonError::into_inner).to_host()).collect()
    }
}

impl Layer {
    fn add<T: Compute>(&self, device: &Device, k: &Tensor<T>, v: &Tensor<T>) -> Result<()> {
        let weights = device.quadratic_forms(k.matrix(), self.means.view(), self.head_dim)?;
        let parts = device.weighted_gram_parts(v.matrix(), Some(weights.view()), self.head_dim)?;
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        device.add_gram(&parts, 0..parts.n_heads(), &mut sums.view_mut())
    }
}

impl<T: Compute> Observer<Gpu<T>> for WeightedSums {
    type Seen = ();

    fn see(&self, gpu: &Gpu<T>, layer: usize, _: &Tensor<T>, k: &Tensor<T>, v: &Tensor<T>) -> ModelResult<()> {
        let Some(sums) = self.layers.get(layer) else {
            return Err(ModelError::Sequence {
                sequence: 0,
                detail: format!("layer {layer} is not in the statistics"),
            });
        };
        Ok(gpu.stage("weighted sums", || sums.add(gpu.device(), k, v))?)
    }

    /// Nothing: the device adds in the order in which it sees.
    fn add(&mut self, _: usize, (): ()) -> ModelResult<()> {
        Ok(())
    }
}
