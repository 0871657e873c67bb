//! Packing: documents joined by the end-of-text id and cut into sequences of equal length without overlap, the BOS (if
//! any) at the start of each and within its length. Enters: ids of documents, in order. Leaves: full sequences; what
//! does not fill the last one is dropped. Knows nothing of files.

use crate::{DataError, Result};

/// How calibration data becomes sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackOptions {
    /// Tokens in a sequence, its BOS among them; for token-id lists the most tokens that one may have.
    pub seq_len: usize,
    /// Number of sequences. `None`: all that there are, and at least one.
    pub sequences: Option<usize>,
    /// Column (parquet) or key (`.jsonl`) that holds the text.
    pub text_field: String,
    /// What the tokenizer puts in front of a text ([`wush_checkpoint::tokenizer::TextTokenizer::bos`]).
    pub bos: Option<u32>,
    /// The model's end-of-text id, put between documents; without one they are joined as they are.
    pub eos: Option<u32>,
    /// Number of ids that the model has; every id must be below.
    pub vocab_size: usize,
}

impl PackOptions {
    /// Refuses lengths and numbers that stand for nothing.
    pub(crate) fn check(&self) -> Result<()> {
        if self.sequences == Some(0) {
            return Err(DataError::ZeroSequences);
        }
        if self.seq_len <= usize::from(self.bos.is_some()) {
            return Err(DataError::SeqLen { seq_len: self.seq_len, with_bos: self.bos.is_some() });
        }
        Ok(())
    }
}

/// Calibration data, ready for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Token ids, one sequence each.
    pub sequences: Vec<Vec<u32>>,
    /// Where they came from, for people: a file's or folder's name without the directories above it, or
    /// `hf:org/name@commit[:glob]`.
    pub source: String,
    /// Most text that was tokenized at once: what reading it took of memory. 0 for token-id lists.
    pub text: TextSize,
}

/// How much text there was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextSize {
    /// Its length.
    pub n_bytes: usize,
    /// Tokens that it became.
    pub n_tokens: usize,
}

impl TextSize {
    /// The larger of each.
    pub(crate) fn max(self, other: Self) -> Self {
        Self { n_bytes: self.n_bytes.max(other.n_bytes), n_tokens: self.n_tokens.max(other.n_tokens) }
    }
}

/// Cuts a stream of documents into sequences.
pub(crate) struct Packer<'a> {
    options: &'a PackOptions,
    sequences: Vec<Vec<u32>>,
    current: Vec<u32>,
    n_documents: usize,
    n_tokens: usize,
    /// [`Packed::text`] so far.
    pub(crate) text: TextSize,
}

impl<'a> Packer<'a> {
    /// `options` have passed [`PackOptions::check`].
    pub(crate) fn new(options: &'a PackOptions) -> Self {
        Self {
            options,
            sequences: Vec::new(),
            current: Vec::new(),
            n_documents: 0,
            n_tokens: 0,
            text: TextSize::default(),
        }
    }

    /// Takes in a document, or the continuation of the last one when not `is_new`. What is beyond the last sequence
    /// wanted is not looked at.
    pub(crate) fn push(&mut self, ids: &[u32], is_new: bool) {
        if is_new && self.n_documents > 0 {
            self.push_ids(self.options.eos.as_slice());
        }
        self.n_documents += usize::from(is_new);
        self.push_ids(ids);
    }

    fn push_ids(&mut self, ids: &[u32]) {
        for &id in ids {
            if self.is_full() {
                return;
            }
            if self.current.is_empty() {
                self.current.extend(self.options.bos);
            }
            self.current.push(id);
            self.n_tokens += 1;
            if self.current.len() == self.options.seq_len {
                self.sequences.push(std::mem::take(&mut self.current));
            }
        }
    }

    /// All sequences wanted are there.
    pub(crate) fn is_full(&self) -> bool {
        self.options.sequences.is_some_and(|wanted| self.sequences.len() >= wanted)
    }

    /// Documents taken in so far.
    pub(crate) fn n_documents(&self) -> usize {
        self.n_documents
    }

    /// Tokens in the sequences so far, an unfinished one and BOS included.
    pub(crate) fn n_packed(&self) -> usize {
        self.sequences.len() * self.options.seq_len + self.current.len()
    }

    /// Tokens that are still to come; none where all are wanted.
    pub(crate) fn n_missing(&self) -> Option<usize> {
        let n_wanted = self.options.sequences?.saturating_mul(self.options.seq_len);
        Some(n_wanted.saturating_sub(self.n_packed()))
    }

    /// The sequences, or what to do about too few.
    pub(crate) fn finish(self, source_name: &str) -> Result<Vec<Vec<u32>>> {
        let wanted = self.options.sequences.unwrap_or(1);
        if self.sequences.len() >= wanted {
            return Ok(self.sequences);
        }
        Err(DataError::TooLittle {
            source_name: source_name.to_owned(),
            found: self.sequences.len(),
            wanted,
            of_length: Some(self.options.seq_len),
            n_tokens: Some(self.n_tokens),
        })
    }
}

/// Refuses ids that the model does not have, and empty sequences.
pub(crate) fn check_ids(sequences: &[Vec<u32>], vocab_size: usize, source_name: &str) -> Result<()> {
    for (sequence, ids) in sequences.iter().enumerate() {
        let source_name = || source_name.to_owned();
        if ids.is_empty() {
            return Err(DataError::EmptySequence { source_name: source_name(), sequence });
        }
        let outside = |&id: &u32| usize::try_from(id).map_or(true, |id| id >= vocab_size);
        if let Some(position) = ids.iter().position(outside) {
            let id = ids[position];
            return Err(DataError::TokenId { source_name: source_name(), sequence, position, id, vocab_size });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::TextOptions;

    fn options(seq_len: usize, sequences: usize, bos: Option<u32>, eos: Option<u32>) -> PackOptions {
        PackOptions { seq_len, sequences: Some(sequences), text_field: "text".to_owned(), bos, eos, vocab_size: 1000 }
    }

    fn pack(documents: &[Vec<u32>], options: &PackOptions) -> Result<Vec<Vec<u32>>> {
        options.check()?;
        let mut packer = Packer::new(options);
        for document in documents {
            packer.push(document, true);
        }
        packer.finish("test")
    }

    #[test]
    fn documents_are_joined_and_cut() {
        let documents = [vec![1, 2, 3], vec![4], vec![5, 6, 7]];
        let found = pack(&documents, &options(4, 2, None, Some(0))).expect("enough");
        assert_eq!(found, [[1, 2, 3, 0], [4, 0, 5, 6]]);
    }

    #[test]
    fn bos_counts_within_the_length() {
        let found = pack(&[vec![1, 2, 3], vec![4]], &options(3, 2, Some(9), Some(0))).expect("enough");
        assert_eq!(found, [[9, 1, 2], [9, 3, 0]]);
    }

    #[test]
    fn without_eos_documents_touch() {
        assert_eq!(pack(&[vec![1], vec![2]], &options(2, 1, None, None)).expect("enough"), [[1, 2]]);
    }

    #[test]
    fn a_continued_document_gets_no_separator() {
        let options = options(4, 1, None, Some(0));
        let mut packer = Packer::new(&options);
        packer.push(&[1], true);
        packer.push(&[2, 3], false);
        packer.push(&[4], true);
        assert_eq!(packer.finish("test").expect("enough"), [[1, 2, 3, 0]]);
    }

    #[test]
    fn too_little_text_says_how_much_there_was() {
        let error = pack(&[vec![1; 10]], &options(4, 3, None, None)).expect_err("two sequences only");
        assert_eq!(error.to_string(), "test: 3 sequences of 4 tokens wanted, found 2 (10 tokens)");
        assert_eq!(
            error.hint(&TextOptions::CALIBRATION).as_deref(),
            Some("ask for --sequences 2, a smaller --seq-len, or pass more data")
        );
        let error = pack(&[], &options(4, 3, None, None)).expect_err("nothing");
        assert_eq!(error.hint(&TextOptions::CALIBRATION).as_deref(), Some("pass more text, or a smaller --seq-len"));
    }

    #[test]
    fn all_there_is_is_at_least_one_sequence() {
        let all = PackOptions { sequences: None, ..options(4, 1, None, None) };
        assert_eq!(pack(&[vec![1; 10]], &all).expect("two whole ones").len(), 2);
        let error = pack(&[vec![1; 3]], &all).expect_err("none");
        assert_eq!(error.to_string(), "test: 1 sequence of 4 tokens wanted, found 0 (3 tokens)");
    }

    #[test]
    fn senseless_options_are_refused() {
        assert!(matches!(options(0, 1, None, None).check(), Err(DataError::SeqLen { with_bos: false, .. })));
        assert!(matches!(options(1, 1, Some(2), None).check(), Err(DataError::SeqLen { with_bos: true, .. })));
        assert!(matches!(options(1, 0, None, None).check(), Err(DataError::ZeroSequences)));
        assert!(options(1, 1, None, None).check().is_ok());
    }

    #[test]
    fn ids_outside_the_vocabulary_are_located() {
        let error = check_ids(&[vec![1], vec![5, 10]], 10, "ids.json").expect_err("10 is outside");
        let expected = "ids.json: sequence 1, position 1: token id 10 is outside the vocabulary of 10";
        assert_eq!(error.to_string(), expected);
        let error = check_ids(&[vec![1], vec![]], 10, "ids.json").expect_err("empty");
        assert!(matches!(error, DataError::EmptySequence { sequence: 1, .. }));
        assert!(check_ids(&[vec![9]], 10, "ids.json").is_ok());
    }

    proptest! {
        /// Against the rule read literally: join everything, cut everything, take the first N.
        #[test]
        fn packing_is_join_cut_take(
            documents in prop::collection::vec(prop::collection::vec(1_u32..1000, 1..20), 0..12),
            seq_len in 2_usize..9,
            sequences in 1_usize..8,
            bos in prop::option::of(Just(2_u32)),
            eos in prop::option::of(Just(0_u32)),
        ) {
            let joint: Vec<u32> = match eos {
                Some(eos) => documents.join(&eos),
                None => documents.concat(),
            };
            let body = seq_len - usize::from(bos.is_some());
            let all: Vec<Vec<u32>> =
                joint.chunks_exact(body).map(|ids| bos.into_iter().chain(ids.iter().copied()).collect()).collect();
            match pack(&documents, &options(seq_len, sequences, bos, eos)) {
                Ok(found) => prop_assert_eq!(&found, &all[..sequences]),
                Err(DataError::TooLittle { found, wanted, n_tokens, .. }) => {
                    prop_assert!(all.len() < sequences);
                    prop_assert_eq!((found, wanted, n_tokens), (all.len(), sequences, Some(joint.len())));
                }
                Err(error) => prop_assert!(false, "{}", error),
            }
        }

        /// How a document is split into pieces does not show.
        #[test]
        fn pieces_do_not_show(ids in prop::collection::vec(1_u32..1000, 8..60), cut in 0_usize..60) {
            let options = options(4, 2, Some(2), Some(0));
            let (left, right) = ids.split_at(cut.min(ids.len()));
            let mut packer = Packer::new(&options);
            packer.push(left, true);
            packer.push(right, false);
            prop_assert_eq!(packer.finish("test")?, pack(std::slice::from_ref(&ids), &options)?);
        }
    }
}
