//! The two products for AVX-512: as `plain`, four tokens at a time. Enters: packed token-heads, and queries or weights.
//! Leaves: scores, sums, equal to `plain`'s within the rounding of another order of summation.
//!
//! A row of codes costs two instructions: a shift, and a table look-up that turns the low four bits of each lane into the
//! code as f32. Scores need one sum over lanes each; those of four tokens share theirs. Inner loops hold no closures: the
//! compiler does not inline them into functions with other target features.

use std::arch::x86_64::*;

use super::plain::{Axpy, Dot};
use crate::attention::Row;
use crate::layout::{LANES, Rows};
use crate::{Bits, Layout, ScaleDtype};

/// Tokens taken together.
const TILE: usize = 4;

/// See [`Dot`]; at least one token.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn dot(mut dot: Dot<'_>) {
    match dot.layout.bits() {
        Bits::Two => dot_all::<2>(&mut dot),
        Bits::Three => dot_all::<3>(&mut dot),
        Bits::Four => dot_all::<4>(&mut dot),
        Bits::Eight => dot_all::<8>(&mut dot),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn dot_all<const BITS: u32>(dot: &mut Dot<'_>) {
    let reader = Reader::<BITS>::new(dot.layout, dot.order);
    let n_queries = dot.queries.n_queries();
    let mut first = 0;
    while first < n_queries {
        first += match n_queries - first {
            1 => dot_group::<BITS, 1>(dot, &reader, first),
            2 => dot_group::<BITS, 2>(dot, &reader, first),
            3 => dot_group::<BITS, 3>(dot, &reader, first),
            _ => dot_group::<BITS, 4>(dot, &reader, first),
        };
    }
}

/// N queries from `first` on, against all tokens; N.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn dot_group<const BITS: u32, const N: usize>(dot: &mut Dot<'_>, reader: &Reader<BITS>, first: usize) -> usize {
    let n_tokens = dot.packed.len() / reader.n_bytes;
    let sums = &dot.queries.sums[first..first + N];
    let mut token = 0;
    while token < n_tokens {
        let records = reader.tile(dot.packed, token, n_tokens);
        let products = dot_tile::<BITS, N>(dot, reader, first, &records);
        let (scales, zeros) = reader.scales(&records);
        for n in 0..N {
            let scores = _mm_mul_ps(scales, _mm_fnmadd_ps(zeros, _mm_set1_ps(sums[n]), products[n]));
            store_up_to_four(scores, &mut dot.scores[(first + n) * n_tokens + token..(first + n + 1) * n_tokens]);
        }
        token += TILE;
    }
    N
}

/// `Σ qᵢ codeᵢ` of N queries and four tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn dot_tile<const BITS: u32, const N: usize>(
    dot: &Dot<'_>,
    reader: &Reader<BITS>,
    first: usize,
    records: &[&[u8]; TILE],
) -> [__m128; N] {
    let mut sums = [[_mm512_setzero_ps(); TILE]; N];
    let n_queries = dot.queries.n_queries();
    for (block, rows) in dot.queries.rows.chunks_exact(n_queries * dot.order.per_block).enumerate() {
        let mut words = reader.words(records, block);
        for row in rows.chunks_exact(n_queries) {
            let row = &row[first..first + N];
            for t in 0..TILE {
                let codes = reader.next(&mut words[t]);
                for n in 0..N {
                    sums[n][t] = _mm512_fmadd_ps(load(&row[n]), codes, sums[n][t]);
                }
            }
        }
    }
    let mut products = [_mm_setzero_ps(); N];
    for n in 0..N {
        products[n] = sums_of_lanes(sums[n]);
    }
    products
}

/// See [`Axpy`]; at least one token and one query.
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
fn axpy_all<const BITS: u32>(axpy: &mut Axpy<'_>) {
    let reader = Reader::<BITS>::new(axpy.layout, axpy.order);
    let n_tokens = axpy.packed.len() / reader.n_bytes;
    let n_queries = axpy.sums.n_queries();
    let mut weights = vec![[0.0f32; TILE]; n_queries];
    let mut token = 0;
    while token < n_tokens {
        let records = reader.tile(axpy.packed, token, n_tokens);
        let (scales, zeros) = reader.scales(&records);
        for query in 0..n_queries {
            let given = load_up_to_four(&axpy.weights[query * n_tokens + token..(query + 1) * n_tokens]);
            let scaled = _mm_mul_ps(given, scales);
            store_up_to_four(scaled, &mut weights[query]);
            axpy.sums.offsets[query] += sum_of_four(_mm_mul_ps(scaled, zeros));
        }
        let blocks = axpy.sums.rows.chunks_exact_mut(n_queries * axpy.order.per_block);
        for (block, rows) in blocks.enumerate() {
            axpy_tile(&reader, &records, block, &weights, rows);
        }
        token += TILE;
    }
}

/// Adds four tokens, weighted, to one block of rows of all queries.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn axpy_tile<const BITS: u32>(
    reader: &Reader<BITS>,
    records: &[&[u8]; TILE],
    block: usize,
    weights: &[[f32; TILE]],
    rows: &mut [Row],
) {
    let mut words = reader.words(records, block);
    for row in rows.chunks_exact_mut(weights.len()) {
        let mut codes = [_mm512_setzero_ps(); TILE];
        for t in 0..TILE {
            codes[t] = reader.next(&mut words[t]);
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

/// Words of one token, of the low plane and (at 3 bits) of the high one.
type Words = (__m512i, __m512i);

/// How records are read: where their parts are, and how words are spread over lanes; see [`Layout`] and [`Rows`].
struct Reader<const BITS: u32> {
    n_bytes: usize,
    code_bytes: usize,
    n_words: usize,
    scale_dtype: ScaleDtype,
    /// The word of each lane.
    word: __m512i,
    /// Shift of each lane in the first row: of the words, and of the high plane at 3 bits.
    first: Words,
    /// Shift from row to row.
    step: Words,
    /// Codes as f32, by their low four bits.
    table: __m512,
}

impl<const BITS: u32> Reader<BITS> {
    const WIDTH: usize = if BITS == 3 { 2 } else { BITS as usize };

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn new(layout: &Layout, order: &Rows) -> Self {
        let (mut word, mut position, mut codes) = ([0i32; LANES], [0i32; LANES], [0.0f32; LANES]);
        for lane in 0..LANES {
            word[lane] = (lane % order.width) as i32;
            position[lane] = (lane / order.width) as i32;
            codes[lane] = (lane % (1 << BITS)) as f32;
        }
        let width = _mm512_set1_epi32(Self::WIDTH as i32);
        let (position, positions) = (load_integers(&position), _mm512_set1_epi32(order.positions() as i32));
        Self {
            n_bytes: layout.n_bytes(),
            code_bytes: layout.code_bytes(),
            n_words: layout.n_words(),
            scale_dtype: layout.scale_dtype(),
            word: load_integers(&word),
            first: (_mm512_mullo_epi32(position, width), position),
            step: (_mm512_mullo_epi32(positions, width), positions),
            table: load(&Row(codes)),
        }
    }

    /// The records of up to four tokens; the last one again where there are fewer.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    fn tile<'a>(&self, packed: &'a [u8], token: usize, n_tokens: usize) -> [&'a [u8]; TILE] {
        let mut records = [packed; TILE];
        for t in 0..TILE {
            let at = (token + t).min(n_tokens - 1) * self.n_bytes;
            records[t] = &packed[at..at + self.n_bytes];
        }
        records
    }

    /// Scales and zero points of four tokens.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    fn scales(&self, records: &[&[u8]; TILE]) -> (__m128, __m128) {
        let mut words = [[0i32; TILE]; 2];
        for t in 0..TILE {
            let (pairs, _) = records[t][self.code_bytes..].as_chunks::<4>();
            words[0][t] = i32::from_le_bytes(pairs[0]);
            words[1][t] = i32::from_le_bytes(pairs[pairs.len() - 1]);
        }
        let (first, last) = (load_four_integers(&words[0]), load_four_integers(&words[1]));
        match self.scale_dtype {
            ScaleDtype::Bf16 => {
                let upper = _mm_and_si128(first, _mm_set1_epi32(!0xffff));
                (_mm_castsi128_ps(_mm_slli_epi32::<16>(first)), _mm_castsi128_ps(upper))
            }
            ScaleDtype::F32 => (_mm_castsi128_ps(first), _mm_castsi128_ps(last)),
        }
    }

    /// Words of one block of four records, ready for the first row.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    fn words(&self, records: &[&[u8]; TILE], block: usize) -> [Words; TILE] {
        let skipped = LANES * block;
        let n = (self.n_words - skipped).min(LANES);
        let mask = (u32::MAX >> (32 - n)) as __mmask16;
        let mut words = [(_mm512_setzero_si512(), _mm512_setzero_si512()); TILE];
        for t in 0..TILE {
            let low = load_words(&records[t][4 * skipped..][..4 * n], mask);
            words[t].0 = _mm512_srlv_epi32(_mm512_permutexvar_epi32(self.word, low), self.first.0);
            if BITS == 3 {
                let high = load_half_words(&records[t][4 * self.n_words + 2 * skipped..][..2 * n], mask);
                let high = _mm512_slli_epi32::<2>(_mm512_permutexvar_epi32(self.word, high));
                words[t].1 = _mm512_srlv_epi32(high, self.first.1);
            }
        }
        words
    }

    /// Codes of the next row.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    fn next(&self, words: &mut Words) -> __m512 {
        let (low, high) = *words;
        words.0 = _mm512_srlv_epi32(low, self.step.0);
        match BITS {
            3 => {
                /// Bits of the second operand where the first has them set, of the third elsewhere.
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

/// The words that `mask` selects, all inside `bytes`; zeros in other lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_words(bytes: &[u8], mask: __mmask16) -> __m512i {
    assert!(4 * (16 - mask.leading_zeros()) as usize <= bytes.len());
    // SAFETY: the highest word selected lies inside `bytes`, just checked, and what is not selected is not accessed.
    unsafe { _mm512_maskz_loadu_epi32(mask, bytes.as_ptr().cast()) }
}

/// The half-words that `mask` selects, all inside `bytes`, each in a lane of 32 bits; zeros in other lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_half_words(bytes: &[u8], mask: __mmask16) -> __m512i {
    assert!(2 * (16 - mask.leading_zeros()) as usize <= bytes.len());
    // SAFETY: the highest half-word selected lies inside `bytes`, just checked, and what is not selected is not accessed.
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

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_integers(lanes: &[i32; LANES]) -> __m512i {
    // SAFETY: the array has the 64 bytes that are read; no alignment is asked for.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_four_integers(lanes: &[i32; TILE]) -> __m128i {
    // SAFETY: the array has the 16 bytes that are read; no alignment is asked for.
    unsafe { _mm_loadu_si128(lanes.as_ptr().cast()) }
}

/// The first four numbers; zeros behind the end.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_up_to_four(x: &[f32]) -> __m128 {
    // SAFETY: the mask selects numbers inside `x` alone, and what it does not select is not accessed.
    unsafe { _mm_maskz_loadu_ps(mask_of_four(x.len()), x.as_ptr()) }
}

/// Stores four numbers, or as many as `out` has place for.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn store_up_to_four(x: __m128, out: &mut [f32]) {
    // SAFETY: the mask selects numbers inside `out` alone, and what it does not select is not accessed.
    unsafe { _mm_mask_storeu_ps(out.as_mut_ptr(), mask_of_four(out.len()), x) }
}

/// The lowest `n` lanes, or all four.
const fn mask_of_four(n: usize) -> __mmask8 {
    if n >= TILE { 0b1111 } else { (1 << n) - 1 }
}

/// The sum over lanes of each of four vectors, by two transposing additions and two halvings.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn sums_of_lanes([a, b, c, d]: [__m512; TILE]) -> __m128 {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let abcd = _mm512_add_ps(_mm512_shuffle_ps::<0b01_00_01_00>(ab, cd), _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd));
    let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(abcd)));
    let eight = _mm256_add_ps(_mm512_castps512_ps256(abcd), upper);
    _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn sum_of_four(x: __m128) -> f32 {
    let two = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
