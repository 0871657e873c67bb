//! Packed token-heads: round trips, the two products against a naive f64 reference, every vector level against the
//! portable one, and what is refused.

use proptest::prelude::*;
use wush_quant::{
    Accumulators, Bits, Codec, Kind, Level, MAX_MAGNITUDE, Method, QuantError, Quantile, Quantizer, Queries, Role,
    ScaleDtype,
};

/// Head dimensions in use, and small and odd ones; 1000 has several blocks of words at every width.
const DIMS: [usize; 15] = [1, 2, 5, 16, 17, 33, 63, 64, 80, 96, 112, 128, 192, 256, 1000];
const GROUPS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 12, 17];

/// A seeded source of numbers: the 64-bit mixer of SplitMix.
struct Source(u64);

impl Source {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Roughly normal: the sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        (0..4).map(|_| (self.next() >> 40) as f32 / (1u32 << 24) as f32 - 0.5).sum::<f32>() * 1.73
    }

    fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}

fn quantizers(bits: Bits, scale_dtype: ScaleDtype) -> [Quantizer; 3] {
    ["quest", "oscar", "oscar-linear"].map(|text| {
        let method: Method = text.parse().expect("a name");
        method.quantizer(bits, Role::Key, scale_dtype).expect("in range")
    })
}

fn all_quantizers() -> impl Iterator<Item = Quantizer> {
    let dtypes = [ScaleDtype::Bf16, ScaleDtype::F32];
    Bits::ALL.into_iter().flat_map(move |bits| dtypes.into_iter().flat_map(move |dtype| quantizers(bits, dtype)))
}

fn codec(dim: usize, quantizer: Quantizer) -> Codec {
    Codec::new(dim, quantizer).expect("in range")
}

fn levels(codec: Codec) -> impl Iterator<Item = Codec> {
    Level::ALL.into_iter().filter_map(move |level| codec.at(level).ok())
}

fn packed(codec: &Codec, x: &[f32]) -> Vec<u8> {
    let mut packed = vec![0xa5; codec.layout().n_bytes() * (x.len() / codec.layout().head_dim())];
    codec.pack(x, &mut packed).expect("in range");
    packed
}

fn unpacked(codec: &Codec, packed: &[u8]) -> Vec<f32> {
    let mut x = vec![f32::NAN; packed.len() / codec.layout().n_bytes() * codec.layout().head_dim()];
    codec.unpack(packed, &mut x).expect("whole records");
    x
}

/// The bytes of the docs, written out again from their definition: coordinate i = p·W + w.
#[test]
fn the_bytes_are_those_of_the_format() {
    let mut source = Source(1);
    for dim in DIMS {
        for quantizer in all_quantizers() {
            let codec = codec(dim, quantizer);
            let record = packed(&codec, &source.vector(dim));
            let mut codes = vec![0; dim];
            let (scale, zero) = codec.codes(&record, &mut codes).expect("one record");
            let bits = usize::from(quantizer.bits().get());
            let (per_word, width) = if bits == 3 { (16, 2) } else { (32 / bits, bits) };
            let n_words = dim.div_ceil(per_word);
            let mut expected = vec![0u8; 4 * n_words];
            let mut planes = vec![0u8; if bits == 3 { 4 * n_words.div_ceil(2) } else { 0 }];
            for (i, &code) in codes.iter().enumerate() {
                let (position, word) = (i / n_words, i % n_words);
                let bit = 32 * word + position * width;
                expected[bit / 8] |= (code & ((1u16 << width) - 1) as u8) << (bit % 8);
                if bits == 3 {
                    let bit = 16 * word + position;
                    planes[bit / 8] |= (code >> 2) << (bit % 8);
                }
            }
            expected.extend(planes);
            for value in [scale, zero] {
                match quantizer.scale_dtype() {
                    ScaleDtype::Bf16 => expected.extend(half::bf16::from_f32(value).to_le_bytes()),
                    ScaleDtype::F32 => expected.extend(value.to_le_bytes()),
                }
            }
            assert_eq!(record, expected, "d {dim}, {quantizer}");
        }
    }
}

#[test]
fn every_level_packs_the_same_bytes_and_reads_the_same_numbers() {
    let mut source = Source(2);
    for dim in DIMS {
        let x = source.vector(3 * dim);
        for quantizer in all_quantizers() {
            let mut results = levels(codec(dim, quantizer)).map(|codec| {
                let bytes = packed(&codec, &x);
                let numbers: Vec<u32> = unpacked(&codec, &bytes).iter().map(|x| x.to_bits()).collect();
                (bytes, numbers)
            });
            let portable = results.next().expect("portable");
            assert!(results.all(|other| other == portable), "d {dim}, {quantizer}");
        }
    }
}

/// Eq. 5 and Eq. 7 evaluated naively in f64, and the distance that `Codec::pack` promises for the stored scales.
#[test]
fn the_stored_reconstruction_is_as_near_as_promised() {
    let mut source = Source(3);
    for dim in DIMS {
        let x = source.vector(dim);
        for quantizer in all_quantizers() {
            let codec = codec(dim, quantizer);
            let record = packed(&codec, &x);
            let mut codes = vec![0; dim];
            codec.codes(&record, &mut codes).expect("one record");
            let (scale, zero) = naive_map(&quantizer, &x);
            let u = if quantizer.scale_dtype() == ScaleDtype::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-24) };
            // The f32 in between rounds too, and so do the two operations of `unpack`.
            let u = u + 2f64.powi(-23);
            for ((&code, &found), &x) in codes.iter().zip(&unpacked(&codec, &record)).zip(&x) {
                let exact = scale * (f64::from(code) - zero);
                let tol = scale * (u * (f64::from(code) - zero).abs() + u * zero.abs() * (1.0 + u));
                let off = (f64::from(found) - exact).abs();
                assert!(off <= tol, "d {dim}, {quantizer}: {x} → {found}, exactly {exact}, tolerance {tol:e}");
            }
        }
    }
}

/// Scale and zero point in f64, from the equations and a sort.
fn naive_map(quantizer: &Quantizer, x: &[f32]) -> (f64, f64) {
    let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let top = f64::from(quantizer.bits().max_code());
    match quantizer.kind() {
        Kind::Quest { alpha } => {
            let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
            (2.0 * alpha / top * rms, top / 2.0)
        }
        Kind::Oscar { kappa, quantile } => {
            let mut sorted: Vec<f64> = x.iter().map(|x| x.abs()).collect();
            sorted.sort_by(f64::total_cmp);
            let last = sorted.len() - 1;
            let q = match quantile {
                Quantile::Index => sorted[((kappa * x.len() as f64) as usize).min(last)],
                Quantile::Linear => {
                    let rank = kappa * last as f64;
                    let (below, above) = (sorted[rank as usize], sorted[(rank as usize + 1).min(last)]);
                    below + rank.fract() * (above - below)
                }
            };
            let low = x.iter().copied().fold(f64::INFINITY, f64::min).max(-q);
            let high = x.iter().copied().fold(f64::NEG_INFINITY, f64::max).min(q);
            let scale = (high - low) / top;
            if scale > 0.0 { (scale, -low / scale) } else { (low.abs(), -low.signum()) }
        }
    }
}

#[test]
fn error_falls_with_bits() {
    let x = Source(4).vector(128 * 50);
    for (which, name) in ["quest", "oscar", "oscar-linear"].into_iter().enumerate() {
        let errors = Bits::ALL.map(|bits| {
            let codec = codec(128, quantizers(bits, ScaleDtype::F32)[which]);
            let read = unpacked(&codec, &packed(&codec, &x));
            read.iter().zip(&x).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / x.len() as f64
        });
        assert!(errors.is_sorted_by(|a, b| a > b), "{name}: {errors:?}");
        assert!(errors[0] < 0.2, "{name}: {errors:?}");
    }
}

/// Both products of every dimension, bits and group size, at every level, for token counts around the tiles.
#[test]
fn products_agree_with_the_naive_reference() {
    let mut source = Source(5);
    for dim in DIMS {
        for quantizer in all_quantizers() {
            let group = GROUPS[source.next() as usize % GROUPS.len()];
            for n_tokens in [0, 1, 3, 4, 6, 16, 17, 35] {
                let x = source.vector(n_tokens * dim);
                for codec in levels(codec(dim, quantizer)) {
                    check_products(&codec, &packed(&codec, &x), group, &mut source);
                }
            }
        }
    }
}

#[test]
fn products_agree_for_every_group_size() {
    let mut source = Source(6);
    for group in GROUPS {
        for bits in Bits::ALL {
            for codec in levels(codec(128, quantizers(bits, ScaleDtype::Bf16)[1])) {
                let x = source.vector(37 * 128);
                check_products(&codec, &packed(&codec, &x), group, &mut source);
            }
        }
    }
}

fn check_products(codec: &Codec, packed: &[u8], group: usize, source: &mut Source) {
    let (layout, dim) = (codec.layout(), codec.layout().head_dim());
    let values = unpacked(codec, packed);
    let n_tokens = values.len() / dim;
    let (queries, weights) = (source.vector(group * dim), source.vector(group * n_tokens));
    let mut scores = vec![f32::NAN; group * n_tokens];
    codec.dot(&Queries::new(layout, &queries).expect("whole"), packed, &mut scores).expect("right lengths");
    let mut sums = Accumulators::new(layout, group);
    codec.axpy(&weights, packed, &mut sums).expect("right lengths");
    let mut out = vec![1.0; group * dim];
    sums.add_to(&mut out).expect("right length");

    let what = format!("d {dim}, {}, {:?}, {group} queries, {n_tokens} tokens", codec.quantizer(), codec.level());
    let stored = |token: usize| {
        let record = &packed[token * layout.n_bytes()..][..layout.n_bytes()];
        let (scale, zero) = codec.codes(record, &mut vec![0; dim]).expect("one record");
        f64::from(scale.abs()) * (f64::from(layout.bits().max_code()) + f64::from(zero.abs()))
    };
    let eps = f64::from(f32::EPSILON);
    for (query, q) in queries.chunks_exact(dim).enumerate() {
        let magnitude: f64 = q.iter().map(|q| f64::from(q.abs())).sum();
        for token in 0..n_tokens {
            let exact: f64 = q.iter().zip(&values[token * dim..]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let tol = (dim as f64 / 16.0 + 8.0) * eps * stored(token) * magnitude;
            let found = f64::from(scores[query * n_tokens + token]);
            assert!((found - exact).abs() <= tol, "{what}: score {found}, exactly {exact}, tolerance {tol:e}");
        }
        let weights = &weights[query * n_tokens..][..n_tokens];
        // Each of the two sums rounds once a token, and so does the weight; the reference is rounded by `unpack`.
        let terms: f64 = weights.iter().enumerate().map(|(t, w)| f64::from(w.abs()) * stored(t)).sum();
        let tol = (n_tokens as f64 + 8.0) * eps * (terms + 1.0);
        for i in 0..dim {
            let exact: f64 = 1.0
                + weights.iter().enumerate().map(|(t, w)| f64::from(*w) * f64::from(values[t * dim + i])).sum::<f64>();
            let found = f64::from(out[query * dim + i]);
            assert!((found - exact).abs() <= tol, "{what}: sum {found}, exactly {exact}, tolerance {tol:e}");
        }
    }
}

#[test]
fn accumulators_add_over_blocks_and_rescale_one_query() {
    let mut source = Source(7);
    let codec = codec(80, quantizers(Bits::Two, ScaleDtype::Bf16)[1]);
    let packed = packed(&codec, &source.vector(8 * 80));
    let weights = source.vector(2 * 4);
    let (first, second) = packed.split_at(packed.len() / 2);
    let sum = |blocks: &[&[u8]], factor: f32| {
        let mut sums = Accumulators::new(codec.layout(), 2);
        for block in blocks {
            sums.rescale(1, factor);
            codec.axpy(&weights, block, &mut sums).expect("right lengths");
        }
        let mut out = vec![0.0; 2 * 80];
        sums.add_to(&mut out).expect("right length");
        out
    };
    let (a, b) = (sum(&[first], 1.0), sum(&[second], 1.0));
    let both = sum(&[first, second], 0.5);
    for i in 0..160 {
        let expected = if i < 80 { a[i] + b[i] } else { 0.5 * a[i] + b[i] };
        // Halving is exact; the rest is two roundings of numbers below 40.
        assert!((both[i] - expected).abs() <= 1e-5, "{i}: {} against {expected}", both[i]);
    }
    let mut sums = Accumulators::new(codec.layout(), 2);
    codec.axpy(&weights, first, &mut sums).expect("right lengths");
    sums.clear();
    assert_eq!(sums, Accumulators::new(codec.layout(), 2));
}

/// Groups at the edges of f32, in every quantizer: finite numbers, and products without NaN.
#[test]
fn degenerate_groups_stay_finite() {
    let spike = |x: f32| (0..128).map(|i| if i == 77 { x } else { 0.0 }).collect::<Vec<f32>>();
    let least = f32::from_bits(1);
    let groups = [
        vec![0.0; 128],
        vec![-0.0; 128],
        vec![2.5; 128],
        vec![-2.5; 128],
        vec![MAX_MAGNITUDE; 128],
        (0..128).map(|i| if i % 2 == 0 { MAX_MAGNITUDE } else { -MAX_MAGNITUDE }).collect(),
        vec![least; 128],
        (0..128).map(|i| (i as f32 - 64.0) * least).collect(),
        spike(MAX_MAGNITUDE),
        spike(-least),
        (0..128).map(|i| 1.0 + f32::EPSILON * (i % 2) as f32).collect(),
    ];
    for quantizer in all_quantizers().chain(
        [Kind::Quest { alpha: 64.0 }, Kind::Quest { alpha: 1.0 / 64.0 }]
            .map(|kind| Quantizer::new(kind, Bits::Two, ScaleDtype::Bf16).expect("in range")),
    ) {
        for codec in levels(codec(128, quantizer)) {
            for (which, x) in groups.iter().enumerate() {
                let bytes = packed(&codec, x);
                let read = unpacked(&codec, &bytes);
                assert!(read.iter().all(|x| x.is_finite()), "{quantizer}, group {which}: {read:?}");
                let mut scores = [f32::NAN];
                let queries = Queries::new(codec.layout(), &[1e-3; 128]).expect("whole");
                codec.dot(&queries, &bytes, &mut scores).expect("right lengths");
                assert!(scores[0].is_finite(), "{quantizer}, group {which}: {scores:?}");
            }
        }
    }
}

/// A constant group is exact with OSCAR's quantizer, up to the storage of its value.
#[test]
fn constant_groups_are_kept() {
    for value in [0.0, 2.5, -2.5, 0.75, -1e-20] {
        for which in [1, 2] {
            let f32_codec = codec(96, quantizers(Bits::Two, ScaleDtype::F32)[which]);
            assert!(unpacked(&f32_codec, &packed(&f32_codec, &[value; 96])).iter().all(|&x| x == value), "{value}");
            let bf16_codec = codec(96, quantizers(Bits::Two, ScaleDtype::Bf16)[which]);
            let expected = half::bf16::from_f32(value).to_f32();
            assert!(
                unpacked(&bf16_codec, &packed(&bf16_codec, &[value; 96])).iter().all(|&x| x == expected),
                "{value}"
            );
        }
    }
}

#[test]
fn what_cannot_be_quantized_is_refused_with_its_place() {
    let codec = codec(64, quantizers(Bits::Two, ScaleDtype::Bf16)[0]);
    let mut packed = vec![0; 3 * codec.layout().n_bytes()];
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -2.0 * MAX_MAGNITUDE] {
        for codec in levels(codec) {
            let mut x = vec![1.0; 3 * 64];
            x[2 * 64 + 5] = bad;
            let error = codec.pack(&x, &mut packed).expect_err("refused");
            assert!(matches!(error, QuantError::OutOfRange { token: 2, coordinate: 5, .. }), "{error}");
            assert!(error.hint().is_some());
        }
    }
    assert!(codec.pack(&[MAX_MAGNITUDE; 64], &mut packed[..20]).is_ok());
}

#[test]
fn wrong_lengths_are_refused() {
    let codec = codec(64, quantizers(Bits::Two, ScaleDtype::Bf16)[0]);
    let n_bytes = codec.layout().n_bytes();
    let length = |result: Result<(), QuantError>| matches!(result, Err(QuantError::Length { .. }));
    assert!(length(codec.pack(&[0.0; 65], &mut vec![0; n_bytes])));
    assert!(length(codec.pack(&[0.0; 64], &mut vec![0; n_bytes + 1])));
    assert!(length(codec.unpack(&vec![0; n_bytes], &mut [0.0; 128])));
    let queries = Queries::new(codec.layout(), &[0.0; 128]).expect("two");
    assert!(length(codec.dot(&queries, &vec![0; n_bytes], &mut [0.0; 3])));
    assert!(length(codec.dot(&queries, &vec![0; n_bytes - 1], &mut [0.0; 2])));
    let mut sums = Accumulators::new(codec.layout(), 2);
    assert!(length(codec.axpy(&[0.0; 3], &vec![0; n_bytes], &mut sums)));
    assert!(length(sums.add_to(&mut [0.0; 64])));
    assert!(Queries::new(codec.layout(), &[0.0; 63]).is_err());

    let other = Codec::new(64, quantizers(Bits::Four, ScaleDtype::Bf16)[0]).expect("in range");
    let packed = vec![0; other.layout().n_bytes()];
    assert!(matches!(other.dot(&queries, &packed, &mut [0.0; 2]), Err(QuantError::OtherLayout { .. })));
    assert!(matches!(other.axpy(&[0.0; 2], &packed, &mut sums), Err(QuantError::OtherLayout { .. })));
}

#[test]
fn no_queries_are_no_work() {
    let codec = codec(64, quantizers(Bits::Two, ScaleDtype::Bf16)[0]);
    for codec in levels(codec) {
        let packed = packed(&codec, &[1.0; 64]);
        codec.dot(&Queries::new(codec.layout(), &[]).expect("none"), &packed, &mut []).expect("nothing to do");
        let mut sums = Accumulators::new(codec.layout(), 0);
        codec.axpy(&[], &packed, &mut sums).expect("nothing to do");
        sums.add_to(&mut []).expect("nothing to do");
    }
}

#[cfg(feature = "serde")]
#[test]
fn quantizers_are_written_and_read_and_checked() {
    for quantizer in all_quantizers() {
        let text = serde_json::to_string(&quantizer).expect("plain data");
        assert_eq!(serde_json::from_str::<Quantizer>(&text).expect("its own text"), quantizer, "{text}");
    }
    let text = r#"{"kind":{"method":"oscar","kappa":0.92,"quantile":"index"},"bits":2,"scale_dtype":"bf16"}"#;
    let read: Quantizer = serde_json::from_str(text).expect("valid");
    assert_eq!(serde_json::to_string(&read).expect("plain data"), text);
    for (from, to) in [("0.92", "1.5"), ("\"bits\":2", "\"bits\":5"), ("bf16", "f16"), ("oscar", "kivi")] {
        assert!(serde_json::from_str::<Quantizer>(&text.replace(from, to)).is_err(), "{from} → {to}");
    }
}

/// Any bytes are a record: whoever reads a damaged cache gets numbers, not a crash.
#[test]
fn any_bytes_can_be_read() {
    let mut source = Source(8);
    for quantizer in all_quantizers() {
        for codec in levels(codec(112, quantizer)) {
            let bytes: Vec<u8> = (0..5 * codec.layout().n_bytes()).map(|_| source.next() as u8).collect();
            let read = unpacked(&codec, &bytes);
            assert_eq!(read.len(), 5 * 112);
            let mut scores = [0.0; 5];
            codec.dot(&Queries::new(codec.layout(), &[1.0; 112]).expect("one"), &bytes, &mut scores).expect("lengths");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Codes are the equations', evaluated naively, wherever the value is not within rounding of an edge.
    #[test]
    fn codes_are_those_of_the_equations(
        x in proptest::collection::vec(prop_oneof![-4.0f32..4.0, Just(0.0), -1e-3f32..1e-3, -300.0f32..300.0], 1..200),
        which in 0usize..3,
        bits in 0usize..4,
        exponent in -60i32..60,
    ) {
        let x: Vec<f32> = x.into_iter().map(|x| x * 2f32.powi(exponent)).collect();
        let quantizer = quantizers(Bits::ALL[bits], ScaleDtype::F32)[which];
        let codec = codec(x.len(), quantizer);
        let record = packed(&codec, &x);
        let mut codes = vec![0; x.len()];
        codec.codes(&record, &mut codes).expect("one record");
        let (scale, zero) = naive_map(&quantizer, &x);
        let top = f64::from(quantizer.bits().max_code());
        for (&code, &x) in codes.iter().zip(&x) {
            if scale == 0.0 || x == 0.0 {
                continue;
            }
            let real = f64::from(x) / scale + zero;
            let expected = (real + 0.5).floor().clamp(0.0, top);
            let near_an_edge = ((real + 0.5) - (real + 0.5).round()).abs() < 1e-9;
            prop_assert!(f64::from(code) == expected || near_an_edge, "{quantizer}: {x} → {code}, expected {expected}");
        }
    }
}
