//! Kernel sources to machine code: NVRTC in this process, and a cache on disk of what it made.
//!
//! Needs no GPU: a machine with the library alone compiles every kernel for every architecture.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::path::PathBuf;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use wush_format::atomic;
use wush_format::hash::Sha;

use crate::driver::LEAST_CAPABILITY;
use crate::error::{GpuError, Result};
use crate::libraries;

/// Language of the kernels.
const STANDARD: &str = "--std=c++17";
/// Characters of the compiler's log that a message shows.
const LOG_CHARS: usize = 2000;
/// The line of a kernel's source that stands for the shared helpers.
const INCLUDE: &str = "#include \"common.cuh\"";
/// What stands there.
const COMMON: &str = include_str!("../../../kernels/common.cuh");

/// What code is made for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// Machine code of one architecture, such as "sm_90a".
    Machine(String),
    /// Portable code, such as "compute_90", which the driver of a newer device compiles.
    Portable(String),
}

impl Target {
    /// What suits a device best: its own machine code, or portable code where the compiler does not know the device yet.
    ///
    /// # Errors
    /// `Library` without the compiler; `Compile` when it knows no architecture up to the device's.
    pub fn of(capability: (u32, u32)) -> Result<Self> {
        let wanted = capability.0 * 10 + capability.1;
        let best = architectures()?.into_iter().filter(|&known| known <= wanted).max();
        match best {
            // Only with the suffix does the compiler accept Hopper's own instructions.
            Some(90) if wanted == 90 => Ok(Self::Machine("sm_90a".to_owned())),
            Some(known) if known == wanted => Ok(Self::Machine(format!("sm_{known}"))),
            Some(known) => Ok(Self::Portable(format!("compute_{known}"))),
            None => Err(GpuError::Compile {
                kernel: "common",
                target: format!("sm_{wanted}"),
                log: "NVRTC knows no such architecture".to_owned(),
            }),
        }
    }

    /// As the compiler's option names it.
    pub fn name(&self) -> &str {
        match self {
            Self::Machine(name) | Self::Portable(name) => name,
        }
    }
}

/// One compilation.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    /// The file's name without folder and ending.
    pub kernel: &'static str,
    /// Its text.
    pub source: &'a str,
    /// What the code is for.
    pub target: &'a Target,
    /// Macros and their values.
    pub macros: &'a [(&'a str, String)],
}

impl Job<'_> {
    /// Code from the cache, or compiled and then cached. Ends with a NUL, as the driver wants portable code.
    ///
    /// # Errors
    /// `Library` without the compiler, `Compile`.
    pub fn code(&self) -> Result<Vec<u8>> {
        let cached = self.cached()?;
        if let Some(code) = cached.as_ref().and_then(|(path, key)| unsealed(key, fs::read(path).ok()?)) {
            return Ok(code);
        }
        self.compile_into(cached)
    }

    /// The same without a look into the cache: what lay there did not load.
    ///
    /// # Errors
    /// As [`Job::code`].
    pub fn code_anew(&self) -> Result<Vec<u8>> {
        self.compile_into(self.cached()?)
    }

    fn compile_into(&self, cached: Option<(PathBuf, Sha)>) -> Result<Vec<u8>> {
        let code = self.compile()?;
        if let Some((path, key)) = cached {
            // Without a cache the next run compiles again, which takes seconds and changes nothing.
            let made = path.parent().is_some_and(|folder| fs::create_dir_all(folder).is_ok());
            let _ = made.then(|| atomic::write_file(&path, &sealed(&key, &code)));
        }
        Ok(code)
    }

    /// Code of this job, compiled now.
    ///
    /// # Errors
    /// `Library` without the compiler, `Compile` with its log.
    pub fn compile(&self) -> Result<Vec<u8>> {
        libraries::NVRTC.require()?;
        let text = self.text();
        let c_string = |text: String| CString::new(text).map_err(|_| self.failed("a NUL in its source".to_owned()));
        let (source, name) = (c_string(text)?, c_string(format!("{}.cu", self.kernel))?);
        let options = self.options().into_iter().map(c_string).collect::<Result<Vec<_>>>()?;
        let program = Program::new(&source, &name).map_err(|status| self.failed(format!("{status:?}")))?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive, and so are as many NUL-ended options as are named.
        match unsafe { sys::nvrtcCompileProgram(program.0, options.len() as c_int, options.as_ptr()) } {
            nvrtcResult::NVRTC_SUCCESS => {
                program.code(self.target).map_err(|status| self.failed(format!("{status:?}")))
            }
            status => Err(self.failed(program.log().unwrap_or_else(|_| format!("{status:?}")))),
        }
    }

    /// The source with the shared helpers in place.
    fn text(&self) -> String {
        self.source.replacen(INCLUDE, COMMON, 1)
    }

    fn options(&self) -> Vec<String> {
        let target = format!("--gpu-architecture={}", self.target.name());
        let macros = self.macros.iter().map(|(name, value)| format!("-D{name}={value}"));
        [target, STANDARD.to_owned()].into_iter().chain(macros).collect()
    }

    /// Its file in the cache, where there is one, and the hash of everything that decides the code.
    fn cached(&self) -> Result<Option<(PathBuf, Sha)>> {
        let Some(folder) = cache_folder() else { return Ok(None) };
        let (major, minor) = version()?;
        let decides = format!("nvrtc {major}.{minor}\n{}\n{}", self.options().join("\n"), self.text());
        let key = Sha::of(decides.as_bytes());
        let name = format!("{}-{}-{}.bin", self.kernel, self.target.name(), &key.to_string()[..16]);
        Ok(Some((folder.join(name), key)))
    }

    fn failed(&self, log: String) -> GpuError {
        let log = log.trim().chars().take(LOG_CHARS).collect();
        GpuError::Compile { kernel: self.kernel, target: self.target.name().to_owned(), log }
    }
}

/// Code as the cache keeps it, after the SHA-256 of its key and itself: the driver is given no length, and reads on where a file is cut.
fn sealed(key: &Sha, code: &[u8]) -> Vec<u8> {
    [seal(key, code).0.as_slice(), code].concat()
}

/// The code of such a file; none of one that is damaged, or another key's.
fn unsealed(key: &Sha, file: Vec<u8>) -> Option<Vec<u8>> {
    let (digest, code) = file.split_first_chunk()?;
    (Sha(*digest) == seal(key, code)).then(|| code.to_vec())
}

fn seal(key: &Sha, code: &[u8]) -> Sha {
    Sha::of(&[key.0.as_slice(), code].concat())
}

/// Whether the compiler is there and whole: it needs more files than the one that is loaded.
///
/// # Errors
/// `Library` without it, `Compile` where it cannot.
pub fn check() -> Result<()> {
    let (major, minor) = LEAST_CAPABILITY;
    let target = Target::Portable(format!("compute_{major}{minor}"));
    Job { kernel: "common", source: "", target: &target, macros: &[] }.compile().map(drop)
}

/// Where compiled kernels are kept; none where the user has no cache folder.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(caches.join("wush").join("kernels"))
}

/// The compiler's version.
///
/// # Errors
/// `Library` without the compiler.
pub fn version() -> Result<(u32, u32)> {
    libraries::NVRTC.require()?;
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: the library is loaded.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    Ok((major.unsigned_abs(), minor.unsigned_abs()))
}

/// Architectures that the compiler knows, as 90 for sm_90.
fn architectures() -> Result<Vec<u32>> {
    libraries::NVRTC.require()?;
    let mut count: c_int = 0;
    // SAFETY: the library is loaded.
    unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) };
    let mut found: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: the array holds as many numbers as the library said it would write.
    unsafe { sys::nvrtcGetSupportedArchs(found.as_mut_ptr()) };
    Ok(found.into_iter().map(c_int::unsigned_abs).collect())
}

/// A program of NVRTC, destroyed when dropped.
struct Program(nvrtcProgram);

impl Program {
    fn new(source: &CStr, name: &CStr) -> Result<Self, nvrtcResult> {
        let mut program = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: both texts end with a NUL, and the library copies them; there are no headers.
        done(unsafe { sys::nvrtcCreateProgram(&mut program, source.as_ptr(), name.as_ptr(), 0, none, none) })?;
        Ok(Self(program))
    }

    fn code(&self, target: &Target) -> Result<Vec<u8>, nvrtcResult> {
        let mut size = 0usize;
        match target {
            // SAFETY: the program is compiled.
            Target::Machine(_) => done(unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) })?,
            // SAFETY: as above.
            Target::Portable(_) => done(unsafe { sys::nvrtcGetPTXSize(self.0, &mut size) })?,
        }
        let mut code = vec![0u8; size + 1];
        let into = code.as_mut_ptr().cast();
        match target {
            // SAFETY: the buffer holds as many bytes as the library said it would write.
            Target::Machine(_) => done(unsafe { sys::nvrtcGetCUBIN(self.0, into) })?,
            // SAFETY: as above.
            Target::Portable(_) => done(unsafe { sys::nvrtcGetPTX(self.0, into) })?,
        }
        Ok(code)
    }

    fn log(&self) -> Result<String, nvrtcResult> {
        let mut size = 0usize;
        // SAFETY: the program is alive.
        done(unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut size) })?;
        let mut log = vec![0u8; size];
        // SAFETY: the buffer holds as many bytes as the library said it would write.
        done(unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) })?;
        let text: Vec<u8> = log.into_iter().take_while(|&byte| byte != 0).collect();
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is alive, and not used again.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn done(status: nvrtcResult) -> Result<(), nvrtcResult> {
    if status == nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(status) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_code_is_not_read_from_the_cache() {
        let code = b"machine code".to_vec();
        let [key, other] = [b"this", b"that"].map(|key| Sha::of(key));
        let file = sealed(&key, &code);
        assert_eq!(unsealed(&key, file.clone()), Some(code.clone()));
        assert_eq!(unsealed(&key, sealed(&other, &code)), None);
        let mut flipped = file.clone();
        flipped[40] ^= 1;
        let exchanged = [&file[..32], b"other code"].concat();
        for damaged in [Vec::new(), file[..10].to_vec(), file[..file.len() - 1].to_vec(), flipped, exchanged] {
            assert_eq!(unsealed(&key, damaged), None);
        }
    }

    #[test]
    fn whatever_decides_the_code_decides_the_name_in_the_cache() {
        let target = Target::Machine("sm_80".to_owned());
        let job = |source, macros| Job { kernel: "k", source, target: &target, macros };
        let one = [("D", "64".to_owned())];
        let texts = [job("a", &[]), job("b", &[]), job("a", &one)].map(|job| (job.options(), job.text()));
        assert_ne!(texts[0], texts[1]);
        assert_ne!(texts[0], texts[2]);
        assert!(texts[2].0.contains(&"-DD=64".to_owned()));
    }

    #[test]
    fn the_shared_helpers_stand_in_place_of_their_line() {
        let target = Target::Machine("sm_80".to_owned());
        let source = "// k\n#include \"common.cuh\"\nint x;\n";
        let text = Job { kernel: "k", source, target: &target, macros: &[] }.text();
        assert!(text.starts_with("// k\n") && text.ends_with("\nint x;\n") && text.contains(COMMON));
    }
}
