//! Outputs are checked before any work: an hour of calibration must not end at a directory that was there all along.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use wush_format::FormatError;
use wush_format::tensor_file::TensorFile;

use crate::error::{STATISTICS, TRANSFORMS};
use crate::{PipelineError, Result};

/// Suffix of a bundle that did not pass the equivalence check: kept for a look, under a name that nobody serves.
const FAILED_SUFFIX: &str = ".failed";
/// Suffix of the directory where `convert` keeps the work that `--resume` continues.
const WORK_SUFFIX: &str = ".wush-work";
/// Suffix of the statistics that `calibrate` has summed so far.
const PARTIAL_SUFFIX: &str = ".wush-resume";

/// A file that will be written, and where the work on it is kept until then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewFile {
    /// The file.
    pub path: PathBuf,
}

impl NewFile {
    /// Checks that nothing is at `path` and that its directory is there.
    ///
    /// # Errors
    /// `OutputExists`; `Io` when there is no directory to write into.
    pub fn plan(path: &Path) -> Result<Self> {
        require_absent(path)?;
        require_parent(path)?;
        Ok(Self { path: path.to_owned() })
    }

    /// Where a calibration keeps its sums.
    pub fn partial(&self) -> PathBuf {
        with_suffix(&self.path, PARTIAL_SUFFIX)
    }
}

/// A directory that will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDir {
    /// The directory.
    pub path: PathBuf,
}

impl NewDir {
    /// Checks that nothing is at `path`, that its parent is there, and that it lies outside `source`, whose files are
    /// copied.
    ///
    /// # Errors
    /// `OutputExists`, `OutputInsideSource`, `Io`.
    pub fn plan(path: &Path) -> Result<Self> {
        require_absent(path)?;
        require_parent(path)?;
        let planned = Self { path: path.to_owned() };
        require_absent(&planned.failed())?;
        Ok(planned)
    }

    /// Checks that the directory lies outside `source`, whose files are copied.
    ///
    /// # Errors
    /// `OutputInsideSource`, `Io`.
    pub fn require_outside(&self, source: &Path) -> Result<()> {
        let whole = |path: &Path| path.canonicalize().map_err(|e| FormatError::io(path, "resolve", e));
        if whole(&parent(&self.path))?.starts_with(whole(source)?) {
            return Err(PipelineError::OutputInsideSource { path: self.path.clone(), source_dir: source.to_owned() });
        }
        Ok(())
    }

    /// Where the directory goes when its check fails.
    pub fn failed(&self) -> PathBuf {
        with_suffix(&self.path, FAILED_SUFFIX)
    }

    /// Where `convert` keeps its work.
    pub fn work(&self) -> PathBuf {
        with_suffix(&self.path, WORK_SUFFIX)
    }
}

/// The directory that holds `path`.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn require_absent(path: &Path) -> Result<()> {
    // Not `exists`: a dangling link is something, too.
    match path.symlink_metadata() {
        Ok(_) => Err(PipelineError::OutputExists { path: path.to_owned() }),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(()),
        Err(error) => Err(FormatError::io(path, "look at", error).into()),
    }
}

fn require_parent(path: &Path) -> Result<()> {
    let parent = parent(path);
    match parent.metadata() {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => {
            let error = std::io::Error::from(ErrorKind::NotADirectory);
            Err(FormatError::io(parent, "write into", error).into())
        }
        Err(error) => Err(FormatError::io(parent, "write into", error).into()),
    }
}

/// Refuses a file of wush of another kind than `expected` by its name; whatever else is wrong with it, its reader says.
///
/// # Errors
/// `OtherKind`.
pub(crate) fn require_kind(path: &Path, expected: &'static str) -> Result<()> {
    let Ok(file) = TensorFile::open(path) else { return Ok(()) };
    let found = match file.metadata().get("format").map(String::as_str) {
        Some("wush-statistics") => STATISTICS,
        Some("wush-transforms") => TRANSFORMS,
        _ => return Ok(()),
    };
    if found == expected { Ok(()) } else { Err(PipelineError::OtherKind { path: path.to_owned(), expected, found }) }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    // A trailing slash must not make this a name inside the directory.
    let whole: PathBuf = path.components().collect();
    let mut name = whole.into_os_string();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_bear_the_name() {
        let dir = NewDir { path: PathBuf::from("a/out/") };
        assert_eq!(dir.failed(), Path::new("a/out.failed"));
        assert_eq!(dir.work(), Path::new("a/out.wush-work"));
        let file = NewFile { path: PathBuf::from("stats.safetensors") };
        assert_eq!(file.partial(), Path::new("stats.safetensors.wush-resume"));
    }

    #[test]
    fn what_is_there_is_not_planned_over() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(matches!(NewDir::plan(here), Err(PipelineError::OutputExists { .. })));
        assert!(matches!(NewFile::plan(&here.join("Cargo.toml")), Err(PipelineError::OutputExists { .. })));
        assert!(matches!(NewFile::plan(&here.join("no/such/x")), Err(PipelineError::Format(_))));
        assert!(matches!(NewFile::plan(&here.join("Cargo.toml/x")), Err(PipelineError::Format(_))));
        let inside = NewDir::plan(&here.join("new")).expect("absent");
        assert!(matches!(inside.require_outside(here), Err(PipelineError::OutputInsideSource { .. })));
        inside.require_outside(&here.join("src")).expect("beside, not inside");
    }
}
