//! What is asked of activations as a whole: the first that is not finite, and sums of columns (`kernels/sums.cu`).

use crate::buffer::{Buffer, ViewMut};
use crate::device::Device;
use crate::error::Result;
use crate::kernels::{EVERYWHERE, KernelFile};
use crate::launch::{Arg, Geometry};
use crate::matmul::Matrix;
use crate::operand::{Activation, check, long_enough, over_vectors, u32_of};

/// `kernels/sums.cu`.
pub static FILE: KernelFile = KernelFile {
    name: "sums",
    source: include_str!("../../../kernels/sums.cu"),
    runs_on: EVERYWHERE,
    variants: &[&[], &[("ACT_F32", "1")]],
};

/// Rows that a thread looks at.
const ROWS_PER_THREAD: usize = 8;
/// Rows that are summed to one partial sum.
const CHUNK: usize = 256;
/// Vectors of a row that a block sums, and rows that it sums side by side.
const SUM_BLOCK: [usize; 2] = [32, 8];
/// Threads that add the partial sums.
const ADD_BLOCK: usize = 256;

/// Where activations were first not finite, noted by the device as it goes and read once. Every matrix has a number of the
/// caller's: a slot.
#[derive(Debug)]
pub struct FiniteCheck {
    slots: Buffer<u64>,
}

/// An element that is NaN or infinite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NonFinite {
    /// Of the matrix.
    pub slot: usize,
    /// Place in the matrix, row by row: `row * width + column`.
    pub index: usize,
}

impl FiniteCheck {
    /// Nothing is noted of `n_slots` matrices.
    ///
    /// # Errors
    /// `TooLarge`, `OutOfMemory`, `Driver`.
    pub fn new(device: &Device, n_slots: usize) -> Result<Self> {
        Ok(Self { slots: device.filled(n_slots, 0xff)? })
    }

    /// Forgets what was noted.
    ///
    /// # Errors
    /// `Driver`.
    pub fn clear(&mut self) -> Result<()> {
        self.slots.fill_bytes(0xff)
    }

    /// Begins to look for the first element of `x` that is NaN or infinite.
    ///
    /// # Errors
    /// `Length`, `Layout`, `TooLarge` for operands that the kernel cannot take; `Library` without the compiler, `Compile`,
    /// `Driver`.
    ///
    /// # Panics
    /// When there is no such slot: the caller's invariant.
    pub fn look<T: Activation>(&mut self, slot: usize, x: Matrix<'_, T>) -> Result<()> {
        check("what is to be finite", x)?;
        if x.n_rows == 0 || x.width == 0 {
            return Ok(());
        }
        let device = self.slots.device().clone();
        let kernel = device.kernel(&FILE, "first_non_finite", &T::macros(&[]))?;
        let geometry = over_vectors::<T>(x.n_rows, x.width, ROWS_PER_THREAD)?;
        let [n_rows, width] = [x.n_rows, x.width].map(|size| Arg::U32(size as u32));
        let first = Arg::from(self.slots.view().slice(slot..slot + 1));
        // SAFETY: x has the rows and columns that the kernel is told, as checked; there is one number to note.
        unsafe { device.launch(&kernel, geometry, &[x.view.into(), Arg::U64(x.stride as u64), n_rows, width, first]) }
    }

    /// The first element that was not finite, in the least slot that has one; none where all are finite. Waits for the device.
    ///
    /// # Errors
    /// `Driver`, also for what an earlier kernel did.
    pub fn first(&self) -> Result<Option<NonFinite>> {
        let slots = self.slots.to_host()?;
        let slot = slots.iter().position(|&index| index != u64::MAX);
        Ok(slot.map(|slot| NonFinite { slot, index: slots[slot] as usize }))
    }
}

impl Device {
    /// Begins `into[j] += Σ_t x[t, j]`, in f64 and in an order that depends on the shape alone.
    ///
    /// # Errors
    /// As [`FiniteCheck::look`]; `OutOfMemory`.
    pub fn column_sums<T: Activation>(&self, x: Matrix<'_, T>, into: &mut ViewMut<'_, f64>) -> Result<()> {
        check("what is summed", x)?;
        long_enough("sums of columns", x.width, into.len())?;
        if x.n_rows == 0 || x.width == 0 {
            return Ok(());
        }
        let n_chunks = x.n_rows.div_ceil(CHUNK);
        let partial: Buffer<f64> = self.uninit(partial_len(x.n_rows, x.width))?;
        let [lanes, strands] = SUM_BLOCK;
        let n_blocks = u32_of("columns to sum", x.width.div_ceil(lanes * T::VECTOR))?;
        let geometry = Geometry {
            // The second axis of a grid is shorter: at most so many rows are summed at once.
            grid: [n_blocks, u16::try_from(n_chunks).map_err(|_| too_many(x.n_rows))?.into(), 1],
            block: [lanes as u32, strands as u32, 1],
            shared_bytes: 0,
        };
        let [n_rows, width, chunks] = [x.n_rows, x.width, n_chunks].map(|size| Arg::U32(size as u32));
        let kernel = self.kernel(&FILE, "column_sums", &T::macros(&[]))?;
        let args = [x.view.into(), Arg::U64(x.stride as u64), n_rows, width, Arg::from(&partial)];
        // SAFETY: x has the rows and columns that the kernel is told, as checked; there is a partial sum a chunk and column.
        unsafe { self.launch(&kernel, geometry, &args) }?;
        let kernel = self.kernel(&FILE, "add_column_sums", &T::macros(&[]))?;
        let geometry = Geometry::row(x.width.div_ceil(ADD_BLOCK) as u32, ADD_BLOCK as u32);
        // SAFETY: as above; `into` has a sum a column.
        unsafe { self.launch(&kernel, geometry, &[Arg::from(&partial), chunks, width, Arg::from(&*into)]) }
    }
}

/// Partial sums of so many rows and columns. Saturates.
pub(crate) fn partial_len(n_rows: usize, width: usize) -> usize {
    n_rows.div_ceil(CHUNK).saturating_mul(width)
}

fn too_many(count: usize) -> crate::GpuError {
    crate::GpuError::TooLarge { what: "rows to sum", count }
}
