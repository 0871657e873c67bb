//! Output that is whole or absent: a sibling temporary path, then a rename.

use std::path::{Path, PathBuf};

use crate::Result;

/// Writes `bytes` to a sibling temporary file, syncs it and renames it over `path`.
///
/// # Errors
/// `Io`.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    todo!("{} {}", path.display(), bytes.len())
}

/// A directory being built beside its final place. Dropped without [`StagedDir::commit`], it is removed.
#[derive(Debug)]
pub struct StagedDir {
    staging: PathBuf,
    target: PathBuf,
}

impl StagedDir {
    /// Makes `.{name}.wush-partial` beside `target`; a leftover of a killed run is removed first.
    ///
    /// # Errors
    /// `Exists` when `target` is there already; `Io`.
    pub fn create(target: &Path) -> Result<Self> {
        todo!("{}", target.display())
    }

    /// Where to write now.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Where it will be.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Syncs and renames into place.
    ///
    /// # Errors
    /// `Exists`, `Io`.
    pub fn commit(self) -> Result<PathBuf> {
        todo!()
    }
}
