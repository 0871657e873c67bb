//! Activations and weights of the forward pass: who owns their memory, and how they lie in it.

use std::sync::Arc;

use crate::buffer::{Buffer, View, ViewMut};
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::matmul::{Matrix, span};
use crate::operand::{Activation, MatrixMut};
use crate::rope::Rotation;

/// Activations `[tokens, width]`: all of a buffer, or columns of a wider matrix in it, beside those of other tensors.
#[derive(Debug)]
pub struct Tensor<T: Activation> {
    buffer: Arc<Buffer<T>>,
    /// Of the first element.
    offset: usize,
    stride: usize,
    /// Tokens.
    pub n_rows: usize,
    /// Elements of a token.
    pub width: usize,
}

impl<T: Activation> Tensor<T> {
    /// Of whatever the memory holds.
    ///
    /// # Errors
    /// `TooLarge`, `OutOfMemory`, `Driver`.
    pub fn uninit(device: &Device, n_rows: usize, width: usize) -> Result<Self> {
        let [tensor] = Self::beside(device, n_rows, [width])?;
        Ok(tensor)
    }

    /// Several in one buffer, a token's elements of one beside those of the next.
    ///
    /// # Errors
    /// As [`Tensor::uninit`].
    pub fn beside<const N: usize>(device: &Device, n_rows: usize, widths: [usize; N]) -> Result<[Self; N]> {
        // Every tensor's rows begin at whole vectors.
        let room = |width: usize| width.next_multiple_of(T::VECTOR);
        let stride: usize = widths.into_iter().map(room).sum();
        let len = n_rows.checked_mul(stride).ok_or(GpuError::TooLarge { what: "activations", count: n_rows })?;
        let buffer = Arc::new(device.uninit(len)?);
        let mut offset = 0;
        Ok(widths.map(|width| {
            let tensor = Self { buffer: buffer.clone(), offset, stride, n_rows, width };
            offset += room(width);
            tensor
        }))
    }

    /// The first `n_rows · width` elements of a buffer. Whoever writes the tensor sees to it that nobody else uses them.
    pub(crate) fn dense(buffer: &Arc<Buffer<T>>, n_rows: usize, width: usize) -> Self {
        debug_assert!(n_rows * width <= buffer.len(), "rows of the buffer");
        Self { buffer: buffer.clone(), offset: 0, stride: width, n_rows, width }
    }

    /// Whether it lies in this buffer.
    pub(crate) fn is_in(&self, buffer: &Arc<Buffer<T>>) -> bool {
        Arc::ptr_eq(&self.buffer, buffer)
    }

    /// The memory that it lies in.
    pub(crate) fn into_buffer(self) -> Arc<Buffer<T>> {
        self.buffer
    }

    /// Elements from the first to the last.
    fn span(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + span(self.n_rows, self.width, self.stride)
    }

    /// To be read.
    pub fn matrix(&self) -> Matrix<'_, T> {
        let view = self.buffer.view().slice(self.span());
        Matrix { view, n_rows: self.n_rows, width: self.width, stride: self.stride }
    }

    /// To be written.
    pub fn matrix_mut(&mut self) -> MatrixMut<'_, T> {
        // SAFETY: tensors that share a buffer hold other columns of it, and this one is borrowed for writing.
        let view = unsafe { self.buffer.view_mut_shared(self.span()) };
        MatrixMut { view, n_rows: self.n_rows, width: self.width, stride: self.stride }
    }

    /// Rows `rows`, to be read.
    ///
    /// # Panics
    /// When they reach beyond it: the caller's invariant.
    pub fn rows(&self, rows: std::ops::Range<usize>) -> Matrix<'_, T> {
        let whole = self.matrix();
        let end = if rows.is_empty() { rows.start * self.stride } else { (rows.end - 1) * self.stride + self.width };
        let view = whole.view.slice(rows.start * self.stride..end);
        Matrix { view, n_rows: rows.len(), ..whole }
    }

    /// Rows `rows`, to be written.
    ///
    /// # Panics
    /// When they reach beyond it: the caller's invariant.
    pub fn rows_mut(&mut self, rows: std::ops::Range<usize>) -> MatrixMut<'_, T> {
        let (stride, width) = (self.stride, self.width);
        let start = self.offset + rows.start * stride;
        let len = span(rows.len(), width, stride);
        assert!(rows.end <= self.n_rows, "{rows:?} of {} rows", self.n_rows);
        // SAFETY: as in `matrix_mut`.
        let view = unsafe { self.buffer.view_mut_shared(start..start + len) };
        MatrixMut { view, n_rows: rows.len(), width, stride }
    }

    /// All of the tensors as one matrix, where they lie beside each other without a gap.
    pub fn joined<'a>(tensors: [&'a Self; 3]) -> Option<Matrix<'a, T>> {
        let first = tensors[0];
        let follows = |pair: &[&Self]| {
            Arc::ptr_eq(&pair[0].buffer, &pair[1].buffer) && pair[0].offset + pair[0].width == pair[1].offset
        };
        let width = tensors.iter().map(|tensor| tensor.width).sum();
        tensors.windows(2).all(follows).then(|| {
            let end = tensors[2].span().end;
            let view: View<'a, T> = first.buffer.view().slice(first.offset..end);
            Matrix { view, n_rows: first.n_rows, width, stride: first.stride }
        })
    }

    /// The whole buffer, where this is all of it.
    pub(crate) fn dense_mut(&mut self) -> ViewMut<'_, T> {
        assert_eq!(self.stride, self.width, "rows one after the other");
        self.matrix_mut().view
    }
}

/// A matrix of weights.
#[derive(Debug)]
pub enum Weights<T: Activation> {
    /// `[out, in]` in the activations' type.
    Projection {
        /// Row by row.
        data: Buffer<T>,
        /// Columns.
        n_in: usize,
    },
    /// `[n_heads, d, d]` in f32.
    Heads(Buffer<f32>),
}

impl<T: Activation> Weights<T> {
    /// Of a projection.
    ///
    /// # Panics
    /// When it is per-head matrices: the caller's invariant.
    pub(crate) fn projection(&self) -> Matrix<'_, T> {
        match self {
            Self::Projection { data, n_in } => Matrix::packed(data.view(), data.len() / (*n_in).max(1), *n_in),
            Self::Heads(_) => unreachable!("head matrices are for `transform_heads` alone"),
        }
    }

    /// Of heads.
    ///
    /// # Panics
    /// When it is a projection: the caller's invariant.
    pub(crate) fn heads(&self) -> View<'_, f32> {
        match self {
            Self::Heads(data) => data.view(),
            Self::Projection { .. } => unreachable!("`transform_heads` takes head matrices alone"),
        }
    }
}

/// A vector of weights: in f32 for norms, in the activations' type for biases.
#[derive(Debug)]
pub struct Vector<T: Activation> {
    /// For norms.
    pub(crate) wide: Buffer<f32>,
    /// For biases, rounded once.
    pub(crate) narrow: Buffer<T>,
}

/// cos and sin of some positions.
#[derive(Debug)]
pub struct Rope {
    pub(crate) rotary_dim: usize,
    pub(crate) cos: Buffer<f32>,
    pub(crate) sin: Buffer<f32>,
}

impl Rope {
    /// As the kernel takes it.
    pub(crate) fn rotation(&self) -> Rotation<'_> {
        Rotation { rotary_dim: self.rotary_dim, cos: self.cos.view(), sin: self.sin.view() }
    }
}
