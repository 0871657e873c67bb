//! A manifest against the bundle that it lies in, and against the base: what it says and what can be computed again.

use std::collections::{BTreeMap, BTreeSet};

use wush_checkpoint::{Checkpoint, weights_hash};
use wush_format::bundle::WUSH_DIR;
use wush_format::equivalence::tolerance;
use wush_format::manifest::{Equivalence, FOLDED_VALUES, FileEntry, Manifest};
use wush_format::tensor_file::Dtype;
use wush_model::spec::ModelSpec;

use crate::base::folded_rows;
use crate::files::list;
use crate::number::{count, digest, shown};
use crate::report::Report;
use crate::solver::Record;

/// [`wush_format::manifest::FoldReport::dtype`] of folds that keep the stored types, and of those that widen them.
const KEEP: &str = "keep";
const F32: &str = "f32";
/// The fold's error is computed a second way, in f64, on differences that are 1e-8 of the products or more.
const FOLD_ERROR_REL_TOL: f64 = 1e-6;
/// Where values have a bias, the fold's figure is without it, and the comparison's has it as one more of some hundred columns.
const FOLD_ERROR_BIAS_REL_TOL: f64 = 0.1;
/// An error as small as this is f64 arithmetic: n·ε for n = 4096.
const FOLD_ERROR_ABS_TOL: f64 = 1e-12;
/// Logits are f32: their differences, and what is computed from them, may be off by this, relatively and in nats.
const LOGIT_TOL: f64 = 1e-5;

/// How the bundle's transforms were solved.
pub(crate) fn record(manifest: &Manifest) -> Record<'_> {
    Record { solve: &manifest.solve, calibration: manifest.calibration.as_ref(), layers: &manifest.layers }
}

/// What the manifest says of its source and its fold, against the bundle's own checkpoint.
pub(crate) fn check_bundle(report: &mut Report, manifest: &Manifest, checkpoint: &Checkpoint, spec: &ModelSpec) {
    let (stated, found) = (&manifest.source.family, spec.family);
    let ok = stated == found;
    report.check(
        "family",
        ok,
        if ok { found.to_owned() } else { format!("the manifest says {stated}, found {found}") },
    );
    let kind = &manifest.basis.kind;
    let ok = kind == FOLDED_VALUES;
    report.check("basis", ok, if ok { kind.clone() } else { format!("expected {FOLDED_VALUES}, found {kind}") });
    report.check_result("fold dtype", check_fold_dtype(manifest, checkpoint, spec));
    report.check_result("source files", check_source_files(manifest, checkpoint));
}

/// `f32` widens every folded tensor; `keep` leaves every shard as long as it was. With a base, "names and shapes" compares the
/// types themselves.
fn check_fold_dtype(manifest: &Manifest, checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<String, String> {
    let folded = folded_rows(spec);
    let dtypes = folded.keys().filter_map(|name| Some((*name, checkpoint.locate(name)?.1.dtype)));
    match manifest.fold.dtype.as_str() {
        KEEP => Ok("as stored".to_owned()),
        F32 => match dtypes.into_iter().find(|(_, dtype)| !matches!(dtype, Dtype::F32 | Dtype::F64)) {
            Some((name, dtype)) => Err(format!("the manifest says f32, {name} is {dtype}")),
            None => Ok(format!("f32, {}", count(folded.len(), "tensor"))),
        },
        other => Err(format!("expected {KEEP} or {F32}, found {other}")),
    }
}

/// The source's list against its own hash and the bundle's list: the same names, and the same content but for the shards (and
/// their index, when tensors grew).
fn check_source_files(manifest: &Manifest, checkpoint: &Checkpoint) -> Result<String, String> {
    let source = &manifest.source.files;
    let shards: BTreeSet<&str> = checkpoint.shards().iter().map(|shard| shard.file_name.as_str()).collect();
    let is_shard = |file: &&FileEntry| shards.contains(file.path.as_str());
    let weights: Vec<FileEntry> = source.iter().filter(is_shard).cloned().collect();
    let (found, stated) = (weights_hash(&weights), manifest.source.model_hash);
    let mut problems = Vec::new();
    if found != stated {
        problems.push(format!("they give the model hash {}, the manifest says {}", digest(&found), digest(&stated)));
    }
    let own = format!("{WUSH_DIR}/");
    let written: Vec<&FileEntry> = manifest.files.iter().filter(|file| !file.path.starts_with(&own)).collect();
    if !source.iter().map(|file| &file.path).eq(written.iter().map(|file| &file.path)) {
        problems.push("their names are not those of the bundle's files".to_owned());
    }
    let keep = manifest.fold.dtype == KEEP;
    for (old, new) in source.iter().zip(written).filter(|(old, new)| old.path == new.path) {
        if is_shard(&old) {
            if keep && old.n_bytes != new.n_bytes {
                problems.push(format!("{}: {} bytes, the bundle's has {}", old.path, old.n_bytes, new.n_bytes));
            }
        } else if old.sha256 != new.sha256 && (keep || !crate::index::is_index(&old.path)) {
            problems.push(format!("{}: not what the bundle has", old.path));
        }
    }
    if problems.is_empty() {
        Ok(format!("{}, consistent with the bundle's", count(source.len(), "file")))
    } else {
        Err(list(&problems))
    }
}

/// The equivalence check, decided again from its numbers, which must fit each other: |Δ NLL| of a token and the mean KL are at most
/// twice the largest |Δ logit|, the mean |Δ NLL| at most the largest.
pub(crate) fn check_equivalence(report: &mut Report, equivalence: &Equivalence) {
    let Equivalence { tokens, nll_source, nll_bundle, mean_kl, max_logit_diff, max_nll_diff, tolerance, passed } =
        *equivalence;
    let difference = (nll_bundle - nll_source).abs();
    let decided = difference <= tolerance * nll_source && mean_kl <= tolerance * nll_source;
    let at_most = |x: f64, bound: f64| x <= bound * (1.0 + LOGIT_TOL) + LOGIT_TOL;
    let fits = tokens > 0
        && nll_source >= 0.0
        && mean_kl >= -LOGIT_TOL
        && at_most(difference, max_nll_diff)
        && at_most(max_nll_diff, 2.0 * max_logit_diff)
        && at_most(mean_kl, 2.0 * max_logit_diff);
    let change = shown(difference / nll_source);
    let figures = format!(
        "mean NLL {nll_source:.5} → {nll_bundle:.5} nats over {tokens} tokens: {change} relative, at most {} allowed; mean KL {}",
        shown(tolerance),
        shown(mean_kl),
    );
    let detail = if fits { figures } else { format!("{figures}; the figures contradict each other") };
    report.check("equivalence", decided && passed && fits, detail);
}

/// Says so when the equivalence check was less strict than it is where nobody asks for a tolerance.
pub(crate) fn describe_tolerance(report: &mut Report, manifest: &Manifest, checkpoint: &Checkpoint, spec: &ModelSpec) {
    let Some(equivalence) = &manifest.equivalence else { return };
    let folded = folded_rows(spec);
    let dtypes = folded.keys().filter_map(|name| Some(checkpoint.locate(name)?.1.dtype));
    let default = dtypes.map(|dtype| tolerance(dtype, equivalence.tokens)).fold(0.0, f64::max);
    if equivalence.tolerance > default {
        let (stated, default) = (shown(equivalence.tolerance), shown(default));
        report.fact("equivalence tolerance", format!("{stated}, as asked for; the default is {default}"));
    }
}

/// The source's list against the base's files.
pub(crate) fn check_base_files(manifest: &Manifest, base: &[FileEntry]) -> Result<String, String> {
    let by_path =
        |files: &'_ [FileEntry]| files.iter().map(|file| (file.path.clone(), file.clone())).collect::<BTreeMap<_, _>>();
    let (stated, found) = (by_path(&manifest.source.files), by_path(base));
    let unlisted = found.keys().filter(|path| !stated.contains_key(*path));
    let mut problems: Vec<String> = unlisted.map(|path| format!("{path} is not in the manifest")).collect();
    for (path, stated) in &stated {
        match found.get(path) {
            None => problems.push(format!("{path} is not in the base")),
            Some(found) if found == stated => {}
            Some(found) => problems.push(format!(
                "{path}: the manifest says {} bytes, SHA-256 {}, the base has {}, {}",
                stated.n_bytes,
                digest(&stated.sha256),
                found.n_bytes,
                digest(&found.sha256)
            )),
        }
    }
    if problems.is_empty() {
        Ok(format!("{}, all in the base", count(base.len(), "file")))
    } else {
        Err(list(&problems))
    }
}

/// The fold's largest error and its layer against those of the comparison, `(layer, relative error)` of every head.
pub(crate) fn check_fold_error(manifest: &Manifest, heads: &[(usize, f64)], with_bias: bool) -> Result<String, String> {
    let largest = |of: &mut dyn Iterator<Item = f64>| of.fold(0.0, crate::number::worse);
    let found = largest(&mut heads.iter().map(|&(_, error)| error));
    let stated = manifest.fold.max_rel_error;
    let rel_tol = if with_bias { FOLD_ERROR_BIAS_REL_TOL } else { FOLD_ERROR_REL_TOL };
    let close = |a: f64| (a - stated).abs() <= rel_tol * stated + FOLD_ERROR_ABS_TOL;
    let worst = manifest.fold.worst_layer;
    let there = largest(&mut heads.iter().filter(|&&(layer, _)| layer == worst).map(|&(_, error)| error));
    let known = heads.iter().any(|&(layer, _)| layer == worst);
    if close(found) && close(there) && known {
        Ok(format!("{} in layer {worst}, as the manifest says", shown(found)))
    } else {
        Err(format!(
            "the manifest says {} in layer {worst}; found {} there, at most {}",
            shown(stated),
            shown(there),
            shown(found)
        ))
    }
}
