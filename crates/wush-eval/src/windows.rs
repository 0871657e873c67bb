//! Algorithm 2's windows over a whole sequence: the runtime's arithmetic, chunk after chunk.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_model::attention::Chunk;
use wush_runtime::Windows;

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
    pub const PAPER: Self = {
        let Windows { sink, keep, flush } = Windows::STUDY;
        Self { chunk: 16, sink, keep, flush }
    };

    /// The windows of the runtime's cache.
    pub fn windows(&self) -> Windows {
        Windows { sink: self.sink, keep: self.keep, flush: self.flush }
    }

    /// What each chunk of a sequence of `n_tokens` reads: a chunk sees the cache as the one before it left it, and tokens
    /// are quantized after it (lines 7 and 8), as many as the runtime's [`Windows::n_to_pack`] says.
    pub fn chunks(&self, n_tokens: usize) -> Vec<Chunk> {
        let windows = self.windows();
        let mut n_packed = 0;
        let step = |first: usize| {
            let queries = first..(first + self.chunk).min(n_tokens);
            let quantized = if n_packed > 0 { self.sink..self.sink + n_packed } else { 0..0 };
            n_packed += windows.n_to_pack(queries.end, n_packed);
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
