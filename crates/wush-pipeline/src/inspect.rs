//! The audit, with hub ids resolved, and its page.

use crate::Result;
use crate::model::find;
use crate::page::write_page;
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
        write_page(&wush_inspect::to_html(&report), page, env.monitor)?;
    }
    Ok(report)
}
