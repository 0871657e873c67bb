//! Python's buffers in and out. Enters: C-contiguous buffers of one element type. Leaves: their numbers, and memory views with a
//! shape.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyMemoryView};

use crate::error::{BindingError, Result};

/// A buffer's numbers and its shape; numbers are copied, so that Python may go on while they are used.
pub(crate) struct Numbers<T> {
    pub(crate) data: Vec<T>,
    pub(crate) shape: Vec<usize>,
}

impl<T: Element> Numbers<T> {
    /// Reads a buffer of at least two axes and one element, `what` in messages.
    pub(crate) fn read(py: Python<'_>, buffer: &PyBuffer<T>, what: &'static str) -> PyResult<Self> {
        let format = buffer.format().to_string_lossy();
        let is_swapped = format.starts_with(if cfg!(target_endian = "little") { ['>', '!'] } else { ['<', '<'] });
        if is_swapped {
            let expected = "numbers in this machine's order of bytes".to_owned();
            return Err(BindingError::Argument { what, expected, found: format!("format {format:?}") }.into());
        }
        let shape = buffer.shape().to_vec();
        if shape.len() < 2 || shape.contains(&0) {
            let expected = "two axes or more, none empty".to_owned();
            return Err(BindingError::Argument { what, expected, found: format!("{shape:?}") }.into());
        }
        Ok(Self { data: buffer.to_vec(py)?, shape })
    }

    /// The last axis.
    pub(crate) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// Refuses an axis of another length.
pub(crate) fn check_axis(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(BindingError::Argument { what, expected: expected.to_string(), found: found.to_string() })
}

/// Bytes as a writable memory view of elements `format` ("f", "B") and of `shape`.
pub(crate) fn view<'py>(py: Python<'py>, bytes: &[u8], format: &str, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    let view = PyMemoryView::from(&PyByteArray::new(py, bytes))?;
    view.call_method1("cast", (format, shape.to_vec()))
}
