//! The fold's own error, head by head: ‖W_O'W_V' − W_O W_V‖_F over ‖W_O W_V‖_F after rounding.
//!
//! Nothing of size hidden × hidden is formed, and nothing cancels. With Y_V = T W_V and Y_O = W_O T^{-1} the f64 products
//! and D_V, D_O their rounding errors (stored − exact, known to full precision),
//!
//! `W_O'W_V' − W_O W_V = (Y_O + D_O)(Y_V + D_V) − Y_O Y_V = [Y_O, D_O] · [D_V; Y_V + D_V]`,
//!
//! a product of two thin factors, whose squared Frobenius norm is a trace of 2d × 2d Gram matrices: ‖AB‖_F² =
//! tr(AᵀA · BBᵀ). Subtracting the two hidden × hidden products, or the traces of their Gram matrices, would lose all
//! digits once the error is near √eps; here every Gram matrix is of the size of the error itself, and the result has a
//! relative error of about d·eps. What the f64 inverse misses, `W_O (I − T^{-1}T) W_V`, is reported apart.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::block::Grams;
use crate::dense::{product, trace_product, view, view_mut};
use crate::plan::{Edit, FoldPlan, HeadPlan, Role};

/// The error of one KV head's fold, over all query heads that read it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadError {
    /// Global layer id.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// ‖W_O'W_V' − W_O W_V‖_F / ‖W_O W_V‖_F, the query heads of the group stacked; 0 when both products vanish.
    pub rel_error: f64,
    /// ‖W_O'b_V' − W_O b_V‖ / ‖W_O b_V‖; none without a value bias.
    pub bias_rel_error: Option<f64>,
    /// ‖W_O (I − T^{-1}T) W_V‖_F / ‖W_O W_V‖_F: what the f64 inverse itself misses, before any rounding.
    pub inverse_error: f64,
    /// 1-norm condition number of T.
    pub condition: f64,
}

/// What folding did, head by head, in order of layer and head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FoldReport {
    /// One entry a KV head.
    pub heads: Vec<HeadError>,
    /// Largest relative error over all heads.
    pub max_rel_error: f64,
    /// The layer where it is largest.
    pub worst_layer: usize,
    /// Number of tensors that changed.
    pub n_tensors: usize,
}

/// Gram matrices gathered of the heads that are not complete yet.
pub(crate) struct Collector<'a> {
    plan: &'a FoldPlan,
    open: BTreeMap<usize, Open>,
    done: BTreeMap<usize, HeadError>,
}

struct Open {
    value: Option<Grams>,
    bias: Option<Grams>,
    output: Option<Grams>,
    n_edits: usize,
}

impl<'a> Collector<'a> {
    pub(crate) fn new(plan: &'a FoldPlan) -> Self {
        Self { plan, open: BTreeMap::new(), done: BTreeMap::new() }
    }

    /// Takes in one edit's Gram matrices; a head whose edits are all there is reduced to its numbers at once.
    pub(crate) fn add(&mut self, edit: &Edit, grams: Grams) {
        let head = &self.plan.heads[edit.head];
        let open = self.open.entry(edit.head).or_insert(Open { value: None, bias: None, output: None, n_edits: 0 });
        open.n_edits += 1;
        let slot = match edit.role {
            Role::Value => &mut open.value,
            Role::ValueBias => &mut open.bias,
            Role::Output => &mut open.output,
        };
        match slot {
            Some(sum) => sum.add(&grams),
            None => *slot = Some(grams),
        }
        if open.n_edits == head.n_edits
            && let Some(Open { value: Some(value), bias, output: Some(output), .. }) = self.open.remove(&edit.head)
        {
            self.done.insert(edit.head, reduce(head, &value, bias.as_ref(), &output));
        }
    }

    pub(crate) fn finish(self) -> FoldReport {
        let heads: Vec<HeadError> = self.done.into_values().collect();
        let worst = heads.iter().max_by(|a, b| a.rel_error.total_cmp(&b.rel_error).then(b.layer.cmp(&a.layer)));
        let (max_rel_error, worst_layer) = worst.map_or((0.0, 0), |head| (head.rel_error, head.layer));
        FoldReport { max_rel_error, worst_layer, n_tensors: self.plan.tensors.len(), heads }
    }
}

fn reduce(head: &HeadPlan, value: &Grams, bias: Option<&Grams>, output: &Grams) -> HeadError {
    let norm = trace_product(&output.yy, &value.yy);
    HeadError {
        layer: head.layer,
        head: head.head,
        rel_error: ratio(squared_error(head.dim, output, value), norm),
        bias_rel_error: bias
            .map(|bias| ratio(squared_error(head.dim, output, bias), trace_product(&output.yy, &bias.yy))),
        inverse_error: ratio(squared_residual(head, output, value), norm),
        condition: head.condition,
    }
}

/// ‖[Y_O, D_O] · [D_V; Y_V + D_V]‖_F² from the Gram matrices. The output side's are of its transposed blocks, so that
/// `output.yy` is Y_OᵀY_O and `output.yd` is Y_OᵀD_O.
fn squared_error(dim: usize, output: &Grams, value: &Grams) -> f64 {
    let mut rounded = vec![0.0; dim * dim];
    let mut cross = 0.0;
    for i in 0..dim {
        for j in 0..dim {
            let (ij, ji) = (i * dim + j, j * dim + i);
            // (Y + D)(Y + D)ᵀ, and tr(Y_OᵀD_O · (Y_V + D_V)D_Vᵀ): element (i, j) of the one with (j, i) of the other.
            rounded[ij] = value.yy[ij] + value.yd[ij] + value.yd[ji] + value.dd[ij];
            cross += output.yd[ij] * (value.yd[ji] + value.dd[ji]);
        }
    }
    trace_product(&output.yy, &value.dd) + 2.0 * cross + trace_product(&output.dd, &rounded)
}

/// What the f64 inverse misses, squared: ‖Y_O K Y_V‖_F² with K = I − M_V·M_O, the two matrices that the head is
/// multiplied by (T and T^{-1} when folding, the reverse when unfolding). To first order in K that is
/// ‖W_O (I − T^{-1}T) W_V‖_F², since W_O = Y_O T and W_V = T^{-1} Y_V.
fn squared_residual(head: &HeadPlan, output: &Grams, value: &Grams) -> f64 {
    let dim = head.dim;
    let mut missing = vec![0.0; dim * dim];
    product(view_mut(&mut missing, dim, dim), view(&head.value, dim, dim), view(&head.output, dim, dim).transpose());
    missing.iter_mut().for_each(|x| *x = -*x);
    missing.iter_mut().step_by(dim + 1).for_each(|x| *x += 1.0);
    let (mut left, mut right) = (vec![0.0; dim * dim], vec![0.0; dim * dim]);
    product(view_mut(&mut left, dim, dim), view(&output.yy, dim, dim), view(&missing, dim, dim));
    product(view_mut(&mut right, dim, dim), view(&missing, dim, dim), view(&value.yy, dim, dim));
    // tr(Y_OᵀY_O K Y_VY_Vᵀ Kᵀ) is the sum of the elementwise products of Y_OᵀY_O K and K Y_VY_Vᵀ.
    trace_product(&left, &right)
}

/// √(part / whole): 0 when there is no error, infinite when only the whole vanishes. A rounding residue below zero is 0.
fn ratio(squared_part: f64, squared_whole: f64) -> f64 {
    if squared_part <= 0.0 { 0.0 } else { (squared_part / squared_whole).sqrt() }
}
