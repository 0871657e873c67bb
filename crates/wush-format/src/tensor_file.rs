//! safetensors files: opened as hostile input, written deterministically.
//!
//! Reading memory-maps the file and checks the header before anything else is believed: header length against the
//! file and a cap, unique names, known dtypes, `product(shape) * dtype size == end - begin` in checked arithmetic,
//! and ranges that tile the data section without gap or overlap up to the file's end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::hash::Sha;
use crate::Result;

pub use safetensors::Dtype;

/// Where a tensor lies in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// First and one-past-last byte, from the start of the file.
    pub range: std::ops::Range<usize>,
}

/// A borrowed tensor: row-major little-endian bytes.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: &'a [usize],
    /// The elements.
    pub bytes: &'a [u8],
}

/// An open, memory-mapped safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    map: memmap2::Mmap,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
    data_start: usize,
}

impl TensorFile {
    /// Maps `path` and checks its header.
    ///
    /// # Errors
    /// `Io` or `Invalid`.
    pub fn open(path: &Path) -> Result<Self> {
        todo!("{}", path.display())
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors by name, sorted.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// `__metadata__`, empty when absent.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The bytes before the data section: the 8-byte length and the JSON header, as they are.
    pub fn header_bytes(&self) -> &[u8] {
        &self.map[..self.data_start]
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// `MissingTensor`.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        todo!("{name}")
    }

    /// An F64 tensor of exactly this shape, copied out.
    ///
    /// # Errors
    /// `MissingTensor`, `WrongTensor`.
    pub fn f64(&self, name: &str, shape: &[usize]) -> Result<Vec<f64>> {
        todo!("{name} {shape:?}")
    }

    /// An F32 tensor of exactly this shape, copied out.
    ///
    /// # Errors
    /// `MissingTensor`, `WrongTensor`.
    pub fn f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        todo!("{name} {shape:?}")
    }

    /// A metadata entry that must be there.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn meta(&self, key: &str) -> Result<&str> {
        todo!("{key}")
    }
}

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
    /// From f64 values. `shape` must hold `values.len()` elements.
    pub fn f64(shape: &[usize], values: &[f64]) -> Self {
        todo!("{shape:?} {}", values.len())
    }
    /// From f32 values.
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        todo!("{shape:?} {}", values.len())
    }
    /// From raw bytes (U8).
    pub fn u8(shape: &[usize], values: &[u8]) -> Self {
        todo!("{shape:?} {}", values.len())
    }
}

/// Writes a safetensors file whose bytes depend on the content alone (names and metadata sorted), atomically: a
/// sibling temporary file, synced, then renamed over `path`. Returns its digest and length.
///
/// # Errors
/// `Io`.
pub fn write_tensor_file(
    path: &Path,
    tensors: &BTreeMap<String, NewTensor>,
    metadata: &BTreeMap<String, String>,
) -> Result<(Sha, u64)> {
    todo!("{} {} {}", path.display(), tensors.len(), metadata.len())
}
