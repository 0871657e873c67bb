//! Bits where they matter: which layer's keys or values get a third or fourth bit under an average.
//!
//! Enters: what 2 bits do to each attention module, keys and values alone, and how many coordinates each side has. Leaves:
//! bits of every layer. Measures nothing itself.

use wush_quant::{Bits, LayerBits, Role};

use crate::{EvalError, Result};

/// What may be allotted, rising, each with the relative squared error of the best uniform quantizer of a unit normal variable
/// (J. Max, "Quantizing for minimum distortion", 1960, table II). Their ratios carry an error measured at one number of bits to
/// another; with Eq. 16's loss, which is proportional to the squared step, they are those of the predicted losses.
const WIDTHS: [(Bits, f64); 3] = [(Bits::Two, 0.118_8), (Bits::Three, 0.037_44), (Bits::Four, 0.011_54)];
/// Fewest bits that are allotted, at which errors are measured.
pub const MEASURED: Bits = WIDTHS[0].0;
/// Smallest and largest average that can be asked for.
pub const AVERAGES: [f64; 2] = [WIDTHS[0].0.get() as f64, WIDTHS[WIDTHS.len() - 1].0.get() as f64];

/// Bits of all coordinates together that an average is short of a whole number of them for its rounding alone: 2^-52 of up to 2^32.
const ROUNDING: f64 = 1e-6;

/// One layer as the allotment sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Relative squared error of the module's output, keys alone quantized to [`MEASURED`] bits.
    pub keys: f64,
    /// The same of values.
    pub values: f64,
    /// Coordinates a token has in each, `n_kv_heads * d`.
    pub n_coordinates: usize,
}

/// Bits of every layer, at most `average` over all coordinates of keys and values: one bit at a time to the side whose sum of
/// predicted errors falls most a bit. Errors fall ever less, so no other choice of as many bits has a smaller sum where layers
/// are equally wide. Ties go to the first layer, and there to its keys.
///
/// # Errors
/// `Average` outside of [`AVERAGES`]; `Sensitivity` for errors that are none.
pub fn allot(layers: &[Measured], average: f64) -> Result<Vec<LayerBits>> {
    let [least, most] = AVERAGES;
    // Written so that a NaN is refused.
    if !(least..=most).contains(&average) {
        return Err(EvalError::Average { found: average });
    }
    let is_error = |error: f64| error.is_finite() && error >= 0.0;
    if let Some(layer) = layers.iter().position(|layer| !is_error(layer.keys) || !is_error(layer.values)) {
        return Err(EvalError::Sensitivity { layer });
    }
    let n_coordinates: usize = layers.iter().map(|layer| 2 * layer.n_coordinates).sum();
    // Spare bits: of all coordinates, above the fewest.
    let mut spare = ((average - least) * n_coordinates as f64 + ROUNDING).floor() as usize;
    let mut sides: Vec<Side> = layers.iter().flat_map(Side::of_layer).collect();
    while let Some(side) = best(&mut sides, spare) {
        spare -= side.n_coordinates;
        side.width += 1;
    }
    let bits = |side: &Side| WIDTHS[side.width].0;
    Ok(sides.chunks_exact(2).map(|pair| LayerBits { keys: bits(&pair[0]), values: bits(&pair[1]) }).collect())
}

/// The side that gains most a bit, of those that `spare` bits are enough for.
fn best(sides: &mut [Side], spare: usize) -> Option<&mut Side> {
    let mut found: Option<(usize, f64)> = None;
    for (at, side) in sides.iter().enumerate().filter(|(_, side)| side.n_coordinates <= spare) {
        let Some(gain) = side.gain() else { continue };
        if found.is_none_or(|(_, most)| gain > most) {
            found = Some((at, gain));
        }
    }
    found.map(|(at, _)| &mut sides[at])
}

/// Keys or values of a layer.
struct Side {
    error: f64,
    n_coordinates: usize,
    /// Index in [`WIDTHS`].
    width: usize,
}

impl Side {
    fn of_layer(layer: &Measured) -> [Self; 2] {
        [layer.keys, layer.values].map(|error| Self { error, n_coordinates: layer.n_coordinates, width: 0 })
    }

    /// What one bit more takes off the error, a bit of the cache; none at the most bits.
    fn gain(&self) -> Option<f64> {
        let (_, next) = WIDTHS.get(self.width + 1)?;
        let fallen = (WIDTHS[self.width].1 - next) / WIDTHS[0].1;
        Some(self.error * fallen / self.n_coordinates.max(1) as f64)
    }
}

/// Average of `bits` over the coordinates of keys and values; `n_coordinates` has one entry a layer.
pub fn average(bits: &[LayerBits], n_coordinates: impl Iterator<Item = usize>) -> f64 {
    let (mut sum, mut n) = (0, 0);
    for (bits, n_of_layer) in bits.iter().zip(n_coordinates) {
        let both: usize = [Role::Key, Role::Value].map(|role| usize::from(bits.of(role).get())).iter().sum();
        sum += both * n_of_layer;
        n += 2 * n_of_layer;
    }
    sum as f64 / n.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(errors: &[[f64; 2]]) -> Vec<Measured> {
        errors.iter().map(|&[keys, values]| Measured { keys, values, n_coordinates: 6 }).collect()
    }

    fn numbers(bits: &[LayerBits]) -> Vec<[u8; 2]> {
        bits.iter().map(|bits| [bits.keys.get(), bits.values.get()]).collect()
    }

    /// Every choice of 2, 3 or 4 bits a side, and the least sum of predicted errors under the average.
    fn least_sum(measured: &[Measured], asked: f64) -> f64 {
        let n_sides = 2 * measured.len() as u32;
        let side = |at: usize| [measured[at / 2].keys, measured[at / 2].values][at % 2];
        let mut least = f64::INFINITY;
        for choice in 0..3usize.pow(n_sides) {
            let width = |at: usize| choice / 3usize.pow(at as u32) % 3;
            let bits: usize = (0..n_sides as usize).map(|at| 2 + width(at)).sum();
            if bits as f64 <= asked * f64::from(n_sides) {
                least = least.min((0..n_sides as usize).map(|at| side(at) * WIDTHS[width(at)].1).sum());
            }
        }
        least
    }

    /// 2.3 is no binary number: of 60 equal sides exactly 18 get a third bit all the same.
    #[test]
    fn averages_that_are_no_binary_numbers_are_reached() {
        let layers: Vec<Measured> = (0..30).map(|_| Measured { keys: 1.0, values: 1.0, n_coordinates: 192 }).collect();
        for average in [2.1, 2.2, 2.3, 2.4, 2.8, 2.9] {
            let bits = allot(&layers, average).expect("in range");
            let found = super::average(&bits, layers.iter().map(|layer| layer.n_coordinates));
            assert!((found - average).abs() <= 1e-12, "{average}: {found}");
        }
    }

    #[test]
    fn the_choice_is_the_best_of_all_choices() {
        let measured = layers(&[[0.3, 0.05], [0.01, 0.02], [0.9, 0.4]]);
        for asked in [2.0, 2.2, 2.25, 2.5, 3.0, 3.4, 4.0] {
            let bits = allot(&measured, asked).expect("in range");
            let error =
                |role| move |(side, bits): (f64, &LayerBits)| side * WIDTHS[usize::from(bits.of(role).get()) - 2].1;
            let keys: f64 = measured.iter().map(|m| m.keys).zip(&bits).map(error(Role::Key)).sum();
            let values: f64 = measured.iter().map(|m| m.values).zip(&bits).map(error(Role::Value)).sum();
            assert!((keys + values - least_sum(&measured, asked)).abs() <= 1e-15, "{asked}: {bits:?}");
            assert!(average(&bits, [6; 3].into_iter()) <= asked);
        }
    }

    #[test]
    fn the_ends_are_uniform_and_ties_go_to_the_first() {
        let measured = layers(&[[0.1, 0.1], [0.1, 0.1]]);
        assert_eq!(numbers(&allot(&measured, 2.0).expect("in range")), [[2, 2], [2, 2]]);
        assert_eq!(numbers(&allot(&measured, 4.0).expect("in range")), [[4, 4], [4, 4]]);
        assert_eq!(numbers(&allot(&measured, 2.25).expect("in range")), [[3, 2], [2, 2]]);
        // Nothing is left over that would fit: 2.6 is room for two more sides, not for a third.
        assert_eq!(numbers(&allot(&measured, 2.6).expect("in range")), [[3, 3], [2, 2]]);
    }

    #[test]
    fn wide_layers_pay_for_their_width() {
        let mut measured = layers(&[[0.2, 0.2], [0.15, 0.15]]);
        measured[0].n_coordinates = 12;
        let bits = allot(&measured, 2.34).expect("in range");
        assert_eq!(numbers(&bits), [[2, 2], [3, 3]]);
        assert!((average(&bits, [12, 6].into_iter()) - (2.0 + 12.0 / 36.0)).abs() < 1e-12);
    }

    #[test]
    fn what_is_no_average_or_no_error_is_refused() {
        for asked in [1.9, 4.1, f64::NAN, f64::INFINITY, -1.0] {
            assert!(allot(&layers(&[[0.1, 0.1]]), asked).is_err(), "{asked}");
        }
        for wrong in [f64::NAN, -0.1, f64::INFINITY] {
            assert!(allot(&layers(&[[0.1, 0.1], [0.1, wrong]]), 2.5).is_err(), "{wrong}");
        }
    }
}
