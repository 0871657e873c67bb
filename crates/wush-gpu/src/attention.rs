//! Causal attention with grouped queries (Eq. 2), one sequence a call: scores are never stored.
//!
//! Enters: queries, keys and values of all tokens, bf16 or f32, each a matrix or columns of a wider one. Leaves: the heads' outputs,
//! of the same type. Does no batches, no cache and no rotation. Which kernel serves: f32 its own; bf16 Hopper's where it has tiles,
//! else the one that runs everywhere.

pub mod f32s;
pub mod hopper;
pub mod mma;

use half::bf16;

use crate::buffer::{Element, ViewMut};
use crate::device::Device;
use crate::error::{GpuError, Result};
use crate::launch::Arg;
use crate::matmul::{MatmulElement, Matrix};

/// `out[t, n] = Σ_s p[t, s] v[s, n / G]` with `p[t, ·] = softmax_s(cap(scale · q[t, n] · k[s, n / G]))` over the keys
/// `t - window < s <= t`, where G is the number of heads that share keys.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a, T: Element> {
    /// `[tokens, n_heads head_dim]`.
    pub q: Matrix<'a, T>,
    /// `[tokens, n_kv_heads head_dim]`.
    pub k: Matrix<'a, T>,
    /// As `k`.
    pub v: Matrix<'a, T>,
    /// Coordinates of a head.
    pub head_dim: usize,
    /// Keys that a query reads, itself counted; all before it when none.
    pub window: Option<usize>,
    /// Multiplies q · k; positive.
    pub scale: f32,
    /// `cap(x) = softcap tanh(x / softcap)`; positive. No cap when none.
    pub softcap: Option<f32>,
}

/// Most tokens of a sequence: positions and the tile after them are 32-bit integers with sign.
const MAX_TOKENS: usize = (1 << 31) - (1 << 10);

/// Rows and addresses are multiples of so many bytes.
const ALIGNMENT: usize = 16;

/// What attention is made of: bf16, or f32.
pub trait AttentionElement: MatmulElement {
    /// Begins the kernel that serves it.
    #[doc(hidden)]
    fn launch(
        device: &Device,
        attention: &Attention<'_, Self>,
        shape: &Shape,
        out: &mut ViewMut<'_, Self>,
    ) -> Result<()>;
}

impl AttentionElement for bf16 {
    fn launch(
        device: &Device,
        attention: &Attention<'_, Self>,
        shape: &Shape,
        out: &mut ViewMut<'_, Self>,
    ) -> Result<()> {
        if hopper::serves(device.info().capability, shape.head_dim) {
            hopper::launch(device, attention, shape, out)
        } else {
            mma::launch(device, attention, shape, out)
        }
    }
}

impl AttentionElement for f32 {
    fn launch(
        device: &Device,
        attention: &Attention<'_, Self>,
        shape: &Shape,
        out: &mut ViewMut<'_, Self>,
    ) -> Result<()> {
        f32s::launch(device, attention, shape, out)
    }
}

/// What a kernel is told, checked.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    n_tokens: u32,
    n_heads: u32,
    /// Heads that share keys and values.
    group: u32,
    head_dim: u32,
    /// 0 for none.
    window: u32,
    /// Of rows of queries, keys and values, in elements.
    strides: [u32; 3],
    out_stride: u32,
}

impl Shape {
    /// The last arguments of the kernels that take plain pointers, from the number of tokens on; `uncapped` stands for no softcap.
    fn args<T: Element>(&self, attention: &Attention<'_, T>, uncapped: f32) -> [Arg; 10] {
        let [q, k, v] = self.strides.map(Arg::from);
        [
            self.n_tokens.into(),
            self.n_heads.into(),
            (self.n_heads / self.group).into(),
            q,
            k,
            v,
            self.out_stride.into(),
            attention.scale.into(),
            attention.softcap.unwrap_or(uncapped).into(),
            self.window.into(),
        ]
    }

    /// Blocks of a kernel whose blocks take `rows` rows of one head, by KV head: `[x, y]` of its grid.
    fn grid(&self, rows: u32) -> Result<[u32; 3]> {
        let n_blocks = u64::from(self.n_tokens.div_ceil(rows)) * u64::from(self.group);
        let too_large = || GpuError::TooLarge { what: "blocks of attention", count: n_blocks as usize };
        // The largest first and second axis of any device's grid.
        let columns = i32::try_from(n_blocks).map_err(|_| too_large())?.unsigned_abs();
        let heads = u16::try_from(self.n_heads / self.group).map_err(|_| too_large())?;
        Ok([columns, heads.into(), 1])
    }
}

impl Device {
    /// Begins attention in the compute queue: `out`, `[tokens, n_heads head_dim]`, whose rows lie `stride` elements apart.
    ///
    /// # Errors
    /// `NotForDevice`, `HeadDim` where no kernel serves it, `Length` when an operand is too short, `TooLarge`,
    /// `Library` without the compiler, `Compile`, `Driver`.
    ///
    /// # Panics
    /// When widths are no whole heads, groups are uneven, numbers of tokens differ, rows do not begin at multiples of 16 bytes, or
    /// window, scale or softcap are not positive: the caller's invariants.
    pub fn attention<T: AttentionElement>(
        &self,
        attention: &Attention<'_, T>,
        out: &mut ViewMut<'_, T>,
        stride: usize,
    ) -> Result<()> {
        let shape = attention.shape(out, stride)?;
        if shape.n_tokens == 0 {
            return Ok(());
        }
        T::launch(self, attention, &shape, out)
    }
}

impl<T: Element> Attention<'_, T> {
    /// The first arguments of the same kernels.
    fn operands(&self) -> [Arg; 3] {
        [self.q, self.k, self.v].map(|operand| Arg::from(operand.view))
    }

    /// The shape of a call, once everything is checked.
    pub(crate) fn shape<O: Element>(&self, out: &ViewMut<'_, O>, stride: usize) -> Result<Shape> {
        let (n_tokens, head_dim) = (self.q.n_rows, self.head_dim);
        assert!(head_dim > 0 && [self.q, self.k].iter().all(|x| x.width % head_dim == 0), "whole heads");
        let (n_heads, n_kv_heads) = (self.q.width / head_dim, self.k.width / head_dim);
        assert!(n_kv_heads > 0 && n_heads % n_kv_heads == 0, "{n_heads} heads over {n_kv_heads}");
        assert!(self.k.n_rows == n_tokens && self.v.n_rows == n_tokens && self.v.width == self.k.width, "one shape");
        assert!(self.scale > 0.0 && self.softcap.is_none_or(|cap| cap > 0.0), "positive factors");
        assert!(self.window != Some(0), "a query reads itself");
        let target = Matrix { view: out.as_view(), n_rows: n_tokens, width: self.q.width, stride };
        for (what, operand) in [("queries", self.q), ("keys", self.k), ("values", self.v)] {
            check(what, &operand)?;
        }
        check("outputs", &target)?;
        let window = self.window.filter(|&window| window < n_tokens).unwrap_or(0);
        let small = |what, n: usize| u32::try_from(n).map_err(|_| GpuError::TooLarge { what, count: n });
        Ok(Shape {
            n_tokens: small("tokens", n_tokens)?,
            n_heads: small("heads", n_heads)?,
            group: small("heads of a group", n_heads / n_kv_heads)?,
            head_dim: small("a head's coordinates", head_dim)?,
            window: small("a window", window)?,
            strides: [
                small("a row of queries", self.q.stride)?,
                small("a row of keys", self.k.stride)?,
                small("a row of values", self.v.stride)?,
            ],
            out_stride: small("a row of outputs", stride)?,
        })
    }
}

/// Length and alignment of one operand.
fn check<T: Element>(what: &'static str, operand: &Matrix<'_, T>) -> Result<()> {
    let Matrix { view, n_rows, width, stride } = *operand;
    let whole = stride % (ALIGNMENT / size_of::<T>()) == 0;
    assert!(stride >= width && whole, "{what}: a stride of {stride} for rows of {width}");
    assert!(view.address() % ALIGNMENT as u64 == 0, "{what}: begin at a multiple of {ALIGNMENT} bytes");
    if n_rows > MAX_TOKENS {
        return Err(GpuError::TooLarge { what: "tokens", count: n_rows });
    }
    let needed = match n_rows {
        0 => 0,
        n => stride.checked_mul(n - 1).and_then(|last| last.checked_add(width)).unwrap_or(usize::MAX),
    };
    if view.len() < needed {
        return Err(GpuError::Length { what, expected: needed, found: view.len() });
    }
    Ok(())
}
