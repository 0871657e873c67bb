//! Each kernel of a forward pass and of its statistics, on the activations of one layer.

use half::bf16;

use crate::attention::Attention;
use crate::bench::{Timing, median, random};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::elementwise::{Gate, Table};
use crate::error::Result;
use crate::hessian::{HessianInputs, Hessians};
use crate::matmul::{Matmul, Matrix};
use crate::norm::Norm;
use crate::operand::MatrixMut;
use crate::rope::{HeadNormRope, Rotation};
use crate::sums::FiniteCheck;

/// Launches of each kernel.
const LAUNCHES: usize = 7;
/// Tokens that Hessians are measured on at most: their time grows with the square.
const HESSIAN_TOKENS: usize = 4096;
/// Rows of the embedding table.
const VOCABULARY: usize = 32_768;
/// Bytes of a bf16 number.
const BF16: f64 = 2.0;
/// Epsilon of norms.
const EPS: f32 = 1e-6;

/// Sizes of one decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerShape {
    /// Width of the residual.
    pub hidden: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Coordinates of a head.
    pub head_dim: usize,
    /// Width of the gated MLP.
    pub intermediate: usize,
}

impl LayerShape {
    fn q(&self) -> usize {
        self.n_heads * self.head_dim
    }

    fn kv(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Queries, keys and values beside each other.
    fn row(&self) -> usize {
        self.q() + 2 * self.kv()
    }
}

/// Times every kernel on `n_tokens` of one layer.
///
/// # Errors
/// `OutOfMemory`; what a kernel refuses; `Library`, `Compile`, `Driver`.
pub fn kernels(device: &Device, shape: &LayerShape, n_tokens: usize) -> Result<Vec<Timing>> {
    let bench = Bench::new(device, shape, n_tokens)?;
    let mut rows = bench.products()?;
    rows.extend(bench.attention()?);
    rows.extend(bench.between()?);
    rows.extend(bench.statistics()?);
    rows.push(bench.hessians()?);
    Ok(rows)
}

struct Bench<'a> {
    device: &'a Device,
    shape: &'a LayerShape,
    n_tokens: usize,
    /// `[tokens, hidden]`.
    x: Buffer<bf16>,
    /// `[tokens, q + 2 kv]`.
    qkv: Buffer<bf16>,
    /// As wide as anything is.
    weight: Buffer<f32>,
}

impl<'a> Bench<'a> {
    fn new(device: &'a Device, shape: &'a LayerShape, n_tokens: usize) -> Result<Self> {
        Ok(Self {
            device,
            shape,
            n_tokens,
            x: random(device, 11, n_tokens * shape.hidden)?,
            qkv: random(device, 12, n_tokens * shape.row())?,
            weight: random::<f32>(device, 13, shape.hidden.max(2 * shape.intermediate))?,
        })
    }

    fn time(
        &self,
        name: &'static str,
        [operations, bytes]: [f64; 2],
        work: impl FnMut() -> Result<()>,
    ) -> Result<Timing> {
        Ok(Timing { name, seconds: median(self.device, LAUNCHES, work)?, operations, bytes })
    }

    fn x(&self) -> Matrix<'_, bf16> {
        Matrix::packed(self.x.view(), self.n_tokens, self.shape.hidden)
    }

    /// Columns `range` of the fused rows of the first `n` tokens.
    fn columns(&self, range: std::ops::Range<usize>, n: usize) -> Matrix<'_, bf16> {
        let (view, stride) = (self.qkv.view(), self.shape.row());
        Matrix { view: view.slice(range.start..n * stride), n_rows: n, width: range.len(), stride }
    }

    fn norm(&self, width: usize) -> Norm<'_> {
        Norm { weight: self.weight.view().slice(0..width), eps: EPS }
    }

    /// The layer's linear maps.
    fn products(&self) -> Result<Vec<Timing>> {
        let LayerShape { hidden, intermediate, .. } = *self.shape;
        let maps = [
            ("qkv projection", hidden, self.shape.row()),
            ("output projection", self.shape.q(), hidden),
            ("gate and up", hidden, 2 * intermediate),
            ("down", intermediate, hidden),
        ];
        maps.into_iter().map(|(name, from, to)| self.product(name, from, to)).collect()
    }

    fn product(&self, name: &'static str, from: usize, to: usize) -> Result<Timing> {
        let n = self.n_tokens;
        let (x, weight) = (random::<bf16>(self.device, 21, n * from)?, random::<bf16>(self.device, 22, from * to)?);
        let mut y = self.device.uninit::<bf16>(n * to)?;
        let product = Matmul {
            x: Matrix::packed(x.view(), n, from),
            weight: Matrix::packed(weight.view(), to, from),
            bias: None,
            alpha: 1.0,
            beta: 0.0,
        };
        let size = |a: usize, b: usize| a as f64 * b as f64;
        let work = [2.0 * size(n, from) * to as f64, BF16 * (size(n, from) + size(from, to) + size(n, to))];
        self.time(name, work, || self.device.matmul(&product, &mut y.view_mut(), to))
    }

    fn attention_of(&self, n: usize) -> Attention<'_, bf16> {
        let (q, kv) = (self.shape.q(), self.shape.kv());
        Attention {
            q: self.columns(0..q, n),
            k: self.columns(q..q + kv, n),
            v: self.columns(q + kv..q + 2 * kv, n),
            head_dim: self.shape.head_dim,
            window: None,
            scale: (self.shape.head_dim as f32).powf(-0.5),
            softcap: None,
        }
    }

    /// Causal, over all tokens and over an eighth of them.
    fn attention(&self) -> Result<Vec<Timing>> {
        let mut out = self.device.uninit::<bf16>(self.n_tokens * self.shape.q())?;
        let names = [("attention", self.n_tokens), ("attention, an eighth of the tokens", self.n_tokens / 8)];
        let mut rows = Vec::new();
        for (name, n) in names.into_iter().filter(|(_, n)| *n > 0) {
            // Half of all pairs, two products of two operations a coordinate.
            let operations = 2.0 * (n as f64).powi(2) * self.shape.q() as f64;
            let bytes = BF16 * n as f64 * (self.shape.row() + self.shape.q()) as f64;
            let attention = self.attention_of(n);
            rows.push(self.time(name, [operations, bytes], || {
                self.device.attention(&attention, &mut out.view_mut(), self.shape.q())
            })?);
        }
        Ok(rows)
    }

    /// Norms, rotation, gate, embedding.
    fn between(&self) -> Result<Vec<Timing>> {
        let LayerShape { hidden, intermediate, n_heads, n_kv_heads, head_dim } = *self.shape;
        let (device, n) = (self.device, self.n_tokens);
        let elements = |width: usize| n as f64 * width as f64 * BF16;
        let mut z = device.uninit::<bf16>(n * hidden)?;
        let mut rows = vec![self.time("RMS norm", [0.0, 2.0 * elements(hidden)], || {
            device.rms_norm(self.x(), self.norm(hidden), &mut z.view_mut(), hidden)
        })?];
        let mut heads = random::<bf16>(device, 31, n * self.shape.row())?;
        let half = n * (head_dim / 2);
        let [cos, sin] = [32, 33].map(|seed| random::<f32>(device, seed, half));
        let (cos, sin) = (cos?, sin?);
        let what = HeadNormRope {
            head_dim,
            n_q_heads: n_heads,
            n_k_heads: n_kv_heads,
            q_norm: Some(self.norm(head_dim)),
            k_norm: Some(self.norm(head_dim)),
            rotation: Some(Rotation { rotary_dim: head_dim, cos: cos.view(), sin: sin.view() }),
        };
        let tables = 2.0 * 4.0 * half as f64;
        rows.push(self.time(
            "head norm and RoPE",
            [0.0, 2.0 * elements((n_heads + n_kv_heads) * head_dim) + tables],
            || device.head_norm_rope(&mut MatrixMut::packed(heads.view_mut(), n, self.shape.row()), &what),
        )?);
        drop(heads);
        rows.push(self.gate(intermediate, elements(3 * intermediate))?);
        let table = random::<bf16>(device, 34, VOCABULARY * hidden)?;
        let ids: Vec<u32> = (0..n).map(|at| (at * 7919 % VOCABULARY) as u32).collect();
        let ids = device.upload(&ids)?;
        rows.push(self.time("embedding", [0.0, 2.0 * elements(hidden)], || {
            device.embed(Table::Bf16(table.view()), ids.view(), (hidden, 1.0), &mut z.view_mut())
        })?);
        Ok(rows)
    }

    fn gate(&self, intermediate: usize, bytes: f64) -> Result<Timing> {
        let gated = random::<bf16>(self.device, 35, 2 * self.n_tokens * intermediate)?;
        let mut out = self.device.uninit::<bf16>(self.n_tokens * intermediate)?;
        let gated = Matrix::packed(gated.view(), self.n_tokens, 2 * intermediate);
        self.time("SwiGLU", [0.0, bytes], || self.device.gate(gated, Gate::Silu, &mut out.view_mut()))
    }

    /// Gram matrices of queries, keys and values, sums of keys, and the look for what is not finite.
    fn statistics(&self) -> Result<Vec<Timing>> {
        let LayerShape { n_heads, n_kv_heads, head_dim, .. } = *self.shape;
        let (device, n) = (self.device, self.n_tokens);
        let all = self.columns(0..self.shape.row(), n);
        let mut sums = device.filled::<f64>(3 * n_kv_heads * head_dim * head_dim, 0)?;
        let of_heads = [0..n_heads, n_heads..n_heads + n_kv_heads, n_heads + n_kv_heads..n_heads + 2 * n_kv_heads];
        let bytes = BF16 * n as f64 * self.shape.row() as f64;
        let operations = 2.0 * n as f64 * (self.shape.row() * head_dim) as f64;
        let gram = self.time("Gram matrices of q, k, v", [operations, bytes], || {
            let parts = device.gram_parts(all, head_dim)?;
            let third = n_kv_heads * head_dim * head_dim;
            of_heads.iter().enumerate().try_for_each(|(at, heads)| {
                let mut all = sums.view_mut();
                let mut into = all.slice(at * third..(at + 1) * third);
                device.add_gram(&parts, heads.clone(), &mut into)
            })
        })?;
        let keys = self.columns(self.shape.q()..self.shape.q() + self.shape.kv(), n);
        let mut key_sums = device.filled::<f64>(self.shape.kv(), 0)?;
        let key_bytes = BF16 * n as f64 * self.shape.kv() as f64;
        let sum = self.time("sums of keys", [0.0, key_bytes], || device.column_sums(keys, &mut key_sums.view_mut()))?;
        let mut finite = FiniteCheck::new(device, 1)?;
        let look = self.time("look for what is not finite", [0.0, bytes], || finite.look(0, all))?;
        Ok(vec![gram, sum, look])
    }

    /// The exact Hessians of WUSH-A.
    fn hessians(&self) -> Result<Timing> {
        let LayerShape { n_kv_heads, head_dim, n_heads, .. } = *self.shape;
        let (device, n) = (self.device, self.n_tokens.min(HESSIAN_TOKENS));
        let group = n_heads / n_kv_heads;
        let couplings = random::<f32>(device, 41, n_kv_heads * (group * head_dim).pow(2))?;
        let square = n_kv_heads * head_dim * head_dim;
        let (mut key, mut value) = (device.filled::<f64>(square, 0)?, device.filled::<f64>(square, 0)?);
        let inputs = HessianInputs { attention: self.attention_of(n), couplings: couplings.view() };
        // As `kernels/hessian.cu` counts them, for half of all pairs of tokens.
        let products = (group + group * (group + 1)) as f64;
        let operations = (n as f64).powi(2) * (n_kv_heads * head_dim) as f64 * products;
        let bytes = BF16 * n as f64 * self.shape.row() as f64;
        self.time("exact Hessians, up to 4096 tokens", [operations, bytes], || {
            let mut to = Hessians { key: &mut key.view_mut(), value: &mut value.view_mut() };
            device.add_hessians(&inputs, &mut to)
        })
    }
}
