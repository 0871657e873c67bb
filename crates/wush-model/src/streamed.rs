//! A pass for models that a device does not hold: two layers' weights at a time, and every layer takes all sequences before the
//! next one does.
//!
//! Enters: as for [`Decoder::observe`], and a [`Carrier`]. Leaves: the same queries, keys and values to the observer, in the same order
//! within a layer; the operations are those of [`Decoder::observe`], so their results have the same bits. While a layer computes, a
//! thread brings the next one's weights, and the carrier takes one sequence's hidden states away and brings another's.

use wush_format::monitor::Monitor;

use crate::attention::{Exact, Place};
use crate::backend::Backend;
use crate::decoder::{Decoder, Step, Ticks};
use crate::error::Result;
use crate::layer::Layer;
use crate::observer::Observer;
use crate::rope::RopeTables;

/// What keeps hidden states while another sequence is worked on, and orders a device's work after the copies that it needs.
pub trait Carrier<B: Backend> {
    /// Forgets the sequences of an earlier pass: one over so many begins.
    ///
    /// # Errors
    /// The device's own.
    fn begin(&mut self, n_sequences: usize) -> Result<()>;

    /// Whatever is begun from here on finds the weights that the loader has brought so far.
    ///
    /// # Errors
    /// The device's own.
    fn await_weights(&mut self) -> Result<()>;

    /// Weights that the loader brings from here on may take the memory of layers that were dropped: they wait for the work that was
    /// begun with those.
    ///
    /// # Errors
    /// The device's own.
    fn release_weights(&mut self) -> Result<()>;

    /// Keeps a sequence's hidden states, as the work that was begun so far leaves them.
    ///
    /// # Errors
    /// The device's own.
    fn park(&mut self, sequence: usize, x: B::Tensor) -> Result<()>;

    /// Gives them back. Sequences are asked for in the order in which they were parked, again and again.
    ///
    /// # Errors
    /// The device's own.
    ///
    /// # Panics
    /// When it was not parked: the caller's invariant.
    fn fetch(&mut self, sequence: usize) -> Result<B::Tensor>;
}

impl<B: Backend> Decoder<'_, B> {
    /// [`Decoder::observe`] a layer at a time: `loader` brings weights beside what this decoder's backend does, and hidden states wait
    /// with `carrier`. Counts tokens into `monitor`'s current stage.
    ///
    /// # Errors
    /// As [`Decoder::observe`]; the carrier's own.
    pub fn stream<O: Observer<B>>(
        &self,
        sequences: &[Vec<u32>],
        observer: &mut O,
        (loader, carrier): (&B, &mut impl Carrier<B>),
        monitor: &dyn Monitor,
    ) -> Result<()> {
        self.check(sequences)?;
        carrier.begin(sequences.len())?;
        let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
        let mut tables = std::mem::replace(&mut *self.tables(), RopeTables::new());
        tables.keep(&lengths);
        let last = self.spec.layers.len() - 1;
        let mut ticks = Ticks::new(self.spec.layers.len());
        std::thread::scope(|scope| -> Result<()> {
            let load = |id: usize| scope.spawn(move || Layer::load(self.checkpoint, &self.spec.layers[id], loader));
            let mut coming = Some(load(0));
            for (id, spec) in self.spec.layers.iter().enumerate() {
                let loading = coming.take().expect("a layer's weights are begun with the layer before");
                let layer = loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                carrier.await_weights()?;
                carrier.release_weights()?;
                coming = (id != last).then(|| load(id + 1));
                let rope = spec.attn.rope.as_ref();
                tables.prepare(rope, &lengths, self.backend)?;
                observer.begin(id)?;
                for (sequence, ids) in sequences.iter().enumerate() {
                    let mut x = match id {
                        0 => self.embed_one(ids)?,
                        _ => carrier.fetch(sequence)?,
                    };
                    let place = Place { layer: id, sequence };
                    let step = Step { layer: &layer, place, table: tables.of(rope, ids.len()), is_whole: id != last };
                    let seen = self.step(&step, &mut x, observer, &Exact, monitor)?;
                    if id != last {
                        carrier.park(sequence, x)?;
                    }
                    observer.add(id, seen)?;
                    monitor.advance(ticks.add(ids.len() as u64));
                }
            }
            Ok(())
        })?;
        *self.tables() = tables;
        Ok(())
    }
}
