//! A model on one card as its memory was planned: all layers there, or two at a time.
//!
//! Enters: a plan of the memory, sequences. Leaves: what an observer of the forward pass sees. Sums and files are others' business.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use wush_checkpoint::Checkpoint;
use wush_format::monitor::Monitor;
use wush_model::Result as ModelResult;
use wush_model::decoder::{Decoder, groups};
use wush_model::observer::Observer;
use wush_model::spec::ModelSpec;

use crate::backend::{Compute, Gpu};
use crate::carrier::HostCarrier;
use crate::device::Device;
use crate::error::Result;
use crate::plan::{GpuMemory, Placement, Work};

/// Tokens that go through a layer together at most while a model streams. A layer's bytes are read once for all of them, two operations
/// a weight and token: at 600 TFLOP/s a million tokens hide the reading of bf16 weights wherever they come at 0.6 GB/s, and more
/// would only mean more hidden states on the host, and a longer way from one save to the next.
pub const GROUP_TOKENS: usize = 1 << 20;

/// See the module.
#[derive(Debug)]
pub struct Forward<T: Compute> {
    gpu: Gpu<T>,
    streaming: Option<Streaming<T>>,
}

#[derive(Debug)]
struct Streaming<T: Compute> {
    /// The same card under another handle.
    loader: Gpu<T>,
    carrier: Mutex<HostCarrier<T>>,
}

impl<T: Compute> Forward<T> {
    /// Runs on `gpu` within `limit` bytes, which `memory` was planned for; `loader` makes the backend that brings a streamed model's
    /// weights, of another handle of the same card.
    ///
    /// # Errors
    /// Those of opening a device; `OutOfMemory`.
    pub fn new(
        gpu: Gpu<T>,
        loader: impl FnOnce(Device) -> Gpu<T>,
        (work, memory): (&Work<'_>, &GpuMemory),
        limit: u64,
    ) -> Result<Self> {
        let streaming = match memory.placement {
            Placement::Resident => {
                gpu.device().set_budget(memory.total(), limit);
                None
            }
            Placement::Streamed => {
                let loader = loader(Device::open(gpu.device().info().ordinal)?);
                let [planned, most] = [memory.total(), limit].map(|bytes| memory.budgets::<T>(work, bytes));
                loader.device().set_budget(planned[0], most[0]);
                gpu.device().set_budget(planned[1], most[1]);
                let carrier = HostCarrier::new(&gpu, &loader, (work.n_tokens, work.spec.hidden_size))?;
                Some(Streaming { loader, carrier: Mutex::new(carrier) })
            }
        };
        Ok(Self { gpu, streaming })
    }

    /// Where the model computes.
    pub fn gpu(&self) -> &Gpu<T> {
        &self.gpu
    }

    /// The model's decoder here.
    pub fn decoder<'a>(&'a self, checkpoint: &'a Checkpoint, spec: &'a ModelSpec) -> Decoder<'a, Gpu<T>> {
        let decoder = Decoder::new(checkpoint, spec, &self.gpu);
        if self.is_streamed() { decoder } else { decoder.keeping_weights() }
    }

    /// Whether all sequences of a group go through a layer before the next layer.
    pub fn is_streamed(&self) -> bool {
        self.streaming.is_some()
    }

    /// Which sequences are to be observed together.
    pub fn groups<'s>(&self, sequences: &'s [Vec<u32>]) -> impl Iterator<Item = Range<usize>> + use<'s, T> {
        groups(sequences, if self.is_streamed() { GROUP_TOKENS } else { 0 })
    }

    /// Shows `sequences`, one of [`Forward::groups`], to `observer`.
    ///
    /// # Errors
    /// As [`Decoder::observe`].
    pub fn observe<O: Observer<Gpu<T>>>(
        &self,
        decoder: &Decoder<'_, Gpu<T>>,
        sequences: &[Vec<u32>],
        observer: &mut O,
        monitor: &dyn Monitor,
    ) -> ModelResult<()> {
        match &self.streaming {
            None => decoder.observe(sequences, observer, monitor),
            Some(Streaming { loader, carrier }) => {
                let mut carrier = carrier.lock().unwrap_or_else(PoisonError::into_inner);
                decoder.stream(sequences, observer, (loader, &mut *carrier), monitor)
            }
        }
    }

    /// Bytes that were taken from the card at most, and of pinned host memory.
    pub fn peak(&self) -> [u64; 2] {
        let on_card = self.gpu.device().memory().peak_reserved;
        let Some(Streaming { loader, carrier }) = &self.streaming else { return [on_card, 0] };
        let on_host = carrier.lock().unwrap_or_else(PoisonError::into_inner).n_host_bytes();
        [on_card + loader.device().memory().peak_reserved, on_host]
    }
}
