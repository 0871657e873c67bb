//! The bytes of a packed token-head: where each code, the scale and the zero point lie. Enters: head dimension, bits,
//! type of the scales. Leaves: sizes, and the place of every coordinate.
//!
//! One record holds one token of one KV head, and records follow each other without a gap:
//!
//! ```text
//! W words of 32 bits        W = ⌈d / P⌉ with P = 16, 16, 8, 4 codes a word at 2, 3, 4, 8 bits
//! (3 bits) W half-words     the third bit of each code; two zero bytes more when W is odd
//! scale, zero point         bf16 or f32
//! ```
//!
//! All are little-endian. Coordinate `i = p·W + w` has its code in word `w`, at bit `p·b` (at 3 bits the code's low two at
//! bit `2p` of the word and its high one at bit `p` of the half-word). Bits of coordinates beyond d are zero. A record is a
//! whole number of words, and describes itself given d, b and the type: `x̂ᵢ = scale · (codeᵢ − zero)`, for every quantizer.
//!
//! Why so: shifting all words right by `p·b` brings W *neighbouring* coordinates into the low bits of W lanes, so packing,
//! unpacking and both products of attention are shifts and masks on whole vectors, on any width of vectors, with no
//! shuffling between lanes. The same holds on a GPU, where lane w of a group owns word w: its loads are 32 bits wide and
//! coalesced, and what it unpacks at step p goes to consecutive addresses. At d = 128 and 2 bits a record is 9 words:
//! 16 tokens are 576 bytes (a multiple of 16, as bulk copies ask), and an odd stride is free of bank conflicts in
//! shared memory. Three bits are two planes and not ten codes a word because that costs exactly 3 bits a coordinate
//! where 32 divides d (10 a word: 3.2), and because the planes' lanes are those of 2 bits.

use crate::{Bits, MAX_HEAD_DIM, QuantError, Result, ScaleDtype};

/// Lanes of the rows in which queries and accumulators are kept.
pub(crate) const LANES: usize = 16;

/// The bytes of one packed token-head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    head_dim: usize,
    bits: Bits,
    scale_dtype: ScaleDtype,
    /// Words of 32 bits, W; derived, but asked for in inner loops.
    n_words: usize,
    code_bytes: usize,
}

impl Layout {
    /// A layout for heads of `head_dim` coordinates.
    ///
    /// # Errors
    /// `HeadDim` unless 1 ≤ `head_dim` ≤ [`MAX_HEAD_DIM`].
    pub fn new(head_dim: usize, bits: Bits, scale_dtype: ScaleDtype) -> Result<Self> {
        if !(1..=MAX_HEAD_DIM).contains(&head_dim) {
            return Err(QuantError::HeadDim { found: head_dim, max: MAX_HEAD_DIM });
        }
        let n_words = head_dim.div_ceil(codes_per_word(bits));
        let high_plane = if bits == Bits::Three { 4 * n_words.div_ceil(2) } else { 0 };
        Ok(Self { head_dim, bits, scale_dtype, n_words, code_bytes: 4 * n_words + high_plane })
    }

    /// Coordinates of a head, d.
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Bits a code.
    pub const fn bits(&self) -> Bits {
        self.bits
    }

    /// How scale and zero point are stored.
    pub const fn scale_dtype(&self) -> ScaleDtype {
        self.scale_dtype
    }

    /// Bytes of one token-head: exactly what [`pack`](crate::Codec::pack) writes. 36 at d = 128, 2 bits, bf16.
    pub const fn n_bytes(&self) -> usize {
        self.code_bytes() + self.scale_bytes()
    }

    /// Bytes of the codes alone, a multiple of 4.
    pub const fn code_bytes(&self) -> usize {
        self.code_bytes
    }

    /// Bytes of scale and zero point.
    pub const fn scale_bytes(&self) -> usize {
        match self.scale_dtype {
            ScaleDtype::Bf16 => 4,
            ScaleDtype::F32 => 8,
        }
    }

    /// Bytes of `n_tokens` token-heads; `None` beyond `usize`.
    pub const fn checked_bytes(&self, n_tokens: usize) -> Option<usize> {
        self.n_bytes().checked_mul(n_tokens)
    }

    /// Words of 32 bits, W.
    pub(crate) const fn n_words(&self) -> usize {
        self.n_words
    }

    /// Scale and zero point of a record, as they are stored.
    #[inline(always)]
    pub(crate) fn scales(&self, record: &[u8]) -> (f32, f32) {
        let word = |at: usize| {
            let bytes = &record[self.code_bytes() + 4 * at..][..4];
            u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        };
        match self.scale_dtype {
            ScaleDtype::Bf16 => (f32::from_bits(word(0) << 16), f32::from_bits(word(0) & 0xffff_0000)),
            ScaleDtype::F32 => (f32::from_bits(word(0)), f32::from_bits(word(1))),
        }
    }

    /// Stores scale and zero point: f64 is rounded to f32, and that to bf16, each to nearest with ties to even.
    #[inline(always)]
    pub(crate) fn put_scales(&self, scale: f64, zero: f64, record: &mut [u8]) {
        let (scale, zero) = (scale as f32, zero as f32);
        let tail = &mut record[self.code_bytes()..];
        match self.scale_dtype {
            ScaleDtype::Bf16 => {
                tail[..2].copy_from_slice(&bf16_bits(scale).to_le_bytes());
                tail[2..4].copy_from_slice(&bf16_bits(zero).to_le_bytes());
            }
            ScaleDtype::F32 => {
                tail[..4].copy_from_slice(&scale.to_le_bytes());
                tail[4..8].copy_from_slice(&zero.to_le_bytes());
            }
        }
    }
}

/// Codes in a word of 32 bits, P (at 3 bits: of their low two).
pub(crate) const fn codes_per_word(bits: Bits) -> usize {
    match bits {
        Bits::Two | Bits::Three => 16,
        Bits::Four => 8,
        Bits::Eight => 4,
    }
}

/// Bits of bf16, rounded to nearest with ties to even. Finite input only: [`crate::MAX_MAGNITUDE`] is far from the end.
#[inline(always)]
fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// The order in which the kernels meet coordinates: rows of [`LANES`] lanes, each row one shift of the words.
///
/// Up to 16 words are taken at a time (a block). A block of few words is repeated until 16 lanes are full, and each repetition
/// starts where the one before ends: row r holds position r of the first, `per_block + r` of the second, and so on. So the
/// next row is the next position in every lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Lanes that hold different words: 4, 8 or 16.
    pub(crate) width: usize,
    /// Rows of a block.
    pub(crate) per_block: usize,
    /// Blocks of 16 words.
    pub(crate) n_blocks: usize,
    head_dim: usize,
    n_words: usize,
}

impl Rows {
    pub(crate) fn new(layout: &Layout) -> Self {
        let n_words = layout.n_words();
        let width = n_words.next_power_of_two().clamp(4, LANES);
        let per_block = codes_per_word(layout.bits) * width / LANES;
        Self { width, per_block, n_blocks: n_words.div_ceil(LANES), head_dim: layout.head_dim, n_words }
    }

    /// Rows of a head.
    pub(crate) const fn n_rows(&self) -> usize {
        self.per_block * self.n_blocks
    }

    /// Visits (row, lane, coordinate) of every coordinate.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(usize, usize, usize)) {
        for block in 0..self.n_blocks {
            for step in 0..self.per_block {
                for repetition in 0..LANES / self.width {
                    let first = (repetition * self.per_block + step) * self.n_words;
                    for word in 0..self.width.min(self.n_words - block * LANES) {
                        let coordinate = first + block * LANES + word;
                        if coordinate < self.head_dim {
                            visit(block * self.per_block + step, repetition * self.width + word, coordinate);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: [usize; 14] = [1, 3, 7, 16, 17, 33, 64, 80, 96, 112, 128, 192, 256, 1000];

    #[test]
    fn sizes_are_those_of_the_format() {
        let bytes = |head_dim, bits, dtype| Layout::new(head_dim, bits, dtype).expect("in range").n_bytes();
        assert_eq!(Bits::ALL.map(|bits| bytes(128, bits, ScaleDtype::Bf16)), [36, 52, 68, 132]);
        assert_eq!(Bits::ALL.map(|bits| bytes(64, bits, ScaleDtype::F32)), [24, 32, 40, 72]);
        assert_eq!(Bits::ALL.map(|bits| bytes(80, bits, ScaleDtype::Bf16)), [24, 36, 44, 84]);
        assert_eq!(Bits::ALL.map(|bits| bytes(1, bits, ScaleDtype::Bf16)), [8, 12, 8, 8]);
    }

    #[test]
    fn every_coordinate_has_one_place_in_the_rows() {
        for head_dim in DIMS {
            for bits in Bits::ALL {
                let rows = Rows::new(&Layout::new(head_dim, bits, ScaleDtype::Bf16).expect("in range"));
                let mut seen = vec![0; head_dim];
                rows.for_each(|_, _, coordinate| seen[coordinate] += 1);
                assert!(seen.iter().all(|&n| n == 1), "d {head_dim}, {bits:?}: {seen:?}");
            }
        }
    }

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for step in 0..200_000u32 {
            let x = f32::from_bits(step.wrapping_mul(21_479));
            if x.abs() <= crate::MAX_MAGNITUDE {
                assert_eq!(bf16_bits(x), half::bf16::from_f32(x).to_bits(), "{x}");
                assert_eq!(bf16_bits(-x), half::bf16::from_f32(-x).to_bits(), "-{x}");
            }
        }
    }

    #[test]
    fn dimensions_out_of_range_are_refused() {
        for head_dim in [0, MAX_HEAD_DIM + 1, usize::MAX] {
            let found = Layout::new(head_dim, Bits::Two, ScaleDtype::Bf16);
            assert_eq!(found, Err(QuantError::HeadDim { found: head_dim, max: MAX_HEAD_DIM }));
        }
    }
}
