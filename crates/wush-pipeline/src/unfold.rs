//! Bundle to a checkpoint in the original coordinates, up to rounding.

use std::path::Path;
use std::time::Instant;

use wush_checkpoint::Checkpoint;
use wush_fold::UnfoldDtype;
use wush_format::FormatError;
use wush_format::bundle::{MANIFEST, VALUE_TRANSFORMS, ValueSidecar, WUSH_DIR};
use wush_format::hash::hash_file;
use wush_format::manifest::{Manifest, Status};
use wush_model::arch;

use crate::error::InStage;
use crate::notes::failed_source;
use crate::paths::NewDir;
use crate::report::{UnfoldReport, WrittenDir};
use crate::request::{Environment, UnfoldRequest};
use crate::{PipelineError, Result};

/// `wush unfold`: `W_V = T^{-1} W_V'`, `W_O = W_O' T`, from the bundle's own value sidecar.
///
/// # Errors
/// `OutputExists`, `NoDirectory`, `NotABundle`, a bundle whose weights are not those that its sidecar names, `Interrupted`.
pub fn unfold(request: &UnfoldRequest, env: &Environment<'_>) -> Result<UnfoldReport> {
    let out = NewDir::plan(&request.out)?;
    if !request.bundle.is_dir() {
        return Err(PipelineError::NoDirectory { path: request.bundle.clone() });
    }
    let bundle = Checkpoint::open(&request.bundle)?;
    if !bundle.is_bundle() {
        return Err(PipelineError::NotABundle { path: request.bundle.clone() });
    }
    let clock = Instant::now();
    let spec = arch::resolve(&bundle, None)?;
    let wush = request.bundle.join(WUSH_DIR);
    let manifest = Manifest::load(&wush.join(MANIFEST))?;
    require_listed(&manifest, &wush.join(VALUE_TRANSFORMS))?;
    let sidecar = ValueSidecar::load(&wush.join(VALUE_TRANSFORMS))?;
    let dtype = UnfoldDtype::Original;
    let done = wush_fold::unfold(&bundle, &spec, &sidecar, out.staged(), dtype, env.monitor).in_stage("unfold")?;
    let path = out.path.clone();
    let written = WrittenDir::measure(out.staged(), &path)?;
    out.commit_as(&path)?;
    Ok(UnfoldReport {
        source_id: manifest.source.id,
        source_hash: manifest.source.model_hash,
        unfolded_hash: done.folded_hash,
        notes: (manifest.status == Status::Failed).then(failed_source).into_iter().collect(),
        out: written,
        seconds: clock.elapsed().as_secs_f64(),
    })
}

/// Another T than the one that was folded would still give the function, but not the original's coordinates: the value sidecar
/// must be the file that the manifest lists.
fn require_listed(manifest: &Manifest, sidecar: &Path) -> Result<()> {
    let listed = format!("{WUSH_DIR}/{VALUE_TRANSFORMS}");
    let expected = manifest.files.iter().find(|file| file.path == listed).map(|file| file.sha256);
    if expected == Some(hash_file(sidecar)?.0) {
        return Ok(());
    }
    let detail = "its SHA-256 is not the one that the manifest lists".to_owned();
    Err(FormatError::Invalid { path: sidecar.to_owned(), kind: "value sidecar", detail }.into())
}
