//! How long the keys of a model can be, from its weights alone: what a mean key is held to. Enters: a layer. Leaves: a bound for
//! each KV head. A mean of vectors is never longer than the longest of them.

use wush_checkpoint::Checkpoint;
use wush_model::spec::{LayerSpec, NormSpec, QkNorm};
use wush_model::weights::read_f64;
use wush_model::{ModelError, rope::RopeSpec};

/// Keys are computed in f32, in sums of up to some thousand products: n·u for n = 2¹², u = 2⁻²⁴.
const ARITHMETIC: f64 = 1.0 / (1u64 << 12) as f64;

/// The longest key of each KV head after RoPE, which turns vectors and scales them by its attention factor.
///
/// An RMS norm leaves a vector of at most √n, times its multipliers. A norm of the keys themselves decides alone; without one
/// `|W m x + b| ≤ √n ‖W m‖ + |b|`, row by row, where there is a norm before the projection; else there is no bound.
///
/// # Errors
/// A tensor that is absent, of another shape, or of integers.
pub(crate) fn longest_keys(checkpoint: &Checkpoint, layer: &LayerSpec) -> Result<Vec<f64>, ModelError> {
    let attn = &layer.attn;
    let (dim, width) = (attn.head_dim, attn.n_kv_heads * attn.head_dim);
    let squares = match &attn.k_norm {
        QkNorm::PerHead(norm) => {
            let most = multipliers(checkpoint, norm)?.iter().fold(0.0, |most: f64, m| most.max(m.abs()));
            vec![dim as f64 * most * most; attn.n_kv_heads]
        }
        QkNorm::FullWidth(norm) => {
            let most = |head: &[f64]| head.iter().fold(0.0, |most: f64, m| most.max(m.abs()));
            let of_head = |head: &[f64]| width as f64 * most(head).powi(2);
            multipliers(checkpoint, norm)?.chunks(dim).map(of_head).collect()
        }
        QkNorm::None => match &layer.attn_pre_norm {
            Some(norm) => projected(checkpoint, layer, norm)?.chunks(dim).map(|rows| rows.iter().sum()).collect(),
            None => vec![f64::INFINITY; attn.n_kv_heads],
        },
    };
    let factor = attn.rope.as_ref().map_or(1.0, |rope: &RopeSpec| f64::from(rope.attention_factor).abs().max(1.0));
    Ok(squares.into_iter().map(|square| square.sqrt() * factor * (1.0 + ARITHMETIC)).collect())
}

/// The largest square of each coordinate of the keys, `[n_kv d]`.
fn projected(checkpoint: &Checkpoint, layer: &LayerSpec, norm: &NormSpec) -> Result<Vec<f64>, ModelError> {
    let (k, multipliers) = (&layer.attn.k, multipliers(checkpoint, norm)?);
    let (weights, n) = (read_f64(checkpoint, &k.weight)?, k.weight.cols.max(1));
    let bias = k.bias.as_ref().map(|bias| read_f64(checkpoint, bias)).transpose()?;
    let largest = |(row, weights): (usize, &[f64])| {
        let squares: f64 = weights.iter().zip(&multipliers).map(|(w, m)| (w * m).powi(2)).sum();
        let bias = bias.as_ref().and_then(|bias| bias.get(row)).map_or(0.0, |b| b.abs());
        ((n as f64 * squares).sqrt() + bias).powi(2)
    };
    Ok(weights.chunks(n).enumerate().map(largest).collect())
}

/// What an RMS norm multiplies by.
fn multipliers(checkpoint: &Checkpoint, norm: &NormSpec) -> Result<Vec<f64>, ModelError> {
    let mut weights = read_f64(checkpoint, &norm.weight)?;
    if norm.plus_one {
        weights.iter_mut().for_each(|w| *w += 1.0);
    }
    Ok(weights)
}
