//! The few dense operations that the solver needs, on faer and sequential: parallelism is over heads and belongs to the
//! caller, so that the bytes of a result never depend on the thread count. Row-major slices enter and leave; inside,
//! matrices are faer's.

use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::cholesky::llt::factor::{LltRegularization, cholesky_in_place, cholesky_in_place_scratch};
use faer::linalg::cholesky::llt_pivoting::factor as pivoted;
use faer::linalg::evd::{ComputeEigenvectors, self_adjoint_evd, self_adjoint_evd_scratch};
use faer::linalg::matmul::matmul;
use faer::linalg::svd::{ComputeSvdVectors, svd, svd_scratch};
use faer::linalg::triangular_solve::solve_upper_triangular_in_place;
use faer::{Accum, Col, Mat, MatRef, Par, Spec};

use crate::{Result, TransformError};

/// A row-major `[dim, dim]` slice as a matrix. The length is the caller's invariant.
pub(crate) fn from_rows(data: &[f64], dim: usize) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(data, dim, dim)
}

/// A square matrix as a row-major vector.
pub(crate) fn to_rows(a: MatRef<'_, f64>) -> Vec<f64> {
    let mut rows = Vec::with_capacity(a.nrows() * a.ncols());
    for i in 0..a.nrows() {
        rows.extend((0..a.ncols()).map(|j| a[(i, j)]));
    }
    rows
}

/// `a b`.
pub(crate) fn product(a: MatRef<'_, f64>, b: MatRef<'_, f64>) -> Mat<f64> {
    let mut out = Mat::zeros(a.nrows(), b.ncols());
    matmul(out.as_mut(), Accum::Replace, a, b, 1.0, Par::Seq);
    out
}

/// Column j multiplied by `scale(j)`.
pub(crate) fn scale_columns(a: &mut Mat<f64>, scale: impl Fn(usize) -> f64) {
    for j in 0..a.ncols() {
        let factor = scale(j);
        a.col_mut(j).iter_mut().for_each(|x| *x *= factor);
    }
}

/// (A + Aᵀ) / 2.
pub(crate) fn symmetrized(a: MatRef<'_, f64>) -> Mat<f64> {
    Mat::from_fn(a.nrows(), a.ncols(), |i, j| a[(i, j)] * 0.5 + a[(j, i)] * 0.5)
}

/// Lower Cholesky factor; `None` when a pivot is not positive.
pub(crate) fn cholesky(a: MatRef<'_, f64>) -> Option<Mat<f64>> {
    let dim = a.nrows();
    let mut factor = a.to_owned();
    let mut memory = MemBuffer::new(cholesky_in_place_scratch::<f64>(dim, Par::Seq, Spec::default()));
    let stack = MemStack::new(&mut memory);
    cholesky_in_place(factor.as_mut(), LltRegularization::default(), Par::Seq, stack, Spec::default()).ok()?;
    for j in 1..dim {
        factor.col_mut(j).subrows_mut(0, j).fill(0.0);
    }
    // A NaN pivot would pass faer's comparison.
    (0..dim).all(|i| factor[(i, i)] > 0.0).then_some(factor)
}

/// A square root R of a symmetric positive semidefinite matrix, R Rᵀ = A, by Cholesky with pivoting: `[d, rank]`. It stops
/// where the remaining diagonal is at most d·ε of the largest; what it drops is positive semidefinite up to rounding.
/// `None` when a diagonal element is negative.
pub(crate) fn pivoted_root(a: MatRef<'_, f64>) -> Option<Mat<f64>> {
    let dim = a.nrows();
    let mut factor = a.to_owned();
    let (mut order, mut inverse) = (vec![0usize; dim], vec![0usize; dim]);
    let mut memory = MemBuffer::new(pivoted::cholesky_in_place_scratch::<usize, f64>(dim, Par::Seq, Spec::default()));
    let stack = MemStack::new(&mut memory);
    let (info, _) =
        pivoted::cholesky_in_place(factor.as_mut(), &mut order, &mut inverse, Par::Seq, stack, Spec::default()).ok()?;
    let (factor, rank) = (factor.as_ref(), info.rank);
    Some(Mat::from_fn(dim, rank, |i, j| if j <= inverse[i] { factor[(inverse[i], j)] } else { 0.0 }))
}

/// `L^{-T} b` with L lower triangular.
pub(crate) fn solve_transposed(lower: &Mat<f64>, mut b: Mat<f64>) -> Mat<f64> {
    solve_upper_triangular_in_place(lower.transpose(), b.as_mut(), Par::Seq);
    b
}

/// Eigenvalues, ascending, of a symmetric matrix (its lower triangle is read), without eigenvectors.
pub(crate) fn eigenvalues(a: MatRef<'_, f64>, what: &'static str) -> Result<Vec<f64>> {
    symmetric_eigen(a, None, what)
}

/// Eigenvalues, ascending, and eigenvectors as columns of a symmetric matrix (its lower triangle is read).
pub(crate) fn eigen(a: MatRef<'_, f64>, what: &'static str) -> Result<(Vec<f64>, Mat<f64>)> {
    let mut vectors = Mat::zeros(a.nrows(), a.nrows());
    let values = symmetric_eigen(a, Some(&mut vectors), what)?;
    Ok((values, vectors))
}

fn symmetric_eigen(a: MatRef<'_, f64>, vectors: Option<&mut Mat<f64>>, what: &'static str) -> Result<Vec<f64>> {
    let dim = a.nrows();
    let mode = if vectors.is_some() { ComputeEigenvectors::Yes } else { ComputeEigenvectors::No };
    let mut values = Col::<f64>::zeros(dim);
    let mut memory = MemBuffer::new(self_adjoint_evd_scratch::<f64>(dim, mode, Par::Seq, Spec::default()));
    let stack = MemStack::new(&mut memory);
    let vectors = vectors.map(|v| v.as_mut());
    self_adjoint_evd(a, values.as_mut().as_diagonal_mut(), vectors, Par::Seq, stack, Spec::default())
        .map_err(|_| TransformError::NoConvergence { what })?;
    Ok(values.iter().copied().collect())
}

/// Singular values, descending.
pub(crate) fn singular_values(a: MatRef<'_, f64>, what: &'static str) -> Result<Vec<f64>> {
    let dim = a.nrows();
    let mut values = Col::<f64>::zeros(dim);
    let none = ComputeSvdVectors::No;
    let mut memory = MemBuffer::new(svd_scratch::<f64>(dim, dim, none, none, Par::Seq, Spec::default()));
    let stack = MemStack::new(&mut memory);
    svd(a, values.as_mut().as_diagonal_mut(), None, None, Par::Seq, stack, Spec::default())
        .map_err(|_| TransformError::NoConvergence { what })?;
    Ok(values.iter().copied().collect())
}
