//! Matrix products through cuBLASLt: `y = α x Wᵀ + b + β y` of row-major matrices, bf16 or f32, accumulated in f32.
//!
//! The library proposes an algorithm for a shape once; it is kept for the device's life, so that a run repeats bit for bit. f32
//! products are f32 throughout (no TF32).

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cublasLtMatrixLayout_t, cublasStatus_t,
    cudaDataType_t,
};
use half::bf16;

use crate::buffer::{Buffer, Element, View, ViewMut};
use crate::device::{Device, Queue};
use crate::error::{GpuError, Result};
use crate::libraries;

/// Scratch memory of the library, bytes: what it asks for on Hopper.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// `CUBLAS_OP_T` of `cublasOperation_t`, an `int`.
const TRANSPOSED: i32 = 1;

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: where a sum is split, its parts meet in f32 and are rounded once.
const REDUCED_IN_F32: u32 = 2;

/// What a product is made of.
pub trait MatmulElement: Element {
    /// As the library names it.
    #[doc(hidden)]
    const TYPE: cudaDataType_t;
}

impl MatmulElement for bf16 {
    const TYPE: cudaDataType_t = cudaDataType_t::CUDA_R_16BF;
}

impl MatmulElement for f32 {
    const TYPE: cudaDataType_t = cudaDataType_t::CUDA_R_32F;
}

/// A row-major matrix in a buffer, whose rows may lie further apart than they are long.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T: Element> {
    /// From its first element on.
    pub view: View<'a, T>,
    /// Rows.
    pub n_rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Elements from a row to the next.
    pub stride: usize,
}

impl<'a, T: Element> Matrix<'a, T> {
    /// Rows one after the other.
    pub fn packed(view: View<'a, T>, n_rows: usize, width: usize) -> Self {
        Self { view, n_rows, width, stride: width }
    }

    fn n_elements(&self) -> usize {
        span(self.n_rows, self.width, self.stride)
    }
}

/// Elements from the first to the last of a matrix.
pub(crate) fn span(n_rows: usize, width: usize, stride: usize) -> usize {
    if n_rows == 0 { 0 } else { (n_rows - 1).saturating_mul(stride).saturating_add(width) }
}

/// `y = α x Wᵀ + b + β y`.
#[derive(Debug)]
pub struct Matmul<'a, T: MatmulElement, O: MatmulElement> {
    /// `[tokens, in]`.
    pub x: Matrix<'a, T>,
    /// `[out, in]`.
    pub weight: Matrix<'a, T>,
    /// `[out]`, none for zeros.
    pub bias: Option<View<'a, O>>,
    /// α.
    pub alpha: f32,
    /// β; with 0, what y holds is not read.
    pub beta: f32,
}

/// What decides the algorithm of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    /// tokens, in, out.
    sizes: [usize; 3],
    /// Of x, W, y.
    strides: [usize; 3],
    types: [i32; 2],
    has_bias: bool,
    /// Whether y is read.
    adds: bool,
    /// Common alignment of the operands, bytes: a power of two up to 16.
    alignment: u32,
}

/// The library's handle on one device.
pub(crate) struct Blas {
    handle: cublasLtHandle_t,
    algorithms: Mutex<BTreeMap<Shape, Algorithm>>,
    workspace: u64,
}

/// An algorithm, copied whenever it is used.
#[derive(Clone, Copy)]
struct Algorithm(cublasLtMatmulAlgo_t);

// SAFETY: the library's handle may be used from any thread; the rest is plain data behind a lock.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: dropped with its device, once all work is done.
        let _ = unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

impl Device {
    /// Begins a product in the compute queue: `y`, `[tokens, out]`, whose rows lie `stride` elements apart.
    ///
    /// # Errors
    /// `Length` when an operand is too short, `Library` without cuBLASLt, `OutOfMemory` for its scratch memory, `Blas`.
    ///
    /// # Panics
    /// When x and W do not have the same width: the caller's invariant.
    pub fn matmul<T: MatmulElement, O: MatmulElement>(
        &self,
        product: &Matmul<'_, T, O>,
        y: &mut ViewMut<'_, O>,
        stride: usize,
    ) -> Result<()> {
        let Matmul { x, weight, bias, .. } = product;
        assert_eq!(x.width, weight.width, "x is [tokens, in] and W is [out, in]");
        long_enough("x of a product", x.n_elements(), x.view.len())?;
        long_enough("W of a product", weight.n_elements(), weight.view.len())?;
        long_enough("y of a product", span(x.n_rows, weight.n_rows, stride), y.len())?;
        if let Some(bias) = bias {
            long_enough("b of a product", weight.n_rows, bias.len())?;
        }
        if x.n_rows == 0 || weight.n_rows == 0 {
            return Ok(());
        }
        self.bind()?;
        let blas = self.0.blas.get_or_init(|| Blas::new(self)).as_ref().map_err(Clone::clone)?;
        let addresses = [x.view.address(), weight.view.address(), y.address(), bias.map_or(0, |bias| bias.address())];
        let shape = Shape {
            sizes: [x.n_rows, x.width, weight.n_rows],
            strides: [x.stride, weight.stride, stride],
            types: [T::TYPE as i32, O::TYPE as i32],
            has_bias: bias.is_some(),
            adds: product.beta != 0.0,
            alignment: alignment(addresses),
        };
        blas.run(&Call { shape, types: [T::TYPE, O::TYPE], addresses, factors: [product.alpha, product.beta] }, self)
    }
}

/// The largest power of two up to 16 that divides all addresses.
fn alignment(addresses: [u64; 4]) -> u32 {
    let together = addresses.into_iter().fold(16, |all, address| all | address);
    1 << together.trailing_zeros().min(4)
}

pub(crate) fn long_enough(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found >= expected { Ok(()) } else { Err(GpuError::Length { what, expected, found }) }
}

/// One product, as numbers.
struct Call {
    shape: Shape,
    types: [cudaDataType_t; 2],
    /// x, W, y, b.
    addresses: [u64; 4],
    /// α, β.
    factors: [f32; 2],
}

impl Blas {
    fn new(device: &Device) -> Result<Self> {
        libraries::CUBLASLT.require()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is loaded and a context is current.
        done("start", unsafe { sys::cublasLtCreate(&mut handle) })?;
        // Never given back: products are made until the device is closed, and its memory goes with it.
        let (workspace, _) = device.take(WORKSPACE_BYTES as u64)?;
        Ok(Self { handle, algorithms: Mutex::default(), workspace })
    }

    /// The library is column-major: it computes yᵀ `[out, tokens]` of W, whose rows are its columns, and of xᵀ.
    fn run(&self, call: &Call, device: &Device) -> Result<()> {
        let Shape { sizes: [n_tokens, n_in, n_out], strides: [x, w, y], .. } = call.shape;
        let [operand, result] = call.types;
        let desc = Desc::new(&call.shape, call.addresses[3])?;
        let layouts = [
            Layout::new(operand, n_in, n_out, w)?,
            Layout::new(operand, n_in, n_tokens, x)?,
            Layout::new(result, n_out, n_tokens, y)?,
        ];
        let algorithm = self.algorithm(call.shape, &desc, &layouts)?;
        let [x, weight, y] = [0, 1, 2].map(|i| call.addresses[i] as *mut c_void);
        let factors = call.factors.each_ref().map(|factor| std::ptr::from_ref(factor).cast::<c_void>());
        // SAFETY: descriptors and layouts are alive and say what the addresses hold (their lengths were checked); the scratch
        // memory is the library's own, and all products run in one stream.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                desc.0,
                factors[0],
                weight,
                layouts[0].0,
                x,
                layouts[1].0,
                factors[1],
                y,
                layouts[2].0,
                y,
                layouts[2].0,
                &algorithm.0,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                device.stream(Queue::Compute).cast(),
            )
        };
        done("multiply", status)
    }

    fn algorithm(&self, shape: Shape, desc: &Desc, layouts: &[Layout; 3]) -> Result<Algorithm> {
        let mut algorithms = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&known) = algorithms.get(&shape) {
            return Ok(known);
        }
        let preference = Preference::new(shape.alignment)?;
        // SAFETY: a result of zeros is a value of this plain structure of the library.
        let mut found: cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut n_found = 0;
        // SAFETY: all descriptors are alive; one result is asked for, and there is room for one.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                desc.0,
                layouts[0].0,
                layouts[1].0,
                layouts[2].0,
                layouts[2].0,
                preference.0,
                1,
                &mut found,
                &mut n_found,
            )
        };
        done("choose an algorithm", status)?;
        if n_found == 0 {
            return Err(GpuError::Blas { action: "choose an algorithm", code: format!("none for {shape:?}") });
        }
        let algorithm = Algorithm(found.algo);
        algorithms.insert(shape, algorithm);
        Ok(algorithm)
    }
}

/// What is computed.
struct Desc(cublasLtMatmulDesc_t);

impl Desc {
    fn new(shape: &Shape, bias: u64) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: the library is loaded.
        done("describe a product", unsafe {
            sys::cublasLtMatmulDescCreate(&mut raw, compute, cudaDataType_t::CUDA_R_32F)
        })?;
        let desc = Self(raw);
        desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED)?;
        if shape.has_bias {
            desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
            desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        Ok(desc)
    }

    fn set<V>(&self, attribute: DescAttribute, value: V) -> Result<()> {
        let pointer = std::ptr::from_ref(&value).cast();
        // SAFETY: the descriptor is alive; the library copies the value, whose size it checks.
        done("describe a product", unsafe {
            sys::cublasLtMatmulDescSetAttribute(self.0, attribute, pointer, size_of::<V>())
        })
    }
}

impl Drop for Desc {
    fn drop(&mut self) {
        // SAFETY: made by the library, not used again.
        let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// How a matrix lies, column-major: rows, columns, distance of columns.
struct Layout(cublasLtMatrixLayout_t);

impl Layout {
    fn new(element: cudaDataType_t, n_rows: usize, n_columns: usize, stride: usize) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library is loaded.
        let status = unsafe {
            sys::cublasLtMatrixLayoutCreate(&mut raw, element, n_rows as u64, n_columns as u64, stride as i64)
        };
        done("describe a matrix", status)?;
        Ok(Self(raw))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by the library, not used again.
        let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// What an algorithm may use.
struct Preference(cublasLtMatmulPreference_t);

impl Preference {
    fn new(alignment: u32) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library is loaded.
        done("choose an algorithm", unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) })?;
        let preference = Self(raw);
        preference.set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES as u64)?;
        preference.set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, REDUCED_IN_F32)?;
        for attribute in [
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, alignment)?;
        }
        Ok(preference)
    }

    fn set<V>(&self, attribute: PreferenceAttribute, value: V) -> Result<()> {
        let pointer = std::ptr::from_ref(&value).cast();
        // SAFETY: the preference is alive; the library copies the value, whose size it checks.
        done("choose an algorithm", unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, pointer, size_of::<V>())
        })
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by the library, not used again.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

fn done(action: &'static str, status: cublasStatus_t) -> Result<()> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => Err(GpuError::Blas { action, code: format!("{other:?}") }),
    }
}

/// `x Wᵀ + b` in a new buffer, `[tokens, out]`.
///
/// # Errors
/// As [`Device::matmul`]; `OutOfMemory`.
pub fn project<T: MatmulElement>(device: &Device, product: &Matmul<'_, T, T>) -> Result<Buffer<T>> {
    let (n_tokens, n_out) = (product.x.n_rows, product.weight.n_rows);
    let len = n_tokens.checked_mul(n_out).ok_or(GpuError::TooLarge { what: "a product", count: n_tokens })?;
    let mut y = device.uninit(len)?;
    device.matmul(product, &mut y.view_mut(), n_out)?;
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_aligned_operand_decides() {
        assert_eq!(alignment([0, 256, 512, 1024]), 16);
        assert_eq!(alignment([0, 256, 512, 1026]), 2);
        assert_eq!(alignment([24, 256, 512, 0]), 8);
    }
}
