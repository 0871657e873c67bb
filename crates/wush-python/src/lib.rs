//! The extension module of the Python package `wush-kv`: a bundle, read and checked by the crates that the runtime stands on, and
//! its quantizers on Python's buffers.
//!
//! Enters: paths, and anything with a buffer (bytes, numpy arrays). Leaves: memory views. Knows no tensors and no models; what
//! plugs into servers is Python, in `python/wush_kv/`. From Python:
//!
//! ```python
//! import wush_kv
//! bundle = wush_kv.Bundle.open("qwen3-8b-wush")             # raises WushError for what does not belong together
//! keys = bundle.codec(layer=0, role="key", bits=2)
//! packed = keys.pack(x)                                     # x: float32 [n_kv_heads, tokens, d], transformed
//! ```

mod buffer;
mod bundle;
mod codec;
mod error;

use pyo3::prelude::*;

/// `wush_kv._native`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("WushError", module.py().get_type::<error::WushError>())?;
    module.add_class::<bundle::Bundle>()?;
    module.add_class::<codec::Codec>()
}
