//! Launches: arguments as values, checked against the kernel's parameters as it was compiled.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUtensorMap};

use crate::buffer::{Buffer, Element, View, ViewMut};
use crate::device::{Device, Queue};
use crate::driver::check;
use crate::error::{GpuError, Result};
use crate::kernels::Kernel;

/// How a kernel is spread over the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
}

impl Geometry {
    /// A row of blocks without dynamic shared memory.
    pub fn row(n_blocks: u32, n_threads: u32) -> Self {
        Self { grid: [n_blocks, 1, 1], block: [n_threads, 1, 1], shared_bytes: 0 }
    }
}

/// One argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Arg {
    /// An address on the device; 0 for none.
    Address(u64),
    /// `unsigned`.
    U32(u32),
    /// `int`.
    I32(i32),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// `const __grid_constant__ CUtensorMap`, or any 128 bytes aligned to 64.
    TensorMap(TensorMap),
}

impl Arg {
    /// No buffer.
    pub const NONE: Self = Self::Address(0);

    fn size(&self) -> usize {
        match self {
            Self::Address(_) | Self::U64(_) => size_of::<u64>(),
            Self::U32(_) | Self::I32(_) | Self::F32(_) => size_of::<u32>(),
            Self::TensorMap(_) => size_of::<CUtensorMap>(),
        }
    }

    /// Where its value lies.
    fn pointer(&self) -> *mut c_void {
        match self {
            Self::Address(value) | Self::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::TensorMap(map) => std::ptr::from_ref(&map.0).cast_mut().cast(),
        }
    }
}

impl<T: Element> From<&Buffer<T>> for Arg {
    fn from(buffer: &Buffer<T>) -> Self {
        Self::Address(buffer.view().address())
    }
}

impl<T: Element> From<&mut Buffer<T>> for Arg {
    fn from(buffer: &mut Buffer<T>) -> Self {
        Self::Address(buffer.view().address())
    }
}

impl<T: Element> From<View<'_, T>> for Arg {
    fn from(view: View<'_, T>) -> Self {
        Self::Address(view.address())
    }
}

impl<T: Element> From<&ViewMut<'_, T>> for Arg {
    fn from(view: &ViewMut<'_, T>) -> Self {
        Self::Address(view.address())
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<i32> for Arg {
    fn from(value: i32) -> Self {
        Self::I32(value)
    }
}

impl From<u64> for Arg {
    fn from(value: u64) -> Self {
        Self::U64(value)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<TensorMap> for Arg {
    fn from(map: TensorMap) -> Self {
        Self::TensorMap(map)
    }
}

impl Device {
    /// Begins a kernel in the compute queue.
    ///
    /// # Safety
    /// With these arguments the kernel reads and writes only buffers that are alive and were given for that: the wrapper of
    /// each kernel checks lengths for it. A buffer that is dropped afterwards may be: see [`crate::pool`].
    ///
    /// # Errors
    /// `Arguments` when they are not as many or not as long as the kernel's parameters, `Driver`.
    pub unsafe fn launch(&self, kernel: &Kernel, geometry: Geometry, args: &[Arg]) -> Result<()> {
        check_sizes(kernel, args)?;
        self.bind()?;
        kernel.grant_shared(geometry.shared_bytes)?;
        let mut pointers: Vec<*mut c_void> = args.iter().map(Arg::pointer).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (geometry.grid, geometry.block);
        let stream = self.stream(Queue::Compute);
        // SAFETY: the function is loaded on this device, there is one pointer a parameter to a value of its size (where the
        // driver tells the sizes), the driver copies the values before it returns; the caller answers for the addresses.
        let status = unsafe {
            sys::cuLaunchKernel(
                kernel.function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                geometry.shared_bytes,
                stream,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("start a kernel", status)
    }
}

fn check_sizes(kernel: &Kernel, args: &[Arg]) -> Result<()> {
    let found: Vec<usize> = args.iter().map(Arg::size).collect();
    match &kernel.parameters {
        Some(expected) if *expected != found => {
            Err(GpuError::Arguments { kernel: kernel.entry.clone(), expected: expected.clone(), found })
        }
        _ => Ok(()),
    }
}

/// How tiles lie in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    /// As in global memory.
    None,
    /// 16-byte pieces exchanged within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

/// A description of a bf16 tensor for Hopper's bulk copies.
#[derive(Debug, Clone, Copy)]
pub struct TensorMap(CUtensorMap);

impl TensorMap {
    /// Describes `view` as a tensor of `dims` elements, the innermost first and contiguous, whose other dimensions lie
    /// `strides` elements apart, copied in tiles of `tile` elements. Reads beyond `dims` give zeros.
    ///
    /// # Errors
    /// `Length` when the tensor reaches beyond the view; `Driver` for what the hardware cannot describe: strides that are no
    /// multiple of 16 bytes, tiles beyond 256 elements a dimension, an inner tile longer than the swizzle.
    pub fn bf16<const RANK: usize>(
        view: View<'_, half::bf16>,
        dims: [u64; RANK],
        strides: &[u64],
        tile: [u32; RANK],
        swizzle: Swizzle,
    ) -> Result<Self> {
        assert_eq!(strides.len() + 1, RANK, "one stride for every dimension but the innermost");
        let last: u64 = strides.iter().zip(&dims[1..]).map(|(stride, n)| stride * n.saturating_sub(1)).sum();
        let needed = usize::try_from(last + dims[0]).unwrap_or(usize::MAX);
        if needed > view.len() {
            return Err(GpuError::Length { what: "a tensor map's buffer", expected: needed, found: view.len() });
        }
        let strides: Vec<u64> = strides.iter().map(|stride| stride * size_of::<half::bf16>() as u64).collect();
        let swizzle = match swizzle {
            Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: dimensions, strides, tile and element strides are arrays of `RANK` and `RANK - 1`; the driver only encodes
        // the address.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                RANK as u32,
                view.address() as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                [1; RANK].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("describe a tensor", status)?;
        Ok(Self(map))
    }
}
