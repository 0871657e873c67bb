//! The two products at 2 bits for AVX-512, two codes at a time: four bits index a table of 16 sums. Enters: packed
//! token-heads, and queries or weights. Leaves: scores, sums, equal to `plain`'s within the rounding of another order of
//! summation.
//!
//! For scores a table holds `cₐ qₐ + c_b q_b` of two coordinates of a query (made once a query, with `Queries`), and the lanes are
//! 16 tokens, so that no sum over lanes is left. For sums a table holds `c_s w_s + c_t w_t` of two tokens' weights, and the
//! lanes are coordinates. Either way a look-up and an addition do the work of two look-ups and two multiplications.

use std::arch::x86_64::*;

use super::avx512::{Reader, load, store};
use super::plain::{Axpy, Dot};
use super::tokens::Tokens;
use crate::attention::{Row, TABLES, TWO_CODES};
use crate::layout::LANES;
use crate::{Layout, ScaleDtype};

/// Partial sums of a query: as many as additions are under way.
const PARTIAL: usize = 4;
/// Pairs of 16 tokens.
const PAIRS: usize = LANES / 2;

/// See [`Dot`]; 2 bits, at least one token, and the queries' tables are there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub(super) fn dot(mut dot: Dot<'_>) {
    let tokens = Tokens::new(dot.layout, dot.packed);
    let n_queries = dot.queries.n_queries();
    let mut first = 0;
    while first < n_queries {
        first += match n_queries - first {
            1 => dot_group::<1>(&mut dot, &tokens, first),
            2 => dot_group::<2>(&mut dot, &tokens, first),
            3 => dot_group::<3>(&mut dot, &tokens, first),
            _ => dot_group::<4>(&mut dot, &tokens, first),
        };
    }
}

/// N queries from `first` on, against all tokens; N.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
#[inline(never)]
fn dot_group<const N: usize>(dot: &mut Dot<'_>, tokens: &Tokens<'_>, first: usize) -> usize {
    let n_tokens = tokens.len();
    let mut token = 0;
    while token < n_tokens {
        let records = sixteen_tokens(tokens, token);
        let products = products::<N>(dot, &records, first);
        let (scales, zeros) = scales(dot.layout, &records);
        for n in 0..N {
            let shift = _mm512_mul_ps(zeros, _mm512_set1_ps(dot.queries.sums[first + n]));
            let mut scores = Row::default();
            store(_mm512_mul_ps(scales, _mm512_sub_ps(products[n], shift)), &mut scores);
            let out = &mut dot.scores[(first + n) * n_tokens + token..(first + n + 1) * n_tokens];
            match out.first_chunk_mut() {
                Some(out) => *out = scores.0,
                None => out.copy_from_slice(&scores.0[..out.len()]),
            }
        }
        token += LANES;
    }
    N
}

/// `Σ qᵢ codeᵢ` of N queries and 16 tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
#[inline]
fn products<const N: usize>(dot: &Dot<'_>, records: &[&[u8]; LANES], first: usize) -> [__m512; N] {
    let (n_queries, n_words) = (dot.queries.n_queries(), dot.layout.n_words());
    let mut sums = [[_mm512_setzero_ps(); PARTIAL]; N];
    let mut ahead = &dot.queries.tables[..];
    for word in (0..n_words).step_by(4) {
        let words = transposed(records, 4 * word);
        for w in 0..4 {
            if word + w >= n_words {
                break;
            }
            let mut codes = words[w];
            for k in 0..TABLES {
                let (tables, behind) = ahead.split_at(n_queries);
                ahead = behind;
                let tables = &tables[first..first + N];
                for n in 0..N {
                    let looked_up = _mm512_permutexvar_ps(codes, load(&tables[n]));
                    sums[n][k % PARTIAL] = _mm512_add_ps(sums[n][k % PARTIAL], looked_up);
                }
                codes = _mm512_srli_epi32::<4>(codes);
            }
        }
    }
    let mut products = [_mm512_setzero_ps(); N];
    for n in 0..N {
        let [a, b, c, d] = sums[n];
        products[n] = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
    }
    products
}

/// The records of 16 tokens from `first` on; the last one again where there are fewer.
#[inline(always)]
fn sixteen_tokens<'a>(tokens: &'a Tokens<'_>, first: usize) -> [&'a [u8]; LANES] {
    let mut records = [&[][..]; LANES];
    for lane in 0..LANES {
        records[lane] = tokens.from(first + lane);
    }
    records
}

/// Scales and zero points of 16 tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
#[inline]
fn scales(layout: &Layout, records: &[&[u8]; LANES]) -> (__m512, __m512) {
    let words = transposed(records, layout.code_bytes());
    let (scales, zeros) = match layout.scale_dtype() {
        ScaleDtype::Bf16 => {
            let upper = _mm512_and_si512(words[0], _mm512_set1_epi32(!0xffff));
            (_mm512_slli_epi32::<16>(words[0]), upper)
        }
        ScaleDtype::F32 => (words[0], words[1]),
    };
    (_mm512_castsi512_ps(scales), _mm512_castsi512_ps(zeros))
}

/// Four words of 16 tokens, from byte `at` of each: word by word, a token a lane.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
#[inline]
fn transposed(records: &[&[u8]; LANES], at: usize) -> [__m512i; 4] {
    let mut quads = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        let first = _mm512_broadcast_i32x4(load_four(records[i], at));
        let second = _mm512_mask_broadcast_i32x4(first, 0x00f0, load_four(records[4 + i], at));
        let third = _mm512_mask_broadcast_i32x4(second, 0x0f00, load_four(records[8 + i], at));
        quads[i] = _mm512_mask_broadcast_i32x4(third, 0xf000, load_four(records[12 + i], at));
    }
    let [a, b, c, d] = quads;
    let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
    let (ab_upper, cd_upper) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab, cd),
        _mm512_unpackhi_epi64(ab, cd),
        _mm512_unpacklo_epi64(ab_upper, cd_upper),
        _mm512_unpackhi_epi64(ab_upper, cd_upper),
    ]
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
#[inline]
fn load_four(record: &[u8], at: usize) -> __m128i {
    let bytes = &record[at..at + 16];
    // SAFETY: the slice has the 16 bytes that are read; no alignment is asked for.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// See [`Axpy`]; 2 bits, at least one token and one query.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub(super) fn axpy(axpy: Axpy<'_>) {
    let tokens = Tokens::new(axpy.layout, axpy.packed);
    let reader = Reader::<2>::new(axpy.layout, axpy.order);
    let (n_tokens, n_queries) = (tokens.len(), axpy.sums.n_queries());
    let n_rows = n_queries * axpy.order.per_block;
    let mut tables = vec![[Row::default(); PAIRS]; n_queries];
    let mut token = 0;
    while token < n_tokens {
        let records = sixteen_tokens(&tokens, token);
        let (scales, zeros) = scales(axpy.layout, &records);
        for query in 0..n_queries {
            let given = &axpy.weights[query * n_tokens + token..(query + 1) * n_tokens];
            let weights = _mm512_mul_ps(load(&up_to_sixteen(given)), scales);
            axpy.sums.offsets[query] += _mm512_reduce_add_ps(_mm512_mul_ps(weights, zeros));
            tables[query] = sum_tables(weights);
        }
        for block in 0..axpy.order.n_blocks {
            let mut pairs = [(_mm512_setzero_si512(), _mm512_setzero_si512()); PAIRS];
            for pair in 0..PAIRS {
                let (one, _) = reader.words(records[2 * pair], block);
                let (other, _) = reader.words(records[2 * pair + 1], block);
                pairs[pair] = interleaved(one, other);
            }
            add_rows(pairs, &tables, &mut axpy.sums.rows[block * n_rows..(block + 1) * n_rows]);
        }
        token += LANES;
    }
}

/// The first 16 numbers; zeros behind the end.
#[inline(always)]
fn up_to_sixteen(x: &[f32]) -> Row {
    let mut row = Row::default();
    match x.first_chunk() {
        Some(x) => row.0 = *x,
        None => row.0[..x.len()].copy_from_slice(x),
    }
    row
}

/// `c w + c' w'` by the four bits of two codes, for each pair of 16 weights.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
#[inline]
fn sum_tables(weights: __m512) -> [Row; PAIRS] {
    let mut weight = Row::default();
    store(weights, &mut weight);
    let mut tables = [Row::default(); PAIRS];
    for pair in 0..PAIRS {
        let lower = _mm512_mul_ps(load(&TWO_CODES[0]), _mm512_set1_ps(weight.0[2 * pair]));
        let both = _mm512_fmadd_ps(load(&TWO_CODES[1]), _mm512_set1_ps(weight.0[2 * pair + 1]), lower);
        store(both, &mut tables[pair]);
    }
    tables
}

/// Codes of two tokens side by side, in four bits: those of even positions, and those of odd ones.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
#[inline]
fn interleaved(one: __m512i, other: __m512i) -> (__m512i, __m512i) {
    /// Bits of the second operand where the first has them set, of the third elsewhere.
    const SELECT: i32 = 0xca;
    let lower = _mm512_set1_epi32(0x3333_3333);
    let even = _mm512_ternarylogic_epi32::<SELECT>(lower, one, _mm512_slli_epi32::<2>(other));
    let odd = _mm512_ternarylogic_epi32::<SELECT>(lower, _mm512_srli_epi32::<2>(one), other);
    (even, odd)
}

/// Adds the pairs of 16 tokens to one block of rows of all queries.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
#[inline]
fn add_rows(mut pairs: [(__m512i, __m512i); PAIRS], tables: &[[Row; PAIRS]], rows: &mut [Row]) {
    let mut rows = rows;
    while !rows.is_empty() {
        let (even, behind) = rows.split_at_mut(tables.len());
        let (odd, behind) = behind.split_at_mut(tables.len());
        rows = behind;
        for ((even, odd), tables) in even.iter_mut().zip(odd).zip(tables) {
            let (mut even_sum, mut odd_sum) = (load(even), load(odd));
            for pair in 0..PAIRS {
                let table = load(&tables[pair]);
                even_sum = _mm512_add_ps(even_sum, _mm512_permutexvar_ps(pairs[pair].0, table));
                odd_sum = _mm512_add_ps(odd_sum, _mm512_permutexvar_ps(pairs[pair].1, table));
            }
            store(even_sum, even);
            store(odd_sum, odd);
        }
        for pair in &mut pairs {
            *pair = (_mm512_srli_epi32::<4>(pair.0), _mm512_srli_epi32::<4>(pair.1));
        }
    }
}
