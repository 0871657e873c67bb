//! Is a folded pair of projections the original function? Decided from the two checkpoints alone.
//!
//! Enters: one KV head's weights of both checkpoints. Leaves: a [`HeadCheck`]. With `W_V' = T W_V + D_V` and
//! `W_O' = W_O T^{-1} + D_O`, T is unknown and D_V, D_O are roundings, elementwise at most half the distance between
//! neighbouring stored numbers. Three things are checked, each elementwise:
//!
//! 1. **values**: `R = W_V' (I − V Vᵀ)`, V an orthonormal basis of W_V's row space (the bias stands as one more column).
//!    Whatever T is, R holds rounding alone.
//! 2. **outputs**: `W_O' − W_O (W_V V)(W_V' V)⁺`, the second factor being W_O T^{-1} with the T that both checkpoints'
//!    values imply. Only directions that stand clearly above the rounding noise enter; along the others W_O' is free
//!    up to noise, because no value goes there.
//! 3. **product**: `W_O'(W_V' V) − W_O (W_V V)`, the function itself, in every direction.
//!
//! Bounds. A rounding error is bounded by its own half spacing h, and the errors are taken as independent with mean zero (but for
//! columns of W_V that are equal up to sign, which are rounded alike: the private module `repeats` adds those up first),
//! so a sum Σ aₖ Dₖ exceeds K (Σ aₖ² hₖ²)^½ with probability at most 2·exp(−K²/2) (Hoeffding); [`SIGMAS`] makes that
//! 5e-18, for some 1e9 sums of a large model. Elements that enter directly are bounded by h itself.
//!
//! **What can be found, and what cannot.** With n = hidden and a well-conditioned W_V, an element of W_V' moved by more
//! than h + K·h_max·√(d/n), h_max the largest half spacing of its row, fails check 1 (about 2 to 4 spacings of the row's
//! largest element), and one of W_O' moved by more than about h + K·h·√(d/n) fails check 2. A change below the spacing
//! of the stored dtype is a rounding like any other and cannot be found. Where `n = d` check 1 is empty, and the pair is
//! judged by 2 and 3 alone. A consistent change of basis, `W_V' → S W_V'`, `W_O' → W_O' S^{-1}`, keeps the function and
//! passes: it is another valid fold; that it is the one the sidecar names is [`check_transform`]'s to see, which knows T
//! and therefore finds single elements that are off by one spacing.
//!
//! **Two roundings.** A checkpoint without a manifest may have been folded and unfolded: its D are then not one rounding
//! but two, the first seen through T^{-1} ([`Roundings::Two`]). The terms above stay, and to each variance comes that of
//! the first rounding, as the private module `first_rounding` measures it: w C wᵀ · Σ cⱼ² xⱼ² for a sum `w D x`.
//! Elements that enter directly are then bounded by h + K·σ, since a sum of roundings has no bound as sharp as h.

use faer::{Mat, MatRef};
use serde::{Deserialize, Serialize};

use crate::dense::{Svd, map, multiply, squared_norm, thin_svd};
use crate::first_rounding::FirstRounding;
use crate::invert::{condition_limit, invert};
use crate::read::HeadWeights;
use crate::repeats::Repeats;

/// K of the bounds: 2·exp(−K²/2) is 5e-18, times 1e9 sums of a large model leaves 5e-9 for a false alarm.
const SIGMAS: f64 = 9.0;
/// A direction of W_V' enters the estimate of T when it is this many times longer than its rounding noise: the noise
/// matrix is then at most about 2/16 of it in operator norm, and first-order bounds hold.
const SIGNAL_TO_NOISE: f64 = 16.0;

/// What the two checkpoints say about one KV head. An excess is the largest |difference| over its bound: at most 1 passes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadCheck {
    /// Global layer id.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Excess of check 1 over the value weights.
    pub values: f64,
    /// Excess of check 1 over the value bias; 0 without one.
    pub bias: f64,
    /// Excess of check 2.
    pub outputs: f64,
    /// Excess of check 3.
    pub product: f64,
    /// ‖W_O'W_V' − W_O W_V‖_F / ‖W_O W_V‖_F (bias included), the query heads of the group stacked.
    pub rel_error: f64,
    /// Directions of W_V that stand above the rounding noise.
    pub rank: usize,
    /// Whether every excess is at most 1.
    pub ok: bool,
}

/// How often the weights were rounded since they were the base's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Roundings {
    /// Folded, as a bundle's manifest says.
    One,
    /// Perhaps folded and unfolded: a checkpoint that does not say what it is.
    Two,
}

/// Checks one head (see the module's documentation).
pub fn check_head(base: &HeadWeights, folded: &HeadWeights, roundings: Roundings) -> HeadCheck {
    let failed = HeadCheck {
        layer: base.layer,
        head: base.head,
        values: f64::INFINITY,
        bias: 0.0,
        outputs: f64::INFINITY,
        product: f64::INFINITY,
        rel_error: f64::INFINITY,
        rank: 0,
        ok: false,
    };
    if !base.is_finite() || !folded.is_finite() {
        return failed;
    }
    let Some(basis) = Basis::of(base, folded, roundings) else { return failed };
    let (values, bias, residual_gram) = check_values(folded, &basis);
    let mut found =
        HeadCheck { values, bias, rank: basis.n_strong, outputs: 0.0, product: 0.0, rel_error: 0.0, ..failed };
    let (mut error, mut norm) = (0.0, 0.0);
    for ((output, new_output), new_half) in base.outputs.iter().zip(&folded.outputs).zip(&folded.output_halves) {
        let Some(block) = OutputBlock::of(output.as_ref(), new_output.as_ref(), new_half.as_ref(), roundings) else {
            return failed;
        };
        found.outputs = worse(found.outputs, check_outputs(&block, &basis));
        let (product, squared_error, squared_whole) = check_product(&block, &basis);
        found.product = worse(found.product, product);
        let gram = multiply(block.new.transpose(), block.new);
        let outside: f64 = (0..gram.ncols())
            .map(|j| gram.col(j).iter().zip(residual_gram.col(j).iter()).map(|(a, b)| a * b).sum::<f64>())
            .sum();
        error += squared_error + outside.max(0.0);
        norm += squared_whole;
    }
    found.rel_error = if error == 0.0 { 0.0 } else { (error / norm).sqrt() };
    found.ok = [found.values, found.bias, found.outputs, found.product].iter().all(|&excess| excess <= 1.0);
    found
}

/// One query head's output block `[hidden, d]`, before and after, and the half spacings of the latter.
struct OutputBlock<'a> {
    old: MatRef<'a, f64>,
    new: MatRef<'a, f64>,
    half: MatRef<'a, f64>,
    /// Of the transposed block; none where there was one rounding.
    first: Option<FirstRounding>,
}

impl<'a> OutputBlock<'a> {
    fn of(
        old: MatRef<'a, f64>,
        new: MatRef<'a, f64>,
        half: MatRef<'a, f64>,
        roundings: Roundings,
    ) -> Option<OutputBlock<'a>> {
        let first = match roundings {
            Roundings::One => None,
            Roundings::Two => {
                let Svd { u, s, .. } = thin_svd(old)?;
                let rank = rank_of(&s, old.nrows().max(old.ncols()));
                Some(FirstRounding::measure(new.transpose(), half.transpose(), u.subcols(0, rank)))
            }
        };
        Some(Self { old, new, half, first })
    }
}

/// How many singular values are more than the rounding of f64; `size` is the longer side of the matrix.
fn rank_of(s: &[f64], size: usize) -> usize {
    let cut = s.first().copied().unwrap_or(0.0) * size as f64 * f64::EPSILON;
    s.iter().filter(|&&s| s > cut).count()
}

/// Both value matrices in one orthonormal basis of the original's row space, in which the folded one has orthogonal
/// columns of descending length.
struct Basis {
    /// `[n, r]`, orthonormal columns.
    v: Mat<f64>,
    /// `W_V V`, `[d, r]`.
    old: Mat<f64>,
    /// `W_V' V = U diag(s)`, `[d, r]`.
    new: Mat<f64>,
    u: Mat<f64>,
    s: Vec<f64>,
    /// Columns of W_V that repeat each other.
    repeats: Repeats,
    /// Σₘ h² v², `[d, r]`: bound on the variance of `D_V V`.
    noise: Mat<f64>,
    /// h², `[d, n]`.
    half_squared: Mat<f64>,
    /// None where there was one rounding.
    first: Option<FirstRounding>,
    n_strong: usize,
}

impl Basis {
    fn of(base: &HeadWeights, folded: &HeadWeights, roundings: Roundings) -> Option<Self> {
        let scale = folded.bias_scale();
        let (old, new) = (base.with_bias(scale), folded.with_bias(scale));
        let (dim, n) = old.shape();
        let Svd { v, s, .. } = thin_svd(old.as_ref())?;
        let v = v.subcols(0, rank_of(&s, dim.max(n))).to_owned();
        let Svd { u, s, v: rotation } = thin_svd(multiply(new.as_ref(), v.as_ref()).as_ref())?;
        let v = multiply(v.as_ref(), rotation.as_ref());
        let halves = folded.halves_with_bias(scale);
        let half_squared = map(halves.as_ref(), |h| h * h);
        let first =
            (roundings == Roundings::Two).then(|| FirstRounding::measure(new.as_ref(), halves.as_ref(), v.as_ref()));
        let repeats = Repeats::of(old.as_ref());
        let noise = repeats.variance(half_squared.as_ref(), v.as_ref());
        let carried = first.as_ref().map(|first| (first.trace(), first.weights_of_repeats(&repeats, v.as_ref())));
        let length = |k: usize| {
            let carried = carried.as_ref().map_or(0.0, |(trace, weights)| trace * weights[k]);
            (noise.col(k).iter().sum::<f64>() + carried).sqrt()
        };
        let n_strong = (0..s.len()).take_while(|&k| s[k] > SIGNAL_TO_NOISE * length(k)).count();
        let new = Mat::from_fn(dim, s.len(), |i, k| u[(i, k)] * s[k]);
        let old = multiply(old.as_ref(), v.as_ref());
        Some(Self { old, new, u, s, repeats, noise, half_squared, first, n_strong, v })
    }

    /// Rounding of the f64 products themselves, relative to the norms of their factors.
    fn slack(&self) -> f64 {
        4.0 * self.v.nrows().max(self.u.nrows()) as f64 * f64::EPSILON
    }
}

/// Check 1. The excess over the weights, over the bias, and R·Rᵀ.
fn check_values(folded: &HeadWeights, basis: &Basis) -> (f64, f64, Mat<f64>) {
    let scale = folded.bias_scale();
    let new = folded.with_bias(scale);
    let dim = new.nrows();
    let mut residual = multiply(basis.new.as_ref(), basis.v.transpose());
    residual
        .as_mut()
        .col_iter_mut()
        .zip(new.col_iter())
        .for_each(|(r, w)| r.iter_mut().zip(w.iter()).for_each(|(r, w)| *r = w - *r));
    let leverage = leverage(basis);
    let n_weights = folded.value.ncols();
    let (mut values, mut bias) = (basis.first.as_ref().map_or(0.0, |first| first.excess), 0.0);
    for i in 0..dim {
        let largest = basis.half_squared.row(i).iter().fold(0.0, |a: f64, &b| a.max(b)).sqrt();
        let slack = basis.slack() * new.row(i).iter().map(|x| x * x).sum::<f64>().sqrt();
        for (j, leverage) in leverage.iter().enumerate() {
            let first = basis
                .first
                .as_ref()
                .map_or(0.0, |first| first.row_sigma(i) * (first.scale()[j] + first.largest_scale() * leverage));
            let bound = basis.half_squared[(i, j)].sqrt() + SIGMAS * (largest * leverage + first) + slack;
            let excess = over(residual[(i, j)], bound);
            if j < n_weights { values = worse(values, excess) } else { bias = worse(bias, excess) }
        }
    }
    (values, bias, multiply(residual.as_ref(), residual.transpose()))
}

/// ‖e_jᵀ V Mᵀ‖ of every column j, M being V with the rows of equal columns added up: by what the projection of D's other elements
/// exceeds one of them. Without repeats ‖e_jᵀ V‖, the leverage.
fn leverage(basis: &Basis) -> Vec<f64> {
    let merged = basis.repeats.merged(basis.v.as_ref());
    let squares = multiply(merged.transpose(), merged.as_ref());
    let image = multiply(basis.v.as_ref(), squares.as_ref());
    let dot = |j: usize| basis.v.row(j).iter().zip(image.row(j).iter()).map(|(a, b)| a * b).sum::<f64>();
    (0..basis.v.nrows()).map(|j| dot(j).max(0.0).sqrt()).collect()
}

/// Check 2.
fn check_outputs(block: &OutputBlock<'_>, basis: &Basis) -> f64 {
    let (dim, strong) = (basis.u.nrows(), basis.n_strong);
    if strong == 0 {
        return 0.0;
    }
    // B⁺ = diag(1/s) Uᵀ, and X = V B⁺ carries the noise of the values into the estimate.
    let pseudo_inverse = Mat::from_fn(strong, dim, |k, j| basis.u[(j, k)] / basis.s[k]);
    let estimate = multiply(block.old, multiply(basis.old.subcols(0, strong), pseudo_inverse.as_ref()).as_ref());
    let carried = multiply(basis.v.subcols(0, strong), pseudo_inverse.as_ref());
    let through = basis.repeats.variance(basis.half_squared.as_ref(), carried.as_ref());
    let mut variance = multiply(map(block.new, |x| x * x).as_ref(), through.as_ref());
    add_first_of_values(&mut variance, block, basis, carried.as_ref());
    let u = basis.u.subcols(0, strong);
    let (seen, own) = if strong == dim {
        let own = |i: usize, j: usize| {
            let first = block.first.as_ref().map_or(0.0, |first| first.row_sigma(j) * first.scale()[i]);
            block.half[(i, j)] + SIGMAS * first
        };
        (block.new.to_owned(), Mat::from_fn(block.half.nrows(), dim, own))
    } else {
        let projector = multiply(u, u.transpose());
        let mut spread = multiply(map(block.half, |h| h * h).as_ref(), map(projector.as_ref(), |x| x * x).as_ref());
        add_first_of_outputs(&mut spread, block, projector.as_ref());
        (multiply(block.new, projector.as_ref()), map(spread.as_ref(), |x| SIGMAS * x.sqrt()))
    };
    // ‖W_O‖ ‖T^{-1}‖ is what the f64 products may lose digits against.
    let transfer = squared_norm(multiply(basis.old.subcols(0, strong), pseudo_inverse.as_ref()).as_ref()).sqrt();
    let mut excess = block.first.as_ref().map_or(0.0, |first| first.excess);
    for i in 0..block.new.nrows() {
        let slack = basis.slack() * transfer * block.old.row(i).iter().map(|x| x * x).sum::<f64>().sqrt();
        for j in 0..dim {
            let bound = own[(i, j)] + SIGMAS * variance[(i, j)].max(0.0).sqrt() + slack;
            excess = worse(excess, over(estimate[(i, j)] - seen[(i, j)], bound));
        }
    }
    excess
}

/// Adds the variance that the values' first rounding has in `W_O' D_V X`, X being `columns`, `[n, k]`.
fn add_first_of_values(variance: &mut Mat<f64>, block: &OutputBlock<'_>, basis: &Basis, columns: MatRef<'_, f64>) {
    let Some(first) = &basis.first else { return };
    add_outer(variance, &first.variances(block.new), &first.weights_of_repeats(&basis.repeats, columns));
}

/// Adds the variance that the outputs' first rounding has in `D_O B`, B being `columns`, `[d, k]`.
fn add_first_of_outputs(variance: &mut Mat<f64>, block: &OutputBlock<'_>, columns: MatRef<'_, f64>) {
    let Some(first) = &block.first else { return };
    let squares: Vec<f64> = first.scale().iter().map(|c| c * c).collect();
    add_outer(variance, &squares, &first.variances(columns.transpose()));
}

/// `to += a bᵀ`.
fn add_outer(to: &mut Mat<f64>, a: &[f64], b: &[f64]) {
    for (k, b) in b.iter().enumerate() {
        a.iter().enumerate().for_each(|(i, a)| to[(i, k)] += a * b);
    }
}

/// Check 3: the excess, ‖W_O'W_V'V − W_O W_V V‖_F² and ‖W_O W_V‖_F².
fn check_product(block: &OutputBlock<'_>, basis: &Basis) -> (f64, f64, f64) {
    let (new, old) = (multiply(block.new, basis.new.as_ref()), multiply(block.old, basis.old.as_ref()));
    let mut variance = multiply(map(block.new, |x| x * x).as_ref(), basis.noise.as_ref());
    let own = multiply(map(block.half, |h| h * h).as_ref(), map(basis.new.as_ref(), |x| x * x).as_ref());
    variance += own;
    add_first_of_values(&mut variance, block, basis, basis.v.as_ref());
    add_first_of_outputs(&mut variance, block, basis.new.as_ref());
    let lengths = (squared_norm(basis.old.as_ref()).sqrt(), squared_norm(basis.new.as_ref()).sqrt());
    let (mut excess, mut squared) = (0.0, 0.0);
    for i in 0..new.nrows() {
        let norm = |a: MatRef<'_, f64>| a.row(i).iter().map(|x| x * x).sum::<f64>().sqrt();
        let slack = basis.slack() * (norm(block.old) * lengths.0 + norm(block.new) * lengths.1);
        for k in 0..new.ncols() {
            let error = new[(i, k)] - old[(i, k)];
            squared += error * error;
            excess = worse(excess, over(error, SIGMAS * variance[(i, k)].max(0.0).sqrt() + slack));
        }
    }
    (excess, squared, squared_norm(old.as_ref()))
}

/// What a stated transform T (f32, as the sidecar stores it) says about one KV head of both checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TransformCheck {
    /// Global layer id.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Largest |W_V' − T W_V| over its bound, the bias included.
    pub values: f64,
    /// Largest |W_O' − W_O T^{-1}| over its bound.
    pub outputs: f64,
    /// 1-norm condition number of T.
    pub condition: f64,
    /// Whether both are at most 1.
    pub ok: bool,
}

/// Checks that the folded weights are those of `transform`, row-major `[d, d]`, rounded once.
///
/// The stored T differs from the f64 one that was folded by at most u = 2⁻²⁴ of each element, so the bounds are
/// h + u·(|T||W_V|) and, to first order with a factor of two to spare, h + 2u·(|W_O'||T||T^{-1}|), h half the spacing of
/// the stored element. In bf16 the second term is far below the first: one element that is off by one spacing is found.
pub fn check_transform(base: &HeadWeights, folded: &HeadWeights, transform: &[f64]) -> TransformCheck {
    let dim = base.value.nrows();
    let inverse = invert(transform, dim);
    let (layer, head, condition) = (base.layer, base.head, inverse.condition);
    let usable = base.is_finite() && folded.is_finite() && condition <= condition_limit(dim);
    if !usable {
        return TransformCheck { layer, head, values: f64::INFINITY, outputs: f64::INFINITY, condition, ok: false };
    }
    let roundoff = f64::from(f32::EPSILON) / 2.0;
    let (t, t_inverse) = (crate::dense::view(transform, dim, dim), crate::dense::view(&inverse.matrix, dim, dim));
    let magnitude = multiply(map(t, f64::abs).as_ref(), map(t_inverse, f64::abs).as_ref());
    let (old, new, half) = (base.with_bias(1.0), folded.with_bias(1.0), folded.halves_with_bias(1.0));
    let spread = multiply(map(t, f64::abs).as_ref(), map(old.as_ref(), f64::abs).as_ref());
    let values =
        largest_excess(new.as_ref(), multiply(t, old.as_ref()).as_ref(), half.as_ref(), spread.as_ref(), roundoff);
    let mut outputs = 0.0;
    for ((old, new), half) in base.outputs.iter().zip(&folded.outputs).zip(&folded.output_halves) {
        let spread = multiply(map(new.as_ref(), f64::abs).as_ref(), magnitude.as_ref());
        let expected = multiply(old.as_ref(), t_inverse);
        outputs = worse(
            outputs,
            largest_excess(new.as_ref(), expected.as_ref(), half.as_ref(), spread.as_ref(), 2.0 * roundoff),
        );
    }
    TransformCheck { layer, head, values, outputs, condition, ok: values <= 1.0 && outputs <= 1.0 }
}

fn largest_excess(
    found: MatRef<'_, f64>,
    expected: MatRef<'_, f64>,
    half: MatRef<'_, f64>,
    spread: MatRef<'_, f64>,
    unit: f64,
) -> f64 {
    let mut excess = 0.0;
    for j in 0..found.ncols() {
        for i in 0..found.nrows() {
            // 2⁻¹⁴⁹ is the absolute error of a T that is subnormal in f32; it matters to nothing but exact zeros.
            let bound = half[(i, j)] + unit * spread[(i, j)] + f64::from(f32::from_bits(1));
            excess = worse(excess, over(found[(i, j)] - expected[(i, j)], bound));
        }
    }
    excess
}

/// |difference| over bound; 0 for no difference, so that an exact zero needs no bound.
fn over(difference: f64, bound: f64) -> f64 {
    if difference == 0.0 { 0.0 } else { difference.abs() / bound }
}

/// The larger, a NaN counting as larger than everything.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}
