//! Eq. 5 and Eq. 7 against the float64 oracle (`tests/fixtures/oracle`): every group, head dimension and bits of the file.

use std::path::PathBuf;

use safetensors::{Dtype, SafeTensors};
use wush_quant::{Bits, Codec, Kind, Level, Quantile, Quantizer, ScaleDtype, alpha};

/// The oracle's own suggestion for f64: where a value lies at least 2⁻⁴⁰ steps from an edge, the code must be its.
const MARGIN_BITS: u8 = 40;
/// An f64 rounded to f32 once.
const F32_REL_TOL: f64 = 0.5 * f32::EPSILON as f64;
/// The oracle against this crate in f64: sums of 256 squares in another order, and a root.
const F64_REL_TOL: f64 = 256.0 * f64::EPSILON;

const DIMS: [usize; 5] = [64, 80, 96, 128, 256];

fn fixture(name: &str) -> Vec<u8> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle");
    std::fs::read(dir.join(name)).expect("the fixture is there")
}

fn numbers(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    let tensor = file.tensor(name).unwrap_or_else(|_| panic!("{name} is there"));
    let data = tensor.data();
    match tensor.dtype() {
        Dtype::F64 => data.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect(),
        Dtype::F32 => data.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b).into()).collect(),
        Dtype::I32 => data.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b).into()).collect(),
        Dtype::I8 => data.iter().map(|&b| b.cast_signed().into()).collect(),
        Dtype::U8 => data.iter().map(|&b| b.into()).collect(),
        other => panic!("{name}: {other:?}"),
    }
}

/// One group as it was packed: codes, scale, zero point, reconstruction.
struct Packed {
    codes: Vec<u8>,
    scale: f64,
    zero: f64,
    values: Vec<f32>,
}

fn pack(codec: &Codec, x: &[f32]) -> Packed {
    let mut record = vec![0xa5; codec.layout().n_bytes()];
    codec.pack(x, &mut record).expect("in range");
    let (mut codes, mut values) = (vec![0; x.len()], vec![f32::NAN; x.len()]);
    let (scale, zero) = codec.codes(&record, &mut codes).expect("one record");
    codec.unpack(&record, &mut values).expect("one record");
    assert!(values.iter().all(|v| v.is_finite()), "{values:?}");
    Packed { codes, scale: scale.into(), zero: zero.into(), values }
}

fn codecs(kind: Kind, bits: Bits, dim: usize) -> impl Iterator<Item = Codec> {
    let quantizer = Quantizer::new(kind, bits, ScaleDtype::F32).expect("in range");
    let codec = Codec::new(dim, quantizer).expect("in range");
    Level::ALL.into_iter().filter_map(move |level| codec.at(level).ok())
}

fn assert_stored(what: &str, found: f64, expected: f64) {
    let tol = (F32_REL_TOL + F64_REL_TOL) * expected.abs() + f64::from(f32::from_bits(1)) / 2.0;
    assert!((found - expected).abs() <= tol, "{what}: found {found:e}, expected {expected:e}");
}

#[test]
fn alpha_is_the_oracles() {
    let json: serde_json::Value = serde_json::from_slice(&fixture("quantizers.json")).expect("valid JSON");
    for bits in 1..=8u8 {
        let expected = json["alpha"][bits.to_string()].as_f64().expect("a number");
        let found = alpha(bits).expect("in the table");
        assert!((found - expected).abs() <= 1e-12, "b {bits}: {found} against {expected}");
    }
}

#[test]
fn equation_5_is_the_oracles() {
    let bytes = fixture("quantizers.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("valid");
    let mut n_exact = 0;
    for dim in DIMS {
        let x: Vec<f32> = numbers(&file, &format!("x.{dim}")).into_iter().map(|x| x as f32).collect();
        for bits in Bits::ALL {
            let name = format!("quest.{dim}.b{}", bits.get());
            let [codes, margins, steps] =
                ["codes", "margin_bits", "step"].map(|part| numbers(&file, &format!("{name}.{part}")));
            for codec in codecs(Kind::Quest { alpha: bits.alpha() }, bits, dim) {
                for (group, x) in x.chunks_exact(dim).enumerate() {
                    let what = format!("{name}, group {group}, {:?}", codec.level());
                    let found = pack(&codec, x);
                    assert_stored(&what, found.scale, steps[group]);
                    let half_range = f64::from(1u32 << (bits.get() - 1));
                    assert_eq!(found.zero, half_range - 0.5, "{what}");
                    for (i, &code) in found.codes.iter().enumerate() {
                        let (expected, margin) = (codes[group * dim + i] + half_range, margins[group * dim + i] as u8);
                        let off = (f64::from(code) - expected).abs();
                        // A tie lies at x = 0, which goes up on every machine.
                        let exact = margin <= MARGIN_BITS || margin == u8::MAX;
                        n_exact += usize::from(exact);
                        assert!(off <= f64::from(u8::from(!exact)), "{what}, {i}: code {code}, expected {expected}");
                    }
                }
            }
        }
    }
    assert!(n_exact > 50_000, "only {n_exact} codes compared");
}

#[test]
fn equation_7_is_the_oracles() {
    let bytes = fixture("quantizers.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("valid");
    let mut n_exact = 0;
    for dim in DIMS {
        let x: Vec<f32> = numbers(&file, &format!("x.{dim}")).into_iter().map(|x| x as f32).collect();
        for (bits, text) in [(Bits::Two, "b2"), (Bits::Three, "b3"), (Bits::Four, "b4")] {
            for (kappa, number) in [(0.92, "0.92"), (0.96, "0.96"), (1.0, "1.0")] {
                let name = format!("oscar.{dim}.{text}.k{number}");
                let parts = ["codes_half_up", "margin_bits", "step", "zero"];
                let [codes, margins, steps, zeros] = parts.map(|part| numbers(&file, &format!("{name}.{part}")));
                for codec in codecs(Kind::Oscar { kappa, quantile: Quantile::Linear }, bits, dim) {
                    for (group, x) in x.chunks_exact(dim).enumerate() {
                        let what = format!("{name}, group {group}, {:?}", codec.level());
                        let found = pack(&codec, x);
                        if steps[group] == 0.0 {
                            // The clipped range is one point: the largest value, or 0 among zeros.
                            let low = x.iter().copied().fold(f32::INFINITY, f32::min);
                            let point = if x.iter().all(|&x| x == low) { low } else { 0.0 };
                            assert!(found.values.iter().all(|&v| v == point), "{what}: {:?}", found.values);
                            assert!(found.codes.iter().all(|&code| code == 0), "{what}");
                            continue;
                        }
                        assert_stored(&what, found.scale, steps[group]);
                        assert_stored(&what, found.zero, zeros[group]);
                        for (i, &code) in found.codes.iter().enumerate() {
                            let (expected, margin) = (codes[group * dim + i], margins[group * dim + i] as u8);
                            let exact = margin <= MARGIN_BITS || margin == u8::MAX;
                            n_exact += usize::from(exact);
                            let off = (f64::from(code) - expected).abs();
                            assert!(
                                off <= f64::from(u8::from(!exact)),
                                "{what}, {i}: code {code}, expected {expected}"
                            );
                        }
                    }
                }
            }
        }
    }
    assert!(n_exact > 100_000, "only {n_exact} codes compared");
}
