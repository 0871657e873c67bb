//! A file of `torch.save`: a zip archive, nothing compressed, of a pickle program and the raw bytes of its tensors.
//!
//! Enters: dictionaries, numbers, text and f32 tensors. Leaves: a file that `torch.load(weights_only=True)` reads; the same
//! content gives the same bytes. Source: torch's serialization format, version 3 of its archives.

use std::fs::File;
use std::io::{Cursor, Write};
use std::path::Path;

use wush_format::FormatError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

use crate::{ExportError, Result, pickle};

/// The folder of all entries: what torch takes where a file has no name.
const ROOT: &str = "archive";
/// Version of torch's archives.
const VERSION: &[u8] = b"3\n";
/// Byte order of the tensors, as torch names it.
const BYTE_ORDER: &[u8] = b"little";
/// Where a tensor's bytes begin, in the file: what torch's own writer does, for readers that map the file.
const ALIGNMENT: u16 = 64;

/// What a file holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A whole number, below 2³¹ in a file.
    Int(usize),
    /// Text.
    Text(String),
    /// A dictionary, in this order.
    Dict(Vec<(Value, Value)>),
    /// A tensor.
    Tensor(Tensor),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// A contiguous, row-major f32 tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    data: Vec<f32>,
}

impl Tensor {
    /// None where `data` has another number of elements than `shape` says.
    pub fn new(shape: Vec<usize>, data: Vec<f32>) -> Option<Self> {
        let n = shape.iter().try_fold(1_usize, |n, &dimension| n.checked_mul(dimension))?;
        (n == data.len()).then_some(Self { shape, data })
    }

    /// Its dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its elements, row-major.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// Elements between neighbours of each dimension.
    pub(crate) fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.shape.len()];
        for i in (1..strides.len()).rev() {
            strides[i - 1] = strides[i] * self.shape[i].max(1);
        }
        strides
    }
}

/// Writes `value` to `path`, a new file.
///
/// # Errors
/// `Io`; `TooLarge` for what the layout cannot hold.
pub fn write_torch_file(path: &Path, value: &Value) -> Result<()> {
    let (program, storages) = pickle::encode(value)?;
    let io = |e: std::io::Error| ExportError::from(FormatError::io(path, "write", e));
    let mut file = File::create_new(path).map_err(|e| FormatError::io(path, "create", e))?;
    // In memory first: rotations take some megabytes, and an archive whose writing fails speaks of it on stderr itself.
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let mut put = |name: &str, bytes: &[u8]| -> std::io::Result<()> {
        zip.start_file(format!("{ROOT}/{name}"), options())?;
        zip.write_all(bytes)
    };
    put("data.pkl", &program).map_err(io)?;
    put("byteorder", BYTE_ORDER).map_err(io)?;
    for (key, data) in storages.iter().enumerate() {
        put(&format!("data/{key}"), &little_endian(data)).map_err(io)?;
    }
    put("version", VERSION).map_err(io)?;
    let archive = zip.finish().map_err(|e| io(e.into()))?.into_inner();
    file.write_all(&archive).map_err(io)
}

/// Entries as they are, without a time, at [`ALIGNMENT`].
fn options() -> SimpleFileOptions {
    SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(DateTime::DEFAULT)
        .with_alignment(ALIGNMENT)
}

fn little_endian(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_has_as_many_elements_as_its_shape_says() {
        let tensor = Tensor::new(vec![2, 3, 4], vec![0.0; 24]).expect("24 elements");
        assert_eq!(tensor.strides(), [12, 4, 1]);
        assert_eq!(Tensor::new(vec![2, 3], vec![0.0; 5]), None);
        assert_eq!(Tensor::new(vec![usize::MAX, 2], vec![0.0; 2]), None, "an overflow is no shape");
    }

    #[test]
    fn a_file_that_is_there_is_not_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.pt");
        write_torch_file(&path, &Value::Int(1)).expect("written");
        let before = std::fs::read(&path).expect("read");
        let error = write_torch_file(&path, &Value::Int(2)).expect_err("it is there");
        assert!(matches!(error, ExportError::Format(FormatError::Io { .. })), "{error}");
        assert_eq!(std::fs::read(&path).expect("read"), before);
    }
}
