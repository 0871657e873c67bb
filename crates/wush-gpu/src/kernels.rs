//! The kernels of `kernels/`: one entry a file, with what it runs on and the macros that it is compiled with.

use std::ffi::CString;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys::{self, CUfunction, CUmodule, CUresult};

use crate::compiler::{Job, Target};
use crate::device::Device;
use crate::driver::{self, check};
use crate::error::{GpuError, Result};
use crate::{attention, convert, elementwise, gram, hessian, nll, norm, rope, sums, transform_heads};

/// One file of `kernels/`.
#[derive(Debug)]
pub struct KernelFile {
    /// Its name without folder and ending.
    pub name: &'static str,
    /// Its text.
    pub source: &'static str,
    /// What it is built for.
    pub runs_on: &'static [Architecture],
    /// Sets of macros that a check compiles it with; every value in use is in one of them.
    pub variants: &'static [&'static [(&'static str, &'static str)]],
}

/// What a file is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Compute capability 8.0 and later.
    Sm80,
    /// Compute capability 8.9 and later.
    Sm89,
    /// Hopper's own instructions: 9.0 alone.
    Sm90a,
    /// Compute capability 10.0 and later.
    Sm100,
}

impl Architecture {
    /// As the compiler names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm89 => "sm_89",
            Self::Sm90a => "sm_90a",
            Self::Sm100 => "sm_100",
        }
    }

    /// Whether code of a file for it runs on a device, once it is compiled for the device.
    pub fn serves(self, capability: (u32, u32)) -> bool {
        match self {
            Self::Sm80 => capability >= (8, 0),
            Self::Sm89 => capability >= (8, 9),
            Self::Sm90a => capability == (9, 0),
            Self::Sm100 => capability >= (10, 0),
        }
    }
}

/// What plain CUDA C++ with `mma.sync` runs on: everything that wush does.
pub const EVERYWHERE: &[Architecture] =
    &[Architecture::Sm80, Architecture::Sm89, Architecture::Sm90a, Architecture::Sm100];

/// Every kernel file, by name.
pub static KERNELS: &[&KernelFile] = &[
    &attention::f32s::FILE,
    &attention::mma::FILE,
    &attention::hopper::FILE,
    &convert::FILE,
    &elementwise::FILE,
    &gram::FILE,
    &gram::WIDE_FILE,
    &hessian::FILE,
    &nll::FILE,
    &norm::FILE,
    &rope::FILE,
    &sums::FILE,
    &transform_heads::FILE,
    &transform_heads::F32_FILE,
];

impl KernelFile {
    /// Whether it runs on a device.
    pub fn serves(&self, capability: (u32, u32)) -> bool {
        self.runs_on.iter().any(|architecture| architecture.serves(capability))
    }
}

/// File, entry point, macros.
pub(crate) type KernelKey = (&'static str, String, Vec<(String, String)>);

/// An entry point, compiled and loaded on one device. It lives as long as the device.
pub struct Kernel {
    module: CUmodule,
    pub(crate) function: CUfunction,
    pub(crate) entry: String,
    /// Sizes of its parameters, where the driver tells.
    pub(crate) parameters: Option<Vec<usize>>,
    /// Dynamic shared memory that it may use so far, bytes.
    granted: AtomicU32,
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Dynamic shared memory that every kernel may use without asking, bytes.
const FREE_SHARED: u32 = 48 << 10;

/// The first CUDA whose driver tells what parameters a kernel has.
const TELLS_PARAMETERS: (u32, u32) = (12, 4);

impl Device {
    /// The entry point `entry` of a file, compiled with `macros` for this device: at the first call, or from the cache on disk.
    ///
    /// # Errors
    /// `NotForDevice`, `Library` without the compiler, `Compile`, `Driver`.
    pub fn kernel(&self, file: &'static KernelFile, entry: &str, macros: &[(&str, String)]) -> Result<Arc<Kernel>> {
        let owned = macros.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let key: KernelKey = (file.name, entry.to_owned(), owned);
        let mut kernels = self.0.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(&key) {
            return Ok(kernel.clone());
        }
        let kernel = Arc::new(self.load(file, entry, macros)?);
        kernels.insert(key, kernel.clone());
        Ok(kernel)
    }

    fn load(&self, file: &'static KernelFile, entry: &str, macros: &[(&str, String)]) -> Result<Kernel> {
        let capability = self.info().capability;
        if !file.serves(capability) {
            let claimed: Vec<_> = file.runs_on.iter().map(|architecture| architecture.name()).collect();
            return Err(GpuError::NotForDevice { kernel: file.name, claimed: claimed.join(", "), found: capability });
        }
        let target = Target::of(capability)?;
        let job = Job { kernel: file.name, source: file.source, target: &target, macros };
        self.bind()?;
        // What lies in the cache may be damaged; what was just compiled is not.
        let module = load_module(&job.code()?).or_else(|_| load_module(&job.code_anew()?))?;
        let name = CString::new(entry).expect("an entry point's name holds no NUL");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded.
        check("find a kernel in its module", unsafe {
            sys::cuModuleGetFunction(&mut function, module, name.as_ptr())
        })?;
        let tells = driver::version()? >= TELLS_PARAMETERS;
        let parameters = tells.then(|| parameter_sizes(function));
        Ok(Kernel { module, function, entry: entry.to_owned(), parameters, granted: AtomicU32::new(FREE_SHARED) })
    }
}

impl Kernel {
    /// Lets the kernel use so much dynamic shared memory. The context is current.
    pub(crate) fn grant_shared(&self, n_bytes: u32) -> Result<()> {
        if n_bytes <= self.granted.load(Ordering::Relaxed) {
            return Ok(());
        }
        let what = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded; the driver refuses more than the device has.
        let status = unsafe { sys::cuFuncSetAttribute(self.function, what, n_bytes as i32) };
        check("give a kernel shared memory", status)?;
        self.granted.fetch_max(n_bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({}, parameters {:?})", self.entry, self.parameters)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: dropped with its device, whose work is done and whose context is current.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

fn load_module(code: &[u8]) -> Result<CUmodule> {
    let mut module = std::ptr::null_mut();
    // SAFETY: the code ends with a NUL; the driver checks what it is.
    check("load a kernel", unsafe { sys::cuModuleLoadData(&mut module, code.as_ptr().cast()) })?;
    Ok(module)
}

fn parameter_sizes(function: CUfunction) -> Vec<usize> {
    let size = |index| {
        let (mut offset, mut size) = (0usize, 0usize);
        // SAFETY: the function is loaded; beyond its last parameter the driver says so.
        let status = unsafe { sys::cuFuncGetParamInfo(function, index, &mut offset, &mut size) };
        (status == CUresult::CUDA_SUCCESS).then_some(size)
    };
    (0..).map_while(size).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hopper_code_runs_on_hopper_alone() {
        assert!(Architecture::Sm90a.serves((9, 0)));
        assert!(!Architecture::Sm90a.serves((10, 0)) && !Architecture::Sm90a.serves((8, 9)));
        assert!(Architecture::Sm80.serves((12, 0)) && !Architecture::Sm80.serves((7, 5)));
    }

    #[test]
    fn files_are_sorted_by_name_and_described() {
        assert!(KERNELS.windows(2).all(|pair| pair[0].name < pair[1].name), "sorted, each once");
        for file in KERNELS {
            assert!(file.source.starts_with("//"), "{}: begins with what it computes", file.name);
            assert!(!file.runs_on.is_empty() && !file.variants.is_empty(), "{}: what it is compiled for", file.name);
        }
    }
}
