//! CUDA's libraries, found at run time: through the system's loader, else by absolute path where toolkits and Python wheels
//! put them. Nothing is linked; what is absent is an error that says where it was looked for.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::{cublaslt, driver, nvrtc};
use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW};

use crate::error::{GpuError, Result};

/// Folders to look in first, separated as in `PATH`.
pub const FOLDERS_VARIABLE: &str = "WUSH_CUDA_LIBRARIES";

/// One library of CUDA.
pub struct Library {
    /// Its file, as people know it.
    pub name: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// Beginnings of the files to load, each followed by ".so"; the last is the library itself.
    files: &'static [&'static str],
    /// Whether the system's loader, or what is loaded already, has it.
    present: unsafe fn() -> bool,
    found: OnceLock<Result<PathBuf>>,
}

/// NVIDIA's driver.
pub static DRIVER: Library =
    Library::new("libcuda.so.1", "NVIDIA's driver", &["libcuda"], driver::sys::is_culib_present);
/// The compiler of kernels.
pub static NVRTC: Library = Library::new(
    "libnvrtc.so",
    "CUDA's run-time compiler",
    // The library opens the other by its bare name, which is found once it is loaded.
    &["libnvrtc-builtins", "libnvrtc"],
    nvrtc::sys::is_culib_present,
);
/// Matrix products.
pub static CUBLASLT: Library =
    Library::new("libcublasLt.so", "CUDA's matrix products", &["libcublasLt"], cublaslt::sys::is_culib_present);

/// All libraries that a run on a GPU needs.
pub static ALL: [&Library; 3] = [&DRIVER, &NVRTC, &CUBLASLT];

impl Library {
    const fn new(
        name: &'static str,
        purpose: &'static str,
        files: &'static [&'static str],
        present: unsafe fn() -> bool,
    ) -> Self {
        Self { name, purpose, files, present, found: OnceLock::new() }
    }

    /// Loads the library once for the process. The path is that of the file which is in use.
    ///
    /// # Errors
    /// `Library`, with the places looked at.
    pub fn require(&self) -> Result<&Path> {
        self.found.get_or_init(|| self.find()).as_deref().map_err(Clone::clone)
    }

    fn find(&self) -> Result<PathBuf> {
        let named = named_folders();
        check_folders(&named)?;
        let mut looked = named.clone();
        // What the user names comes before what the system has.
        if !named.iter().any(|folder| self.open_in(folder)) && !self.is_present() {
            let usual = usual_folders();
            looked.extend(usual.iter().cloned());
            if !usual.iter().any(|folder| self.open_in(folder)) || !self.is_present() {
                return Err(self.missing(&looked));
            }
        }
        let file = self.files.last().expect("every library has a file");
        Ok(mapped(file).unwrap_or_else(|| PathBuf::from(self.name)))
    }

    fn is_present(&self) -> bool {
        // SAFETY: opens a library by name and closes it; CUDA's libraries may be loaded and unloaded at any time.
        unsafe { (self.present)() }
    }

    /// Opens all files of the library in `folder`, for good; whether each was there.
    fn open_in(&self, folder: &Path) -> bool {
        let open = |file: &&str| {
            let Some(path) = newest(folder, file) else { return false };
            // SAFETY: a library of CUDA, which does nothing on load but set itself up. It stays loaded: what it exports is
            // used until the process ends.
            unsafe { Handle::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }.map(std::mem::forget).is_ok()
        };
        self.files.iter().all(open)
    }

    fn missing(&self, looked: &[PathBuf]) -> GpuError {
        let folders = match looked {
            [] => "; no folder of a CUDA toolkit or of Python's nvidia packages is there".to_owned(),
            _ => looked.iter().map(|folder| format!(", {}", folder.display())).collect(),
        };
        let looked = format!("the system's library path{folders}");
        GpuError::Library { library: self.name, purpose: self.purpose, looked }
    }
}

/// The file `{prefix}.so…` of the highest version in `folder`.
fn newest(folder: &Path, prefix: &str) -> Option<PathBuf> {
    let start = format!("{prefix}.so");
    let names = fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    // Compared by length first: .13 is above .9.
    let name = names.filter(|name| name.starts_with(&start)).max_by_key(|name| (name.len(), name.clone()))?;
    Some(folder.join(name))
}

/// Where the file whose name begins with `{prefix}.so` is mapped from.
fn mapped(prefix: &str) -> Option<PathBuf> {
    let start = format!("{prefix}.so");
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
    let is_it = |path: &&Path| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(&start));
    paths.filter(is_it).map(Path::to_path_buf).next()
}

/// The folders of [`FOLDERS_VARIABLE`].
fn named_folders() -> Vec<PathBuf> {
    env::var_os(FOLDERS_VARIABLE).map(|value| env::split_paths(&value).collect()).unwrap_or_default()
}

/// # Errors
/// `Folder` for the first that is none.
fn check_folders(named: &[PathBuf]) -> Result<()> {
    // An empty part of a list of paths names nothing.
    match named.iter().find(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        Some(folder) => Err(GpuError::Folder { variable: FOLDERS_VARIABLE, folder: folder.display().to_string() }),
        None => Ok(()),
    }
}

/// Folders that are there and may hold CUDA's libraries though the system's loader does not know them.
fn usual_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    for toolkit in toolkits.chain([PathBuf::from("/usr/local/cuda")]) {
        folders.push(toolkit.join("lib64"));
        folders.push(toolkit.join("targets").join(format!("{}-linux", env::consts::ARCH)).join("lib"));
    }
    for packages in python_packages() {
        folders.extend(entries(&packages.join("nvidia")).map(|package| package.join("lib")));
    }
    folders.extend(["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"].map(PathBuf::from));
    let mut seen = std::collections::BTreeSet::new();
    folders.retain(|folder| folder.is_dir() && seen.insert(folder.canonicalize().unwrap_or_else(|_| folder.clone())));
    folders
}

/// Package folders of the Pythons at hand: the active environment, the one on the path, the user's and the system's.
fn python_packages() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from).collect();
    let path = env::var_os("PATH").unwrap_or_default();
    if let Some(python) = env::split_paths(&path).map(|dir| dir.join("python3")).find(|python| python.is_file()) {
        let behind_links = fs::canonicalize(&python).ok();
        prefixes.extend(
            [Some(python), behind_links].into_iter().flatten().filter_map(|p| Some(p.parent()?.parent()?.into())),
        );
    }
    prefixes.extend(env::var_os("HOME").map(|home| PathBuf::from(home).join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut packages = Vec::new();
    for prefix in prefixes {
        let versions = entries(&prefix.join("lib"))
            .filter(|dir| dir.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python3")));
        packages.extend(versions.flat_map(|dir| [dir.join("site-packages"), dir.join("dist-packages")]));
    }
    packages.retain(|dir| dir.is_dir());
    let mut seen = std::collections::BTreeSet::new();
    packages.retain(|dir| seen.insert(dir.clone()));
    packages
}

/// What is in a folder, sorted; nothing when it cannot be read.
fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let mut found: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    found.sort();
    found.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_version_of_a_file_is_taken() {
        let dir = tempfile::tempdir().expect("a folder");
        for name in ["libnvrtc.so.9", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.a"] {
            fs::write(dir.path().join(name), b"").expect("written");
        }
        assert_eq!(newest(dir.path(), "libnvrtc"), Some(dir.path().join("libnvrtc.so.13")));
        assert_eq!(newest(dir.path(), "libnvrtc-builtins"), Some(dir.path().join("libnvrtc-builtins.so.13.0")));
        assert_eq!(newest(dir.path(), "libcuda"), None);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let here = tempfile::tempdir().expect("a temporary directory");
        let [there, missing] = [here.path().to_owned(), here.path().join("missing")];
        check_folders(&[there.clone(), PathBuf::new()]).expect("a folder, and nothing");
        let error = check_folders(&[there, missing]).expect_err("not there").to_string();
        assert!(
            error.starts_with("WUSH_CUDA_LIBRARIES names ") && error.ends_with("missing, which is no folder"),
            "{error}"
        );
    }

    #[test]
    fn what_is_missing_says_where_it_was_looked_for() {
        let error = DRIVER.missing(&[PathBuf::from("/a"), PathBuf::from("/b")]);
        let text = "libcuda.so.1 (NVIDIA's driver) was not found; looked in the system's library path, /a, /b";
        assert_eq!(error.to_string(), text);
        assert!(error.hint().expect("a hint").contains("--device cpu"));
    }
}
