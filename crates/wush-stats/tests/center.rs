//! Mean keys and what is left of their Gram matrix without them, against the definitions.

use wush_stats::LayerStats;

const DIM: usize = 3;
const KEYS: [[f64; DIM]; 4] = [[4.0, 1.0, 0.0], [5.0, -1.0, 0.5], [4.5, 0.0, -0.5], [4.5, 2.0, 0.0]];

/// Sums of head 1; head 0 has none.
fn sums(keys: &[[f64; DIM]]) -> LayerStats {
    let mut stats = LayerStats::zeros(2, DIM);
    for key in keys {
        for at in 0..DIM * DIM {
            stats.key_gram.head_mut(1)[at] += key[at / DIM] * key[at % DIM];
        }
        (0..DIM).for_each(|i| stats.key_sum[DIM + i] += key[i]);
    }
    stats
}

#[test]
fn the_mean_and_the_covariance_are_those_of_the_keys() {
    let stats = sums(&KEYS);
    let mean = stats.key_mean(1, 4);
    assert_eq!(mean, [4.5, 0.5, 0.0]);
    let centered: Vec<[f64; DIM]> = KEYS.map(|key| std::array::from_fn(|i| key[i] - mean[i])).to_vec();
    // Every number here is a small dyadic: the sums are exact.
    assert_eq!(stats.key_covariance(1, 4), sums(&centered).key_gram.head(1));
    let share = stats.mean_key_energy(1, 4).expect("there is energy");
    let energy: f64 = KEYS.iter().flatten().map(|x| x * x).sum();
    assert!((share - 4.0 * (4.5f64.powi(2) + 0.25) / energy).abs() <= f64::EPSILON, "{share}");
}

#[test]
fn equal_keys_leave_nothing() {
    // Rounding leaves some 1e-16 of the trace, which is no covariance.
    let stats = sums(&[[0.1, 0.7, -3.3]; 7]);
    assert_eq!(stats.key_covariance(1, 7), [0.0; DIM * DIM]);
    assert_eq!(stats.key_covariance(0, 7), [0.0; DIM * DIM]);
    assert_eq!((stats.key_mean(0, 0), stats.mean_key_energy(0, 7)), (vec![0.0; DIM], None));
}
