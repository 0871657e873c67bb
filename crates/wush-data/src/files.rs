//! The files behind a source, in order. Enters: a [`CalibSource`]. Leaves: paths on this machine, a hub's file only
//! when it is asked for. Reads no file.

use std::fs;
use std::path::{Path, PathBuf};

use wush_checkpoint::hub::{self, HubDataset, HubOptions};
use wush_format::FormatError;
use wush_format::monitor::Monitor;

use crate::source::{ANY_TEXT, FileKind};
use crate::{CalibSource, DataError, Result};

/// The files of a source, sorted by path.
pub(crate) struct Files {
    /// [`crate::Packed::source`].
    pub(crate) name: String,
    place: Place,
}

enum Place {
    Local(Vec<PathBuf>),
    /// The data set, and which of its files are text.
    Hub(Box<HubDataset>, Vec<usize>),
}

impl Files {
    pub(crate) fn find(source: &CalibSource, options: &HubOptions, monitor: &dyn Monitor) -> Result<Self> {
        let files = match source {
            CalibSource::Path(path) => Self::local(path, monitor)?,
            CalibSource::Hub { id, revision, glob } => {
                let pattern = glob.as_deref().unwrap_or(ANY_TEXT);
                let dataset = hub::resolve_dataset(id, revision.as_deref(), pattern, options, monitor)?;
                Self::hub(dataset, glob.as_deref(), monitor)
            }
        };
        match files.len() {
            0 => Err(DataError::NoFiles { source_name: files.name }),
            _ => Ok(files),
        }
    }

    fn local(path: &Path, monitor: &dyn Monitor) -> Result<Self> {
        let name = crate::file_name(path);
        if !path.exists() {
            return Err(DataError::NotFound { path: path.to_owned() });
        }
        if !path.is_dir() {
            let known = FileKind::of(path).is_some();
            let files = Place::Local(vec![path.to_owned()]);
            return if known {
                Ok(Self { name, place: files })
            } else {
                Err(DataError::UnknownKind { path: path.to_owned() })
            };
        }
        let all = walk(path)?;
        let n_all = all.len();
        let text: Vec<PathBuf> = all.into_iter().filter(|path| is_text(path)).collect();
        note_ignored(&name, n_all - text.len(), monitor);
        Ok(Self { name, place: Place::Local(text) })
    }

    fn hub(dataset: HubDataset, glob: Option<&str>, monitor: &dyn Monitor) -> Self {
        let glob = glob.map(|glob| format!(":{glob}")).unwrap_or_default();
        let name = format!("hf:{}@{}{glob}", dataset.id, dataset.revision);
        let text: Vec<usize> = (0..dataset.files.len()).filter(|&i| is_text(Path::new(&dataset.files[i]))).collect();
        note_ignored(&name, dataset.files.len() - text.len(), monitor);
        Self { name, place: Place::Hub(Box::new(dataset), text) }
    }

    pub(crate) fn len(&self) -> usize {
        match &self.place {
            Place::Local(paths) => paths.len(),
            Place::Hub(_, text) => text.len(),
        }
    }

    /// The path of file `i`; downloaded first, if need be.
    pub(crate) fn get(&self, i: usize, monitor: &dyn Monitor) -> Result<PathBuf> {
        match &self.place {
            Place::Local(paths) => Ok(paths[i].clone()),
            Place::Hub(dataset, text) => Ok(dataset.fetch(text[i], monitor)?),
        }
    }
}

fn is_text(path: &Path) -> bool {
    FileKind::of(path).is_some_and(|(kind, _)| kind.is_text())
}

fn note_ignored(name: &str, n_ignored: usize, monitor: &dyn Monitor) {
    if n_ignored > 0 {
        monitor.note(&format!("{name}: {n_ignored} files that are not text are left out"));
    }
}

/// All files below a folder, sorted by path; hidden ones and linked folders are left out.
fn walk(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut pending = vec![root.to_owned()];
    while let Some(dir) = pending.pop() {
        let unlisted = |e| FormatError::io(&dir, "list", e);
        for entry in fs::read_dir(&dir).map_err(unlisted)? {
            let entry = entry.map_err(unlisted)?;
            let path = entry.path();
            if entry.file_name().to_string_lossy().starts_with('.') {
                continue;
            }
            if entry.file_type().map_err(unlisted)?.is_dir() {
                pending.push(path);
            } else if path.is_file() {
                found.push(path);
            }
        }
    }
    found.sort_unstable();
    Ok(found)
}
