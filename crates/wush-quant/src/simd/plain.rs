//! The two products in plain Rust: the definition that `avx512` follows, and what runs elsewhere. Enters: packed
//! token-heads, and queries or weights. Leaves: scores, sums.

use super::Work;
use crate::attention::{Accumulators, Queries, Row};
use crate::layout::{LANES, Rows};
use crate::{Bits, Layout};

/// Arguments of [`Codec::dot`](crate::Codec::dot).
pub(super) struct Dot<'a> {
    pub(super) layout: &'a Layout,
    pub(super) order: &'a Rows,
    pub(super) queries: &'a Queries,
    /// `[tokens, n_bytes]`.
    pub(super) packed: &'a [u8],
    /// `[queries, tokens]`.
    pub(super) scores: &'a mut [f32],
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
        let n_queries = self.queries.n_queries();
        let mut first = 0;
        while first < n_queries {
            first += match n_queries - first {
                1 => self.group::<FMA, BITS, 1>(first),
                2 => self.group::<FMA, BITS, 2>(first),
                3 => self.group::<FMA, BITS, 3>(first),
                _ => self.group::<FMA, BITS, 4>(first),
            };
        }
    }

    /// N queries from `first` on, against all tokens; N.
    #[inline(always)]
    fn group<const FMA: bool, const BITS: u32, const N: usize>(&mut self, first: usize) -> usize {
        let n_bytes = self.layout.n_bytes();
        let n_tokens = self.packed.len() / n_bytes;
        for (token, record) in self.packed.chunks_exact(n_bytes).enumerate() {
            let products = self.products::<FMA, BITS, N>(first, record);
            let (scale, zero) = self.layout.scales(record);
            for (query, product) in (first..).zip(products) {
                self.scores[query * n_tokens + token] = scale * (product - zero * self.queries.sums[query]);
            }
        }
        N
    }

    /// `Σ qᵢ codeᵢ` of N queries.
    #[inline(always)]
    fn products<const FMA: bool, const BITS: u32, const N: usize>(&self, first: usize, record: &[u8]) -> [f32; N] {
        let mut sums = [[0.0f32; LANES]; N];
        let n_queries = self.queries.n_queries();
        for (block, rows) in self.queries.rows.chunks_exact(n_queries * self.order.per_block).enumerate() {
            let mut words = Words::<BITS>::of(self.layout, self.order, record, block);
            for row in rows.chunks_exact(n_queries) {
                let codes = words.next();
                for (sums, query) in sums.iter_mut().zip(&row[first..first + N]) {
                    for ((sum, &query), &code) in sums.iter_mut().zip(&query.0).zip(&codes) {
                        *sum = fused::<FMA>(query, code, *sum);
                    }
                }
            }
        }
        sums.map(|lanes| sum_of_lanes(&lanes))
    }
}

/// Arguments of [`Codec::axpy`](crate::Codec::axpy).
pub(super) struct Axpy<'a> {
    pub(super) layout: &'a Layout,
    pub(super) order: &'a Rows,
    /// `[queries, tokens]`.
    pub(super) weights: &'a [f32],
    /// `[tokens, n_bytes]`.
    pub(super) packed: &'a [u8],
    pub(super) sums: &'a mut Accumulators,
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
        let (n_bytes, n_queries) = (self.layout.n_bytes(), self.sums.n_queries());
        let n_tokens = self.packed.len() / n_bytes;
        for (token, record) in self.packed.chunks_exact(n_bytes).enumerate() {
            let (scale, zero) = self.layout.scales(record);
            for (query, offset) in self.sums.offsets.iter_mut().enumerate() {
                *offset = fused::<FMA>(self.weights[query * n_tokens + token] * scale, zero, *offset);
            }
            let blocks = self.sums.rows.chunks_exact_mut(n_queries * self.order.per_block);
            for (block, rows) in blocks.enumerate() {
                let mut words = Words::<BITS>::of(self.layout, self.order, record, block);
                for row in rows.chunks_exact_mut(n_queries) {
                    let codes = words.next();
                    for (query, Row(sums)) in row.iter_mut().enumerate() {
                        let weight = self.weights[query * n_tokens + token] * scale;
                        for (sum, &code) in sums.iter_mut().zip(&codes) {
                            *sum = fused::<FMA>(weight, code, *sum);
                        }
                    }
                }
            }
        }
    }
}

/// The words of one block of a record, spread over the lanes and shifted to the next row; see [`Rows`].
struct Words<const BITS: u32> {
    /// Words; at 3 bits, of the low plane.
    low: [u32; LANES],
    /// At 3 bits the high plane, two bits to the left.
    high: [u32; LANES],
    positions: u32,
}

impl<const BITS: u32> Words<BITS> {
    const WIDTH: u32 = if BITS == 3 { 2 } else { BITS };

    #[inline(always)]
    fn of(layout: &Layout, order: &Rows, record: &[u8], block: usize) -> Self {
        let (low, high) = record[..layout.code_bytes()].split_at(4 * layout.n_words());
        let mut words = Self { low: [0; LANES], high: [0; LANES], positions: order.positions() as u32 };
        for (word, bytes) in words.low.iter_mut().zip(low[4 * LANES * block..].chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        if BITS == 3 {
            for (word, bytes) in words.high.iter_mut().zip(high[2 * LANES * block..].chunks_exact(2)) {
                *word = u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 2;
            }
        }
        for lane in order.width..LANES {
            let position = (lane / order.width) as u32;
            words.low[lane] = words.low[lane % order.width] >> (Self::WIDTH * position);
            words.high[lane] = words.high[lane % order.width] >> position;
        }
        words
    }

    /// Codes of the next row.
    #[inline(always)]
    fn next(&mut self) -> [f32; LANES] {
        let mut codes = [0.0; LANES];
        for ((code, low), high) in codes.iter_mut().zip(&mut self.low).zip(&mut self.high) {
            let mut bits = *low & ((1 << Self::WIDTH) - 1);
            *low >>= Self::WIDTH * self.positions & 31;
            if BITS == 3 {
                bits |= *high & 4;
                *high >>= self.positions;
            }
            *code = bits.cast_signed() as f32;
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
    let eight: [f32; 8] = std::array::from_fn(|i| lanes[i] + lanes[i + 8]);
    let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}
