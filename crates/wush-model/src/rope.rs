//! Rotary position embedding (Eq. 8) and its scalings, as the reference implementation of the checkpoints does them:
//! rotary pairs (i, i + d_rot/2), f32 inverse frequencies.

use crate::backend::Backend;
use crate::error::Result;

/// The rotary embedding of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Coordinates that turn; the rest pass through. Even, at most d.
    pub rotary_dim: usize,
    /// How the frequencies follow from the sequence length.
    pub frequencies: Frequencies,
    /// Multiplies cos and sin (YaRN's and longrope's attention factor); 1 elsewhere.
    pub attention_factor: f32,
}

/// Inverse frequencies, `rotary_dim / 2` of them.
#[derive(Debug, Clone, PartialEq)]
pub enum Frequencies {
    /// The same at every length (default, linear, llama3, YaRN).
    Fixed(Vec<f32>),
    /// longrope: `short` up to `original_len` tokens, `long` beyond.
    ByLength {
        /// Used while the sequence is at most `original_len` long.
        short: Vec<f32>,
        /// Used beyond.
        long: Vec<f32>,
        /// `original_max_position_embeddings`.
        original_len: usize,
    },
    /// Dynamic NTK: the base grows once the sequence exceeds `original_len`.
    Dynamic {
        /// RoPE base.
        theta: f64,
        /// Scaling factor.
        factor: f64,
        /// `max_position_embeddings` of the configuration.
        original_len: usize,
    },
}

/// Consecutive positions of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub first: usize,
    /// How many.
    pub n_tokens: usize,
    /// Tokens of the sequence that decide its frequencies: all of them.
    pub seq_len: usize,
}

impl Span {
    /// A whole sequence.
    pub fn whole(n_tokens: usize) -> Self {
        Self { first: 0, n_tokens, seq_len: n_tokens }
    }
}

/// cos and sin of some positions, `[tokens, rotary_dim / 2]` each, row-major.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Coordinates that turn.
    pub rotary_dim: usize,
    /// cos(position · ω), times the attention factor.
    pub cos: Vec<f32>,
    /// sin(position · ω), times the attention factor.
    pub sin: Vec<f32>,
}

impl RopeSpec {
    /// Table for a sequence of `n_tokens` that starts at position 0.
    pub fn table(&self, n_tokens: usize) -> RopeTable {
        self.table_of(Span::whole(n_tokens))
    }

    /// Table for some positions of a sequence.
    pub fn table_of(&self, span: Span) -> RopeTable {
        self.table_of_all(&[span])
    }

    /// Table for positions of several sequences, one span after another.
    pub fn table_of_all(&self, spans: &[Span]) -> RopeTable {
        let n = spans.iter().map(|span| span.n_tokens).sum::<usize>() * self.rotary_dim / 2;
        let (mut cos, mut sin) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for span in spans {
            let inv_freq = self.inverse_frequencies(span.seq_len);
            for position in span.first..span.first + span.n_tokens {
                for &omega in inv_freq.iter() {
                    // The angle is an f32 product, as in the reference; only the functions are taken in f64.
                    let angle = f64::from(position as f32 * omega);
                    cos.push(angle.cos() as f32 * self.attention_factor);
                    sin.push(angle.sin() as f32 * self.attention_factor);
                }
            }
        }
        RopeTable { rotary_dim: self.rotary_dim, cos, sin }
    }

    /// Longest sequence that turns its first `n_tokens` as they turn alone; no bound when none. Beyond it, keys that are cached
    /// would have to turn again.
    pub fn same_up_to(&self, n_tokens: usize) -> Option<usize> {
        match &self.frequencies {
            Frequencies::Fixed(_) => None,
            Frequencies::ByLength { original_len, .. } => (n_tokens <= *original_len).then_some(*original_len),
            Frequencies::Dynamic { original_len, .. } => Some(n_tokens.max(*original_len)),
        }
    }

    /// Whether sequences of both lengths turn by the same frequencies.
    fn turn_alike(&self, a: usize, b: usize) -> bool {
        match &self.frequencies {
            Frequencies::Fixed(_) => true,
            Frequencies::ByLength { original_len, .. } => (a <= *original_len) == (b <= *original_len),
            Frequencies::Dynamic { original_len, .. } => a.max(*original_len) == b.max(*original_len),
        }
    }

    /// ω of every rotary pair, for a sequence of `n_tokens`.
    pub(crate) fn inverse_frequencies(&self, n_tokens: usize) -> std::borrow::Cow<'_, [f32]> {
        match &self.frequencies {
            Frequencies::Fixed(inv_freq) => inv_freq.into(),
            Frequencies::ByLength { short, original_len, .. } if n_tokens <= *original_len => short.into(),
            Frequencies::ByLength { long, .. } => long.into(),
            Frequencies::Dynamic { theta, factor, original_len } => {
                let (dim, len) = (self.rotary_dim as f64, *original_len as f64);
                let n = (n_tokens as f64).max(len);
                let base = theta * (factor * n / len - (factor - 1.0)).powf(dim / (dim - 2.0));
                default_inverse_frequencies(base, self.rotary_dim).into()
            }
        }
    }
}

/// Rotary tables on a device, of positions from 0 on, shared by layers and by all sequences that turn by the same frequencies: as long
/// as the longest of them.
pub(crate) struct RopeTables<B: Backend>(Vec<Made<B>>);

struct Made<B: Backend> {
    rope: RopeSpec,
    n_tokens: usize,
    table: B::Rope,
}

impl<B: Backend> Made<B> {
    fn serves(&self, rope: &RopeSpec, n_tokens: usize) -> bool {
        n_tokens <= self.n_tokens && self.rope == *rope && rope.turn_alike(self.n_tokens, n_tokens)
    }
}

impl<B: Backend> RopeTables<B> {
    /// None yet.
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// Lets go of the tables that no sequence of these lengths turns by.
    pub fn keep(&mut self, lengths: &[usize]) {
        self.0.retain(|made| lengths.iter().any(|&n| made.rope.turn_alike(made.n_tokens, n)));
    }

    /// Makes the tables that a layer needs for sequences of these lengths, where they are not there yet.
    ///
    /// # Errors
    /// The device's own.
    pub fn prepare(&mut self, rope: Option<&RopeSpec>, lengths: &[usize], backend: &B) -> Result<()> {
        let Some(rope) = rope else { return Ok(()) };
        // The longest first: theirs serve the others.
        let mut falling = lengths.to_vec();
        falling.sort_unstable_by(|a, b| b.cmp(a));
        falling.dedup();
        for n_tokens in falling {
            if self.of(Some(rope), n_tokens).is_none() {
                self.0.retain(|made| made.rope != *rope || !rope.turn_alike(made.n_tokens, n_tokens));
                self.0.push(Made { rope: rope.clone(), n_tokens, table: backend.rope(rope.table(n_tokens))? });
            }
        }
        Ok(())
    }

    /// A table that was prepared for a layer and a sequence's length, or a longer one; none without RoPE.
    pub fn of(&self, rope: Option<&RopeSpec>, n_tokens: usize) -> Option<&B::Rope> {
        let rope = rope?;
        self.0.iter().find(|made| made.serves(rope, n_tokens)).map(|made| &made.table)
    }
}

/// ω_i = theta^{-2i/d} for i < d/2, rounded where the reference rounds: the exponent 2i/d, the power and its
/// reciprocal are f32 each. (One f64 formula rounded once differs by up to 4e-7 relative when d is no power of two: an
/// angle of 0.01 at position 32768.)
pub fn default_inverse_frequencies(theta: f64, rotary_dim: usize) -> Vec<f32> {
    let base = f64::from(theta as f32);
    let power = |i: usize| base.powf(f64::from((2 * i) as f32 / rotary_dim as f32)) as f32;
    (0..rotary_dim / 2).map(|i| 1.0 / power(i)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;

    fn lengths(tables: &RopeTables<Cpu>) -> Vec<usize> {
        tables.0.iter().map(|made| made.n_tokens).collect()
    }

    #[test]
    fn one_table_serves_all_that_turn_alike() {
        let of = |frequencies| RopeSpec { rotary_dim: 4, frequencies, attention_factor: 1.0 };
        let fixed = of(Frequencies::Fixed(vec![1.0, 0.1]));
        let by_length = of(Frequencies::ByLength { short: vec![1.0, 0.1], long: vec![0.5, 0.05], original_len: 8 });
        let dynamic = of(Frequencies::Dynamic { theta: 1e4, factor: 2.0, original_len: 8 });
        for (rope, expected) in [(fixed, vec![20]), (by_length, vec![20, 8]), (dynamic, vec![20, 12, 8])] {
            let mut tables = RopeTables::<Cpu>::new();
            let all = [3, 20, 8, 12, 5, 20];
            tables.prepare(Some(&rope), &all, &Cpu).expect("made");
            assert_eq!(lengths(&tables), expected);
            for n_tokens in all {
                let (table, own) = (tables.of(Some(&rope), n_tokens).expect("prepared"), rope.table(n_tokens));
                assert_eq!((&table.cos[..own.cos.len()], &table.sin[..own.sin.len()]), (&own.cos[..], &own.sin[..]));
            }
            tables.prepare(Some(&rope), &[24], &Cpu).expect("made");
            tables.keep(&[24]);
            assert_eq!(lengths(&tables), [24]);
        }
    }
}
