//! What quantization does to one attention module at a time (Section 5.1): errors of query-key products, softmax
//! probabilities and module outputs, on the activations of the unquantized model.
//!
//! Enters: a decoder, sequences, and caches to compare. Leaves: relative squared errors, layer by layer. All tokens are
//! quantized: there are no windows of full precision here.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use wush_format::monitor::Monitor;
use wush_model::attention::{AttentionProduct, Place};
use wush_model::backend::{Affine, AttentionShape, Backend};
use wush_model::cpu::{Cpu, QueriesKeys, Rows, probability_errors};
use wush_model::decoder::{Decoder, GROUP_TOKENS, groups};
use wush_model::{ModelError, Result as ModelResult};

use crate::cache::{Cached, QuantizedCache};
use crate::{EvalError, Result};

/// `‖Â − A‖²` and `‖A‖²`, summed over tokens, heads and sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Squares {
    /// Of the difference.
    pub error: f64,
    /// Of the exact quantity.
    pub signal: f64,
}

impl Squares {
    /// `error / signal`; 0 where both are 0.
    pub fn relative(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.signal }
    }

    fn add(&mut self, other: Self) {
        self.error += other.error;
        self.signal += other.signal;
    }
}

/// One module's errors with one cache.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ModuleErrors {
    /// Query-key products of all pairs, before scale and mask; keys quantized.
    pub products: Squares,
    /// Softmax probabilities, as the model scales and masks them; keys quantized.
    pub probabilities: Squares,
    /// The module's output after the output projection, without its bias; keys quantized.
    pub keys: Squares,
    /// The same, values quantized.
    pub values: Squares,
    /// The same, both quantized.
    pub both: Squares,
}

impl ModuleErrors {
    fn add(&mut self, other: &Self) {
        let Self { products, probabilities, keys, values, both } = self;
        products.add(other.products);
        probabilities.add(other.probabilities);
        keys.add(other.keys);
        values.add(other.values);
        both.add(other.both);
    }
}

/// Errors of every cache in every layer, `[cache][layer]`. Counts tokens into `monitor`'s current stage, one for each token of
/// `sequences`.
///
/// # Errors
/// `Model`, also for numbers that cannot be quantized; `NothingToScore`.
pub fn reconstruct(
    decoder: &Decoder<'_, Cpu>,
    sequences: &[Vec<u32>],
    caches: &[QuantizedCache],
    monitor: &dyn Monitor,
) -> Result<Vec<Vec<ModuleErrors>>> {
    if sequences.iter().all(|ids| ids.len() < 2) {
        return Err(EvalError::NothingToScore);
    }
    let mut sums = vec![vec![ModuleErrors::default(); decoder.spec().layers.len()]; caches.len()];
    for group in groups(sequences, GROUP_TOKENS) {
        let compared = Compared { decoder, caches, found: Mutex::default() };
        decoder.hidden_of(&sequences[group], &compared, monitor)?;
        let found = compared.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        // In the order of layers and sequences, whatever order threads came in.
        for ((layer, _), errors) in found {
            sums.iter_mut().zip(&errors).for_each(|(sums, errors)| sums[layer].add(errors));
        }
    }
    Ok(sums)
}

/// Exact attention that measures on the way what each cache would have made of it.
struct Compared<'a> {
    decoder: &'a Decoder<'a, Cpu>,
    caches: &'a [QuantizedCache],
    /// By layer and sequence, one entry a cache.
    found: Mutex<BTreeMap<(usize, usize), Vec<ModuleErrors>>>,
}

impl AttentionProduct<Cpu> for Compared<'_> {
    fn attend(&self, backend: &Cpu, place: Place, qkv: [&Rows; 3], shape: &AttentionShape) -> ModelResult<Rows> {
        let [q, k, v] = qkv;
        let projection = self.decoder.output_projection(place.layer)?;
        let output = backend.attention(q, k, v, shape)?;
        let module = Module { place, q, k, v, shape, output: &output, projection: &projection };
        let errors = self.caches.iter().map(|cache| module.errors(cache)).collect::<ModelResult<_>>()?;
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.insert((place.layer, place.sequence), errors);
        Ok(output)
    }
}

/// One sequence in one attention module.
struct Module<'a> {
    place: Place,
    q: &'a Rows,
    k: &'a Rows,
    v: &'a Rows,
    shape: &'a AttentionShape,
    /// Exact attention's, before the projection.
    output: &'a Rows,
    /// W_O.
    projection: &'a Rows,
}

impl Module<'_> {
    fn errors(&self, cache: &QuantizedCache) -> ModelResult<ModuleErrors> {
        let Self { place, q, k, v, shape, .. } = *self;
        let refused = |what| move |_| ModelError::NonFinite { layer: place.layer, what, sequence: place.sequence };
        let cached_keys = cache.keys(place.layer, k, 0..k.n_rows).map_err(refused("keys"))?;
        let cached_values = cache.values(place.layer, v, 0..v.n_rows).map_err(refused("values"))?;
        let queries = cache.queries(place.layer, q, shape.head_dim);
        let queries = queries.as_ref().unwrap_or(q);
        let quantized_keys = cached_keys.as_ref().map_or(k, |cached| &cached.quantized);
        let quantized_values = cached_values.as_ref().map_or(v, |cached| &cached.quantized);
        let output = |attended: Rows| self.output_error(&attended);
        let attend = |q: &Rows, k: &Rows, v: &Rows| Cpu.attention(q, k, v, shape);
        let back = |attended: Rows| cache.outputs(place.layer, attended, shape.head_dim);
        let keys = output(attend(queries, quantized_keys, v)?)?;
        let values = output(back(attend(q, k, quantized_values)?))?;
        let exact = QueriesKeys { queries: q, keys: k };
        let (error, signal) = probability_errors(exact, QueriesKeys { queries, keys: quantized_keys }, shape);
        Ok(ModuleErrors {
            products: self.product_error(queries, cached_keys.as_ref())?,
            probabilities: Squares { error, signal },
            keys,
            values,
            both: output(back(attend(queries, quantized_keys, quantized_values)?))?,
        })
    }

    /// Of `q·k` over all pairs: Σ_ij (q_i · e_j)² = Σ (Σ q qᵀ) ∘ (Σ e eᵀ), a KV head at a time.
    fn product_error(&self, queries: &Rows, cached: Option<&Cached>) -> ModelResult<Squares> {
        let of = |cached: &Cached| self.pairs(queries, &difference(&cached.quantized, &cached.exact));
        Ok(Squares { error: cached.map_or(Ok(0.0), of)?, signal: self.pairs(self.q, self.k)? })
    }

    /// Σ_ij (q_i · k_j)² over all pairs of a query and a key of its KV head.
    fn pairs(&self, queries: &Rows, keys: &Rows) -> ModelResult<f64> {
        let AttentionShape { n_kv_heads, head_dim, .. } = *self.shape;
        let gram = |x: &Rows| {
            let mut gram = vec![0.0; n_kv_heads * head_dim * head_dim];
            Cpu.gram(x, n_kv_heads, head_dim, &mut gram).map(|()| gram)
        };
        Ok(gram(queries)?.iter().zip(gram(keys)?).map(|(q, k)| q * k).sum())
    }

    /// Of the module's output, `attended` being the attention output in the model's coordinates.
    fn output_error(&self, attended: &Rows) -> ModelResult<Squares> {
        let squares = |x: &Rows| {
            let [projected] = Cpu.project(x, None, [Affine { weight: self.projection, bias: None }])?;
            Ok::<f64, ModelError>(projected.data.iter().map(|&x| f64::from(x).powi(2)).sum())
        };
        Ok(Squares { error: squares(&difference(attended, self.output))?, signal: squares(self.output)? })
    }
}

/// `a − b`.
fn difference(a: &Rows, b: &Rows) -> Rows {
    Rows { data: a.data.iter().zip(&b.data).map(|(a, b)| a - b).collect(), ..*a }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The Gram form against the sum over all pairs.
    #[test]
    fn products_are_summed_over_all_pairs_of_a_head() {
        let (n_rows, n_heads, n_kv_heads, head_dim) = (7, 4, 2, 3);
        let shape = AttentionShape { n_heads, n_kv_heads, head_dim, window: None, scale: 1.0, softcap: None };
        let rows = |width: usize, seed: usize| Rows {
            n_rows,
            width,
            data: (0..n_rows * width).map(|i| ((i * 37 + seed) % 23) as f32 / 11.0 - 1.0).collect(),
        };
        let (q, k) = (rows(n_heads * head_dim, 1), rows(n_kv_heads * head_dim, 5));
        let place = Place { layer: 0, sequence: 0 };
        let module = Module { place, q: &q, k: &k, v: &k, shape: &shape, output: &q, projection: &q };
        let mut sum = 0.0;
        for (i, j, head) in
            (0..n_rows * n_rows * n_heads).map(|n| (n / n_heads / n_rows, n / n_heads % n_rows, n % n_heads))
        {
            let query = &q.data[i * q.width + head * head_dim..][..head_dim];
            let key = &k.data[j * k.width + head / 2 * head_dim..][..head_dim];
            sum += query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>().powi(2);
        }
        let pairs = module.pairs(&q, &k).expect("the CPU does not fail");
        assert!((pairs / sum - 1.0).abs() < 1e-12);
    }

    #[test]
    fn nothing_lost_of_nothing_is_no_error() {
        assert_eq!(Squares::default().relative(), 0.0);
        assert_eq!(Squares { error: 1.0, signal: 4.0 }.relative(), 0.25);
    }
}
