//! Text to token ids, with the checkpoint's own fast tokenizer (`tokenizer.json`).
//!
//! Enters: a checkpoint directory and text. Leaves: the ids that Python's `tokenizers` gives for the same file.
//! Truncation, padding and dropout that the file may ask for are switched off: a document is encoded whole, and the same every
//! time. Special tokens are never added here; [`TextTokenizer::bos`] says what the tokenizer would put in front, and packing decides. Slow
//! (SentencePiece, vocab + merges) tokenizers are refused, not approximated.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::{ModelWrapper, Tokenizer};
use wush_format::FormatError;
use wush_format::guard;
use wush_format::json::open_regular;

use crate::{Checkpoint, CheckpointError, Result};

/// The fast tokenizer's file.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Files of slow tokenizers, for the message when only these are there.
const SLOW_FILES: &[&str] =
    &["tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "vocab.txt", "tekken.json"];
/// Largest tokenizer.json that is read. Vocabularies of 256 k entries take about 35 MB.
const MAX_TOKENIZER_BYTES: u64 = 512 << 20;
/// Largest generation_config.json, tokenizer_config.json or chat template that is read. Real ones have a few hundred bytes.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Bytes of text that are encoded at once where only the number of tokens counts.
const COUNTED_BYTES: usize = 64 << 10;
/// Bytes of a token of ordinary text, generous: languages of three bytes a character have fewer.
const USUAL_TOKEN_BYTES: usize = 8;
/// Tokens that a cut may make of those that were there: words are short, and merges look no further.
const TOKENS_OF_A_CUT: usize = 16;

/// A checkpoint's tokenizer.
pub struct TextTokenizer {
    inner: Tokenizer,
    path: PathBuf,
    bos: Option<u32>,
}

impl fmt::Debug for TextTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextTokenizer").field("path", &self.path).field("bos", &self.bos).finish_non_exhaustive()
    }
}

impl TextTokenizer {
    /// Reads `tokenizer.json` of a checkpoint directory.
    ///
    /// # Errors
    /// `NoTokenizer` when the file is absent; `Tokenizer` when it is not valid, or puts more than one token in front
    /// of a text; `Format` when it cannot be read.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(TOKENIZER_FILE);
        if !path.exists() {
            let slow = SLOW_FILES.iter().find(|name| dir.join(name).exists()).copied();
            return Err(CheckpointError::NoTokenizer { dir: dir.to_owned(), slow });
        }
        let bytes = read_bounded(&path, MAX_TOKENIZER_BYTES)?;
        let failed = |e: tokenizers::Error| tokenizer_error(&path, &e);
        let mut inner = guarded(&path, || Tokenizer::from_bytes(bytes))?;
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        without_dropout(&mut inner);
        let bos = find_bos(&inner, &path)?;
        Ok(Self { inner, path, bos })
    }

    /// The ids of `text`. No special tokens are added; text that spells one is encoded as one, as the tokenizer does.
    ///
    /// # Errors
    /// `Tokenizer` when the tokenizer's model fails on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = guarded(&self.path, || self.inner.encode_fast(text, false))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether `text` has more than `most` tokens, as far as that is seen without encoding all of it at once, which takes more
    /// than a hundred bytes of memory for one of text. Of a text that is short for so many tokens nothing is said.
    ///
    /// The length alone would not do: normalizers, unknown words and whitespace beside special tokens make a token of any
    /// number of bytes.
    ///
    /// # Errors
    /// As [`TextTokenizer::encode`].
    pub fn is_far_over(&self, text: &str, most: usize) -> Result<bool> {
        if text.len() <= most.saturating_mul(USUAL_TOKEN_BYTES).max(COUNTED_BYTES) {
            return Ok(false);
        }
        let (mut rest, mut n_least) = (text, 0);
        while !rest.is_empty() && n_least <= most {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(COUNTED_BYTES));
            n_least += self.encode(piece)?.len().saturating_sub(TOKENS_OF_A_CUT);
            rest = after;
        }
        Ok(n_least > most)
    }

    /// The ids of each text, in order, encoded in parallel. The result does not depend on the number of threads.
    ///
    /// # Errors
    /// As [`TextTokenizer::encode`].
    pub fn encode_batch(&self, texts: &[String]) -> Result<Vec<Vec<u32>>> {
        let inputs: Vec<&str> = texts.iter().map(String::as_str).collect();
        let encodings = guarded(&self.path, || self.inner.encode_batch_fast(inputs, false))?;
        Ok(encodings.iter().map(|encoding| encoding.get_ids().to_vec()).collect())
    }

    /// The text of `ids`, special tokens included.
    ///
    /// # Errors
    /// `Tokenizer` when the decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        guarded(&self.path, || self.inner.decode(ids, false))
    }

    /// The text of `ids` without special tokens.
    ///
    /// # Errors
    /// As [`TextTokenizer::decode`].
    pub fn decode_plain(&self, ids: &[u32]) -> Result<String> {
        guarded(&self.path, || self.inner.decode(ids, true))
    }

    /// The one token that the tokenizer itself puts in front of every text, if it does.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The id of a special token that is spelled exactly `text`, if the tokenizer has one.
    pub fn special_token(&self, text: &str) -> Option<u32> {
        let id = self.inner.token_to_id(text)?;
        self.inner.get_added_tokens_decoder().get(&id).filter(|token| token.special && token.content == text)?;
        Some(id)
    }

    /// Number of ids that the tokenizer can give, added tokens included. The model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

/// Runs a part of the tokenizers crate, which panics on some files that it accepts: that is an error of the file here.
fn guarded<T>(path: &Path, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    match guard::guarded(work) {
        Ok(result) => result.map_err(|e| tokenizer_error(path, &e)),
        Err(guard::Panicked) => Err(tokenizer_error(path, &"the tokenizers library cannot handle it")),
    }
}

/// BPE dropout leaves out merges at random, for training: ids would differ from run to run. Nothing else that a file can ask
/// for is random (Unigram's sampling cannot be stored).
fn without_dropout(tokenizer: &mut Tokenizer) {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return };
    if model.dropout.is_some() {
        let mut model = model.clone();
        model.dropout = None;
        tokenizer.with_model(model);
    }
}

/// The model's end-of-text id: `eos_token_id` of config.json, of its `text_config`, or of generation_config.json,
/// in this order; the first id where a list is given. `None` when no file names one.
///
/// # Errors
/// `Format` when a file cannot be read, or the value is not an id or a list of ids.
pub fn eos_token_id(checkpoint: &Checkpoint) -> Result<Option<u32>> {
    Ok(eos_lists(checkpoint)?.into_iter().flatten().next())
}

/// All ids that end a text: those of config.json, of its `text_config`, and of generation_config.json.
///
/// # Errors
/// As [`eos_token_id`].
pub fn eos_token_ids(checkpoint: &Checkpoint) -> Result<BTreeSet<u32>> {
    Ok(eos_lists(checkpoint)?.into_iter().flatten().collect())
}

/// `eos_token_id` of every place that may have one.
fn eos_lists(checkpoint: &Checkpoint) -> Result<Vec<Vec<u32>>> {
    let path = checkpoint.dir().join("config.json");
    let config = checkpoint.config();
    let objects = [Some(config), config.get("text_config")].into_iter().flatten();
    let mut lists: Vec<_> = objects.map(|object| eos_of(object, &path)).collect::<Result<_>>()?;
    let path = checkpoint.dir().join("generation_config.json");
    if path.exists() {
        let bytes = read_bounded(&path, MAX_CONFIG_BYTES)?;
        let object = serde_json::from_slice(&bytes).map_err(|e| invalid_config(&path, e.to_string()))?;
        lists.push(eos_of(&object, &path)?);
    }
    Ok(lists)
}

fn eos_of(object: &Value, path: &Path) -> Result<Vec<u32>> {
    let values = match object.get("eos_token_id") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.as_slice(),
        Some(value) => std::slice::from_ref(value),
    };
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| invalid_config(path, format!("eos_token_id: expected a token id, found {value}")))
    };
    values.iter().map(id).collect()
}

/// Finds the BOS by encoding one letter with and without special tokens: the template may also add an end token.
fn find_bos(tokenizer: &Tokenizer, path: &Path) -> Result<Option<u32>> {
    let encode = |special| {
        let encoding = guarded(path, || tokenizer.encode_fast("a", special))?;
        Ok::<_, CheckpointError>(encoding.get_ids().to_vec())
    };
    let (bare, full) = (encode(false)?, encode(true)?);
    let n_before = match full.windows(bare.len().max(1)).position(|window| window == bare) {
        Some(n) => n,
        None => return Err(tokenizer_error(path, &"special tokens change how a text is split")),
    };
    match full[..n_before] {
        [] => Ok(None),
        [bos] => Ok(Some(bos)),
        _ => Err(tokenizer_error(path, &format!("puts {n_before} tokens in front of a text; expected one at most"))),
    }
}

fn tokenizer_error(path: &Path, detail: &dyn ToString) -> CheckpointError {
    CheckpointError::Tokenizer { path: path.to_owned(), detail: detail.to_string() }
}

fn invalid_config(path: &Path, detail: String) -> CheckpointError {
    FormatError::Invalid { path: path.to_owned(), kind: "configuration", detail }.into()
}

pub(crate) fn read_bounded(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let file = open_regular(path)?;
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(|e| FormatError::io(path, "read", e))?;
    if bytes.len() as u64 > max_bytes {
        return Err(invalid_config(path, format!("larger than {max_bytes} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    const ADDED: &str = r#"[{"id":0,"content":"<eos>","single_word":false,"lstrip":false,"rstrip":false,
        "normalized":false,"special":true},{"id":5,"content":"plain","single_word":false,"lstrip":false,
        "rstrip":false,"normalized":false,"special":false}]"#;

    /// A word-level tokenizer that asks for truncation to 2 and padding to 4, with `before` and `after` around a text.
    fn write_tokenizer(before: &[&str], after: &[&str]) -> TempDir {
        let special = |name: &&str| format!(r#"{{"SpecialToken":{{"id":"{name}","type_id":0}}}}"#);
        let mut template: Vec<String> = before.iter().map(special).collect();
        template.push(r#"{"Sequence":{"id":"A","type_id":0}}"#.to_owned());
        template.extend(after.iter().map(special));
        let tokens =
            r#"{"<s>":{"id":"<s>","ids":[1],"tokens":["<s>"]},"<eos>":{"id":"<eos>","ids":[0],"tokens":["<eos>"]}}"#;
        let json = format!(
            r#"{{"version":"1.0","truncation":{{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0}},
            "padding":{{"strategy":{{"Fixed":4}},"direction":"Right","pad_to_multiple_of":null,"pad_id":0,"pad_type_id":0,
            "pad_token":"<eos>"}},"added_tokens":{ADDED},"normalizer":null,"pre_tokenizer":{{"type":"WhitespaceSplit"}},
            "post_processor":{{"type":"TemplateProcessing","single":[{}],"pair":[{{"Sequence":{{"id":"A","type_id":0}}}},
            {{"Sequence":{{"id":"B","type_id":0}}}}],"special_tokens":{tokens}}},"decoder":null,"model":{{"type":"WordLevel",
            "vocab":{{"<eos>":0,"<s>":1,"a":2,"b":3,"c":4}},"unk_token":"<eos>"}}}}"#,
            template.join(",")
        );
        let dir = tempfile::tempdir().expect("temporary directory");
        std::fs::write(dir.path().join(TOKENIZER_FILE), json).expect("writable");
        dir
    }

    #[test]
    fn documents_are_neither_truncated_nor_padded() {
        let dir = write_tokenizer(&["<s>"], &["<eos>"]);
        let tokenizer = TextTokenizer::open(dir.path()).expect("valid");
        assert_eq!(tokenizer.encode("a b c a").expect("valid"), [2, 3, 4, 2]);
        let batch = tokenizer.encode_batch(&["a".to_owned(), "b c <eos> b".to_owned()]).expect("valid");
        assert_eq!(batch, [vec![2], vec![3, 4, 0, 3]]);
        assert_eq!(tokenizer.vocab_size(), 6);
        assert_eq!(tokenizer.decode(&[2, 0]).expect("valid"), "a <eos>");
    }

    /// Words of a thousand letters that the vocabulary does not have are a token each.
    #[test]
    fn far_too_long_a_text_is_known_by_counting_not_by_its_length() {
        let dir = write_tokenizer(&[], &[]);
        let tokenizer = TextTokenizer::open(dir.path()).expect("valid");
        let (short, long) = ("a ".repeat(100_000), format!("{} ", "x".repeat(1000)).repeat(300));
        for (text, most, expected) in [
            (&short, 99_000, false),
            (&short, 10_000, true),
            (&short, 3, true),
            (&long, 10, true),
            (&long, 300, false),
            (&"a b".to_owned(), 1, false),
        ] {
            let n = tokenizer.encode(text).expect("valid").len();
            assert_eq!(tokenizer.is_far_over(text, most).expect("valid"), expected, "{n} tokens, {most} fit");
            assert!(!expected || n > most);
        }
    }

    #[test]
    fn dropout_is_switched_off() {
        let json = |dropout: &str| {
            format!(
                r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,
                "post_processor":null,"decoder":null,"model":{{"type":"BPE","dropout":{dropout},"unk_token":null,
                "continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,
                "vocab":{{"a":0,"b":1,"ab":2}},"merges":["a b"]}}}}"#
            )
        };
        let dir = tempfile::tempdir().expect("temporary directory");
        // At 1 no merge would ever be made, at 0.5 every second one.
        for dropout in ["null", "0.5", "1.0"] {
            std::fs::write(dir.path().join(TOKENIZER_FILE), json(dropout)).expect("writable");
            let tokenizer = TextTokenizer::open(dir.path()).expect("valid");
            assert_eq!(tokenizer.encode(&"ab".repeat(64)).expect("valid"), [2; 64], "{dropout}");
            assert_eq!(tokenizer.encode_batch(&["ab".repeat(64)]).expect("valid"), [[2; 64]], "{dropout}");
        }
    }

    #[test]
    fn bos_is_what_stands_before_the_text() {
        for (before, after, expected) in [
            (vec![], vec![], None),
            (vec!["<s>"], vec![], Some(1)),
            (vec!["<s>"], vec!["<eos>"], Some(1)),
            (vec![], vec!["<eos>"], None),
        ] {
            let dir = write_tokenizer(&before, &after);
            let tokenizer = TextTokenizer::open(dir.path()).expect("valid");
            assert_eq!(tokenizer.bos(), expected, "{before:?} {after:?}");
        }
        let dir = write_tokenizer(&["<s>", "<eos>"], &[]);
        let error = TextTokenizer::open(dir.path()).expect_err("two tokens in front");
        assert!(error.to_string().contains("puts 2 tokens in front of a text"), "{error}");
    }

    #[test]
    fn special_tokens_are_known_by_their_text() {
        let dir = write_tokenizer(&[], &[]);
        let tokenizer = TextTokenizer::open(dir.path()).expect("valid");
        assert_eq!(tokenizer.special_token("<eos>"), Some(0));
        assert_eq!(tokenizer.special_token("plain"), None, "added, but not special");
        assert_eq!(tokenizer.special_token("a"), None, "a word");
        assert_eq!(tokenizer.special_token("absent"), None);
    }

    #[test]
    fn missing_and_broken_files_are_named() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let error = TextTokenizer::open(dir.path()).expect_err("no file");
        assert!(error.to_string().ends_with(": no tokenizer.json"), "{error}");
        std::fs::write(dir.path().join("tokenizer.model"), b"").expect("writable");
        let error = TextTokenizer::open(dir.path()).expect_err("a slow tokenizer");
        assert!(error.to_string().ends_with("(found tokenizer.model, a slow tokenizer's file)"), "{error}");
        assert!(error.hint().is_some_and(|hint| hint.contains("use_fast=True") && hint.contains("--calib FILE.json")));
        std::fs::write(dir.path().join(TOKENIZER_FILE), b"{\"version\":").expect("writable");
        let error = TextTokenizer::open(dir.path()).expect_err("not JSON");
        assert!(matches!(error, CheckpointError::Tokenizer { .. }), "{error}");
    }

    #[test]
    fn eos_of_one_object() {
        let eos = |text: &str| eos_of(&serde_json::from_str(text).expect("JSON"), Path::new("config.json"));
        for (text, expected) in [
            ("{}", vec![]),
            (r#"{"eos_token_id":null}"#, vec![]),
            (r#"{"eos_token_id":[]}"#, vec![]),
            (r#"{"eos_token_id":7}"#, vec![7]),
            (r#"{"eos_token_id":[8,9]}"#, vec![8, 9]),
        ] {
            assert_eq!(eos(text).expect("valid"), expected, "{text}");
        }
        for text in [r#"{"eos_token_id":-1}"#, r#"{"eos_token_id":"a"}"#, r#"{"eos_token_id":[4294967296]}"#] {
            assert!(eos(text).expect_err(text).to_string().contains("eos_token_id"));
        }
    }
}
