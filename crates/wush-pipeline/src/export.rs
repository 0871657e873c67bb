//! Transforms in the files of another server: from a bundle, to serve it, or from a transforms file, to serve the checkpoint
//! that they were solved for.

use std::collections::BTreeSet;
use std::path::Path;

use wush_checkpoint::Checkpoint;
use wush_export::{FORMATS, Format, KEY_FILE, Rotations, VALUE_FILE};
use wush_format::atomic::write_file;
use wush_format::bundle::WUSH_DIR;
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::{Calibration, FileEntry, Solve, Status};
use wush_format::sidecars::Sidecars;
use wush_format::transforms::Transforms;

use crate::error::TRANSFORMS;
use crate::notes::{failed_bundle, rope_scaling};
use crate::paths::{NewDir, require_kind};
use crate::report::{ExportRecord, ExportReport, ExportedLayer, Serves, WrittenDir};
use crate::request::{Environment, ExportRequest};
use crate::{PipelineError, Result, TOOL, counted};

/// The format that `--to` takes by default.
pub const DEFAULT_EXPORT_FORMAT: &str = "oscar";
/// What the files are and are for, beside them.
const RECORD: &str = "export.json";

/// The server's files, sorted.
const FILES: [&str; 2] = [KEY_FILE, VALUE_FILE];

/// Name and one line of every format, for help texts.
pub fn export_formats() -> impl Iterator<Item = (&'static str, &'static str)> {
    FORMATS.iter().map(|format| (format.name, format.doc))
}

/// What is exported, and what a user should know of it.
struct Exported {
    rotations: Rotations,
    serves: Serves,
    model_hash: Sha,
    solve: Solve,
    notes: Vec<String>,
}

/// `wush export`: writes a new directory with the server's files and a record of what they are for.
///
/// # Errors
/// `OutputExists`; `Option` for an unknown format; `Export` for transforms that it cannot hold exactly; `NotABundle`, `OtherKind`;
/// `Format` for files that cannot be read, or sidecars that are not the bundle's own; `Interrupted`.
pub fn export(request: &ExportRequest, env: &Environment<'_>) -> Result<ExportReport> {
    let format = find(&request.format)?;
    let out = NewDir::plan(&request.out)?;
    let exported = if request.path.is_dir() { of_bundle(&request.path)? } else { of_transforms(&request.path)? };
    let notes = exported.notes.iter().cloned().chain(layer_notes(&exported.rotations)).collect();
    let record = write(format, exported, out.staged(), env).map_err(|e| out.named(e))?;
    let path = out.path.clone();
    let written = WrittenDir::measure(out.staged(), &path)?;
    out.commit_as(&path)?;
    Ok(ExportReport { export: record, notes, out: written })
}

/// The server's files and, last, the record of them.
fn write(format: &Format, exported: Exported, dir: &Path, env: &Environment<'_>) -> Result<ExportRecord> {
    env.monitor.begin("export", "files", FILES.len() as u64);
    let format_version = format.write(&exported.rotations, dir)?;
    env.monitor.advance(FILES.len() as u64);
    env.monitor.end();
    if env.monitor.interrupted() {
        return Err(PipelineError::Interrupted { kept: None });
    }
    let record = record(exported, (format.family, format_version), dir)?;
    let text = serde_json::to_string_pretty(&record).expect("a record of numbers and text is JSON") + "\n";
    write_file(&dir.join(RECORD), text.as_bytes())?;
    Ok(record)
}

fn find(name: &str) -> Result<&'static Format> {
    Format::find(name).ok_or_else(|| PipelineError::Option {
        option: "--to",
        expected: export_formats().map(|(name, _)| name).collect::<Vec<_>>().join(", "),
        found: name.to_owned(),
    })
}

/// A bundle, whose key sidecar must be the one of its manifest.
fn of_bundle(dir: &Path) -> Result<Exported> {
    if !dir.join(WUSH_DIR).is_dir() {
        return Err(PipelineError::NotABundle { path: dir.to_owned() });
    }
    let Sidecars { manifest, keys, .. } = Sidecars::load(dir)?;
    let bundle = Checkpoint::open(dir)?;
    let scaling = scaling_of(manifest.calibration.as_ref()).and_then(|it| rope_scaling(bundle.config(), it));
    let failed = (manifest.status == Status::Failed).then(failed_bundle);
    Ok(Exported {
        rotations: Rotations::of_bundle(&keys, &manifest.solve.transform)?,
        serves: Serves::Bundle,
        model_hash: manifest.basis.model_hash,
        solve: manifest.solve,
        notes: failed.into_iter().chain(scaling).collect(),
    })
}

fn of_transforms(path: &Path) -> Result<Exported> {
    require_kind(path, TRANSFORMS)?;
    let transforms = Transforms::load(path)?;
    let scaling = scaling_of(transforms.calibration.as_ref());
    let note =
        |scaling| format!("the transforms were made with RoPE scaling {scaling}: the server must run with the same");
    Ok(Exported {
        rotations: Rotations::of_transforms(&transforms)?,
        serves: Serves::Source,
        model_hash: transforms.model_hash,
        notes: scaling.map(note).into_iter().collect(),
        solve: transforms.solve,
    })
}

fn scaling_of(calibration: Option<&Calibration>) -> Option<&str> {
    calibration.and_then(|calibration| calibration.rope_scaling.as_deref())
}

/// What not every reader of the files takes.
fn layer_notes(rotations: &Rotations) -> Vec<String> {
    let layers = rotations.layers();
    let n_below_last = layers.last_key_value().map_or(0, |(last, _)| last + 1);
    let gaps = (n_below_last > layers.len()).then(|| {
        let missing = counted((n_below_last - layers.len()) as u64, "layer");
        format!("{missing} between the first and the last have no rotation: the server must not look for one there")
    });
    let dims: BTreeSet<usize> = layers.values().map(|of| of.key.dim).collect();
    let unequal = (dims.len() > 1)
        .then(|| format!("head dimensions differ between layers ({dims:?}): OSCAR's first release takes one for all"));
    gaps.into_iter().chain(unequal).collect()
}

fn record(exported: Exported, (format, format_version): (&str, u32), dir: &Path) -> Result<ExportRecord> {
    let layers = exported.rotations.layers().iter().map(|(&layer, of)| ExportedLayer {
        layer,
        n_kv_heads: of.key.n_heads,
        head_dim: of.key.dim,
        key_error: of.key.worst.1,
        value_error: of.value.worst.1,
    });
    let file = |name: &str| -> Result<FileEntry> {
        let (sha256, n_bytes) = hash_file(&dir.join(name))?;
        Ok(FileEntry { path: name.to_owned(), n_bytes, sha256 })
    };
    Ok(ExportRecord {
        tool: TOOL.to_owned(),
        format: format.to_owned(),
        format_version,
        serves: exported.serves,
        model_hash: exported.model_hash,
        layers: layers.collect(),
        files: FILES.iter().map(|name| file(name)).collect::<Result<_>>()?,
        solve: exported.solve,
    })
}
