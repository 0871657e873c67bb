//! Options that not every transform takes. What a transform would not look at is refused where it is asked for, and in a list of
//! transforms where none of them would.

use wush_transform::TransformKind;

use crate::request::{CenterKeys, SolveSettings};
use crate::{PipelineError, Result, solve};

/// One option of a transform.
struct TransformOption {
    /// As it is typed.
    name: &'static str,
    /// Whether it asks for something.
    is_asked: fn(&SolveSettings) -> bool,
    /// Whether a transform looks at it.
    is_taken: fn(&TransformKind) -> bool,
    /// Leaves it to the preset.
    clear: fn(&mut SolveSettings),
}

/// Every one that is not for all. Without statistics there is nothing to damp, no mean to take and no metric.
const OPTIONS: [TransformOption; 5] = [
    TransformOption {
        name: "--damping",
        is_asked: |settings| settings.damping.is_some(),
        is_taken: |kind| kind.needs_statistics,
        clear: |settings| settings.damping = None,
    },
    TransformOption {
        name: "--exponent",
        is_asked: |settings| settings.exponent.is_some(),
        is_taken: |kind| !kind.is_orthogonal,
        clear: |settings| settings.exponent = None,
    },
    TransformOption {
        name: "--factor",
        is_asked: |settings| settings.factor.is_some(),
        is_taken: |kind| !kind.is_orthogonal,
        clear: |settings| settings.factor = None,
    },
    TransformOption {
        name: "--center-keys",
        is_asked: |settings| settings.center_keys.is_some_and(|choice| choice != CenterKeys::Never),
        is_taken: |kind| kind.needs_statistics,
        clear: |settings| settings.center_keys = None,
    },
    TransformOption {
        name: "--feedback",
        is_asked: |settings| settings.feedback == Some(true),
        is_taken: |kind| kind.needs_statistics,
        clear: |settings| settings.feedback = None,
    },
];

/// Refuses an option that the one transform would not look at.
///
/// # Errors
/// `UnusedOption`.
pub(super) fn check(kind: &TransformKind, settings: &SolveSettings) -> Result<()> {
    match OPTIONS.iter().find(|option| (option.is_asked)(settings) && !(option.is_taken)(kind)) {
        Some(option) => Err(unused(option, kind.name.to_owned())),
        None => Ok(()),
    }
}

/// The settings of each transform of a list, in order, and notes on options that are for some of them.
///
/// # Errors
/// `UnusedOption` for an option that none of them would look at.
pub(super) fn of_list<'a>(
    kinds: &[&'a TransformKind],
    settings: &SolveSettings,
) -> Result<(Vec<SolveSettings>, Vec<String>)> {
    let of_kind = |kind: &&TransformKind| SolveSettings { transform: kind.name.to_owned(), ..settings.clone() };
    let (mut all, mut notes): (Vec<_>, _) = (kinds.iter().map(of_kind).collect(), Vec::new());
    for option in OPTIONS.iter().filter(|option| (option.is_asked)(settings)) {
        let (takers, others): (Vec<&'a TransformKind>, _) = kinds.iter().partition(|kind| (option.is_taken)(kind));
        if takers.is_empty() {
            return Err(unused(option, names(&others)));
        }
        let left_alone = all.iter_mut().zip(kinds).filter(|(_, kind)| !(option.is_taken)(kind));
        left_alone.for_each(|(settings, _)| (option.clear)(settings));
        if !others.is_empty() {
            notes.push(format!("{} is for {}, not for {}", option.name, names(&takers), names(&others)));
        }
    }
    Ok((all, notes))
}

fn unused(option: &TransformOption, transforms: String) -> PipelineError {
    let takers: Vec<&TransformKind> = solve::registry().iter().filter(|kind| (option.is_taken)(kind)).collect();
    PipelineError::UnusedOption { option: option.name, transforms, takers: names(&takers) }
}

fn names(kinds: &[&TransformKind]) -> String {
    kinds.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use wush_transform::find;

    use super::*;
    use crate::request::Preset;

    fn asked(transform: &str) -> SolveSettings {
        SolveSettings {
            exponent: Some(0.3),
            feedback: Some(true),
            ..SolveSettings::of_preset(transform, Preset::Default)
        }
    }

    #[test]
    fn an_option_goes_to_those_that_take_it() {
        let kinds = ["hadamard", "oscar", "wush"].map(|name| find(name).expect("known"));
        let (settings, notes) = of_list(&kinds, &asked("wush")).expect("some take them");
        let told: Vec<_> = settings.iter().map(|s| (s.transform.as_str(), s.exponent, s.feedback)).collect();
        let expected = [("hadamard", None, None), ("oscar", None, Some(true)), ("wush", Some(0.3), Some(true))];
        assert_eq!(told, expected);
        let expected =
            ["--exponent is for wush, not for hadamard, oscar", "--feedback is for oscar, wush, not for hadamard"];
        assert_eq!(notes, expected);
        assert!(settings.iter().zip(kinds).all(|(settings, kind)| check(kind, settings).is_ok()));
    }

    #[test]
    fn what_nobody_takes_is_refused() {
        let kinds = ["identity", "hadamard"].map(|name| find(name).expect("known"));
        let error = of_list(&kinds, &asked("wush")).expect_err("none takes it");
        assert_eq!(error.to_string(), "--exponent: identity, hadamard would not look at it");
        assert_eq!(error.hint().expect("a way on"), "leave it out: it is for wush, wush-a");
        // What a transform has anyway is no request.
        let never = SolveSettings {
            center_keys: Some(CenterKeys::Never),
            feedback: Some(false),
            ..SolveSettings::of_preset("identity", Preset::Paper)
        };
        assert!(check(kinds[0], &never).is_ok());
    }
}
