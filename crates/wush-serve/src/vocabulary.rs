//! What single tokens say. Enters: a token. Leaves: its text as it stands inside of a text, or its number where its bytes are no
//! whole characters.

use std::borrow::Cow;

use wush_checkpoint::Result;
use wush_checkpoint::tokenizer::TextTokenizer;

/// What a decoder gives for bytes that are no character.
const REPLACEMENT: char = '\u{fffd}';

/// What a token says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TokenText {
    /// Whole characters.
    Text(String),
    /// A part of a character, or bytes that are none: its number.
    Number(u32),
}

impl TokenText {
    /// As it is told: `token_id:7` for a number, so that different tokens are different text.
    pub(crate) fn shown(&self) -> Cow<'_, str> {
        match self {
            Self::Text(text) => text.into(),
            Self::Number(id) => format!("token_id:{id}").into(),
        }
    }

    /// Its bytes in UTF-8; none of a number.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Text(text) => Some(text.as_bytes()),
            Self::Number(_) => None,
        }
    }
}

/// A tokenizer, and what each of its tokens says.
pub(crate) struct Vocabulary {
    pub(crate) tokenizer: TextTokenizer,
    /// A token to put before others, and its text: some decoders drop the space with which a text begins.
    before: Option<(u32, String)>,
}

impl Vocabulary {
    pub(crate) fn new(tokenizer: TextTokenizer) -> Self {
        let letter = || {
            let id = *tokenizer.encode("a").ok()?.last()?;
            Some((id, tokenizer.decode(&[id]).ok()?))
        };
        let before = letter();
        Self { tokenizer, before }
    }

    /// A token's own text inside of a text.
    ///
    /// # Errors
    /// `Tokenizer`.
    pub(crate) fn text_of(&self, id: u32) -> Result<TokenText> {
        let Some((before, its_text)) = &self.before else { return self.first_text_of(id) };
        let both = self.tokenizer.decode(&[*before, id])?;
        Ok(match both.strip_prefix(its_text.as_str()) {
            Some(text) => of(id, text.to_owned()),
            // A decoder that changes what is before: the token counts as it stands alone.
            None => self.first_text_of(id)?,
        })
    }

    /// The same of a token with which a text begins.
    ///
    /// # Errors
    /// `Tokenizer`.
    pub(crate) fn first_text_of(&self, id: u32) -> Result<TokenText> {
        Ok(of(id, self.tokenizer.decode(&[id])?))
    }
}

fn of(id: u32, text: String) -> TokenText {
    if text.contains(REPLACEMENT) { TokenText::Number(id) } else { TokenText::Text(text) }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use super::*;

    /// The demonstration model's, of bytes.
    pub(crate) fn demo() -> Vocabulary {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/demo-model");
        Vocabulary::new(TextTokenizer::open(&dir).expect("the demo model's tokenizer"))
    }

    /// A tokenizer that marks spaces, as SentencePiece's are written down, with two tokens that a text begins alike with.
    fn marked() -> (tempfile::TempDir, Vocabulary) {
        let json = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
            "pre_tokenizer":{"type":"Metaspace","replacement":"\u2581","prepend_scheme":"first","split":true},"post_processor":null,
            "decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"\u2581"},"content":" "},
            {"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},
            "model":{"type":"WordLevel","vocab":{"\u2581a":0,"a":1,"\u2581the":2,"the":3,"<0xC3>":4,"<unk>":5},
            "unk_token":"<unk>"}}"#;
        let dir = tempfile::tempdir().expect("temporary directory");
        std::fs::write(dir.path().join("tokenizer.json"), json).expect("writable");
        let tokenizer = TextTokenizer::open(dir.path()).expect("valid");
        (dir, Vocabulary::new(tokenizer))
    }

    #[test]
    fn a_space_that_begins_a_token_is_told_but_at_the_start_of_a_text() {
        let (_dir, vocabulary) = marked();
        let text = |text: &str| TokenText::Text(text.to_owned());
        let inside: Vec<TokenText> = (0..5).map(|id| vocabulary.text_of(id).expect("decoded")).collect();
        assert_eq!(inside, [text(" a"), text("a"), text(" the"), text("the"), TokenText::Number(4)]);
        assert_eq!(vocabulary.first_text_of(2).expect("decoded"), text("the"));
    }

    #[test]
    fn parts_of_characters_have_numbers_and_no_bytes() {
        let vocabulary = demo();
        let ids = vocabulary.tokenizer.encode(" lights \u{1f389}").expect("encoded");
        let texts: Vec<TokenText> = ids.iter().map(|&id| vocabulary.text_of(id).expect("decoded")).collect();
        assert!(texts[0].shown().starts_with(' ') && texts[0].bytes().is_some_and(|bytes| bytes[0] == b' '));
        let last = texts.last().expect("tokens");
        assert_eq!((last.shown(), last.bytes()), (format!("token_id:{}", ids[ids.len() - 1]).into(), None));
    }
}
