//! Columns that repeat each other up to sign, and with them their roundings: whatever T is, equal columns of W_V are equal columns
//! of T W_V and are rounded alike. Sums over such columns add their errors, and not the squares of them. In weights that are
//! drawn at random no two columns are the same; in constant ones, or among a dtype's smallest numbers, most are.

use std::collections::HashMap;

use faer::{Mat, MatRef};

use crate::dense::{map, multiply};

/// Which columns are the same.
pub(crate) struct Repeats {
    /// Of every column: its group, and 1 or −1.
    columns: Vec<(usize, f64)>,
    n_groups: usize,
}

impl Repeats {
    /// Of the columns of `a`.
    pub(crate) fn of(a: MatRef<'_, f64>) -> Self {
        let mut known = HashMap::new();
        let place = |column: faer::ColRef<'_, f64>| {
            let first = column.iter().find(|&&x| x != 0.0).copied().unwrap_or(1.0);
            let sign = first.signum();
            // Adding zero makes one zero of two.
            let bits: Vec<u64> = column.iter().map(|x| (x * sign + 0.0).to_bits()).collect();
            let n_known = known.len();
            (*known.entry(bits).or_insert(n_known), sign)
        };
        let columns = a.col_iter().map(place).collect();
        Self { columns, n_groups: known.len() }
    }

    /// Rows of `x`, `[n, k]`, that belong to the same group, added with their signs: `[groups, k]`.
    pub(crate) fn merged(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        let mut sums = Mat::zeros(self.n_groups, x.ncols());
        for (j, &(group, sign)) in self.columns.iter().enumerate() {
            (0..x.ncols()).for_each(|k| sums[(group, k)] += sign * x[(j, k)]);
        }
        sums
    }

    /// One number a group, the largest of its columns': `of`, `[n]`.
    pub(crate) fn largest(&self, of: &[f64]) -> Vec<f64> {
        let mut largest = vec![0.0; self.n_groups];
        self.columns.iter().zip(of).for_each(|(&(group, _), &x)| largest[group] = f64::max(largest[group], x));
        largest
    }

    /// Bound on the variance of `D x` for every column x of `x`, `[n, k]`, where |D| is at most h elementwise; `half_squared`: h²,
    /// `[d, n]`. Result: `[d, k]`.
    pub(crate) fn variance(&self, half_squared: MatRef<'_, f64>, x: MatRef<'_, f64>) -> Mat<f64> {
        let mut of_groups = Mat::zeros(half_squared.nrows(), self.n_groups);
        for (j, &(group, _)) in self.columns.iter().enumerate() {
            for i in 0..half_squared.nrows() {
                of_groups[(i, group)] = f64::max(of_groups[(i, group)], half_squared[(i, j)]);
            }
        }
        multiply(of_groups.as_ref(), map(self.merged(x).as_ref(), |x| x * x).as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_columns_err_together_and_others_apart() {
        // Columns 0 and 2 are the same, 3 is their negative; 1 is alone.
        let a = Mat::from_fn(2, 4, |i, j| [[1.0, 5.0, 1.0, -1.0], [0.0, 2.0, -0.0, 0.0]][i][j]);
        let repeats = Repeats::of(a.as_ref());
        assert_eq!(repeats.n_groups, 2);
        let x = Mat::from_fn(4, 1, |j, _| [1.0, 10.0, 2.0, 4.0][j]);
        let half_squared = Mat::from_fn(1, 4, |_, j| [1.0, 1.0, 4.0, 1.0][j]);
        let found = repeats.variance(half_squared.as_ref(), x.as_ref());
        assert_eq!(found[(0, 0)], 4.0 * (1.0 + 2.0 - 4.0f64).powi(2) + 100.0);
        assert_eq!(repeats.largest(&[1.0, 2.0, 3.0, 0.5]), [3.0, 2.0]);
    }
}
