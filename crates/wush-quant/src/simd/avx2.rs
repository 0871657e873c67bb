//! Vectors of 16 numbers for [`products`]: pairs of AVX2 registers. Codes of 2 and 3 bits become f32 by a table look-up, others
//! by conversion.

use std::arch::x86_64::*;

use super::plain::{Axpy, Dot};
use super::tokens::{Tokens, sixteen};
use super::x86::{TILE, Tile, products, scales, tile};
use crate::attention::Row;
use crate::layout::{LANES, Rows};
use crate::{Bits, Layout};

/// Queries taken together: their accumulators for one token are 8 of 16 registers.
const MAX_GROUP: usize = 4;
/// Tokens whose rows are read side by side.
const SPAN: usize = 1;

products!("avx2,fma");

/// Lanes 0 to 7, and 8 to 15.
type Lanes = (__m256, __m256);

/// Words of one token in the lanes' order: of the low plane and (at 3 bits) of the high one.
type Words = [(__m256i, __m256i); 2];

/// How words are spread over lanes and read; see [`Layout`] and [`Rows`].
struct Reader<const BITS: u32> {
    /// Where the high plane begins.
    high_bytes: usize,
    /// Lanes that hold different words.
    width: usize,
    /// Shift of each lane in the first row: of the words, and of the high plane at 3 bits.
    first: Words,
}

impl<const BITS: u32> Reader<BITS> {
    /// Bits of a code in its word.
    const WIDTH: i32 = if BITS == 3 { 2 } else { BITS.cast_signed() };

    #[target_feature(enable = "avx2,fma")]
    fn new(layout: &Layout, order: &Rows) -> Self {
        let mut position = [[0; 4]; LANES];
        for lane in 0..LANES {
            position[lane] = ((lane / order.width * order.per_block) as u32).to_le_bytes();
        }
        let (lower, upper) = load_words(&position);
        let width = _mm256_set1_epi32(Self::WIDTH);
        let scaled = (_mm256_mullo_epi32(lower, width), _mm256_mullo_epi32(upper, width));
        Self { high_bytes: 4 * layout.n_words(), width: order.width, first: [scaled, (lower, upper)] }
    }

    /// Words of one block of the first token-head of `packed`, ready for the first row.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn words(&self, packed: &[u8], block: usize) -> Words {
        let low = load_words(sixteen(&packed[4 * LANES * block..]));
        let low = self.spread(low, self.first[0]);
        if BITS != 3 {
            return [low, low];
        }
        let high = &packed[self.high_bytes + 2 * LANES * block..];
        let (lower, upper) = load_half_words(sixteen(high));
        let high = (_mm256_slli_epi32::<2>(lower), _mm256_slli_epi32::<2>(upper));
        [low, self.spread(high, self.first[1])]
    }

    /// The first `width` lanes again and again, and each shifted.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn spread(&self, (lower, upper): (__m256i, __m256i), shift: (__m256i, __m256i)) -> (__m256i, __m256i) {
        let (lower, upper) = match self.width {
            4 => (_mm256_permute2x128_si256::<0>(lower, lower), _mm256_permute2x128_si256::<0>(lower, lower)),
            8 => (lower, lower),
            _ => (lower, upper),
        };
        (_mm256_srlv_epi32(lower, shift.0), _mm256_srlv_epi32(upper, shift.1))
    }

    /// Codes of the next row.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn next(&self, words: &mut Words) -> Lanes {
        let [low, high] = *words;
        words[0] = match Self::WIDTH {
            2 => (_mm256_srli_epi32::<2>(low.0), _mm256_srli_epi32::<2>(low.1)),
            4 => (_mm256_srli_epi32::<4>(low.0), _mm256_srli_epi32::<4>(low.1)),
            _ => (_mm256_srli_epi32::<8>(low.0), _mm256_srli_epi32::<8>(low.1)),
        };
        if BITS == 3 {
            words[1] = (_mm256_srli_epi32::<1>(high.0), _mm256_srli_epi32::<1>(high.1));
        }
        (self.half(low.0, high.0), self.half(low.1, high.1))
    }

    /// Codes of eight lanes.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn half(&self, low: __m256i, high: __m256i) -> __m256 {
        let mask = _mm256_set1_epi32((1 << Self::WIDTH) - 1);
        match BITS {
            2 => _mm256_permutevar_ps(_mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0), low),
            3 => {
                let both = _mm256_or_si256(_mm256_and_si256(low, mask), _mm256_andnot_si256(mask, high));
                _mm256_permutevar8x32_ps(_mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), both)
            }
            _ => _mm256_cvtepi32_ps(_mm256_and_si256(low, mask)),
        }
    }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn zeros() -> Lanes {
    (_mm256_setzero_ps(), _mm256_setzero_ps())
}

/// The same number in every lane.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn all(x: f32) -> Lanes {
    (_mm256_set1_ps(x), _mm256_set1_ps(x))
}

/// a b + c.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1))
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn load(row: &Row) -> Lanes {
    let (lower, upper) = row.0.split_at(LANES / 2);
    // SAFETY: each half has the 32 bytes that are read; no alignment is asked for.
    unsafe { (_mm256_loadu_ps(lower.as_ptr()), _mm256_loadu_ps(upper.as_ptr())) }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn store(x: Lanes, row: &mut Row) {
    let (lower, upper) = row.0.split_at_mut(LANES / 2);
    // SAFETY: each half has the 32 bytes that are written; no alignment is asked for.
    unsafe {
        _mm256_storeu_ps(lower.as_mut_ptr(), x.0);
        _mm256_storeu_ps(upper.as_mut_ptr(), x.1);
    }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn load_words(words: &[[u8; 4]; LANES]) -> (__m256i, __m256i) {
    let (lower, upper) = words.split_at(LANES / 2);
    // SAFETY: each half has the 32 bytes that are read; no alignment is asked for.
    unsafe { (_mm256_loadu_si256(lower.as_ptr().cast()), _mm256_loadu_si256(upper.as_ptr().cast())) }
}

/// Half-words, each in a lane of 32 bits.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn load_half_words(halves: &[[u8; 2]; LANES]) -> (__m256i, __m256i) {
    let (lower, upper) = halves.split_at(LANES / 2);
    // SAFETY: each half has the 16 bytes that are read; no alignment is asked for.
    let (lower, upper) = unsafe { (_mm_loadu_si128(lower.as_ptr().cast()), _mm_loadu_si128(upper.as_ptr().cast())) };
    (_mm256_cvtepu16_epi32(lower), _mm256_cvtepu16_epi32(upper))
}

/// The sum over lanes of each of four vectors, by two rounds of horizontal additions and one of halves.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn sums_of_lanes([a, b, c, d]: [Lanes; TILE]) -> __m128 {
    let ab = _mm256_hadd_ps(_mm256_add_ps(a.0, a.1), _mm256_add_ps(b.0, b.1));
    let cd = _mm256_hadd_ps(_mm256_add_ps(c.0, c.1), _mm256_add_ps(d.0, d.1));
    let abcd = _mm256_hadd_ps(ab, cd);
    _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd))
}
