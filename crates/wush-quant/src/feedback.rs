//! Packing with error feedback: each coordinate's code also makes up for the errors of those coded before it. Enters:
//! token-heads, and the unit lower triangular factor of the metric in which errors count. Leaves: packed bytes of the same
//! format. What is read back, and how, does not change.

use crate::affine::{Affine, Extent, small_integer};
use crate::codec::{Codec, affine_map, check_length, pack_codes};
use crate::layout::LANES;
use crate::simd::Work;
use crate::{MAX_HEAD_DIM, QuantError, Result};

/// Largest element of a factor: L_ij² D_j is part of G_ii, and D_j at least G's smallest eigenvalue, so |L_ij| is at most
/// cond(G)^½, and beyond a condition of 1/ε f64 factors nothing. 2²⁶ of them times errors of any vector that can be coded
/// stay far inside f64.
pub const MAX_FEEDBACK: f32 = (1u64 << 26) as f32;

/// The factor L of one head's metric G = L D Lᵀ, for [`Codec::pack_with_feedback`].
#[derive(Debug, Clone, PartialEq)]
pub struct Feedback {
    head_dim: usize,
    /// The strictly lower part in the order of use: step n codes coordinate d − 1 − n, and has n factors, of the errors of
    /// the steps before it.
    factors: Vec<f32>,
}

impl Feedback {
    /// From L, row-major `[d, d]`: unit lower triangular, no element beyond [`MAX_FEEDBACK`]. The identity is no feedback.
    ///
    /// # Errors
    /// `HeadDim`, `Length`, `NotUnitLower`.
    pub fn new(head_dim: usize, lower: &[f32]) -> Result<Self> {
        if !(1..=MAX_HEAD_DIM).contains(&head_dim) {
            return Err(QuantError::HeadDim { found: head_dim, max: MAX_HEAD_DIM });
        }
        check_length("feedback", head_dim * head_dim, lower.len())?;
        for (row, elements) in lower.chunks_exact(head_dim).enumerate() {
            let fits = |(col, &x): (usize, &f32)| match col.cmp(&row) {
                std::cmp::Ordering::Less => x.abs() <= MAX_FEEDBACK,
                std::cmp::Ordering::Equal => x == 1.0,
                std::cmp::Ordering::Greater => x == 0.0,
            };
            if let Some(col) = elements.iter().enumerate().position(|at| !fits(at)) {
                return Err(QuantError::NotUnitLower { row, col, value: elements[col] });
            }
        }
        let last = head_dim - 1;
        let factors =
            (0..head_dim).flat_map(|step| (0..step).map(move |coded| (last - coded) * head_dim + last - step));
        Ok(Self { head_dim, factors: factors.map(|at| lower[at]).collect() })
    }

    /// Coordinates of a head, d.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// `L[d − 1 − coded][d − 1 − step]` of the steps before this one.
    #[inline(always)]
    fn of_step(&self, step: usize) -> &[f32] {
        &self.factors[step * step.saturating_sub(1) / 2..][..step]
    }
}

impl Codec {
    /// [`Codec::pack`] with error feedback: with e = x − x̂ and G = L D Lᵀ, `eᵀGe = Σᵢ Dᵢ (eᵢ + Σ_{j>i} L_ji e_j)²`, so
    /// coordinates are coded from the last to the first, and coordinate i takes the code of
    /// `xᵢ + Σ_{j>i} L_ji (x_j − x̂_j)` instead of that of xᵢ.
    ///
    /// `x`: `[tokens, d]`; `packed`: `[tokens, n_bytes]`. Scale and zero point come from x, and codes from the unrounded
    /// ones, as `pack` has them: with L = I the bytes are `pack`'s. x̂ is what [`Codec::unpack`] reads, so the rounding of
    /// scale and zero point is made up for, too. A group with a single code (all zeros, a clipped range of one point) has
    /// nothing to choose. Targets are f64, with products and sums rounded apart: the bytes are the same on every machine.
    ///
    /// 16 token-heads are coded together and cost little more than one: pass as many as there are. Targets reach further
    /// than x does, so a range that fits x is narrow for them: QuEST's α wants about 1.25 times α_b at 2 bits.
    ///
    /// # Errors
    /// `Length`, also for a `feedback` of another head dimension; `OutOfRange`, as `pack`.
    pub fn pack_with_feedback(&self, x: &[f32], feedback: &Feedback, packed: &mut [u8]) -> Result<()> {
        check_length("feedback's rows", self.layout().head_dim(), feedback.head_dim)?;
        self.run_pack(x, packed, |codec, x, packed| PackWithFeedback { codec, feedback, x, packed })
    }
}

/// Packs token-heads until one is out of range; its index then.
struct PackWithFeedback<'a> {
    codec: &'a Codec,
    feedback: &'a Feedback,
    x: &'a [f32],
    packed: &'a mut [u8],
}

impl Work for PackWithFeedback<'_> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> Option<usize> {
        let Self { codec, feedback, x, packed } = self;
        let (dim, n_bytes) = (codec.layout().head_dim(), codec.layout().n_bytes());
        let mut block = Block::new(dim);
        let blocks = x.chunks(LANES * dim).zip(packed.chunks_mut(LANES * n_bytes));
        for (index, (x, packed)) in blocks.enumerate() {
            let n_tokens = x.len() / dim;
            let n_fitting = block.load(codec, x, packed);
            block.code(feedback, f64::from(codec.layout().bits().max_code()));
            block.store(codec, n_fitting, packed);
            if n_fitting < n_tokens {
                return Some(index * LANES + n_fitting);
            }
        }
        None
    }
}

/// One number for each of 16 token-heads.
type PerToken = [f64; LANES];

/// 16 token-heads, coordinate by coordinate.
struct Block {
    maps: Maps,
    /// Codes of groups that have only one.
    constants: [Option<u8>; LANES],
    /// `[d]`, as given.
    x: Vec<PerToken>,
    /// `[d]`: x − x̂ in the order of coding.
    errors: Vec<PerToken>,
    /// `[d]`.
    codes: Vec<[u8; LANES]>,
}

/// The maps of [`Affine::Steps`], and what `unpack` will read.
#[derive(Clone, Copy)]
struct Maps {
    scale: PerToken,
    shift: PerToken,
    half: PerToken,
    base: PerToken,
    stored_scale: PerToken,
    stored_zero: PerToken,
}

impl Maps {
    /// Of lanes that hold nothing: all codes are 0.
    const EMPTY: Self = Self {
        scale: [1.0; LANES],
        shift: [0.0; LANES],
        half: [0.0; LANES],
        base: [0.0; LANES],
        stored_scale: [0.0; LANES],
        stored_zero: [0.0; LANES],
    };
}

impl Block {
    fn new(dim: usize) -> Self {
        let zeros = vec![[0.0; LANES]; dim];
        let codes = vec![[0; LANES]; dim];
        Self { maps: Maps::EMPTY, constants: [None; LANES], x: zeros.clone(), errors: zeros, codes }
    }

    /// Takes in token-heads up to the first that is out of range, and stores their scales; how many there are.
    #[inline(always)]
    fn load(&mut self, codec: &Codec, x: &[f32], packed: &mut [u8]) -> usize {
        let layout = codec.layout();
        (self.maps, self.constants) = (Maps::EMPTY, [None; LANES]);
        self.x.fill([0.0; LANES]);
        let tokens = x.chunks_exact(layout.head_dim()).zip(packed.chunks_exact_mut(layout.n_bytes()));
        let mut n_fitting = 0;
        for (lane, (x, record)) in tokens.enumerate() {
            let extent = Extent::of(x);
            if !extent.fits() {
                break;
            }
            let map = affine_map(codec.quantizer(), x, &extent);
            let (scale, zero) = map.stored();
            layout.put_scales(scale, zero, record);
            let (stored_scale, stored_zero) = layout.scales(record);
            match map {
                Affine::Constant { code, .. } => self.constants[lane] = Some(code),
                Affine::Steps { scale, shift, half, base, .. } => {
                    let maps = &mut self.maps;
                    (maps.scale[lane], maps.shift[lane]) = (scale, shift);
                    (maps.half[lane], maps.base[lane]) = (half, base);
                    (maps.stored_scale[lane], maps.stored_zero[lane]) = (stored_scale.into(), stored_zero.into());
                }
            }
            self.x.iter_mut().zip(x).for_each(|(lanes, &x)| lanes[lane] = x.into());
            n_fitting += 1;
        }
        n_fitting
    }

    /// Codes all lanes, from the last coordinate to the first.
    #[inline(always)]
    fn code(&mut self, feedback: &Feedback, top: f64) {
        for step in 0..self.x.len() {
            let mut made_up = [0.0; LANES];
            // Sums in registers; and a sum whose order is fixed is nothing that the compiler would turn into gathers.
            for (errors, &factor) in self.errors.iter().zip(feedback.of_step(step)) {
                let factor = f64::from(factor);
                // Not fused: the same bits on every machine.
                made_up.iter_mut().zip(errors).for_each(|(sum, error)| *sum += factor * error);
            }
            self.errors[step] = self.code_one(self.x.len() - 1 - step, &made_up, top);
        }
    }

    /// Codes one coordinate of all lanes; the errors x − x̂.
    #[inline(always)]
    fn code_one(&mut self, i: usize, made_up: &PerToken, top: f64) -> PerToken {
        let (maps, x) = (&self.maps, &self.x[i]);
        let mut errors = [0.0; LANES];
        for (lane, (error, code)) in errors.iter_mut().zip(&mut self.codes[i]).enumerate() {
            let target = x[lane] + made_up[lane];
            let steps = ((target / maps.scale[lane] + maps.shift[lane]) + maps.half[lane]).floor() + maps.base[lane];
            let steps = if steps < 0.0 {
                0.0
            } else if steps > top {
                top
            } else {
                steps
            };
            *code = small_integer(steps);
            *error = x[lane] - maps.stored_scale[lane] * (steps - maps.stored_zero[lane]);
        }
        errors
    }

    /// Writes the codes of the first `n_tokens` lanes.
    #[inline(always)]
    fn store(&self, codec: &Codec, n_tokens: usize, packed: &mut [u8]) {
        let layout = codec.layout();
        let mut codes = [0; MAX_HEAD_DIM];
        let codes = &mut codes[..layout.head_dim()];
        for (lane, record) in packed.chunks_exact_mut(layout.n_bytes()).take(n_tokens).enumerate() {
            match self.constants[lane] {
                Some(code) => codes.fill(code),
                None => codes.iter_mut().zip(&self.codes).for_each(|(code, lanes)| *code = lanes[lane]),
            }
            pack_codes(layout, codes, record);
        }
    }
}
