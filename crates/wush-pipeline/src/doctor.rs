//! What this machine offers for a run, and why a GPU is not used where it is not.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_gpu::{DeviceInfo, compiler, devices, survey};

use crate::device::{Device, Runs};
use crate::request::DeviceChoice;

/// `wush doctor --format json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DoctorReport {
    /// The tool and its version.
    pub tool: String,
    /// What `--device auto` computes a calibration on: "cpu", or "cuda:0 (NAME)".
    pub auto: String,
    /// Why that is no GPU.
    pub because: Option<String>,
    /// What to do about that.
    pub hint: Option<String>,
    /// Threads that the CPU is used with.
    pub threads: u64,
    /// CUDA's libraries.
    pub libraries: Vec<LibraryReport>,
    /// GPUs that the driver shows.
    pub devices: Vec<DeviceReport>,
    /// Folder of compiled kernels; none without a home.
    pub kernel_cache: Option<String>,
}

/// A library of CUDA.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LibraryReport {
    /// Its file, "libnvrtc.so".
    pub name: String,
    /// What it is for.
    pub purpose: String,
    /// Where it is.
    pub path: Option<String>,
    /// Its version, where it tells: of the driver, the newest CUDA that it serves.
    pub version: Option<String>,
    /// Why it is not there.
    pub problem: Option<String>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceReport {
    /// "cuda:0".
    pub device: String,
    /// Its name.
    pub name: String,
    /// Compute capability, "9.0".
    pub capability: String,
    /// Streaming multiprocessors.
    pub multiprocessors: u64,
    /// Bytes of its memory.
    pub memory: u64,
    /// Bytes that are free now.
    pub free_memory: Option<u64>,
    /// Files of `kernels/` that compute attention on it, the preferred one first.
    pub attention: Vec<String>,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// `wush doctor`: never fails; what is missing stands in the report.
pub fn doctor() -> DoctorReport {
    let picked = Device::pick(&DeviceChoice::Auto, Runs::OnGpu);
    let auto = picked.as_ref().map_or_else(|_| "cpu".to_owned(), Device::describe);
    let failure = survey::usable().err();
    DoctorReport {
        tool: crate::TOOL.to_owned(),
        auto,
        because: failure.as_ref().map(ToString::to_string),
        hint: failure.and_then(|failure| failure.hint()),
        threads: rayon::current_num_threads() as u64,
        libraries: survey::libraries().into_iter().map(library).collect(),
        devices: devices().unwrap_or_default().into_iter().map(device).collect(),
        kernel_cache: compiler::cache_folder().map(|folder| folder.display().to_string()),
    }
}

fn library(found: survey::FoundLibrary) -> LibraryReport {
    LibraryReport {
        name: found.name.to_owned(),
        purpose: found.purpose.to_owned(),
        path: found.path.as_ref().ok().map(|path| path.display().to_string()),
        version: found.version.map(dotted),
        problem: found.path.err().map(|error| error.to_string()),
    }
}

fn device(info: DeviceInfo) -> DeviceReport {
    let free = info.check().and_then(|()| survey::free_memory(info.ordinal));
    DeviceReport {
        device: format!("cuda:{}", info.ordinal),
        name: info.name,
        capability: dotted(info.capability),
        multiprocessors: info.n_sms.into(),
        memory: info.memory,
        free_memory: free.as_ref().ok().copied(),
        attention: survey::attention_kernels(info.capability).into_iter().map(str::to_owned).collect(),
        problem: free.err().map(|error| error.to_string()),
    }
}

fn dotted((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}
