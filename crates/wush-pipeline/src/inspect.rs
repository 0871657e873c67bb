//! The audit, with hub ids resolved, and its page.

use std::path::Path;

use wush_checkpoint::hub::resolve_model;
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

/// Writes a report as one self-contained page, over an older one if there is one.
///
/// # Errors
/// `Io`.
pub fn write_html(report: &wush_inspect::Report, path: &Path) -> Result<()> {
    Ok(write_file(path, wush_inspect::to_html(report).as_bytes())?)
}
