//! The audit, with hub ids resolved, and its page.

use std::io::Read;
use std::path::Path;

use wush_checkpoint::hub::resolve_model;
use wush_format::FormatError;
use wush_format::atomic::write_file;

use crate::Result;
use crate::request::{Environment, InspectRequest};

/// `wush inspect`: what a bundle, transforms or statistics file is, and whether it can be trusted.
///
/// # Errors
/// A path that is none of these, or cannot be read; `Interrupted`. A failed check is no error: the report says so.
pub fn inspect(request: &InspectRequest, env: &Environment<'_>) -> Result<wush_inspect::Report> {
    let base = request.base.as_deref().map(|model| resolve_model(model, &env.hub, env.monitor)).transpose()?;
    Ok(wush_inspect::inspect(&request.path, base.as_ref().map(|model| model.dir.as_path()), env.monitor)?)
}

/// Writes a report as one self-contained page, over an older page if there is one.
///
/// # Errors
/// `Exists` when something else than a page is there; `Io`.
pub fn write_html(report: &wush_inspect::Report, path: &Path) -> Result<()> {
    let page = wush_inspect::to_html(report);
    if path.symlink_metadata().is_ok() && !starts_alike(path, page.as_bytes()) {
        return Err(FormatError::Exists { path: path.to_owned() }.into());
    }
    Ok(write_file(path, page.as_bytes())?)
}

/// Whether `path` is a regular file with the first bytes of a page.
fn starts_alike(path: &Path, page: &[u8]) -> bool {
    const DOCTYPE: usize = "<!doctype html>".len();
    let is_file = path.symlink_metadata().is_ok_and(|metadata| metadata.is_file());
    let mut start = [0; DOCTYPE];
    let mut read = || std::fs::File::open(path)?.read_exact(&mut start);
    is_file && read().is_ok() && page.starts_with(&start)
}
