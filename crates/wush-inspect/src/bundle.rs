//! A bundle on its own: manifest, files, checkpoint, sidecars, the solver's report.

use std::collections::BTreeMap;
use std::path::Path;

use wush_checkpoint::{Checkpoint, weights_hash};
use wush_fold::Roundings;
use wush_format::bundle::{
    KEY_TRANSFORMS, KeySidecar, MANIFEST, VALUE_FEEDBACK, VALUE_TRANSFORMS, ValueFeedback, ValueSidecar, WUSH_DIR,
};
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::{FileEntry, LayerReport, Manifest, ModuleError, Sensitivity, Status};
use wush_format::monitor::Monitor;
use wush_model::arch::{self, RopeScaling};
use wush_model::spec::ModelSpec;
use wush_transform::Role;

use crate::base::{Comparison, other_model};
use crate::extras::{check_centered, check_feedback, check_means};
use crate::inspect::Base;
use crate::metric::check_metric;
use crate::number::{count, digest, shown};
use crate::report::{Kind, Report};
use crate::sidecars::{
    Model, centered, check_key, check_key_extras, check_value, check_value_feedback, key_feedback, stored_keys,
    stored_values, value_feedback,
};
use crate::solver::{Precision, Record, check_length, check_record, check_stored, describe_settings};
use crate::{InspectError, Result, files, index, manifest};

/// Tokens a head dimension below which a calibration is called small. The relative error of a covariance's eigenvalues is
/// about 2·√(d/n): two thirds at 10.
const WISE_TOKENS_PER_DIMENSION: u64 = 10;

/// Inspects the bundle in `dir`.
pub(crate) fn inspect(dir: &Path, base: Option<&Base>, monitor: &dyn Monitor) -> Result<Report> {
    let mut report = Report::new(dir, Kind::Bundle);
    let wush = dir.join(WUSH_DIR);
    let manifest = Manifest::load(&wush.join(MANIFEST));
    // A manifest that cannot be read says nothing of what should be there.
    let with_feedback = manifest.as_ref().ok().map(|manifest| manifest.solve.feedback);
    report.check_result("wush folder", files::check_wush_folder(dir, with_feedback));
    let beside = files::beside(dir);
    if !beside.is_empty() {
        report.fact("not looked at", format!("{}, which are not part of a bundle", beside.join(", ")));
    }
    match &manifest {
        Ok(manifest) => check_manifest(&mut report, dir, manifest, base.is_some(), monitor)?,
        Err(error) => report.check("manifest", false, error.to_string()),
    }
    let manifest = manifest.ok();
    let checkpoint = match Checkpoint::open(dir) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            report.check("checkpoint", false, error.to_string());
            return Ok(report);
        }
    };
    let hash = folded_hash(&checkpoint, manifest.as_ref(), &report, monitor)?;
    let Some(spec) = check_checkpoint(&mut report, &checkpoint) else { return Ok(report) };
    report.model_hash = Some(hash);
    if let Some(manifest) = &manifest {
        let expected = manifest.basis.model_hash;
        let detail = if expected == hash {
            format!("model hash {}", digest(&hash))
        } else {
            format!("the manifest says {}, found {}", digest(&expected), digest(&hash))
        };
        report.check("folded weights", expected == hash, detail);
        manifest::check_bundle(&mut report, manifest, &checkpoint, &spec);
        check_layers(&mut report, &manifest.layers, &spec);
        let head_dim = spec.layers.iter().map(|layer| layer.attn.head_dim).max();
        check_record(&mut report, &manifest::record(manifest), head_dim.unwrap_or(0));
        if let (Some(calibration), Some(head_dim)) = (&manifest.calibration, head_dim) {
            check_calibration(&mut report, calibration.tokens, head_dim);
            check_length(&mut report, calibration.max_seq_len, calibration.rope_scaling.as_deref(), &spec);
        }
        manifest::describe_tolerance(&mut report, manifest, &checkpoint, &spec);
    }
    if let Some(total) = index::check_total(&checkpoint, manifest.as_ref()) {
        report.check_result("index", total);
    }
    let model = Model { spec: &spec, hash: Some(hash) };
    let values = check_sidecars(&mut report, &wush, (model, &checkpoint), manifest.as_ref());
    if let Some(base) = base {
        if other_model(&base.spec, &spec).is_none() {
            check_source(&mut report, manifest.as_ref(), base, monitor)?;
        }
        let (checkpoint, manifest, roundings) = (&checkpoint, manifest.as_ref(), Roundings::One);
        Comparison { checkpoint, spec: &spec, manifest, values: &values, roundings, base, monitor }.run(&mut report)?;
    }
    Ok(report)
}

/// What was stored of the values, when it could be read.
#[derive(Default)]
pub(crate) struct StoredValues {
    pub(crate) transforms: Option<ValueSidecar>,
    pub(crate) feedback: Option<ValueFeedback>,
}

/// The sidecars, against the model and the manifest.
fn check_sidecars(
    report: &mut Report,
    wush: &Path,
    (model, checkpoint): (Model<'_>, &Checkpoint),
    manifest: Option<&Manifest>,
) -> StoredValues {
    let record = manifest.map(manifest::record);
    match KeySidecar::load(&wush.join(KEY_TRANSFORMS)) {
        Ok(sidecar) => {
            check_key(report, &sidecar, Some(model));
            match &record {
                Some(record) => check_keys(report, &sidecar, record, (model, checkpoint)),
                None => check_key_extras(report, &sidecar),
            }
        }
        Err(error) => report.check("key sidecar", false, error.to_string()),
    }
    let mut values = StoredValues::default();
    if manifest.is_some_and(|manifest| manifest.solve.feedback) {
        match ValueFeedback::load(&wush.join(VALUE_FEEDBACK)) {
            Ok(feedback) => {
                check_value_feedback(report, &feedback, Some(model));
                values.feedback = Some(feedback);
            }
            Err(error) => report.check("value feedback", false, error.to_string()),
        }
    }
    match ValueSidecar::load(&wush.join(VALUE_TRANSFORMS)) {
        Ok(sidecar) => {
            check_value(report, &sidecar, Some(model));
            if let Some(record) = &record {
                let stored = stored_values(&sidecar);
                check_stored(report, Role::Value, &stored, record, Precision::F32);
                let feedback = values.feedback.as_ref().map(value_feedback).unwrap_or_default();
                check_metric(report, Role::Value, (&stored, &feedback), record, Precision::F32);
            }
            values.transforms = Some(sidecar);
        }
        Err(error) => report.check("value sidecar", false, error.to_string()),
    }
    values
}

/// A key sidecar against the solver's record; its means against the weights, whose key projections are the source's own.
fn check_keys(
    report: &mut Report,
    sidecar: &KeySidecar,
    record: &Record<'_>,
    (model, checkpoint): (Model<'_>, &Checkpoint),
) {
    let (stored, centered, feedback) = (stored_keys(sidecar), centered(sidecar), key_feedback(sidecar));
    check_stored(report, Role::Key, &stored, record, Precision::F32);
    check_centered(report, &centered, record);
    // With the scaling that the keys were measured under.
    let scaling = record.calibration.and_then(|calibration| calibration.rope_scaling.as_deref()?.parse().ok());
    let scaled = scaling.and_then(|scaling: RopeScaling| arch::resolve(checkpoint, Some(&scaling)).ok());
    check_means(report, &centered, checkpoint, scaled.as_ref().unwrap_or(model.spec));
    check_feedback(report, Role::Key, &feedback, record);
    check_metric(report, Role::Key, (&stored, &feedback), record, Precision::F32);
}

/// Everything that the manifest says about itself and the files.
fn check_manifest(
    report: &mut Report,
    dir: &Path,
    manifest: &Manifest,
    with_base: bool,
    monitor: &dyn Monitor,
) -> Result<()> {
    report.check("manifest", true, format!("version {}, written by {}", manifest.format_version, manifest.tool));
    report.check_result("files", files::check_listed(dir, &manifest.files, monitor)?);
    report.check_result("unlisted files", files::check_unlisted(dir, &manifest.files));
    let complete = manifest.status == Status::Complete;
    report.check("status", complete, if complete { "complete" } else { "marked as failed when it was made" });
    check_equivalence(report, manifest, with_base);
    let source = &manifest.source;
    let revision = source.revision.as_deref().map(|revision| format!(" @ {revision}")).unwrap_or_default();
    report.fact("source", format!("{}{revision} ({})", source.id, source.family));
    report.fact("transform", describe_settings(&manifest.solve));
    if let Some(calibration) = &manifest.calibration {
        describe_calibration(report, calibration);
    }
    manifest.sensitivity.iter().for_each(|sensitivity| describe_sensitivity(report, sensitivity));
    let fold = &manifest.fold;
    report.fact(
        "fold",
        format!(
            "{}, relative error of a head at most {} (layer {})",
            fold.dtype,
            shown(fold.max_rel_error),
            fold.worst_layer
        ),
    );
    Ok(())
}

/// What bits are allotted by: of which modules quantization asks most.
fn describe_sensitivity(report: &mut Report, sensitivity: &Sensitivity) {
    let Sensitivity { quantizer, bits, tokens, layers } = sensitivity;
    let worst = |of: fn(&ModuleError) -> f64| {
        let errors = layers.iter().map(of).enumerate();
        errors
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .map_or_else(String::new, |(layer, error)| format!("{} (layer {layer})", shown(error)))
    };
    report.fact(
        "module errors",
        format!(
            "{quantizer} at {bits} bits on {tokens} tokens: at most {} with keys quantized, {} with values",
            worst(|error| error.keys),
            worst(|error| error.values)
        ),
    );
}

/// What the statistics came from, as facts, and the calibrated length.
pub(crate) fn describe_calibration(report: &mut Report, calibration: &wush_format::manifest::Calibration) {
    report.calibrated_length = Some(calibration.max_seq_len);
    let sequences = calibration.sequences;
    report.fact(
        "calibration",
        format!(
            "{}: {} tokens in {sequences} sequences, on {}",
            calibration.source, calibration.tokens, calibration.device
        ),
    );
    let scaling =
        calibration.rope_scaling.as_deref().map(|scaling| format!(", RoPE scaling {scaling}")).unwrap_or_default();
    report.fact("calibrated length", format!("{} tokens{scaling}", calibration.max_seq_len));
}

/// Whether the statistics can have full rank: they are sums of one outer product a token. Tokens decide and not ranks,
/// which are legitimately short where a model has dead channels.
pub(crate) fn check_calibration(report: &mut Report, tokens: u64, head_dim: usize) {
    let needed = head_dim as u64;
    let wise = needed.saturating_mul(WISE_TOKENS_PER_DIMENSION);
    let advice = if tokens < needed {
        format!("fewer than dimensions: the statistics cannot have full rank; calibrate on {wise} tokens or more")
    } else if tokens < wise {
        format!("few: below {wise} the statistics are mostly chance")
    } else {
        format!("at least {WISE_TOKENS_PER_DIMENSION} a dimension")
    };
    let detail = format!("{} for a head dimension of {head_dim}, {advice}", count(tokens as usize, "token"));
    match tokens {
        few if (needed..wise).contains(&few) => report.warn("enough calibration", detail),
        _ => report.check("enough calibration", tokens >= needed, detail),
    }
}

/// What the manifest says of the equivalence check.
fn check_equivalence(report: &mut Report, manifest: &Manifest, with_base: bool) {
    if let Some(equivalence) = &manifest.equivalence {
        return manifest::check_equivalence(report, equivalence);
    }
    let detail = |instead: &str| format!("not checked when the bundle was made; {instead}");
    match with_base {
        true => report.check("equivalence", true, detail("the comparison of the weights with the base decides")),
        false => report.warn("equivalence", detail("inspect with --base proves the fold")),
    }
}

/// The checkpoint's spec, or a failed check.
pub(crate) fn check_checkpoint(report: &mut Report, checkpoint: &Checkpoint) -> Option<ModelSpec> {
    match arch::resolve(checkpoint, None) {
        Ok(spec) => {
            let layers = count(spec.layers.len(), "layer");
            let shards = count(checkpoint.shards().len(), "shard");
            report.check("checkpoint", true, format!("{}: {layers}, {shards}, every tensor in its place", spec.family));
            Some(spec)
        }
        Err(error) => {
            report.check("checkpoint", false, error.to_string());
            None
        }
    }
}

/// Hash over the weights: from the manifest's digests when those were just found right, else from the files.
fn folded_hash(
    checkpoint: &Checkpoint,
    manifest: Option<&Manifest>,
    report: &Report,
    monitor: &dyn Monitor,
) -> Result<Sha> {
    let verified = report.checks.iter().any(|check| check.name == "files" && check.ok);
    let listed: BTreeMap<&str, &FileEntry> =
        manifest.iter().flat_map(|manifest| &manifest.files).map(|file| (file.path.as_str(), file)).collect();
    let mut shards = Vec::new();
    for shard in checkpoint.shards() {
        if monitor.interrupted() {
            return Err(InspectError::Interrupted);
        }
        match listed.get(shard.file_name.as_str()) {
            Some(&file) if verified => shards.push(file.clone()),
            _ => {
                let (sha256, n_bytes) = hash_file(&checkpoint.dir().join(&shard.file_name))?;
                shards.push(FileEntry { path: shard.file_name.clone(), n_bytes, sha256 });
            }
        }
    }
    Ok(weights_hash(&shards))
}

/// The solver's report: present for every layer and head, or for none; its numbers go to the report's heads.
fn check_layers(report: &mut Report, layers: &[LayerReport], spec: &ModelSpec) {
    let found: Vec<_> = layers.iter().map(|layer| (layer.layer, layer.key.len(), layer.value.len())).collect();
    let heads =
        |(layer, spec): (usize, &wush_model::spec::LayerSpec)| (layer, spec.attn.n_kv_heads, spec.attn.n_kv_heads);
    let expected: Vec<_> = spec.layers.iter().enumerate().map(heads).collect();
    let n_heads: usize = expected.iter().map(|(_, heads, _)| heads).sum();
    if found.is_empty() {
        report.fact("solver's report", "none: the transforms needed no statistics");
        return;
    }
    let ok = found == expected;
    let detail = if ok {
        format!("{} of {}", count(n_heads, "head"), count(found.len(), "layer"))
    } else {
        "layers or heads are not the model's".to_owned()
    };
    report.check("solver's report", ok, detail);
    add_layers(report, layers);
}

/// Puts the solver's numbers into the report's heads.
pub(crate) fn add_layers(report: &mut Report, layers: &[LayerReport]) {
    for layer in layers {
        for (head, measures) in layer.key.iter().enumerate() {
            report.head(layer.layer, head).key = Some(measures.clone());
        }
        for (head, measures) in layer.value.iter().enumerate() {
            report.head(layer.layer, head).value = Some(measures.clone());
        }
    }
}

/// Whether the base is what the manifest names as the source.
fn check_source(report: &mut Report, manifest: Option<&Manifest>, base: &Base, monitor: &dyn Monitor) -> Result<()> {
    let Some(manifest) = manifest else { return Ok(()) };
    let ((found, files), expected) = (base.files(monitor)?, manifest.source.model_hash);
    let detail = if found == expected {
        format!("model hash {}", digest(&found))
    } else {
        format!("the base has other weights: the manifest says {}, it is {}", digest(&expected), digest(&found))
    };
    report.check("base is the source", found == expected, detail);
    report.check_result("files of the source", manifest::check_base_files(manifest, &files));
    Ok(())
}
