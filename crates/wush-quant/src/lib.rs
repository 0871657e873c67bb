//! The quantizers of the KV cache, packed token-heads, and the two products of attention on packed codes.
//!
//! Enters: one token of one KV head, `[d]` in f32 (a group: it has one scale and one zero point), and queries or softmax
//! weights. Leaves: packed bytes ([`Layout`]), numbers again, scores, weighted sums. Quantizers: QuEST (Eq. 5) and
//! OSCAR-style (Eq. 7), at 2, 3, 4 and 8 bits. Knows nothing of windows, pages, heads' numbers or files; starts no thread.
//!
//! ```
//! use wush_quant::{Accumulators, Bits, Codec, Method, Queries, Role, ScaleDtype};
//!
//! let method: Method = "oscar".parse()?;
//! let codec = Codec::new(128, method.quantizer(Bits::Two, Role::Key, ScaleDtype::Bf16)?)?;
//!
//! // Two token-heads of d = 128: 36 bytes each.
//! let keys: Vec<f32> = (0..256).map(|i| (i as f32 * 0.7).sin()).collect();
//! let mut packed = vec![0; 2 * codec.layout().n_bytes()];
//! codec.pack(&keys, &mut packed)?;
//!
//! // Scores of one query against both, and both summed with weights, without unpacking.
//! let query = vec![0.1; 128];
//! let mut scores = [0.0; 2];
//! codec.dot(&Queries::new(codec.layout(), &query)?, &packed, &mut scores)?;
//! let mut sum = Accumulators::new(codec.layout(), 1);
//! codec.axpy(&[0.25, 0.75], &packed, &mut sum)?;
//!
//! let mut unpacked = vec![0.0; 256];
//! codec.unpack(&packed, &mut unpacked)?;
//! let expected: f32 = unpacked[..128].iter().map(|k| 0.1 * k).sum();
//! assert!((scores[0] - expected).abs() < 1e-4);
//! # Ok::<(), wush_quant::QuantError>(())
//! ```

mod affine;
mod alpha;
mod attention;
mod codec;
mod error;
mod feedback;
mod layout;
mod oscar;
mod quantizer;
mod quest;
mod simd;

pub use alpha::alpha;
pub use attention::{Accumulators, Queries};
pub use codec::Codec;
pub use error::{QuantError, Result};
pub use feedback::{Feedback, MAX_FEEDBACK};
pub use layout::Layout;
pub use quantizer::{Bits, Entry, Kind, LayerBits, Method, QUANTIZERS, Quantile, Quantizer, Role, ScaleDtype};
pub use simd::Level;

/// Largest head dimension accepted: eight times the widest in use.
pub const MAX_HEAD_DIM: usize = 2048;

/// Largest magnitude that is quantized, 2^120. Reconstructions stay below 2^127 for every accepted parameter, so they are
/// finite. Nothing that a model computes comes near it; what lies beyond is refused, as NaN is.
pub const MAX_MAGNITUDE: f32 = f32::from_bits((127 + 120) << 23);
