//! What the files of per-layer matrices share: `layers.{i}.{role}` tensors of shape `[n_heads, d, d]`, and metadata that
//! names the format and its version.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::str::FromStr;

use crate::json::shown;
use crate::tensor_file::TensorFile;
use crate::text::refuse_active_metadata;
use crate::{FormatError, Result};

/// Layer ids are below this: far above every model, small enough to count up to.
pub(crate) const MAX_LAYERS: usize = 1 << 16;
/// Metadata key of the format's name.
pub(crate) const FORMAT_KEY: &str = "format";
/// Metadata key of the format's version.
pub(crate) const VERSION_KEY: &str = "version";

pub(crate) fn tensor_name(layer: usize, role: &str) -> String {
    format!("layers.{layer}.{role}")
}

pub(crate) fn format_metadata(format: &str, version: u32) -> BTreeMap<String, String> {
    BTreeMap::from([(FORMAT_KEY.to_owned(), format.to_owned()), (VERSION_KEY.to_owned(), version.to_string())])
}

/// Refuses a file of another format or version, metadata that could draw on a terminal, and entries besides `keys`.
pub(crate) fn check_format(file: &TensorFile, format: &'static str, version: u32, keys: &[&str]) -> Result<()> {
    let found = file.metadata().get(FORMAT_KEY).map_or("", String::as_str);
    if found != format {
        let detail = format!("expected the metadata entry format = {format}, found {}", shown(found));
        return Err(FormatError::invalid(file.path(), format, detail));
    }
    let found = file.meta(VERSION_KEY)?;
    if found != version.to_string() {
        let (path, found) = (file.path().to_owned(), shown(found));
        return Err(FormatError::Version { path, kind: format, found, expected: version });
    }
    refuse_active_metadata(file, format)?;
    let known = |key: &str| key == FORMAT_KEY || key == VERSION_KEY || keys.contains(&key);
    match file.metadata().keys().find(|key| !known(key)) {
        Some(key) => Err(FormatError::invalid(file.path(), format, format!("unknown metadata entry {}", shown(key)))),
        None => Ok(()),
    }
}

/// What the layers of a file have.
pub(crate) struct Roles {
    /// In every layer.
    pub(crate) required: &'static [&'static str],
    /// In every layer or in none.
    pub(crate) optional: &'static [&'static str],
}

/// The layer ids of a file whose every tensor is `layers.{i}.{role}`, with the roles that it should have; there is at
/// least one layer.
pub(crate) fn layer_ids(file: &TensorFile, format: &'static str, roles: &Roles) -> Result<BTreeSet<usize>> {
    let mut ids = BTreeSet::new();
    for name in file.tensors().keys() {
        match parse_name(name) {
            Some((layer, role)) if roles.required.contains(&role) || roles.optional.contains(&role) => {
                ids.insert(layer)
            }
            _ => return Err(FormatError::invalid(file.path(), format, format!("unknown tensor {}", shown(name)))),
        };
    }
    if ids.is_empty() {
        return Err(FormatError::invalid(file.path(), format, "it holds no layer"));
    }
    let there = roles.optional.iter().filter(|role| ids.iter().any(|&layer| has(file, layer, role)));
    for role in roles.required.iter().chain(there) {
        ids.iter().try_for_each(|&layer| file.tensor(&tensor_name(layer, role)).map(|_| ()))?;
    }
    Ok(ids)
}

/// Whether a layer has a tensor of this role.
pub(crate) fn has(file: &TensorFile, layer: usize, role: &str) -> bool {
    file.tensors().contains_key(&tensor_name(layer, role))
}

/// `layers.{i}.{role}`, `i` in its one decimal spelling and below [`MAX_LAYERS`].
fn parse_name(name: &str) -> Option<(usize, &str)> {
    let (digits, role) = name.strip_prefix("layers.")?.split_once('.')?;
    let layer: usize = digits.parse().ok()?;
    (layer < MAX_LAYERS && layer.to_string() == digits).then_some((layer, role))
}

/// `[n_heads, d]` of a tensor of shape `[n_heads, d, d]`, both at least 1.
pub(crate) fn head_shape(file: &TensorFile, name: &str) -> Result<[usize; 2]> {
    match *file.tensor(name)?.shape {
        [n_heads, rows, columns] if n_heads > 0 && rows > 0 && rows == columns => Ok([n_heads, rows]),
        ref shape => Err(FormatError::WrongTensor {
            path: file.path().to_owned(),
            name: name.to_owned(),
            expected: "shape [n_heads, d, d]".to_owned(),
            found: format!("{shape:?}"),
        }),
    }
}

/// Refuses a NaN or an infinity in the tensor `name`; `place` says in words where an element is.
fn check_numbers(
    path: &Path,
    name: &str,
    mut values: impl Iterator<Item = f64>,
    place: impl Fn(usize) -> String,
) -> Result<()> {
    let Some(at) = values.position(|value| !value.is_finite()) else { return Ok(()) };
    Err(FormatError::WrongTensor {
        path: path.to_owned(),
        name: name.to_owned(),
        expected: "finite numbers".to_owned(),
        found: format!("NaN or infinity in {}", place(at)),
    })
}

/// Refuses a NaN or an infinity among the matrices `[n_heads, dim, dim]` of the tensor `name`.
pub(crate) fn check_finite(path: &Path, name: &str, dim: usize, values: impl Iterator<Item = f64>) -> Result<()> {
    let dim = dim.max(1);
    let place = |at| format!("head {}, row {}, column {}", at / dim / dim, at / dim % dim, at % dim);
    check_numbers(path, name, values, place)
}

/// The same among the rows `[n_heads, dim]` of the tensor `name`.
pub(crate) fn check_finite_rows(path: &Path, name: &str, dim: usize, values: impl Iterator<Item = f64>) -> Result<()> {
    let dim = dim.max(1);
    check_numbers(path, name, values, |at| format!("head {}, coordinate {}", at / dim, at % dim))
}

/// A layer has one of each role a KV head.
pub(crate) fn check_same_heads(path: &Path, layer: usize, role: &str, n_key: usize, n_value: usize) -> Result<()> {
    if n_key == n_value {
        return Ok(());
    }
    Err(FormatError::WrongTensor {
        path: path.to_owned(),
        name: tensor_name(layer, role),
        expected: format!("{n_key} heads, as the keys have"),
        found: format!("{n_value} heads"),
    })
}

/// A metadata entry that must be there and parse.
pub(crate) fn parse_meta<T>(file: &TensorFile, format: &'static str, key: &str) -> Result<T>
where
    T: FromStr,
    T::Err: std::fmt::Display,
{
    let text = file.meta(key)?;
    text.parse()
        .map_err(|e| FormatError::invalid(file.path(), format, format!("metadata entry {key} = {}: {e}", shown(text))))
}
