//! Algorithm 2's windows over a whole sequence.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_model::cpu::Chunk;

/// How a sequence enters the cache: chunks of this many tokens, and which tokens stay in full precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Protocol {
    /// Tokens a step. At least 1.
    pub chunk: usize,
    /// S_sink: the first tokens, exact for ever.
    pub sink: usize,
    /// S_keep: the newest tokens, exact.
    pub keep: usize,
    /// S_flush: tokens between both are quantized in multiples of this. At least 1.
    pub flush: usize,
}

impl Protocol {
    /// That of Section 5.2.
    pub const PAPER: Self = Self { chunk: 16, sink: 16, keep: 128, flush: 16 };

    /// What each chunk of a sequence of `n_tokens` reads: a chunk sees the cache as the one before it left it, and tokens
    /// are quantized after it (lines 7 and 8).
    pub fn chunks(&self, n_tokens: usize) -> Vec<Chunk> {
        let mut end = self.sink;
        let step = |first: usize| {
            let queries = first..(first + self.chunk).min(n_tokens);
            let quantized = if end > self.sink { self.sink..end } else { 0..0 };
            let old = queries.end.saturating_sub(self.keep).saturating_sub(end);
            end += old / self.flush * self.flush;
            Chunk { queries, quantized }
        };
        (0..n_tokens).step_by(self.chunk).map(step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_windows() {
        let chunks = Protocol::PAPER.chunks(400);
        assert_eq!(chunks.len(), 25);
        assert_eq!(chunks[0], Chunk { queries: 0..16, quantized: 0..0 });
        // After 160 tokens the first 16 behind the sink are 128 old: the next chunk reads them quantized.
        assert_eq!(chunks[9].quantized, 0..0);
        assert_eq!(chunks[10], Chunk { queries: 160..176, quantized: 16..32 });
        assert_eq!(chunks[24], Chunk { queries: 384..400, quantized: 16..256 });
    }
}
