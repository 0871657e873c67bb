//! A folded checkpoint against its base: what must be identical is, and what was folded is the same function.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use serde_json::Value;
use wush_checkpoint::Checkpoint;
use wush_fold::{HeadCheck, HeadWeights, TransformCheck, check_head, check_transform};
use wush_format::bundle::ValueSidecar;
use wush_format::monitor::Monitor;
use wush_format::tensor_file::{Dtype, TensorView};
use wush_model::spec::ModelSpec;

use crate::files::list;
use crate::inspect::Base;
use crate::number::{count, finite, shown, worse};
use crate::report::{FoldAudit, Report};
use crate::sidecars::value_head;
use crate::{InspectError, Result};

/// All comparisons with the base.
pub(crate) fn compare(
    report: &mut Report,
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    values: Option<&ValueSidecar>,
    base: &Base,
    monitor: &dyn Monitor,
) -> Result<()> {
    let folded = folded_rows(&base.spec);
    report.check_result("names and shapes", check_names(checkpoint, &base.checkpoint, &folded));
    report.check_result("untouched tensors", check_untouched(checkpoint, &base.checkpoint, &folded, monitor)?);
    report.check_result("other files", check_other_files(checkpoint, &base.checkpoint));
    let same_model = *spec == base.spec;
    report.check(
        "same model",
        same_model,
        if same_model {
            "both configurations describe the same decoder"
        } else {
            "the configurations describe different decoders"
        },
    );
    if same_model {
        check_folds(report, checkpoint, spec, values, base, monitor)?;
    }
    Ok(())
}

/// Rows that a fold may change, by tensor: values, value biases, output projections.
fn folded_rows(spec: &ModelSpec) -> BTreeMap<&str, Vec<Range<usize>>> {
    let mut rows: BTreeMap<&str, Vec<Range<usize>>> = BTreeMap::new();
    for layer in &spec.layers {
        let attn = &layer.attn;
        for slice in [Some(&attn.v.weight), attn.v.bias.as_ref(), Some(&attn.o.weight)].into_iter().flatten() {
            rows.entry(&slice.name).or_default().push(slice.rows.clone());
        }
    }
    rows
}

/// The same tensors in the same shards, in the same order, with the same shapes; dtypes may differ where folded, and only
/// towards F32.
fn check_names(
    new: &Checkpoint,
    old: &Checkpoint,
    folded: &BTreeMap<&str, Vec<Range<usize>>>,
) -> Result<String, String> {
    let names = |checkpoint: &Checkpoint| checkpoint.tensor_names().map(str::to_owned).collect::<BTreeSet<_>>();
    let (found, expected) = (names(new), names(old));
    let missing = expected.difference(&found).map(|name| format!("{name} is missing"));
    let extra = found.difference(&expected).map(|name| format!("{name} is not in the base"));
    let mut problems: Vec<String> = missing.chain(extra).collect();
    let shards =
        |checkpoint: &Checkpoint| checkpoint.shards().iter().map(|shard| shard.file_name.clone()).collect::<Vec<_>>();
    if shards(new) != shards(old) {
        problems.push("the shards have other names".to_owned());
    }
    for name in found.intersection(&expected) {
        let (Some((shard, a)), Some((old_shard, b))) = (new.locate(name), old.locate(name)) else { continue };
        let widened = folded.contains_key(name.as_str()) && a.dtype == Dtype::F32;
        if a.shape != b.shape || !(a.dtype == b.dtype || widened) {
            problems.push(format!("{name}: expected {:?} {:?}, found {:?} {:?}", b.dtype, b.shape, a.dtype, a.shape));
        } else if shard != old_shard {
            problems.push(format!("{name} is in another shard"));
        }
    }
    for (a, b) in new.shards().iter().zip(old.shards()) {
        if a.file.metadata() != b.file.metadata() {
            problems.push(format!("{}: other metadata", a.file_name));
        }
    }
    if problems.is_empty() {
        Ok(format!("{}, as in the base", count(found.len(), "tensor")))
    } else {
        Err(list(&problems))
    }
}

/// Every element outside the folded rows is the base's, bit for bit; where a fused tensor was widened, the same number.
fn check_untouched(
    new: &Checkpoint,
    old: &Checkpoint,
    folded: &BTreeMap<&str, Vec<Range<usize>>>,
    monitor: &dyn Monitor,
) -> Result<Result<String, String>> {
    let names: Vec<&str> = new.tensor_names().collect();
    monitor.begin("compare", "bytes", new.n_weight_bytes());
    let problems: Result<Vec<Option<String>>> = names
        .par_iter()
        .map(|&name| {
            if monitor.interrupted() {
                return Err(InspectError::Interrupted);
            }
            let (Ok(a), Ok(b)) = (new.tensor(name), old.tensor(name)) else { return Ok(None) };
            monitor.advance(a.bytes.len() as u64);
            let problem = match folded.get(name) {
                None => (a.dtype != b.dtype || a.bytes != b.bytes).then(|| format!("{name} differs")),
                Some(rows) => {
                    differing_row(&a, &b, rows).map(|row| format!("{name}, row {row}, differs, and is not a value"))
                }
            };
            [new, old].iter().for_each(|checkpoint| checkpoint.release(name));
            Ok(problem)
        })
        .collect();
    monitor.end();
    let problems: Vec<String> = problems?.into_iter().flatten().collect();
    let untouched = names.iter().filter(|name| !folded.contains_key(**name)).count();
    Ok(if problems.is_empty() {
        Ok(format!("{}, byte for byte those of the base", count(untouched, "tensor")))
    } else {
        Err(list(&problems))
    })
}

/// The first row outside `folded` that differs.
fn differing_row(new: &TensorView<'_>, old: &TensorView<'_>, folded: &[Range<usize>]) -> Option<usize> {
    let n_rows = new.shape.first().copied().unwrap_or(0);
    if n_rows == 0 || new.shape != old.shape {
        return None;
    }
    let row = |view: &TensorView<'_>, at: usize| {
        let n_bytes = view.bytes.len() / n_rows;
        view.bytes[at * n_bytes..(at + 1) * n_bytes].to_vec()
    };
    let outside = (0..n_rows).filter(|at| !folded.iter().any(|rows| rows.contains(at)));
    outside.into_iter().find(|&at| {
        let (a, b) = (row(new, at), row(old, at));
        if new.dtype == old.dtype { a != b } else { widened(new.dtype, &a) != widened(old.dtype, &b) }
    })
}

/// Bit patterns of the elements as f32; none for a dtype that f32 does not hold.
fn widened(dtype: Dtype, bytes: &[u8]) -> Option<Vec<u32>> {
    let bits = |x: f32| x.to_bits();
    match dtype {
        Dtype::F32 => Some(bytes.as_chunks::<4>().0.iter().map(|&raw| u32::from_le_bytes(raw)).collect()),
        Dtype::BF16 => {
            Some(bytes.as_chunks::<2>().0.iter().map(|&raw| u32::from(u16::from_le_bytes(raw)) << 16).collect())
        }
        Dtype::F16 => {
            Some(bytes.as_chunks::<2>().0.iter().map(|&raw| bits(half::f16::from_le_bytes(raw).to_f32())).collect())
        }
        _ => None,
    }
}

/// Every file that is not a shard, byte for byte; of the index, `metadata.total_size` may differ.
fn check_other_files(new: &Checkpoint, old: &Checkpoint) -> Result<String, String> {
    let files = |checkpoint: &Checkpoint| checkpoint.other_files().map_err(|error| error.to_string());
    let (found, expected) = (files(new)?, files(old)?);
    let mut problems = Vec::new();
    problems.extend(expected.iter().filter(|name| !found.contains(name)).map(|name| format!("{name} is missing")));
    problems
        .extend(found.iter().filter(|name| !expected.contains(name)).map(|name| format!("{name} is not in the base")));
    for name in found.iter().filter(|name| expected.contains(name)) {
        match same_file(&new.dir().join(name), &old.dir().join(name), name) {
            Ok(true) => {}
            Ok(false) => problems.push(format!("{name} differs")),
            Err(error) => problems.push(format!("{name}: {error}")),
        }
    }
    if problems.is_empty() {
        Ok(format!("{}, byte for byte those of the base", count(found.len(), "file")))
    } else {
        Err(list(&problems))
    }
}

fn same_file(new: &Path, old: &Path, name: &str) -> std::io::Result<bool> {
    let (a, b) = (std::fs::read(new)?, std::fs::read(old)?);
    if a == b {
        return Ok(true);
    }
    let without_total = |bytes: &[u8]| -> Option<Value> {
        let mut index: Value = serde_json::from_slice(bytes).ok()?;
        index.get_mut("metadata")?.as_object_mut()?.remove("total_size")?;
        Some(index)
    };
    let (a, b) = (without_total(&a), without_total(&b));
    Ok(name.ends_with(".safetensors.index.json") && a.is_some() && a == b)
}

/// Every head's fold, from the two checkpoints alone, and against the sidecar's transform.
fn check_folds(
    report: &mut Report,
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    values: Option<&ValueSidecar>,
    base: &Base,
    monitor: &dyn Monitor,
) -> Result<()> {
    let heads: Vec<(usize, usize)> = spec
        .layers
        .iter()
        .enumerate()
        .flat_map(|(layer, spec)| (0..spec.attn.n_kv_heads).map(move |head| (layer, head)))
        .collect();
    monitor.begin("check folds", "heads", heads.len() as u64);
    let found: Result<Vec<(HeadCheck, Option<TransformCheck>)>> = heads
        .par_iter()
        .map(|&(layer, head)| {
            if monitor.interrupted() {
                return Err(InspectError::Interrupted);
            }
            let attn = &spec.layers[layer].attn;
            let old = HeadWeights::read(&base.checkpoint, attn, layer, head)?;
            let new = HeadWeights::read(checkpoint, attn, layer, head)?;
            let transform = values.map(|values| value_head(values, layer, head));
            let transform = transform.filter(|transform| transform.len() == attn.head_dim * attn.head_dim);
            let stated = transform.map(|transform| check_transform(&old, &new, &transform));
            monitor.advance(1);
            Ok((check_head(&old, &new), stated))
        })
        .collect();
    monitor.end();
    let found = found?;
    let of = |pick: fn(&HeadCheck) -> f64| {
        found.iter().map(|(check, _)| (check.layer, check.head, pick(check))).collect::<Vec<_>>()
    };
    add_check(
        report,
        "folded values",
        "W_V' is some T·W_V: largest deviation",
        &of(|check| worse(check.values, check.bias)),
    );
    add_check(report, "folded outputs", "W_O' is W_O·T⁻¹ of the same T: largest deviation", &of(|check| check.outputs));
    add_check(report, "same function", "W_O'·W_V' is W_O·W_V: largest deviation", &of(|check| check.product));
    if values.is_some() {
        let stated = |(check, stated): &(HeadCheck, Option<TransformCheck>)| {
            let excess = stated.as_ref().map_or(f64::INFINITY, |stated| worse(stated.values, stated.outputs));
            (check.layer, check.head, excess)
        };
        let stated: Vec<_> = found.iter().map(stated).collect();
        add_check(
            report,
            "value sidecar is what was folded",
            "W_V' and W_O' are those of the sidecar's T: largest deviation",
            &stated,
        );
    }
    for (check, stated) in found {
        let weights = [check.values, check.bias, check.outputs, check.product].into_iter().fold(0.0, worse);
        let sidecar = stated.as_ref().map(|stated| worse(stated.values, stated.outputs));
        report.head(check.layer, check.head).fold = Some(FoldAudit {
            rel_error: finite(check.rel_error),
            weights_excess: finite(weights),
            sidecar_excess: sidecar.and_then(finite),
            ok: check.ok && stated.is_none_or(|stated| stated.ok),
        });
    }
    Ok(())
}

/// A check over all heads: passes when no excess is above 1.
fn add_check(report: &mut Report, name: &str, what: &str, heads: &[(usize, usize, f64)]) {
    let bad: Vec<String> = heads
        .iter()
        .filter(|(_, _, excess)| excess.is_nan() || *excess > 1.0)
        .map(|(layer, head, excess)| {
            format!("layer {layer}, KV head {head}: {} times what rounding explains", shown(*excess))
        })
        .collect();
    let largest = heads.iter().fold(0.0, |a, &(_, _, excess)| worse(a, excess));
    if bad.is_empty() {
        report.check(
            name,
            true,
            format!("{what} {} of what rounding explains, {}", shown(largest), count(heads.len(), "head")),
        );
    } else {
        report.check(name, false, list(&bad));
    }
}
