//! Token-heads as they lie in memory: in full precision, or packed. Enters: rows in f32. Leaves: the same rows in f32, or
//! the packed bytes.

use half::bf16;
use wush_quant::{Codec, Feedback};

use crate::config::FullDtype;
use crate::kernels::widen;

/// Rows `[tokens, d]` in full precision.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Full {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Full {
    pub(crate) fn new(dtype: FullDtype) -> Self {
        match dtype {
            FullDtype::F32 => Self::F32(Vec::new()),
            FullDtype::Bf16 => Self::Bf16(Vec::new()),
        }
    }

    /// Elements held.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(rows) => rows.len(),
            Self::Bf16(rows) => rows.len(),
        }
    }

    /// Bytes allocated.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::F32(rows) => rows.capacity() * size_of::<f32>(),
            Self::Bf16(rows) => rows.capacity() * size_of::<bf16>(),
        }
    }

    /// Makes room for `n` more elements: doubling, but not beyond `usual` unless they need it.
    pub(crate) fn reserve(&mut self, n: usize, usual: usize) {
        let needed = self.len() + n;
        let (capacity, len) = match self {
            Self::F32(rows) => (rows.capacity(), rows.len()),
            Self::Bf16(rows) => (rows.capacity(), rows.len()),
        };
        if needed <= capacity {
            return;
        }
        let more = needed.max(usual.min(2 * capacity)) - len;
        match self {
            Self::F32(rows) => rows.reserve_exact(more),
            Self::Bf16(rows) => rows.reserve_exact(more),
        }
    }

    pub(crate) fn extend(&mut self, x: &[f32]) {
        match self {
            Self::F32(rows) => rows.extend_from_slice(x),
            Self::Bf16(rows) => rows.extend(x.iter().map(|&x| bf16::from_f32(x))),
        }
    }

    pub(crate) fn truncate(&mut self, n: usize) {
        match self {
            Self::F32(rows) => rows.truncate(n),
            Self::Bf16(rows) => rows.truncate(n),
        }
    }

    /// Drops the first `n` elements, and memory beyond `usual` elements if little of it is in use.
    pub(crate) fn drop_front(&mut self, n: usize, usual: usize) {
        fn shift<T: Copy>(rows: &mut Vec<T>, n: usize, usual: usize) {
            let left = rows.len() - n;
            if rows.capacity() > 2 * usual.max(left) {
                let mut kept = Vec::with_capacity(usual.max(left));
                kept.extend_from_slice(&rows[n..]);
                *rows = kept;
            } else {
                rows.drain(..n);
            }
        }
        match self {
            Self::F32(rows) => shift(rows, n, usual),
            Self::Bf16(rows) => shift(rows, n, usual),
        }
    }

    /// Elements `range` in f32; `scratch` is where they are widened, if they must be.
    pub(crate) fn read<'a>(&'a self, range: std::ops::Range<usize>, scratch: &'a mut Vec<f32>) -> &'a [f32] {
        match self {
            Self::F32(rows) => &rows[range],
            Self::Bf16(rows) => {
                scratch.resize(range.len(), 0.0);
                widen(&rows[range], scratch);
                scratch
            }
        }
    }

    /// The first `n` elements, little-endian.
    pub(crate) fn to_le_bytes(&self, n: usize, into: &mut Vec<u8>) {
        match self {
            Self::F32(rows) => rows[..n].iter().for_each(|x| into.extend_from_slice(&x.to_le_bytes())),
            Self::Bf16(rows) => rows[..n].iter().for_each(|x| into.extend_from_slice(&x.to_le_bytes())),
        }
    }

    /// Appends elements that [`Full::to_le_bytes`] wrote.
    pub(crate) fn extend_from_le_bytes(&mut self, bytes: &[u8]) {
        match self {
            Self::F32(rows) => rows.extend(bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x))),
            Self::Bf16(rows) => rows.extend(bytes.as_chunks().0.iter().map(|&x| bf16::from_le_bytes(x))),
        }
    }
}

/// How the keys, or the values, of a layer are stored outside the windows.
#[derive(Debug, Clone)]
pub(crate) enum Store {
    Full(FullDtype),
    Packed(Codec),
}

impl Store {
    /// No rows, with room for `n_tokens`.
    fn empty(&self, head_dim: usize, n_tokens: usize) -> Rows {
        match self {
            Self::Full(FullDtype::F32) => Rows::Full(Full::F32(Vec::with_capacity(n_tokens * head_dim))),
            Self::Full(FullDtype::Bf16) => Rows::Full(Full::Bf16(Vec::with_capacity(n_tokens * head_dim))),
            Self::Packed(codec) => Rows::Packed(Vec::with_capacity(n_tokens * codec.layout().n_bytes())),
        }
    }

    /// Elements ([`Rows::Full`]) or bytes ([`Rows::Packed`]) of one token-head.
    pub(crate) fn row_len(&self, head_dim: usize) -> usize {
        match self {
            Self::Full(_) => head_dim,
            Self::Packed(codec) => codec.layout().n_bytes(),
        }
    }
}

/// Token-heads outside the windows: some of a page's, or all of a file's.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Rows {
    Full(Full),
    Packed(Vec<u8>),
}

impl Rows {
    /// The first `n_tokens` of these, with room for `capacity`.
    pub(crate) fn copy_of(&self, store: &Store, head_dim: usize, n_tokens: usize, capacity: usize) -> Self {
        let n = n_tokens * store.row_len(head_dim);
        let mut copy = store.empty(head_dim, capacity);
        match (&mut copy, self) {
            (Self::Full(Full::F32(to)), Self::Full(Full::F32(from))) => to.extend_from_slice(&from[..n]),
            (Self::Full(Full::Bf16(to)), Self::Full(Full::Bf16(from))) => to.extend_from_slice(&from[..n]),
            (Self::Packed(to), Self::Packed(from)) => to.extend_from_slice(&from[..n]),
            _ => unreachable!("a page is read with the store that made it"),
        }
        copy
    }

    /// No rows, with room for a page.
    pub(crate) fn empty(store: &Store, head_dim: usize, n_tokens: usize) -> Self {
        store.empty(head_dim, n_tokens)
    }

    /// Forgets rows from `n_tokens` on.
    pub(crate) fn truncate(&mut self, store: &Store, head_dim: usize, n_tokens: usize) {
        let n = n_tokens * store.row_len(head_dim);
        match self {
            Self::Full(rows) => rows.truncate(n),
            Self::Packed(bytes) => bytes.truncate(n),
        }
    }

    /// Appends rows `x`, `[tokens, d]`, quantized if the store quantizes, then with feedback if there is any.
    ///
    /// # Errors
    /// `OutOfRange`: never for numbers that an append accepted.
    pub(crate) fn encode(&mut self, store: &Store, feedback: Option<&Feedback>, x: &[f32]) -> wush_quant::Result<()> {
        match (self, store) {
            (Self::Full(rows), Store::Full(_)) => rows.extend(x),
            (Self::Packed(bytes), Store::Packed(codec)) => {
                let start = bytes.len();
                bytes.resize(start + x.len() / codec.layout().head_dim() * codec.layout().n_bytes(), 0);
                match feedback {
                    Some(feedback) => codec.pack_with_feedback(x, feedback, &mut bytes[start..])?,
                    None => codec.pack(x, &mut bytes[start..])?,
                }
            }
            _ => unreachable!("a page is written with the store that made it"),
        }
        Ok(())
    }

    /// Bytes allocated.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Full(rows) => rows.bytes(),
            Self::Packed(bytes) => bytes.capacity(),
        }
    }
}
