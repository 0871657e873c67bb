//! Token ids to text while they come, one at a time.
//!
//! Enters: the ids of a text, in order. Leaves: the text in whole characters, as soon as each is known: a character's bytes may
//! lie in several tokens. Special tokens give no text, unless asked for. Not the tokenizers crate's `DecodeStream`: that fails where a decoder
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
    /// Whether special tokens give text.
    is_verbatim: bool,
}

impl<'a> TextStream<'a> {
    /// Text that follows `before`, whose own text is not given.
    pub fn after(tokenizer: &'a TextTokenizer, before: &[u32]) -> Self {
        let ids = before[before.len().saturating_sub(CONTEXT)..].to_vec();
        Self { tokenizer, n_out: ids.len(), ids, is_verbatim: false }
    }

    /// Text from its beginning, with that of special tokens.
    pub fn verbatim(tokenizer: &'a TextTokenizer) -> Self {
        Self { is_verbatim: true, ..Self::after(tokenizer, &[]) }
    }

    /// The text that is known since the last call: empty while a character is incomplete.
    ///
    /// # Errors
    /// `Tokenizer` when the decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let (before, all) = self.decode()?;
        match added(&before, &all) {
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
        Ok(added(&before, &all).unwrap_or_default().to_owned())
    }

    /// The text that is out, and all of it.
    fn decode(&self) -> Result<(String, String)> {
        let decode = |ids: &[u32]| match self.is_verbatim {
            true => self.tokenizer.decode(ids),
            false => self.tokenizer.decode_plain(ids),
        };
        Ok((decode(&self.ids[..self.n_out])?, decode(&self.ids)?))
    }
}

/// What `all` has after `before`, which may have ended inside a character that `all` has whole.
fn added<'t>(before: &str, all: &'t str) -> Option<&'t str> {
    all.strip_prefix(before).or_else(|| all.strip_prefix(before.trim_end_matches(REPLACEMENT)))
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

    /// A list of ids may be cut anywhere, and what follows is still told.
    #[test]
    fn text_after_half_a_character_begins_with_all_of_it() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("a\u{1f389} and more").expect("encoded");
        let n_whole = tokenizer.encode("a\u{1f389}").expect("encoded").len();
        assert!(n_whole > 2, "a character of several tokens");
        for n_before in 2..n_whole {
            let mut stream = TextStream::after(&tokenizer, &ids[..n_before]);
            let pieces: Vec<String> = ids[n_before..].iter().map(|&id| stream.push(id).expect("decoded")).collect();
            assert_eq!(pieces.concat() + &stream.finish().expect("decoded"), "\u{1f389} and more", "{n_before}");
        }
    }

    #[test]
    fn special_tokens_give_text_where_asked_for() {
        let tokenizer = tokenizer();
        let name = tokenizer.decode(&[0]).expect("decoded");
        assert_eq!(tokenizer.special_token(&name), Some(0), "a special token");
        let text = format!("one{name} two");
        let ids = tokenizer.encode(&text).expect("encoded");
        let told = |mut stream: TextStream<'_>| -> String {
            ids.iter().map(|&id| stream.push(id).expect("decoded")).collect()
        };
        assert_eq!(told(TextStream::verbatim(&tokenizer)), text);
        assert_eq!(told(TextStream::after(&tokenizer, &[])), "one two");
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
