//! Token-heads as the kernels read them: in whole blocks of 16 words, and so beyond the end of a record. Enters: packed
//! bytes. Leaves: slices that a block can be read from.

use crate::Layout;
use crate::layout::LANES;

/// Packed token-heads, of which the last are copied with zeros behind them.
///
/// What a block holds beyond its record (the scales, the next token) becomes codes of lanes without a coordinate: these
/// meet queries of zero, and sums that nobody reads.
pub(super) struct Tokens<'a> {
    packed: &'a [u8],
    /// Copy of `packed` from `tail_start` on, and zeros.
    tail: Vec<u8>,
    tail_start: usize,
    n_bytes: usize,
    n_tokens: usize,
}

impl<'a> Tokens<'a> {
    /// `packed` is a whole number of records.
    pub(super) fn new(layout: &Layout, packed: &'a [u8]) -> Self {
        let n_bytes = layout.n_bytes();
        let n_tokens = packed.len() / n_bytes;
        let reach = n_bytes + 4 * LANES;
        let n_whole = if packed.len() < reach { 0 } else { (packed.len() - reach) / n_bytes + 1 };
        let tail_start = n_whole.min(n_tokens) * n_bytes;
        let mut tail = vec![0; packed.len() - tail_start + reach];
        tail[..packed.len() - tail_start].copy_from_slice(&packed[tail_start..]);
        Self { packed, tail, tail_start, n_bytes, n_tokens }
    }

    pub(super) fn len(&self) -> usize {
        self.n_tokens
    }

    /// The record of a token, and at least a block's bytes behind it; the last token's beyond the end.
    #[inline(always)]
    pub(super) fn from(&self, token: usize) -> &[u8] {
        let at = token.min(self.n_tokens - 1) * self.n_bytes;
        if at < self.tail_start { &self.packed[at..] } else { &self.tail[at - self.tail_start..] }
    }
}

/// The first 16 elements of N bytes.
#[inline(always)]
pub(super) fn sixteen<const N: usize>(bytes: &[u8]) -> &[[u8; N]; LANES] {
    bytes.as_chunks().0.first_chunk().expect("every token-head has a block's bytes behind it")
}
