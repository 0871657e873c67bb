//! A pass a layer at a time against one that keeps all layers: the same bits, and the carrier is asked as it may rely on.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::Collector;
use wush_checkpoint::Checkpoint;
use wush_format::monitor::Quiet;
use wush_model::backend::Backend;
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;
use wush_model::spec::ModelSpec;
use wush_model::streamed::Carrier;
use wush_model::{ModelError, Result, arch};

type States = <Cpu as Backend>::Tensor;

/// Keeps states where they are, and what it was asked.
#[derive(Default)]
struct Shelf {
    states: BTreeMap<usize, States>,
    calls: Vec<String>,
}

impl Carrier<Cpu> for Shelf {
    fn begin(&mut self, n_sequences: usize) -> Result<()> {
        self.calls.push(format!("begin {n_sequences}"));
        Ok(())
    }

    fn await_weights(&mut self) -> Result<()> {
        self.calls.push("await".into());
        Ok(())
    }

    fn release_weights(&mut self) -> Result<()> {
        self.calls.push("release".into());
        Ok(())
    }

    fn park(&mut self, sequence: usize, x: States) -> Result<()> {
        self.calls.push(format!("park {sequence}"));
        assert!(self.states.insert(sequence, x).is_none(), "sequence {sequence} was parked twice");
        Ok(())
    }

    fn fetch(&mut self, sequence: usize) -> Result<States> {
        self.calls.push(format!("fetch {sequence}"));
        Ok(self.states.remove(&sequence).expect("parked before"))
    }
}

fn open(name: &str) -> (Checkpoint, ModelSpec) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny").join(name);
    let checkpoint = Checkpoint::open(&folder).expect("a fixture");
    let spec = arch::resolve(&checkpoint, None).expect("a known family");
    (checkpoint, spec)
}

#[test]
fn a_layer_at_a_time_gives_the_bits_of_all_at_once() {
    let (checkpoint, spec) = open("llama-gqa");
    let id = |s: usize, t: usize| ((17 * t + 5 * s + 3) % spec.vocab_size) as u32;
    let sequences: Vec<Vec<u32>> =
        [9, 24, 17].iter().enumerate().map(|(s, &n)| (0..n).map(|t| id(s, t)).collect()).collect();
    let decoder = Decoder::new(&checkpoint, &spec, &Cpu);
    let collector = || Collector::new(&spec);
    let (mut whole, mut streamed, mut shelf) = (collector(), collector(), Shelf::default());
    decoder.observe(&sequences, &mut whole, &Quiet).expect("finite");
    decoder.stream(&sequences, &mut streamed, (&Cpu, &mut shelf), &Quiet).expect("finite");
    assert_eq!(whole.layers.len(), spec.layers.len());
    assert_eq!(whole.layers, streamed.layers);
    let n_layers = spec.layers.len();
    let mut expected = vec!["begin 3".to_owned()];
    for layer in 0..n_layers {
        expected.extend(["await", "release"].map(str::to_owned));
        for sequence in 0..sequences.len() {
            expected.extend((layer > 0).then(|| format!("fetch {sequence}")));
            expected.extend((layer + 1 < n_layers).then(|| format!("park {sequence}")));
        }
    }
    assert_eq!(shelf.calls, expected);
}

#[test]
fn a_sequence_that_the_model_cannot_take_is_refused_before_anything_is_loaded() {
    let (checkpoint, spec) = open("llama-gqa");
    let decoder = Decoder::new(&checkpoint, &spec, &Cpu);
    let mut collector = Collector::new(&spec);
    let mut shelf = Shelf::default();
    let error = decoder.stream(&[vec![1], vec![]], &mut collector, (&Cpu, &mut shelf), &Quiet).expect_err("empty");
    assert!(matches!(error, ModelError::Sequence { sequence: 1, .. }), "{error}");
    assert!(shelf.calls.is_empty() && collector.layers.is_empty());
}
