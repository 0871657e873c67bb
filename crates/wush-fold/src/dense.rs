//! Small dense row-major f64 matrices over faer, single-threaded so that no result depends on the thread count.
//!
//! Enters and leaves: row-major slices. Parallelism belongs to the caller, which works on many heads at once.

use faer::diag::Diag;
use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::matmul::{matmul, triangular};
use faer::linalg::svd::{ComputeSvdVectors, svd, svd_scratch};
use faer::{Accum, Mat, MatMut, MatRef, Par};

/// A row-major slice as a faer view.
pub(crate) fn view(data: &[f64], rows: usize, cols: usize) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(data, rows, cols)
}

/// A row-major slice as a writable faer view.
pub(crate) fn view_mut(data: &mut [f64], rows: usize, cols: usize) -> MatMut<'_, f64> {
    MatMut::from_row_major_slice_mut(data, rows, cols)
}

/// `dst = lhs · rhs`.
pub(crate) fn product(dst: MatMut<'_, f64>, lhs: MatRef<'_, f64>, rhs: MatRef<'_, f64>) {
    matmul(dst, Accum::Replace, lhs, rhs, 1.0, Par::Seq);
}

/// `dst += lhs · rhs`.
pub(crate) fn add_product(dst: MatMut<'_, f64>, lhs: MatRef<'_, f64>, rhs: MatRef<'_, f64>) {
    matmul(dst, Accum::Add, lhs, rhs, 1.0, Par::Seq);
}

/// The lower triangle of `dst += x · xᵀ`; the rest of `dst` stays as it is.
pub(crate) fn add_gram_lower(dst: MatMut<'_, f64>, x: MatRef<'_, f64>) {
    use triangular::BlockStructure::{Rectangular, TriangularLower};
    triangular::matmul(dst, TriangularLower, Accum::Add, x, Rectangular, x.transpose(), Rectangular, 1.0, Par::Seq);
}

/// Copies the lower triangle of a row-major `[dim, dim]` matrix onto the upper one.
pub(crate) fn mirror_lower(data: &mut [f64], dim: usize) {
    for row in 0..dim {
        for col in row + 1..dim {
            data[row * dim + col] = data[col * dim + row];
        }
    }
}

/// tr(A·Bᵀ) of two row-major `[dim, dim]` matrices: the sum of their elementwise products.
pub(crate) fn trace_product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// The transposed of a row-major `[dim, dim]` matrix.
pub(crate) fn transposed(data: &[f64], dim: usize) -> Vec<f64> {
    (0..dim * dim).map(|i| data[(i % dim) * dim + i / dim]).collect()
}

/// Thin singular value decomposition A = U·diag(s)·Vᵀ, s descending.
pub(crate) struct Svd {
    pub(crate) u: Mat<f64>,
    pub(crate) s: Vec<f64>,
    pub(crate) v: Mat<f64>,
}

/// The decomposition of a finite matrix; none if it does not converge.
pub(crate) fn thin_svd(a: MatRef<'_, f64>) -> Option<Svd> {
    let (rows, cols) = a.shape();
    let size = rows.min(cols);
    let (mut u, mut v) = (Mat::zeros(rows, size), Mat::zeros(cols, size));
    let mut s = Diag::zeros(size);
    let thin = ComputeSvdVectors::Thin;
    let mut memory = MemBuffer::new(svd_scratch::<f64>(rows, cols, thin, thin, Par::Seq, Default::default()));
    let stack = MemStack::new(&mut memory);
    svd(a, s.as_mut(), Some(u.as_mut()), Some(v.as_mut()), Par::Seq, stack, Default::default()).ok()?;
    let s = s.column_vector().iter().copied().collect();
    Some(Svd { u, s, v })
}

/// A new matrix `lhs · rhs`.
pub(crate) fn multiply(lhs: MatRef<'_, f64>, rhs: MatRef<'_, f64>) -> Mat<f64> {
    let mut out = Mat::zeros(lhs.nrows(), rhs.ncols());
    product(out.as_mut(), lhs, rhs);
    out
}

/// Every element of `a` through `f`.
pub(crate) fn map(a: MatRef<'_, f64>, f: impl Fn(f64) -> f64) -> Mat<f64> {
    Mat::from_fn(a.nrows(), a.ncols(), |i, j| f(a[(i, j)]))
}

/// Squared Frobenius norm.
pub(crate) fn squared_norm(a: MatRef<'_, f64>) -> f64 {
    (0..a.ncols()).map(|j| a.col(j).iter().map(|x| x * x).sum::<f64>()).sum()
}
