//! Which tokens are kept in full precision and which are quantized when: Algorithm 2, lines 7 to 9. Pure arithmetic on
//! counts; a cache on another device follows the same plan.

use serde::{Deserialize, Serialize};

/// Window sizes of Section 4.4, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Windows {
    /// S_sink: the first tokens, in full precision for ever.
    pub sink: usize,
    /// S_keep: the newest tokens, in full precision.
    pub keep: usize,
    /// S_flush: tokens between both are quantized in multiples of this. At least 1.
    pub flush: usize,
}

impl Windows {
    /// Those of the paper's perplexity study (Section 5.2).
    pub const STUDY: Self = Self { sink: 16, keep: 128, flush: 16 };
    /// Those of its serving runs (Section 5.3).
    pub const SERVING: Self = Self { sink: 64, keep: 256, flush: 8 };

    /// Tokens to quantize now, Algorithm 2 lines 7 to 9, when `len` tokens (S) are held and `n_packed` after the sink are
    /// quantized already.
    ///
    /// With `S_start = S_sink + n_packed` (line 7 for a cache that has reached its sink's end) the range that line 8 adds is
    /// `⌊(S − S_keep − S_start) / S_flush⌋ · S_flush` tokens from there, or none. Before anything is quantized line 8 may
    /// leave S_quant between 0 and S_sink; nothing depends on it, and it is not represented here.
    pub fn n_to_pack(&self, len: usize, n_packed: usize) -> usize {
        let outside = len.saturating_sub(self.keep).saturating_sub(self.sink).saturating_sub(n_packed);
        let flush = self.flush.max(1);
        outside / flush * flush
    }
}

impl Default for Windows {
    fn default() -> Self {
        Self::SERVING
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines 7 and 8 as written, with signed numbers.
    fn as_written(windows: &Windows, chunks: &[usize]) -> Vec<(i64, i64)> {
        let [sink, keep, flush] = [windows.sink, windows.keep, windows.flush].map(|n| n as i64);
        let (mut len, mut quant) = (0, 0);
        let step = |&chunk: &usize| {
            len += chunk as i64;
            let start = std::cmp::max(quant, sink);
            quant = quant.max(start + (len - keep - start).div_euclid(flush) * flush);
            (start, quant)
        };
        chunks.iter().map(step).collect()
    }

    #[test]
    fn ranges_are_those_of_lines_7_and_8_for_every_size() {
        for (sink, keep, flush) in [(0, 0, 1), (0, 5, 3), (4, 0, 2), (16, 128, 16), (64, 256, 8), (3, 7, 50)] {
            let windows = Windows { sink, keep, flush };
            for chunk in [1, 2, 7, 16, 100, 333] {
                let chunks = vec![chunk; 700 / chunk + 1];
                let (mut len, mut n_packed) = (0, 0);
                for (start, quant) in as_written(&windows, &chunks) {
                    len += chunk;
                    let n = windows.n_to_pack(len, n_packed);
                    assert_eq!(start, (sink + n_packed) as i64, "{windows:?}, chunk {chunk}, length {len}");
                    assert_eq!(n as i64, (quant - start).max(0), "{windows:?}, chunk {chunk}, length {len}");
                    n_packed += n;
                }
            }
        }
    }
}
