//! A transforms file: readable, invertible, with its report.

use std::path::Path;

use rayon::prelude::*;
use wush_fold::{HeadWeights, condition_limit};
use wush_format::tensor_file::TensorFile;
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};
use wush_transform::Role;

use crate::bundle::{add_layers, check_calibration, describe_calibration};
use crate::extras::{Centered, Feedback, check_centered, check_feedback, check_means};
use crate::files::list;
use crate::hessian::{ValueHead, contradiction};
use crate::inspect::Base;
use crate::metric::check_metric;
use crate::number::count;
use crate::report::{Kind, Report};
use crate::sidecars::Conditions;
use crate::solver::{Precision, Record, Stored, check_length, check_record, check_stored, describe_settings};

/// Inspects a transforms file; with `base`, also against the shapes of its heads.
pub(crate) fn inspect(path: &Path, file: &TensorFile, base: Option<&Base>) -> Report {
    let mut report = Report::new(path, Kind::Transforms);
    let transforms = match Transforms::from_file(file) {
        Ok(transforms) => transforms,
        Err(error) => {
            report.check("transforms", false, error.to_string());
            return report;
        }
    };
    describe(&mut report, &transforms);
    let record =
        Record { solve: &transforms.solve, calibration: transforms.calibration.as_ref(), layers: &transforms.report };
    let head_dim = transforms.layers.values().map(|layer| layer.key.dim.max(layer.value.dim)).max().unwrap_or(0);
    check_record(&mut report, &record, head_dim);
    if let Some(calibration) = &transforms.calibration {
        describe_calibration(&mut report, calibration);
        check_calibration(&mut report, calibration.tokens, head_dim);
    }
    add_layers(&mut report, &transforms.report);
    check_complete(&mut report, &transforms);
    for role in [Role::Key, Role::Value] {
        check_invertible(&mut report, &transforms, role);
    }
    let centered = centered(&transforms);
    check_centered(&mut report, &centered, &record);
    for role in [Role::Key, Role::Value] {
        let (stored, feedback) = (stored(&transforms, role), feedback(&transforms, role));
        check_feedback(&mut report, role, &feedback, &record);
        check_stored(&mut report, role, &stored, &record, Precision::F64);
        check_metric(&mut report, role, (&stored, &feedback), &record, Precision::F64);
    }
    if let Some(base) = base {
        check_shapes(&mut report, &transforms, base);
        check_means(&mut report, &centered, &base.checkpoint, &base.spec);
        if let Some(calibration) = &transforms.calibration {
            check_length(&mut report, calibration.max_seq_len, calibration.rope_scaling.as_deref(), &base.spec);
        }
        if !record.layers.is_empty() {
            report.check_result("value transforms fit the base", check_values(&transforms, &record, base));
        }
    }
    report
}

/// Every value transform and its report against the base's output projection.
fn check_values(transforms: &Transforms, record: &Record<'_>, base: &Base) -> Result<String, String> {
    let (values, feedback) = (stored(transforms, Role::Value), feedback(transforms, Role::Value));
    let problem = |at: &Stored| {
        let attn = &base.spec.layers.get(at.layer).filter(|layer| at.head < layer.attn.n_kv_heads)?.attn;
        let lower = feedback.iter().find(|of| (of.layer, of.head) == (at.layer, at.head));
        let lower = lower.map(|of| of.matrix.as_slice());
        let found = match HeadWeights::read(&base.checkpoint, attn, at.layer, at.head) {
            Ok(weights) => contradiction(&weights, ValueHead { matrix: &at.matrix, lower }, record, Precision::F64),
            Err(error) => Some(error.to_string()),
        };
        found.map(|found| format!("layer {}, KV head {}: {found}", at.layer, at.head))
    };
    let problems: Vec<String> = values.par_iter().filter_map(problem).collect();
    if problems.is_empty() { Ok(count(values.len(), "head")) } else { Err(list(&problems)) }
}

/// What it is, as facts.
fn describe(report: &mut Report, transforms: &Transforms) {
    let n_heads: usize = transforms.layers.values().map(|layer| layer.key.n_heads).sum();
    let detail = format!("{} and {}, all finite", count(transforms.layers.len(), "layer"), count(n_heads, "KV head"));
    report.check("transforms", n_heads > 0, detail);
    report.model_hash = Some(transforms.model_hash);
    report.fact("transform", describe_settings(&transforms.solve));
}

/// Key means.
fn centered(transforms: &Transforms) -> Vec<Centered> {
    let of_layer = |(&layer, entry): (&usize, &LayerTransforms)| {
        let means = entry.key_mean.as_deref();
        Centered::new(layer, entry.key.n_heads, means.map(<[f64]>::to_vec))
    };
    transforms.layers.iter().map(of_layer).collect()
}

/// Feedback matrices of one role.
fn feedback(transforms: &Transforms, role: Role) -> Vec<Feedback> {
    let heads = |(&layer, entry): (&usize, &LayerTransforms)| {
        let matrices = match role {
            Role::Key => entry.key_feedback.clone()?,
            Role::Value => entry.value_feedback.clone()?,
        };
        let (n_heads, dim) = (matrices.n_heads, matrices.dim);
        Some((0..n_heads).map(move |head| Feedback { layer, head, dim, matrix: matrices.head(head).to_vec() }))
    };
    transforms.layers.iter().filter_map(heads).flatten().collect()
}

/// The solver's report has one entry a head, or none at all.
fn check_complete(report: &mut Report, transforms: &Transforms) {
    if !transforms.report.is_empty() {
        let complete = transforms
            .report
            .iter()
            .map(|layer| (layer.layer, layer.key.len(), layer.value.len()))
            .eq(transforms.layers.iter().map(|(&layer, entry)| (layer, entry.key.n_heads, entry.value.n_heads)));
        report.check(
            "solver's report",
            complete,
            if complete { "one entry a head" } else { "layers or heads are not those of the transforms" },
        );
    }
}

/// Layers, KV heads and dimensions as the base's.
fn check_shapes(report: &mut Report, transforms: &Transforms, base: &Base) {
    let shape = |matrices: &HeadMatrices| [matrices.n_heads, matrices.dim];
    let found = transforms.layers.iter().map(|(&layer, entry)| (layer, shape(&entry.key), shape(&entry.value)));
    let expected = base.spec.layers.iter().enumerate().map(|(layer, spec)| {
        let shape = [spec.attn.n_kv_heads, spec.attn.head_dim];
        (layer, shape, shape)
    });
    let same = found.eq(expected);
    let detail =
        if same { "layers and heads as the base's" } else { "the base is another model: layers or heads are not its" };
    report.check("same model", same, detail);
}

fn stored(transforms: &Transforms, role: Role) -> Vec<Stored> {
    let matrices = |(&layer, entry): (&usize, &LayerTransforms)| {
        let matrices = of_role(entry, role);
        let dim = matrices.dim;
        let stored = |head| Stored { layer, head, dim, matrix: matrices.head(head).to_vec() };
        (0..matrices.n_heads).map(stored).collect::<Vec<_>>()
    };
    transforms.layers.iter().flat_map(matrices).collect()
}

fn of_role(entry: &LayerTransforms, role: Role) -> &HeadMatrices {
    match role {
        Role::Key => &entry.key,
        Role::Value => &entry.value,
    }
}

fn check_invertible(report: &mut Report, transforms: &Transforms, role: Role) {
    let mut conditions = Conditions::default();
    for (&layer, entry) in &transforms.layers {
        let matrices = of_role(entry, role);
        for head in 0..matrices.n_heads {
            let place = (layer, head);
            let found = conditions.add(matrices.head(head), matrices.dim, condition_limit(matrices.dim), place);
            let audit = report.head(layer, head);
            match role {
                Role::Key => audit.key_condition = found,
                Role::Value => audit.value_condition = found,
            }
        }
    }
    let name = match role {
        Role::Key => "key transforms invertible",
        Role::Value => "value transforms invertible",
    };
    conditions.check(report, name);
}
