//! Hidden states of many sequences beside a card that holds two of them: the others wait in pinned host memory, and come and go while
//! another sequence is worked on.
//!
//! Enters: states as a layer leaves them. Leaves: the same bits for the next layer. Three queues meet here: the device computes in one,
//! states move in its other, and weights come by a loader, which is the same card under a handle (and with a pool of memory) of its
//! own, so that a block of weights is handed on to weights alone.

use std::sync::Arc;

use wush_model::Result as ModelResult;
use wush_model::streamed::Carrier;

use crate::backend::{Compute, Gpu};
use crate::buffer::{Buffer, Pinned};
use crate::device::{Device, Event, Queue};
use crate::error::Result;
use crate::tensor::Tensor;

/// Sequences whose states the card holds: the one that is worked on, and the one that goes and makes room for the next.
pub const ON_CARD: usize = 2;

/// See the module.
#[derive(Debug)]
pub struct HostCarrier<T: Compute> {
    device: Device,
    loader: Device,
    width: usize,
    slots: [Slot<T>; ON_CARD],
    /// The slot that was worked on last.
    latest: usize,
    /// Tokens of each sequence.
    n_rows: Vec<usize>,
    /// One a sequence, at least as long; none while the card holds all.
    host: Vec<Pinned<T>>,
}

/// Room for a sequence's states on the card.
#[derive(Debug)]
struct Slot<T: Compute> {
    buffer: Arc<Buffer<T>>,
    holds: Option<usize>,
    /// After the last copy from or to the host that was begun.
    copied: Option<Event>,
}

impl<T: Compute> HostCarrier<T> {
    /// For sequences of at most `n_tokens` through a model of `width`. Host memory is taken as sequences come.
    ///
    /// # Errors
    /// `TooLarge`, `OutOfMemory`, `Driver`.
    pub fn new(gpu: &Gpu<T>, loader: &Gpu<T>, (n_tokens, width): (usize, usize)) -> Result<Self> {
        let (device, loader) = (gpu.device().clone(), loader.device().clone());
        let slot = || {
            let [whole] = Tensor::beside(&device, n_tokens, [width])?;
            Ok(Slot { buffer: whole.into_buffer(), holds: None, copied: None })
        };
        let slots = [slot()?, slot()?];
        Ok(Self { device, loader, width, slots, latest: 0, n_rows: Vec::new(), host: Vec::new() })
    }

    /// Bytes of host memory that are taken.
    pub fn n_host_bytes(&self) -> u64 {
        self.host.iter().map(|states| size_of_val(&**states) as u64).sum()
    }

    /// Whether sequences leave the card between layers.
    fn moves(&self) -> bool {
        self.n_rows.len() > ON_CARD
    }

    fn other(&self) -> usize {
        (self.latest + 1) % ON_CARD
    }

    fn len(&self, sequence: usize) -> usize {
        self.n_rows[sequence] * self.width
    }

    /// Begins to copy states from elsewhere on the card into the slot that is free.
    fn take_in(&mut self, sequence: usize, mut x: Tensor<T>) -> Result<usize> {
        let at = self.other();
        let slot = &mut self.slots[at];
        if let Some(copied) = slot.copied.take() {
            self.device.wait(Queue::Compute, &copied)?;
        }
        // SAFETY: no tensor of this slot is given out, and copies of its former states are waited for.
        let mut into = unsafe { slot.buffer.view_mut_shared(0..x.n_rows * self.width) };
        self.device.copy(x.dense_mut().as_view(), &mut into)?;
        slot.holds = Some(sequence);
        Ok(at)
    }

    /// Begins to copy a slot to the host, after the work that it is in.
    fn begin_download(&mut self, at: usize, sequence: usize) -> Result<()> {
        let len = self.len(sequence);
        while self.host.len() <= sequence {
            self.host.push(self.device.pinned(0)?);
        }
        if self.host[sequence].len() < len {
            self.host[sequence] = self.device.pinned(len)?;
        }
        self.device.wait(Queue::Copy, &self.device.mark(Queue::Compute)?)?;
        let (from, to) = (self.slots[at].buffer.view().slice(0..len), &mut self.host[sequence][..len]);
        // SAFETY: the host touches these states no more; the device does in the same queue alone, and `drop` waits for it.
        unsafe { self.device.begin_download(from, to, Queue::Copy) }?;
        self.slots[at].copied = Some(self.device.mark(Queue::Copy)?);
        Ok(())
    }

    /// Begins to copy states from the host into a slot; they come after its former ones have gone, by the same queue, and after all
    /// work that was begun: after the last layer nothing is parked, and the slot's states are read until then.
    fn begin_upload(&mut self, at: usize, sequence: usize) -> Result<()> {
        let len = self.len(sequence);
        self.device.wait(Queue::Copy, &self.device.mark(Queue::Compute)?)?;
        let slot = &mut self.slots[at];
        // SAFETY: no tensor of this slot is given out: its sequence was parked, or dropped; what reads it was begun before.
        let mut to = unsafe { slot.buffer.view_mut_shared(0..len) };
        // SAFETY: as in `begin_download`.
        unsafe { self.device.begin_upload(&self.host[sequence][..len], &mut to, Queue::Copy) }?;
        slot.copied = Some(self.device.mark(Queue::Copy)?);
        slot.holds = Some(sequence);
        Ok(())
    }

    fn parked(&mut self, sequence: usize, x: Tensor<T>) -> Result<()> {
        self.n_rows[sequence] = x.n_rows;
        let at = match self.slots.iter().position(|slot| x.is_in(&slot.buffer)) {
            Some(at) => at,
            None => self.take_in(sequence, x)?,
        };
        self.latest = at;
        if self.moves() { self.begin_download(at, sequence) } else { Ok(()) }
    }

    fn fetched(&mut self, sequence: usize) -> Result<Tensor<T>> {
        let at = match self.slots.iter().position(|slot| slot.holds == Some(sequence)) {
            Some(at) => at,
            None => {
                let at = self.other();
                self.begin_upload(at, sequence)?;
                at
            }
        };
        self.latest = at;
        if let Some(copied) = self.slots[at].copied.take() {
            self.device.wait(Queue::Compute, &copied)?;
        }
        let (next, other) = ((sequence + 1) % self.n_rows.len(), self.other());
        if self.moves() && self.slots[other].holds != Some(next) {
            self.begin_upload(other, next)?;
        }
        Ok(Tensor::dense(&self.slots[at].buffer, self.n_rows[sequence], self.width))
    }
}

impl<T: Compute> Carrier<Gpu<T>> for HostCarrier<T> {
    fn begin(&mut self, n_sequences: usize) -> ModelResult<()> {
        self.device.synchronize()?;
        self.n_rows = vec![0; n_sequences];
        self.slots.iter_mut().for_each(|slot| slot.holds = None);
        Ok(())
    }

    fn await_weights(&mut self) -> ModelResult<()> {
        Ok(self.device.wait(Queue::Compute, &self.loader.mark(Queue::Compute)?)?)
    }

    fn release_weights(&mut self) -> ModelResult<()> {
        Ok(self.loader.wait(Queue::Compute, &self.device.mark(Queue::Compute)?)?)
    }

    fn park(&mut self, sequence: usize, x: Tensor<T>) -> ModelResult<()> {
        Ok(self.parked(sequence, x)?)
    }

    fn fetch(&mut self, sequence: usize) -> ModelResult<Tensor<T>> {
        Ok(self.fetched(sequence)?)
    }
}

impl<T: Compute> Drop for HostCarrier<T> {
    fn drop(&mut self) {
        // Copies may be on their way from and to memory that goes back now; a device that fails here has failed before.
        let _ = self.device.synchronize();
    }
}
