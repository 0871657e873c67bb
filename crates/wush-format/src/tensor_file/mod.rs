//! safetensors files: opened as hostile input, written deterministically.
//!
//! Reading memory-maps the file and checks the header before anything else is believed: header length against the
//! file and a cap, unique names, known dtypes, `product(shape) * dtype size == end - begin` in checked arithmetic,
//! and ranges that tile the data section without gap or overlap up to the file's end. Elements may lie misaligned;
//! they are read by value.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::json::{open_regular, shown};
use crate::{FormatError, Result};

mod header;
mod write;

pub use header::{HeaderEntry, MAX_HEADER_BYTES, MAX_RANK, encode_header};
pub use safetensors::Dtype;
pub use write::{NewTensor, write_tensor_file};

/// Longest file, in bytes (8 TiB): above every checkpoint, below the address space of a 64-bit process.
pub const MAX_FILE_BYTES: u64 = 1 << 43;

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

/// An open safetensors file, memory-mapped or in memory.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    content: Content,
    header: header::Header,
}

#[derive(Debug)]
enum Content {
    Map(memmap2::Mmap),
    Memory(Vec<u8>),
}

impl Content {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Map(map) => map,
            Self::Memory(bytes) => bytes,
        }
    }
}

impl TensorFile {
    /// Maps `path` and checks its header. The file must not be truncated while it is open: the system answers a read
    /// behind the new end with SIGBUS.
    ///
    /// # Errors
    /// `Io` or `Invalid`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = open_regular(path)?;
        let n_bytes = file.metadata().map_err(|e| FormatError::io(path, "open", e))?.len();
        if n_bytes > MAX_FILE_BYTES || usize::try_from(n_bytes).is_err() {
            let detail = format!("{n_bytes} bytes, at most {MAX_FILE_BYTES} can be mapped");
            return Err(FormatError::invalid(path, header::KIND, detail));
        }
        if n_bytes == 0 {
            return Self::from_bytes(path, Vec::new());
        }
        // SAFETY: the map is read-only and private to this value, and every access goes through a slice of its
        // length. Its content may change under us when another process writes the file; all values read from it are
        // plain bytes, for which every bit pattern is valid, and the header is parsed into owned values once.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| FormatError::io(path, "map", e))?;
        Self::checked(path, Content::Map(map))
    }

    /// The same checks on a file that is in memory already; `path` is what messages call it.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        Self::checked(path, Content::Memory(bytes))
    }

    fn checked(path: &Path, content: Content) -> Result<Self> {
        let header = header::parse(path, content.bytes())?;
        Ok(Self { path: path.to_owned(), content, header })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors by name, sorted.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.header.tensors
    }

    /// `__metadata__`, empty when absent.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// The bytes before the data section: the 8-byte length and the JSON header, as they are.
    pub fn header_bytes(&self) -> &[u8] {
        &self.bytes()[..self.header.data_start]
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        self.content.bytes()
    }

    /// Says that bytes `range` will not be needed for a while: their pages leave this process's resident memory and are
    /// read again at the next access. Advice only; a file in memory ignores it.
    pub fn release(&self, range: std::ops::Range<usize>) {
        #[cfg(unix)]
        if let Content::Map(map) = &self.content {
            let len = range.end.min(map.len()).saturating_sub(range.start);
            // SAFETY: the map is a read-only map of a file and was never written, so a dropped page holds nothing that a
            // later access does not read again from the file; a failure leaves everything as it is.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, len) };
        }
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// `MissingTensor`.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let info = self
            .header
            .tensors
            .get(name)
            .ok_or_else(|| FormatError::MissingTensor { path: self.path.clone(), name: name.to_owned() })?;
        Ok(TensorView { dtype: info.dtype, shape: &info.shape, bytes: &self.bytes()[info.range.clone()] })
    }

    /// An F64 tensor of exactly this shape, copied out.
    ///
    /// # Errors
    /// `MissingTensor`, `WrongTensor`.
    pub fn f64(&self, name: &str, shape: &[usize]) -> Result<Vec<f64>> {
        let bytes = self.exactly(name, Dtype::F64, shape)?;
        Ok(bytes.as_chunks().0.iter().map(|&chunk| f64::from_le_bytes(chunk)).collect())
    }

    /// An F32 tensor of exactly this shape, copied out.
    ///
    /// # Errors
    /// `MissingTensor`, `WrongTensor`.
    pub fn f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let bytes = self.exactly(name, Dtype::F32, shape)?;
        Ok(bytes.as_chunks().0.iter().map(|&chunk| f32::from_le_bytes(chunk)).collect())
    }

    /// The bytes of a tensor of exactly this dtype and shape.
    fn exactly(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&[u8]> {
        let view = self.tensor(name)?;
        if view.dtype != dtype || view.shape != shape {
            return Err(FormatError::WrongTensor {
                path: self.path.clone(),
                name: name.to_owned(),
                expected: format!("{dtype} {shape:?}"),
                found: format!("{} {:?}", view.dtype, view.shape),
            });
        }
        Ok(view.bytes)
    }

    /// A metadata entry that must be there.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn meta(&self, key: &str) -> Result<&str> {
        self.header.metadata.get(key).map(String::as_str).ok_or_else(|| {
            FormatError::invalid(&self.path, header::KIND, format!("metadata entry {} is missing", shown(key)))
        })
    }
}
