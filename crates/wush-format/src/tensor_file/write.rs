//! Writing a safetensors file: the bytes depend on the content alone, and pass through one buffer.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::Path;

use safetensors::Dtype;

use super::header::{HeaderEntry, byte_len, encode_header};
use crate::atomic::AtomicFile;
use crate::hash::{HashingWriter, Sha};
use crate::{FormatError, Result};

/// Bytes gathered before a write.
const BUFFER_BYTES: usize = 1 << 20;

/// A tensor to be written: little-endian bytes.
#[derive(Debug, Clone)]
pub struct NewTensor {
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// The elements, little-endian.
    pub bytes: Vec<u8>,
}

impl NewTensor {
    /// From f64 values. `shape` must hold `values.len()` elements; [`write_tensor_file`] refuses the tensor otherwise.
    pub fn f64(shape: &[usize], values: &[f64]) -> Self {
        Self { dtype: Dtype::F64, shape: shape.to_vec(), bytes: little_endian(values, |v| v.to_le_bytes()) }
    }

    /// From f32 values, likewise.
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        Self { dtype: Dtype::F32, shape: shape.to_vec(), bytes: little_endian(values, |v| v.to_le_bytes()) }
    }

    /// From raw bytes (U8), likewise.
    pub fn u8(shape: &[usize], values: &[u8]) -> Self {
        Self { dtype: Dtype::U8, shape: shape.to_vec(), bytes: values.to_vec() }
    }
}

fn little_endian<T: Copy, const N: usize>(values: &[T], to_bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of_val(values));
    for &value in values {
        bytes.extend_from_slice(&to_bytes(value));
    }
    bytes
}

/// Writes a safetensors file whose bytes depend on the content alone, atomically: a sibling temporary file, synced,
/// then renamed over `path`. Tensors lie in order of falling element size, then name, so that each is aligned.
/// Returns the file's digest and length.
///
/// # Errors
/// `Io`, `Busy`; `WrongTensor` when a shape and its bytes disagree; `Invalid` for a reserved name or a header that is
/// too long.
pub fn write_tensor_file(
    path: &Path,
    tensors: &BTreeMap<String, NewTensor>,
    metadata: &BTreeMap<String, String>,
) -> Result<(Sha, u64)> {
    let mut ordered: Vec<_> = tensors.iter().collect();
    ordered.sort_by_key(|(name, tensor)| (Reverse(tensor.dtype.bitsize()), *name));
    for (name, tensor) in &ordered {
        check_length(path, name, tensor)?;
    }
    let entries: Vec<_> =
        ordered.iter().map(|(name, tensor)| HeaderEntry { name, dtype: tensor.dtype, shape: &tensor.shape }).collect();
    let header = encode_header(path, &entries, metadata)?;

    let io = |e| FormatError::io(path, "write", e);
    let mut writer = BufWriter::with_capacity(BUFFER_BYTES, HashingWriter::new(AtomicFile::create(path)?));
    writer.write_all(&header).map_err(io)?;
    for (_, tensor) in &ordered {
        writer.write_all(&tensor.bytes).map_err(io)?;
    }
    let (file, sha, n_bytes) = writer.into_inner().map_err(|e| io(e.into_error()))?.finish();
    file.commit()?;
    Ok((sha, n_bytes))
}

fn check_length(path: &Path, name: &str, tensor: &NewTensor) -> Result<()> {
    if byte_len(tensor.dtype, &tensor.shape) == Some(tensor.bytes.len()) {
        return Ok(());
    }
    Err(FormatError::WrongTensor {
        path: path.to_owned(),
        name: name.to_owned(),
        expected: format!("the bytes of {} {:?}", tensor.dtype, tensor.shape),
        found: format!("{} bytes", tensor.bytes.len()),
    })
}
