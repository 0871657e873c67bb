//! What this machine offers: for `wush doctor`, and for `--device auto`.

use std::path::PathBuf;

use crate::attention::{hopper, mma};
use crate::driver::{self, DeviceInfo, devices};
use crate::error::{GpuError, Result};
use crate::libraries::{self, Library};
use crate::{Device, compiler};

/// One library, found or not.
#[derive(Debug, Clone)]
pub struct FoundLibrary {
    /// Its file, "libnvrtc.so".
    pub name: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// Where it is, or why not.
    pub path: Result<PathBuf>,
    /// Its version, where it tells.
    pub version: Option<(u32, u32)>,
}

/// Every library that a run on a GPU needs.
pub fn libraries() -> Vec<FoundLibrary> {
    let found = |library: &&Library| FoundLibrary {
        name: library.name,
        purpose: library.purpose,
        path: library.require().map(PathBuf::from),
        version: version(library),
    };
    libraries::ALL.iter().map(found).collect()
}

fn version(library: &Library) -> Option<(u32, u32)> {
    match library.name {
        name if name == libraries::DRIVER.name => driver::version().ok(),
        name if name == libraries::NVRTC.name => compiler::version().ok(),
        _ => None,
    }
}

/// Devices that a run can use: all libraries are there, the compiler compiles, and their capability suffices.
///
/// # Errors
/// What keeps every device from being used: `Library`, `Compile`, `NoDevice`, `TooOld`, `Driver`.
pub fn usable() -> Result<Vec<DeviceInfo>> {
    driver::init()?;
    libraries::ALL.iter().try_for_each(|library| library.require().map(drop))?;
    compiler::check()?;
    let (usable, refused): (Vec<_>, Vec<_>) = devices()?.into_iter().partition(|device| device.check().is_ok());
    match (usable.is_empty(), refused.first()) {
        (true, Some(first)) => Err(first.check().err().unwrap_or(GpuError::NoDevice)),
        (true, None) => Err(GpuError::NoDevice),
        (false, _) => Ok(usable),
    }
}

/// Bytes of a device that are free, whoever uses the others.
///
/// # Errors
/// As [`Device::open`].
pub fn free_memory(ordinal: usize) -> Result<u64> {
    Device::open(ordinal)?.free_memory()
}

/// Files of `kernels/` with calibration's attention product that run on a device: the second takes head dims that the first does not.
pub fn attention_kernels(capability: (u32, u32)) -> Vec<&'static str> {
    [&hopper::FILE, &mma::FILE].into_iter().filter(|file| file.serves(capability)).map(|file| file.name).collect()
}
