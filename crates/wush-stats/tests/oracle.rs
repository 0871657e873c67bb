//! Eq. 4 against the oracle's attention modules, through the accumulator and the output projection's Gram matrix.

mod common;

use common::{Module, info, show, spec, write_checkpoint};
use wush_checkpoint::Checkpoint;
use wush_model::cpu::Rows;
use wush_stats::{Accumulator, Statistics, output_gram};

/// The oracle's f64 activations and weights are rounded to f32 (2^-24 each) on their way in; a product carries two such
/// errors. Relative to sqrt(G_ii G_jj), twice that.
const F32_INPUT_TOL: f64 = 4.0 / (1u64 << 24) as f64;

impl Module {
    /// `[heads, d, S]` to rows `[S, heads d]`.
    fn rows(&self, sequence: usize, key: &str, n_heads: usize) -> Rows {
        let (dim, len) = (self.shape.head_dim, self.seq_len);
        let columns = self.tensor(&format!("seq{sequence}.{key}"), &[n_heads, dim, len]);
        let width = n_heads * dim;
        let data = (0..len * width).map(|at| columns[(at % width) * len + at / width] as f32).collect();
        Rows { n_rows: len, width, data }
    }

    /// `[n_q, d, d_model]` to the stored `[d_model, n_q d]`.
    fn output_projection(&self) -> Vec<f32> {
        let width = self.shape.n_heads * self.shape.head_dim;
        let blocks = self.tensor("Wo", &[self.shape.n_heads, self.shape.head_dim, self.hidden]);
        (0..self.hidden * width).map(|at| blocks[(at % width) * self.hidden + at / width] as f32).collect()
    }

    fn statistics(&self) -> Statistics {
        let spec = spec(&[self.shape], self.hidden);
        let mut statistics = Statistics::new(&spec, info());
        let sequences = vec![vec![0; self.seq_len]; self.n_sequences];
        let mut accumulator = Accumulator::new(&mut statistics, &sequences);
        for sequence in 0..self.n_sequences {
            let q = self.rows(sequence, "Q", self.shape.n_heads);
            let [k, v] = ["K", "V"].map(|key| self.rows(sequence, key, self.shape.n_kv_heads));
            show(&mut accumulator, 0, [&q, &k, &v]).expect("finite");
        }
        accumulator.finish().expect("complete");
        let dir = tempfile::tempdir().expect("a temporary directory");
        write_checkpoint(dir.path(), &spec, &[self.output_projection()]);
        let checkpoint = Checkpoint::open(dir.path()).expect("valid");
        output_gram(&checkpoint, &spec, &mut statistics).expect("readable");
        statistics
    }

    /// Fails unless |found − expected| ≤ tol sqrt(G_ii G_jj) everywhere.
    fn assert_close(&self, key: &str, head: usize, found: &[f64]) {
        let dim = self.shape.head_dim;
        let all = self.tensor(key, &[self.shape.n_kv_heads, dim, dim]);
        let expected = &all[head * dim * dim..][..dim * dim];
        assert_eq!(found.len(), expected.len());
        for (at, (x, y)) in found.iter().zip(expected).enumerate() {
            let scale = (expected[at / dim * (dim + 1)] * expected[at % dim * (dim + 1)]).sqrt();
            let error = (x - y).abs() / scale;
            assert!(error <= F32_INPUT_TOL, "{} {key} head {head} [{at}]: {x:e}, expected {y:e}", self.name);
        }
    }
}

#[test]
fn equation_4_is_the_oracles() {
    let modules = Module::all();
    assert_eq!(modules.len(), 2);
    for module in &modules {
        let statistics = module.statistics();
        let layer = &statistics.layers[&0];
        for head in 0..module.shape.n_kv_heads {
            module.assert_close("MK", head, layer.key_gram.head(head));
            module.assert_close("MV", head, layer.value_gram.head(head));
            module.assert_close("HK_wush", head, &layer.key_hessian(head));
            module.assert_close("HV_wush", head, &layer.value_hessian(head));
        }
        assert_eq!(statistics.info.positions, (module.n_sequences * module.seq_len) as u64);
    }
}

#[test]
fn key_sums_are_the_sums_of_the_keys() {
    for module in &Module::all() {
        let width = module.shape.n_kv_heads * module.shape.head_dim;
        let mut expected = vec![0.0; width];
        for sequence in 0..module.n_sequences {
            let keys = module.rows(sequence, "K", module.shape.n_kv_heads);
            keys.data.iter().enumerate().for_each(|(at, x)| expected[at % width] += f64::from(*x));
        }
        let found = &module.statistics().layers[&0].key_sum;
        // A sum of n f64 terms of magnitude at most 8 carries at most n 2^-53 of their sum.
        let tol = (module.n_sequences * module.seq_len * 8) as f64 * f64::EPSILON;
        for (x, y) in found.iter().zip(&expected) {
            assert!((x - y).abs() <= tol, "{}: {x:e}, expected {y:e}", module.name);
        }
    }
}
