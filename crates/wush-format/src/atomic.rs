//! Output that is whole or absent: a sibling temporary path, then a rename.
//!
//! The temporary path has a fixed name and is locked while a run writes it, so that a killed run's leftover (whose lock
//! the system released) is told from another run's work: the first is removed, the second is [`FormatError::Busy`].
//! On a file system without locks the two look the same, and the leftover is taken for dead.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::{FormatError, Result};

/// Writes `bytes` to a sibling temporary file, syncs it and renames it over `path`.
///
/// # Errors
/// `Io`, `Busy`.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).map_err(|e| FormatError::io(path, "write", e))?;
    file.commit()
}

/// Removes a file, and what a killed run that was writing it left beside it. Neither need be there.
///
/// # Errors
/// `Io`; `Busy` while another run writes the file.
pub fn discard(path: &Path) -> Result<()> {
    drop(AtomicFile::create(path)?);
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(FormatError::io(path, "remove", e)),
        _ => Ok(()),
    }
}

/// A file being written beside its final place. Dropped without [`AtomicFile::commit`], it is removed.
#[derive(Debug)]
pub struct AtomicFile {
    temporary: Temporary,
    target: PathBuf,
    /// Open while the temporary file is ours: holds the lock. Dropped after the temporary file is removed.
    file: File,
}

impl AtomicFile {
    /// Makes `.{name}.wush-partial` beside `target`; a leftover of a killed run is overwritten.
    ///
    /// # Errors
    /// `Io`, `Busy`.
    pub fn create(target: &Path) -> Result<Self> {
        let path = temporary_path(target)?;
        let io = |e| FormatError::io(target, "create", e);
        loop {
            refuse_symlink(&path)?;
            // Not truncated: before the lock is held, the file may be another run's.
            let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
            lock(&file, target)?;
            if is_still_at(&file, &path) {
                file.set_len(0).map_err(io)?;
                return Ok(Self { temporary: Temporary(path), target: target.to_owned(), file });
            }
        }
    }

    /// Syncs and renames into place, over an older file.
    ///
    /// # Errors
    /// `Io`; the temporary file is removed then.
    pub fn commit(self) -> Result<()> {
        self.file.sync_all().map_err(|e| FormatError::io(&self.target, "sync", e))?;
        fs::rename(self.temporary.path(), &self.target).map_err(|e| FormatError::io(&self.target, "rename to", e))?;
        self.temporary.keep();
        sync_dir(&parent(&self.target))
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A directory being built beside its final place. Dropped without [`StagedDir::commit`], it is removed.
#[derive(Debug)]
pub struct StagedDir {
    temporary: Temporary,
    target: PathBuf,
    /// Open while the staging directory is ours: holds the lock. Dropped after the staging directory is removed.
    lock: File,
}

impl StagedDir {
    /// Makes `.{name}.wush-partial` beside `target`; a leftover of a killed run is removed first.
    ///
    /// # Errors
    /// `Exists` when `target` is there already; `Busy`; `Io`.
    pub fn create(target: &Path) -> Result<Self> {
        refuse_existing(target)?;
        let path = temporary_path(target)?;
        loop {
            match fs::create_dir(&path) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                    remove_leftover(&path, target)?;
                    continue;
                }
                // The target, which the user knows, and not the name inside.
                Err(e) => return Err(FormatError::io(target, "create", e)),
            }
            let lock_file = match File::open(&path) {
                Ok(file) => file,
                // Another run took it for a leftover before it was locked.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(FormatError::io(target, "create", e)),
            };
            lock(&lock_file, target)?;
            if is_still_at(&lock_file, &path) {
                return Ok(Self { temporary: Temporary(path), target: target.to_owned(), lock: lock_file });
            }
        }
    }

    /// Where to write now.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// Where it will be.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Syncs every file and directory and renames into place. Never replaces anything that holds data: where the file
    /// system has no exclusive rename, a directory made at `target` in the very last moment is replaced only when empty.
    ///
    /// # Errors
    /// `Exists`, `Io`; the staging directory is removed then.
    pub fn commit(self) -> Result<PathBuf> {
        let target = self.target.clone();
        self.commit_as(&target)
    }

    /// As [`StagedDir::commit`], under another name of the same directory: for a result that must not be found under the
    /// planned one.
    ///
    /// # Errors
    /// `Exists`, `Io`; the staging directory is removed then.
    pub fn commit_as(self, target: &Path) -> Result<PathBuf> {
        sync_tree(self.temporary.path())?;
        rename_new(self.temporary.path(), target)?;
        self.temporary.keep();
        drop(self.lock);
        sync_dir(&parent(target))?;
        Ok(target.to_owned())
    }
}

/// A new file being made, alone in a [`StagedDir`]: its name is taken from the moment of [`StagedFile::create`], so that the
/// second of two runs learns at once that it is not alone. Dropped without [`StagedFile::commit`], nothing is left.
#[derive(Debug)]
pub struct StagedFile {
    dir: StagedDir,
    path: PathBuf,
}

impl StagedFile {
    /// Takes the name `target`.
    ///
    /// # Errors
    /// As [`StagedDir::create`].
    pub fn create(target: &Path) -> Result<Self> {
        let dir = StagedDir::create(target)?;
        let path = dir.path().join(target.file_name().unwrap_or_default());
        Ok(Self { dir, path })
    }

    /// Where to write it now, whole and synced ([`write_file`] does that).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames it into place, never over anything.
    ///
    /// # Errors
    /// `Exists`, `Io`; the staged file is removed then.
    pub fn commit(self) -> Result<()> {
        rename_new(&self.path, self.dir.target())?;
        sync_dir(&parent(self.dir.target()))
    }
}

/// A path that is removed when the value is dropped.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Temporary {
    fn path(&self) -> &Path {
        &self.0
    }

    /// Disarms the removal: the path was renamed.
    fn keep(mut self) {
        self.0 = PathBuf::new();
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if self.0.as_os_str().is_empty() {
            return;
        }
        // Nothing can be done about a failure here; the next run meets the leftover and removes it or says why not.
        let _ = if self.0.is_dir() { fs::remove_dir_all(&self.0) } else { fs::remove_file(&self.0) };
    }
}

/// `.{name}.wush-partial` beside `target`.
fn temporary_path(target: &Path) -> Result<PathBuf> {
    let Some(name) = target.file_name() else {
        let reason = io::Error::new(ErrorKind::InvalidInput, "the path does not end in a name");
        return Err(FormatError::io(target, "create", reason));
    };
    let parent = parent(target);
    // Said here, so that the message names the directory and not a temporary path inside it.
    fs::metadata(&parent).map_err(|e| FormatError::io(&parent, "write into", e))?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(".wush-partial");
    Ok(parent.join(temporary))
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn refuse_existing(target: &Path) -> Result<()> {
    match fs::symlink_metadata(target) {
        Ok(_) => Err(FormatError::Exists { path: target.to_owned() }),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(FormatError::io(target, "create", e)),
    }
}

/// A link at the temporary path is nothing that wush made: writing through it would hit a stranger's file.
fn refuse_symlink(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.is_file() => Err(FormatError::Exists { path: path.to_owned() }),
        _ => Ok(()),
    }
}

/// Removes the staging directory `path` of a run that is no more.
fn remove_leftover(path: &Path, target: &Path) -> Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(FormatError::io(path, "remove", e)),
    };
    if !metadata.is_dir() {
        return Err(FormatError::Exists { path: path.to_owned() });
    }
    let held = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(FormatError::io(path, "open", e)),
    };
    lock(&held, target)?;
    if !is_still_at(&held, path) {
        return Ok(());
    }
    fs::remove_dir_all(path).map_err(|e| FormatError::io(path, "remove", e))
}

/// Locks the temporary file or directory of `target`.
fn lock(file: &File, target: &Path) -> Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(FormatError::Busy { path: target.to_owned() }),
        // Locks only tell live runs from dead ones; some network file systems have none.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

/// Whether `path` still names the open `file`: between open and lock another run may have renamed or removed it.
#[cfg(unix)]
fn is_still_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_still_at(_file: &File, path: &Path) -> bool {
    path.exists()
}

/// Renames `from` to `to`, which must not exist.
#[cfg(unix)]
fn rename_new(from: &Path, to: &Path) -> Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => Err(FormatError::Exists { path: to.to_owned() }),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => rename_checked(from, to),
        Err(e) => Err(FormatError::io(to, "rename to", e.into())),
    }
}

#[cfg(not(unix))]
fn rename_new(from: &Path, to: &Path) -> Result<()> {
    rename_checked(from, to)
}

/// Without an exclusive rename: a file gets a second name, which never replaces anything, and loses the first. Where there
/// are no links, and for a directory, check, then rename: what another process makes in between is replaced if it is a
/// file or an empty directory.
fn rename_checked(from: &Path, to: &Path) -> Result<()> {
    refuse_existing(to)?;
    if from.is_file() && fs::hard_link(from, to).is_ok() {
        return fs::remove_file(from).map_err(|e| FormatError::io(from, "remove", e));
    }
    fs::rename(from, to).map_err(|e| match e.kind() {
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists => FormatError::Exists { path: to.to_owned() },
        _ => FormatError::io(to, "rename to", e),
    })
}

/// Syncs every regular file and directory below `dir`, and `dir`.
fn sync_tree(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(|e| FormatError::io(dir, "list", e))? {
        let entry = entry.map_err(|e| FormatError::io(dir, "list", e))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(|e| FormatError::io(&path, "sync", e))?;
        if kind.is_dir() {
            sync_tree(&path)?;
        } else if kind.is_file() {
            File::open(&path).and_then(|file| file.sync_all()).map_err(|e| FormatError::io(&path, "sync", e))?;
        }
    }
    sync_dir(dir)
}

/// Makes a rename or a new name in `dir` durable.
#[cfg(unix)]
fn sync_dir(dir: &Path) -> Result<()> {
    match File::open(dir).and_then(|file| file.sync_all()) {
        // Some file systems cannot sync a directory; what they order by themselves is all there is.
        Err(e) if !matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
            Err(FormatError::io(dir, "sync", e))
        }
        _ => Ok(()),
    }
}

#[cfg(not(unix))]
fn sync_dir(_dir: &Path) -> Result<()> {
    Ok(())
}
