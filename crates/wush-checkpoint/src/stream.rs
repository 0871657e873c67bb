//! Token ids to text while they come, one at a time.
//!
//! Enters: the ids of a text, in order. Leaves: the text in whole characters, as soon as each is known: a character's bytes may
//! lie in several tokens. Special tokens give no text. Not the tokenizers crate's `DecodeStream`: that fails where a decoder
//! rewrites text that is out, and keeps an incomplete end to itself.

use crate::Result;
use crate::tokenizer::TextTokenizer;

/// What a decoder gives for bytes that are no character, or not yet one.
const REPLACEMENT: char = '\u{fffd}';
/// Ids before the first that it looks at: some decoders drop a space at the start, so nothing may start with new text.
const CONTEXT: usize = 4;

/// The text of a growing list of ids.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    /// Where the decoder starts: a few ids before those whose text is not out.
    ids: Vec<u32>,
    /// Ids of these whose text is out.
    n_out: usize,
}

impl<'a> TextStream<'a> {
    /// Text that follows `before`, whose own text is not given.
    pub fn after(tokenizer: &'a TextTokenizer, before: &[u32]) -> Self {
        let ids = before[before.len().saturating_sub(CONTEXT)..].to_vec();
        Self { tokenizer, n_out: ids.len(), ids }
    }

    /// The text that is known since the last call: empty while a character is incomplete.
    ///
    /// # Errors
    /// `Tokenizer` when the decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let (before, all) = self.decode()?;
        match all.strip_prefix(&before) {
            Some(new) if !new.ends_with(REPLACEMENT) => {
                let new = new.to_owned();
                self.ids.drain(..self.n_out.saturating_sub(CONTEXT));
                self.n_out = self.ids.len();
                Ok(new)
            }
            _ => Ok(String::new()),
        }
    }

    /// What is left at the end, incomplete as it is.
    ///
    /// # Errors
    /// As [`TextStream::push`].
    pub fn finish(self) -> Result<String> {
        let (before, all) = self.decode()?;
        Ok(all.strip_prefix(&before).unwrap_or_default().to_owned())
    }

    /// The text that is out, and all of it.
    fn decode(&self) -> Result<(String, String)> {
        let before = self.tokenizer.decode_plain(&self.ids[..self.n_out])?;
        Ok((before, self.tokenizer.decode_plain(&self.ids)?))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Letters of one to four bytes, sequences of several code points, tokens inside of words.
    const TEXT: &str = "Plain words, then caf\u{e9}, \u{65e5}\u{672c}\u{8a9e}, \u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{1f389}\n\tand 3.14…";

    fn tokenizer() -> TextTokenizer {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/demo-model");
        TextTokenizer::open(&dir).expect("the demo model's tokenizer")
    }

    #[test]
    fn pieces_are_whole_characters_and_add_up() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode(TEXT).expect("encoded");
        assert!(ids.len() > TEXT.chars().count() / 3);
        for n_before in [0, 1, 7] {
            let mut stream = TextStream::after(&tokenizer, &ids[..n_before]);
            let mut pieces = Vec::new();
            for &id in &ids[n_before..] {
                pieces.push(stream.push(id).expect("decoded"));
            }
            assert!(pieces.iter().all(|piece| !piece.contains(REPLACEMENT)), "{pieces:?}");
            assert!(pieces.iter().filter(|piece| piece.is_empty()).count() > 3, "some characters take several tokens");
            assert_eq!(stream.finish().expect("decoded"), "");
            let before = tokenizer.decode(&ids[..n_before]).expect("decoded");
            assert_eq!(before + &pieces.concat(), TEXT);
        }
    }

    #[test]
    fn an_incomplete_end_is_told_at_the_end() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("a\u{1f389}").expect("encoded");
        let mut stream = TextStream::after(&tokenizer, &[]);
        let pieces: Vec<String> = ids[..ids.len() - 1].iter().map(|&id| stream.push(id).expect("decoded")).collect();
        assert_eq!(pieces.concat(), "a");
        assert!(stream.finish().expect("decoded").contains(REPLACEMENT));
    }
}
