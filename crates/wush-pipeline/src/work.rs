//! The directory beside a bundle where `convert` keeps its statistics until the bundle stands: what `--resume` goes on from.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use wush_format::FormatError;
use wush_format::atomic::discard;
use wush_format::monitor::Monitor;

use crate::{PipelineError, Result};

/// The finished statistics.
const STATISTICS: &str = "statistics.safetensors";
/// The statistics of the sequences done so far.
const PARTIAL: &str = "partial.safetensors";

/// A work directory, there or not.
#[derive(Debug)]
pub struct WorkDir {
    path: PathBuf,
}

impl WorkDir {
    /// Looks at what is at `path`: nothing, an earlier run's work (which is then to be continued if `resume`), or something
    /// else, which is left alone.
    ///
    /// # Errors
    /// `ForeignWork`, `UnfinishedWork`, `Io`.
    pub(crate) fn plan(path: PathBuf, resume: bool) -> Result<Self> {
        let foreign = |found: String| Err(PipelineError::ForeignWork { path: path.clone(), found });
        match path.symlink_metadata() {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Self { path }),
            Err(e) => return Err(FormatError::io(path, "look at", e).into()),
            Ok(metadata) if metadata.is_symlink() => return foreign("a link".to_owned()),
            Ok(metadata) if !metadata.is_dir() => return foreign("no directory".to_owned()),
            Ok(_) => {}
        }
        let mut is_begun = false;
        for entry in fs::read_dir(&path).map_err(|e| FormatError::io(&path, "list", e))? {
            let name = entry.map_err(|e| FormatError::io(&path, "list", e))?.file_name();
            let name = name.to_string_lossy();
            // A run that was killed while it saved leaves the start of a file under a hidden name.
            let is_ours = |own: &str| name == own || name == format!(".{own}.wush-partial");
            if ![STATISTICS, PARTIAL].into_iter().any(is_ours) {
                return foreign(format!("a directory with {} in it", wush_format::json::shown(&name)));
            }
            is_begun |= !name.starts_with('.');
        }
        if is_begun && !resume {
            return Err(PipelineError::UnfinishedWork { path });
        }
        Ok(Self { path })
    }

    /// Whether there are statistics to go on from.
    pub(crate) fn is_begun(&self) -> bool {
        [self.statistics(), self.partial()].iter().any(|path| path.symlink_metadata().is_ok())
    }

    /// The finished statistics.
    pub(crate) fn statistics(&self) -> PathBuf {
        self.path.join(STATISTICS)
    }

    /// The statistics of the sequences done so far.
    pub(crate) fn partial(&self) -> PathBuf {
        self.path.join(PARTIAL)
    }

    /// The directory itself.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the directory, unless it is there.
    pub(crate) fn create(&self) -> Result<()> {
        match fs::create_dir(&self.path) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(FormatError::io(&self.path, "create", e).into()),
            _ => Ok(()),
        }
    }

    /// Removes the directory if nothing was saved in it: there is nothing to continue.
    pub(crate) fn remove_if_empty(&self) {
        // Refused when it holds something, and a failure leaves an empty directory, which the next run takes.
        let _ = fs::remove_dir(&self.path);
    }

    /// Removes the directory and what this tool put there. The bundle stands by now, so a failure is told and no error.
    pub(crate) fn discard(self, monitor: &dyn Monitor) {
        if self.path.symlink_metadata().is_err() {
            return;
        }
        let files = [self.statistics(), self.partial()].iter().try_for_each(|path| discard(path));
        let removed =
            files.and_then(|()| fs::remove_dir(&self.path).map_err(|e| FormatError::io(&self.path, "remove", e)));
        if let Err(error) = removed {
            monitor.note(&format!("note       the work directory is left: {error}"));
        }
    }
}
