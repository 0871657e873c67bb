//! CUDA: the device layer and one wrapper per kernel. The only crate with foreign functions.
//!
//! Enters: host arrays, kernel sources, sizes. Leaves: arrays on a GPU, and errors as values: a machine without a driver, a
//! library or a device builds, links and starts this crate like any other. Knows nothing of the command line, files of wush, or
//! the order of stages. Start reading in `backend.rs`.
//!
//! ```
//! use wush_gpu::{Device, GpuError};
//!
//! match Device::open(0) {
//!     Ok(device) => {
//!         let buffer = device.upload(&[1.0f32, 2.0, 3.0])?;
//!         assert_eq!(buffer.to_host()?, [1.0, 2.0, 3.0]);
//!     }
//!     Err(why) => println!("no GPU: {why}"),
//! }
//! # Ok::<(), GpuError>(())
//! ```

pub mod attention;
pub mod backend;
pub mod bench;
pub mod carrier;
pub mod compiler;
pub mod convert;
pub mod elementwise;
pub mod forward;
pub mod gram;
pub mod hessian;
pub mod kernels;
pub mod launch;
pub mod libraries;
pub mod matmul;
pub mod nll;
pub mod norm;
pub mod operand;
pub mod plan;
pub mod pool;
pub mod rope;
pub mod statistics;
pub mod sums;
pub mod survey;
pub mod tensor;
pub mod transform_heads;
pub mod upload;
pub mod weighted;

mod buffer;
mod device;
mod driver;
mod error;
mod gpu;

pub use buffer::{Buffer, Element, Pinned, View, ViewMut};
pub use device::{Device, Event, Queue};
pub use driver::{DeviceInfo, LEAST_CAPABILITY, devices, version as driver_version};
pub use error::{GpuError, Result};
