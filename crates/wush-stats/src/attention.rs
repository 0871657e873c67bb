//! Appendix C: the exact Hessians of the attention module's squared output error, summed over the positions of one sequence.
//!
//! Enters: queries, keys and values of one sequence in one layer, and the products of output projections. Leaves: f64 sums
//! a KV head. O(S²) time and O(S) memory a head: probabilities exist for a block of queries at a time. All in f64; f32
//! inputs are widened exactly.

use faer::prelude::ReborrowMut as _;
use faer::{Accum, Mat, MatMut, MatRef, Par};
use rayon::prelude::*;
use wush_format::transforms::HeadMatrices;
use wush_model::spec::AttentionSpec;

/// Queries whose probabilities over all keys are held together: with 8 query heads a KV head and 32,768 keys, 64 MiB.
const QUERY_BLOCK: usize = 32;

/// Eq. 4's and Eq. 49's factor of a squared error.
const SQUARE_FACTOR: f64 = 2.0;

/// Γ of one layer: for KV head h the blocks Γ_{h,g,g'} = W_O(h,g) W_O(h,g')ᵀ `[d, d]` of a matrix `[G d, G d]`.
pub type Couplings = HeadMatrices;

/// Hessians of one layer, `[n_kv, d, d]`.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionHessians {
    /// Σ_s H_K(h,s), Eq. 56.
    pub key: HeadMatrices,
    /// Σ_s H_V(h,s), Eq. 60.
    pub value: HeadMatrices,
}

impl AttentionHessians {
    /// All zeros.
    pub fn zeros(n_kv_heads: usize, head_dim: usize) -> Self {
        let zeros = || HeadMatrices::zeros(n_kv_heads, head_dim);
        Self { key: zeros(), value: zeros() }
    }

    /// Adds another's sums: Eq. 61 over sequences.
    pub fn add(&mut self, other: &Self) {
        for (sum, part) in [(&mut self.key, &other.key), (&mut self.value, &other.value)] {
            sum.data.iter_mut().zip(&part.data).for_each(|(sum, part)| *sum += part);
        }
    }
}

/// Bytes that [`attention_hessians`] holds at most, for sequences of `n_tokens` on each of `n_threads` threads.
pub fn attention_memory(spec: &AttentionSpec, n_tokens: usize, n_threads: usize) -> u64 {
    let (dim, group) = (spec.head_dim, spec.n_heads / spec.n_kv_heads.max(1));
    // Two strips a query head (probabilities, and their transposition or slopes), and three that pass.
    let strips = (2 * group + 3) * QUERY_BLOCK;
    // Queries, keys and values, widened; the energies of all pairs of a head.
    let rows = (spec.n_heads + 2 * spec.n_kv_heads) * dim + group * group;
    let weights = spec.n_kv_heads * (group * dim) * (group * dim);
    let elements = (strips + rows) as u64 * n_tokens as u64 * n_threads as u64 + weights as u64;
    elements * size_of::<f64>() as u64
}

/// Sums of Eq. 56 and Eq. 60 over the positions s of one sequence, as Eq. 61 takes them.
///
/// ```text
/// Σ_s H_K(h,s) = 2 τ⁻² Σ_{a,b} Q_a diag(c_{·,a,b}) Q_bᵀ     c_{t,a,b} = Σ_s p_{a,t,s} p_{b,t,s} (v_s − o_{a,t})ᵀ Γ_{a,b} (v_s − o_{b,t})
/// Σ_s H_V(h,s) = 2 Σ_{a,b} (Σ_t w_{t,a,b}) Γ_{a,b}            w_{t,a,b} = Σ_s p_{a,t,s} p_{b,t,s}
/// ```
///
/// | symbol | argument | meaning, shape |
/// |---|---|---|
/// | q, k, v | `rows` | as attention gets them: `[S, n_heads d]`, `[S, n_kv d]`, `[S, n_kv d]`, row-major |
/// | τ⁻¹, window, softcap | `spec` | what turns q·k into probabilities p; a query reads no later key |
/// | a, b | | query heads that read KV head h |
/// | Γ | `couplings` | products of the heads' output projections |
///
/// c is expanded, so that no residual of a pair (s, t) is formed: one product of E = p_a ∘ p_b with V a pair of heads. A
/// softcap's slope 1 − tanh² enters c beside each p, since only the key's way to the output passes through it. What follows
/// the output projection (a norm, in some families) is not part of the module.
///
/// # Panics
/// When the lengths are not those of `spec` and `couplings`: the caller's invariant.
pub fn attention_hessians(rows: [&[f64]; 3], spec: &AttentionSpec, couplings: &Couplings) -> AttentionHessians {
    let (dim, group) = (spec.head_dim, spec.n_heads / spec.n_kv_heads);
    let [q, k, v] = rows;
    let n_tokens = k.len() / (spec.n_kv_heads * dim);
    let matrix = |data, n_heads: usize| MatRef::from_row_major_slice(data, n_tokens, n_heads * dim);
    let (queries, keys, values) = (matrix(q, spec.n_heads), matrix(k, spec.n_kv_heads), matrix(v, spec.n_kv_heads));
    let mut out = AttentionHessians::zeros(spec.n_kv_heads, dim);
    let square = dim * dim;
    let heads = out.key.data.par_chunks_exact_mut(square).zip(out.value.data.par_chunks_exact_mut(square)).enumerate();
    heads.for_each(|(h, (key, value))| {
        let coupling = MatRef::from_row_major_slice(couplings.head(h), group * dim, group * dim);
        let head = Head {
            queries: queries.subcols(h * group * dim, group * dim),
            keys: keys.subcols(h * dim, dim),
            values: values.subcols(h * dim, dim),
            coupling,
            spec,
            group,
        };
        head.sum(key, value);
    });
    out
}

/// One KV head and the query heads that read it.
struct Head<'a> {
    /// `[S, G d]`.
    queries: MatRef<'a, f64>,
    /// `[S, d]`.
    keys: MatRef<'a, f64>,
    /// `[S, d]`.
    values: MatRef<'a, f64>,
    /// `[G d, G d]`.
    coupling: MatRef<'a, f64>,
    spec: &'a AttentionSpec,
    group: usize,
}

/// One query head over one block of queries, against the keys `start..start + n` that the block may read.
struct Attended {
    /// Probabilities, `[block, n]`.
    p: Mat<f64>,
    /// p times the softcap's slope; p itself without a softcap.
    slope: Option<Mat<f64>>,
    /// Outputs, `[block, d]`.
    o: Mat<f64>,
}

impl Head<'_> {
    /// Adds all blocks of queries, in order.
    fn sum(&self, key: &mut [f64], value: &mut [f64]) {
        let (n_tokens, dim, group) = (self.keys.nrows(), self.spec.head_dim, self.group);
        let energies = self.energies();
        let mut weights = vec![0.0; group * group];
        let mut half = Mat::<f64>::zeros(dim, dim);
        for first in (0..n_tokens).step_by(QUERY_BLOCK) {
            let n_rows = QUERY_BLOCK.min(n_tokens - first);
            self.add_block(first, n_rows, &energies, &mut half, &mut weights);
        }
        let scale = f64::from(self.spec.scale);
        let factor = SQUARE_FACTOR * scale * scale;
        for (at, into) in key.iter_mut().enumerate() {
            let (i, j) = (at / dim, at % dim);
            *into = factor * 0.5 * (half[(i, j)] + half[(j, i)]);
        }
        for (at, into) in value.iter_mut().enumerate() {
            let (i, j) = (at / dim, at % dim);
            let sum: f64 =
                (0..group * group).map(|pair| weights[pair] * self.block(pair / group, pair % group)[(i, j)]).sum();
            *into = SQUARE_FACTOR * sum;
        }
        symmetrize(value, dim);
    }

    /// Γ_{a,b}, `[d, d]`.
    fn block(&self, a: usize, b: usize) -> MatRef<'_, f64> {
        let dim = self.spec.head_dim;
        self.coupling.submatrix(a * dim, b * dim, dim, dim)
    }

    /// v_sᵀ Γ_{a,b} v_s of every key s and pair a ≤ b: `[G, G, S]`.
    fn energies(&self) -> Vec<f64> {
        let (n_tokens, group) = (self.values.nrows(), self.group);
        let mut energies = vec![0.0; group * group * n_tokens];
        for (a, b) in pairs(group) {
            let image = product(self.values, self.block(a, b));
            let into = &mut energies[(a * group + b) * n_tokens..][..n_tokens];
            into.iter_mut().enumerate().for_each(|(s, energy)| *energy = dot(image.as_ref(), self.values, s));
        }
        energies
    }

    fn add_block(&self, first: usize, n_rows: usize, energies: &[f64], half: &mut Mat<f64>, weights: &mut [f64]) {
        let (dim, group, n_tokens) = (self.spec.head_dim, self.group, self.values.nrows());
        let start = self.first_key(first);
        let range = start..first + n_rows;
        let heads: Vec<Attended> = (0..group).map(|g| self.attend(g, first, n_rows, start)).collect();
        let values = self.values.subrows(start, range.len());
        for (a, b) in pairs(group) {
            let both = if a == b { 1.0 } else { 2.0 };
            let weight: f64 = overlap(&heads[a].p, &heads[b].p).iter().sum();
            weights[a * group + b] += weight;
            if a != b {
                weights[b * group + a] += weight;
            }
            let energies = &energies[(a * group + b) * n_tokens..][range.clone()];
            let c = self.residuals([&heads[a], &heads[b]], self.block(a, b), values, energies);
            // Both orders of the pair are one matrix and its transpose; the sum is symmetrized at the end.
            let mut weighted = self.queries.subrows(first, n_rows).subcols(b * dim, dim).to_owned();
            for (t, &c) in c.iter().enumerate() {
                (0..dim).for_each(|i| weighted[(t, i)] *= both * c);
            }
            let queries = self.queries.subrows(first, n_rows).subcols(a * dim, dim);
            add_product(half.as_mut(), queries.transpose(), weighted.as_ref());
        }
    }

    /// c_{t,a,b} of every query t of the block.
    fn residuals(
        &self,
        heads: [&Attended; 2],
        coupling: MatRef<'_, f64>,
        values: MatRef<'_, f64>,
        energies: &[f64],
    ) -> Vec<f64> {
        let [a, b] = heads;
        let e = elementwise(a.slope.as_ref().unwrap_or(&a.p), b.slope.as_ref().unwrap_or(&b.p));
        let u = product(e.as_ref(), values);
        let (left, right) = (product(a.o.as_ref(), coupling), product(b.o.as_ref(), coupling.transpose()));
        let c = |t: usize| {
            let row = || (0..energies.len()).map(|s| e[(t, s)]);
            let (total, energy): (f64, f64) = (row().sum(), row().zip(energies).map(|(e, f)| e * f).sum());
            energy - dot(left.as_ref(), u.as_ref(), t) - dot(right.as_ref(), u.as_ref(), t)
                + total * dot(left.as_ref(), b.o.as_ref(), t)
        };
        (0..e.nrows()).map(c).collect()
    }

    /// Probabilities and outputs of query head `g` for queries `first..first + n_rows`, over keys from `start` on.
    fn attend(&self, g: usize, first: usize, n_rows: usize, start: usize) -> Attended {
        let (dim, n_keys) = (self.spec.head_dim, first + n_rows - start);
        let queries = self.queries.subrows(first, n_rows).subcols(g * dim, dim);
        // Transposed, so that a query's logits lie together: faer's matrices are column-major.
        let mut transposed = product(self.keys.subrows(start, n_keys), queries.transpose());
        let softcap = self.spec.logit_softcap.map(f64::from);
        let mut slopes = softcap.map(|_| Mat::zeros(n_keys, n_rows));
        for t in 0..n_rows {
            let reads = self.first_key(first + t) - start..first + t + 1 - start;
            let logits = transposed.col_mut(t).try_as_col_major_mut().expect("columns are contiguous").as_slice_mut();
            logits.iter_mut().for_each(|x| *x *= f64::from(self.spec.scale));
            if let (Some(cap), Some(slopes)) = (softcap, &mut slopes) {
                for (s, x) in logits.iter_mut().enumerate() {
                    let bent = (*x / cap).tanh();
                    (slopes[(s, t)], *x) = (1.0 - bent * bent, cap * bent);
                }
            }
            softmax(logits, reads);
        }
        if let Some(slopes) = &mut slopes {
            *slopes = elementwise(slopes, &transposed);
        }
        let o = product(transposed.transpose(), self.values.subrows(start, n_keys));
        let by_query = |x: Mat<f64>| x.transpose().to_owned();
        Attended { p: by_query(transposed), slope: slopes.map(by_query), o }
    }

    /// First key that the query at `t` reads.
    fn first_key(&self, t: usize) -> usize {
        self.spec.window.map_or(0, |window| (t + 1).saturating_sub(window))
    }
}

/// Pairs a ≤ b of query heads.
fn pairs(group: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..group).flat_map(move |a| (a..group).map(move |b| (a, b)))
}

/// In place over `reads`, zero elsewhere.
fn softmax(logits: &mut [f64], reads: std::ops::Range<usize>) {
    logits[..reads.start].fill(0.0);
    logits[reads.end..].fill(0.0);
    let read = &mut logits[reads];
    let max = read.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    read.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = read.iter().sum();
    read.iter_mut().for_each(|x| *x /= sum);
}

/// a ∘ b.
fn elementwise(a: &Mat<f64>, b: &Mat<f64>) -> Mat<f64> {
    let mut out = a.clone();
    for (into, from) in out.as_mut().col_iter_mut().zip(b.col_iter()) {
        into.iter_mut().zip(from.iter()).for_each(|(x, y)| *x *= y);
    }
    out
}

/// Σ_s a_{t,s} b_{t,s} of every t.
fn overlap(a: &Mat<f64>, b: &Mat<f64>) -> Vec<f64> {
    let mut sums = vec![0.0; a.nrows()];
    for (a, b) in a.col_iter().zip(b.col_iter()) {
        sums.iter_mut().zip(a.iter().zip(b.iter())).for_each(|(sum, (x, y))| *sum += x * y);
    }
    sums
}

/// a_row · b_row.
fn dot(a: MatRef<'_, f64>, b: MatRef<'_, f64>, row: usize) -> f64 {
    a.row(row).iter().zip(b.row(row).iter()).map(|(x, y)| x * y).sum()
}

fn symmetrize(matrix: &mut [f64], dim: usize) {
    for i in 0..dim {
        for j in 0..i {
            let mean = 0.5 * (matrix[i * dim + j] + matrix[j * dim + i]);
            (matrix[i * dim + j], matrix[j * dim + i]) = (mean, mean);
        }
    }
}

/// `a b`, on this thread.
fn product(a: MatRef<'_, f64>, b: MatRef<'_, f64>) -> Mat<f64> {
    let mut out = Mat::zeros(a.nrows(), b.ncols());
    multiply(out.as_mut(), Accum::Replace, a, b);
    out
}

/// `out += a b`, on this thread.
fn add_product(mut out: MatMut<'_, f64>, a: MatRef<'_, f64>, b: MatRef<'_, f64>) {
    multiply(out.rb_mut(), Accum::Add, a, b);
}

/// faer leaves the upper halves of the vector registers in use, which makes the C library's `exp` many times slower until they
/// are cleared.
fn multiply(out: MatMut<'_, f64>, how: Accum, a: MatRef<'_, f64>, b: MatRef<'_, f64>) {
    faer::linalg::matmul::matmul(out, how, a, b, 1.0, Par::Seq);
    #[cfg(target_arch = "x86_64")]
    if let Some(avx) = pulp::core_arch::x86::Avx::try_new() {
        avx._mm256_zeroupper();
    }
}
