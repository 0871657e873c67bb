//! The two products in plain Rust: the definition that `avx512` follows, and what runs elsewhere. Enters: packed
//! token-heads, and queries or weights. Leaves: scores, sums.

use super::Work;
use super::tokens::{Tokens, sixteen};
use crate::attention::{Accumulators, Queries, Row};
use crate::layout::{LANES, Rows};
use crate::{Bits, Layout};

/// Arguments of [`Codec::dot`](crate::Codec::dot).
pub(crate) struct Dot<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) order: &'a Rows,
    pub(crate) queries: &'a Queries,
    /// `[tokens, n_bytes]`.
    pub(crate) packed: &'a [u8],
    /// `[queries, tokens]`.
    pub(crate) scores: &'a mut [f32],
}

impl Work for Dot<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(mut self) {
        match self.layout.bits() {
            Bits::Two => self.all::<FMA, 2>(),
            Bits::Three => self.all::<FMA, 3>(),
            Bits::Four => self.all::<FMA, 4>(),
            Bits::Eight => self.all::<FMA, 8>(),
        }
    }
}

impl Dot<'_> {
    #[inline(always)]
    fn all<const FMA: bool, const BITS: u32>(&mut self) {
        let tokens = Tokens::new(self.layout, self.packed);
        let n_tokens = tokens.len();
        let mut sums = vec![Row::default(); self.queries.n_queries()];
        for token in 0..n_tokens {
            let packed = tokens.from(token);
            self.products::<FMA, BITS>(packed, &mut sums);
            let (scale, zero) = self.layout.scales(packed);
            for (query, (sums, sum)) in sums.iter().zip(&self.queries.sums).enumerate() {
                self.scores[query * n_tokens + token] = scale * (sum_of_lanes(&sums.0) - zero * sum);
            }
        }
    }

    /// `Σ qᵢ codeᵢ` of the first token-head of `packed` and every query, in partial sums.
    #[inline(always)]
    fn products<const FMA: bool, const BITS: u32>(&self, packed: &[u8], sums: &mut [Row]) {
        sums.fill(Row::default());
        let n_queries = sums.len();
        for (block, rows) in self.queries.rows.chunks_exact(n_queries * self.order.per_block).enumerate() {
            let words = Words::<BITS>::of(self.layout, self.order, packed, block);
            for (step, row) in rows.chunks_exact(n_queries).enumerate() {
                let codes = words.codes(step);
                for (Row(sums), Row(query)) in sums.iter_mut().zip(row) {
                    // By value: the compiler need not fear that storing a sum changes the query.
                    let (query, mut sum) = (*query, *sums);
                    for lane in 0..LANES {
                        sum[lane] = fused::<FMA>(query[lane], codes[lane], sum[lane]);
                    }
                    *sums = sum;
                }
            }
        }
    }
}

/// Arguments of [`Codec::axpy`](crate::Codec::axpy).
pub(crate) struct Axpy<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) order: &'a Rows,
    /// `[queries, tokens]`.
    pub(crate) weights: &'a [f32],
    /// `[tokens, n_bytes]`.
    pub(crate) packed: &'a [u8],
    pub(crate) sums: &'a mut Accumulators,
}

impl Work for Axpy<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(mut self) {
        match self.layout.bits() {
            Bits::Two => self.all::<FMA, 2>(),
            Bits::Three => self.all::<FMA, 3>(),
            Bits::Four => self.all::<FMA, 4>(),
            Bits::Eight => self.all::<FMA, 8>(),
        }
    }
}

impl Axpy<'_> {
    #[inline(always)]
    fn all<const FMA: bool, const BITS: u32>(&mut self) {
        let tokens = Tokens::new(self.layout, self.packed);
        let (n_tokens, n_queries) = (tokens.len(), self.sums.n_queries());
        let mut weights = vec![0.0f32; n_queries];
        for token in 0..n_tokens {
            let packed = tokens.from(token);
            let (scale, zero) = self.layout.scales(packed);
            for (query, weight) in weights.iter_mut().enumerate() {
                *weight = self.weights[query * n_tokens + token] * scale;
                self.sums.offsets[query] += *weight * zero;
            }
            let blocks = self.sums.rows.chunks_exact_mut(n_queries * self.order.per_block);
            for (block, rows) in blocks.enumerate() {
                let words = Words::<BITS>::of(self.layout, self.order, packed, block);
                for (step, row) in rows.chunks_exact_mut(n_queries).enumerate() {
                    let codes = words.codes(step);
                    for (Row(sums), &weight) in row.iter_mut().zip(&weights) {
                        for lane in 0..LANES {
                            sums[lane] = fused::<FMA>(weight, codes[lane], sums[lane]);
                        }
                    }
                }
            }
        }
    }
}

/// The words of one block of a record, spread over the lanes; see [`Rows`]. Lanes without a word hold anything: they meet
/// queries of zero, and sums that nobody reads.
struct Words<const BITS: u32> {
    /// Words; at 3 bits, of the low plane.
    low: [u32; LANES],
    /// At 3 bits the high plane, two bits to the left.
    high: [u32; LANES],
}

impl<const BITS: u32> Words<BITS> {
    const WIDTH: u32 = if BITS == 3 { 2 } else { BITS };

    /// Of the first record of `packed`.
    #[inline(always)]
    fn of(layout: &Layout, order: &Rows, packed: &[u8], block: usize) -> Self {
        let low = sixteen::<4>(&packed[4 * LANES * block..]);
        let mut words = Self { low: [0; LANES], high: [0; LANES] };
        for lane in 0..LANES {
            words.low[lane] = u32::from_le_bytes(low[lane]);
        }
        if BITS == 3 {
            let high = sixteen::<2>(&packed[4 * layout.n_words() + 2 * LANES * block..]);
            for lane in 0..LANES {
                words.high[lane] = u32::from(u16::from_le_bytes(high[lane])) << 2;
            }
        }
        match order.width {
            4 => words.repeated::<4>(order.per_block as u32),
            8 => words.repeated::<8>(order.per_block as u32),
            _ => words,
        }
    }

    /// The first W lanes again and again, each time `per_block` positions further.
    #[inline(always)]
    fn repeated<const W: usize>(mut self, per_block: u32) -> Self {
        let (low, high) = (self.low, self.high);
        for lane in 0..LANES {
            let positions = (lane / W) as u32 * per_block;
            self.low[lane] = low[lane % W] >> (Self::WIDTH * positions);
            self.high[lane] = high[lane % W] >> positions;
        }
        self
    }

    /// Codes of row `step` of the block.
    #[inline(always)]
    fn codes(&self, step: usize) -> [f32; LANES] {
        let mut codes = [0.0; LANES];
        let step = step as u32;
        for lane in 0..LANES {
            let mut bits = (self.low[lane] >> (Self::WIDTH * step)) & ((1 << Self::WIDTH) - 1);
            if BITS == 3 {
                bits |= (self.high[lane] >> step) & 4;
            }
            codes[lane] = bits.cast_signed() as f32;
        }
        codes
    }
}

#[inline(always)]
fn fused<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Halves added to halves.
#[inline(always)]
fn sum_of_lanes(lanes: &[f32; LANES]) -> f32 {
    let mut sums = *lanes;
    let mut n = LANES / 2;
    while n > 0 {
        for lane in 0..n {
            sums[lane] += sums[lane + n];
        }
        n /= 2;
    }
    sums[0]
}
