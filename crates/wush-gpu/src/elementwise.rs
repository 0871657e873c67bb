//! What lies between the products: bias, the gate of the MLP, embedding rows (`kernels/elementwise.cu`).

use half::bf16;

use crate::buffer::{View, ViewMut};
use crate::device::Device;
use crate::error::Result;
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::Arg;
use crate::matmul::Matrix;
use crate::operand::{Activation, MatrixMut, aligned, check, long_enough, over_vectors, u32_of};

/// `kernels/elementwise.cu`.
pub static FILE: KernelFile = KernelFile {
    name: "elementwise",
    source: include_str!("../../../kernels/elementwise.cu"),
    runs_on: EVERYWHERE,
    variants: &[&[], &[("ACT_F32", "1")]],
};

/// Activation of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// x · sigmoid(x).
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
    /// Exact GELU.
    Gelu,
}

/// Rows to be looked up, `[n, width]` one after the other.
#[derive(Debug, Clone, Copy)]
pub enum Table<'a> {
    /// As most checkpoints store it.
    Bf16(View<'a, bf16>),
    /// f32.
    F32(View<'a, f32>),
}

impl Device {
    /// Begins `out = act(gate) * up`: `x` is `[tokens, 2 width]`, a row's gate before its up; `out` `[tokens, width]`, its rows
    /// one after the other.
    ///
    /// # Errors
    /// `Length`, `Layout`, `TooLarge` for operands that the kernel cannot take; `Library` without the compiler, `Compile`,
    /// `Driver`.
    pub fn gate<T: Activation>(&self, x: Matrix<'_, T>, gate: Gate, out: &mut ViewMut<'_, T>) -> Result<()> {
        let width = x.width / 2;
        check("gate and up", x)?;
        check("the gated", Matrix::packed(out.as_view(), x.n_rows, width))?;
        if x.n_rows == 0 || width == 0 {
            return Ok(());
        }
        let entry = match gate {
            Gate::Silu => "gate_silu",
            Gate::GeluTanh => "gate_gelu_tanh",
            Gate::Gelu => "gate_gelu",
        };
        let kernel = self.kernel(&FILE, entry, &T::macros(&[]))?;
        let geometry = over_vectors::<T>(x.n_rows, width, 1)?;
        let [n_rows, columns] = [x.n_rows, width].map(|size| Arg::U32(size as u32));
        let args = [x.view.into(), Arg::U64(x.stride as u64), Arg::from(&*out), n_rows, columns];
        // SAFETY: both operands have the rows and columns that the kernel is told, as checked.
        unsafe { self.launch(&kernel, geometry, &args) }
    }

    /// Begins `x += bias` of every row.
    ///
    /// # Errors
    /// As [`Device::gate`].
    pub fn add_bias<T: Activation>(&self, x: &mut MatrixMut<'_, T>, bias: View<'_, f32>) -> Result<()> {
        check("x of a bias", x.as_matrix())?;
        aligned("a bias", bias.address())?;
        long_enough("a bias", x.width, bias.len())?;
        if x.n_rows == 0 || x.width == 0 {
            return Ok(());
        }
        let kernel = self.kernel(&FILE, "bias_add", &T::macros(&[]))?;
        let geometry = over_vectors::<T>(x.n_rows, x.width, 1)?;
        let [n_rows, width] = [x.n_rows, x.width].map(|size| Arg::U32(size as u32));
        let args = [Arg::from(&x.view), Arg::U64(x.stride as u64), bias.into(), n_rows, width];
        // SAFETY: the operands have the rows and columns that the kernel is told, as checked.
        unsafe { self.launch(&kernel, geometry, &args) }
    }

    /// Begins `out = scale * table[ids]`, `[ids, width]`, rows one after the other. An id beyond the table gives a row of NaN.
    ///
    /// # Errors
    /// As [`Device::gate`].
    pub fn embed<T: Activation>(
        &self,
        table: Table<'_>,
        ids: View<'_, u32>,
        (width, scale): (usize, f32),
        out: &mut ViewMut<'_, T>,
    ) -> Result<()> {
        check("embedded rows", Matrix::packed(out.as_view(), ids.len(), width))?;
        if ids.len() == 0 || width == 0 {
            return Ok(());
        }
        let (entry, rows, len) = match table {
            Table::Bf16(rows) => ("embed_bf16", rows.address(), rows.len()),
            Table::F32(rows) => ("embed_f32", rows.address(), rows.len()),
        };
        aligned("an embedding", rows)?;
        long_enough("an embedding", width, len)?;
        let n_ids = u32_of("rows of an embedding", len / width)?;
        let kernel = self.kernel(&FILE, entry, &T::macros(&[]))?;
        let geometry = over_vectors::<T>(ids.len(), width, 1)?;
        let [n_rows, columns] = [ids.len(), width].map(|size| Arg::U32(size as u32));
        let args = [Arg::Address(rows), n_ids.into(), ids.into(), scale.into(), Arg::from(&*out), n_rows, columns];
        // SAFETY: `out` has a row an id, as checked, and the kernel reads only rows that the table has.
        unsafe { self.launch(&kernel, geometry, &args) }
    }
}
