//! The audit, with hub ids resolved, and its page.

use std::io::Read;
use std::path::Path;

use wush_format::FormatError;
use wush_format::atomic::write_file;
use wush_format::monitor::Monitor;

use crate::Result;
use crate::model::find;
use crate::paths::require_page;
use crate::request::{Environment, InspectRequest};

/// `wush inspect`: what a bundle, transforms or statistics file is, and whether it can be trusted; also as a page.
///
/// # Errors
/// A path that is none of these, or cannot be read; `OutputInsideSource` for a page among the files of what is inspected;
/// `Interrupted`. A failed check is no error: the report says so.
pub fn inspect(request: &InspectRequest, env: &Environment<'_>) -> Result<wush_inspect::Report> {
    let base = request.base.as_deref().map(|model| find(model, env)).transpose()?;
    let base = base.as_ref().map(|model| model.dir.as_path());
    if let Some(page) = &request.html {
        require_page(page, &[&request.path, base.unwrap_or(&request.path)])?;
    }
    let report = wush_inspect::inspect(&request.path, base, env.monitor)?;
    if let Some(page) = &request.html {
        write_html(&report, page, env.monitor)?;
    }
    Ok(report)
}

/// Writes a report as one self-contained page, over an older page if there is one.
fn write_html(report: &wush_inspect::Report, path: &Path, monitor: &dyn Monitor) -> Result<()> {
    let page = wush_inspect::to_html(report);
    let is_there = path.symlink_metadata().is_ok();
    if is_there && !starts_alike(path, page.as_bytes()) {
        return Err(FormatError::Exists { path: path.to_owned() }.into());
    }
    write_file(path, page.as_bytes())?;
    let replaced = if is_there { ", in place of an older one" } else { "" };
    monitor.note(&format!("page: {}{replaced}", path.display()));
    Ok(())
}

/// Whether `path` is a regular file with the first bytes of a page.
fn starts_alike(path: &Path, page: &[u8]) -> bool {
    const DOCTYPE: usize = "<!doctype html>".len();
    let is_file = path.symlink_metadata().is_ok_and(|metadata| metadata.is_file());
    let mut start = [0; DOCTYPE];
    let mut read = || std::fs::File::open(path)?.read_exact(&mut start);
    is_file && read().is_ok() && page.starts_with(&start)
}
