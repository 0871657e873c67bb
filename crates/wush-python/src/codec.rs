//! Quantizers on Python's buffers. Enters: token-heads in f32. Leaves: packed bytes, and numbers again; the work runs on all
//! cores without Python's lock.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use rayon::prelude::*;
use wush_quant::{Bits, Feedback, Kind, Method, QuantError, Role};

use crate::buffer::{Numbers, check_axis, view};
use crate::error::{BindingError, Result, not_forked};

/// Tokens that one task packs: several of the feedback's blocks of 16.
const TOKENS_PER_TASK: usize = 64;

/// A quantizer for heads of one dimension, with error feedback where there is some.
#[pyclass(frozen, module = "wush_kv")]
pub(crate) struct Codec {
    codec: wush_quant::Codec,
    /// One a KV head.
    feedback: Option<Vec<Feedback>>,
}

impl Codec {
    /// `lower`: L of every KV head, `[n_kv_heads, d, d]`.
    pub(crate) fn make(head_dim: usize, named: Named<'_>, lower: Option<&[f32]>) -> Result<Self> {
        let Named { bits, method, role, scales } = named;
        let method: Method = method.parse()?;
        let quantizer = method.quantizer(Bits::try_from(bits)?, parse_role(role)?, scales.parse()?)?;
        let codec = wush_quant::Codec::new(head_dim, quantizer)?;
        Ok(Self { codec, feedback: lower.map(|lower| feedback(head_dim, lower)).transpose()? })
    }

    /// `x`: `[groups, tokens, d]`; group g is of KV head `g mod n_kv_heads`. Returns `[groups, tokens, n_bytes]`.
    fn pack_groups(&self, x: &[f32], n_tokens: usize) -> Result<Vec<u8>> {
        let (d, n_bytes) = (self.codec.layout().head_dim(), self.codec.layout().n_bytes());
        let mut packed = vec![0; x.len() / d * n_bytes];
        let groups = x.par_chunks(n_tokens * d).zip(packed.par_chunks_mut(n_tokens * n_bytes)).enumerate();
        groups.try_for_each(|(group, (x, packed))| {
            let feedback = self.feedback.as_ref().map(|of_heads| &of_heads[group % of_heads.len()]);
            let blocks = x.par_chunks(TOKENS_PER_TASK * d).zip(packed.par_chunks_mut(TOKENS_PER_TASK * n_bytes));
            blocks.enumerate().try_for_each(|(block, (x, packed))| {
                let done = match feedback {
                    Some(feedback) => self.codec.pack_with_feedback(x, feedback, packed),
                    None => self.codec.pack(x, packed),
                };
                done.map_err(|error| placed(error, group * n_tokens + block * TOKENS_PER_TASK))
            })
        })?;
        Ok(packed)
    }
}

/// A quantizer as Python names it.
#[derive(Clone, Copy)]
pub(crate) struct Named<'a> {
    pub(crate) bits: u8,
    pub(crate) method: &'a str,
    pub(crate) role: &'a str,
    pub(crate) scales: &'a str,
}

#[pymethods]
impl Codec {
    #[new]
    #[pyo3(signature = (head_dim, bits, *, method = "quest", role = "key", scales = "bf16", feedback = None))]
    fn new(
        py: Python<'_>,
        head_dim: usize,
        bits: u8,
        method: &str,
        role: &str,
        scales: &str,
        feedback: Option<PyBuffer<f32>>,
    ) -> PyResult<Self> {
        let lower = feedback.map(|lower| Numbers::read(py, &lower, "feedback")).transpose()?;
        if let Some(Numbers { shape, .. }) = &lower {
            check_axis("feedback's last axis", head_dim, shape[shape.len() - 1])?;
            check_axis("feedback's last but one axis", head_dim, shape[shape.len() - 2])?;
        }
        let named = Named { bits, method, role, scales };
        Ok(Self::make(head_dim, named, lower.as_ref().map(|lower| lower.data.as_slice()))?)
    }

    /// Coordinates of a head.
    #[getter]
    fn head_dim(&self) -> usize {
        self.codec.layout().head_dim()
    }

    /// Bits a code.
    #[getter]
    fn bits(&self) -> u8 {
        self.codec.quantizer().bits().get()
    }

    /// α of QuEST's grid (Eq. 5); none for another rule.
    #[getter]
    fn alpha(&self) -> Option<f64> {
        match self.codec.quantizer().kind() {
            Kind::Quest { alpha } => Some(alpha),
            Kind::Oscar { .. } => None,
        }
    }

    /// Bytes of a packed token-head.
    #[getter]
    fn n_bytes(&self) -> usize {
        self.codec.layout().n_bytes()
    }

    /// Whether errors are fed back.
    #[getter]
    fn has_feedback(&self) -> bool {
        self.feedback.is_some()
    }

    fn __repr__(&self) -> String {
        let feedback = if self.feedback.is_some() { ", with feedback" } else { "" };
        format!("Codec({}{feedback}, d = {})", self.codec.quantizer(), self.head_dim())
    }

    /// Packs `x`, float32 `[…, tokens, d]`, with feedback `[…, n_kv_heads, tokens, d]`.
    fn pack<'py>(&self, py: Python<'py>, x: PyBuffer<f32>) -> PyResult<Bound<'py, PyAny>> {
        not_forked()?;
        let x = Numbers::read(py, &x, "x")?;
        check_axis("x's last axis", self.head_dim(), x.width())?;
        let axes = x.shape.len();
        if let Some(of_heads) = &self.feedback {
            let n_heads = if axes > 2 { x.shape[axes - 3] } else { 1 };
            check_axis("x's heads (last axis but two)", of_heads.len(), n_heads)?;
        }
        let n_tokens = x.shape[axes - 2];
        let packed = py.detach(|| self.pack_groups(&x.data, n_tokens))?;
        let mut shape = x.shape;
        shape[axes - 1] = self.n_bytes();
        view(py, &packed, "B", &shape)
    }

    /// Unpacks uint8 `[…, tokens, n_bytes]` to float32 `[…, tokens, d]`.
    fn unpack<'py>(&self, py: Python<'py>, packed: PyBuffer<u8>) -> PyResult<Bound<'py, PyAny>> {
        let packed = Numbers::read(py, &packed, "packed")?;
        check_axis("packed's last axis", self.n_bytes(), packed.width())?;
        let mut x = vec![0.0; packed.data.len() / self.n_bytes() * self.head_dim()];
        py.detach(|| self.codec.unpack(&packed.data, &mut x)).map_err(BindingError::from)?;
        let mut shape = packed.shape;
        let last = shape.len() - 1;
        shape[last] = self.head_dim();
        view(py, bytemuck::cast_slice(&x), "f", &shape)
    }
}

/// One encoder a head, from `[n_kv_heads, d, d]`.
pub(crate) fn feedback(head_dim: usize, lower: &[f32]) -> Result<Vec<Feedback>> {
    Ok(lower.chunks_exact(head_dim * head_dim).map(|lower| Feedback::new(head_dim, lower)).collect::<Result<_, _>>()?)
}

/// "key" or "value".
pub(crate) fn parse_role(text: &str) -> Result<Role> {
    match text {
        "key" => Ok(Role::Key),
        "value" => Ok(Role::Value),
        _ => Err(BindingError::Argument {
            what: "role",
            expected: "\"key\" or \"value\"".to_owned(),
            found: format!("{text:?}"),
        }),
    }
}

/// The same error with the token counted over the whole input.
fn placed(error: QuantError, first: usize) -> BindingError {
    match error {
        QuantError::OutOfRange { token, coordinate, value } => {
            QuantError::OutOfRange { token: first + token, coordinate, value }.into()
        }
        other => other.into(),
    }
}
