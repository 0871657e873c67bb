//! Outputs are checked and their names taken before any work: an hour of calibration must not end at a directory that was
//! there all along, nor at one that another run made in the meantime.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use wush_checkpoint::Checkpoint;
use wush_format::FormatError;
use wush_format::atomic::{StagedDir, StagedFile};
use wush_format::tensor_file::TensorFile;

use crate::error::{CHECKPOINT, DIRECTORY, STATISTICS, TRANSFORMS, is_failed_bundle};
use crate::page::require_replaceable;
use crate::{PipelineError, Result};

/// Suffix of a bundle that did not pass the equivalence check: kept for a look, under a name that nobody serves.
const FAILED_SUFFIX: &str = ".failed";
/// Suffix of the directory where `convert` keeps the work that `--resume` continues.
const WORK_SUFFIX: &str = ".wush-work";
/// Suffix of the statistics that `calibrate` has summed so far.
const PARTIAL_SUFFIX: &str = ".wush-resume";
/// By this ending `wush inspect` and others tell what a file is.
const EXTENSION: &str = "safetensors";

/// A file that will be written. While this lives no other run can take its name.
#[derive(Debug)]
pub struct NewFile {
    /// The file.
    pub path: PathBuf,
    staged: StagedFile,
}

impl NewFile {
    /// Checks that nothing is at `path` and that its directory is there, in no checkpoint, and takes the name.
    ///
    /// # Errors
    /// `OutputExists`; `OutputInsideSource`; `Option` for a path without a name; `Busy`; `Io` when there is no directory to
    /// write into.
    pub fn plan(path: &Path) -> Result<Self> {
        let path = checked(path)?;
        let staged = StagedFile::create(&path)?;
        Ok(Self { path, staged })
    }

    /// Where a calibration keeps its sums.
    pub fn partial(&self) -> PathBuf {
        with_suffix(&self.path, PARTIAL_SUFFIX)
    }

    /// Where to write it now.
    pub fn staged(&self) -> &Path {
        self.staged.path()
    }

    /// An error of writing it, with the name that the user knows.
    pub(crate) fn named(&self, error: impl Into<PipelineError>) -> PipelineError {
        error.into().moved(self.staged(), &self.path)
    }

    /// Puts it in place.
    ///
    /// # Errors
    /// `Exists`, `Io`.
    pub fn commit(self) -> Result<()> {
        Ok(self.staged.commit()?)
    }

    /// A warning when the name does not say what is in the file.
    pub(crate) fn name_note(&self) -> Option<String> {
        let is_named = self.path.extension().is_some_and(|extension| extension == EXTENSION);
        (!is_named).then(|| format!("`wush inspect` reads files whose names end in .{EXTENSION}; this one's does not"))
    }
}

/// Says of a run to be resumed, whose output is there, that it is finished.
pub(crate) fn finished_if(resume: bool, error: PipelineError) -> PipelineError {
    match error {
        PipelineError::OutputExists { path } if resume && !is_failed_bundle(&path) => PipelineError::Finished { path },
        other => other,
    }
}

/// A page that may replace an older one and nothing else, and lies among the files of no checkpoint, bundle or `sources`.
///
/// # Errors
/// `OutputInsideSource`, `Exists`, `Io`.
pub(crate) fn require_page(path: &Path, sources: &[&Path]) -> Result<()> {
    require_parent(path)?;
    for source in sources.iter().filter(|source| source.is_dir()) {
        require_outside(path, source)?;
    }
    require_outside_checkpoints(path)?;
    require_replaceable(path).map(drop)
}

/// A directory that will be written. While this lives no other run can take its name.
#[derive(Debug)]
pub struct NewDir {
    /// The directory.
    pub path: PathBuf,
    staged: StagedDir,
}

impl NewDir {
    /// Checks that nothing is at `path` and that its parent is there, in no checkpoint, and takes the name.
    ///
    /// # Errors
    /// `OutputExists`; `OutputInsideSource`; `Option` for a path without a name; `Busy`; `Io`.
    pub fn plan(path: &Path) -> Result<Self> {
        let path = checked(path)?;
        require_absent(&with_suffix(&path, FAILED_SUFFIX))?;
        let staged = StagedDir::create(&path)?;
        Ok(Self { path, staged })
    }

    /// Where the directory goes when its check fails.
    pub fn failed(&self) -> PathBuf {
        with_suffix(&self.path, FAILED_SUFFIX)
    }

    /// Where `convert` keeps its work.
    pub fn work(&self) -> PathBuf {
        with_suffix(&self.path, WORK_SUFFIX)
    }

    /// Where to write now.
    pub fn staged(&self) -> &Path {
        self.staged.path()
    }

    /// An error of writing into it, with the names that the user knows.
    pub(crate) fn named(&self, error: PipelineError) -> PipelineError {
        error.moved(self.staged(), &self.path)
    }

    /// Puts it in place under `target`: its own path, or [`NewDir::failed`].
    ///
    /// # Errors
    /// `Exists`, `Io`.
    pub fn commit_as(self, target: &Path) -> Result<()> {
        self.staged.commit_as(target)?;
        Ok(())
    }
}

/// `path` without what does not belong to its name ("x/.", "x/"), once nothing is there and its directory is, outside of
/// checkpoints.
fn checked(path: &Path) -> Result<PathBuf> {
    if path.file_name().is_none() {
        let (expected, found) = ("a path that ends in a name".to_owned(), format!("{:?}", path.display().to_string()));
        return Err(PipelineError::Option { option: "--out", expected, found });
    }
    let path: PathBuf = path.components().collect();
    require_absent(&path)?;
    require_parent(&path)?;
    require_outside_checkpoints(&path)?;
    Ok(path)
}

/// The files of a checkpoint or a bundle are read, copied and hashed together: what is written lies in none of its folders.
fn require_outside_checkpoints(path: &Path) -> Result<()> {
    match whole(&parent(path))?.ancestors().find(|dir| Checkpoint::is_at(dir)) {
        Some(dir) => Err(PipelineError::OutputInsideSource { path: path.to_owned(), source_dir: dir.to_owned() }),
        None => Ok(()),
    }
}

/// A path without links.
fn whole(path: &Path) -> Result<PathBuf> {
    Ok(path.canonicalize().map_err(|e| FormatError::io(path, "resolve", e))?)
}

fn require_outside(path: &Path, source: &Path) -> Result<()> {
    if whole(&parent(path))?.starts_with(whole(source)?) {
        return Err(PipelineError::OutputInsideSource { path: path.to_owned(), source_dir: source.to_owned() });
    }
    Ok(())
}

/// The directory that holds `path`.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

pub(crate) fn require_absent(path: &Path) -> Result<()> {
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

/// Refuses a directory, and a file of wush of another kind than `expected` by its name; whatever else is wrong with it, its
/// reader says.
///
/// # Errors
/// `OtherKind`.
pub(crate) fn require_kind(path: &Path, expected: &'static str) -> Result<()> {
    if path.is_dir() {
        let found = if Checkpoint::is_at(path) { CHECKPOINT } else { DIRECTORY };
        return Err(PipelineError::OtherKind { path: path.to_owned(), expected, found });
    }
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
        assert_eq!(with_suffix(Path::new("a/out/"), FAILED_SUFFIX), Path::new("a/out.failed"));
        assert_eq!(with_suffix(Path::new("out/."), WORK_SUFFIX), Path::new("out.wush-work"));
        let partial = with_suffix(Path::new("stats.safetensors"), PARTIAL_SUFFIX);
        assert_eq!(partial, Path::new("stats.safetensors.wush-resume"));
    }

    #[test]
    fn what_is_there_is_not_planned_over() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(matches!(NewDir::plan(here), Err(PipelineError::OutputExists { .. })));
        assert!(matches!(NewFile::plan(&here.join("Cargo.toml")), Err(PipelineError::OutputExists { .. })));
        assert!(matches!(NewFile::plan(&here.join("no/such/x")), Err(PipelineError::Format(_))));
        assert!(matches!(NewFile::plan(&here.join("Cargo.toml/x")), Err(PipelineError::Format(_))));
        for unnamed in ["", "..", "no-such/.."] {
            assert!(matches!(NewDir::plan(Path::new(unnamed)), Err(PipelineError::Option { .. })), "{unnamed:?}");
        }
    }

    #[test]
    fn an_output_inside_the_source_is_told_from_one_beside_it() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let new = here.join("new");
        assert!(matches!(require_outside(&new, here), Err(PipelineError::OutputInsideSource { .. })));
        require_outside(&new, &here.join("src")).expect("beside, not inside");
    }
}
