//! Hadamard matrices (Section 3): ±1 entries, orthogonal rows, of every order `2^k m` for which a Paley matrix of order
//! `m` exists over a prime field. Enters: an order. Leaves: signs, or the normalized matrix. Prime powers are left out
//! deliberately: no head dimension in use needs them.

use crate::{MAX_DIM, Result, TransformError};

/// ±1 Hadamard matrix of order `dim`, row-major `[dim, dim]`: Sylvester(2^k) ⊗ Paley(m), with `dim = 2^k m` and the
/// smallest usable `m ≥ 1`.
///
/// 64, 128, 256 are Sylvester's; 80 = 4·20, 96 = 8·12, 120 = 2·60, 160 = 8·20, 192 = 16·12 use Paley I; 72 = 2·36 and
/// 112 = 4·28 use Paley II. Any Hadamard matrix satisfies the paper; T itself (not TᵀT) depends on this choice.
///
/// # Errors
/// [`TransformError::Dimension`] for 0 or beyond [`MAX_DIM`]; [`TransformError::UnsupportedOrder`] when no such
/// factorization exists (every odd order but 1, 2 mod 4 but 2, and for example 92).
pub fn hadamard_signs(dim: usize) -> Result<Vec<i8>> {
    if dim == 0 || dim > MAX_DIM {
        return Err(TransformError::Dimension { dim });
    }
    let largest_log2 = dim.trailing_zeros();
    let (log2, base) = (0..=largest_log2)
        .rev()
        .find_map(|log2| Some((log2, base_signs(dim >> log2)?)))
        .ok_or(TransformError::UnsupportedOrder { order: dim })?;
    let order = dim >> log2;
    let mut signs = Vec::with_capacity(dim * dim);
    for row in 0..dim {
        for col in 0..dim {
            signs.push(sylvester_sign(row / order, col / order) * base[(row % order) * order + col % order]);
        }
    }
    Ok(signs)
}

/// The normalized Hadamard matrix ℋ of Section 3: entries ±d^{-1/2}, row-major `[dim, dim]`, orthogonal.
///
/// # Errors
/// As [`hadamard_signs`].
pub fn hadamard(dim: usize) -> Result<Vec<f64>> {
    let norm = (dim as f64).sqrt();
    Ok(hadamard_signs(dim)?.into_iter().map(|sign| f64::from(sign) / norm).collect())
}

/// Entry of Sylvester's matrix: (−1)^(number of common one bits).
fn sylvester_sign(row: usize, col: usize) -> i8 {
    if (row & col).count_ones().is_multiple_of(2) { 1 } else { -1 }
}

/// The factor that Sylvester doubling starts from.
fn base_signs(order: usize) -> Option<Vec<i8>> {
    match order {
        1 => Some(vec![1]),
        _ if !order.is_multiple_of(4) => None,
        _ => paley_one(order).or_else(|| paley_two(order)),
    }
}

/// Paley I: order q + 1, q prime, q ≡ 3 (mod 4). I + S with S = [[0, 1], [−1, Q]].
fn paley_one(order: usize) -> Option<Vec<i8>> {
    let q = order - 1;
    if q % 4 != 3 || !is_prime(q) {
        return None;
    }
    let mut signs = bordered_jacobsthal(q, -1);
    for i in 0..order {
        signs[i * order + i] += 1;
    }
    Some(signs)
}

/// Paley II: order 2 (q + 1), q prime, q ≡ 1 (mod 4). S ⊗ [[1, 1], [1, −1]] + I ⊗ [[1, −1], [−1, −1]] with
/// S = [[0, 1], [1, Q]].
fn paley_two(order: usize) -> Option<Vec<i8>> {
    let q = (order / 2).checked_sub(1)?;
    if q % 4 != 1 || !is_prime(q) {
        return None;
    }
    const OFF_DIAGONAL: [i8; 4] = [1, 1, 1, -1];
    const DIAGONAL: [i8; 4] = [1, -1, -1, -1];
    let half = q + 1;
    let conference = bordered_jacobsthal(q, 1);
    let mut signs = vec![0; order * order];
    for row in 0..order {
        for col in 0..order {
            let (i, j, cell) = (row / 2, col / 2, (row % 2) * 2 + col % 2);
            signs[row * order + col] =
                if i == j { DIAGONAL[cell] } else { conference[i * half + j] * OFF_DIAGONAL[cell] };
        }
    }
    Some(signs)
}

/// `[[0, 1], [left, Q]]` of order q + 1 with Q Jacobsthal's matrix: Q_ij = χ(i − j), χ the quadratic character mod q.
fn bordered_jacobsthal(q: usize, left: i8) -> Vec<i8> {
    let mut character = vec![-1; q];
    character[0] = 0;
    for i in 1..q {
        character[i * i % q] = 1;
    }
    let order = q + 1;
    let mut signs = vec![0; order * order];
    for i in 0..q {
        signs[i + 1] = 1;
        signs[(i + 1) * order] = left;
        for j in 0..q {
            signs[(i + 1) * order + j + 1] = character[(i + q - j) % q];
        }
    }
    signs
}

fn is_prime(n: usize) -> bool {
    n > 1 && (2..).take_while(|i| i * i <= n).all(|i| !n.is_multiple_of(i))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// H Hᵀ = d I in integers, entries ±1.
    fn is_hadamard(signs: &[i8], dim: usize) -> bool {
        let row = |i: usize| &signs[i * dim..][..dim];
        let dot = |a: &[i8], b: &[i8]| a.iter().zip(b).map(|(x, y)| i64::from(x * y)).sum::<i64>();
        signs.len() == dim * dim
            && signs.iter().all(|s| s.abs() == 1)
            && (0..dim).all(|i| (0..dim).all(|j| dot(row(i), row(j)) == if i == j { dim as i64 } else { 0 }))
    }

    #[test]
    fn every_order_in_use_is_exactly_orthogonal() {
        for dim in
            [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 60, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 512]
        {
            let signs = hadamard_signs(dim).expect("a supported order");
            assert!(is_hadamard(&signs, dim), "order {dim}");
        }
    }

    #[test]
    fn orders_below_200_are_exact_or_refused() {
        for dim in 1..200 {
            match hadamard_signs(dim) {
                Ok(signs) => assert!(is_hadamard(&signs, dim), "order {dim}"),
                Err(error) => assert_eq!(error, TransformError::UnsupportedOrder { order: dim }),
            }
        }
        for dim in [3, 6, 66, 92, 100] {
            assert!(matches!(hadamard_signs(dim), Err(TransformError::UnsupportedOrder { .. })), "order {dim}");
        }
    }

    #[test]
    fn orders_out_of_range_are_refused_before_anything_is_allocated() {
        for dim in [0, MAX_DIM + 1, usize::MAX] {
            assert_eq!(hadamard_signs(dim), Err(TransformError::Dimension { dim }));
        }
    }

    #[test]
    fn normalized_entries_have_magnitude_one_over_root_d() {
        assert!(hadamard(80).expect("supported").iter().all(|x| x.abs() == 1.0 / 80_f64.sqrt()));
    }
}
