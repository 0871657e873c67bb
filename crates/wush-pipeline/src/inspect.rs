//! The audit, with hub ids resolved.

use crate::Result;
use crate::model::find;
use crate::paths::require_page;
use crate::request::{Environment, InspectRequest};

/// `wush inspect`: what a bundle, transforms or statistics file is, and whether it can be trusted.
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
    Ok(wush_inspect::inspect(&request.path, base, env.monitor)?)
}
