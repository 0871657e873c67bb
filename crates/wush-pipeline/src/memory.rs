//! How much memory a run will need, estimated before it starts, so that hours are not spent to find out.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;
use wush_model::spec::{LayerSpec, ModelSpec};

use crate::model::Model;

/// Bytes of one statistic.
const F64_BYTES: u64 = 8;
/// Matrices kept a head: the Grams of keys, queries, values and of the output projection.
const GRAMS_PER_HEAD: u64 = 4;
/// The statistics and their copy while they are written.
const STATISTICS_COPIES: u64 = 2;

/// Estimated peak memory in bytes, by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryPlan {
    /// The checkpoint's shards: clean pages of a map, which the system may drop.
    pub weights_map: u64,
    /// The largest layer, widened for the device.
    pub layer: u64,
    /// Activations of the sequences that run together.
    pub activations: u64,
    /// The statistics, and their copy while they are saved.
    pub statistics: u64,
    /// The sum.
    pub total: u64,
}

impl MemoryPlan {
    /// The plan of a run over sequences of at most `seq_len` tokens; none of them run when it is 0.
    pub fn new(model: &Model, seq_len: usize) -> Self {
        let weights_map = model.checkpoint.n_weight_bytes();
        let (layer, activations) = match seq_len {
            0 => (0, 0),
            _ => {
                let memory = Decoder::new(&model.checkpoint, &model.spec, &Cpu).memory(seq_len);
                (memory.layer, memory.activations)
            }
        };
        let statistics = statistics_bytes(&model.spec).saturating_mul(STATISTICS_COPIES);
        let total = [weights_map, layer, activations, statistics].into_iter().fold(0, u64::saturating_add);
        Self { weights_map, layer, activations, statistics, total }
    }
}

fn statistics_bytes(spec: &ModelSpec) -> u64 {
    let layer = |layer: &LayerSpec| {
        let (heads, d) = (layer.attn.n_kv_heads as u64, layer.attn.head_dim as u64);
        heads * (GRAMS_PER_HEAD * d * d + d) * F64_BYTES
    };
    spec.layers.iter().map(layer).sum()
}

/// Bytes in the largest binary unit that leaves at least one: "1.5 GiB".
pub fn human_bytes(n_bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n_bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n_bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_well() {
        assert_eq!(human_bytes(0), "0 B");
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1024), "1.0 KiB");
        assert_eq!(human_bytes(3 << 29), "1.5 GiB");
        assert_eq!(human_bytes(u64::MAX), "16777216.0 TiB");
    }
}
