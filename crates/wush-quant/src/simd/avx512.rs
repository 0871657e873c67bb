//! Vectors of 16 numbers for [`products`]: AVX-512. Codes become f32 by a table look-up on the low four bits of each lane.

use std::arch::x86_64::*;

use super::plain::{Axpy, Dot};
use super::tokens::{Tokens, sixteen};
use super::x86::{TILE, Tile, products, scales, tile};
use crate::attention::Row;
use crate::layout::{LANES, Rows};
use crate::{Bits, Layout};

/// Queries taken together: 16 accumulators of 32 registers.
const MAX_GROUP: usize = 4;
/// Tokens whose rows are read side by side.
const SPAN: usize = TILE;

products!("avx512f,avx512bw,avx512vl,avx2,fma");

pub(super) type Lanes = __m512;

/// Words of one token, of the low plane and (at 3 bits) of the high one.
pub(super) type Words = (__m512i, __m512i);

/// How words are spread over lanes and read; see [`Layout`] and [`Rows`].
pub(super) struct Reader<const BITS: u32> {
    /// Where the high plane begins.
    high_bytes: usize,
    /// The word of each lane.
    word: __m512i,
    /// Shift of each lane in the first row: of the words, and of the high plane at 3 bits.
    first: Words,
    /// Codes as f32, by the low four bits of a lane.
    table: __m512,
}

impl<const BITS: u32> Reader<BITS> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) fn new(layout: &Layout, order: &Rows) -> Self {
        let (mut word, mut position) = ([[0; 4]; LANES], [[0; 4]; LANES]);
        let mut codes = Row::default();
        for lane in 0..LANES {
            word[lane] = ((lane % order.width) as u32).to_le_bytes();
            position[lane] = ((lane / order.width * order.per_block) as u32).to_le_bytes();
            codes.0[lane] = (lane % (1 << BITS)) as f32;
        }
        let width = _mm512_set1_epi32(if BITS == 3 { 2 } else { BITS.cast_signed() });
        let position = load_words(&position);
        Self {
            high_bytes: 4 * layout.n_words(),
            word: load_words(&word),
            first: (_mm512_mullo_epi32(position, width), position),
            table: load(&codes),
        }
    }

    /// Words of one block of the first token-head of `packed`, ready for the first row.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    pub(super) fn words(&self, packed: &[u8], block: usize) -> Words {
        let low = load_words(sixteen(&packed[4 * LANES * block..]));
        let low = _mm512_srlv_epi32(_mm512_permutexvar_epi32(self.word, low), self.first.0);
        if BITS != 3 {
            return (low, low);
        }
        let high = &packed[self.high_bytes + 2 * LANES * block..];
        let high = load_half_words(sixteen(high));
        let high = _mm512_slli_epi32::<2>(_mm512_permutexvar_epi32(self.word, high));
        (low, _mm512_srlv_epi32(high, self.first.1))
    }

    /// Codes of the next row.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    fn next(&self, words: &mut Words) -> Lanes {
        /// Bits of the second operand where the first has them set, of the third elsewhere.
        const SELECT: i32 = 0xca;
        let (low, high) = *words;
        match BITS {
            2 => {
                words.0 = _mm512_srli_epi32::<2>(low);
                _mm512_permutexvar_ps(low, self.table)
            }
            3 => {
                *words = (_mm512_srli_epi32::<2>(low), _mm512_srli_epi32::<1>(high));
                let both = _mm512_ternarylogic_epi32::<SELECT>(_mm512_set1_epi32(3), low, high);
                _mm512_permutexvar_ps(both, self.table)
            }
            4 => {
                words.0 = _mm512_srli_epi32::<4>(low);
                _mm512_permutexvar_ps(low, self.table)
            }
            _ => {
                words.0 = _mm512_srli_epi32::<8>(low);
                _mm512_cvtepi32_ps(_mm512_and_si512(low, _mm512_set1_epi32(0xff)))
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn zeros() -> Lanes {
    _mm512_setzero_ps()
}

/// The same number in every lane.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn all(x: f32) -> Lanes {
    _mm512_set1_ps(x)
}

/// a b + c.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    _mm512_fmadd_ps(a, b, c)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn load(row: &Row) -> Lanes {
    // SAFETY: a row has the 64 bytes that are read; no alignment is asked for.
    unsafe { _mm512_loadu_ps(row.0.as_ptr()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn store(x: Lanes, row: &mut Row) {
    // SAFETY: a row has the 64 bytes that are written; no alignment is asked for.
    unsafe { _mm512_storeu_ps(row.0.as_mut_ptr(), x) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_words(words: &[[u8; 4]; LANES]) -> __m512i {
    // SAFETY: the array has the 64 bytes that are read; no alignment is asked for.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

/// Half-words, each in a lane of 32 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_half_words(halves: &[[u8; 2]; LANES]) -> __m512i {
    // SAFETY: the array has the 32 bytes that are read; no alignment is asked for.
    _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(halves.as_ptr().cast()) })
}

/// The sum over lanes of each of four vectors, by two transposing additions and two halvings.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn sums_of_lanes([a, b, c, d]: [Lanes; TILE]) -> __m128 {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let abcd = _mm512_add_ps(_mm512_shuffle_ps::<0b01_00_01_00>(ab, cd), _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd));
    let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(abcd)));
    let eight = _mm256_add_ps(_mm512_castps512_ps256(abcd), upper);
    _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight))
}
