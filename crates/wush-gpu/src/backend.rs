//! The forward pass on a GPU: the decoder's operations (`wush_model::backend::Backend`) by the kernels of this crate.
//!
//! Activations are bf16 (or f32, for comparisons), rounded once an operation; sums are f32, those of statistics f64. The residual
//! is added inside the output product (β = 1), projections of one input are written beside each other, and the MLP runs a part
//! of the tokens at a time, so that its activations stay small. Everything runs in one queue: sequences follow each other.

use std::ops::Range;

use wush_format::tensor_file::{Dtype, TensorView};
use wush_model::Result as ModelResult;
use wush_model::attention::{Chunk, KeysValues, Windowed};
use wush_model::backend::{Affine, AttentionShape, Backend, Head, Mlp, RmsNorm};
use wush_model::cpu::Cpu;
use wush_model::rope::RopeTable;
use wush_model::spec::Activation as GateKind;

use crate::attention::Attention;
use crate::attention::f32s::{self, Quantized};
use crate::buffer::Buffer;
use crate::elementwise::{Gate, Table};
use crate::error::Result;
pub use crate::gpu::{Compute, Gpu};
use crate::gpu::{Rows, widened};
use crate::matmul::{Matmul, Matrix};
use crate::norm::Norm;
use crate::operand::{Activation, MatrixMut};
use crate::rope::HeadNormRope;
use crate::tensor::{Rope, Tensor, Vector, Weights};

/// Tokens that the MLP takes at a time: products as fast as those of all tokens, on a third of the memory.
pub const MLP_ROWS: usize = 16_384;

impl<T: Compute> Gpu<T> {
    fn norm_into(&self, x: Matrix<'_, T>, norm: &RmsNorm<'_, Self>) -> Result<Tensor<T>> {
        let mut out = Tensor::uninit(&self.device, x.n_rows, x.width)?;
        let MatrixMut { mut view, stride, .. } = out.matrix_mut();
        self.stage("norms", || self.device.rms_norm(x, as_norm(norm), &mut view, stride))?;
        Ok(out)
    }

    /// `y = x Wᵀ + b + β y`.
    fn product(&self, x: Matrix<'_, T>, affine: &Affine<'_, Self>, beta: f32, y: MatrixMut<'_, T>) -> Result<()> {
        let MatrixMut { mut view, stride, .. } = y;
        let bias = affine.bias.map(|bias| bias.narrow.view());
        let product = Matmul { x, weight: affine.weight.projection(), bias, alpha: 1.0, beta };
        self.stage("products", || self.device.matmul(&product, &mut view, stride))
    }

    fn projections<const N: usize>(
        &self,
        x: Matrix<'_, T>,
        projections: [&Affine<'_, Self>; N],
    ) -> Result<[Tensor<T>; N]> {
        let widths = projections.map(|projection| projection.weight.projection().n_rows);
        let mut outs = Tensor::beside(&self.device, x.n_rows, widths)?;
        for (out, projection) in outs.iter_mut().zip(projections) {
            self.product(x, projection, 0.0, out.matrix_mut())?;
        }
        Ok(outs)
    }

    /// `x += norm(y Wᵀ + b)`; without a norm inside the product.
    fn add_product(
        &self,
        mut x: MatrixMut<'_, T>,
        y: Matrix<'_, T>,
        affine: &Affine<'_, Self>,
        norm: Option<&RmsNorm<'_, Self>>,
    ) -> Result<()> {
        let Some(norm) = norm else { return self.product(y, affine, 1.0, x) };
        let [update] = self.projections(y, [affine])?;
        self.stage("norms", || self.device.add_residual(&mut x.view, update.matrix(), Some(as_norm(norm)), None))
    }

    fn add_mlp_rows(&self, x: &mut Tensor<T>, rows: Range<usize>, mlp: &Mlp<'_, Self>) -> Result<()> {
        let gated = {
            let here = x.rows(rows.clone());
            let normed = mlp.before.as_ref().map(|norm| self.norm_into(here, norm)).transpose()?;
            let z = normed.as_ref().map_or(here, Tensor::matrix);
            let width = mlp.gate.weight.projection().n_rows;
            let mut gate_up = Tensor::uninit(&self.device, rows.len(), 2 * width)?;
            for (half, affine) in [&mlp.gate, &mlp.up].into_iter().enumerate() {
                let MatrixMut { mut view, n_rows, stride, .. } = gate_up.matrix_mut();
                let end = view.len() - (1 - half) * width;
                let view = view.slice(half * width..end);
                self.product(z, affine, 0.0, MatrixMut { view, n_rows, width, stride })?;
            }
            let mut gated = Tensor::uninit(&self.device, rows.len(), width)?;
            let mut out = gated.dense_mut();
            self.stage("gates", || self.device.gate(gate_up.matrix(), gate(mlp.activation), &mut out))?;
            gated
        };
        self.add_product(x.rows_mut(rows), gated.matrix(), &mlp.down, mlp.after.as_ref())
    }

    /// `[rows, vocab]`.
    fn logits_of(&self, x: Matrix<'_, T>, table: TensorView<'_>) -> ModelResult<Buffer<f32>> {
        let vocab = table.shape[0];
        let weight = self.head(table)?;
        let mut logits: Buffer<f32> = self.device.uninit(x.n_rows * vocab)?;
        let product = Matmul { x, weight: weight.projection(), bias: None, alpha: 1.0, beta: 0.0 };
        self.stage("products", || self.device.matmul(&product, &mut logits.view_mut(), vocab))?;
        Ok(logits)
    }

    /// Sums of an f64 buffer that starts at zero, added to `into`.
    fn summed(&self, into: &mut [f64], begin: impl FnOnce(&mut Buffer<f64>) -> Result<()>) -> Result<()> {
        let mut sums: Buffer<f64> = self.device.filled(into.len(), 0)?;
        begin(&mut sums)?;
        into.iter_mut().zip(sums.to_host()?).for_each(|(sum, part)| *sum += part);
        Ok(())
    }
}

/// Attention of a layer, as the kernels take it.
pub(crate) fn attention_of<'a, T: Activation>(qkv: [&'a Tensor<T>; 3], shape: &AttentionShape) -> Attention<'a, T> {
    let [q, k, v] = qkv.map(Tensor::matrix);
    let AttentionShape { head_dim, window, scale, softcap, .. } = *shape;
    Attention { q, k, v, head_dim, window, scale, softcap }
}

fn as_norm<'a, T: Compute>(norm: &RmsNorm<'a, Gpu<T>>) -> Norm<'a> {
    Norm { weight: norm.weight.wide.view(), eps: norm.eps }
}

fn gate(kind: GateKind) -> Gate {
    match kind {
        GateKind::Silu => Gate::Silu,
        GateKind::GeluTanh => Gate::GeluTanh,
        GateKind::Gelu => Gate::Gelu,
    }
}

impl<T: Compute> Backend for Gpu<T> {
    const SIDE_BY_SIDE: bool = false;

    type Tensor = Tensor<T>;
    type Matrix = Weights<T>;
    type Vector = Vector<T>;
    type Rope = Rope;

    fn matrix(&self, view: TensorView<'_>, rows: Range<usize>) -> ModelResult<Weights<T>> {
        let n_in = view.shape[1];
        if let Some(data) = self.draw(rows.len() * n_in) {
            return Ok(Weights::Projection { data: data?, n_in });
        }
        let row = n_in * view.dtype.bitsize() / 8;
        let bytes = &view.bytes[rows.start * row..rows.end * row];
        let data = match view.dtype {
            Dtype::BF16 | Dtype::F16 | Dtype::F32 => T::weights(self, view.dtype, bytes)?,
            _ => {
                let part = TensorView { dtype: view.dtype, shape: &[rows.len(), n_in], bytes };
                T::weights(self, Dtype::F32, bytemuck::cast_slice(&widened(part)))?
            }
        };
        Ok(Weights::Projection { data, n_in })
    }

    fn vector(&self, view: TensorView<'_>, rows: Range<usize>, add: f32) -> ModelResult<Vector<T>> {
        let data = if self.draws() { vec![1.0; rows.len()] } else { Cpu.vector(view, rows, add)? };
        let wide = self.device.upload(&data)?;
        let narrow = T::weights(self, Dtype::F32, bytemuck::cast_slice(&data))?;
        Ok(Vector { wide, narrow })
    }

    fn rope(&self, table: RopeTable) -> ModelResult<Rope> {
        let RopeTable { rotary_dim, cos, sin } = table;
        Ok(Rope { rotary_dim, cos: self.device.upload(&cos)?, sin: self.device.upload(&sin)? })
    }

    fn head_matrices(&self, n_heads: usize, dim: usize, data: &[f32]) -> ModelResult<Weights<T>> {
        assert_eq!(data.len(), n_heads * dim * dim, "head matrices are [n_heads, d, d]");
        Ok(Weights::Heads(self.device.upload(data)?))
    }

    fn embed(&self, table: TensorView<'_>, ids: &[u32], scale: f32) -> ModelResult<Tensor<T>> {
        let width = table.shape[1];
        let rows = self.table(table)?;
        let ids = self.device.upload(ids)?;
        let mut out = Tensor::uninit(&self.device, ids.len(), width)?;
        let table = match &*rows {
            Rows::Bf16(rows) => Table::Bf16(rows.view()),
            Rows::F32(rows) => Table::F32(rows.view()),
        };
        self.stage("embedding", || self.device.embed(table, ids.view(), (width, scale), &mut out.dense_mut()))?;
        Ok(out)
    }

    fn norm(&self, x: &Tensor<T>, norm: RmsNorm<'_, Self>) -> ModelResult<Tensor<T>> {
        Ok(self.norm_into(x.matrix(), &norm)?)
    }

    fn project<const N: usize>(
        &self,
        x: &Tensor<T>,
        norm: Option<RmsNorm<'_, Self>>,
        projections: [Affine<'_, Self>; N],
    ) -> ModelResult<[Tensor<T>; N]> {
        let normed = norm.map(|norm| self.norm_into(x.matrix(), &norm)).transpose()?;
        Ok(self.projections(normed.as_ref().unwrap_or(x).matrix(), projections.each_ref())?)
    }

    fn add_projected(
        &self,
        x: &mut Tensor<T>,
        y: &Tensor<T>,
        projection: Affine<'_, Self>,
        norm: Option<RmsNorm<'_, Self>>,
    ) -> ModelResult<()> {
        Ok(self.add_product(x.matrix_mut(), y.matrix(), &projection, norm.as_ref())?)
    }

    fn add_mlp(&self, x: &mut Tensor<T>, mlp: &Mlp<'_, Self>) -> ModelResult<()> {
        for first in (0..x.n_rows).step_by(MLP_ROWS) {
            let rows = first..(first + MLP_ROWS).min(x.n_rows);
            self.add_mlp_rows(x, rows, mlp)?;
        }
        Ok(())
    }

    fn head_norm_rope(
        &self,
        x: &mut Tensor<T>,
        head_dim: usize,
        norm: Option<(&Vector<T>, f32)>,
        rope: Option<&Rope>,
    ) -> ModelResult<()> {
        let what = HeadNormRope {
            head_dim,
            n_q_heads: x.width / head_dim,
            n_k_heads: 0,
            q_norm: norm.map(|(weight, eps)| Norm { weight: weight.wide.view(), eps }),
            k_norm: None,
            rotation: rope.map(Rope::rotation),
        };
        Ok(self.stage("head norms and RoPE", || self.device.head_norm_rope(&mut x.matrix_mut(), &what))?)
    }

    fn attention(&self, q: &Tensor<T>, k: &Tensor<T>, v: &Tensor<T>, shape: &AttentionShape) -> ModelResult<Tensor<T>> {
        let mut out = Tensor::uninit(&self.device, q.n_rows, q.width)?;
        let attention = attention_of([q, k, v], shape);
        let MatrixMut { mut view, stride, .. } = out.matrix_mut();
        self.stage("attention", || self.device.attention(&attention, &mut view, stride))?;
        Ok(out)
    }

    fn transform_heads(&self, x: &Tensor<T>, matrices: &Weights<T>, head_dim: usize) -> ModelResult<Tensor<T>> {
        let mut out = Tensor::uninit(&self.device, x.n_rows, x.width)?;
        self.device.transform_heads(x.matrix(), matrices.heads(), head_dim, &mut out.dense_mut())?;
        Ok(out)
    }

    fn gram(&self, x: &Tensor<T>, n_groups: usize, head_dim: usize, into: &mut [f64]) -> ModelResult<()> {
        assert_eq!(into.len(), n_groups * head_dim * head_dim, "one matrix a group");
        let begin = |sums: &mut Buffer<f64>| {
            let parts = self.device.gram_parts(x.matrix(), head_dim)?;
            self.device.add_gram(&parts, 0..parts.n_heads(), &mut sums.view_mut())
        };
        Ok(self.summed(into, begin)?)
    }

    fn column_sum(&self, x: &Tensor<T>, into: &mut [f64]) -> ModelResult<()> {
        assert_eq!(into.len(), x.width, "one sum a column");
        Ok(self.summed(into, |sums| self.device.column_sums(x.matrix(), &mut sums.view_mut()))?)
    }

    fn logits(&self, x: &Tensor<T>, rows: Range<usize>, table: TensorView<'_>) -> ModelResult<Vec<f32>> {
        Ok(self.logits_of(x.rows(rows), table)?.to_host()?)
    }

    fn nll(&self, x: &Tensor<T>, rows: Range<usize>, targets: &[u32], head: Head<'_>) -> ModelResult<Vec<f64>> {
        let logits = self.logits_of(x.rows(rows.clone()), head.table)?;
        let targets = self.device.upload(targets)?;
        let mut nll: Buffer<f64> = self.device.uninit(rows.len())?;
        let logits = Matrix::packed(logits.view(), rows.len(), head.table.shape[0]);
        self.stage("log likelihoods", || self.device.nll(logits, head.softcap, targets.view(), &mut nll.view_mut()))?;
        Ok(nll.to_host()?)
    }

    fn to_host(&self, x: &Tensor<T>) -> ModelResult<Vec<f32>> {
        let dense = self.device.dense(x.matrix())?;
        Ok(dense.to_host()?.into_iter().map(Into::into).collect())
    }
}

impl Windowed for Gpu<f32> {
    fn n_rows(&self, x: &Tensor<f32>) -> usize {
        x.n_rows
    }

    fn to_device(&self, n_rows: usize, data: Vec<f32>) -> ModelResult<Tensor<f32>> {
        assert!(data.len().is_multiple_of(n_rows.max(1)), "whole rows");
        let mut x = Tensor::uninit(&self.device, n_rows, data.len() / n_rows.max(1))?;
        self.uploader.upload(bytemuck::cast_slice(&data), &mut x.dense_mut())?;
        Ok(x)
    }

    fn windowed(
        &self,
        q: &Tensor<f32>,
        exact: KeysValues<'_, Tensor<f32>>,
        quantized: KeysValues<'_, Tensor<f32>>,
        shape: &AttentionShape,
        chunks: &[Chunk],
    ) -> ModelResult<Tensor<f32>> {
        let mut out = Tensor::uninit(&self.device, q.n_rows, q.width)?;
        let attention = attention_of([q, exact.keys, exact.values], shape);
        let quantized = Quantized { k: quantized.keys.matrix(), v: quantized.values.matrix(), chunks };
        let MatrixMut { mut view, stride, .. } = out.matrix_mut();
        self.stage("attention", || f32s::windowed(&self.device, &attention, quantized, &mut view, stride))?;
        Ok(out)
    }
}
