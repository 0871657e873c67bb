//! A model on a GPU: how its weights come there, what stays, and how long each stage of its forward pass takes.
//!
//! Enters: stored tensors. Leaves: weights and tables on the device. The forward pass over them is in `backend.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use wush_format::tensor_file::{Dtype, TensorView};
use wush_model::Result as ModelResult;
use wush_model::backend::Backend;
use wush_model::cpu::Cpu;

use crate::attention::{Attention, AttentionElement};
use crate::bench;
use crate::buffer::{Buffer, Element};
use crate::convert::Convert;
use crate::device::{Device, Event, Queue};
use crate::error::Result;
use crate::operand::Activation;
use crate::tensor::Weights;
use crate::upload::Uploader;

/// What activations can be.
pub trait Compute: Activation + AttentionElement + Into<f32> + From<bf16> {
    /// As reports name it.
    const NAME: &'static str;
    /// As checkpoints name it: tensors of this type are brought as they are.
    const STORED: Dtype;

    /// The same attention for the kernels of the exact Hessians, which take bf16.
    fn for_hessians(attention: Attention<'_, Self>) -> Option<Attention<'_, bf16>>;

    /// Elements of a stored tensor, in this type on the device.
    #[doc(hidden)]
    fn weights(gpu: &Gpu<Self>, dtype: Dtype, bytes: &[u8]) -> Result<Buffer<Self>>;
}

impl Compute for bf16 {
    const NAME: &'static str = "bf16";
    const STORED: Dtype = Dtype::BF16;

    fn for_hessians(attention: Attention<'_, Self>) -> Option<Attention<'_, bf16>> {
        Some(attention)
    }

    fn weights(gpu: &Gpu<Self>, dtype: Dtype, bytes: &[u8]) -> Result<Buffer<Self>> {
        match dtype {
            Dtype::BF16 => gpu.upload(bytes),
            Dtype::F16 => gpu.converted::<half::f16>(bytes),
            _ => gpu.converted::<f32>(bytes),
        }
    }
}

impl Compute for f32 {
    const NAME: &'static str = "f32";
    const STORED: Dtype = Dtype::F32;

    fn for_hessians(_: Attention<'_, Self>) -> Option<Attention<'_, bf16>> {
        None
    }

    fn weights(gpu: &Gpu<Self>, dtype: Dtype, bytes: &[u8]) -> Result<Buffer<Self>> {
        match dtype {
            Dtype::BF16 => gpu.converted::<bf16>(bytes),
            Dtype::F16 => gpu.converted::<half::f16>(bytes),
            _ => gpu.upload(bytes),
        }
    }
}

/// Largest matrices that a pattern of weights on the host holds.
const HOST_MATRICES: usize = 4;
/// Elements from the start of one matrix in the pattern to that of the next, before they wrap around: a prime, so that starts differ.
const HOST_STEP: usize = 100_000_007;
/// Deviation of drawn weights, as models are initialized.
const DRAWN_DEVIATION: f32 = 0.02;

/// Where random weights come from, in the place of those that a checkpoint holds.
#[derive(Debug)]
enum Drawn<T> {
    /// Made on the card.
    OnCard,
    /// Brought there from host memory, as those of a mapped file are: a pattern, of which every matrix takes another part.
    OnHost(Vec<T>),
}

/// Stages and the marks around each.
#[derive(Debug, Default)]
struct Profile {
    spans: Vec<(&'static str, Event, Event)>,
}

/// A table of rows, as it is stored or narrower.
#[derive(Debug)]
pub(crate) enum Rows {
    Bf16(Buffer<bf16>),
    F32(Buffer<f32>),
}

/// What stays on the device, by the place of its bytes on the host: of one model, or two.
type Kept<V> = Mutex<BTreeMap<(usize, usize), Arc<V>>>;

/// What `kept` has of a stored tensor, made at its first use.
fn kept<V, E>(kept: &Kept<V>, stored: TensorView<'_>, make: impl FnOnce() -> Result<V, E>) -> Result<Arc<V>, E> {
    let place = (stored.bytes.as_ptr() as usize, stored.bytes.len());
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = kept.get(&place) {
        return Ok(known.clone());
    }
    let made = Arc::new(make()?);
    kept.insert(place, made.clone());
    Ok(made)
}

/// One GPU that runs the forward pass in activations of type `T`.
#[derive(Debug)]
pub struct Gpu<T: Compute> {
    pub(crate) device: Device,
    pub(crate) uploader: Uploader,
    /// Embeddings.
    tables: Kept<Rows>,
    /// Output heads.
    heads: Kept<Weights<T>>,
    /// Where weights are drawn and not read, and how many tensors were.
    drawn: Option<(Drawn<T>, AtomicU64)>,
    profile: Mutex<Option<Profile>>,
}

impl<T: Compute> Gpu<T> {
    /// Runs on `device`.
    pub fn new(device: Device) -> Self {
        let uploader = Uploader::new(&device);
        let (tables, heads, profile) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { device, uploader, tables, heads, drawn: None, profile }
    }

    /// Runs on `device` with random weights in the place of those that a checkpoint holds, for measurements: matrices as models are
    /// initialized, norms of ones.
    pub fn drawing(device: Device) -> Self {
        Self { drawn: Some((Drawn::OnCard, AtomicU64::new(0))), ..Self::new(device) }
    }

    /// The same with weights that come from host memory each time, as those of a mapped file do once the system has read it: matrices
    /// of at most `largest` elements, from a pattern of four times that, which no cache holds.
    pub fn drawing_on_host(device: Device, largest: usize) -> Self {
        let pattern = Drawn::OnHost(bench::pattern(0, HOST_MATRICES * largest, DRAWN_DEVIATION));
        Self { drawn: Some((pattern, AtomicU64::new(0))), ..Self::new(device) }
    }

    /// Whether weights are drawn and not read.
    pub(crate) fn draws(&self) -> bool {
        self.drawn.is_some()
    }

    /// From here on the device notes how long each stage takes.
    pub fn start_profile(&self) {
        *self.profile.lock().unwrap_or_else(PoisonError::into_inner) = Some(Profile::default());
    }

    /// Seconds by stage since [`Gpu::start_profile`]; waits for the device.
    ///
    /// # Errors
    /// `Driver`.
    pub fn end_profile(&self) -> Result<BTreeMap<&'static str, f64>> {
        let profile = self.profile.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut stages = BTreeMap::new();
        for (stage, start, end) in profile.unwrap_or_default().spans {
            *stages.entry(stage).or_default() += end.seconds_since(&start)?;
        }
        Ok(stages)
    }

    /// Begins the work of a stage, which its name stands for in a profile.
    pub(crate) fn stage<R>(&self, stage: &'static str, begin: impl FnOnce() -> Result<R>) -> Result<R> {
        if self.profile.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            return begin();
        }
        let start = self.device.mark(Queue::Compute)?;
        let done = begin()?;
        let end = self.device.mark(Queue::Compute)?;
        if let Some(profile) = self.profile.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            profile.spans.push((stage, start, end));
        }
        Ok(done)
    }

    /// A random matrix, where weights are drawn.
    pub(crate) fn draw(&self, len: usize) -> Option<Result<Buffer<T>>> {
        let (drawn, count) = self.drawn.as_ref()?;
        let seed = count.fetch_add(1, Ordering::Relaxed);
        Some(match drawn {
            Drawn::OnCard => bench::random_scaled(&self.device, seed, len, DRAWN_DEVIATION),
            Drawn::OnHost(pattern) => {
                let start = (seed as usize).wrapping_mul(HOST_STEP) % (pattern.len() - len + 1);
                self.upload(bytemuck::cast_slice(&pattern[start..start + len]))
            }
        })
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    fn upload<E: Element>(&self, bytes: &[u8]) -> Result<Buffer<E>> {
        let mut buffer = self.device.uninit(bytes.len() / size_of::<E>())?;
        self.uploader.upload(bytes, &mut buffer.view_mut())?;
        Ok(buffer)
    }

    fn converted<F: Convert<T>>(&self, bytes: &[u8]) -> Result<Buffer<T>> {
        let stored: Buffer<F> = self.upload(bytes)?;
        let mut buffer = self.device.uninit(stored.len())?;
        self.device.convert(stored.view(), &mut buffer.view_mut())?;
        Ok(buffer)
    }

    /// An output head on the device, kept from its first use on.
    pub(crate) fn head(&self, table: TensorView<'_>) -> ModelResult<Arc<Weights<T>>> {
        kept(&self.heads, table, || self.matrix(table, 0..table.shape[0]))
    }

    /// A table on the device, kept from its first use on.
    pub(crate) fn table(&self, table: TensorView<'_>) -> Result<Arc<Rows>> {
        kept(&self.tables, table, || match table.dtype {
            _ if self.draws() => {
                let len = table.shape.iter().product();
                Ok(Rows::Bf16(bench::random_scaled(&self.device, 0, len, DRAWN_DEVIATION)?))
            }
            Dtype::BF16 => Ok(Rows::Bf16(self.upload(table.bytes)?)),
            Dtype::F32 => Ok(Rows::F32(self.upload(table.bytes)?)),
            _ => Ok(Rows::F32(self.upload(bytemuck::cast_slice(&widened(table)))?)),
        })
    }
}

/// Every element of a stored tensor, in f32.
pub(crate) fn widened(view: TensorView<'_>) -> Vec<f32> {
    let (n_rows, width) = (view.shape[0], view.shape.get(1).copied().unwrap_or(1));
    let flat = TensorView { shape: &[n_rows * width], ..view };
    Cpu.vector(flat, 0..n_rows * width, 0.0).expect("the CPU does not fail")
}
