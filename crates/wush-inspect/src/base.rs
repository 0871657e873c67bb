//! A folded checkpoint against its base: what must be identical is, and what was folded is the same function.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use wush_checkpoint::Checkpoint;
use wush_fold::{HeadCheck, HeadWeights, Roundings, TransformCheck, check_head, check_transform};
use wush_format::manifest::Manifest;
use wush_format::monitor::Monitor;
use wush_format::tensor_file::{Dtype, TensorView};
use wush_model::spec::ModelSpec;

use crate::bundle::StoredValues;
use crate::files::list;
use crate::hessian::{ValueHead, contradiction};
use crate::inspect::Base;
use crate::number::{count, finite, shown, worse};
use crate::report::{FoldAudit, Report};
use crate::sidecars::{feedback_head, value_head};
use crate::solver::Precision;
use crate::{InspectError, Result, coordinates, index, manifest};

/// What is compared with a base, and how.
pub(crate) struct Comparison<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) spec: &'a ModelSpec,
    /// A bundle's manifest, when it could be read.
    pub(crate) manifest: Option<&'a Manifest>,
    /// The transforms that were folded, and the feedback, of a bundle.
    pub(crate) values: &'a StoredValues,
    /// How often the weights may have been rounded since they were the base's.
    pub(crate) roundings: Roundings,
    pub(crate) base: &'a Base,
    pub(crate) monitor: &'a dyn Monitor,
}

impl Comparison<'_> {
    /// All comparisons with the base.
    pub(crate) fn run(&self, report: &mut Report) -> Result<()> {
        if let Some(difference) = other_model(&self.base.spec, self.spec) {
            // Whatever else differs follows from that.
            report.check("same model", false, format!("the base is another model: {difference}"));
            return Ok(());
        }
        let (new, old) = (self.checkpoint, &self.base.checkpoint);
        let folded = folded_rows(&self.base.spec);
        report.check_result("names and shapes", check_names(new, old, &folded));
        report.check_result("untouched tensors", check_untouched(new, old, &folded, self.monitor)?);
        report.check_result("other files", check_other_files(new, old));
        let same_model = *self.spec == self.base.spec;
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
            self.check_folds(report)?;
        }
        Ok(())
    }

    /// Every head's fold, from the two checkpoints alone, and against the sidecar's transform.
    fn check_folds(&self, report: &mut Report) -> Result<()> {
        let found = self.heads()?;
        let explained = match self.roundings {
            Roundings::One => "of what one rounding explains",
            Roundings::Two => "of what two roundings, of a fold and its undoing, explain",
        };
        let mut add = |name: &str, what: &str, pick: fn(&HeadCheck) -> f64| {
            let heads: Vec<_> =
                found.iter().map(|Found { check, .. }| (check.layer, check.head, pick(check))).collect();
            add_check(report, name, what, explained, &heads);
        };
        add("folded values", "W_V' is some T·W_V", |check| worse(check.values, check.bias));
        add("folded outputs", "W_O' is W_O·T⁻¹ of the same T", |check| check.outputs);
        add("same function", "W_O'·W_V' is W_O·W_V", |check| check.product);
        if self.values.transforms.is_some() {
            let stated = |Found { check, stated, .. }: &Found| {
                let excess = stated.as_ref().map_or(f64::INFINITY, |stated| worse(stated.values, stated.outputs));
                (check.layer, check.head, excess)
            };
            let stated: Vec<_> = found.iter().map(stated).collect();
            let what = "W_V' and W_O' are those of the sidecar's T";
            let explained =
                "of half a spacing of the stored numbers (1.00 is expected: some element is always half-way)";
            add_check(report, "value sidecar is what was folded", what, explained, &stated);
        }
        if let Some(stated) = self.manifest {
            if self.values.transforms.is_some() && !stated.layers.is_empty() {
                report.check_result("value transforms fit the base", unfit(&found));
            }
            let errors: Vec<_> = found.iter().map(|head| (head.check.layer, head.check.rel_error)).collect();
            let with_bias = self.spec.layers.iter().any(|layer| layer.attn.v.bias.is_some());
            report.check_result("fold error", manifest::check_fold_error(stated, &errors, with_bias));
        }
        if self.roundings == Roundings::Two {
            let coordinates: Vec<_> =
                found.iter().map(|head| (head.check.layer, head.check.head, head.coordinates)).collect();
            add_check(report, "same coordinates", "W_V' is W_V itself, T = I", explained, &coordinates);
        }
        found.into_iter().for_each(|found| found.put(report));
        Ok(())
    }

    /// Every KV head of every layer, in parallel, in their order.
    fn heads(&self) -> Result<Vec<Found>> {
        let layers = self.spec.layers.iter().enumerate();
        let heads: Vec<(usize, usize)> =
            layers.flat_map(|(layer, spec)| (0..spec.attn.n_kv_heads).map(move |head| (layer, head))).collect();
        self.monitor.begin("check folds", "heads", heads.len() as u64);
        let found = heads
            .par_iter()
            .map(|&(layer, head)| {
                if self.monitor.interrupted() {
                    return Err(InspectError::Interrupted);
                }
                let attn = &self.spec.layers[layer].attn;
                let old = HeadWeights::read(&self.base.checkpoint, attn, layer, head)?;
                let new = HeadWeights::read(self.checkpoint, attn, layer, head)?;
                let transform = self.values.transforms.as_ref().map(|values| value_head(values, layer, head));
                let transform = transform.filter(|transform| transform.len() == attn.head_dim * attn.head_dim);
                let stated = transform.as_ref().map(|transform| check_transform(&old, &new, transform));
                let record = self.manifest.map(manifest::record);
                let lower = self.values.feedback.as_ref().map(|feedback| feedback_head(feedback, layer, head));
                let misfit = transform.zip(record).and_then(|(matrix, record)| {
                    let stored = ValueHead { matrix: &matrix, lower: lower.as_deref() };
                    contradiction(&old, stored, &record, Precision::F32)
                });
                self.monitor.advance(1);
                let coordinates = match self.roundings {
                    Roundings::One => 0.0,
                    Roundings::Two => coordinates::excess(&old, &new),
                };
                Ok(Found { check: check_head(&old, &new, self.roundings), stated, misfit, coordinates })
            })
            .collect();
        self.monitor.end();
        found
    }
}

/// What tells at a glance that two decoders have nothing to do with each other; none where their shapes are the same.
pub(crate) fn other_model(base: &ModelSpec, spec: &ModelSpec) -> Option<String> {
    let shape = |spec: &ModelSpec| {
        let heads = spec.layers.iter().map(|layer| [layer.attn.n_heads, layer.attn.n_kv_heads, layer.attn.head_dim]);
        (spec.family, spec.hidden_size, spec.vocab_size, heads.collect::<Vec<_>>())
    };
    let named = |spec: &ModelSpec| {
        let (layers, hidden) = (count(spec.layers.len(), "layer"), spec.hidden_size);
        format!("{} of {layers}, {hidden} wide, with {} tokens", spec.family, spec.vocab_size)
    };
    (shape(base) != shape(spec)).then(|| format!("{}, and this is {}", named(base), named(spec)))
}

/// What was found of one head.
struct Found {
    check: HeadCheck,
    /// Of a bundle with a usable sidecar.
    stated: Option<TransformCheck>,
    /// What the manifest says of its transform and the base's weights contradict; see [`contradiction`].
    misfit: Option<String>,
    /// Of a plain checkpoint: see [`coordinates::excess`].
    coordinates: f64,
}

impl Found {
    /// Puts the figures into the report's head.
    fn put(self, report: &mut Report) {
        let Self { check, stated, misfit, coordinates } = self;
        let weights = [check.values, check.bias, check.outputs, check.product].into_iter().fold(0.0, worse);
        let sidecar = stated.as_ref().map(|stated| worse(stated.values, stated.outputs));
        report.head(check.layer, check.head).fold = Some(FoldAudit {
            rel_error: finite(check.rel_error),
            weights_excess: finite(weights),
            sidecar_excess: sidecar.and_then(finite),
            ok: check.ok && stated.is_none_or(|stated| stated.ok) && misfit.is_none() && coordinates <= 1.0,
        });
    }
}

/// Value transforms that cannot have been solved for the base's output projections.
fn unfit(found: &[Found]) -> Result<String, String> {
    let misfit = |Found { check, misfit, .. }: &Found| {
        Some(format!("layer {}, KV head {}: {}", check.layer, check.head, misfit.as_ref()?))
    };
    let problems: Vec<String> = found.iter().filter_map(misfit).collect();
    if problems.is_empty() { Ok(count(found.len(), "head")) } else { Err(list(&problems)) }
}

/// Rows that a fold may change, by tensor: values, value biases, output projections.
pub(crate) fn folded_rows(spec: &ModelSpec) -> BTreeMap<&str, Vec<Range<usize>>> {
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

/// Every file that is not a shard, byte for byte; of the index, `metadata.total_size` differs by what the tensors grew.
fn check_other_files(new: &Checkpoint, old: &Checkpoint) -> Result<String, String> {
    let files = |checkpoint: &Checkpoint| {
        let names = checkpoint.other_files().map_err(|error| error.to_string())?;
        Ok::<BTreeSet<String>, String>(names.into_iter().collect())
    };
    let (found, expected) = (files(new)?, files(old)?);
    let mut problems = Vec::new();
    problems.extend(expected.difference(&found).map(|name| format!("{name} is missing")));
    problems.extend(found.difference(&expected).map(|name| format!("{name} is not in the base")));
    let growth = i128::from(new.n_weight_bytes()) - i128::from(old.n_weight_bytes());
    for name in found.intersection(&expected) {
        let (a, b) = (new.dir().join(name), old.dir().join(name));
        match same_file(&a, &b).map(|same| same || (index::is_index(name) && index::same_but_grown(&a, &b, growth))) {
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

/// Compares a block at a time: a file beside the shards may be large.
fn same_file(new: &Path, old: &Path) -> std::io::Result<bool> {
    const BLOCK: u64 = 1 << 20;
    let (mut a, mut b) = (File::open(new)?, File::open(old)?);
    let (mut from_a, mut from_b) = (Vec::new(), Vec::new());
    loop {
        from_a.clear();
        from_b.clear();
        a.by_ref().take(BLOCK).read_to_end(&mut from_a)?;
        b.by_ref().take(BLOCK).read_to_end(&mut from_b)?;
        if from_a != from_b || from_a.is_empty() {
            return Ok(from_a == from_b);
        }
    }
}

/// A check over all heads: passes when no excess is above 1.
fn add_check(report: &mut Report, name: &str, what: &str, explained: &str, heads: &[(usize, usize, f64)]) {
    let bad: Vec<String> = heads
        .iter()
        .filter(|(_, _, excess)| excess.is_nan() || *excess > 1.0)
        .map(|(layer, head, excess)| format!("layer {layer}, KV head {head}: {} {explained}", shown(*excess)))
        .collect();
    let largest = heads.iter().fold(0.0, |a, &(_, _, excess)| worse(a, excess));
    if bad.is_empty() {
        report.check(
            name,
            true,
            format!("{what}: largest deviation {} {explained}, {}", shown(largest), count(heads.len(), "head")),
        );
    } else {
        report.check(name, false, format!("{what}: {}", list(&bad)));
    }
}
