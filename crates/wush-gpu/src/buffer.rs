//! Typed arrays in device memory and in pinned host memory, and copies between them.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUDA_MEMCPY2D, CUmemorytype};

use crate::device::{Device, Queue};
use crate::driver::check;
use crate::error::{GpuError, Result};
use crate::matmul::{Matrix, long_enough, span};

/// What buffers are made of.
pub trait Element: Pod + Send + Sync + fmt::Debug {}

impl Element for half::bf16 {}
impl Element for half::f16 {}
impl Element for f32 {}
impl Element for f64 {}
impl Element for u8 {}
impl Element for u32 {}
impl Element for i32 {}
impl Element for u64 {}

/// `len` elements in device memory. Dropped, its memory goes back to the device's pool.
pub struct Buffer<T: Element> {
    device: Device,
    block: (u64, u64),
    len: usize,
    element: PhantomData<T>,
}

/// Consecutive elements of a buffer.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T: Element> {
    address: u64,
    len: usize,
    buffer: PhantomData<&'a T>,
}

/// Consecutive elements of a buffer, to be written.
#[derive(Debug)]
pub struct ViewMut<'a, T: Element> {
    address: u64,
    len: usize,
    buffer: PhantomData<&'a mut T>,
}

impl Device {
    /// `len` elements of whatever the memory holds: every one must be written before it is read.
    ///
    /// # Errors
    /// `TooLarge`, `OutOfMemory`, `Driver`.
    pub fn uninit<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let n_bytes = len.checked_mul(size_of::<T>()).ok_or(GpuError::TooLarge { what: "a buffer", count: len })?;
        Ok(Buffer { device: self.clone(), block: self.take(n_bytes as u64)?, len, element: PhantomData })
    }

    /// `len` elements whose bytes are all `byte`: 0 for zeros, 0xff for NaN.
    ///
    /// # Errors
    /// As [`Device::uninit`].
    pub fn filled<T: Element>(&self, len: usize, byte: u8) -> Result<Buffer<T>> {
        let mut buffer = self.uninit(len)?;
        buffer.fill_bytes(byte)?;
        Ok(buffer)
    }

    /// A copy of `data` on the device.
    ///
    /// # Errors
    /// As [`Device::uninit`].
    pub fn upload<T: Element>(&self, data: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.uninit(data.len())?;
        // SAFETY: the copy is over before `data` can change: the queue is waited for.
        unsafe { self.begin_upload(data, &mut buffer.view_mut(), Queue::Compute) }?;
        self.mark(Queue::Compute)?.synchronize()?;
        Ok(buffer)
    }

    /// A copy of `view` on the host, after all work that the compute queue has so far.
    ///
    /// # Errors
    /// `Driver`, also for what an earlier kernel did.
    pub fn download<T: Element>(&self, view: View<'_, T>) -> Result<Vec<T>> {
        self.bind()?;
        let mut data = vec![T::zeroed(); view.len];
        let n_bytes = size_of_val(data.as_slice());
        // SAFETY: source and target hold `n_bytes`; the target lives until the copy is done, below.
        let status = unsafe {
            sys::cuMemcpyDtoHAsync_v2(data.as_mut_ptr().cast(), view.address, n_bytes, self.stream(Queue::Compute))
        };
        check("copy from the device", status)?;
        // SAFETY: the stream lives as long as the device.
        let status = unsafe { sys::cuStreamSynchronize(self.stream(Queue::Compute)) };
        check("copy from the device", status)?;
        Ok(data)
    }

    /// `len` zeros in host memory that the device copies from and to without the host.
    ///
    /// # Errors
    /// `TooLarge`, `Driver` when the host has no such memory left.
    pub fn pinned<T: Element>(&self, len: usize) -> Result<Pinned<T>> {
        self.bind()?;
        let n_bytes =
            len.checked_mul(size_of::<T>()).ok_or(GpuError::TooLarge { what: "a pinned buffer", count: len })?;
        let mut address: *mut c_void = std::ptr::null_mut();
        // SAFETY: the context is current; at least one byte is asked for.
        check("take pinned memory", unsafe { sys::cuMemHostAlloc(&mut address, n_bytes.max(1), 0) })?;
        let address = address.cast::<T>();
        // SAFETY: the driver gave `n_bytes`, aligned to pages; zeros are a value of every `Pod`.
        unsafe { address.write_bytes(0, len) };
        Ok(Pinned { device: self.clone(), address, len })
    }

    /// Begins a copy of `from` to `to` in `queue`. Whoever reads `to` in the other queue waits for a mark of this one.
    ///
    /// # Safety
    /// `from` stays alive and unchanged until a mark of `queue` after this call is reached.
    ///
    /// # Errors
    /// `Length` when they differ, `Driver`.
    pub unsafe fn begin_upload<T: Element>(&self, from: &[T], to: &mut ViewMut<'_, T>, queue: Queue) -> Result<()> {
        same_length(to.len, from.len())?;
        self.bind()?;
        // SAFETY: both hold as many bytes; the caller keeps the source.
        let status = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address, from.as_ptr().cast(), size_of_val(from), self.stream(queue))
        };
        check("copy to the device", status)
    }

    /// Begins a copy of `from` to `to` in `queue`.
    ///
    /// # Safety
    /// `to` stays alive and is neither read nor written until a mark of `queue` after this call is reached.
    ///
    /// # Errors
    /// `Length` when they differ, `Driver`.
    pub unsafe fn begin_download<T: Element>(&self, from: View<'_, T>, to: &mut [T], queue: Queue) -> Result<()> {
        same_length(to.len(), from.len)?;
        self.bind()?;
        // SAFETY: both hold as many bytes; the caller keeps the target.
        let status = unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.address, size_of_val(to), self.stream(queue))
        };
        check("copy from the device", status)
    }

    /// Copies `from` to `to` in the compute queue.
    ///
    /// # Errors
    /// `Length` when they differ, `Driver`.
    pub fn copy<T: Element>(&self, from: View<'_, T>, to: &mut ViewMut<'_, T>) -> Result<()> {
        same_length(to.len, from.len)?;
        self.bind()?;
        let n_bytes = from.len * size_of::<T>();
        // SAFETY: both hold `n_bytes` and do not overlap: one is borrowed mutably.
        let status =
            unsafe { sys::cuMemcpyDtoDAsync_v2(to.address, from.address, n_bytes, self.stream(Queue::Compute)) };
        check("copy on the device", status)
    }

    /// Begins to copy the rows of a matrix, one after the other, to a buffer of their own.
    ///
    /// # Errors
    /// `Length` for a view that is shorter than the matrix; `TooLarge`, `OutOfMemory`, `Driver`.
    pub fn dense<T: Element>(&self, x: Matrix<'_, T>) -> Result<Buffer<T>> {
        long_enough("rows to copy", span(x.n_rows, x.width, x.stride), x.view.len)?;
        let to: Buffer<T> = self.uninit(x.n_rows.saturating_mul(x.width))?;
        if to.len == 0 {
            return Ok(to);
        }
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: x.view.address,
            srcArray: std::ptr::null_mut(),
            srcPitch: x.stride * size_of::<T>(),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: to.view().address,
            dstArray: std::ptr::null_mut(),
            dstPitch: x.width * size_of::<T>(),
            WidthInBytes: x.width * size_of::<T>(),
            Height: x.n_rows,
        };
        self.bind()?;
        // SAFETY: the source holds its rows, as checked, and the target as many elements.
        check("copy rows on the device", unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream(Queue::Compute)) })?;
        Ok(to)
    }
}

fn same_length(expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(GpuError::Length { what: "a copy's source", expected, found }) }
}

impl<T: Element> Buffer<T> {
    /// Number of elements.
    #[expect(clippy::len_without_is_empty, reason = "an empty buffer is as good as any other")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of device memory, as the pool counts them.
    pub fn n_bytes(&self) -> u64 {
        self.block.1
    }

    /// The device that it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// All elements.
    pub fn view(&self) -> View<'_, T> {
        View { address: self.block.0, len: self.len, buffer: PhantomData }
    }

    /// All elements, to be written.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { address: self.block.0, len: self.len, buffer: PhantomData }
    }

    /// Elements `range`, to be written by who does not have the buffer alone.
    ///
    /// # Safety
    /// Nobody else has a view of these elements while this one is used.
    ///
    /// # Panics
    /// When the range reaches beyond it: the caller's invariant.
    pub(crate) unsafe fn view_mut_shared(&self, range: Range<usize>) -> ViewMut<'_, T> {
        let View { address, len, .. } = self.view().slice(range);
        ViewMut { address, len, buffer: PhantomData }
    }

    /// Sets every byte, in the compute queue.
    ///
    /// # Errors
    /// `Driver`.
    pub fn fill_bytes(&mut self, byte: u8) -> Result<()> {
        self.device.bind()?;
        let stream = self.device.stream(Queue::Compute);
        // SAFETY: the buffer holds so many bytes.
        let status = unsafe { sys::cuMemsetD8Async(self.block.0, byte, self.len * size_of::<T>(), stream) };
        check("fill device memory", status)
    }

    /// A copy on the host, after all work that the compute queue has so far.
    ///
    /// # Errors
    /// `Driver`, also for what an earlier kernel did.
    pub fn to_host(&self) -> Result<Vec<T>> {
        self.device.download(self.view())
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        self.device.put(self.block);
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}

impl<'a, T: Element> View<'a, T> {
    /// Number of elements.
    #[expect(clippy::len_without_is_empty, reason = "an empty view is as good as any other")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of its first element on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Elements `range` of it.
    ///
    /// # Panics
    /// When the range reaches beyond it: the caller's invariant.
    pub fn slice(&self, range: Range<usize>) -> View<'a, T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        let offset = (range.start * size_of::<T>()) as u64;
        View { address: self.address + offset, len: range.len(), buffer: PhantomData }
    }
}

impl<T: Element> ViewMut<'_, T> {
    /// Number of elements.
    #[expect(clippy::len_without_is_empty, reason = "an empty view is as good as any other")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of its first element on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its bytes, to be written.
    pub(crate) fn as_bytes(&mut self) -> ViewMut<'_, u8> {
        ViewMut { address: self.address, len: self.len * size_of::<T>(), buffer: PhantomData }
    }

    /// As it is, to be read.
    pub fn as_view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, buffer: PhantomData }
    }

    /// Elements `range` of it.
    ///
    /// # Panics
    /// When the range reaches beyond it: the caller's invariant.
    pub fn slice(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        let View { address, len, .. } = self.as_view().slice(range);
        ViewMut { address, len, buffer: PhantomData }
    }
}

/// `len` elements in pinned host memory.
pub struct Pinned<T: Element> {
    device: Device,
    address: *mut T,
    len: usize,
}

// SAFETY: it owns its memory, like a box.
unsafe impl<T: Element> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Pinned<T> {}

impl<T: Element> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were allocated and written; the memory lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }
}

impl<T: Element> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

impl<T: Element> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}

impl<T: Element> Drop for Pinned<T> {
    fn drop(&mut self) {
        // A failure here leaks the memory.
        if self.device.bind().is_ok() {
            // SAFETY: it came from `cuMemHostAlloc`; the driver waits for copies that use it.
            let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
        }
    }
}
