//! Checkpoint and transforms to a bundle: fold, sidecars, equivalence check, model card, manifest, in a staging directory that
//! is renamed once it is whole.

use std::path::Path;

use wush_checkpoint::Checkpoint;
use wush_fold::FoldOutcome;
use wush_format::atomic::write_file;
use wush_format::bundle::{
    CARD, FeedbackLayer, KEY_TRANSFORMS, KeyLayer, KeySidecar, MANIFEST, VALUE_FEEDBACK, VALUE_TRANSFORMS,
    ValueFeedback, ValueLayer, ValueSidecar, WUSH_DIR,
};
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::{
    Basis, Calibration, Equivalence, FOLDED_VALUES, FileEntry, FoldReport, MANIFEST_VERSION, Manifest, Sensitivity,
    Source, Status,
};
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};
use wush_model::arch::{self, RopeScaling};
use wush_model::cpu::Cpu;

use crate::card;
use crate::error::InStage;
use crate::model::{HeadShape, Model};
use crate::notes;
use crate::plan::FoldPlan;
use crate::report::{ConvertReport, Gain, ModelInfo, Verdict, WrittenDir};
use crate::request::Environment;
use crate::sensitivity::measure;
use crate::verify::{Check, Side, verify};
use crate::{PipelineError, Result};

/// Builds the bundle of `plan` from `transforms` and puts it in place: under the planned name when the equivalence check
/// passed or was skipped, else under that name with `.failed`.
///
/// # Errors
/// `Mismatch` when the transforms belong to another model; whatever folding or the forward passes refuse; `Io`;
/// `Interrupted`. Nothing is left behind then.
pub(crate) fn build(plan: FoldPlan, transforms: &Transforms, env: &Environment<'_>) -> Result<ConvertReport> {
    require_shapes(&plan.model, transforms)?;
    require_length(&plan.model, transforms.calibration.as_ref())?;
    let manifest = stage(&plan, transforms, env).map_err(|error| plan.out.named(error))?;
    let target = match manifest.status {
        Status::Complete => plan.out.path.clone(),
        Status::Failed => plan.out.failed(),
    };
    let report = report(&plan, manifest, WrittenDir::measure(plan.out.staged(), &target)?);
    plan.out.commit_as(&target)?;
    Ok(report)
}

/// Everything inside the staging directory.
fn stage(plan: &FoldPlan, transforms: &Transforms, env: &Environment<'_>) -> Result<Manifest> {
    let (model, dir) = (&plan.model, plan.out.staged());
    let folded =
        wush_fold::fold(&model.checkpoint, &model.spec, transforms, dir, plan.dtype, env.monitor).in_stage("fold")?;
    let sidecar = write_sidecars(dir, transforms, folded.folded_hash).in_stage("fold")?;
    let checked = Checked {
        equivalence: check_equivalence(plan, dir, &sidecar, env).in_stage("verify")?,
        sensitivity: sensitivity(plan, transforms, env).in_stage("measure")?,
    };
    write_manifest(plan, transforms, folded, checked, dir).in_stage("emit")
}

/// No calibration of this model is longer than its longest position, with the scaling that it was calibrated with.
fn require_length(model: &Model, calibration: Option<&Calibration>) -> Result<()> {
    let Some(Calibration { max_seq_len, rope_scaling, .. }) = calibration else { return Ok(()) };
    let own = model.spec.max_position_embeddings;
    let scaling = rope_scaling.as_deref().map(str::parse::<RopeScaling>).transpose()?;
    let longest = scaling.map_or(own, |scaling| scaling.scaled_positions(own)) as u64;
    if *max_seq_len <= longest {
        return Ok(());
    }
    Err(PipelineError::LongCalibration { found: *max_seq_len, longest })
}

/// Transforms of another model are refused before any weight is read, where their shapes already say so; a model of the
/// same shapes is told by its hash while its weights are read.
fn require_shapes(model: &Model, transforms: &Transforms) -> Result<()> {
    for (&layer, transforms) in transforms.layers.range(..model.spec.layers.len()) {
        let HeadShape { n_kv_heads, head_dim } = model.head_shape(layer);
        let expected = [n_kv_heads, head_dim, head_dim];
        for (role, matrices) in [("key", &transforms.key), ("value", &transforms.value)] {
            let found = [matrices.n_heads, matrices.dim, matrices.dim];
            if found != expected {
                return Err(PipelineError::OtherModel { layer, role, expected, found });
            }
        }
    }
    Ok(())
}

/// The key sidecar, which is also returned, the value sidecar, and the values' feedback where there is any.
fn write_sidecars(dir: &Path, transforms: &Transforms, model_hash: Sha) -> Result<KeySidecar> {
    let wush = dir.join(WUSH_DIR);
    std::fs::create_dir(&wush).map_err(|e| wush_format::FormatError::io(&wush, "create", e))?;
    let mut keys = KeySidecar { layers: Default::default(), model_hash };
    let mut values = ValueSidecar { layers: Default::default(), model_hash };
    let mut feedback = ValueFeedback { layers: Default::default(), model_hash };
    for (&layer, transforms) in &transforms.layers {
        keys.layers.insert(layer, key_layer(layer, transforms)?);
        let HeadMatrices { n_heads, dim, data } = &transforms.value;
        values.layers.insert(layer, ValueLayer { n_kv_heads: *n_heads, head_dim: *dim, value: narrow(data) });
        if let Some(HeadMatrices { n_heads, dim, data }) = &transforms.value_feedback {
            let entry = FeedbackLayer { n_kv_heads: *n_heads, head_dim: *dim, value_feedback: narrow(data) };
            feedback.layers.insert(layer, entry);
        }
    }
    if !feedback.layers.is_empty() {
        feedback.save(&wush.join(VALUE_FEEDBACK))?;
    }
    keys.save(&wush.join(KEY_TRANSFORMS))?;
    values.save(&wush.join(VALUE_TRANSFORMS))?;
    Ok(keys)
}

fn narrow(data: &[f64]) -> Vec<f32> {
    data.iter().map(|&x| x as f32).collect()
}

/// T_K and T_K^{-T} of one layer, and what goes with them, each rounded once from f64.
fn key_layer(layer: usize, transforms: &LayerTransforms) -> Result<KeyLayer> {
    let keys = &transforms.key;
    let dim = keys.dim;
    let limit = wush_fold::condition_limit(dim);
    let mut query = Vec::with_capacity(keys.data.len());
    for head in 0..keys.n_heads {
        let inverse = wush_fold::invert(keys.head(head), dim);
        let condition = inverse.condition;
        // In this form a NaN fails, too.
        let is_usable = condition <= limit;
        if !is_usable {
            return Err(PipelineError::SingularKey { layer, head, condition, limit });
        }
        query.extend((0..dim * dim).map(|at| inverse.matrix[(at % dim) * dim + at / dim] as f32));
    }
    let key_mean = transforms.key_mean.as_deref().map(narrow);
    let key_feedback = transforms.key_feedback.as_ref().map(|feedback| narrow(&feedback.data));
    Ok(KeyLayer { n_kv_heads: keys.n_heads, head_dim: dim, key: narrow(&keys.data), query, key_mean, key_feedback })
}

/// Opens the staged bundle as any reader would, and runs it beside the source.
fn check_equivalence(
    plan: &FoldPlan,
    dir: &Path,
    sidecar: &KeySidecar,
    env: &Environment<'_>,
) -> Result<Option<Equivalence>> {
    let Ok(check) = &plan.verify else { return Ok(None) };
    let bundle = Checkpoint::open(dir)?;
    let spec = arch::resolve(&bundle, plan.model.rope_scaling.as_ref())?;
    let source = Side { checkpoint: &plan.model.checkpoint, spec: &plan.model.spec };
    let bundle = Side { checkpoint: &bundle, spec: &spec };
    let check = Check { sequences: &check.sequences, tolerance: check.tolerance };
    verify(&Cpu, source, bundle, sidecar, &check, env.monitor).map(Some)
}

/// What the text of the check gave; nothing where it was skipped.
struct Checked {
    equivalence: Option<Equivalence>,
    sensitivity: Option<Sensitivity>,
}

/// What bits are allotted by, on the same text.
fn sensitivity(plan: &FoldPlan, transforms: &Transforms, env: &Environment<'_>) -> Result<Option<Sensitivity>> {
    let Ok(check) = &plan.verify else { return Ok(None) };
    measure(&plan.model, transforms, &check.sequences, env.monitor).map(Some)
}

/// The model card, then the manifest, which lists every other file.
fn write_manifest(
    plan: &FoldPlan,
    transforms: &Transforms,
    folded: FoldOutcome,
    checked: Checked,
    dir: &Path,
) -> Result<Manifest> {
    let Checked { equivalence, sensitivity } = checked;
    let passed = equivalence.as_ref().is_none_or(|equivalence| equivalence.passed);
    let mut manifest = Manifest {
        format_version: MANIFEST_VERSION,
        tool: crate::TOOL.to_owned(),
        status: if passed { Status::Complete } else { Status::Failed },
        source: Source {
            id: plan.model.id.clone(),
            revision: plan.model.revision.clone(),
            family: plan.model.spec.family.to_owned(),
            model_hash: folded.model_hash,
            files: sorted(folded.source_files),
        },
        basis: Basis { kind: FOLDED_VALUES.to_owned(), model_hash: folded.folded_hash },
        solve: transforms.solve.clone(),
        calibration: transforms.calibration.clone(),
        layers: transforms.report.clone(),
        fold: FoldReport {
            dtype: plan.dtype.name().to_owned(),
            max_rel_error: folded.report.max_rel_error,
            worst_layer: folded.report.worst_layer,
        },
        equivalence,
        sensitivity,
        files: folded.files,
    };
    let wush = dir.join(WUSH_DIR);
    let card = card::Context {
        manifest: &manifest,
        folded_dtype: &plan.folded_dtype(),
        text: manifest.calibration.as_ref().and_then(|text| notes::too_little_text(text.tokens, plan.model.head_dim())),
        serving: notes::serving(&plan.model, plan.dtype, manifest.calibration.as_ref()),
    };
    write_file(&wush.join(CARD), card::render(&card).as_bytes())?;
    let feedback = manifest.solve.feedback.then_some(VALUE_FEEDBACK);
    for name in [CARD, KEY_TRANSFORMS, VALUE_TRANSFORMS].into_iter().chain(feedback) {
        let (sha256, n_bytes) = hash_file(&wush.join(name))?;
        manifest.files.push(FileEntry { path: format!("{WUSH_DIR}/{name}"), n_bytes, sha256 });
    }
    manifest.files = sorted(manifest.files);
    manifest.save(&wush.join(MANIFEST))?;
    Ok(manifest)
}

fn sorted(mut files: Vec<FileEntry>) -> Vec<FileEntry> {
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

fn report(plan: &FoldPlan, manifest: Manifest, out: WrittenDir) -> ConvertReport {
    let notes = notes::of_bundle(plan, &manifest);
    ConvertReport {
        verdict: if manifest.status == Status::Complete { Verdict::Ok } else { Verdict::Failed },
        model: ModelInfo::new(&plan.model, manifest.source.model_hash),
        device: plan.model.device.name().to_owned(),
        calibration: manifest.calibration,
        solve: manifest.solve,
        gain: Gain::of(&manifest.layers),
        layers: manifest.layers,
        fold: manifest.fold,
        folded_dtype: plan.folded_dtype(),
        equivalence: manifest.equivalence,
        verify_text: plan.verify.as_ref().ok().map(|verify| verify.source.clone()),
        notes,
        out,
        memory: plan.memory,
        seconds: 0.0,
    }
}
