//! Error feedback: against the definition in f64, at every vector level, by what it is for, and what is refused.

use wush_quant::{
    Bits, Codec, Feedback, Kind, Level, MAX_MAGNITUDE, Method, QuantError, Quantile, Quantizer, Role, ScaleDtype,
};

const DIMS: [usize; 8] = [1, 2, 5, 17, 64, 80, 112, 128];
/// Around the blocks of 16 token-heads.
const COUNTS: [usize; 6] = [0, 1, 15, 16, 17, 40];

/// A seeded source of numbers: the 64-bit mixer of SplitMix.
struct Source(u64);

impl Source {
    fn normal(&mut self) -> f64 {
        let mut uniform = || {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        };
        (0..4).map(|_| uniform()).sum::<f64>() * 1.73
    }

    fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal() as f32).collect()
    }

    /// A metric `G = B Bᵀ + 0.1 I` with B `[d, d/4]`: errors count mostly in a quarter of the directions.
    fn metric(&mut self, dim: usize) -> Vec<f64> {
        let rank = dim.div_ceil(4);
        let b: Vec<f64> = (0..dim * rank).map(|_| self.normal() / (rank as f64).sqrt()).collect();
        let entry = |i: usize, j: usize| {
            let dot: f64 = (0..rank).map(|k| b[i * rank + k] * b[j * rank + k]).sum();
            if i == j { dot + 0.1 } else { dot }
        };
        (0..dim * dim).map(|at| entry(at / dim, at % dim)).collect()
    }
}

/// L of G = L D Lᵀ, by the textbook recurrence.
fn unit_lower(metric: &[f64], dim: usize) -> Vec<f64> {
    let mut lower = vec![0.0; dim * dim];
    let mut pivots = vec![0.0; dim];
    for j in 0..dim {
        let dot = |lower: &[f64], i: usize| (0..j).map(|k| lower[i * dim + k] * lower[j * dim + k] * pivots[k]).sum();
        let own: f64 = dot(&lower, j);
        let pivot = metric[j * dim + j] - own;
        for i in j + 1..dim {
            let other: f64 = dot(&lower, i);
            lower[i * dim + j] = (metric[i * dim + j] - other) / pivot;
        }
        pivots[j] = pivot;
        lower[j * dim + j] = 1.0;
    }
    lower
}

fn narrow(matrix: &[f64]) -> Vec<f32> {
    matrix.iter().map(|&x| x as f32).collect()
}

fn quantizers() -> impl Iterator<Item = Quantizer> {
    let of = |name: &str, bits, dtype| {
        name.parse::<Method>().expect("a name").quantizer(bits, Role::Key, dtype).expect("in range")
    };
    Bits::ALL.into_iter().flat_map(move |bits| {
        [("quest", ScaleDtype::Bf16), ("oscar", ScaleDtype::Bf16), ("oscar-linear", ScaleDtype::F32)]
            .map(|(name, dtype)| of(name, bits, dtype))
    })
}

fn levels(dim: usize, quantizer: Quantizer) -> impl Iterator<Item = Codec> {
    let codec = Codec::new(dim, quantizer).expect("in range");
    Level::ALL.into_iter().filter_map(move |level| codec.at(level).ok())
}

fn packed(codec: &Codec, x: &[f32], feedback: Option<&Feedback>) -> Vec<u8> {
    let mut packed = vec![0xa5; codec.layout().n_bytes() * (x.len() / codec.layout().head_dim())];
    match feedback {
        Some(feedback) => codec.pack_with_feedback(x, feedback, &mut packed),
        None => codec.pack(x, &mut packed),
    }
    .expect("in range");
    packed
}

/// Scale and zero point in f64, from the equations and a sort.
fn map_of(quantizer: &Quantizer, x: &[f32]) -> (f64, f64) {
    let top = f64::from(quantizer.bits().max_code());
    match quantizer.kind() {
        Kind::Quest { alpha } => {
            let rms = (x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64).sqrt();
            (2.0 * alpha / top * rms, top / 2.0)
        }
        Kind::Oscar { kappa, quantile } => {
            let mut sorted: Vec<f64> = x.iter().map(|&x| f64::from(x.abs())).collect();
            sorted.sort_by(f64::total_cmp);
            let last = sorted.len() - 1;
            let rank = kappa * last as f64;
            let (below, above) = (sorted[rank as usize], sorted[(rank as usize + 1).min(last)]);
            let q = match quantile {
                Quantile::Index => sorted[((kappa * x.len() as f64) as usize).min(last)],
                Quantile::Linear => below + rank.fract() * (above - below),
            };
            let low = x.iter().map(|&x| f64::from(x)).fold(f64::INFINITY, f64::min).max(-q);
            let high = x.iter().map(|&x| f64::from(x)).fold(f64::NEG_INFINITY, f64::max).min(q);
            let scale = (high - low) / top;
            (scale, -low / scale)
        }
    }
}

/// Codes by the definition, coordinate by coordinate.
fn codes_by_definition(quantizer: &Quantizer, x: &[f32], lower: &[f32], stored: (f32, f32)) -> Vec<u8> {
    let dim = x.len();
    let (scale, zero) = map_of(quantizer, x);
    let (mut codes, mut errors) = (vec![0; dim], vec![0.0; dim]);
    for i in (0..dim).rev() {
        let made_up: f64 = (i + 1..dim).rev().map(|j| f64::from(lower[j * dim + i]) * errors[j]).sum();
        let code = ((f64::from(x[i]) + made_up) / scale + zero + 0.5).floor();
        codes[i] = code.clamp(0.0, quantizer.bits().max_code().into()) as u8;
        errors[i] = f64::from(x[i]) - f64::from(stored.0) * (f64::from(codes[i]) - f64::from(stored.1));
    }
    codes
}

#[test]
fn codes_are_the_definitions_at_every_level() {
    let mut source = Source(1);
    for dim in DIMS {
        let lower = narrow(&unit_lower(&source.metric(dim), dim));
        let feedback = Feedback::new(dim, &lower).expect("unit lower triangular");
        for quantizer in quantizers() {
            for n_tokens in COUNTS {
                let x = source.vector(n_tokens * dim);
                let mut all = levels(dim, quantizer).map(|codec| packed(&codec, &x, Some(&feedback)));
                let portable = all.next().expect("portable");
                assert!(all.all(|other| other == portable), "d {dim}, {quantizer}, {n_tokens} tokens");
                let codec = Codec::new(dim, quantizer).expect("in range");
                for (x, record) in x.chunks_exact(dim).zip(portable.chunks_exact(codec.layout().n_bytes())) {
                    let mut codes = vec![0; dim];
                    let stored = codec.codes(record, &mut codes).expect("one record");
                    // A group of one number has one code, whatever the targets.
                    if map_of(&quantizer, x).0 > 0.0 {
                        assert_eq!(codes, codes_by_definition(&quantizer, x, &lower, stored), "d {dim}, {quantizer}");
                    }
                }
            }
        }
    }
}

#[test]
fn without_feedback_the_bytes_are_those_of_pack() {
    let mut source = Source(2);
    for dim in DIMS {
        let unit: Vec<f32> = (0..dim * dim).map(|at| f32::from(u8::from(at % (dim + 1) == 0))).collect();
        let feedback = Feedback::new(dim, &unit).expect("the identity");
        let mut x = source.vector(18 * dim);
        // Groups with a single code among others.
        x[3 * dim..4 * dim].fill(0.0);
        x[7 * dim..8 * dim].fill(-2.5);
        for codec in quantizers().flat_map(|quantizer| levels(dim, quantizer)) {
            assert_eq!(packed(&codec, &x, Some(&feedback)), packed(&codec, &x, None), "d {dim}, {}", codec.quantizer());
        }
    }
}

/// What it is for: the error in the metric, which plain rounding does not know of.
#[test]
fn the_weighted_error_falls() {
    let (dim, n_tokens) = (64, 400);
    let mut source = Source(3);
    let metric = source.metric(dim);
    let feedback = Feedback::new(dim, &narrow(&unit_lower(&metric, dim))).expect("unit lower triangular");
    let x = source.vector(n_tokens * dim);
    let wide = Kind::Quest { alpha: 1.25 * Bits::Two.alpha() };
    let wide = Quantizer::new(wide, Bits::Two, ScaleDtype::Bf16).expect("in range");
    for quantizer in quantizers().chain([wide]) {
        let codec = Codec::new(dim, quantizer).expect("in range");
        let error = |feedback: Option<&Feedback>| {
            let mut read = vec![0.0; x.len()];
            codec.unpack(&packed(&codec, &x, feedback), &mut read).expect("whole records");
            let errors: Vec<f64> = x.iter().zip(&read).map(|(x, y)| f64::from(x - y)).collect();
            errors.chunks_exact(dim).map(|e| weighted(&metric, e)).sum::<f64>()
        };
        let (with, without) = (error(Some(&feedback)), error(None));
        assert!(with < 0.8 * without, "{quantizer}: {with:.3} with feedback, {without:.3} without");
    }
}

/// eᵀ G e.
fn weighted(metric: &[f64], e: &[f64]) -> f64 {
    let rows = metric.chunks_exact(e.len()).map(|row| row.iter().zip(e).map(|(g, e)| g * e).sum::<f64>());
    rows.zip(e).map(|(image, e)| image * e).sum()
}

#[test]
fn huge_and_tiny_groups_stay_finite() {
    let dim = 80;
    let lower: Vec<f32> = (0..dim * dim).map(|at| if at / dim > at % dim { 3.0 } else { 0.0 }).collect();
    let mut lower = lower;
    lower.iter_mut().step_by(dim + 1).for_each(|x| *x = 1.0);
    let feedback = Feedback::new(dim, &lower).expect("unit lower triangular");
    for scale in [MAX_MAGNITUDE, 1.0, 1e-30, f32::from_bits(1)] {
        let x: Vec<f32> = (0..3 * dim).map(|i| if i % 3 == 0 { scale } else { -scale * 0.25 }).collect();
        for codec in quantizers().flat_map(|quantizer| levels(dim, quantizer)) {
            let mut read = vec![f32::NAN; x.len()];
            codec.unpack(&packed(&codec, &x, Some(&feedback)), &mut read).expect("whole records");
            assert!(read.iter().all(|x| x.is_finite()), "{}: {read:?}", codec.quantizer());
        }
    }
}

#[test]
fn what_is_no_factor_is_refused_with_its_place() {
    let unit = [1.0, 0.0, 0.5, 1.0];
    assert_eq!(Feedback::new(2, &unit).expect("unit lower triangular").head_dim(), 2);
    for (at, value) in [(1, 0.1), (2, f32::NAN), (2, f32::INFINITY), (3, 2.0), (0, f32::NAN)] {
        let mut wrong = unit;
        wrong[at] = value;
        let error = Feedback::new(2, &wrong).expect_err("refused");
        assert!(matches!(error, QuantError::NotUnitLower { row, col, .. } if row * 2 + col == at), "{error}");
    }
    assert!(matches!(Feedback::new(2, &unit[..3]), Err(QuantError::Length { .. })));
    assert!(matches!(Feedback::new(0, &[]), Err(QuantError::HeadDim { .. })));
}

#[test]
fn what_cannot_be_packed_is_refused_after_what_can() {
    let feedback = Feedback::new(2, &[1.0, 0.0, 0.5, 1.0]).expect("unit lower triangular");
    let quantizer = quantizers().next().expect("there are some");
    for codec in levels(2, quantizer) {
        let n_bytes = codec.layout().n_bytes();
        let mut x = vec![1.0; 2 * 20];
        x[2 * 18 + 1] = f32::NAN;
        let mut bytes = vec![0; 20 * n_bytes];
        let error = codec.pack_with_feedback(&x, &feedback, &mut bytes).expect_err("refused");
        assert!(matches!(error, QuantError::OutOfRange { token: 18, coordinate: 1, .. }), "{error}");
        assert_eq!(bytes[..18 * n_bytes], packed(&codec, &x[..2 * 18], Some(&feedback)));
        let wrong = codec.pack_with_feedback(&x[..3], &feedback, &mut bytes[..n_bytes]);
        assert!(matches!(wrong, Err(QuantError::Length { .. })));
    }
    let other = Codec::new(4, quantizer).expect("in range");
    let mut bytes = vec![0; other.layout().n_bytes()];
    assert!(matches!(other.pack_with_feedback(&[0.0; 4], &feedback, &mut bytes), Err(QuantError::Length { .. })));
}
