//! What a plan says of itself before the work begins, a line each.

use std::time::Duration;

use wush_format::text::human_bytes;
use wush_stats::StatsInfo;

use crate::device::Device;
use crate::human::{counted, human_time};
use crate::memory::MemoryPlan;
use crate::model::Model;
use crate::plan::{CalibrationPlan, VERIFY_TOKENS, VerifyPlan};

/// Floating-point operations a second of a thread: SmolLM2-135M ran at 880 tokens/s on two threads of a Sapphire Rapids at
/// 1024 tokens, 0.25e9 operations a token (docs/benchmarks.md). Narrower vectors and busy machines are slower.
const OPERATIONS_PER_SECOND: f64 = 1.1e11;
/// A calibration that is estimated to take longer than this is told before it starts.
const LONG: Duration = Duration::from_secs(2 * 60);
/// And an evaluation, whose rows come one by one.
const LONG_EVALUATION: Duration = Duration::from_secs(10);
/// What is proposed instead of a long calibration: sequences, and tokens of each.
const SHORTER: (usize, usize) = (16, 2048);

pub(crate) fn describe_model(model: &Model) -> String {
    let Model { id, spec, device, .. } = model;
    let attn = &spec.layers[0].attn;
    format!(
        "model      {id}: {}, {} layers, {} query and {} KV heads of {}, on {}",
        spec.family,
        spec.layers.len(),
        attn.n_heads,
        attn.n_kv_heads,
        attn.head_dim,
        device.describe(),
    )
}

/// Why a run that would use a GPU uses none.
pub(crate) fn describe_device(model: &Model) -> Option<String> {
    match &model.device {
        Device::Cpu { because: Some(because) } => Some(format!("device     no GPU: {because}")),
        _ => None,
    }
}

pub(crate) fn describe_calibration(plan: &CalibrationPlan, shard: Option<&str>) -> String {
    let shard = shard.map(|shard| format!(" (share {shard})")).unwrap_or_default();
    let StatsInfo { source, positions, max_seq_len, .. } = &plan.info;
    let (n, tokens) = (counted(plan.sequences.len() as u64, "sequence"), counted(*positions, "token"));
    format!("calibrate  {source}: {n}{shard}, {tokens}, the longest {max_seq_len}")
}

pub(super) fn describe_memory(memory: &MemoryPlan) -> String {
    let MemoryPlan { program, text, layer, activations, statistics, logits, mapped, anonymous, .. } = *memory;
    let [program, text, layer, activations, statistics, logits, mapped, anonymous] =
        [program, text, layer, activations, statistics, logits, mapped, anonymous].map(human_bytes);
    format!(
        "memory     about {anonymous} at most (program {program}, reading text {text}, one layer {layer}, activations \
         {activations}, statistics {statistics}, logits {logits}; not all at once), and {mapped} of mapped files"
    )
}

pub(super) fn describe_verification(plan: &VerifyPlan) -> String {
    let n = counted(plan.sequences.len() as u64, "sequence");
    format!("verify     {}: {n}, the first {VERIFY_TOKENS} tokens of each", plan.source)
}

/// A warning of a calibration that takes long on a CPU, and what would be shorter.
pub(crate) fn describe_time(model: &Model, plan: &CalibrationPlan) -> Option<String> {
    if matches!(model.device, Device::Cuda(_)) {
        return None;
    }
    let lengths: Vec<usize> = plan.sequences.iter().map(Vec::len).collect();
    let shorter = [SHORTER.1].repeat(SHORTER.0);
    let [whole, short] = [&lengths, &shorter].map(|lengths| estimate(model, lengths));
    time_note(plan.info.positions, whole, plan.is_text.then_some(short))
}

/// How long an evaluation of `n_passes` over these sequences takes, about.
pub(crate) fn describe_evaluation_time(model: &Model, sequences: &[Vec<u32>], n_passes: usize) -> Option<String> {
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let (tokens, n_passes) = (lengths.iter().sum::<usize>() as u64, n_passes as u32);
    let logits = 2.0 * tokens as f64 * (model.spec.vocab_size * model.spec.hidden_size) as f64;
    let pass = estimate(model, &lengths) + time_of(logits);
    evaluation_time_note(counted(tokens, "token"), pass.saturating_mul(n_passes), n_passes)
}

/// How long it takes to measure `n_caches` inside every module of one pass, about. Each takes the attention product three times and the
/// softmax of two, and the output projection three times; codes and sums over pairs cost as much again (seen: 1.7 s for 1024 tokens of
/// SmolLM2-135M on two threads of a Sapphire Rapids).
pub(crate) fn describe_recon_time(model: &Model, sequences: &[Vec<u32>], n_caches: usize) -> Option<String> {
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let tokens = lengths.iter().sum::<usize>() as u64;
    let projections: f64 =
        model.spec.layers.iter().map(|layer| &layer.attn.o.weight).map(|w| (w.rows.len() * w.cols) as f64).sum();
    let products = 3.0 * 2.0 * tokens as f64 * projections + 4.0 * attention_operations(model, &lengths);
    let whole = estimate(model, &lengths) + time_of(2.0 * products * n_caches as f64);
    evaluation_time_note(counted(tokens, "token"), whole, 1)
}

fn evaluation_time_note(tokens: String, whole: Duration, n_passes: u32) -> Option<String> {
    let times = if n_passes == 1 { String::new() } else { format!(", {n_passes} times") };
    (whole > LONG_EVALUATION)
        .then(|| format!("time       about {} on this machine, estimated: {tokens}{times}", human_time(whole)))
}

fn time_note(tokens: u64, whole: Duration, shorter: Option<Duration>) -> Option<String> {
    let proposal = shorter.filter(|short| 2 * *short <= whole).map(|short| {
        let (n, len) = SHORTER;
        format!("; --sequences {n} --seq-len {len} about {}", human_time(short))
    });
    (whole > LONG).then(|| {
        format!(
            "note       {} on a CPU: {} or more, estimated{}",
            counted(tokens, "token"),
            human_time(whole),
            proposal.unwrap_or_default()
        )
    })
}

/// Time of the forward passes over sequences of these lengths: two operations a weight of the layers and token, and attention.
fn estimate(model: &Model, lengths: &[usize]) -> Duration {
    let in_layers = model.checkpoint.tensor_names().filter(|name| name.contains(".layers."));
    let n_weights: f64 = in_layers
        .filter_map(|name| model.checkpoint.locate(name))
        .map(|(_, info)| info.shape.iter().map(|&n| n as f64).product::<f64>())
        .sum();
    let n_tokens: usize = lengths.iter().sum();
    time_of(2.0 * n_weights * n_tokens as f64 + attention_operations(model, lengths))
}

/// Of attention over sequences of these lengths: four a channel of the query heads and pair of positions, of which half are causal.
fn attention_operations(model: &Model, lengths: &[usize]) -> f64 {
    let n_channels: usize = model.spec.layers.iter().map(|layer| layer.attn.n_heads * layer.attn.head_dim).sum();
    lengths.iter().map(|&n| 2.0 * n_channels as f64 * (n as f64).powi(2)).sum()
}

/// Of floating-point operations on all threads.
fn time_of(operations: f64) -> Duration {
    Duration::from_secs_f64(operations / (OPERATIONS_PER_SECOND * rayon::current_num_threads() as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_calibrations_are_told() {
        let [short, minutes, hours] = [90, 5 * 60, 3 * 3600].map(Duration::from_secs);
        assert_eq!(time_note(32_768, short, Some(short)), None);
        let alike = time_note(32_768, minutes, Some(minutes)).expect("long");
        assert_eq!(alike, "note       32768 tokens on a CPU: 5 min 00 s or more, estimated", "nothing is half as long");
        assert_eq!(
            time_note(1_048_576, hours, Some(minutes)).expect("long"),
            "note       1048576 tokens on a CPU: 3 h 00 min or more, estimated; --sequences 16 --seq-len 2048 about 5 min 00 s"
        );
        assert_eq!(evaluation_time_note("20480 tokens".to_owned(), Duration::from_secs(9), 3), None);
        assert_eq!(
            evaluation_time_note("20480 tokens".to_owned(), minutes, 3).expect("long"),
            "time       about 5 min 00 s on this machine, estimated: 20480 tokens, 3 times"
        );
        let ids = time_note(1_048_576, hours, None).expect("long");
        assert!(!ids.contains("--seq-len"), "token ids have their own lengths: {ids}");
    }
}
