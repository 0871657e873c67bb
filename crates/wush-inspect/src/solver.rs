//! Transforms against what is said of them: the name, the solver's report, and what every transform of that name satisfies.
//!
//! Enters: stored transforms, and the record of how they were solved. Leaves: checks. Figures that the stored matrices give
//! are computed again; of those that would take the statistics, what no statistics could give is refused.

use rayon::prelude::*;
use wush_format::manifest::{COMPUTES, Calibration, DEVICES, HeadReport, LayerReport, Solve};
use wush_model::arch::RopeScaling;
use wush_model::spec::ModelSpec;
use wush_transform::{Factor, HeadMeasures, HeadProblem, Role, Settings, TransformKind, find, solve};

use crate::files::list;
use crate::number::{count, shown};
use crate::report::{HeadAudit, Report};

/// Figures of the solver are ratios of f64 sums, good to about d·ε·cond: 1e-6 for every transform that is worth storing.
pub(crate) const REL_TOL: f64 = 1e-6;
/// Theorem 3's bound sums roots of eigenvalues, of which those just above d·ε of the largest are noise: √(d·ε) ≤ 2e-7 each,
/// d of them, at d ≤ 256.
const BOUND_REL_TOL: f64 = 1e-4;
/// Condition numbers are saturated here: beyond, f64 says no more than "singular".
const SATURATED: f64 = 1.0 / f64::EPSILON;

/// What wush writes as preset.
const PRESETS: [&str; 2] = ["default", "paper"];
/// Between the devices of merged statistics.
const MERGED: &str = " + ";

/// How transforms were solved, as a transforms file or a manifest says.
pub(crate) struct Record<'a> {
    pub(crate) solve: &'a Solve,
    pub(crate) calibration: Option<&'a Calibration>,
    pub(crate) layers: &'a [LayerReport],
}

impl<'a> Record<'a> {
    /// What the solver's report says of one head, where it has it.
    pub(crate) fn head(&self, role: Role, layer: usize, head: usize) -> Option<&'a HeadReport> {
        let of_layer = self.layers.iter().find(|report| report.layer == layer)?;
        match role {
            Role::Key => of_layer.key.get(head),
            Role::Value => of_layer.value.get(head),
        }
    }
}

/// One stored transform, widened.
pub(crate) struct Stored {
    pub(crate) layer: usize,
    pub(crate) head: usize,
    pub(crate) dim: usize,
    /// Row-major `[dim, dim]`.
    pub(crate) matrix: Vec<f64>,
}

/// What stored numbers were rounded to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    F32,
    F64,
}

impl Precision {
    fn round(self, x: f64) -> f64 {
        match self {
            Self::F32 => f64::from(x as f32),
            Self::F64 => x,
        }
    }

    pub(crate) fn roundoff(self) -> f64 {
        match self {
            Self::F32 => f64::from(f32::EPSILON) / 2.0,
            Self::F64 => f64::EPSILON / 2.0,
        }
    }
}

/// The record with itself: a known transform, the statistics that it needs, counts and figures that a solver can give.
/// `dim` is the largest head dimension.
pub(crate) fn check_record(report: &mut Report, record: &Record<'_>, dim: usize) {
    let known = find(&record.solve.transform).and_then(|kind| Factor::find(&record.solve.factor).map(|_| kind));
    let kind = match known {
        Ok(kind) => kind,
        Err(error) => return report.check("solver's record", false, error.to_string()),
    };
    let parts = [record.solve.stats_hash.is_some(), record.calibration.is_some(), !record.layers.is_empty()];
    let complete = if kind.needs_statistics { parts == [true; 3] } else { parts == [true; 3] || parts == [false; 3] };
    let detail = if complete {
        format!("{}, {}", kind.name, if parts[0] { "with its statistics" } else { "which needs no statistics" })
    } else {
        format!(
            "{}: expected a hash of statistics, a calibration and a report of every head, or none of them",
            kind.name
        )
    };
    let damping_ok = record.solve.damping.is_finite() && record.solve.damping >= 0.0;
    let exponent_ok = (0.0..=0.5).contains(&record.solve.exponent);
    let known = PRESETS.contains(&record.solve.preset.as_str());
    let detail = if known { detail } else { format!("unknown preset {}", record.solve.preset) };
    report.check("solver's record", complete && damping_ok && exponent_ok && known, detail);
    if let Some(calibration) = record.calibration {
        let Calibration { sequences, max_seq_len, tokens, .. } = calibration;
        let sequences = count(usize::try_from(*sequences).unwrap_or(usize::MAX), "sequence");
        let detail = format!("{tokens} tokens in {sequences} of at most {max_seq_len}");
        let detail = unknown_word(calibration).unwrap_or(detail);
        let ok = calibration.is_consistent() && unknown_word(calibration).is_none();
        report.check("calibration figures", ok, detail);
    }
    let problems: Vec<String> = record
        .layers
        .iter()
        .flat_map(|layer| {
            [("key", &layer.key), ("value", &layer.value)].map(|(role, heads)| (layer.layer, role, heads))
        })
        .flat_map(|(layer, role, heads)| heads.iter().enumerate().map(move |(head, found)| (layer, role, head, found)))
        .filter_map(|(layer, role, head, found)| {
            let problem = impossible(found, kind, record, dim)?;
            Some(format!("layer {layer}, KV head {head}, {role}: {problem}"))
        })
        .collect();
    if !record.layers.is_empty() {
        let ok = problems.is_empty();
        report.check(
            "solver's figures",
            ok,
            if ok { "all in their possible ranges".to_owned() } else { list(&problems) },
        );
    }
}

/// A word of a calibration that no wush writes. Merged statistics name all devices.
fn unknown_word(calibration: &Calibration) -> Option<String> {
    let Calibration { rope_scaling, device, compute, .. } = calibration;
    unknown_device(device, compute).or_else(|| match rope_scaling.as_deref().map(str::parse::<RopeScaling>) {
        Some(Err(error)) => Some(error.to_string()),
        _ => None,
    })
}

/// A device or an arithmetic that no wush computes with.
pub(crate) fn unknown_device(device: &str, compute: &str) -> Option<String> {
    let device = device.split(MERGED).find(|name| !DEVICES.contains(name));
    let compute = Some(compute).filter(|name| !COMPUTES.contains(name));
    let unknown = |what: &str, name: &str| format!("unknown {what} {name}");
    device.map(|name| unknown("device", name)).or_else(|| compute.map(|name| unknown("arithmetic", name)))
}

/// Whether the calibrated length is one that the model reaches, with the scaling that it was calibrated with.
pub(crate) fn check_length(report: &mut Report, max_seq_len: u64, rope_scaling: Option<&str>, spec: &ModelSpec) {
    let own = spec.max_position_embeddings;
    let scaling = rope_scaling.and_then(|text| text.parse::<RopeScaling>().ok());
    let longest = scaling.map_or(own, |scaling| scaling.scaled_positions(own)) as u64;
    let with = rope_scaling.map(|text| format!(" with {text}")).unwrap_or_default();
    let detail = format!("{max_seq_len} tokens of the {longest} positions that the model reaches{with}");
    if max_seq_len < longest {
        return report.warn("calibrated length", format!("{detail}: of later ones the statistics say nothing"));
    }
    report.check("calibrated length", max_seq_len == longest, detail);
}

/// The first figure that no statistics could have given.
///
/// A damped matrix has a condition number of at most 1 + d/γ. Theorem 3's bound is at most tr(M) tr(H), by Cauchy-Schwarz, so
/// gain times ratio is at least 1. TᵀT is the geometric mean of the damped H and M⁻¹ up to its scale, weighted by 1 − 2p and 2p
/// (alike in Eq. 1), so cond(T)² is at most the same mean of their condition numbers; an orthogonal T has condition 1 and gain
/// 1. A sum of n outer products has at most rank n. Without damping Eq. 1 takes no matrix that is singular in f64.
fn impossible(found: &HeadReport, kind: &TransformKind, record: &Record<'_>, dim: usize) -> Option<String> {
    let (d, damping, exponent) = (dim as f64, record.solve.damping, record.solve.exponent);
    let undamped = if !kind.is_orthogonal { SATURATED / d } else { SATURATED };
    let damped = if damping > 0.0 { (1.0 + d / damping).min(SATURATED) } else { undamped };
    let definite = damping == 0.0 && !kind.is_orthogonal;
    let within = |x: f64, least: f64, most: f64, tol: f64| x >= least - tol && x <= most * (1.0 + tol);
    let alive = dim.saturating_sub(found.dead_channels);
    let n_tokens = record.calibration.map_or(u64::MAX, |calibration| calibration.tokens);
    // At the edge of what f64 tells from singular, a figure is good to a factor of two.
    let noise = (d * f64::EPSILON * (found.cond_gram + found.cond_hessian)).min(1.0);
    let largest = if !kind.is_orthogonal {
        found.cond_hessian.powf(0.5 - exponent) * found.cond_gram.powf(exponent)
    } else {
        1.0
    };
    let product = found.predicted_gain * found.trace_product_over_bound;
    let gain_ok = found.predicted_gain > 0.0
        && (!kind.is_orthogonal || within(found.predicted_gain, 1.0, 1.0, REL_TOL))
        && product >= 1.0 - BOUND_REL_TOL;
    let figures = [
        ("cond_gram", found.cond_gram, within(found.cond_gram, 1.0, damped, REL_TOL + noise)),
        ("cond_hessian", found.cond_hessian, within(found.cond_hessian, 1.0, damped, REL_TOL + noise)),
        ("cond_transform", found.cond_transform, within(found.cond_transform, 1.0, largest, REL_TOL + noise)),
        ("rank_gram", found.rank_gram as f64, found.rank_gram <= alive && found.rank_gram as u64 <= n_tokens),
        ("rank_hessian", found.rank_hessian as f64, found.rank_hessian <= alive),
        ("dead_channels", found.dead_channels as f64, found.dead_channels <= if definite { 0 } else { dim }),
        (
            "trace_product_over_bound",
            found.trace_product_over_bound,
            within(found.trace_product_over_bound, 1.0, SATURATED, BOUND_REL_TOL),
        ),
        ("predicted_gain", found.predicted_gain, gain_ok),
        ("feedback_gain", found.feedback_gain.unwrap_or(1.0), found.feedback_gain.is_none_or(|gain| gain > 0.0)),
        ("imbalance", found.imbalance, within(found.imbalance, 0.0, (d - 1.0).max(0.0), REL_TOL)),
    ];
    let (name, value, _) = figures.into_iter().find(|&(_, _, ok)| !ok)?;
    Some(format!("{name} {} is impossible for {} at damping {damping}, dimension {dim}", shown(value), kind.name))
}

/// Stored transforms of one role: where the name determines them, they are those; else their scale is possible and their
/// condition numbers are the solver's. Expects the report's heads to have what was found before.
pub(crate) fn check_stored(
    report: &mut Report,
    role: Role,
    stored: &[Stored],
    record: &Record<'_>,
    precision: Precision,
) {
    // An unknown name failed before.
    let Ok(kind) = find(&record.solve.transform) else { return };
    let audits: Vec<HeadAudit> = stored.iter().map(|at| report.head(at.layer, at.head).clone()).collect();
    let problem = |(at, audit): (&Stored, &HeadAudit)| {
        let (condition, solver) = match role {
            Role::Key => (audit.key_condition, audit.key.as_ref()),
            Role::Value => (audit.value_condition, audit.value.as_ref()),
        };
        let named =
            if kind.needs_statistics { None } else { other_than_named(at, role, kind, record.solve.seed, precision) };
        let found = named.or_else(|| match condition {
            None => Some("it has no finite condition number".to_owned()),
            Some(condition) => impossible_scale(at, condition, precision)
                .or_else(|| other_condition(at.dim, condition, solver?.cond_transform, precision)),
        });
        found.map(|found| format!("layer {}, KV head {}: {found}", at.layer, at.head))
    };
    let problems: Vec<String> = stored.par_iter().zip(&audits).filter_map(problem).collect();
    let name = match role {
        Role::Key => "key transforms are the solver's",
        Role::Value => "value transforms are the solver's",
    };
    let good = if kind.needs_statistics {
        "scale and condition number of every head as its report says".to_owned()
    } else {
        format!("every head has the matrix that {} names", kind.name)
    };
    report.check(name, problems.is_empty(), if problems.is_empty() { good } else { list(&problems) });
}

/// A transform without statistics is built again, and must be the same to the bit.
fn other_than_named(at: &Stored, role: Role, kind: &TransformKind, seed: u64, precision: Precision) -> Option<String> {
    let settings = Settings { seed, ..Settings::published(at.layer, at.head, role) };
    let problem = HeadProblem::new(&[], &[], at.dim);
    match solve(kind, &problem, &settings) {
        Ok(expected) => {
            let same = expected.transform.iter().map(|&x| precision.round(x)).eq(at.matrix.iter().copied());
            (!same).then(|| format!("not the matrix that {} names", kind.name))
        }
        Err(error) => Some(error.to_string()),
    }
}

/// T keeps tr(T M Tᵀ) = tr(M) of the damped M, whatever M is (Eq. 1's c; an orthogonal T keeps every trace), so 1 lies between
/// its singular values, and their root mean square between 1/cond and cond.
fn impossible_scale(at: &Stored, condition: f64, precision: Precision) -> Option<String> {
    let rms = (at.matrix.iter().map(|x| x * x).sum::<f64>() / at.dim as f64).sqrt();
    let most = condition * (1.0 + condition_tol(at.dim, condition, precision));
    let possible = rms <= most && rms >= 1.0 / most;
    (!possible).then(|| {
        let condition = shown(condition);
        format!(
            "scale {}, at most {condition} and at least its inverse is possible at condition {condition}",
            shown(rms)
        )
    })
}

fn other_condition(dim: usize, found: f64, stated: f64, precision: Precision) -> Option<String> {
    let same = (found - stated).abs() <= condition_tol(dim, stated, precision) * stated;
    (!same).then(|| format!("condition number {}, the solver's report says {}", shown(found), shown(stated)))
}

/// How far rounding to the stored type moves a condition number, relatively: each element by u of itself, so every singular
/// value by at most u·‖T‖_F ≤ u·√d·σ_max, which is u·√d·cond of the smallest. Twice that, for both ends.
fn condition_tol(dim: usize, condition: f64, precision: Precision) -> f64 {
    REL_TOL + 2.0 * (dim as f64).sqrt() * precision.roundoff() * condition
}

/// The settings of a solver, in a line.
pub(crate) fn describe_settings(solve: &Solve) -> String {
    let Solve { transform, preset, damping, exponent, factor, center_keys, feedback, .. } = solve;
    let feedback = if *feedback { "with" } else { "without" };
    format!(
        "{transform}, preset {preset}, damping {damping}, exponent {exponent}, factor {factor}, keys centred {center_keys}, \
         {feedback} feedback"
    )
}

/// The solver's measures as the manifest states them.
pub fn head_report(measures: &HeadMeasures) -> HeadReport {
    HeadReport {
        cond_gram: measures.cond_gram,
        cond_hessian: measures.cond_hessian,
        cond_transform: measures.cond_transform,
        rank_gram: measures.rank_gram,
        rank_hessian: measures.rank_hessian,
        dead_channels: measures.dead_channels,
        trace_product_over_bound: measures.trace_product_over_bound,
        predicted_gain: measures.predicted_gain,
        feedback_gain: None,
        imbalance: measures.imbalance,
        mean_norm: None,
    }
}
