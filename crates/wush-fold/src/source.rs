//! Whether a checkpoint can be folded at all: what needs no transforms is found before they are made, which may take hours.
//!
//! Enters: a checkpoint and its spec. Leaves: nothing, or the reason. Reads the headers, and of the weights those that a fold
//! changes.

use rayon::prelude::*;
use wush_checkpoint::Checkpoint;
use wush_model::spec::ModelSpec;

use crate::fold::FoldDtype;
use crate::number::Element;
use crate::plan::plan_tensors;
use crate::write::check_layout;
use crate::{FoldError, Result};

/// Elements that are widened at once.
const BLOCK: usize = 1 << 14;

/// Checks everything that [`crate::fold()`] would find wrong with the checkpoint itself, whatever the transforms: shapes, dtypes,
/// shared tensors, headers and an index that cannot follow a change of dtype, weights that are not finite.
///
/// # Errors
/// `WrongTensor`, `WrongDtype`, `SharedTensor`, `Header`, `Index`, `NonFiniteWeight`; `Checkpoint`, `Format`.
pub fn check_source(checkpoint: &Checkpoint, spec: &ModelSpec, dtype: FoldDtype) -> Result<()> {
    let tensors = plan_tensors(checkpoint, spec, dtype.into())?;
    check_layout(checkpoint, &tensors)?;
    let check = |(name, element): (&String, Element)| {
        let checked = check_finite(name, element, checkpoint.tensor(name)?.bytes);
        checkpoint.release(name);
        checked
    };
    let sources: Vec<_> = tensors.iter().map(|(name, plan)| (name, plan.source)).collect();
    // All are looked at, so that which one is named does not depend on the threads.
    let checked: Vec<Result<()>> = sources.into_par_iter().map(check).collect();
    checked.into_iter().collect()
}

/// Finds the first element that is NaN or infinite.
pub(crate) fn check_finite(tensor: &str, element: Element, bytes: &[u8]) -> Result<()> {
    let mut values = vec![0.0; BLOCK];
    for (block, bytes) in bytes.chunks(BLOCK * element.n_bytes()).enumerate() {
        let values = &mut values[..bytes.len() / element.n_bytes()];
        element.widen(bytes, values);
        if let Some(at) = values.iter().position(|x| !x.is_finite()) {
            let (tensor, index, value) = (tensor.to_owned(), block * BLOCK + at, values[at]);
            return Err(FoldError::NonFiniteWeight { tensor, index, value });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_element_that_is_not_finite_is_named() {
        let mut bytes = vec![0; 2 * (BLOCK + 9)];
        check_finite("w", Element::Bf16, &bytes).expect("zeros");
        bytes[2 * (BLOCK + 3)..][..2].copy_from_slice(&0x7f80_u16.to_le_bytes());
        let error = check_finite("w", Element::Bf16, &bytes).expect_err("infinite");
        assert_eq!(error.to_string(), format!("tensor w: element {} is inf, expected a finite number", BLOCK + 3));
    }
}
