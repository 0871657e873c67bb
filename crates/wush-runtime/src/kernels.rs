//! The loops over numbers in full precision: products of rows, weighted sums of rows, exponentials. Each is compiled for the
//! vector instructions of the machine and picked at run time. Enters and leaves: plain slices whose lengths the caller
//! has checked. Knows nothing of caches.

use pulp::{Arch, Simd, WithSimd};

/// Queries that share a load of a row.
const QUERY_TILE: usize = 4;
/// Rows that share a pass over a sum.
const ROW_TILE: usize = 4;
/// Partial results of a reduction.
const LANES: usize = 16;

/// Runs a loop compiled for the machine's vector extensions.
#[inline]
fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    struct Work<F>(F);
    impl<R, F: FnOnce() -> R> pulp::NullaryFnOnce for Work<F> {
        type Output = R;
        #[inline(always)]
        fn call(self) -> R {
            (self.0)()
        }
    }
    Arch::new().dispatch(Work(work))
}

/// `out[query][row] = Σᵢ queries[query][i] rows[row][i]`, summed in f32.
///
/// `queries`: `[n, d]`; `rows`: `[m, d]`; `out`: `[n, m]`, overwritten. At least 4 partial sums, one a lane, so the rounding
/// error is at most `(d/4 + 4) 2⁻²⁴ Σᵢ |qᵢ rᵢ|`.
pub(crate) fn dot(queries: &[f32], rows: &[f32], d: usize, out: &mut [f32]) {
    debug_assert_eq!(out.len(), queries.len() / d * (rows.len() / d));
    Arch::new().dispatch(Dot { queries, rows, d, out });
}

struct Dot<'a> {
    queries: &'a [f32],
    rows: &'a [f32],
    d: usize,
    out: &'a mut [f32],
}

impl WithSimd for Dot<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let n_rows = self.rows.len() / self.d;
        let queries = self.queries.chunks(QUERY_TILE * self.d);
        for (queries, out) in queries.zip(self.out.chunks_mut(QUERY_TILE * n_rows)) {
            for (row, values) in self.rows.chunks_exact(self.d).enumerate() {
                match queries.as_chunks_of(self.d) {
                    Some(tile) => {
                        let sums = dot_tile(simd, tile, values);
                        sums.into_iter().enumerate().for_each(|(q, sum)| out[q * n_rows + row] = sum);
                    }
                    None => {
                        for (q, query) in queries.chunks_exact(self.d).enumerate() {
                            [out[q * n_rows + row]] = dot_tile(simd, [query], values);
                        }
                    }
                }
            }
        }
    }
}

/// Cuts a full tile of queries into its rows.
trait Tile {
    fn as_chunks_of(&self, d: usize) -> Option<[&[f32]; QUERY_TILE]>;
}

impl Tile for [f32] {
    #[inline(always)]
    fn as_chunks_of(&self, d: usize) -> Option<[&[f32]; QUERY_TILE]> {
        (self.len() == QUERY_TILE * d).then(|| std::array::from_fn(|query| &self[query * d..][..d]))
    }
}

/// Products of Q queries with one row.
#[inline(always)]
fn dot_tile<S: Simd, const Q: usize>(simd: S, queries: [&[f32]; Q], row: &[f32]) -> [f32; Q] {
    let (row, row_rest) = S::as_simd_f32s(row);
    let queries = queries.map(|query| S::as_simd_f32s(query));
    let mut sums = [simd.splat_f32s(0.0); Q];
    for (i, &x) in row.iter().enumerate() {
        for (sum, (query, _)) in sums.iter_mut().zip(&queries) {
            *sum = simd.mul_add_f32s(query[i], x, *sum);
        }
    }
    std::array::from_fn(|q| {
        let rest = queries[q].1.iter().zip(row_rest).fold(0.0, |sum, (a, b)| sum + a * b);
        simd.reduce_sum_f32s(sums[q]) + rest
    })
}

/// `out[query] += Σ_row weights[query][row] rows[row]`, summed in f32, rows in order.
///
/// `weights`: `[n, m]`; `rows`: `[m, d]`; `out`: `[n, d]`.
pub(crate) fn axpy(weights: &[f32], rows: &[f32], d: usize, out: &mut [f32]) {
    debug_assert_eq!(weights.len(), out.len() / d * (rows.len() / d));
    Arch::new().dispatch(Axpy { weights, rows, d, out });
}

struct Axpy<'a> {
    weights: &'a [f32],
    rows: &'a [f32],
    d: usize,
    out: &'a mut [f32],
}

impl WithSimd for Axpy<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (n_rows, d) = (self.rows.len() / self.d, self.d);
        for first in (0..n_rows).step_by(ROW_TILE) {
            let tile = &self.rows[first * d..d * n_rows.min(first + ROW_TILE)];
            for (out, weights) in self.out.chunks_exact_mut(d).zip(self.weights.chunks_exact(n_rows)) {
                match tile.as_chunks_of(d) {
                    Some(rows) => axpy_tile(simd, &weights[first..], rows, out),
                    None => {
                        for (row, weight) in tile.chunks_exact(d).zip(&weights[first..]) {
                            axpy_tile(simd, std::slice::from_ref(weight), [row], out);
                        }
                    }
                }
            }
        }
    }
}

/// Adds R weighted rows to one sum.
#[inline(always)]
fn axpy_tile<S: Simd, const R: usize>(simd: S, weights: &[f32], rows: [&[f32]; R], out: &mut [f32]) {
    let splats: [_; R] = std::array::from_fn(|r| simd.splat_f32s(weights[r]));
    let rows = rows.map(|row| S::as_simd_f32s(row));
    let (out, out_rest) = S::as_mut_simd_f32s(out);
    for (i, out) in out.iter_mut().enumerate() {
        let mut sum = *out;
        for (splat, (row, _)) in splats.iter().zip(&rows) {
            sum = simd.mul_add_f32s(*splat, row[i], sum);
        }
        *out = sum;
    }
    for (i, out) in out_rest.iter_mut().enumerate() {
        for (weight, (_, row)) in weights.iter().zip(&rows) {
            *out += weight * row[i];
        }
    }
}

/// The largest element, −∞ of none; NaN counts as −∞.
pub(crate) fn max(x: &[f32]) -> f32 {
    vectorized(
        #[inline(always)]
        || {
            let larger = |a: f32, b: f32| if b > a { b } else { a };
            let mut lanes = [f32::NEG_INFINITY; LANES];
            let (chunks, rest) = x.as_chunks::<LANES>();
            for chunk in chunks {
                lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane = larger(*lane, x));
            }
            rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
        },
    )
}

/// `x = exp(x − max)`; returns the sum.
pub(crate) fn exp_and_sum(x: &mut [f32], max: f32) -> f32 {
    vectorized(
        #[inline(always)]
        || {
            let mut lanes = [0.0f32; LANES];
            let (chunks, rest) = x.as_chunks_mut::<LANES>();
            for chunk in chunks {
                for (lane, x) in lanes.iter_mut().zip(chunk) {
                    *x = exp(*x - max);
                    *lane += *x;
                }
            }
            for (lane, x) in lanes.iter_mut().zip(rest) {
                *x = exp(*x - max);
                *lane += *x;
            }
            lanes.iter().sum()
        },
    )
}

/// e^x of one number, as [`exp_and_sum`] computes it.
pub(crate) fn exp_of(x: f32) -> f32 {
    exp(x)
}

/// `x = cap · tanh(x / cap)`.
pub(crate) fn softcap(x: &mut [f32], cap: f32) {
    vectorized(
        #[inline(always)]
        || x.iter_mut().for_each(|x| *x = cap * tanh(*x / cap)),
    );
}

/// bf16 bits to f32, exactly.
pub(crate) fn widen(bits: &[half::bf16], out: &mut [f32]) {
    vectorized(
        #[inline(always)]
        || out.iter_mut().zip(bits).for_each(|(out, x)| *out = f32::from_bits(u32::from(x.to_bits()) << 16)),
    );
}

/// Index of the first element that is not of magnitude at most `limit`.
pub(crate) fn first_beyond(x: &[f32], limit: f32) -> Option<usize> {
    const BLOCK: usize = 1024;
    let beyond = |block: &[f32]| {
        vectorized(
            #[inline(always)]
            || block.iter().fold(false, |any, x| any | (x.abs() > limit) | x.is_nan()),
        )
    };
    let block = x.chunks(BLOCK).position(beyond)?;
    x[block * BLOCK..].iter().position(|x| x.abs() > limit || x.is_nan()).map(|at| block * BLOCK + at)
}

/// e^x as 2ⁿ eʳ with n an integer and |r| ≤ ln 2 / 2: Taylor's polynomial of degree 7 for eʳ (truncated at r⁸/8!, 5·10⁻⁹), n put
/// into the exponent's bits. Below −87 it gives 0, above 88 the value at 88; NaN passes. Relative error below 3·10⁻⁷.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// ln 2 in two parts; the first has 9 bits, so its product with n is exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// 1.5 · 2²³: adding and subtracting it rounds to the nearest integer.
    const ROUNDER: f32 = 12_582_912.0;
    let underflows = x < -87.0;
    // Comparisons that leave a NaN in place.
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if underflows { 0.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = x - n * LN_2[0] - n * LN_2[1];
    let taylor = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let power_of_r = taylor.into_iter().fold(0.0, |sum, coefficient| sum * r + coefficient);
    // The low bits of `shifted` are n; the shift drops the others.
    let power_of_two = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if underflows { 0.0 } else { power_of_r * power_of_two }
}

#[inline(always)]
fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    ((1.0 - e) / (1.0 + e)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn products_and_sums_are_those_of_f64_within_their_bounds() {
        for d in [1, 3, 15, 16, 17, 64, 80, 128, 200] {
            for (n, m) in [(1, 1), (1, 5), (3, 4), (4, 9), (5, 2), (8, 7), (13, 13)] {
                let (queries, rows) = (numbers(n * d, 1), numbers(m * d, 2));
                let mut out = vec![f32::NAN; n * m];
                dot(&queries, &rows, d, &mut out);
                for (q, query) in queries.chunks_exact(d).enumerate() {
                    for (r, row) in rows.chunks_exact(d).enumerate() {
                        let terms = query.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b));
                        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                        let bound = (d as f64 + 4.0) * 2f64.powi(-24) * size;
                        let found = f64::from(out[q * m + r]);
                        assert!((found - sum).abs() <= bound, "d {d}, {n} x {m}, ({q}, {r}): {found} for {sum}");
                    }
                }
                let weights = numbers(n * m, 3);
                let mut sums = numbers(n * d, 4);
                let before = sums.clone();
                axpy(&weights, &rows, d, &mut sums);
                for (at, found) in sums.iter().enumerate() {
                    let (q, i) = (at / d, at % d);
                    let start = f64::from(before[at]);
                    let terms = (0..m).map(|r| f64::from(weights[q * m + r]) * f64::from(rows[r * d + i]));
                    let (sum, size) = terms.fold((start, start.abs()), |(s, size), x| (s + x, size + x.abs()));
                    let bound = (m as f64 + 2.0) * 2f64.powi(-24) * size;
                    assert!((f64::from(*found) - sum).abs() <= bound, "d {d}, {n} x {m}, {at}: {found} for {sum}");
                }
            }
        }
    }

    #[test]
    fn exponentials_are_accurate_and_safe_outside_their_range() {
        /// Of [`exp`]: its doc.
        const EXP_REL_TOL: f64 = 3e-7;
        for step in 0..200_000 {
            let x = -86.9 + 174.0 * step as f32 / 200_000.0;
            let error = (f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs();
            assert!(error <= EXP_REL_TOL, "exp({x}): relative error {error}");
        }
        assert_eq!([exp(f32::NEG_INFINITY), exp(-1e30), exp(0.0)], [0.0, 0.0, 1.0]);
        assert!(exp(1e30).is_finite() && exp(f32::NAN).is_nan());
        assert_eq!([tanh(0.0), tanh(50.0), tanh(-50.0)], [0.0, 1.0, -1.0]);
    }

    #[test]
    fn what_is_beyond_a_limit_is_found_wherever_it_stands() {
        for n in [1, 7, 1024, 1025, 3000] {
            assert_eq!(first_beyond(&vec![1.0; n], 1.0), None);
            for at in [0, n / 2, n - 1] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.5] {
                    let mut x = vec![1.0; n];
                    x[at] = bad;
                    assert_eq!(first_beyond(&x, 1.0), Some(at), "{bad} at {at} of {n}");
                }
            }
        }
    }
}
