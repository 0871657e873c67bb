//! The two products for x86, written once and compiled for AVX2 and for AVX-512: as `plain`, four tokens at a time. Enters:
//! packed token-heads, and queries or weights. Leaves: scores, sums, equal to `plain`'s within the rounding of another order
//! of summation.
//!
//! A macro and not a generic function, because the compiler must see every function with its own target features. Inner
//! loops hold no closures for the same reason: those are compiled without them, and stay calls. What differs is in the
//! module that calls the macro: the vectors, and how codes become f32.

use super::tokens::Tokens;
use crate::Layout;

/// Tokens taken together: scores need a sum over lanes each, and four share theirs.
pub(super) const TILE: usize = 4;

/// Token-heads from each of four tokens on, to the end of all.
pub(super) type Tile<'a> = [&'a [u8]; TILE];

/// Defines `dot` and `axpy` with the given target features, on what the calling module has in scope: `Lanes` (16 numbers),
/// its operations, and `Reader` (words and codes).
macro_rules! products {
    ($features:literal) => {
        /// See [`Dot`].
        #[target_feature(enable = $features)]
        pub(super) fn dot(mut dot: Dot<'_>) {
            match dot.layout.bits() {
                Bits::Two => dot_all::<2>(&mut dot),
                Bits::Three => dot_all::<3>(&mut dot),
                Bits::Four => dot_all::<4>(&mut dot),
                Bits::Eight => dot_all::<8>(&mut dot),
            }
        }

        #[target_feature(enable = $features)]
        fn dot_all<const BITS: u32>(dot: &mut Dot<'_>) {
            let reader = Reader::<BITS>::new(dot.layout, dot.order);
            let tokens = Tokens::new(dot.layout, dot.packed);
            let n_queries = dot.queries.n_queries();
            let mut first = 0;
            while first < n_queries {
                first += match (n_queries - first).min(MAX_GROUP) {
                    1 => dot_group::<BITS, 1>(dot, &reader, &tokens, first),
                    2 => dot_group::<BITS, 2>(dot, &reader, &tokens, first),
                    3 => dot_group::<BITS, 3>(dot, &reader, &tokens, first),
                    _ => dot_group::<BITS, 4>(dot, &reader, &tokens, first),
                };
            }
        }

        /// N queries from `first` on, against all tokens; N.
        #[target_feature(enable = $features)]
        #[inline(never)]
        fn dot_group<const BITS: u32, const N: usize>(
            dot: &mut Dot<'_>,
            reader: &Reader<BITS>,
            tokens: &Tokens<'_>,
            first: usize,
        ) -> usize {
            let n_tokens = tokens.len();
            let mut token = 0;
            while token < n_tokens {
                let tile = tile(tokens, token);
                let [scales, zeros] = scales(dot.layout, &tile);
                let (scales, zeros) = (load_up_to_four(&scales), load_up_to_four(&zeros));
                let products = dot_tile::<BITS, N>(dot, reader, first, &tile);
                for n in 0..N {
                    let shift = _mm_mul_ps(zeros, _mm_set1_ps(dot.queries.sums[first + n]));
                    let scores = &mut dot.scores[(first + n) * n_tokens + token..(first + n + 1) * n_tokens];
                    store_up_to_four(_mm_mul_ps(scales, _mm_sub_ps(products[n], shift)), scores);
                }
                token += TILE;
            }
            N
        }

        /// `Σ qᵢ codeᵢ` of N queries and four tokens.
        #[target_feature(enable = $features)]
        #[inline]
        fn dot_tile<const BITS: u32, const N: usize>(
            dot: &Dot<'_>,
            reader: &Reader<BITS>,
            first: usize,
            tile: &Tile<'_>,
        ) -> [__m128; N] {
            let mut sums = [[zeros(); TILE]; N];
            let n_queries = dot.queries.n_queries();
            let mut ahead = &dot.queries.rows[..];
            for block in 0..dot.order.n_blocks {
                let (rows, behind) = ahead.split_at(n_queries * dot.order.per_block);
                ahead = behind;
                for at in 0..TILE / SPAN {
                    let mut words = [reader.words(tile[at * SPAN], block); SPAN];
                    for t in 0..SPAN {
                        words[t] = reader.words(tile[at * SPAN + t], block);
                    }
                    let mut rows = rows;
                    for _ in 0..dot.order.per_block {
                        let (row, behind) = rows.split_at(n_queries);
                        rows = behind;
                        let row = &row[first..first + N];
                        for t in 0..SPAN {
                            let codes = reader.next(&mut words[t]);
                            for n in 0..N {
                                let sum = &mut sums[n][at * SPAN + t];
                                *sum = fused(load(&row[n]), codes, *sum);
                            }
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

        /// See [`Axpy`]; at least one query.
        #[target_feature(enable = $features)]
        pub(super) fn axpy(mut axpy: Axpy<'_>) {
            match axpy.layout.bits() {
                Bits::Two => axpy_all::<2>(&mut axpy),
                Bits::Three => axpy_all::<3>(&mut axpy),
                Bits::Four => axpy_all::<4>(&mut axpy),
                Bits::Eight => axpy_all::<8>(&mut axpy),
            }
        }

        #[target_feature(enable = $features)]
        #[inline(never)]
        fn axpy_all<const BITS: u32>(axpy: &mut Axpy<'_>) {
            let reader = Reader::<BITS>::new(axpy.layout, axpy.order);
            let tokens = Tokens::new(axpy.layout, axpy.packed);
            let n_tokens = tokens.len();
            let n_queries = axpy.sums.n_queries();
            let mut weights = vec![[0.0f32; TILE]; n_queries];
            let mut token = 0;
            while token < n_tokens {
                let tile = tile(&tokens, token);
                let [scales, zeros] = scales(axpy.layout, &tile);
                let (scales, zeros) = (load_up_to_four(&scales), load_up_to_four(&zeros));
                for query in 0..n_queries {
                    let given = &axpy.weights[query * n_tokens + token..(query + 1) * n_tokens];
                    let scaled = _mm_mul_ps(load_up_to_four(given), scales);
                    store_up_to_four(scaled, &mut weights[query]);
                    axpy.sums.offsets[query] += sum_of_four(_mm_mul_ps(scaled, zeros));
                }
                let n_rows = n_queries * axpy.order.per_block;
                for block in 0..axpy.order.n_blocks {
                    let rows = &mut axpy.sums.rows[block * n_rows..(block + 1) * n_rows];
                    axpy_tile(&reader, &tile, block, &weights, rows);
                }
                token += TILE;
            }
        }

        /// Adds four tokens, weighted, to one block of rows of all queries.
        #[target_feature(enable = $features)]
        #[inline]
        fn axpy_tile<const BITS: u32>(
            reader: &Reader<BITS>,
            tile: &Tile<'_>,
            block: usize,
            weights: &[[f32; TILE]],
            rows: &mut [Row],
        ) {
            let mut words = [reader.words(tile[0], block); TILE];
            for t in 0..TILE {
                words[t] = reader.words(tile[t], block);
            }
            let mut rows = rows;
            while !rows.is_empty() {
                let (row, behind) = rows.split_at_mut(weights.len());
                rows = behind;
                let mut codes = [zeros(); TILE];
                for t in 0..TILE {
                    codes[t] = reader.next(&mut words[t]);
                }
                for (sum, weights) in row.iter_mut().zip(weights) {
                    let mut total = load(sum);
                    for t in 0..TILE {
                        total = fused(all(weights[t]), codes[t], total);
                    }
                    store(total, sum);
                }
            }
        }

        /// The first four numbers; zeros behind the end.
        #[target_feature(enable = $features)]
        #[inline]
        fn load_up_to_four(x: &[f32]) -> __m128 {
            match *x {
                [a, b, c, d, ..] => _mm_setr_ps(a, b, c, d),
                [a, b, c] => _mm_setr_ps(a, b, c, 0.0),
                [a, b] => _mm_setr_ps(a, b, 0.0, 0.0),
                [a] => _mm_setr_ps(a, 0.0, 0.0, 0.0),
                [] => _mm_setzero_ps(),
            }
        }

        /// Stores four numbers, or as many as `out` has place for.
        #[target_feature(enable = $features)]
        #[inline]
        fn store_up_to_four(x: __m128, out: &mut [f32]) {
            let mut all = [0.0; TILE];
            // SAFETY: the array has the 16 bytes that are written; no alignment is asked for.
            unsafe { _mm_storeu_ps(all.as_mut_ptr(), x) };
            match out.first_chunk_mut() {
                Some(out) => *out = all,
                None => out.iter_mut().zip(all).for_each(|(out, x)| *out = x),
            }
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn sum_of_four(x: __m128) -> f32 {
            let two = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    };
}
pub(super) use products;

/// Four tokens from `first` on.
#[inline(always)]
pub(super) fn tile<'a>(tokens: &'a Tokens<'_>, first: usize) -> Tile<'a> {
    [tokens.from(first), tokens.from(first + 1), tokens.from(first + 2), tokens.from(first + 3)]
}

/// Scales and zero points of four tokens.
#[inline(always)]
pub(super) fn scales(layout: &Layout, tile: &Tile<'_>) -> [[f32; TILE]; 2] {
    let [a, b, c, d] = [layout.scales(tile[0]), layout.scales(tile[1]), layout.scales(tile[2]), layout.scales(tile[3])];
    [[a.0, b.0, c.0, d.0], [a.1, b.1, c.1, d.1]]
}
