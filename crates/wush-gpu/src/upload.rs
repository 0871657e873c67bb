//! Weights from mapped files to the device: through pinned memory, in pieces, so that reading one runs beside copying another.

use std::sync::Mutex;

use rayon::prelude::*;

use crate::buffer::{Element, Pinned, ViewMut};
use crate::device::{Device, Event, Queue};
use crate::error::{GpuError, Result};

/// Bytes of a piece: the copy of one takes as long as a few hundred calls of the driver.
const PIECE: usize = 32 << 20;
/// Pieces in flight.
const N_PIECES: usize = 2;
/// Bytes that one thread copies at a time.
const SHARE: usize = 1 << 20;

/// Pinned memory of one device, taken at the first upload.
#[derive(Debug)]
pub struct Uploader {
    device: Device,
    pieces: Mutex<Vec<Piece>>,
}

#[derive(Debug)]
struct Piece {
    memory: Pinned<u8>,
    /// After the copy that reads it.
    read: Option<Event>,
}

impl Uploader {
    /// Takes no memory yet.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), pieces: Mutex::default() }
    }

    /// Copies `bytes` to `to`, which holds as many: beside what the compute queue does, but after what it has to do so far, which
    /// may use the same memory; and before whatever it gets from here on. Returns when all are read; they may still be on
    /// their way.
    ///
    /// # Errors
    /// `Length` when they differ, `Driver`.
    pub fn upload<T: Element>(&self, bytes: &[u8], to: &mut ViewMut<'_, T>) -> Result<()> {
        let mut target = to.as_bytes();
        if bytes.len() != target.len() {
            let (expected, found) = (target.len(), bytes.len());
            return Err(GpuError::Length { what: "an upload's bytes", expected, found });
        }
        let mut pieces = self.pieces.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        while pieces.len() < N_PIECES {
            pieces.push(Piece { memory: self.device.pinned(PIECE)?, read: None });
        }
        self.device.wait(Queue::Copy, &self.device.mark(Queue::Compute)?)?;
        for (i, bytes) in bytes.chunks(PIECE).enumerate() {
            let piece = &mut pieces[i % N_PIECES];
            if let Some(read) = piece.read.take() {
                read.synchronize()?;
            }
            let memory = &mut piece.memory[..bytes.len()];
            memory.par_chunks_mut(SHARE).zip(bytes.par_chunks(SHARE)).for_each(|(to, from)| to.copy_from_slice(from));
            let first = i * PIECE;
            let mut part = target.slice(first..first + bytes.len());
            // SAFETY: the piece is neither written nor freed before its mark is reached.
            unsafe { self.device.begin_upload(&piece.memory[..bytes.len()], &mut part, Queue::Copy) }?;
            piece.read = Some(self.device.mark(Queue::Copy)?);
        }
        self.device.wait(Queue::Compute, &self.device.mark(Queue::Copy)?)
    }
}
