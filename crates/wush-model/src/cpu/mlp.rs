//! The gated MLP, a tile of its intermediate activations at a time.
//!
//! A block of rows passes through the whole MLP on one thread, and only a tile of the intermediate width exists at once:
//! it stays in the core's cache between the three products.

use std::ops::Range;

use faer::{Accum, MatMut, MatRef, prelude::ReborrowMut as _};
use rayon::prelude::*;

use super::product::{accumulate, multiply};
use super::{Cpu, Rows, elementwise};
use crate::backend::Mlp;
use crate::spec::Activation;

/// Rows that pass through together.
const ROWS: usize = 512;
/// Intermediate width that exists at once; a multiple of the products' vector width.
const WIDTH: usize = 192;

/// `act(x Gᵀ + b_g) * (x Uᵀ + b_u)`, then `Dᵀ` and its bias: `[tokens, hidden]` from `[tokens, hidden]`.
pub(super) fn gated(x: &Rows, mlp: &Mlp<'_, Cpu>, activation: Activation) -> Rows {
    let mut out = Rows::zeros(x.n_rows, mlp.down.width);
    let blocks = x.data.par_chunks(ROWS * x.width).zip(out.data.par_chunks_mut(ROWS * mlp.down.width));
    blocks.for_each_init(Tile::default, |tile, (x, out)| {
        let n_rows = x.len() / mlp.gate.n_rows;
        let x = MatRef::from_row_major_slice(x, n_rows, mlp.gate.n_rows);
        let mut into = MatMut::from_row_major_slice_mut(out, n_rows, mlp.down.width);
        for first in (0..mlp.gate.width).step_by(WIDTH) {
            let columns = first..(first + WIDTH).min(mlp.gate.width);
            project(&mut tile.gate, x, mlp.gate, mlp.biases[0], columns.clone());
            project(&mut tile.up, x, mlp.up, mlp.biases[1], columns.clone());
            elementwise::gate(&mut tile.gate, &tile.up, activation);
            let gated = MatRef::from_row_major_slice(&tile.gate, n_rows, columns.len());
            let down = as_matrix(mlp.down).subrows(first, columns.len());
            let how = if first == 0 { Accum::Replace } else { Accum::Add };
            accumulate(into.rb_mut(), how, gated, down, 1.0);
        }
        if let Some(bias) = mlp.biases[2] {
            out.chunks_exact_mut(bias.len()).for_each(|row| elementwise::add(row, bias));
        }
    });
    out
}

/// A thread's intermediate activations, `[ROWS, WIDTH]` each.
#[derive(Default)]
struct Tile {
    gate: Vec<f32>,
    up: Vec<f32>,
}

/// `out = x Wᵀ + b` for some of the weight's columns.
fn project(out: &mut Vec<f32>, x: MatRef<'_, f32>, weight: &Rows, bias: Option<&Vec<f32>>, columns: Range<usize>) {
    out.resize(x.nrows() * columns.len(), 0.0);
    let weight = as_matrix(weight).subcols(columns.start, columns.len());
    multiply(MatMut::from_row_major_slice_mut(out, x.nrows(), columns.len()), x, weight, 1.0);
    if let Some(bias) = bias {
        out.chunks_exact_mut(columns.len()).for_each(|row| elementwise::add(row, &bias[columns.clone()]));
    }
}

fn as_matrix(rows: &Rows) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(&rows.data, rows.n_rows, rows.width)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudo-random values in [-0.5, 0.5).
    fn rows(n_rows: usize, width: usize, seed: u32) -> Rows {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        Rows { n_rows, width, data: std::iter::repeat_with(next).take(n_rows * width).collect() }
    }

    #[test]
    fn blocks_and_tiles_agree_with_the_definition_at_every_border() {
        for (n_tokens, hidden, intermediate) in
            [(1, 3, 5), (ROWS, 4, WIDTH), (ROWS + 1, 5, WIDTH + 1), (7, 3, 2 * WIDTH + 9)]
        {
            let x = rows(n_tokens, hidden, 1);
            let [gate, up] = [2, 3].map(|seed| rows(hidden, intermediate, seed));
            let down = rows(intermediate, hidden, 4);
            let biases = [rows(1, intermediate, 5), rows(1, intermediate, 6), rows(1, hidden, 7)].map(|b| b.data);
            let mlp = Mlp { gate: &gate, up: &up, down: &down, biases: biases.each_ref().map(Some) };
            let found = gated(&x, &mlp, Activation::Silu);
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
                    let exact = terms.sum::<f64>() + f64::from(*bias);
                    let diff = (f64::from(found.data[t * hidden + i]) - exact).abs();
                    // A sum of `intermediate` terms below 1, each step rounded to half an ulp of at most `intermediate`.
                    let tol = intermediate as f64 * f64::from(f32::EPSILON);
                    assert!(diff <= tol, "{n_tokens} x {hidden} x {intermediate} at {t}, {i}: {diff:e}");
                }
            }
        }
    }
}
