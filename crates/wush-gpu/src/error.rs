//! What can go wrong between a machine and a kernel's result. A missing driver, library or device is a value here, never a
//! failure to start.

use wush_format::text::human_bytes;
use wush_model::{DeviceFailure, ModelError};

/// Result of this crate.
pub type Result<T, E = GpuError> = std::result::Result<T, E>;

/// Why a GPU cannot be used, or what it could not do.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// A library of CUDA is not on this machine, or not where it is looked for.
    #[error("{library} ({purpose}) was not found; looked in {looked}")]
    Library {
        /// Its file, "libcuda.so.1".
        library: &'static str,
        /// What it is for.
        purpose: &'static str,
        /// Where it was looked for.
        looked: String,
    },
    /// A folder that the user names for libraries is none.
    #[error("{variable} names {folder}, which is no folder")]
    Folder {
        /// The environment's variable.
        variable: &'static str,
        /// As it stands there.
        folder: String,
    },
    /// The driver answers, but no device is there.
    #[error("the NVIDIA driver is there, but it shows no device")]
    NoDevice,
    /// A device was asked for that is not there.
    #[error("there is no device cuda:{ordinal}: {count} found")]
    NoSuchDevice {
        /// As asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The device lacks what the kernels are built on.
    #[error("{device} has compute capability {}.{}; at least {}.{} is needed", found.0, found.1, needed.0, needed.1)]
    TooOld {
        /// Its name.
        device: String,
        /// Major and minor.
        found: (u32, u32),
        /// Major and minor.
        needed: (u32, u32),
    },
    /// A call of the driver failed.
    #[error("CUDA: cannot {action}: {code}")]
    Driver {
        /// What was tried.
        action: &'static str,
        /// The driver's name of the error.
        code: String,
    },
    /// A call of cuBLASLt failed.
    #[error("cuBLASLt: cannot {action}: {code}")]
    Blas {
        /// What was tried.
        action: &'static str,
        /// The library's name of the error.
        code: String,
    },
    /// Device memory ran out, or the budget did.
    #[error("out of GPU memory: {} wanted, {} in use, no more than {} to be had", human_bytes(*wanted), human_bytes(*in_use), human_bytes(*limit))]
    OutOfMemory {
        /// Bytes of the allocation that failed.
        wanted: u64,
        /// Bytes in use by live buffers.
        in_use: u64,
        /// The budget, or what the device has.
        limit: u64,
    },
    /// No way of running a model fits the memory there is, or that was allowed.
    #[error(
        "the model needs {} of GPU memory with two layers on the card at a time; {} is free or allowed", human_bytes(*needed), human_bytes(*limit)
    )]
    DoesNotFit {
        /// Of the plan that takes least.
        needed: u64,
        /// What is free, or `--max-gpu-memory`.
        limit: u64,
    },
    /// A kernel did not compile.
    #[error("kernels/{kernel}.cu: cannot compile for {target}: {log}")]
    Compile {
        /// Its file.
        kernel: &'static str,
        /// "sm_90a".
        target: String,
        /// The compiler's words.
        log: String,
    },
    /// A kernel is not built for this device.
    #[error("kernels/{kernel}.cu runs on {claimed}, not on compute capability {}.{}", found.0, found.1)]
    NotForDevice {
        /// Its file.
        kernel: &'static str,
        /// What it is built for.
        claimed: String,
        /// Major and minor of the device.
        found: (u32, u32),
    },
    /// A kernel has no tiles for a model's head dim.
    #[error("kernels/{kernel}.cu takes head dims of {served}, found {found}")]
    HeadDim {
        /// Its file.
        kernel: &'static str,
        /// What it takes.
        served: &'static str,
        /// Coordinates of a head.
        found: u32,
    },
    /// A kernel has no tiles for the heads of a group.
    #[error("kernels/{kernel}.cu takes {served}; found {group} heads of {head_dim} a KV head")]
    Group {
        /// Its file.
        kernel: &'static str,
        /// What it takes.
        served: &'static str,
        /// Query heads of a KV head.
        group: usize,
        /// Coordinates of a head.
        head_dim: usize,
    },
    /// Exact Hessians of f32 activations, for which there is no kernel.
    #[error("exact Hessians are computed of bf16 activations only")]
    HessianPrecision,
    /// A launch does not fit the kernel as it was compiled.
    #[error("kernel {kernel}: expected arguments of {expected:?} bytes, found {found:?}")]
    Arguments {
        /// Its entry point.
        kernel: String,
        /// Sizes of its parameters.
        expected: Vec<usize>,
        /// Sizes of what was given.
        found: Vec<usize>,
    },
    /// A buffer has another length than an operation needs.
    #[error("{what}: expected {expected} elements, found {found}")]
    Length {
        /// The operand.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// An operand does not lie in memory as a kernel needs it.
    #[error("{what}: expected {expected}, found {found}")]
    Layout {
        /// The operand.
        what: &'static str,
        /// What the kernel takes.
        expected: String,
        /// What it was given.
        found: usize,
    },
    /// A size that no device holds.
    #[error("{what}: {count} elements are too many")]
    TooLarge {
        /// The operand.
        what: &'static str,
        /// Elements asked for.
        count: usize,
    },
}

impl From<GpuError> for ModelError {
    fn from(error: GpuError) -> Self {
        Self::Device(Box::new(error))
    }
}

impl DeviceFailure for GpuError {
    fn hint(&self) -> Option<String> {
        Self::hint(self)
    }
}

impl GpuError {
    /// The message for a run that goes on without a GPU: on a machine without NVIDIA's driver not where it was looked for.
    pub fn brief(&self) -> String {
        match self {
            Self::Library { library, purpose, .. } if *library == crate::libraries::DRIVER.name => {
                format!("{library} ({purpose}) was not found; `wush doctor` says more")
            }
            other => other.to_string(),
        }
    }

    /// The remedy, as a line of its own.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Library { library, .. } if library.starts_with("libcuda.") => {
                "install NVIDIA's driver, or run with --device cpu; `wush doctor` shows what is found"
            }
            Self::Library { .. } => {
                "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc nvidia-cublas`, and name its folder in \
                 WUSH_CUDA_LIBRARIES if it is not found; `wush doctor` shows what is"
            }
            Self::Folder { .. } => {
                "name folders that hold CUDA's libraries, or unset it; `wush doctor` shows what is found"
            }
            Self::NoDevice => "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or run with --device cpu",
            Self::NoSuchDevice { .. } => "`wush doctor` lists the devices",
            Self::TooOld { .. } | Self::NotForDevice { .. } | Self::HeadDim { .. } | Self::Group { .. } => {
                "run with --device cpu"
            }
            Self::OutOfMemory { .. } => {
                "give it a smaller --seq-len, a calibration also a --max-gpu-memory below what is free, or run with --device cpu: \
                 `nvidia-smi` shows who else uses the device"
            }
            Self::DoesNotFit { .. } => {
                "give it a larger --max-gpu-memory, shorter sequences, or a device with more memory that is free: `nvidia-smi` shows \
                 who uses it"
            }
            Self::Driver { code, .. } if code.contains("OUT_OF_MEMORY") => {
                "other programs have the GPU's memory: `nvidia-smi` shows which; or run with --device cpu"
            }
            Self::Compile { log, .. } if log.contains("builtins") => {
                "install the compiler whole (libnvrtc-builtins lies beside libnvrtc: `pip install nvidia-cuda-nvrtc`), or run with \
                 --device cpu"
            }
            Self::Driver { .. } | Self::Blas { .. } => {
                "check `nvidia-smi`; the same command with --device cpu does without the GPU"
            }
            _ => return None,
        };
        Some(text.into())
    }
}
