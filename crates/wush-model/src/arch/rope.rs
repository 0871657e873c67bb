//! RoPE parameters of a configuration → [`RopeSpec`]: which scaling, which inverse frequencies, which attention factor.
//!
//! The old form (`rope_theta`, `rope_scaling` with `type` or `rope_type`) and the new one (`rope_parameters`, flat or
//! by layer type) are both read. Frequencies are computed in f32 with the roundings of transformers 5.24's
//! `modeling_rope_utils`, since an angle is a position times a frequency and magnifies every difference.

use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;

use super::config::ConfigView;
use crate::error::ModelError;
use crate::rope::{Frequencies, RopeSpec, default_inverse_frequencies};

/// Bounds of a RoPE base: at least 1 (a base below turns backwards), and finite in f32.
const THETA: std::ops::RangeInclusive<f64> = 1.000_001..=1e12;
/// Bounds of a scaling factor.
const FACTOR: std::ops::RangeInclusive<f64> = 1.0..=1e6;
/// Bounds of factors and constants that may fall below one.
const POSITIVE: std::ops::RangeInclusive<f64> = 1e-6..=1e6;
/// Longest position that a configuration may claim.
pub const MAX_POSITIONS: usize = 1 << 31;

/// Layer types that `rope_parameters` may be nested under.
const LAYER_TYPES: &[&str] = &["full_attention", "sliding_attention"];

/// A RoPE scaling asked for by the user, on top of a checkpoint without one: `yarn:4`, `linear:2`, `dynamic:2`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeScaling {
    kind: ScalingKind,
    factor: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScalingKind {
    Yarn,
    Linear,
    Dynamic,
}

/// Every kind that can be asked for, with its name.
const SCALING_KINDS: &[(&str, ScalingKind)] =
    &[("yarn", ScalingKind::Yarn), ("linear", ScalingKind::Linear), ("dynamic", ScalingKind::Dynamic)];

impl ScalingKind {
    fn name(self) -> &'static str {
        SCALING_KINDS.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

impl FromStr for RopeScaling {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        let parse = || {
            let (name, factor) = text.split_once(':')?;
            let (_, kind) = *SCALING_KINDS.iter().find(|(known, _)| *known == name)?;
            let factor = factor.parse::<f64>().ok().filter(|factor| FACTOR.contains(factor))?;
            Some(Self { kind, factor })
        };
        parse().ok_or_else(|| ModelError::RopeScaling {
            expected: "yarn:FACTOR, linear:FACTOR or dynamic:FACTOR with a factor of at least 1, such as yarn:4"
                .to_owned(),
            found: text.to_owned(),
        })
    }
}

impl fmt::Display for RopeScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind.name(), self.factor)
    }
}

impl RopeScaling {
    /// Longest position once a model of `max_positions` is scaled.
    pub fn scaled_positions(&self, max_positions: usize) -> usize {
        ((max_positions as f64 * self.factor) as usize).clamp(max_positions, MAX_POSITIONS)
    }
}

/// What a family says about its rotary embeddings, where the configuration is silent.
#[derive(Debug, Clone, Copy)]
pub struct RopeContext<'a> {
    /// Head dimension d.
    pub head_dim: usize,
    /// `max_position_embeddings`.
    pub max_positions: usize,
    /// Layer type whose parameters are wanted, for a configuration that nests them.
    pub layer_type: Option<&'a str>,
    /// Key and default of the base in the old form.
    pub theta: (&'a str, f64),
    /// The family's `original_max_position_embeddings`, which has precedence over the scaling's (Phi-3).
    pub original_positions: Option<usize>,
    /// Whether "su" and "yarn" are old names of longrope (Phi-3).
    pub legacy_longrope: bool,
    /// Whether the old-form `rope_scaling` and the user's scaling apply to this layer type.
    pub scaled: bool,
    /// The user's `--rope-scaling`.
    pub override_scaling: Option<&'a RopeScaling>,
}

/// Parameters of one layer type, from whichever form the configuration has.
struct Params<'a> {
    view: Option<ConfigView<'a>>,
    kind: &'a str,
    theta: f64,
    rotary_dim: usize,
}

/// Reads the rotary embedding of one layer type.
///
/// # Errors
/// `Config` for a value out of bounds or a scaling type that is not known, `RopeScaling` when the user's scaling meets
/// another one.
pub fn rope_spec(config: &ConfigView<'_>, context: &RopeContext<'_>) -> Result<RopeSpec, ModelError> {
    let params = read_params(config, context)?;
    let mut spec = match params.kind {
        "default" => fixed(&params, default_inverse_frequencies(params.theta, params.rotary_dim), 1.0),
        "linear" => linear(&params, params.scaling()?.number("factor", FACTOR)?),
        "dynamic" => dynamic(&params, params.scaling()?.number("factor", FACTOR)?, config, context)?,
        "llama3" => llama3(&params, config, context)?,
        "yarn" => yarn(&params, &Yarn::read(&params, config, context)?),
        "longrope" => longrope(&params, config, context)?,
        _ => return Err(params.unknown_kind(config)),
    };
    if let Some(asked) = context.override_scaling.filter(|_| context.scaled) {
        apply(asked, &params, &mut spec, config, context)?;
    }
    Ok(spec)
}

fn read_params<'a>(config: &ConfigView<'a>, context: &RopeContext<'a>) -> Result<Params<'a>, ModelError> {
    let new_form = new_form(config, context)?;
    let old_form = if context.scaled { old_form(config, context)? } else { None };
    // An explicit old-form scaling wins over the new form, as in the reference.
    let view = old_form.or(new_form);
    let kind = match &view {
        None => "default",
        Some(view) => match view.opt_text("rope_type")? {
            Some(kind) => kind,
            None => view.opt_text("type")?.unwrap_or("default"),
        },
    };
    let kind = if context.legacy_longrope && ["su", "yarn"].contains(&kind) { "longrope" } else { kind };
    let (theta_key, default_theta) = context.theta;
    let theta = first_number(view.as_ref(), config, ("rope_theta", theta_key), THETA)?.unwrap_or(default_theta);
    let keys = ("partial_rotary_factor", "partial_rotary_factor");
    let fraction = first_number(view.as_ref(), config, keys, 0.0..=1.0)?.unwrap_or(1.0);
    // Truncated, as in the reference.
    let rotary_dim = (context.head_dim as f64 * fraction) as usize;
    if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
        return Err(ModelError::Config {
            key: config.name("partial_rotary_factor"),
            expected: format!(
                "a fraction that makes an even number of rotary coordinates of head_dim {}",
                context.head_dim
            ),
            found: format!("{fraction}, that is {rotary_dim} coordinates"),
        });
    }
    Ok(Params { view, kind, theta, rotary_dim })
}

/// `rope_scaling`, unless it is empty. Beside parameters by layer type the reference merges the two; that is refused.
fn old_form<'a>(config: &ConfigView<'a>, context: &RopeContext<'_>) -> Result<Option<ConfigView<'a>>, ModelError> {
    let scaling = config.child("rope_scaling")?.filter(|scaling| !scaling.is_empty());
    match context.layer_type {
        Some(_) if scaling.is_some() && config.get("rope_parameters").is_some() => {
            Err(config.error("rope_scaling", "nothing, beside rope_parameters by layer type"))
        }
        _ => Ok(scaling),
    }
}

/// `rope_parameters`, flat or by layer type as the family wants it; the other form would be read wrongly in silence.
fn new_form<'a>(config: &ConfigView<'a>, context: &RopeContext<'_>) -> Result<Option<ConfigView<'a>>, ModelError> {
    let Some(parameters) = config.child("rope_parameters")? else { return Ok(None) };
    match context.layer_type {
        Some(layer_type) => match parameters.child(layer_type)? {
            Some(nested) => Ok(Some(nested)),
            None => Err(parameters.error(layer_type, "the RoPE parameters of this layer type")),
        },
        None if LAYER_TYPES.iter().any(|layer_type| parameters.is_written(layer_type)) => {
            Err(config.error("rope_parameters", "one set of RoPE parameters for all layers (this family has no other)"))
        }
        None => Ok(Some(parameters)),
    }
}

/// A number of the RoPE parameters, else of the configuration itself.
fn first_number(
    view: Option<&ConfigView<'_>>,
    config: &ConfigView<'_>,
    (inner_key, outer_key): (&str, &str),
    range: std::ops::RangeInclusive<f64>,
) -> Result<Option<f64>, ModelError> {
    if let Some(view) = view
        && let Some(number) = view.opt_number(inner_key, range.clone())?
    {
        return Ok(Some(number));
    }
    config.opt_number(outer_key, range)
}

impl<'a> Params<'a> {
    fn scaling(&self) -> Result<&ConfigView<'a>, ModelError> {
        self.view.as_ref().ok_or_else(|| ModelError::Config {
            key: "rope_scaling".to_owned(),
            expected: "an object".to_owned(),
            found: "nothing (the key is absent)".to_owned(),
        })
    }

    fn unknown_kind(&self, config: &ConfigView<'_>) -> ModelError {
        ModelError::Config {
            key: self.view.as_ref().unwrap_or(config).name("rope_type"),
            expected: "default, linear, dynamic, llama3, yarn or longrope".to_owned(),
            found: format!("{:?}", self.kind),
        }
    }

    /// `original_max_position_embeddings`: the configuration's own, else the family's, else the scaling's, else the
    /// model's longest position. Parameters by layer type have only their own, as in the reference.
    fn original_positions(&self, config: &ConfigView<'_>, context: &RopeContext<'_>) -> Result<usize, ModelError> {
        let key = "original_max_position_embeddings";
        let inner = self.scaling()?.opt_count(key, 2..=MAX_POSITIONS)?;
        let outer = match context.layer_type {
            None => config.opt_count(key, 2..=MAX_POSITIONS)?,
            Some(_) => None,
        };
        Ok(outer.or(context.original_positions).or(inner).unwrap_or(context.max_positions))
    }

    fn pairs(&self) -> usize {
        self.rotary_dim / 2
    }
}

fn fixed(params: &Params<'_>, inv_freq: Vec<f32>, attention_factor: f32) -> RopeSpec {
    RopeSpec { rotary_dim: params.rotary_dim, frequencies: Frequencies::Fixed(inv_freq), attention_factor }
}

fn linear(params: &Params<'_>, factor: f64) -> RopeSpec {
    let mut inv_freq = default_inverse_frequencies(params.theta, params.rotary_dim);
    inv_freq.iter_mut().for_each(|omega| *omega /= factor as f32);
    fixed(params, inv_freq, 1.0)
}

fn dynamic(
    params: &Params<'_>,
    factor: f64,
    config: &ConfigView<'_>,
    context: &RopeContext<'_>,
) -> Result<RopeSpec, ModelError> {
    if params.rotary_dim < 4 {
        // The base grows with the power d / (d - 2).
        return Err(config.error("head_dim", "at least 4 rotary coordinates for dynamic RoPE scaling"));
    }
    let frequencies = Frequencies::Dynamic { theta: params.theta, factor, original_len: context.max_positions };
    Ok(RopeSpec { rotary_dim: params.rotary_dim, frequencies, attention_factor: 1.0 })
}

/// Llama 3.1: long waves divided by the factor, short ones kept, those between interpolated.
fn llama3(params: &Params<'_>, config: &ConfigView<'_>, context: &RopeContext<'_>) -> Result<RopeSpec, ModelError> {
    let view = params.scaling()?;
    let factor = view.number("factor", FACTOR)? as f32;
    let (low, high) = (view.number("low_freq_factor", POSITIVE)?, view.number("high_freq_factor", POSITIVE)?);
    if high <= low {
        return Err(view.error("high_freq_factor", format!("more than low_freq_factor ({low})")));
    }
    let original = params.original_positions(config, context)? as f64;
    let scale = |omega: f32| {
        let wave = (2.0 * PI) as f32 / omega;
        if wave > (original / low) as f32 {
            omega / factor
        } else if wave < (original / high) as f32 {
            omega
        } else {
            let smooth = (original as f32 / wave - low as f32) / (high - low) as f32;
            (1.0 - smooth) * omega / factor + smooth * omega
        }
    };
    let inv_freq = default_inverse_frequencies(params.theta, params.rotary_dim).into_iter().map(scale).collect();
    Ok(fixed(params, inv_freq, 1.0))
}

/// YaRN's constants.
struct Yarn {
    factor: f64,
    original: usize,
    beta_fast: f64,
    beta_slow: f64,
    truncate: bool,
    attention_factor: f64,
}

impl Yarn {
    fn read(params: &Params<'_>, config: &ConfigView<'_>, context: &RopeContext<'_>) -> Result<Self, ModelError> {
        let view = params.scaling()?;
        let original = params.original_positions(config, context)?;
        let factor = match view.opt_number("factor", FACTOR)? {
            Some(factor) => factor,
            None => context.max_positions as f64 / original as f64,
        };
        let constant = |key| view.opt_number(key, 0.0..=1e6).map(|x| x.filter(|x| *x > 0.0));
        let attention_factor = match view.opt_number("attention_factor", POSITIVE)? {
            Some(attention_factor) => attention_factor,
            None => match (constant("mscale")?, constant("mscale_all_dim")?) {
                (Some(mscale), Some(all_dim)) => yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim),
                _ => yarn_mscale(factor, 1.0),
            },
        };
        let beta_fast = constant("beta_fast")?.unwrap_or(32.0);
        let beta_slow = constant("beta_slow")?.unwrap_or(1.0);
        if beta_fast < beta_slow {
            return Err(view.error("beta_fast", format!("at least beta_slow ({beta_slow})")));
        }
        let truncate = view.flag("truncate", true)?;
        Ok(Self { factor, original, beta_fast, beta_slow, truncate, attention_factor })
    }

    /// What `--rope-scaling yarn:FACTOR` means: every constant at its default.
    fn asked(factor: f64, original: usize) -> Self {
        let attention_factor = yarn_mscale(factor, 1.0);
        Self { factor, original, beta_fast: 32.0, beta_slow: 1.0, truncate: true, attention_factor }
    }

    /// First and last pair of the ramp between kept and interpolated frequencies.
    fn ramp_ends(&self, theta: f64, rotary_dim: usize) -> (f64, f64) {
        let dim = rotary_dim as f64;
        let pair = |rotations: f64| (dim * (self.original as f64 / (rotations * 2.0 * PI)).ln()) / (2.0 * theta.ln());
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low.max(0.0), high.min(dim - 1.0))
    }
}

fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

fn yarn(params: &Params<'_>, yarn: &Yarn) -> RopeSpec {
    let (low, mut high) = yarn.ramp_ends(params.theta, params.rotary_dim);
    if low == high {
        high += 0.001;
    }
    let frequency = |(i, kept): (usize, f32)| {
        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let keep = 1.0 - ramp;
        // The reference divides by factor · theta^e, and 1 / kept is theta^e within an f32 rounding.
        let interpolated = 1.0 / (yarn.factor as f32 * power(params, i));
        interpolated * (1.0 - keep) + kept * keep
    };
    let kept = default_inverse_frequencies(params.theta, params.rotary_dim);
    fixed(params, kept.into_iter().enumerate().map(frequency).collect(), yarn.attention_factor as f32)
}

/// theta^{2i/d} in f32.
fn power(params: &Params<'_>, i: usize) -> f32 {
    let exponent = (2 * i) as f32 / params.rotary_dim as f32;
    f64::from(params.theta as f32).powf(f64::from(exponent)) as f32
}

fn longrope(params: &Params<'_>, config: &ConfigView<'_>, context: &RopeContext<'_>) -> Result<RopeSpec, ModelError> {
    let view = params.scaling()?;
    let original_len = params.original_positions(config, context)?;
    let factor = match view.opt_number("factor", FACTOR)? {
        Some(factor) => factor,
        None => context.max_positions as f64 / original_len as f64,
    };
    let attention_factor = match view.opt_number("attention_factor", POSITIVE)? {
        Some(attention_factor) => attention_factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / (original_len as f64).ln()).sqrt(),
    };
    let frequencies = |key| -> Result<Vec<f32>, ModelError> {
        let factors = view.numbers(key, params.pairs(), POSITIVE)?;
        Ok(factors.into_iter().enumerate().map(|(i, x)| 1.0 / (x as f32 * power(params, i))).collect())
    };
    let frequencies =
        Frequencies::ByLength { short: frequencies("short_factor")?, long: frequencies("long_factor")?, original_len };
    Ok(RopeSpec { rotary_dim: params.rotary_dim, frequencies, attention_factor: attention_factor as f32 })
}

/// Applies the user's scaling to a checkpoint without one; the same scaling once more is nothing to do.
fn apply(
    asked: &RopeScaling,
    params: &Params<'_>,
    spec: &mut RopeSpec,
    config: &ConfigView<'_>,
    context: &RopeContext<'_>,
) -> Result<(), ModelError> {
    let scaled = match asked.kind {
        ScalingKind::Yarn => yarn(params, &Yarn::asked(asked.factor, context.max_positions)),
        ScalingKind::Linear => linear(params, asked.factor),
        ScalingKind::Dynamic => dynamic(params, asked.factor, config, context)?,
    };
    if params.kind != "default" && scaled != *spec {
        return Err(ModelError::RopeScaling {
            expected: format!("a checkpoint without RoPE scaling, for --rope-scaling {asked}"),
            found: format!("its own scaling of type {:?} in config.json", params.kind),
        });
    }
    *spec = scaled;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Four f32 roundings: the reference's power is within one ulp of ours, and interpolation rounds a few times more.
    const REL_TOL: f64 = 4.0 * f32::EPSILON as f64;

    fn spec_of(case: &Value) -> RopeSpec {
        let config = ConfigView::root(&case["config"]).expect("an object");
        let is_phi3 = case["config"]["model_type"] == "phi3";
        let context = RopeContext {
            head_dim: config.count("head_dim", 2..=256).expect("in bounds"),
            max_positions: config.count("max_position_embeddings", 1..=MAX_POSITIONS).expect("in bounds"),
            layer_type: None,
            theta: ("rope_theta", 1e4),
            original_positions: None,
            legacy_longrope: is_phi3,
            scaled: true,
            override_scaling: None,
        };
        rope_spec(&config, &context).expect("accepted")
    }

    #[test]
    fn frequencies_are_the_reference_s() {
        let cases: Vec<Value> =
            serde_json::from_str(include_str!("../../../../tests/fixtures/rope/frequencies.json")).expect("JSON");
        assert_eq!(cases.len(), 16);
        for case in &cases {
            let spec = spec_of(case);
            let found = spec.inverse_frequencies(case["seq_len"].as_u64().expect("a length") as usize);
            let expected = case["inv_freq"].as_array().expect("a list");
            assert_eq!(found.len(), expected.len(), "{}", case["name"]);
            for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                let (found, expected) = (f64::from(*found), expected.as_f64().expect("a number"));
                let relative = (found - expected).abs() / expected;
                assert!(relative <= REL_TOL, "{}: pair {i}: {found:e}, not {expected:e}", case["name"]);
            }
            let factor = case["attention_factor"].as_f64().expect("a number");
            assert!((f64::from(spec.attention_factor) - factor).abs() <= REL_TOL * factor, "{}", case["name"]);
        }
    }
}
