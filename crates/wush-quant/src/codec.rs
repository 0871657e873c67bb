//! Packing and unpacking. Enters: token-heads in f32, or packed bytes. Leaves: the other. Every length is checked here,
//! once; the kernels below rely on it.

use crate::affine::{Affine, Extent};
use crate::attention::{Accumulators, Queries};
use crate::layout::{Rows, codes_per_word};
use crate::simd::{self, Axpy, Dot, Level, Work};
use crate::{Bits, Kind, Layout, MAX_HEAD_DIM, QuantError, Quantizer, Result, oscar, quest};

/// A quantizer for heads of one dimension, with the machine's vector instructions chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Codec {
    quantizer: Quantizer,
    layout: Layout,
    rows: Rows,
    level: Level,
}

impl Codec {
    /// For heads of `head_dim` coordinates, on the widest vectors of this machine.
    ///
    /// # Errors
    /// `HeadDim`.
    pub fn new(head_dim: usize, quantizer: Quantizer) -> Result<Self> {
        let layout = Layout::new(head_dim, quantizer.bits(), quantizer.scale_dtype())?;
        Ok(Self { quantizer, layout, rows: Rows::new(&layout), level: Level::widest() })
    }

    /// The same on other vectors: for tests and comparisons.
    ///
    /// # Errors
    /// `NoSuchLevel` when this machine does not have them.
    pub fn at(self, level: Level) -> Result<Self> {
        if level.is_available() {
            Ok(Self { level, ..self })
        } else {
            Err(QuantError::NoSuchLevel { level: level.name() })
        }
    }

    /// The quantizer.
    pub const fn quantizer(&self) -> &Quantizer {
        &self.quantizer
    }

    /// The bytes of a record.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The vectors in use.
    pub const fn level(&self) -> Level {
        self.level
    }

    /// Quantizes token-heads `x`, `[tokens, d]`, into `packed`, `[tokens, n_bytes]`.
    ///
    /// Codes come from the scale and zero point in f64, as Eq. 5 and 7 define them, and are the same on every machine. Only
    /// then are both rounded for storage (f64 → f32 → bf16, to nearest even): with u = 2⁻⁸ for bf16 and 2⁻²⁴ for f32, the
    /// stored reconstruction differs from the equation's by at most `scale · (u |code − zero| + u |zero| + u² |zero|)` per
    /// coordinate, as long as the scale is a normal number of its type. (A scale below 2⁻¹²⁶ loses digits, and below
    /// 2⁻¹³⁴ bf16 keeps none: the group reads as zeros.)
    ///
    /// # Errors
    /// `Length`; `OutOfRange` for a NaN, an infinity or a magnitude beyond [`MAX_MAGNITUDE`](crate::MAX_MAGNITUDE), which
    /// leaves the token-heads before it packed.
    pub fn pack(&self, x: &[f32], packed: &mut [u8]) -> Result<()> {
        self.run_pack(x, packed, |codec, x, packed| Pack { codec, x, packed })
    }

    /// Runs a packing loop, which returns the first token-head that is out of range, on slices whose lengths fit.
    pub(crate) fn run_pack<'a, W: Work<Output = Option<usize>>>(
        &'a self,
        x: &'a [f32],
        packed: &'a mut [u8],
        work: impl FnOnce(&'a Self, &'a [f32], &'a mut [u8]) -> W,
    ) -> Result<()> {
        let n_tokens = self.n_tokens(x.len())?;
        check_length("packed bytes", n_tokens * self.layout.n_bytes(), packed.len())?;
        match simd::run(self.level, work(self, x, packed)) {
            None => Ok(()),
            Some(token) => Err(out_of_range(&x[token * self.layout.head_dim()..][..self.layout.head_dim()], token)),
        }
    }

    /// Reads packed token-heads, `[tokens, n_bytes]`, back into `x`, `[tokens, d]`: `scale (code − zero)` in f32.
    ///
    /// # Errors
    /// `Length`.
    pub fn unpack(&self, packed: &[u8], x: &mut [f32]) -> Result<()> {
        let n_tokens = self.n_tokens(x.len())?;
        check_length("packed bytes", n_tokens * self.layout.n_bytes(), packed.len())?;
        simd::run(self.level, Unpack { codec: self, packed, x });
        Ok(())
    }

    /// Codes of one packed token-head into `codes`, `[d]`; returns scale and zero point.
    ///
    /// # Errors
    /// `Length`.
    pub fn codes(&self, record: &[u8], codes: &mut [u8]) -> Result<(f32, f32)> {
        check_length("codes", self.layout.head_dim(), codes.len())?;
        check_length("packed bytes", self.layout.n_bytes(), record.len())?;
        unpack_codes(&self.layout, record, codes);
        Ok(self.layout.scales(record))
    }

    /// Scores of every query against every packed key: `scores[query][token] = Σᵢ qᵢ k̂ᵢ = scale (Σᵢ qᵢ codeᵢ − zero Σᵢ qᵢ)`.
    ///
    /// `packed`: `[tokens, n_bytes]`; `scores`: `[queries, tokens]`, overwritten. Accumulates in f32, in 16 partial sums; the
    /// rounding error is at most `(d/16 + 8) ε scale (max_code + |zero|) Σ |qᵢ|` with ε = 2⁻²³.
    ///
    /// # Errors
    /// `Length`, `OtherLayout`.
    pub fn dot(&self, queries: &Queries, packed: &[u8], scores: &mut [f32]) -> Result<()> {
        queries.check(&self.layout)?;
        let n_tokens = self.n_packed(packed)?;
        check_length("scores", n_tokens * queries.n_queries(), scores.len())?;
        if scores.is_empty() {
            return Ok(());
        }
        simd::dot(self.level, Dot { layout: &self.layout, order: &self.rows, queries, packed, scores });
        Ok(())
    }

    /// Adds every packed value to every accumulator, weighted: `sum[query] += Σ_t weights[query][t] v̂_t`.
    ///
    /// `packed`: `[tokens, n_bytes]`; `weights`: `[queries, tokens]`. Accumulates in f32, `Σ_t (w_t scale_t) code_t` apart
    /// from `Σ_t w_t scale_t zero_t`. A call has a fixed cost: pass 64 tokens or more where there are so many.
    ///
    /// # Errors
    /// `Length`, `OtherLayout`.
    pub fn axpy(&self, weights: &[f32], packed: &[u8], sums: &mut Accumulators) -> Result<()> {
        sums.check(&self.layout)?;
        let n_tokens = self.n_packed(packed)?;
        check_length("weights", n_tokens * sums.n_queries(), weights.len())?;
        if weights.is_empty() {
            return Ok(());
        }
        simd::axpy(self.level, Axpy { layout: &self.layout, order: &self.rows, weights, packed, sums });
        Ok(())
    }

    fn n_tokens(&self, n_coordinates: usize) -> Result<usize> {
        let n_tokens = n_coordinates / self.layout.head_dim();
        check_length("token-heads", n_tokens * self.layout.head_dim(), n_coordinates)?;
        Ok(n_tokens)
    }

    fn n_packed(&self, packed: &[u8]) -> Result<usize> {
        let n_tokens = packed.len() / self.layout.n_bytes();
        check_length("packed bytes", n_tokens * self.layout.n_bytes(), packed.len())?;
        Ok(n_tokens)
    }
}

pub(crate) fn check_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(QuantError::Length { what, expected, found }) }
}

fn out_of_range(x: &[f32], token: usize) -> QuantError {
    let fits = |x: &f32| x.abs() <= crate::MAX_MAGNITUDE;
    let coordinate = x.iter().position(|x| !fits(x)).unwrap_or(0);
    QuantError::OutOfRange { token, coordinate, value: x[coordinate] }
}

/// Packs token-heads until one is out of range; its index then.
struct Pack<'a> {
    codec: &'a Codec,
    x: &'a [f32],
    packed: &'a mut [u8],
}

impl Work for Pack<'_> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> Option<usize> {
        let layout = &self.codec.layout;
        let mut codes = [0; MAX_HEAD_DIM];
        let codes = &mut codes[..layout.head_dim()];
        let tokens = self.x.chunks_exact(layout.head_dim()).zip(self.packed.chunks_exact_mut(layout.n_bytes()));
        for (token, (x, record)) in tokens.enumerate() {
            let extent = Extent::of(x);
            if !extent.fits() {
                return Some(token);
            }
            let map = affine_map(&self.codec.quantizer, x, &extent);
            map.codes(x, layout.bits(), codes);
            pack_codes(layout, codes, record);
            let (scale, zero) = map.stored();
            layout.put_scales(scale, zero, record);
        }
        None
    }
}

/// The map of one token-head.
#[inline(always)]
pub(crate) fn affine_map(quantizer: &Quantizer, x: &[f32], extent: &Extent) -> Affine {
    match quantizer.kind() {
        Kind::Quest { alpha } => quest::affine(x, quantizer.bits(), alpha),
        Kind::Oscar { kappa, quantile } => oscar::affine(x, extent, quantizer.bits(), kappa, quantile),
    }
}

/// Most words of a head: 8 bits.
const MAX_WORDS: usize = MAX_HEAD_DIM / codes_per_word(Bits::Eight);

/// Writes codes `[d]` into the record's words (and half-words), see [`Layout`].
#[inline(always)]
pub(crate) fn pack_codes(layout: &Layout, codes: &[u8], record: &mut [u8]) {
    let n_words = layout.n_words();
    let (low, high) = record[..layout.code_bytes()].split_at_mut(4 * n_words);
    let (low, _) = low.as_chunks_mut();
    for_usual_widths(n_words, |n_words| pack_plane(codes, n_words, 0, plane_width(layout.bits()), low));
    high.fill(0);
    if layout.bits() == Bits::Three {
        let mut halves = [[0; 4]; MAX_WORDS];
        for_usual_widths(n_words, |n_words| pack_plane(codes, n_words, 2, 1, &mut halves));
        let (high, _) = high.as_chunks_mut::<2>();
        high.iter_mut().zip(&halves[..n_words]).for_each(|(half, word)| *half = [word[0], word[1]]);
    }
}

/// Bits of a code in its word.
const fn plane_width(bits: Bits) -> u32 {
    match bits {
        Bits::Three => 2,
        _ => bits.get() as u32,
    }
}

/// Runs `work(n)`, compiled apart for the numbers of words of usual head dimensions: a loop over so few is only fast when
/// its length is known.
#[inline(always)]
fn for_usual_widths(n_words: usize, mut work: impl FnMut(usize)) {
    match n_words {
        4 => work(4),
        8 => work(8),
        16 => work(16),
        32 => work(32),
        _ => work(n_words),
    }
}

/// `words[w] = Σ_p (codes[p n_words + w] >> skip) mod 2^width << (p width)`.
#[inline(always)]
fn pack_plane(codes: &[u8], n_words: usize, skip: u32, width: u32, words: &mut [[u8; 4]]) {
    let mut sums = [0u32; MAX_WORDS];
    let sums = &mut sums[..n_words];
    for (position, codes) in codes.chunks(n_words).enumerate() {
        let (shift, mask) = (position as u32 * width, (1 << width) - 1);
        for (sum, &code) in sums.iter_mut().zip(codes) {
            *sum |= ((u32::from(code) >> skip) & mask) << shift;
        }
    }
    words.iter_mut().zip(sums).for_each(|(word, sum)| *word = sum.to_le_bytes());
}

/// Reads codes `[d]` from a record.
#[inline(always)]
fn unpack_codes(layout: &Layout, record: &[u8], codes: &mut [u8]) {
    let n_words = layout.n_words();
    let (low, high) = record[..layout.code_bytes()].split_at(4 * n_words);
    let (low, _) = low.as_chunks();
    let width = plane_width(layout.bits());
    for_usual_widths(n_words, |n_words| unpack_plane(low, n_words, width, codes, |code| code as u8));
    if layout.bits() == Bits::Three {
        let (high, _) = high.as_chunks();
        for_usual_widths(n_words, |n_words| {
            for (position, codes) in codes.chunks_mut(n_words).enumerate() {
                for (code, &half) in codes.iter_mut().zip(high) {
                    *code |= (((u16::from_le_bytes(half) >> position) & 1) << 2) as u8;
                }
            }
        });
    }
}

/// Undoes [`pack_plane`]: `out[p n_words + w] = value(words[w] >> (p width) mod 2^width)`.
#[inline(always)]
fn unpack_plane<T>(words: &[[u8; 4]], n_words: usize, width: u32, out: &mut [T], value: impl Fn(u32) -> T) {
    for (position, out) in out.chunks_mut(n_words).enumerate() {
        let (shift, mask) = (position as u32 * width, (1 << width) - 1);
        for (out, &word) in out.iter_mut().zip(words) {
            *out = value((u32::from_le_bytes(word) >> shift) & mask);
        }
    }
}

struct Unpack<'a> {
    codec: &'a Codec,
    packed: &'a [u8],
    x: &'a mut [f32],
}

impl Work for Unpack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let layout = &self.codec.layout;
        let mut codes = [0; MAX_HEAD_DIM];
        let codes = &mut codes[..layout.head_dim()];
        let tokens = self.packed.chunks_exact(layout.n_bytes()).zip(self.x.chunks_exact_mut(layout.head_dim()));
        for (record, x) in tokens {
            let (scale, zero) = layout.scales(record);
            if layout.bits() == Bits::Three {
                unpack_codes(layout, record, codes);
                x.iter_mut().zip(&*codes).for_each(|(x, &code)| *x = scale * (f32::from(code) - zero));
                continue;
            }
            let (words, _) = record[..layout.code_bytes()].as_chunks();
            for_usual_widths(layout.n_words(), |n_words| {
                unpack_plane(words, n_words, plane_width(layout.bits()), x, |code| {
                    scale * (code.cast_signed() as f32 - zero)
                });
            });
        }
    }
}
