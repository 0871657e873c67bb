//! What a plan says of itself before the work begins, a line each.

use wush_stats::StatsInfo;

use crate::human::{counted, human_bytes};
use crate::memory::MemoryPlan;
use crate::model::Model;
use crate::plan::CalibrationPlan;

pub(super) fn describe_model(model: &Model) -> String {
    let Model { id, spec, device, .. } = model;
    let attn = &spec.layers[0].attn;
    format!(
        "model      {id}: {}, {} layers, {} query and {} KV heads of {}, on {}",
        spec.family,
        spec.layers.len(),
        attn.n_heads,
        attn.n_kv_heads,
        attn.head_dim,
        device.name(),
    )
}

pub(super) fn describe_calibration(plan: &CalibrationPlan, shard: Option<&str>) -> String {
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
