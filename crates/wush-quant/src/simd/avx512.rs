//! The two products for AVX-512: as `plain`, four tokens at a time. Enters: packed token-heads, and queries or weights.
//! Leaves: scores, sums, equal to `plain`'s within the rounding of another order of summation.
//!
//! A row of codes costs two instructions: a shift, and a table look-up that turns the low four bits of each lane into the
//! code as f32. Scores need one sum over lanes each; those of four tokens share theirs.

use std::arch::x86_64::*;

use super::plain::{Axpy, Dot};
use crate::attention::Row;
use crate::layout::{LANES, Rows};
use crate::{Bits, Layout};

/// Tokens taken together.
const TILE: usize = 4;

/// See [`Dot`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn dot(mut dot: Dot<'_>) {
    let n_queries = dot.queries.n_queries();
    let mut first = 0;
    while first < n_queries {
        first += match (dot.layout.bits(), n_queries - first) {
            (Bits::Two, 1) => dot_group::<2, 1>(&mut dot, first),
            (Bits::Two, 2) => dot_group::<2, 2>(&mut dot, first),
            (Bits::Two, 3) => dot_group::<2, 3>(&mut dot, first),
            (Bits::Two, _) => dot_group::<2, 4>(&mut dot, first),
            (Bits::Three, 1) => dot_group::<3, 1>(&mut dot, first),
            (Bits::Three, 2) => dot_group::<3, 2>(&mut dot, first),
            (Bits::Three, 3) => dot_group::<3, 3>(&mut dot, first),
            (Bits::Three, _) => dot_group::<3, 4>(&mut dot, first),
            (Bits::Four, 1) => dot_group::<4, 1>(&mut dot, first),
            (Bits::Four, 2) => dot_group::<4, 2>(&mut dot, first),
            (Bits::Four, 3) => dot_group::<4, 3>(&mut dot, first),
            (Bits::Four, _) => dot_group::<4, 4>(&mut dot, first),
            (Bits::Eight, 1) => dot_group::<8, 1>(&mut dot, first),
            (Bits::Eight, 2) => dot_group::<8, 2>(&mut dot, first),
            (Bits::Eight, 3) => dot_group::<8, 3>(&mut dot, first),
            (Bits::Eight, _) => dot_group::<8, 4>(&mut dot, first),
        };
    }
}

/// N queries from `first` on, against all tokens; N.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn dot_group<const BITS: u32, const N: usize>(dot: &mut Dot<'_>, first: usize) -> usize {
    let n_bytes = dot.layout.n_bytes();
    let n_tokens = dot.packed.len() / n_bytes;
    let spread = Spread::<BITS>::new(dot.order);
    for token in (0..n_tokens).step_by(TILE) {
        let records = tile(dot.packed, n_bytes, token, n_tokens);
        let products = dot_tile::<BITS, N>(dot, &spread, first, &records);
        let scales = records.map(|record| dot.layout.scales(record));
        for (query, products) in (first..).zip(products) {
            let sum = dot.queries.sums[query];
            let scores = &mut dot.scores[query * n_tokens..][..n_tokens][token..];
            for ((score, product), (scale, zero)) in scores.iter_mut().zip(products).zip(scales) {
                *score = scale * (product - zero * sum);
            }
        }
    }
    N
}

/// The records of up to four tokens; the last one again where there are fewer.
#[inline(always)]
fn tile(packed: &[u8], n_bytes: usize, token: usize, n_tokens: usize) -> [&[u8]; TILE] {
    std::array::from_fn(|i| &packed[(token + i).min(n_tokens - 1) * n_bytes..][..n_bytes])
}

/// `Σ qᵢ codeᵢ` of N queries and four tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn dot_tile<const BITS: u32, const N: usize>(
    dot: &Dot<'_>,
    spread: &Spread<BITS>,
    first: usize,
    records: &[&[u8]; TILE],
) -> [[f32; TILE]; N] {
    let mut sums = [[_mm512_setzero_ps(); TILE]; N];
    let n_queries = dot.queries.n_queries();
    for (block, rows) in dot.queries.rows.chunks_exact(n_queries * dot.order.per_block).enumerate() {
        let mut words = [(_mm512_setzero_si512(), _mm512_setzero_si512()); TILE];
        for (words, record) in words.iter_mut().zip(records) {
            *words = spread.words(dot.layout, record, block);
        }
        for row in rows.chunks_exact(n_queries) {
            let Some(row) = row[first..].first_chunk::<N>() else { continue };
            for t in 0..TILE {
                let codes = spread.next(&mut words[t]);
                for n in 0..N {
                    sums[n][t] = _mm512_fmadd_ps(load(&row[n]), codes, sums[n][t]);
                }
            }
        }
    }
    let mut products = [[0.0; TILE]; N];
    for (products, sums) in products.iter_mut().zip(sums) {
        *products = sums_of_lanes(sums);
    }
    products
}

/// See [`Axpy`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn axpy(mut axpy: Axpy<'_>) {
    match axpy.layout.bits() {
        Bits::Two => axpy_all::<2>(&mut axpy),
        Bits::Three => axpy_all::<3>(&mut axpy),
        Bits::Four => axpy_all::<4>(&mut axpy),
        Bits::Eight => axpy_all::<8>(&mut axpy),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn axpy_all<const BITS: u32>(axpy: &mut Axpy<'_>) {
    let (n_bytes, n_queries) = (axpy.layout.n_bytes(), axpy.sums.n_queries());
    let n_tokens = axpy.packed.len() / n_bytes;
    let spread = Spread::<BITS>::new(axpy.order);
    let mut weights = vec![[0.0f32; TILE]; n_queries];
    for token in (0..n_tokens).step_by(TILE) {
        let records = tile(axpy.packed, n_bytes, token, n_tokens);
        let scales = records.map(|record| axpy.layout.scales(record));
        for (query, (weights, offset)) in weights.iter_mut().zip(&mut axpy.sums.offsets).enumerate() {
            let given = &axpy.weights[query * n_tokens..][..n_tokens][token..];
            *weights = std::array::from_fn(|t| given.get(t).map_or(0.0, |weight| weight * scales[t].0));
            *offset += weights.iter().zip(&scales).map(|(weight, (_, zero))| weight * zero).sum::<f32>();
        }
        let blocks = axpy.sums.rows.chunks_exact_mut(n_queries * axpy.order.per_block);
        for (block, rows) in blocks.enumerate() {
            axpy_tile(&spread, axpy.layout, &records, block, &weights, rows);
        }
    }
}

/// Adds four tokens, weighted, to one block of rows of all queries.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn axpy_tile<const BITS: u32>(
    spread: &Spread<BITS>,
    layout: &Layout,
    records: &[&[u8]; TILE],
    block: usize,
    weights: &[[f32; TILE]],
    rows: &mut [Row],
) {
    let mut words = [(_mm512_setzero_si512(), _mm512_setzero_si512()); TILE];
    for (words, record) in words.iter_mut().zip(records) {
        *words = spread.words(layout, record, block);
    }
    for row in rows.chunks_exact_mut(weights.len()) {
        let mut codes = [_mm512_setzero_ps(); TILE];
        for (codes, words) in codes.iter_mut().zip(&mut words) {
            *codes = spread.next(words);
        }
        for (sum, weights) in row.iter_mut().zip(weights) {
            let even = _mm512_fmadd_ps(_mm512_set1_ps(weights[0]), codes[0], load(sum));
            let odd = _mm512_mul_ps(_mm512_set1_ps(weights[1]), codes[1]);
            let even = _mm512_fmadd_ps(_mm512_set1_ps(weights[2]), codes[2], even);
            let odd = _mm512_fmadd_ps(_mm512_set1_ps(weights[3]), codes[3], odd);
            store(_mm512_add_ps(even, odd), sum);
        }
    }
}

/// How the words of a block are spread over lanes, and read row by row; see [`Rows`].
#[derive(Clone, Copy)]
struct Spread<const BITS: u32> {
    /// The word of each lane.
    word: __m512i,
    /// Shift of each lane in the first row: of the words, and of the high plane at 3 bits.
    first: (__m512i, __m512i),
    /// Shift from row to row.
    step: (__m512i, __m512i),
    /// Codes as f32, by their low four bits.
    table: __m512,
}

impl<const BITS: u32> Spread<BITS> {
    const WIDTH: u32 = if BITS == 3 { 2 } else { BITS };

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    fn new(order: &Rows) -> Self {
        let lanes = |of: &dyn Fn(usize) -> usize| {
            let lanes: [i32; LANES] = std::array::from_fn(|lane| of(lane) as i32);
            // SAFETY: the array has the 64 bytes that are read; no alignment is asked for.
            unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
        };
        let codes: [f32; LANES] = std::array::from_fn(|bits| (bits & ((1 << BITS.min(4)) - 1)) as f32);
        let width = Self::WIDTH as usize;
        Self {
            word: lanes(&|lane| lane % order.width),
            first: (lanes(&|lane| width * (lane / order.width)), lanes(&|lane| lane / order.width)),
            step: (lanes(&|_| width * order.positions()), lanes(&|_| order.positions())),
            table: load(&Row(codes)),
        }
    }

    /// Words of one block of a record, ready for the first row.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    fn words(&self, layout: &Layout, record: &[u8], block: usize) -> (__m512i, __m512i) {
        let (low, high) = record[..layout.code_bytes()].split_at(4 * layout.n_words());
        let low = load_words(&low[4 * LANES * block..]);
        let low = _mm512_srlv_epi32(_mm512_permutexvar_epi32(self.word, low), self.first.0);
        if BITS != 3 {
            return (low, low);
        }
        let high = _mm512_slli_epi32::<2>(load_half_words(&high[2 * LANES * block..]));
        (low, _mm512_srlv_epi32(_mm512_permutexvar_epi32(self.word, high), self.first.1))
    }

    /// Codes of the next row.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    fn next(&self, words: &mut (__m512i, __m512i)) -> __m512 {
        let (low, high) = *words;
        words.0 = _mm512_srlv_epi32(low, self.step.0);
        match BITS {
            3 => {
                /// The low two bits of one, the rest of the other.
                const SELECT: i32 = 0xca;
                words.1 = _mm512_srlv_epi32(high, self.step.1);
                let both = _mm512_ternarylogic_epi32::<SELECT>(_mm512_set1_epi32(3), low, high);
                _mm512_permutexvar_ps(both, self.table)
            }
            8 => _mm512_cvtepi32_ps(_mm512_and_si512(low, _mm512_set1_epi32(0xff))),
            _ => _mm512_permutexvar_ps(low, self.table),
        }
    }
}

/// Up to 16 words; zeros behind the end of `bytes`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_words(bytes: &[u8]) -> __m512i {
    let mask = ((1u32 << (bytes.len() / 4).min(LANES)) - 1) as __mmask16;
    // SAFETY: the mask selects words inside `bytes` alone, and what it does not select is not accessed.
    unsafe { _mm512_maskz_loadu_epi32(mask, bytes.as_ptr().cast()) }
}

/// Up to 16 half-words, each in a lane of 32 bits; zeros behind the end of `bytes`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_half_words(bytes: &[u8]) -> __m512i {
    let mask = ((1u32 << (bytes.len() / 2).min(LANES)) - 1) as __mmask16;
    // SAFETY: the mask selects half-words inside `bytes` alone, and what it does not select is not accessed.
    _mm512_cvtepu16_epi32(unsafe { _mm256_maskz_loadu_epi16(mask, bytes.as_ptr().cast()) })
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load(row: &Row) -> __m512 {
    // SAFETY: a row has the 64 bytes that are read; no alignment is asked for.
    unsafe { _mm512_loadu_ps(row.0.as_ptr()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn store(x: __m512, row: &mut Row) {
    // SAFETY: a row has the 64 bytes that are written; no alignment is asked for.
    unsafe { _mm512_storeu_ps(row.0.as_mut_ptr(), x) }
}

/// The sum over lanes of each of four vectors, by two transposing additions and two halvings.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn sums_of_lanes([a, b, c, d]: [__m512; TILE]) -> [f32; TILE] {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let abcd = _mm512_add_ps(_mm512_shuffle_ps::<0b01_00_01_00>(ab, cd), _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd));
    let eight = _mm256_add_ps(_mm512_castps512_ps256(abcd), upper_half(abcd));
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let mut sums = [0.0; TILE];
    // SAFETY: the array has the 16 bytes that are written; no alignment is asked for.
    unsafe { _mm_storeu_ps(sums.as_mut_ptr(), four) };
    sums
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn upper_half(x: __m512) -> __m256 {
    _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x)))
}
