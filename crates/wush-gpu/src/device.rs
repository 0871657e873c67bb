//! One GPU: its context, two streams, its memory pool and its compiled kernels.
//!
//! Kernels and matrix products run in the compute stream, in the order of the host's calls; uploads of weights run beside them
//! in the copy stream, and either waits for the other only where it is told to. Calls return before the work is done: an error
//! of a kernel shows at a later call, at the latest at [`Device::synchronize`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUresult, CUstream};

use crate::driver::{self, DeviceInfo, check};
use crate::error::{GpuError, Result};
use crate::kernels::{Kernel, KernelKey};
use crate::matmul::Blas;
use crate::pool::{MemoryUse, Pool, Source};

/// One of a device's two queues of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// Kernels, matrix products, and copies that belong between them.
    Compute,
    /// Copies beside them.
    Copy,
}

/// A GPU in use. Clones are handles of the same device, for any number of threads.
#[derive(Clone)]
pub struct Device(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    info: DeviceInfo,
    device: CUdevice,
    context: CUcontext,
    compute: CUstream,
    copy: CUstream,
    pool: Mutex<Pool>,
    pub(crate) kernels: Mutex<BTreeMap<KernelKey, Arc<Kernel>>>,
    pub(crate) blas: OnceLock<Result<Blas>>,
}

// SAFETY: the handles are the driver's, whose calls may come from any thread once the context is current there
// ([`Device::bind`]); everything else is behind a lock.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Device {
    /// Opens device `ordinal`. Its budget is what it has.
    ///
    /// # Errors
    /// `Library`, `NoDevice`, `NoSuchDevice`, `TooOld`, `Driver`.
    pub fn open(ordinal: usize) -> Result<Self> {
        let (device, info) = driver::device(ordinal)?;
        info.check()?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `device` is the driver's; the context is given back when the last handle is dropped.
        check("open a context", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        // SAFETY: the context was just made.
        check("enter the context", unsafe { sys::cuCtxSetCurrent(context) })?;
        let (compute, copy) = (stream()?, stream()?);
        Ok(Self(Arc::new(Inner {
            pool: Mutex::new(Pool::new(info.memory)),
            info,
            device,
            context,
            compute,
            copy,
            kernels: Mutex::default(),
            blas: OnceLock::new(),
        })))
    }

    /// What the driver says of it.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Makes the context current on this thread: before any call of the driver.
    ///
    /// # Errors
    /// `Driver`.
    pub(crate) fn bind(&self) -> Result<()> {
        // SAFETY: the context lives as long as this handle.
        check("enter the context", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    pub(crate) fn stream(&self, queue: Queue) -> CUstream {
        match queue {
            Queue::Compute => self.0.compute,
            Queue::Copy => self.0.copy,
        }
    }

    /// Waits until all work of both queues is done.
    ///
    /// # Errors
    /// `Driver`, also for what an earlier kernel did.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        for queue in [Queue::Copy, Queue::Compute] {
            // SAFETY: the stream lives as long as this handle.
            check("finish the work on the device", unsafe { sys::cuStreamSynchronize(self.stream(queue)) })?;
        }
        Ok(())
    }

    /// A mark after all work that `queue` has so far.
    ///
    /// # Errors
    /// `Driver`.
    pub fn mark(&self, queue: Queue) -> Result<Event> {
        self.bind()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the context is current.
        check("make an event", unsafe { sys::cuEventCreate(&mut event, 0) })?;
        let event = Event { device: self.clone(), event };
        // SAFETY: event and stream are of this context.
        check("mark a queue", unsafe { sys::cuEventRecord(event.event, self.stream(queue)) })?;
        Ok(event)
    }

    /// Work that `queue` gets from here on waits for `event`.
    ///
    /// # Errors
    /// `Driver`.
    pub fn wait(&self, queue: Queue, event: &Event) -> Result<()> {
        self.bind()?;
        // SAFETY: event and stream are alive; the driver keeps what it needs of the event.
        check("wait for an event", unsafe { sys::cuStreamWaitEvent(self.stream(queue), event.event, 0) })
    }

    /// Bytes that this process uses and used at most.
    pub fn memory(&self) -> MemoryUse {
        self.pool().usage()
    }

    /// Bytes of the device that are free, whoever uses the others.
    ///
    /// # Errors
    /// `Driver`.
    pub fn free_memory(&self) -> Result<u64> {
        self.bind()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the context is current.
        check("ask for free memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Bounds what this process reserves, in bytes: idle memory is given back before that is more than `planned`, and nothing is
    /// had beyond `budget`.
    pub fn set_budget(&self, planned: u64, budget: u64) {
        self.pool().set_budget(planned, budget);
    }

    /// Gives idle memory back to the device.
    ///
    /// # Errors
    /// `Driver`.
    pub fn trim(&self) -> Result<()> {
        self.bind()?;
        self.pool().trim(&mut Allocator(self))
    }

    pub(crate) fn take(&self, n_bytes: u64) -> Result<(u64, u64)> {
        self.bind()?;
        self.pool().take(n_bytes, &mut Allocator(self))
    }

    pub(crate) fn put(&self, block: (u64, u64)) {
        self.pool().put(block);
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        // A panic while it was held left sums that are still true.
        self.0.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.0.info).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nothing can be done about a failure here, and after a device error every call fails.
        // SAFETY: no handle of the device is left, so no buffer, event or kernel is.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuCtxSynchronize();
        }
        if let Some(Ok(blas)) = self.blas.take() {
            drop(blas);
        }
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = pool.trim(&mut Unbound);
        // SAFETY: as above; the work of both streams is done.
        unsafe {
            let _ = sys::cuStreamDestroy_v2(self.compute);
            let _ = sys::cuStreamDestroy_v2(self.copy);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

fn stream() -> Result<CUstream> {
    let mut stream = std::ptr::null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the context is current.
    check("make a queue", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
    Ok(stream)
}

/// Blocks from the driver.
struct Allocator<'a>(&'a Device);

impl Source for Allocator<'_> {
    fn allocate(&mut self, n_bytes: u64) -> Result<Option<u64>> {
        let mut address = 0;
        let Ok(n_bytes) = usize::try_from(n_bytes) else { return Ok(None) };
        // SAFETY: the context is current.
        match unsafe { sys::cuMemAlloc_v2(&mut address, n_bytes) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
            status => check("take device memory", status).map(|()| Some(address)),
        }
    }

    fn free(&mut self, blocks: &[u64]) -> Result<()> {
        // What uses the blocks may still run.
        self.0.synchronize()?;
        Unbound.free(blocks)
    }
}

/// Frees blocks of the current context, whose work is done.
struct Unbound;

impl Source for Unbound {
    fn allocate(&mut self, _: u64) -> Result<Option<u64>> {
        Ok(None)
    }

    fn free(&mut self, blocks: &[u64]) -> Result<()> {
        for &block in blocks {
            // SAFETY: the block came from `cuMemAlloc_v2`, is idle, and nothing that was begun uses it.
            check("free device memory", unsafe { sys::cuMemFree_v2(block) })?;
        }
        Ok(())
    }
}

/// A mark in a queue.
#[derive(Debug)]
pub struct Event {
    device: Device,
    event: CUevent,
}

// SAFETY: an event is a handle of the driver, which may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; all uses are calls of the driver.
unsafe impl Sync for Event {}

impl Event {
    /// Waits until all work before the mark is done.
    ///
    /// # Errors
    /// `Driver`.
    pub fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the event was made with the context and is alive.
        check("wait for an event", unsafe { sys::cuEventSynchronize(self.event) })
    }

    /// Seconds from `start` to this mark, both of the same device; waits for both.
    ///
    /// # Errors
    /// `Driver`.
    pub fn seconds_since(&self, start: &Self) -> Result<f64> {
        start.synchronize()?;
        self.synchronize()?;
        let mut milliseconds = 0.0f32;
        type Elapsed = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;
        // SAFETY: the driver is loaded, and every version of it has this function with this signature; the bindings know
        // another only that came late (12.8).
        let elapsed = unsafe { sys::culib().get::<Elapsed>(c"cuEventElapsedTime".to_bytes_with_nul()) };
        let elapsed = elapsed.map_err(|error| GpuError::Driver { action: "read a clock", code: error.to_string() })?;
        // SAFETY: both events are recorded and done.
        check("read a clock", unsafe { elapsed(&mut milliseconds, start.event, self.event) })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A failure here leaks an event.
        if self.device.bind().is_ok() {
            // SAFETY: the driver keeps an event that is still waited for until then.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
