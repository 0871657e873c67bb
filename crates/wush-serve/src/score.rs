//! Log probabilities of tokens. Enters: a row of logits. Leaves: a token's, and those of the most likely ones.

use wush_model::backend::log_sum_exp;

/// What the model says of a token, nats.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scored {
    /// log p of the token.
    pub(crate) logprob: f64,
    /// The most likely tokens and their log p, most likely first; of equals the lower id.
    pub(crate) top: Vec<(u32, f64)>,
}

/// `id`'s and the `n_top` largest log probabilities of `logits`, `[vocab]`, computed in f64.
pub(crate) fn score(logits: &[f32], id: u32, n_top: usize) -> Scored {
    let norm = log_sum_exp(logits);
    let of = |logit: f32| f64::from(logit) - norm;
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(n_top + 1);
    for (id, &logit) in (0..u32::MAX).zip(logits) {
        if top.len() == n_top && top.last().is_none_or(|&(_, least)| logit <= least) {
            continue;
        }
        let at = top.partition_point(|&(_, larger)| larger >= logit);
        top.insert(at, (id, logit));
        top.truncate(n_top);
    }
    Scored { logprob: of(logits[id as usize]), top: top.into_iter().map(|(id, logit)| (id, of(logit))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_come_first_and_the_lower_id_of_equals() {
        let logits = [0.0, 2.0, -1.0, 2.0, 1.0];
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        for n_top in 0..=6 {
            let found = score(&logits, 2, n_top);
            let ids: Vec<u32> = found.top.iter().map(|&(id, _)| id).collect();
            assert_eq!(ids, [1, 3, 4, 0, 2][..n_top.min(5)]);
            assert!((found.logprob - (-1.0 - sum.ln())).abs() <= 1e-12, "{found:?}");
            assert!(found.top.first().is_none_or(|&(_, p)| (p - (2.0 - sum.ln())).abs() <= 1e-12), "{found:?}");
        }
    }
}
