//! The check from two checkpoints alone: true folds pass, changes beyond rounding do not, whatever the hashes say.

mod support;

use faer::Mat;
use support::{Rng, well_conditioned};
use wush_fold::{HeadWeights, Roundings, check_head, check_transform};

struct Pair {
    base: HeadWeights,
    folded: HeadWeights,
    transform: Vec<f64>,
}

fn bf16(x: f64) -> f64 {
    f64::from(half::bf16::from_f32(x as f32))
}

fn half_spacing(x: f64) -> f64 {
    2f64.powi((x.abs().log2().floor() as i32).max(-126) - 8)
}

fn halves(a: &Mat<f64>) -> Mat<f64> {
    Mat::from_fn(a.nrows(), a.ncols(), |i, j| half_spacing(a[(i, j)]))
}

/// A head of d = `dim`, `hidden` wide, two query heads; `value` makes the value weights' rows.
fn pair(dim: usize, hidden: usize, bias: Option<f64>, value: impl Fn(&mut Rng, usize, usize) -> f64) -> Pair {
    let mut rng = Rng(5);
    let mut round = |rows, cols, f: &dyn Fn(&mut Rng, usize, usize) -> f64| {
        Mat::from_fn(rows, cols, |i, j| bf16(f(&mut rng, i, j)))
    };
    let w = round(dim, hidden, &|rng, i, j| value(rng, i, j));
    let outputs = [(); 2].map(|()| round(hidden, dim, &|rng, _, _| rng.normal() * 0.02)).to_vec();
    let b = bias.map(|scale| round(dim, 1, &|rng, _, _| rng.normal() * scale));
    let transform = well_conditioned(&mut rng, dim);
    let t = Mat::from_fn(dim, dim, |i, j| transform[i * dim + j]);
    use faer::linalg::solvers::DenseSolveCore;
    let inverse = t.partial_piv_lu().inverse();
    let rounded = |a: Mat<f64>| Mat::from_fn(a.nrows(), a.ncols(), |i, j| bf16(a[(i, j)]));
    let new_value = rounded(&t * &w);
    let new_outputs: Vec<_> = outputs.iter().map(|output| rounded(output * &inverse)).collect();
    let vector = |a: &Mat<f64>| {
        (a.col(0).iter().copied().collect::<Vec<_>>(), a.col(0).iter().map(|&x| half_spacing(x)).collect())
    };
    let base = HeadWeights {
        layer: 0,
        head: 0,
        value_halves: halves(&w),
        bias: b.as_ref().map(&vector),
        output_halves: outputs.iter().map(halves).collect(),
        value: w,
        outputs,
    };
    let folded = HeadWeights {
        layer: 0,
        head: 0,
        value_halves: halves(&new_value),
        bias: b.map(|b| vector(&rounded(&t * &b))),
        output_halves: new_outputs.iter().map(halves).collect(),
        value: new_value,
        outputs: new_outputs,
    };
    Pair { base, folded, transform }
}

fn plain(dim: usize, hidden: usize) -> Pair {
    pair(dim, hidden, None, |rng, _, _| rng.normal() * 0.02)
}

#[test]
fn true_folds_pass_with_and_without_bias_wide_and_square() {
    for (dim, hidden) in [(64, 576), (128, 1536), (16, 16), (32, 40), (16, 12)] {
        for bias in [None, Some(0.1), Some(900.0), Some(0.0)] {
            let pair = pair(dim, hidden, bias, |rng, _, _| rng.normal() * 0.02);
            let found = check_head(&pair.base, &pair.folded, Roundings::One);
            assert!(found.ok, "{dim} {hidden} {bias:?} {found:?}");
            assert!(found.rel_error <= 0.02 && found.rel_error >= 1e-4, "{found:?}");
            let found = check_transform(&pair.base, &pair.folded, &pair.transform);
            assert!(found.ok, "{found:?}");
        }
    }
}

#[test]
fn rank_deficient_and_dead_values_pass() {
    let dead = pair(32, 256, None, |rng, i, _| if i % 4 == 0 { 0.0 } else { rng.normal() });
    let faint = pair(32, 256, None, |rng, i, _| rng.normal() * if i < 8 { 1e-6 } else { 1.0 });
    let narrow = pair(32, 256, Some(0.5), |rng, _, j| if j < 9 { rng.normal() } else { 0.0 });
    let nothing = pair(8, 64, None, |_, _, _| 0.0);
    for (pair, rank) in [(dead, 24), (faint, 24), (narrow, 10), (nothing, 0)] {
        let found = check_head(&pair.base, &pair.folded, Roundings::One);
        assert!(found.ok && found.rank == rank, "{rank} {found:?}");
        assert!(check_transform(&pair.base, &pair.folded, &pair.transform).ok);
    }
}

/// Equal columns are rounded alike, and among the smallest numbers of a dtype a rounding is as large as what it rounds.
#[test]
fn constant_and_repeated_values_pass_down_to_the_smallest_numbers() {
    let least = 2f64.powi(-133);
    let pattern = |j: usize| ((j * 7919) % 24) as f64;
    for scale in [least, 5.0 * least, 300.0 * least, 0.01] {
        let constant = pair(64, 576, None, |_, _, _| scale);
        let rows = pair(64, 576, Some(scale), |_, i, _| scale * (1 + i % 3) as f64);
        let signs = pair(64, 576, None, |_, i, j| scale * (1 + i % 3) as f64 * if j % 5 < 2 { -1.0 } else { 1.0 });
        let repeats = pair(64, 576, None, |_, i, j| scale * ((i as f64 + 1.3) * (pattern(j) + 1.7)).sin() * 4.0);
        for (what, pair) in [("constant", constant), ("rows", rows), ("signs", signs), ("repeats", repeats)] {
            let found = check_head(&pair.base, &pair.folded, Roundings::One);
            assert!(found.ok, "{what} of {scale:e}: {found:?}");
            assert!(check_transform(&pair.base, &pair.folded, &pair.transform).ok, "{what} of {scale:e}");
        }
    }
    // Another element is found as among other values.
    let mut changed = pair(64, 576, None, |_, _, _| 0.01);
    changed.folded.value[(3, 100)] *= 1.0 + 2f64.powi(-5);
    assert!(check_head(&changed.base, &changed.folded, Roundings::One).values > 1.0);
}

#[test]
fn single_elements_beyond_eight_spacings_of_their_row_are_found() {
    let spacing = |a: &Mat<f64>, i: usize| 2.0 * half_spacing(a.row(i).iter().fold(0.0, |m: f64, x| m.max(x.abs())));
    for (dim, hidden) in [(64, 576), (128, 1536)] {
        for (i, j) in [(0, 0), (5, 300), (dim - 1, hidden - 1), (17, 123)] {
            let mut pair = plain(dim, hidden);
            let by = 8.0 * spacing(&pair.folded.value, i);
            pair.folded.value[(i, j)] += by;
            let found = check_head(&pair.base, &pair.folded, Roundings::One);
            assert!(!found.ok && found.values > 1.0, "{found:?}");
            let mut pair = plain(dim, hidden);
            let by = 8.0 * spacing(&pair.folded.outputs[1], j);
            pair.folded.outputs[1][(j, i)] += by;
            let found = check_head(&pair.base, &pair.folded, Roundings::One);
            assert!(!found.ok && found.outputs > 1.0, "{found:?}");
        }
    }
}

#[test]
fn with_the_transform_known_one_spacing_is_found() {
    let mut pair = plain(64, 576);
    let by = 2.0 * half_spacing(pair.folded.value[(3, 4)]);
    pair.folded.value[(3, 4)] += 1.01 * by;
    assert!(check_head(&pair.base, &pair.folded, Roundings::One).ok, "beneath what the weights alone can tell");
    assert!(check_transform(&pair.base, &pair.folded, &pair.transform).values > 1.0);
    let mut pair = plain(64, 576);
    let by = 2.0 * half_spacing(pair.folded.outputs[0][(3, 4)]);
    pair.folded.outputs[0][(3, 4)] += 1.01 * by;
    assert!(check_transform(&pair.base, &pair.folded, &pair.transform).outputs > 1.0);
    let mut pair = plain(64, 576);
    pair.transform[70] += 1e-3;
    assert!(!check_transform(&pair.base, &pair.folded, &pair.transform).ok, "another transform");
}

#[test]
fn square_values_are_judged_by_their_pair() {
    let mut pair = plain(16, 16);
    pair.folded.value[(3, 4)] *= 1.5;
    let found = check_head(&pair.base, &pair.folded, Roundings::One);
    assert!(!found.ok && found.values <= 1.0, "{found:?}");
}

#[test]
fn a_changed_bias_a_swapped_head_and_a_nan_are_found() {
    let mut changed = pair(32, 256, Some(0.3), |rng, _, _| rng.normal() * 0.02);
    changed.folded.bias.as_mut().expect("a bias").0[7] *= 1.2;
    assert!(check_head(&changed.base, &changed.folded, Roundings::One).bias > 1.0);
    assert!(!check_transform(&changed.base, &changed.folded, &changed.transform).ok);
    let mut swapped = plain(32, 256);
    swapped.folded.outputs.swap(0, 1);
    swapped.folded.output_halves.swap(0, 1);
    assert!(!check_head(&swapped.base, &swapped.folded, Roundings::One).ok);
    let mut scaled = plain(32, 256);
    scaled.folded.outputs[0] *= faer::Scale(1.01);
    assert!(!check_head(&scaled.base, &scaled.folded, Roundings::One).ok);
    let mut poisoned = plain(32, 256);
    poisoned.folded.value[(1, 1)] = f64::NAN;
    assert!(!check_head(&poisoned.base, &poisoned.folded, Roundings::One).ok);
    assert!(!check_transform(&poisoned.base, &poisoned.folded, &poisoned.transform).ok);
}

#[test]
fn a_consistent_change_of_basis_is_another_valid_fold() {
    let pair = plain(32, 256);
    let mut turned = pair.folded.clone();
    turned.value *= faer::Scale(2.0);
    turned.value_halves *= faer::Scale(2.0);
    for (output, halves) in turned.outputs.iter_mut().zip(&mut turned.output_halves) {
        *output *= faer::Scale(0.5);
        *halves *= faer::Scale(0.5);
    }
    assert!(check_head(&pair.base, &turned, Roundings::One).ok);
    assert!(!check_transform(&pair.base, &turned, &pair.transform).ok);
}

/// The pair with its folded side unfolded again: two roundings, the first seen through T^{-1}.
fn unfolded(pair: &Pair) -> HeadWeights {
    use faer::linalg::solvers::DenseSolveCore;
    let dim = pair.base.value.nrows();
    let t = Mat::from_fn(dim, dim, |i, j| pair.transform[i * dim + j]);
    let inverse = t.partial_piv_lu().inverse();
    let rounded = |a: Mat<f64>| Mat::from_fn(a.nrows(), a.ncols(), |i, j| bf16(a[(i, j)]));
    let value = rounded(&inverse * &pair.folded.value);
    let outputs: Vec<_> = pair.folded.outputs.iter().map(|output| rounded(output * &t)).collect();
    let bias = pair.folded.bias.as_ref().map(|(bias, _)| {
        let b = rounded(&inverse * Mat::from_fn(dim, 1, |i, _| bias[i]));
        (b.col(0).iter().copied().collect(), b.col(0).iter().map(|&x| half_spacing(x)).collect())
    });
    let (value_halves, output_halves) = (halves(&value), outputs.iter().map(halves).collect());
    HeadWeights { layer: 0, head: 0, value_halves, bias, output_halves, value, outputs }
}

/// A T with singular values from 1 to 2^span between two rotations, and value rows as unequal: the first rounding is seen
/// amplified, and correlated between rows.
fn stretched(dim: usize, hidden: usize, span: f64, bias: Option<f64>) -> Pair {
    use faer::linalg::solvers::DenseSolveCore;
    let mut pair = pair(dim, hidden, bias, |rng, i, _| rng.normal() * 0.02 * 2f64.powf(span * i as f64 / dim as f64));
    let mut rng = Rng(8);
    let (a, b) = (well_conditioned(&mut rng, dim), well_conditioned(&mut rng, dim));
    let full = |m: &[f64]| Mat::from_fn(dim, dim, |i, j| m[i * dim + j] + m[j * dim + (i + 1) % dim]);
    let scale = |i: usize| 2f64.powf(span * i as f64 / dim as f64);
    let middle = Mat::from_fn(dim, dim, |i, j| if i == j { scale(i) } else { 0.0 });
    let t = full(&a).qr().compute_Q() * middle * full(&b).qr().compute_Q();
    let inverse = t.partial_piv_lu().inverse();
    let rounded = |a: Mat<f64>| Mat::from_fn(a.nrows(), a.ncols(), |i, j| bf16(a[(i, j)]));
    pair.folded.value = rounded(&t * &pair.base.value);
    pair.folded.outputs = pair.base.outputs.iter().map(|output| rounded(output * &inverse)).collect();
    if let Some((bias, _)) = &pair.base.bias {
        let b = rounded(&t * Mat::from_fn(dim, 1, |i, _| bias[i]));
        pair.folded.bias = Some((b.col(0).iter().copied().collect(), vec![0.0; dim]));
    }
    pair.transform = (0..dim * dim).map(|at| t[(at / dim, at % dim)]).collect();
    pair
}

#[test]
fn an_unfolded_head_passes_the_bound_of_two_roundings_and_not_of_one() {
    let mut refused = 0;
    for (dim, hidden) in [(64, 576), (128, 1536), (32, 96)] {
        for (span, bias) in [(0.0, None), (2.0, Some(0.1)), (4.0, Some(900.0)), (5.0, None)] {
            let pair = stretched(dim, hidden, span, bias);
            let back = unfolded(&pair);
            let found = check_head(&pair.base, &back, Roundings::Two);
            println!("{dim} {hidden} {span} {found:?}");
            assert!(found.ok, "{dim} {hidden} {span} {bias:?} {found:?}");
            refused += usize::from(!check_head(&pair.base, &back, Roundings::One).ok);
            assert!(check_head(&pair.base, &pair.base, Roundings::Two).ok);
        }
    }
    assert!(refused >= 4, "the bound of one rounding was enough for all but {refused}");
    for dead in [
        pair(32, 256, None, |rng, i, _| if i % 4 == 0 { 0.0 } else { rng.normal() }),
        pair(32, 256, Some(0.5), |rng, _, j| if j < 9 { rng.normal() } else { 0.0 }),
        pair(8, 64, None, |_, _, _| 0.0),
    ] {
        let found = check_head(&dead.base, &unfolded(&dead), Roundings::Two);
        assert!(found.ok, "{found:?}");
    }
}

#[test]
fn two_roundings_excuse_no_change() {
    let honest = stretched(64, 576, 2.0, Some(0.1));
    let back = unfolded(&honest);
    let refused = |change: &dyn Fn(&mut HeadWeights)| {
        let mut changed = back.clone();
        change(&mut changed);
        let found = check_head(&honest.base, &changed, Roundings::Two);
        assert!(!found.ok, "{found:?}");
    };
    let largest = |a: &Mat<f64>| a.col_iter().flat_map(|col| col.iter()).fold(0.0, |m: f64, x| m.max(x.abs()));
    refused(&|head| head.value[(7, 100)] += 0.5 * largest(&back.value));
    refused(&|head| head.outputs[1][(100, 7)] += 0.5 * largest(&back.outputs[1]));
    refused(&|head| head.outputs[0] *= faer::Scale(1.05));
    refused(&|head| head.value *= faer::Scale(0.95));
    refused(&|head| head.outputs.swap(0, 1));
    refused(&|head| head.bias.as_mut().expect("a bias").0[3] *= -1.0);
    // Noise far above any rounding, in every element.
    refused(&|head| {
        let mut rng = Rng(3);
        let size = largest(&back.value);
        head.value = Mat::from_fn(64, 576, |i, j| back.value[(i, j)] + 0.3 * size * rng.normal());
    });
}
