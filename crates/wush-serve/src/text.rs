//! An answer's tokens as text, while they come. Enters: tokens, in order. Leaves: text in whole characters, up to the first stop
//! string, and of each token what it says and where in the text it begins.

use wush_checkpoint::Result;
use wush_checkpoint::stream::TextStream;

use crate::score::Scored;
use crate::vocabulary::{TokenText, Vocabulary};

/// A token and what the model says of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) token: TokenText,
    /// Of the first token of a text the model says nothing.
    pub(crate) scored: Option<EntryScores>,
    /// Characters of the text before it.
    pub(crate) offset: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EntryScores {
    pub(crate) logprob: f64,
    /// The most likely tokens, most likely first.
    pub(crate) top: Vec<(TokenText, f64)>,
}

/// What became known of a text.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Delta {
    pub(crate) text: String,
    pub(crate) entries: Vec<Entry>,
    /// A stop string ends the text here.
    pub(crate) is_stopped: bool,
}

/// One text that grows.
pub(crate) struct Writer<'a> {
    vocabulary: &'a Vocabulary,
    stream: TextStream<'a>,
    stops: &'a [String],
    /// Text that may be the beginning of a stop string.
    held: String,
    /// Characters of all text, with what is held.
    n_chars: usize,
    /// Characters of the text that is out.
    n_out: usize,
    /// Tokens of which nothing is out yet, in order: a stop string may cut them off.
    pending: Vec<Entry>,
}

impl<'a> Writer<'a> {
    /// Text after a prompt, of which `n_chars` characters stand before it.
    pub(crate) fn new(vocabulary: &'a Vocabulary, prompt: &[u32], n_chars: usize, stops: &'a [String]) -> Self {
        let stream = TextStream::after(&vocabulary.tokenizer, prompt);
        Self { vocabulary, stream, stops, held: String::new(), n_chars, n_out: n_chars, pending: Vec::new() }
    }

    /// One token more. After a delta that is stopped nothing may follow.
    ///
    /// # Errors
    /// `Tokenizer`.
    pub(crate) fn push(&mut self, id: u32, scored: Option<Scored>) -> Result<Delta> {
        let text = self.stream.push(id)?;
        if let Some(scored) = scored {
            let token = self.vocabulary.text_of(id)?;
            let offset = self.n_chars + chars_before(&token, &text);
            self.pending.push(entry(self.vocabulary, token, Some(scored), offset)?);
        }
        Ok(self.release(&text))
    }

    /// What is left at the end.
    ///
    /// # Errors
    /// As [`Writer::push`].
    pub(crate) fn finish(mut self) -> Result<Delta> {
        let nothing = TextStream::after(&self.vocabulary.tokenizer, &[]);
        let rest = std::mem::replace(&mut self.stream, nothing).finish()?;
        let mut delta = self.release(&rest);
        if !delta.is_stopped {
            delta.text += &self.held;
            delta.entries.append(&mut self.pending);
        }
        Ok(delta)
    }

    /// Adds `text` to what is held, and lets go of what begins no stop string.
    fn release(&mut self, text: &str) -> Delta {
        self.n_chars += text.chars().count();
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = found {
            self.held.truncate(at);
            return Delta { is_stopped: true, ..self.let_out(at) };
        }
        let begins = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let first = self.held.len().saturating_sub(longest);
        let keep = self.held.char_indices().map(|(at, _)| at).filter(|&at| at >= first).find(begins);
        self.let_out(keep.unwrap_or(self.held.len()))
    }

    /// The first `n_bytes` of what is held, and the tokens that begin in it. Where nothing can be cut off, all tokens.
    fn let_out(&mut self, n_bytes: usize) -> Delta {
        let kept = self.held.split_off(n_bytes);
        let text = std::mem::replace(&mut self.held, kept);
        self.n_out += text.chars().count();
        let is_out = |entry: &Entry| self.stops.is_empty() || entry.offset < self.n_out;
        let n_out = self.pending.partition_point(is_out);
        Delta { text, entries: self.pending.drain(..n_out).collect(), is_stopped: false }
    }
}

/// The tokens of a prompt; `scored` is of all but the first. The first `n_added` stand before its text, of which they are no
/// part; all others are, special ones included.
///
/// # Errors
/// `Tokenizer`.
pub(crate) fn prompt_entries(
    vocabulary: &Vocabulary,
    ids: &[u32],
    n_added: usize,
    scored: Vec<Scored>,
) -> Result<Vec<Entry>> {
    let mut stream = TextStream::verbatim(&vocabulary.tokenizer);
    let mut n_chars = 0;
    let scored = std::iter::once(None).chain(scored.into_iter().map(Some));
    ids.iter()
        .zip(scored)
        .enumerate()
        .map(|(at, (&id, scored))| {
            let token = if at == n_added { vocabulary.first_text_of(id)? } else { vocabulary.text_of(id)? };
            let text = if at >= n_added { stream.push(id)? } else { String::new() };
            let offset = n_chars + chars_before(&token, &text);
            n_chars += text.chars().count();
            entry(vocabulary, token, scored, offset)
        })
        .collect()
}

/// Characters that a token let out and that are not its own: of bytes before it, which now are known to be no character.
fn chars_before(token: &TokenText, text: &str) -> usize {
    let TokenText::Text(own) = token else { return 0 };
    text.strip_suffix(own.as_str()).map_or(0, |before| before.chars().count())
}

fn entry(vocabulary: &Vocabulary, token: TokenText, scored: Option<Scored>, offset: usize) -> Result<Entry> {
    let scores = |Scored { logprob, top }: Scored| -> Result<EntryScores> {
        let top = top.into_iter().map(|(id, logprob)| Ok((vocabulary.text_of(id)?, logprob)));
        Ok(EntryScores { logprob, top: top.collect::<Result<_>>()? })
    };
    Ok(Entry { token, scored: scored.map(scores).transpose()?, offset })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::tests::demo;

    /// What a text becomes, token by token, and whether a stop string ended it.
    fn written(text: &str, stops: &[&str]) -> (Vec<String>, bool) {
        let vocabulary = demo();
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut writer = Writer::new(&vocabulary, &[], 0, &stops);
        let mut pieces = Vec::new();
        for id in vocabulary.tokenizer.encode(text).expect("encoded") {
            let delta = writer.push(id, None).expect("decoded");
            pieces.push(delta.text);
            if delta.is_stopped {
                return (pieces, true);
            }
        }
        let last = writer.finish().expect("decoded");
        pieces.push(last.text);
        (pieces, last.is_stopped)
    }

    #[test]
    fn text_ends_before_the_first_stop_string_wherever_tokens_end() {
        let text = "The river ran, and caf\u{e9} \u{1f389} lights went out. The end";
        for (stops, expected) in [
            (vec![], text),
            (vec!["nowhere", " lights on"], text),
            (vec![" lights"], "The river ran, and caf\u{e9} \u{1f389}"),
            (vec!["ver r", "an,"], "The ri"),
            (vec!["\u{1f389}"], "The river ran, and caf\u{e9} "),
            (vec!["T"], ""),
            (vec!["end"], "The river ran, and caf\u{e9} \u{1f389} lights went out. The "),
        ] {
            let (pieces, is_stopped) = written(text, &stops);
            assert_eq!(pieces.concat(), expected, "{stops:?}");
            assert_eq!(is_stopped, expected != text, "{stops:?}");
            assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
        }
    }

    #[test]
    fn nothing_is_held_that_begins_no_stop_string() {
        let (pieces, _) = written("one two three four", &["three five"]);
        assert!(pieces[..pieces.len() - 1].concat().starts_with("one two "), "{pieces:?}");
        assert_eq!(pieces.concat(), "one two three four");
    }

    #[test]
    fn entries_say_where_their_tokens_begin() {
        let vocabulary = demo();
        let text = "caf\u{e9} \u{1f389} is open";
        let ids = vocabulary.tokenizer.encode(text).expect("encoded");
        let scored = vec![Scored { logprob: -1.0, top: vec![(ids[0], -0.5)] }; ids.len() - 1];
        let entries = prompt_entries(&vocabulary, &ids, 0, scored).expect("decoded");
        assert_eq!(entries.len(), ids.len());
        assert!(entries[0].scored.is_none() && entries[1..].iter().all(|entry| entry.scored.is_some()));
        for Entry { token, offset, .. } in &entries {
            let rest: String = text.chars().skip(*offset).collect();
            assert!(token.bytes().is_none_or(|bytes| rest.as_bytes().starts_with(bytes)), "{token:?} at {offset}");
        }
        assert!(entries.iter().any(|entry| entry.token.bytes().is_none()), "a character of several tokens");
    }

    /// Bytes that are no character are one replacement character, which is known when the next token comes.
    #[test]
    fn a_token_after_half_a_character_begins_behind_it() {
        let vocabulary = demo();
        let party = vocabulary.tokenizer.encode("\u{1f389}").expect("encoded");
        let a = vocabulary.tokenizer.encode("a").expect("encoded")[0];
        let ids = [&party[..1], &[a, a]].concat();
        let scored = vec![Scored { logprob: -1.0, top: Vec::new() }; 2];
        let text = vocabulary.tokenizer.decode(&ids).expect("decoded");
        assert_eq!(text, "\u{fffd}aa", "{party:?}");
        let offsets = |entries: &[Entry]| entries.iter().map(|entry| entry.offset).collect::<Vec<_>>();
        assert_eq!(offsets(&prompt_entries(&vocabulary, &ids, 0, scored.clone()).expect("decoded")), [0, 1, 2]);
        let mut writer = Writer::new(&vocabulary, &[], 0, &[]);
        let scored = Scored { logprob: -1.0, top: Vec::new() };
        let told = ids.iter().flat_map(|&id| writer.push(id, Some(scored.clone())).expect("decoded").entries);
        assert_eq!(offsets(&told.collect::<Vec<_>>()), [0, 1, 2]);
    }

    /// A special token is part of a prompt's text where it was sent, and not where the tokenizer added it.
    #[test]
    fn special_tokens_of_a_prompt_count_where_they_stand_in_its_text() {
        let vocabulary = demo();
        let tokenizer = &vocabulary.tokenizer;
        let ids = [0, 0, tokenizer.encode("a").expect("encoded")[0]];
        let scored = vec![Scored { logprob: -1.0, top: Vec::new() }; 2];
        let n_name = tokenizer.decode(&[0]).expect("decoded").chars().count();
        for (n_added, expected) in [(1, [0, 0, n_name]), (0, [0, n_name, 2 * n_name])] {
            let entries = prompt_entries(&vocabulary, &ids, n_added, scored.clone()).expect("decoded");
            assert_eq!(entries.iter().map(|entry| entry.offset).collect::<Vec<_>>(), expected);
        }
    }
}
