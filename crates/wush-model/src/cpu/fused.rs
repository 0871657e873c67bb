//! The projections with what surrounds them, a block of rows at a time.
//!
//! A block passes through norm, products and residual on one thread; what lies between stays in the core's cache, and
//! only a tile of the MLP's intermediate width exists at once.

use std::ops::Range;

use faer::{Accum, MatMut, MatRef, prelude::ReborrowMut as _};
use rayon::prelude::*;

use super::product::accumulate;
use super::{Cpu, Rows, elementwise, matmul};
use crate::backend::{Affine, Mlp, RmsNorm};

/// Rows that pass through together.
const ROWS: usize = 512;
/// Intermediate width that exists at once; a multiple of the products' vector width.
const WIDTH: usize = 192;

/// `norm(x) Wᵀ + b` for each projection, `[tokens, out]`.
pub(super) fn project<const N: usize>(
    x: &Rows,
    norm: Option<RmsNorm<'_, Cpu>>,
    projections: [Affine<'_, Cpu>; N],
) -> [Rows; N] {
    let mut outs = projections.each_ref().map(|p| Rows::zeros(x.n_rows, p.weight.width));
    let mut rest = outs.each_mut().map(|out| out.data.as_mut_slice());
    let mut blocks = Vec::with_capacity(x.n_rows.div_ceil(ROWS));
    for x in x.data.chunks(ROWS * x.width) {
        let n_rows = x.len() / projections[0].weight.n_rows;
        let mut at = 0;
        let block = rest.each_mut().map(|rest| {
            let len = n_rows * projections[at].weight.width;
            at += 1;
            rest.split_off_mut(..len).expect("outputs have as many rows as the input")
        });
        blocks.push((x, block));
    }
    blocks.into_par_iter().for_each_init(Vec::new, |normed, (x, outs)| {
        let x = normalized(x, norm.as_ref(), normed);
        for (out, projection) in outs.into_iter().zip(&projections) {
            matmul::product(out, x, projection.weight);
            add_bias(out, projection.bias.map(Vec::as_slice));
        }
    });
    outs
}

/// `x += norm(y Wᵀ + b)`.
pub(super) fn add_projected(x: &mut Rows, y: &Rows, projection: Affine<'_, Cpu>, norm: Option<RmsNorm<'_, Cpu>>) {
    let blocks = x.data.par_chunks_mut(ROWS * x.width).zip(y.data.par_chunks(ROWS * y.width));
    blocks.for_each_init(Vec::new, |update: &mut Vec<f32>, (x, y)| {
        update.resize(x.len(), 0.0);
        matmul::product(update, y, projection.weight);
        add_bias(update, projection.bias.map(Vec::as_slice));
        add_update(x, update, norm.as_ref());
    });
}

/// `x += after(down(act(gate(z)) * up(z)))` with `z = before(x)`.
pub(super) fn add_mlp(x: &mut Rows, mlp: &Mlp<'_, Cpu>) {
    let (hidden, intermediate) = (mlp.gate.weight.n_rows, mlp.gate.weight.width);
    x.data.par_chunks_mut(ROWS * hidden).for_each_init(Scratch::default, |scratch, x| {
        let n_rows = x.len() / hidden;
        let Scratch { normed, gate, up, update } = scratch;
        let z = MatRef::from_row_major_slice(normalized(x, mlp.before.as_ref(), normed), n_rows, hidden);
        update.resize(x.len(), 0.0);
        let mut into = MatMut::from_row_major_slice_mut(update, n_rows, hidden);
        for first in (0..intermediate).step_by(WIDTH) {
            let columns = first..(first + WIDTH).min(intermediate);
            project_tile(gate, z, &mlp.gate, columns.clone());
            project_tile(up, z, &mlp.up, columns.clone());
            elementwise::gate(gate, up, mlp.activation);
            let gated = MatRef::from_row_major_slice(gate, n_rows, columns.len());
            let down = as_matrix(mlp.down.weight).subrows(first, columns.len());
            let how = if first == 0 { Accum::Replace } else { Accum::Add };
            accumulate(into.rb_mut(), how, gated, down, 1.0);
        }
        add_bias(update, mlp.down.bias.map(Vec::as_slice));
        add_update(x, update, mlp.after.as_ref());
    });
}

/// A thread's buffers: `[ROWS, hidden]` and `[ROWS, WIDTH]`.
#[derive(Default)]
struct Scratch {
    normed: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    update: Vec<f32>,
}

/// The rows after the norm, in `into`; the rows themselves where there is none.
fn normalized<'a>(x: &'a [f32], norm: Option<&RmsNorm<'_, Cpu>>, into: &'a mut Vec<f32>) -> &'a [f32] {
    let Some(norm) = norm else { return x };
    into.clear();
    into.extend_from_slice(x);
    elementwise::rms_norm(into, norm.weight, norm.eps);
    into
}

/// `x += norm(update)`.
fn add_update(x: &mut [f32], update: &mut [f32], norm: Option<&RmsNorm<'_, Cpu>>) {
    if let Some(norm) = norm {
        elementwise::rms_norm(update, norm.weight, norm.eps);
    }
    elementwise::add(x, update);
}

/// `out = x Wᵀ + b` for some of the projection's columns.
fn project_tile(out: &mut Vec<f32>, x: MatRef<'_, f32>, projection: &Affine<'_, Cpu>, columns: Range<usize>) {
    out.resize(x.nrows() * columns.len(), 0.0);
    let weight = as_matrix(projection.weight).subcols(columns.start, columns.len());
    let into = MatMut::from_row_major_slice_mut(out, x.nrows(), columns.len());
    accumulate(into, Accum::Replace, x, weight, 1.0);
    add_bias(out, projection.bias.map(|bias| &bias[columns]));
}

fn add_bias(rows: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        rows.chunks_exact_mut(bias.len()).for_each(|row| elementwise::add(row, bias));
    }
}

fn as_matrix(rows: &Rows) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(&rows.data, rows.n_rows, rows.width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::random;
    use crate::spec::Activation;

    #[test]
    fn blocks_and_tiles_agree_with_the_definition_at_every_border() {
        for (n_tokens, hidden, intermediate) in
            [(1, 3, 5), (ROWS, 4, WIDTH), (ROWS + 1, 5, WIDTH + 1), (7, 3, 2 * WIDTH + 9)]
        {
            let x = random(n_tokens, hidden, 1);
            let [gate, up] = [2, 3].map(|seed| random(hidden, intermediate, seed));
            let down = random(intermediate, hidden, 4);
            let biases = [random(1, intermediate, 5), random(1, intermediate, 6), random(1, hidden, 7)].map(|b| b.data);
            let affine = |weight, i: usize| Affine { weight, bias: Some(&biases[i]) };
            let mlp = Mlp {
                before: None,
                gate: affine(&gate, 0),
                up: affine(&up, 1),
                down: affine(&down, 2),
                activation: Activation::Silu,
                after: None,
            };
            let mut found = x.clone();
            add_mlp(&mut found, &mlp);
            for t in (0..n_tokens).step_by(17).chain([n_tokens - 1]) {
                let project = |w: &Rows, b: &[f32], j: usize| {
                    let terms =
                        (0..hidden).map(|i| f64::from(x.data[t * hidden + i]) * f64::from(w.data[i * w.width + j]));
                    terms.sum::<f64>() + f64::from(b[j])
                };
                let inner = |j: usize| {
                    let g = project(&gate, &biases[0], j);
                    g / (1.0 + (-g).exp()) * project(&up, &biases[1], j)
                };
                let inner: Vec<f64> = (0..intermediate).map(inner).collect();
                for (i, bias) in biases[2].iter().enumerate() {
                    let terms = inner.iter().enumerate().map(|(j, z)| z * f64::from(down.data[j * hidden + i]));
                    let exact = terms.sum::<f64>() + f64::from(*bias) + f64::from(x.data[t * hidden + i]);
                    let diff = (f64::from(found.data[t * hidden + i]) - exact).abs();
                    // A sum of `intermediate` terms below 1, each step rounded to half an ulp of at most `intermediate`.
                    let tol = intermediate as f64 * f64::from(f32::EPSILON);
                    assert!(diff <= tol, "{n_tokens} x {hidden} x {intermediate} at {t}, {i}: {diff:e}");
                }
            }
        }
    }
}
