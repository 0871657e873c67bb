//! The driver's answers as values: initialization once a process, and what devices there are.

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute as Attribute, CUresult};

use crate::error::{GpuError, Result};
use crate::libraries;

/// The lowest compute capability that the kernels are built for: bf16 matrix units came with it.
pub const LEAST_CAPABILITY: (u32, u32) = (8, 0);

/// Longest device name that the driver is asked for.
const NAME_BYTES: usize = 256;

/// One GPU, as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// N of cuda:N.
    pub ordinal: usize,
    /// "NVIDIA H200".
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Bytes of device memory.
    pub memory: u64,
    /// Streaming multiprocessors.
    pub n_sms: u32,
    /// Shared memory that a block may ask for at most, bytes.
    pub block_shared_bytes: u32,
    /// Shared memory of a multiprocessor, bytes.
    pub sm_shared_bytes: u32,
}

impl DeviceInfo {
    /// Refuses a device that no kernel runs on.
    ///
    /// # Errors
    /// `TooOld`.
    pub fn check(&self) -> Result<()> {
        if self.capability >= LEAST_CAPABILITY {
            return Ok(());
        }
        Err(GpuError::TooOld { device: self.name.clone(), found: self.capability, needed: LEAST_CAPABILITY })
    }
}

/// Turns a status of the driver into a result.
///
/// # Errors
/// `Driver`.
pub(crate) fn check(action: &'static str, status: CUresult) -> Result<()> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        // Its debug form is the driver's own name of the error.
        other => Err(GpuError::Driver { action, code: format!("{other:?}") }),
    }
}

/// Loads and initializes the driver, once a process.
///
/// # Errors
/// `Library` without a driver, `NoDevice`, `Driver`.
pub fn init() -> Result<()> {
    static DONE: OnceLock<Result<()>> = OnceLock::new();
    let init = || {
        libraries::DRIVER.require()?;
        // SAFETY: the driver is loaded; no flags are defined.
        match unsafe { sys::cuInit(0) } {
            CUresult::CUDA_ERROR_NO_DEVICE => Err(GpuError::NoDevice),
            status => check("initialize the driver", status),
        }
    };
    DONE.get_or_init(init).clone()
}

/// The newest CUDA that the driver serves, as (13, 0).
///
/// # Errors
/// `Library` without a driver, `Driver`.
pub fn version() -> Result<(u32, u32)> {
    libraries::DRIVER.require()?;
    let mut version: c_int = 0;
    // SAFETY: the driver is loaded; this call needs no initialization.
    check("ask for the driver's version", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// Every device that the driver shows, too old ones among them.
///
/// # Errors
/// `Library` without a driver, `NoDevice`, `Driver`.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    init()?;
    let mut count: c_int = 0;
    // SAFETY: the driver is initialized.
    check("count devices", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    let count = usize::try_from(count).unwrap_or(0);
    (0..count).map(|ordinal| describe(ordinal, handle(ordinal, count)?)).collect()
}

/// The driver's handle of device `ordinal`, and its description.
///
/// # Errors
/// As [`init`]; `NoSuchDevice`.
pub(crate) fn device(ordinal: usize) -> Result<(CUdevice, DeviceInfo)> {
    let count = devices()?.len();
    let device = handle(ordinal, count)?;
    Ok((device, describe(ordinal, device)?))
}

fn handle(ordinal: usize, count: usize) -> Result<CUdevice> {
    let index = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
    let index = index.ok_or(if count == 0 { GpuError::NoDevice } else { GpuError::NoSuchDevice { ordinal, count } })?;
    let mut device: CUdevice = 0;
    // SAFETY: the driver is initialized and has such a device.
    check("open a device", unsafe { sys::cuDeviceGet(&mut device, index) })?;
    Ok(device)
}

fn describe(ordinal: usize, device: CUdevice) -> Result<DeviceInfo> {
    let mut name = [0; NAME_BYTES];
    let mut memory = 0usize;
    // SAFETY: `device` is the driver's, and `name` holds as many bytes as are asked for at most.
    check("ask for a device's name", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), NAME_BYTES as c_int, device) })?;
    // SAFETY: `device` is the driver's.
    check("ask for a device's memory", unsafe { sys::cuDeviceTotalMem_v2(&mut memory, device) })?;
    // SAFETY: the driver ends the name with a NUL within the array.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let n_sms = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let block_shared_bytes = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let sm_shared_bytes = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?;
    let (capability, memory) = ((major, minor), memory as u64);
    Ok(DeviceInfo { ordinal, name, capability, memory, n_sms, block_shared_bytes, sm_shared_bytes })
}

fn attribute(device: CUdevice, attribute: Attribute) -> Result<u32> {
    let mut value: c_int = 0;
    // SAFETY: `device` is the driver's.
    check("ask for a device's attribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value.unsigned_abs())
}
