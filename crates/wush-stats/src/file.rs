//! The statistics file: safetensors of f64 sums, `layers.{i}.{key_gram, query_gram, value_gram, output_gram}`
//! `[n_kv, d, d]`, `layers.{i}.key_sum` `[n_kv, d]`, where asked for `layers.{i}.{key_hessian, value_hessian,
//! weighted_value_gram}` `[n_kv, d, d]`, and [`StatsInfo`] as JSON in the metadata, with a hash over both.
//! Read as hostile input: whatever no calibration could have produced is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use wush_format::FormatError;
use wush_format::hash::Sha;
use wush_format::json::shown;
use wush_format::manifest::counts_fit;
use wush_format::seal::{check_seal, seal};
use wush_format::tensor_file::{NewTensor, TensorFile, write_tensor_file};
use wush_format::text::{is_plain, printable, refuse_active_metadata};
use wush_format::transforms::HeadMatrices;

use crate::attention::AttentionHessians;
use crate::statistics::{LayerStats, Statistics, StatsInfo};
use crate::{Result, StatsError};

/// The metadata entry `format` of a statistics file.
pub const FORMAT: &str = "wush-statistics";
/// Version of the file's layout.
pub const STATS_VERSION: u32 = 4;

/// Metadata key of the description.
const INFO: &str = "info";

/// Metadata key of how many sequences an unfinished run was to sum; finished statistics have none.
const UNFINISHED: &str = "unfinished";

/// What a layer has, besides `key_sum`.
const GRAMS: [&str; 4] = ["key_gram", "query_gram", "value_gram", "output_gram"];
/// What a layer has with `--hessian attention`.
const HESSIANS: [&str; 2] = ["key_hessian", "value_hessian"];
/// What a layer has after a second pass.
const WEIGHTED: &str = "weighted_value_gram";
const KEY_SUM: &str = "key_sum";

/// Layer ids are below this: far above every model.
const MAX_LAYERS: usize = 1 << 16;

/// Rounding of f64 sums, relative to sqrt(A_ii A_jj): n·2^-53 for n = 2^22 positions on either side of the diagonal.
pub(crate) const ROUNDING_REL_TOL: f64 = 1.0 / (1u64 << 30) as f64;

impl Statistics {
    /// Reads and checks a statistics file.
    ///
    /// The content must be what was written, by its hash. Every Gram matrix must be finite, symmetric within rounding, with
    /// a non-negative diagonal and `|A_ij| ≤ sqrt(A_ii A_jj)`; every layer complete and of one shape, the first as the
    /// description says; `(Σ k_i)² ≤ n Σ k_i²`, and the same along Σ k; the counts consistent.
    ///
    /// # Errors
    /// `Format`, naming the file and the tensor; `UnfinishedSums` for what an unfinished run saved.
    pub fn load(path: &Path) -> Result<Self> {
        Self::from_file(&TensorFile::open(path)?)
    }

    /// The same for a run that goes on from the file: what an unfinished run saved is read, too.
    ///
    /// # Errors
    /// `Format`, naming the file and the tensor.
    pub fn load_saved(path: &Path) -> Result<Self> {
        Self::read(&TensorFile::open(path)?)
    }

    /// The same on an open file.
    ///
    /// # Errors
    /// As [`Statistics::load`].
    pub fn from_file(file: &TensorFile) -> Result<Self> {
        let read = Self::read(file)?;
        match file.metadata().get(UNFINISHED) {
            Some(planned) => Err(StatsError::UnfinishedSums {
                path: file.path().to_owned(),
                done: read.info.sequence_hashes.len(),
                planned: printable(planned).into_owned(),
            }),
            None => Ok(read),
        }
    }

    fn read(file: &TensorFile) -> Result<Self> {
        let info = read_info(file)?;
        let mut layers = BTreeMap::new();
        for layer in layer_ids(file, &info)? {
            layers.insert(layer, read_layer(file, layer, &info)?);
        }
        check_heads(file.path(), &info, layers.values().next())?;
        for (&layer, stats) in &layers {
            check_magnitudes(file.path(), layer, stats, &info)?;
        }
        Ok(Self { layers, info, unfinished: false })
    }

    /// Writes the file, atomically and with the same bytes for the same content. Returns its SHA-256 and length.
    ///
    /// # Errors
    /// `Unfinished` between [`crate::Accumulator`]'s beginning and end, or after a pass that failed; `Format`, also for a
    /// description that could draw on a terminal.
    pub fn save(&self, path: &Path) -> Result<(Sha, u64)> {
        self.write(path, None)
    }

    /// Writes what a run of `planned` sequences has so far: only [`Statistics::load_saved`] reads it.
    ///
    /// # Errors
    /// As [`Statistics::save`].
    pub fn save_unfinished(&self, path: &Path, planned: usize) -> Result<(Sha, u64)> {
        self.write(path, Some(planned))
    }

    fn write(&self, path: &Path, planned: Option<usize>) -> Result<(Sha, u64)> {
        if self.unfinished {
            return Err(StatsError::Unfinished);
        }
        let mut tensors = BTreeMap::new();
        for (layer, stats) in &self.layers {
            let (n_kv, dim) = (stats.n_kv_heads(), stats.head_dim());
            for (role, matrices) in stats.matrices() {
                let name = tensor_name(*layer, role);
                check_matrices(path, &name, matrices)?;
                tensors.insert(name, NewTensor::f64(&[n_kv, dim, dim], &matrices.data));
            }
            tensors.insert(tensor_name(*layer, KEY_SUM), NewTensor::f64(&[n_kv, dim], &stats.key_sum));
        }
        let info = serde_json::to_string(&self.info).map_err(|e| invalid(path, format!("description: {e}")))?;
        check_text(path, &self.info)?;
        let metadata = [("format", FORMAT.into()), ("version", STATS_VERSION.to_string()), (INFO, info)];
        let unfinished = planned.map(|planned| (UNFINISHED, planned.to_string()));
        let mut metadata = metadata.into_iter().chain(unfinished).map(|(key, value)| (key.to_owned(), value)).collect();
        seal(&tensors, &mut metadata);
        Ok(write_tensor_file(path, &tensors, &metadata)?)
    }
}

fn read_info(file: &TensorFile) -> Result<StatsInfo> {
    let path = file.path();
    let format = file.metadata().get("format").map_or("", String::as_str);
    if format != FORMAT {
        let detail = format!("expected the metadata entry format = {FORMAT}, found {}", shown(format));
        return Err(invalid(path, detail).into());
    }
    let version = file.meta("version")?;
    if version != STATS_VERSION.to_string() {
        let (path, found) = (path.to_owned(), shown(version));
        return Err(FormatError::Version { path, kind: FORMAT, found, expected: STATS_VERSION }.into());
    }
    refuse_active_metadata(file, FORMAT)?;
    check_seal(file, FORMAT)?;
    let info: StatsInfo =
        serde_json::from_str(file.meta(INFO)?).map_err(|e| invalid(path, format!("metadata entry {INFO}: {e}")))?;
    check_counts(path, &info)?;
    Ok(info)
}

/// What a reader would refuse is not written.
fn check_text(path: &Path, info: &StatsInfo) -> Result<()> {
    let StatsInfo { tool, model_id, family, source, rope_scaling, device, compute, .. } = info;
    let texts = [tool, model_id, family, source, device, compute].into_iter().chain(rope_scaling);
    match texts.into_iter().find(|text| !is_plain(text)) {
        Some(text) => Err(invalid(path, format!("the string {} holds a control character", shown(text))).into()),
        None => Ok(()),
    }
}

/// The heads that the description names are the first layer's.
fn check_heads(path: &Path, info: &StatsInfo, first: Option<&LayerStats>) -> Result<()> {
    let StatsInfo { n_heads, n_kv_heads, head_dim, .. } = *info;
    let found = first.map(|layer| (layer.n_kv_heads(), layer.head_dim()));
    if found == Some((n_kv_heads, head_dim)) && n_heads >= n_kv_heads && n_heads % n_kv_heads == 0 {
        return Ok(());
    }
    let (kv, dim) = found.unwrap_or_default();
    let detail = format!(
        "the description says {n_heads} query and {n_kv_heads} KV heads of dimension {head_dim}, the first layer has {kv} KV \
         heads of dimension {dim}"
    );
    Err(invalid(path, detail).into())
}

fn check_counts(path: &Path, info: &StatsInfo) -> Result<()> {
    let StatsInfo { format_version, positions, max_seq_len, sequence_hashes, .. } = info;
    let n_sequences = sequence_hashes.len() as u64;
    if *format_version == STATS_VERSION && counts_fit(n_sequences, *max_seq_len, *positions) {
        return Ok(());
    }
    let detail = format!(
        "the counts contradict each other: version {format_version}, {n_sequences} sequences of at most {max_seq_len} \
         tokens, {positions} positions"
    );
    Err(invalid(path, detail).into())
}

/// The layer ids, all tensors being known.
fn layer_ids(file: &TensorFile, info: &StatsInfo) -> Result<BTreeSet<usize>> {
    let mut ids = BTreeSet::new();
    let known = |role: &str| {
        role == KEY_SUM
            || GRAMS.contains(&role)
            || (info.attention_hessians && HESSIANS.contains(&role))
            || (info.second_pass && role == WEIGHTED)
    };
    for name in file.tensors().keys() {
        match parse_name(name) {
            Some((layer, role)) if known(role) => ids.insert(layer),
            _ => return Err(invalid(file.path(), format!("unknown tensor {}", shown(name))).into()),
        };
    }
    if ids.is_empty() {
        return Err(invalid(file.path(), "it holds no layer").into());
    }
    Ok(ids)
}

/// `layers.{i}.{role}`, `i` in its one decimal spelling.
fn parse_name(name: &str) -> Option<(usize, &str)> {
    let (digits, role) = name.strip_prefix("layers.")?.split_once('.')?;
    let layer: usize = digits.parse().ok()?;
    (layer < MAX_LAYERS && layer.to_string() == digits).then_some((layer, role))
}

fn tensor_name(layer: usize, role: &str) -> String {
    format!("layers.{layer}.{role}")
}

fn read_layer(file: &TensorFile, layer: usize, info: &StatsInfo) -> Result<LayerStats> {
    let positions = info.positions;
    // Lengths are bounded by the file itself: the header's shapes were checked against its bytes.
    let key_sum = tensor_name(layer, KEY_SUM);
    let (n_kv, dim) = match *file.tensor(&key_sum)?.shape {
        [n_kv, dim] if n_kv > 0 && dim > 0 => (n_kv, dim),
        ref shape => return Err(wrong(file.path(), &key_sum, "shape [n_kv, d]", format!("{shape:?}")).into()),
    };
    let read = |role: &str| -> Result<HeadMatrices> {
        let name = tensor_name(layer, role);
        let matrices = HeadMatrices { n_heads: n_kv, dim, data: file.f64(&name, &[n_kv, dim, dim])? };
        check_matrices(file.path(), &name, &matrices)?;
        Ok(matrices)
    };
    let [key_gram, query_gram, value_gram, output_gram] = GRAMS;
    let stats = LayerStats {
        key_gram: read(key_gram)?,
        query_gram: read(query_gram)?,
        value_gram: read(value_gram)?,
        output_gram: read(output_gram)?,
        key_sum: file.f64(&key_sum, &[n_kv, dim])?,
        attention: info.attention_hessians.then(|| read_hessians(&read)).transpose()?,
        weighted_value_gram: info.second_pass.then(|| read(WEIGHTED)).transpose()?,
    };
    check_key_sum(file.path(), &key_sum, &stats, positions)?;
    check_mean_key(file.path(), &key_sum, &stats, positions)?;
    check_positions(file.path(), layer, &stats, positions)?;
    Ok(stats)
}

fn read_hessians(read: &impl Fn(&str) -> Result<HeadMatrices>) -> Result<AttentionHessians> {
    let [key, value] = HESSIANS;
    Ok(AttentionHessians { key: read(key)?, value: read(value)? })
}

/// Finite, symmetric, and no entry beyond what its diagonal allows (Cauchy-Schwarz).
fn check_matrices(path: &Path, name: &str, matrices: &HeadMatrices) -> Result<(), FormatError> {
    let dim = matrices.dim;
    for head in 0..matrices.n_heads {
        let gram = matrices.head(head);
        let at = |i: usize, j: usize| gram[i * dim + j];
        let refuse = |i: usize, j: usize, expected: &str| {
            wrong(path, name, expected, format!("{:e} in head {head}, row {i}, column {j}", at(i, j)))
        };
        for i in 0..dim {
            if !(at(i, i).is_finite() && at(i, i) >= 0.0) {
                return Err(refuse(i, i, "a finite diagonal of at least 0"));
            }
            for j in 0..i {
                let bound = at(i, i).sqrt() * at(j, j).sqrt();
                if !within(at(i, j), bound * (1.0 + ROUNDING_REL_TOL)) {
                    return Err(refuse(i, j, "a Gram matrix, |A_ij| <= sqrt(A_ii A_jj)"));
                }
                if !within(at(i, j) - at(j, i), bound * ROUNDING_REL_TOL) {
                    return Err(refuse(i, j, "a symmetric matrix"));
                }
            }
        }
    }
    Ok(())
}

/// Whether |x| ≤ bound; false for a NaN on either side.
pub(crate) fn within(x: f64, bound: f64) -> bool {
    x.abs() <= bound
}

/// (Σ k_i)² ≤ n Σ k_i² for every coordinate.
fn check_key_sum(path: &Path, name: &str, stats: &LayerStats, positions: u64) -> Result<()> {
    let dim = stats.head_dim();
    for (at, &sum) in stats.key_sum.iter().enumerate() {
        let (head, i) = (at / dim, at % dim);
        let bound = (positions as f64).sqrt() * stats.key_gram.head(head)[i * dim + i].sqrt();
        if !within(sum, bound * (1.0 + ROUNDING_REL_TOL)) {
            let expected = format!("at most {bound:e} in magnitude, given {positions} positions and key_gram");
            return Err(wrong(path, name, &expected, format!("{sum:e} in head {head}, coordinate {i}")).into());
        }
    }
    Ok(())
}

/// ‖s‖⁴ ≤ n sᵀGs with s = Σ k and G = Σ k kᵀ: the mean of (k·s)² is at least the square of the mean of k·s. Keys have a
/// large mean, so this ties the number of positions to the sums.
fn check_mean_key(path: &Path, name: &str, stats: &LayerStats, positions: u64) -> Result<()> {
    let dim = stats.head_dim();
    for (head, sum) in stats.key_sum.chunks_exact(dim).enumerate() {
        let gram = stats.key_gram.head(head);
        let image = |row: usize| gram[row * dim..][..dim].iter().zip(sum).map(|(g, s)| g * s).sum::<f64>();
        let energy = (0..dim).map(|row| sum[row] * image(row)).sum::<f64>();
        // What rounding of G explains of sᵀGs, since |δG_ij| ≤ tol·sqrt(G_ii G_jj).
        let rounding =
            (0..dim).map(|i| sum[i].abs() * gram[i * dim + i].sqrt()).sum::<f64>().powi(2) * ROUNDING_REL_TOL;
        let bound = positions as f64 * (energy + 2.0 * rounding);
        let square = sum.iter().map(|s| s * s).sum::<f64>().powi(2);
        // Sums beyond f64's range, of keys near the end of f32's, decide nothing.
        if bound.is_finite() && !within(square, bound * (1.0 + ROUNDING_REL_TOL)) {
            let expected = format!("a key sum that {positions} positions allow, ‖s‖⁴ at most {bound:e} given key_gram");
            return Err(wrong(path, name, &expected, format!("{square:e} in head {head}")).into());
        }
    }
    Ok(())
}

/// Without positions there is nothing to sum.
fn check_positions(path: &Path, layer: usize, stats: &LayerStats, positions: u64) -> Result<()> {
    let of_text = stats.matrices().filter(|(role, _)| *role != "output_gram");
    let summed = of_text.into_iter().find(|(_, gram)| gram.data.iter().any(|&x| x != 0.0));
    match summed {
        Some((role, _)) if positions == 0 => {
            Err(wrong(path, &tensor_name(layer, role), "zeros: there are no positions", "a sum".to_owned()).into())
        }
        _ => Ok(()),
    }
}

/// Keys, queries and values are f32: a sum of n squares is zero, or lies between the square of f32's smallest number and n times that
/// of its largest.
fn check_magnitudes(path: &Path, layer: usize, stats: &LayerStats, info: &StatsInfo) -> Result<()> {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let least = square(f32::from_bits(1));
    let sums = [("key_gram", &stats.key_gram, 1), ("query_gram", &stats.query_gram, info.n_heads)];
    for (role, matrices, n_heads) in sums.into_iter().chain([("value_gram", &stats.value_gram, 1)]) {
        let most = info.positions as f64 * n_heads as f64 * square(f32::MAX);
        let range = least * (1.0 - ROUNDING_REL_TOL)..=most * (1.0 + ROUNDING_REL_TOL);
        let dim = matrices.dim;
        let diagonal = |head: usize| (0..dim).map(move |i| (head, i, matrices.head(head)[i * dim + i]));
        let mut elements = (0..matrices.n_heads).flat_map(diagonal);
        if let Some((head, i, found)) = elements.find(|&(_, _, x)| x != 0.0 && !range.contains(&x)) {
            let expected = format!("zero or {:.2e} to {:.2e}, a sum of squares of f32", range.start(), range.end());
            let found = format!("{found:e} in head {head}, row {i}, column {i}");
            return Err(wrong(path, &tensor_name(layer, role), &expected, found).into());
        }
    }
    Ok(())
}

fn invalid(path: &Path, detail: impl Into<String>) -> FormatError {
    FormatError::invalid(path, FORMAT, detail)
}

fn wrong(path: &Path, name: &str, expected: &str, found: String) -> FormatError {
    FormatError::WrongTensor { path: path.to_owned(), name: name.to_owned(), expected: expected.to_owned(), found }
}
