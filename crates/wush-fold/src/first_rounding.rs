//! The rounding that lies behind the stored one: what folding and unfolding left in a plain checkpoint.
//!
//! A checkpoint that was folded and unfolded holds `W'' = T^{-1}(T W + D₁) + D₂`: besides the rounding D₂ of what is
//! stored, the first one seen through T^{-1}. T is unknown there, so the size of `N = T^{-1} D₁ + D₂` is measured where
//! nothing but rounding can be: outside the row space of W, where `T^{-1} T W` has nothing, whatever T is. A change
//! inside that space, which is where every change of the function lies, leaves the measure as it is.
//!
//! Model: column j of N has mean zero and covariance `cⱼ² C / 3`, cⱼ the length of column j of W'' (mean square 1):
//! a rounding is proportional to what is rounded, and the columns of T W are about as long as those of W. The three
//! stands between the variance of a rounding, h²/3, and the h² that the bounds use. C counts D₁ and D₂; the spread of
//! D₂ is added once more on its diagonal, the least that a first rounding leaves, for where too little of N can be seen
//! (a row space that is nearly the whole space, or changes too rare to measure).

use faer::{Mat, MatRef};

use crate::dense::{multiply, squared_norm};
use crate::repeats::Repeats;

/// Of a row's normalized residuals, this share is at most [`QUANTILE_SIGMAS`] standard deviations: 1.65 of a normal, 1.56
/// of a uniform distribution. A quantile, so that a few changed elements cannot raise the bound that is to find them.
const QUANTILE: f64 = 0.9;
const QUANTILE_SIGMAS: f64 = 1.5;
/// Residuals enter C up to so many standard deviations.
const CLIP_SIGMAS: f64 = 4.0;
/// At least this share of the dimensions must lie outside the row space for N to be measured.
const MIN_OUTSIDE: f64 = 0.125;
/// Most that two roundings may exceed one, in the root mean square over a head: the amplification of D₁ by T^{-1}, which
/// the condition number of T bounds. At 32, bf16 weights have lost 5 bits, and are no longer the original in any use.
const MAX_AMPLIFICATION: f64 = 32.0;

/// The covariance model of `N`.
pub(crate) struct FirstRounding {
    /// C, `[d, d]`.
    covariance: Mat<f64>,
    /// c, `[n]`.
    scale: Vec<f64>,
    /// Amplification over [`MAX_AMPLIFICATION`]: above 1, rounding does not explain it.
    pub(crate) excess: f64,
}

impl FirstRounding {
    /// Measures N of `new`, `[d, n]`, outside the space of the orthonormal columns of `space`, `[n, r]`.
    pub(crate) fn measure(new: MatRef<'_, f64>, halves: MatRef<'_, f64>, space: MatRef<'_, f64>) -> Self {
        let (dim, n) = new.shape();
        let scale = column_lengths(new);
        let residual = outside(new, space, &scale);
        let mut covariance = multiply(residual.as_ref(), residual.transpose());
        covariance *= faer::Scale(3.0 / n.max(1) as f64);
        for i in 0..dim {
            covariance[(i, i)] += halves.row(i).iter().map(|h| h * h).sum::<f64>() / n.max(1) as f64;
        }
        let trace: f64 = (0..dim).map(|i| covariance[(i, i)]).sum();
        let amplification = if trace == 0.0 { 0.0 } else { (trace * n as f64 / squared_norm(halves)).sqrt() };
        Self { covariance, scale, excess: amplification / MAX_AMPLIFICATION }
    }

    /// Bound on the standard deviation of a row's elements where c is 1.
    pub(crate) fn row_sigma(&self, row: usize) -> f64 {
        self.covariance[(row, row)].max(0.0).sqrt()
    }

    pub(crate) fn scale(&self) -> &[f64] {
        &self.scale
    }

    pub(crate) fn largest_scale(&self) -> f64 {
        self.scale.iter().copied().fold(0.0, f64::max)
    }

    pub(crate) fn trace(&self) -> f64 {
        self.covariance.diagonal().column_vector().iter().sum()
    }

    /// w C wᵀ of every row w of `rows`, `[m, d]`: the variance of w N where c is 1.
    pub(crate) fn variances(&self, rows: MatRef<'_, f64>) -> Vec<f64> {
        let image = multiply(rows, self.covariance.as_ref());
        let dot = |i: usize| rows.row(i).iter().zip(image.row(i).iter()).map(|(a, b)| a * b).sum::<f64>().max(0.0);
        (0..rows.nrows()).map(dot).collect()
    }

    /// Σⱼ cⱼ² xⱼ² of every column x of `columns`, `[n, k]`, the rows of columns that are rounded alike added up: by what N x
    /// exceeds the variance where c is 1.
    pub(crate) fn weights_of_repeats(&self, repeats: &Repeats, columns: MatRef<'_, f64>) -> Vec<f64> {
        let (merged, scale) = (repeats.merged(columns), repeats.largest(&self.scale));
        let sum = |k: usize| merged.col(k).iter().zip(&scale).map(|(x, c)| (x * c).powi(2)).sum::<f64>();
        (0..columns.ncols()).map(sum).collect()
    }
}

/// Lengths of the columns over their root mean square.
fn column_lengths(a: MatRef<'_, f64>) -> Vec<f64> {
    let squares: Vec<f64> = a.col_iter().map(|col| col.iter().map(|x| x * x).sum()).collect();
    let mean = squares.iter().sum::<f64>() / squares.len().max(1) as f64;
    squares.iter().map(|square| if mean > 0.0 { (square / mean).sqrt() } else { 0.0 }).collect()
}

/// `new (I − space spaceᵀ)`, every column over its c, clipped, and brought to the size that it has without the projection.
/// All zero where too few dimensions remain.
fn outside(new: MatRef<'_, f64>, space: MatRef<'_, f64>, scale: &[f64]) -> Mat<f64> {
    let (dim, n) = new.shape();
    let share = n.saturating_sub(space.ncols()) as f64 / n.max(1) as f64;
    if share < MIN_OUTSIDE {
        return Mat::zeros(dim, n);
    }
    let inside = multiply(multiply(new, space).as_ref(), space.transpose());
    let mut out = Mat::from_fn(dim, n, |i, j| {
        if scale[j] > 0.0 { (new[(i, j)] - inside[(i, j)]) / (scale[j] * share.sqrt()) } else { 0.0 }
    });
    let n_used = scale.iter().filter(|&&c| c > 0.0).count();
    for i in 0..dim {
        let mut sizes: Vec<f64> = (0..n).filter(|&j| scale[j] > 0.0).map(|j| out[(i, j)].abs()).collect();
        if sizes.is_empty() {
            continue;
        }
        let at = ((QUANTILE * n_used as f64) as usize).min(n_used - 1);
        let (_, &mut quantile, _) = sizes.select_nth_unstable_by(at, f64::total_cmp);
        let limit = CLIP_SIGMAS * quantile / QUANTILE_SIGMAS;
        (0..n).for_each(|j| out[(i, j)] = out[(i, j)].clamp(-limit, limit));
    }
    out
}
