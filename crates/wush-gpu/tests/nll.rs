//! Log likelihoods on a GPU against f64 on the host. Skipped, loudly, without a GPU.

mod common;

use common::random;
use wush_gpu::Device;
use wush_gpu::matmul::Matrix;

/// Nats: a maximum of up to 30 in f32 is within 2⁻²⁰, and so is each difference from it, the relative error of an exponential.
const NATS_TOL: f64 = 4e-6;

struct Case {
    n_rows: usize,
    width: usize,
    stride: usize,
    softcap: Option<f32>,
}

impl Case {
    fn logits(&self) -> Vec<f32> {
        random(self.width as u64, self.n_rows * self.stride).into_iter().map(|x| 30.0 * x).collect()
    }

    fn run(&self, device: &Device, logits: &[f32], targets: &[u32]) -> Vec<f64> {
        let (logits, targets) = (device.upload(logits).expect("uploaded"), device.upload(targets).expect("uploaded"));
        let mut out = device.filled(self.n_rows, 0xff).expect("room");
        let x = Matrix { view: logits.view(), n_rows: self.n_rows, width: self.width, stride: self.stride };
        device.nll(x, self.softcap, targets.view(), &mut out.view_mut()).expect("begun");
        out.to_host().expect("done")
    }

    fn expected(&self, row: &[f32], target: u32) -> f64 {
        let cap =
            |&x: &f32| self.softcap.map_or(x.into(), |cap| f64::from(cap) * (f64::from(x) / f64::from(cap)).tanh());
        row.iter().map(|x| cap(x).exp()).sum::<f64>().ln() - cap(&row[target as usize])
    }
}

#[test]
fn every_row_agrees_with_f64() {
    let Some(device) = common::device("every_row_agrees_with_f64") else { return };
    for (n_rows, width, stride, softcap) in [
        (1, 1, 1, None),
        (3, 31, 40, None),
        (128, 1024, 1024, Some(15.0)),
        (7, 49_152, 49_152, None),
        (2, 151_937, 151_937, None),
    ] {
        let case = Case { n_rows, width, stride, softcap };
        let logits = case.logits();
        let targets: Vec<u32> = (0..n_rows).map(|row| ((row * 7919 + width - 1) % width) as u32).collect();
        for (row, found) in case.run(&device, &logits, &targets).into_iter().enumerate() {
            let exact = case.expected(&logits[row * stride..][..width], targets[row]);
            assert!((found - exact).abs() <= NATS_TOL, "{width} logits, row {row}: {found} against {exact}");
        }
    }
}

#[test]
fn what_is_no_likelihood_is_not_finite() {
    let Some(device) = common::device("what_is_no_likelihood_is_not_finite") else { return };
    let case = Case { n_rows: 4, width: 300, stride: 300, softcap: None };
    let mut logits = case.logits();
    logits[5] = f32::NAN;
    logits[300 + 299] = f32::INFINITY;
    let found: Vec<bool> = case.run(&device, &logits, &[0, 0, 300, 7]).into_iter().map(f64::is_finite).collect();
    assert_eq!(found, [false, false, false, true]);
}
