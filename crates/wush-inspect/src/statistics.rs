//! A statistics file: what was counted, how well conditioned it is, and what the transform would gain.

use std::collections::BTreeSet;
use std::path::Path;

use rayon::prelude::*;
use wush_format::hash::Sha;
use wush_format::manifest::HeadReport;
use wush_format::monitor::Monitor;
use wush_format::tensor_file::TensorFile;
use wush_model::arch::RopeScaling;
use wush_stats::{LayerStats, Statistics, output_gram_difference};
use wush_transform::{HeadProblem, Role, Settings, find, solve};

use crate::bundle::check_calibration;
use crate::inspect::Base;
use crate::number::count;
use crate::report::{Kind, Report};
use crate::solver::{check_length, head_report, unknown_device};
use crate::{InspectError, Result};

/// Damping γ of the transform whose gain is shown: the paper's.
const DAMPING: f64 = 0.01;

/// Inspects a statistics file; with `base`, also against the weights that it was calibrated on.
pub(crate) fn inspect(path: &Path, file: &TensorFile, base: Option<&Base>, monitor: &dyn Monitor) -> Result<Report> {
    let mut report = Report::new(path, Kind::Statistics);
    let statistics = match Statistics::from_file(file) {
        Ok(statistics) => statistics,
        Err(error) => {
            report.check("statistics", false, error.to_string());
            return Ok(report);
        }
    };
    describe(&mut report, &statistics);
    measure_heads(&mut report, &statistics, monitor)?;
    check_ranks(&mut report, &statistics);
    if let Some(base) = base {
        check_base(&mut report, &statistics, base);
    }
    Ok(report)
}

/// Every head's figures, in parallel, and whether its transforms can be solved.
fn measure_heads(report: &mut Report, statistics: &Statistics, monitor: &dyn Monitor) -> Result<()> {
    let heads: Vec<(usize, &LayerStats, usize)> = statistics
        .layers
        .iter()
        .flat_map(|(&layer, stats)| (0..stats.n_kv_heads()).map(move |head| (layer, stats, head)))
        .collect();
    monitor.begin("measure", "heads", heads.len() as u64);
    let measured: Result<Vec<_>> = heads
        .par_iter()
        .map(|&(layer, stats, head)| {
            if monitor.interrupted() {
                return Err(InspectError::Interrupted);
            }
            let key =
                measure(layer, head, Role::Key, stats.key_gram.head(head), &stats.key_hessian(head), stats.head_dim());
            let value = measure(
                layer,
                head,
                Role::Value,
                stats.value_gram.head(head),
                &stats.value_hessian(head),
                stats.head_dim(),
            );
            monitor.advance(1);
            Ok((layer, head, key, value, stats.mean_key_energy(head, statistics.info.positions)))
        })
        .collect();
    monitor.end();
    let mut problems = Vec::new();
    for (layer, head, key, value, energy) in measured? {
        let audit = report.head(layer, head);
        audit.mean_key_energy = energy;
        for (slot, result) in [(&mut audit.key, key), (&mut audit.value, value)] {
            match result {
                Ok(measures) => *slot = Some(measures),
                Err(problem) => problems.push(problem),
            }
        }
    }
    let ok = problems.is_empty();
    let detail = if ok {
        format!("{} can be solved at damping {DAMPING}", count(heads.len(), "head"))
    } else {
        crate::files::list(&problems)
    };
    report.check("solvable", ok, detail);
    Ok(())
}

fn describe(report: &mut Report, statistics: &Statistics) {
    let info = &statistics.info;
    report.model_hash = Some(info.model_hash);
    report.calibrated_length = Some(info.max_seq_len);
    report.check(
        "statistics",
        !statistics.layers.is_empty(),
        format!("{}, finite, symmetric, consistent", count(statistics.layers.len(), "layer")),
    );
    let positions = format!("{} in {}", info.positions, count(info.sequence_hashes.len(), "sequence"));
    report.check("positions", info.positions > 0, positions);
    let unknown = unknown_device(&info.device, &info.compute);
    let scaling = info.rope_scaling.as_deref().and_then(|text| text.parse::<RopeScaling>().err());
    if let Some(problem) = unknown.or_else(|| scaling.map(|error| error.to_string())) {
        report.check("forward pass", false, problem);
    }
    check_sequences(report, &info.sequence_hashes);
    let head_dim = statistics.layers.values().map(LayerStats::head_dim).max();
    check_calibration(report, info.positions, head_dim.unwrap_or(info.head_dim));
    let gap = statistics.layers.keys().enumerate().find(|(at, layer)| at != *layer);
    report.check(
        "layers",
        gap.is_none(),
        gap.map_or_else(|| "without a gap".to_owned(), |(at, _)| format!("layer {at} is missing")),
    );
    report.fact("model", format!("{} ({})", info.model_id, info.family));
    report.fact("calibration", format!("{}, on {} in {}", info.source, info.device, info.compute));
    let scaling = info.rope_scaling.as_deref().map(|scaling| format!(", RoPE scaling {scaling}")).unwrap_or_default();
    let softmax =
        if info.shift_invariant { "of the logits alone" } else { "of capped logits: its keys are not to be centred" };
    report.fact("softmax", softmax);
    report.fact("calibrated length", format!("{} tokens{scaling}", info.max_seq_len));
}

/// Conditioning of one pair of statistics, and the gain of its WUSH transform.
fn measure(
    layer: usize,
    head: usize,
    role: Role,
    gram: &[f64],
    hessian: &[f64],
    dim: usize,
) -> Result<HeadReport, String> {
    let place = |detail: String| format!("layer {layer}, KV head {head}: {detail}");
    let settings = Settings { damping: DAMPING, ..Settings::published(layer, head, role) };
    let kind = find("wush").map_err(|error| place(error.to_string()))?;
    let solution =
        solve(kind, &HeadProblem::new(gram, hessian, dim), &settings).map_err(|error| place(error.to_string()))?;
    solution.info.measures.as_ref().map(head_report).ok_or_else(|| place("not measured".to_owned()))
}

/// A sequence that was summed twice weighs double: by mistake, since `wush merge` refuses it.
fn check_sequences(report: &mut Report, hashes: &[Sha]) {
    let distinct = hashes.iter().collect::<BTreeSet<_>>().len();
    let ok = distinct == hashes.len();
    let detail = if ok {
        "no sequence is counted twice".to_owned()
    } else {
        format!("{} different in {}: some are counted twice", distinct, count(hashes.len(), "sequence"))
    };
    report.check("sequences", ok, detail);
}

/// A sum of n outer products has at most rank n: one a position of keys and values, one a position and query head of queries.
fn check_ranks(report: &mut Report, statistics: &Statistics) {
    let info = &statistics.info;
    let positions = usize::try_from(info.positions).unwrap_or(usize::MAX);
    // Layers may differ in their groups; the largest that a head can have is all query heads.
    let queries = positions.saturating_mul(info.n_heads);
    let too_high = report.layers.iter().flat_map(|layer| layer.heads.iter().map(move |head| (layer.layer, head))).find(
        |(_, head)| {
            head.key.as_ref().is_some_and(|key| key.rank_gram > positions || key.rank_hessian > queries)
                || head.value.as_ref().is_some_and(|value| value.rank_gram > positions)
        },
    );
    let detail = match too_high {
        None => format!("none above what {positions} positions give"),
        Some((layer, head)) => {
            format!("layer {layer}, KV head {}: above what {positions} positions give", head.head)
        }
    };
    report.check("ranks", too_high.is_none(), detail);
}

/// The model that the description names is the base, and the part of the statistics that comes from the weights is theirs.
fn check_base(report: &mut Report, statistics: &Statistics, base: &Base) {
    let (info, spec) = (&statistics.info, &base.spec);
    let first = spec.layers.first().map(|layer| (layer.attn.n_heads, layer.attn.n_kv_heads, layer.attn.head_dim));
    let same = info.family == spec.family
        && first == Some((info.n_heads, info.n_kv_heads, info.head_dim))
        && statistics.layers.keys().copied().eq(0..spec.layers.len());
    let detail = if same {
        format!("{}, {}", spec.family, count(spec.layers.len(), "layer"))
    } else {
        format!(
            "the base is another model: family, layers or heads are not its ({}, {})",
            spec.family,
            count(spec.layers.len(), "layer")
        )
    };
    report.check("same model", same, detail);
    if !same {
        return;
    }
    check_length(report, info.max_seq_len, info.rope_scaling.as_deref(), spec);
    let result = match output_gram_difference(&base.checkpoint, spec, statistics) {
        Ok(None) => Ok("those of the base's output projections".to_owned()),
        Ok(Some((layer, head))) => {
            Err(format!("layer {layer}, KV head {head}: not that of the base's output projection"))
        }
        Err(error) => Err(error.to_string()),
    };
    report.check_result("output Gram matrices", result);
}
