//! Which device a run uses: what was asked for, and what is there.

use wush_format::manifest::{COMPUTES, DEVICES};
use wush_gpu::{DeviceInfo, GpuError, survey};
use wush_model::spec::ModelSpec;

use crate::request::DeviceChoice;
use crate::{PipelineError, Result};

/// What a command can run its forward passes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    /// The CPU alone.
    OnCpu,
    /// A GPU, too.
    OnGpu,
}

/// The devices that a run uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// The CPU, in f32.
    Cpu {
        /// Why it is no GPU, where one was looked for.
        because: Option<String>,
    },
    /// GPUs of this machine, in bf16 with f32 sums; never empty.
    Cuda(Vec<DeviceInfo>),
}

impl Device {
    /// Picks the device of a run.
    ///
    /// # Errors
    /// `Option` when CUDA was asked for where the command has only the CPU; `Gpu` when what was asked for is not there.
    pub(crate) fn pick(choice: &DeviceChoice, runs: Runs) -> Result<Self> {
        match (choice, runs) {
            (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, Runs::OnCpu) => Ok(Self::Cpu { because: None }),
            (DeviceChoice::Auto, Runs::OnGpu) => Ok(match survey::usable().and_then(first_that_opens) {
                Ok(device) => Self::Cuda(vec![device]),
                Err(why) => Self::Cpu { because: Some(why.brief()) },
            }),
            (_, Runs::OnCpu) => Err(PipelineError::Option {
                option: "--device",
                expected: "auto or cpu: this command computes on the CPU".to_owned(),
                found: choice.to_string(),
            }),
            (DeviceChoice::Cuda(None), _) => Ok(Self::Cuda(usable()?.into_iter().take(1).collect())),
            (DeviceChoice::Cuda(Some(ordinal)), _) => one(*ordinal),
            (DeviceChoice::AllCuda, _) => Ok(Self::Cuda(usable()?)),
        }
    }

    /// The same for a model: one that the GPU's kernels do not take runs on the CPU where that was left open.
    ///
    /// # Errors
    /// `Gpu` when a GPU was asked for.
    pub(crate) fn suited_to(self, spec: &ModelSpec, choice: &DeviceChoice) -> Result<Self> {
        match (&self, wush_gpu::plan::check(spec)) {
            (Self::Cuda(_), Err(why)) if *choice == DeviceChoice::Auto => {
                Ok(Self::Cpu { because: Some(why.to_string()) })
            }
            (Self::Cuda(_), Err(why)) => Err(PipelineError::Gpu(why)),
            _ => Ok(self),
        }
    }

    /// The GPU that a run of one device uses.
    pub(crate) fn first(&self) -> Option<&DeviceInfo> {
        match self {
            Self::Cpu { .. } => None,
            Self::Cuda(devices) => devices.first(),
        }
    }

    /// Kind of device, as files state it.
    pub fn name(&self) -> &'static str {
        let [cpu, cuda] = DEVICES;
        match self {
            Self::Cpu { .. } => cpu,
            Self::Cuda(_) => cuda,
        }
    }

    /// Arithmetic of the forward pass.
    pub fn compute(&self) -> &'static str {
        let [f32, bf16] = COMPUTES;
        match self {
            Self::Cpu { .. } => f32,
            Self::Cuda(_) => bf16,
        }
    }

    /// In words, as "cuda:0 (NVIDIA H200)".
    pub fn describe(&self) -> String {
        match self {
            Self::Cpu { .. } => "cpu".to_owned(),
            Self::Cuda(devices) => {
                let each = devices.iter().map(|device| format!("cuda:{} ({})", device.ordinal, device.name));
                each.collect::<Vec<_>>().join(", ")
            }
        }
    }
}

fn usable() -> Result<Vec<DeviceInfo>> {
    survey::usable().map_err(PipelineError::Gpu)
}

/// The first device that has room for a context: other programs may have all memory of one.
fn first_that_opens(devices: Vec<DeviceInfo>) -> Result<DeviceInfo, GpuError> {
    let mut refused = None;
    for device in devices {
        match survey::free_memory(device.ordinal) {
            Ok(_) => return Ok(device),
            Err(why) => drop(refused.get_or_insert(why)),
        }
    }
    Err(refused.unwrap_or(GpuError::NoDevice))
}

fn one(ordinal: usize) -> Result<Device> {
    let all = wush_gpu::devices().map_err(PipelineError::Gpu)?;
    let count = all.len();
    let device = all.into_iter().nth(ordinal).ok_or(PipelineError::Gpu(GpuError::NoSuchDevice { ordinal, count }))?;
    device.check().map_err(PipelineError::Gpu)?;
    usable()?;
    Ok(Device::Cuda(vec![device]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_a_gpu_path_refuses_one_by_name() {
        let choice: DeviceChoice = "cuda:1".parse().expect("a known device");
        let error = Device::pick(&choice, Runs::OnCpu).expect_err("refused");
        assert_eq!(error.to_string(), "--device: expected auto or cpu: this command computes on the CPU, found cuda:1");
        assert_eq!(
            Device::pick(&DeviceChoice::Auto, Runs::OnCpu).expect("always there"),
            Device::Cpu { because: None }
        );
    }

    #[test]
    fn auto_finds_a_gpu_or_says_why_not() {
        match Device::pick(&DeviceChoice::Auto, Runs::OnGpu).expect("there is always a device") {
            Device::Cuda(devices) => assert_eq!(devices.len(), 1),
            Device::Cpu { because } => assert!(!because.expect("a reason").is_empty()),
        }
    }
}
