//! Calibration data in: text, JSON lines, parquet tables, lists of token ids, local or from the hub, packed into
//! sequences.
//!
//! Enters: a [`CalibSource`] and the model's tokenizer. Leaves: [`Packed`] sequences of token ids. A
//! source is read in order and only as far as needed, with memory bounded whatever a file claims. Nothing is shuffled,
//! filtered or sampled, so the same source gives the same ids.
//!
//! ```
//! use wush_data::CalibSource;
//!
//! let source: CalibSource = "hf:HuggingFaceFW/fineweb-edu:sample/10BT/*".parse()?;
//! assert_eq!(source, CalibSource::default());
//! # Ok::<(), wush_data::DataError>(())
//! ```

mod documents;
mod error;
mod files;
mod ids;
mod lines;
mod pack;
mod record;
mod source;
mod table;

use std::path::Path;

use wush_checkpoint::hub::HubOptions;
use wush_checkpoint::tokenizer::TextTokenizer;
use wush_format::monitor::Monitor;

use documents::{Documents, ReadOptions, SEPARATOR};
use files::Files;
use ids::Limits;
use pack::Packer;
use source::{Compression, FileKind};

pub use error::{DataError, Result, TextOptions};
pub use pack::{PackOptions, Packed, TextSize};
pub use source::CalibSource;

/// Stage name for the monitor.
const STAGE: &str = "read calibration data";
/// Text handed to the tokenizer at once, at most: bounds memory, and is enough to keep every core busy.
const MAX_BATCH_BYTES: usize = 4 << 20;
/// The same, at least: small batches would leave cores idle.
const MIN_BATCH_BYTES: usize = 64 << 10;
/// Bytes of text that a token stands for, about; only decides how much is read ahead.
const BYTES_PER_TOKEN: usize = 4;

/// Reads calibration data and packs it.
///
/// Text is tokenized document by document, without special tokens, and packed as [`PackOptions`] says. A `.txt` file is
/// one document; where the tokenizer has the special token `<|endoftext|>`, a line of exactly that parts two. A `.json`
/// file's lists are the sequences, as they are: neither tokenizer nor BOS apply, and `seq_len` is the longest that is taken.
///
/// # Errors
/// Every variant of [`DataError`]; `TooLittle` says how many sequences there were.
pub fn load(
    source: &CalibSource,
    tokenizer: Option<&TextTokenizer>,
    options: &PackOptions,
    hub: &HubOptions,
    monitor: &dyn Monitor,
) -> Result<Packed> {
    options.check()?;
    if let CalibSource::Path(path) = source
        && let Some((FileKind::TokenIds, compression)) = FileKind::of(path)
        && !path.is_dir()
    {
        return load_ids(path, compression, options, monitor);
    }
    let files = Files::find(source, hub, monitor)?;
    let tokenizer = tokenizer.ok_or_else(|| DataError::NoTokenizer { source_name: files.name.clone() })?;
    load_text(files, tokenizer, options, monitor)
}

fn load_ids(path: &Path, compression: Compression, options: &PackOptions, monitor: &dyn Monitor) -> Result<Packed> {
    if !path.exists() {
        return Err(DataError::NotFound { path: path.to_owned() });
    }
    let name = file_name(path);
    let PackOptions { sequences, seq_len, vocab_size, .. } = *options;
    let sequences = ids::read(path, compression, Limits { sequences, seq_len, vocab_size })?;
    let (found, wanted) = (sequences.len(), options.sequences.unwrap_or(1));
    if found < wanted {
        return Err(DataError::TooLittle { source_name: name, found, wanted, of_length: None, n_tokens: None });
    }
    let n_tokens = sequences.iter().map(|ids| ids.len() as u64).sum();
    monitor.begin(STAGE, "tokens", n_tokens);
    monitor.advance(n_tokens);
    monitor.end();
    Ok(Packed { sequences, source: name, text: TextSize::default() })
}

fn load_text(files: Files, tokenizer: &TextTokenizer, options: &PackOptions, monitor: &dyn Monitor) -> Result<Packed> {
    let separator = tokenizer.special_token(SEPARATOR).is_some();
    let read = ReadOptions { text_field: options.text_field.clone(), separator };
    let mut packer = Packer::new(options);
    for i in 0..files.len() {
        // A download shows its own progress, so the two stages alternate.
        let path = files.get(i, monitor)?;
        monitor.begin(STAGE, "tokens", packer.n_missing().unwrap_or(0) as u64);
        let result = read_file(&path, &read, tokenizer, &mut packer, monitor);
        monitor.end();
        result?;
        if packer.is_full() {
            break;
        }
    }
    if options.eos.is_none() && packer.n_documents() > 1 {
        monitor.note("the model names no end-of-text id: documents are joined without one");
    }
    let text = packer.text;
    let sequences = packer.finish(&files.name)?;
    pack::check_ids(&sequences, options.vocab_size, &files.name)?;
    Ok(Packed { sequences, source: files.name, text })
}

fn read_file(
    path: &Path,
    options: &ReadOptions,
    tokenizer: &TextTokenizer,
    packer: &mut Packer<'_>,
    monitor: &dyn Monitor,
) -> Result<()> {
    let mut documents = Documents::open(path, options)?;
    loop {
        let n_needed = packer.n_missing().unwrap_or(usize::MAX).saturating_mul(BYTES_PER_TOKEN);
        let (texts, is_new) = next_batch(&mut documents, n_needed.clamp(MIN_BATCH_BYTES, MAX_BATCH_BYTES), monitor)?;
        if monitor.interrupted() {
            return Err(DataError::Interrupted);
        }
        if texts.is_empty() {
            return Ok(());
        }
        let encoded = tokenizer.encode_batch(&texts)?;
        let (n_bytes, n_tokens) = (texts.iter().map(String::len).sum(), encoded.iter().map(Vec::len).sum());
        packer.text = packer.text.max(TextSize { n_bytes, n_tokens });
        let n_before = packer.n_packed();
        for (ids, is_new) in encoded.iter().zip(is_new) {
            packer.push(ids, is_new);
        }
        monitor.advance((packer.n_packed() - n_before) as u64);
        if packer.is_full() {
            return Ok(());
        }
    }
}

/// The next documents, of `n_bytes` together or a little more, or fewer when the user asks to stop; none at the end. With each, whether it begins a document.
fn next_batch(documents: &mut Documents, n_bytes: usize, monitor: &dyn Monitor) -> Result<(Vec<String>, Vec<bool>)> {
    let (mut texts, mut is_new, mut n) = (Vec::new(), Vec::new(), 0);
    while n < n_bytes && !monitor.interrupted() {
        let Some(document) = documents.next()? else { break };
        n += document.text.len();
        texts.push(document.text);
        is_new.push(document.is_new);
    }
    Ok((texts, is_new))
}

/// A path's last part: what is shown of it, since the directories above are nobody's business.
fn file_name(path: &Path) -> String {
    let named = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let resolved = || path.canonicalize().ok()?.file_name().map(|name| name.to_string_lossy().into_owned());
    named.or_else(resolved).unwrap_or_else(|| path.display().to_string())
}
