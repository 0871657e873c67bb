//! What a path is, and which checks it gets.

use std::path::Path;

use rayon::prelude::*;
use wush_checkpoint::{Checkpoint, weights_hash};
use wush_fold::Roundings;
use wush_format::bundle::{KeySidecar, ValueFeedback, ValueSidecar, WUSH_DIR};
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::FileEntry;
use wush_format::monitor::Monitor;
use wush_format::tensor_file::TensorFile;
use wush_format::text::{human_bytes, printable};
use wush_model::arch;
use wush_model::spec::ModelSpec;

use crate::base::Comparison;
use crate::bundle::StoredValues;
use crate::number::{count, digest};
use crate::report::{Kind, Report};
use crate::{InspectError, Result, bundle, index, sidecars, statistics, transforms};

/// Inspects a bundle directory, a checkpoint directory, or a transforms, statistics or sidecar file, by its content; with
/// `base`, also against the checkpoint that it was made from.
///
/// # Errors
/// A path that is none of these or cannot be read, a base that is no checkpoint, `Interrupted`. Whatever is wrong with a
/// thing of a known kind is a failed check.
pub fn inspect(path: &Path, base: Option<&Path>, monitor: &dyn Monitor) -> Result<Report> {
    let base = base.map(Base::open).transpose()?;
    let mut report =
        if path.is_dir() { directory(path, base.as_ref(), monitor)? } else { file(path, base.as_ref(), monitor)? };
    report.base = base.map(|base| printable(&base.checkpoint.dir().display().to_string()).into_owned());
    Ok(report)
}

/// The checkpoint that something was made from.
pub(crate) struct Base {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) spec: ModelSpec,
}

impl Base {
    fn open(dir: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(dir).map_err(InspectError::Base)?;
        let spec = arch::resolve(&checkpoint, None).map_err(InspectError::BaseModel)?;
        Ok(Self { checkpoint, spec })
    }

    /// Hash over the base's weights.
    fn hash(&self, monitor: &dyn Monitor) -> Result<Sha> {
        Ok(weights_hash(&self.hash_files(&self.shard_names(), monitor)?))
    }

    /// Hash over the base's weights, and its files as a manifest lists them: shards and others, sorted by path.
    pub(crate) fn files(&self, monitor: &dyn Monitor) -> Result<(Sha, Vec<FileEntry>)> {
        let shards = self.hash_files(&self.shard_names(), monitor)?;
        let others = self.checkpoint.other_files().map_err(InspectError::Base)?;
        let hash = weights_hash(&shards);
        let mut files = shards;
        files.extend(self.hash_files(&others, monitor)?);
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok((hash, files))
    }

    fn shard_names(&self) -> Vec<String> {
        self.checkpoint.shards().iter().map(|shard| shard.file_name.clone()).collect()
    }

    /// Digests, several files at a time.
    fn hash_files(&self, names: &[String], monitor: &dyn Monitor) -> Result<Vec<FileEntry>> {
        let hash = |path: &String| {
            if monitor.interrupted() {
                return Err(InspectError::Interrupted);
            }
            let (sha256, n_bytes) = hash_file(&self.checkpoint.dir().join(path))?;
            Ok(FileEntry { path: path.clone(), n_bytes, sha256 })
        };
        names.par_iter().map(hash).collect()
    }

    /// Checks that something was made for this model.
    fn check_hash(&self, report: &mut Report, monitor: &dyn Monitor) -> Result<()> {
        // What could not be read names no model, and its failed check says why.
        let Some(expected) = report.model_hash else { return Ok(()) };
        let found = self.hash(monitor)?;
        let detail = match expected == found {
            true => format!("model hash {}", digest(&found)),
            false => format!("made for model {}, the base is {}", digest(&expected), digest(&found)),
        };
        report.check("belongs to base", expected == found, detail);
        Ok(())
    }
}

fn directory(path: &Path, base: Option<&Base>, monitor: &dyn Monitor) -> Result<Report> {
    if path.join(WUSH_DIR).is_dir() {
        return bundle::inspect(path, base, monitor);
    }
    let mut report = Report::new(path, Kind::Checkpoint);
    let checkpoint = match Checkpoint::open(path) {
        Ok(checkpoint) => checkpoint,
        Err(error) if !path.join("config.json").is_file() => {
            return Err(InspectError::Unknown { path: path.to_owned(), detail: error.to_string() });
        }
        Err(error) => {
            report.check("checkpoint", false, error.to_string());
            return Ok(report);
        }
    };
    let spec = bundle::check_checkpoint(&mut report, &checkpoint);
    if let Some(spec) = &spec {
        describe(&mut report, &checkpoint, spec);
        if let Some(total) = index::check_total(&checkpoint, None).filter(Result::is_err) {
            report.fact("index", total.unwrap_or_else(|detail| detail));
        }
    }
    if let Some(spec) = spec
        && let Some(base) = base
    {
        // It may be the original, folded once, or folded and unfolded.
        let roundings = Roundings::Two;
        let (checkpoint, manifest, values) = (&checkpoint, None, &StoredValues::default());
        Comparison { checkpoint, spec: &spec, manifest, values, roundings, base, monitor }.run(&mut report)?;
    }
    Ok(report)
}

/// What a plain checkpoint is.
fn describe(report: &mut Report, checkpoint: &Checkpoint, spec: &ModelSpec) {
    let heads = spec.layers.first().map(|layer| {
        let attn = &layer.attn;
        format!(", {} query and {} KV heads of dimension {}", attn.n_heads, attn.n_kv_heads, attn.head_dim)
    });
    let layers = count(spec.layers.len(), "layer");
    report.fact("model", format!("{}, {layers}{}", spec.family, heads.unwrap_or_default()));
    let shards = count(checkpoint.shards().len(), "shard");
    report.fact("weights", format!("{} in {shards}", human_bytes(checkpoint.n_weight_bytes())));
}

fn file(path: &Path, base: Option<&Base>, monitor: &dyn Monitor) -> Result<Report> {
    let unknown = |detail: String| InspectError::Unknown { path: path.to_owned(), detail };
    let metadata = std::fs::metadata(path).map_err(|error| wush_format::FormatError::io(path, "open", error))?;
    if !metadata.is_file() || path.extension().is_none_or(|extension| extension != "safetensors") {
        return Err(unknown("expected a directory or a .safetensors file".to_owned()));
    }
    let file = TensorFile::open(path)?;
    let format = file.metadata().get("format").map(String::as_str).unwrap_or_default();
    let mut report = match format {
        "wush-transforms" => transforms::inspect(path, &file, base),
        wush_stats::FORMAT => statistics::inspect(path, &file, base, monitor)?,
        "wush-key-transforms" => {
            let mut report = Report::new(path, Kind::KeySidecar);
            match KeySidecar::from_file(&file) {
                Ok(sidecar) => {
                    sidecars::check_key(&mut report, &sidecar, None);
                    sidecars::check_key_extras(&mut report, &sidecar);
                }
                Err(error) => report.check("key sidecar", false, error.to_string()),
            }
            report
        }
        "wush-value-transforms" => {
            let mut report = Report::new(path, Kind::ValueSidecar);
            match ValueSidecar::from_file(&file) {
                Ok(sidecar) => sidecars::check_value(&mut report, &sidecar, None),
                Err(error) => report.check("value sidecar", false, error.to_string()),
            }
            report
        }
        "wush-value-feedback" => {
            let mut report = Report::new(path, Kind::ValueFeedback);
            match ValueFeedback::from_file(&file) {
                Ok(feedback) => sidecars::check_value_feedback(&mut report, &feedback, None),
                Err(error) => report.check("value feedback", false, error.to_string()),
            }
            report
        }
        other => return Err(unknown(format!("its metadata says format {}", wush_format::json::shown(other)))),
    };
    // A sidecar belongs to the folded weights, which are not the base's.
    if let Some(base) = base
        && matches!(report.kind, Kind::Transforms | Kind::Statistics)
        && !report.checks.iter().any(|check| check.name == "same model" && !check.ok)
    {
        base.check_hash(&mut report, monitor)?;
    }
    Ok(report)
}
