//! The one error type of this crate: every variant names the file and the place in it, and [`DataError::hint`] the remedy.

use std::path::PathBuf;

use wush_checkpoint::CheckpointError;
use wush_format::FormatError;

/// Result of this crate.
pub type Result<T, E = DataError> = std::result::Result<T, E>;

/// Why calibration data could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file could not be read or decompressed.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A compressed file that is damaged or cut short.
    #[error("{path}: cannot be decompressed: {detail}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The decompressor's words.
        detail: String,
    },
    /// The hub or the tokenizer failed.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// A `--calib` argument that cannot be parsed.
    #[error("{text}: not a source of calibration data: {detail}")]
    BadSource {
        /// The argument.
        text: String,
        /// What was expected and what was found.
        detail: &'static str,
    },
    /// The path is not there.
    #[error("{path}: no such file or directory")]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// A file whose name does not say what it holds.
    #[error("{path}: unknown kind of file; expected {}", crate::source::KNOWN_KINDS)]
    UnknownKind {
        /// The file.
        path: PathBuf,
    },
    /// A folder or a data set without a file of a known kind.
    #[error("{source_name}: no text in it; expected files of {}", crate::source::TEXT_KINDS)]
    NoFiles {
        /// The folder or the data set.
        source_name: String,
    },
    /// Bytes that are not UTF-8.
    #[error("{path}: not UTF-8 at byte {offset}, in line {line}")]
    InvalidUtf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first wrong byte, after decompression, from 0.
        offset: u64,
        /// Line, from 1.
        line: u64,
    },
    /// A line that does not fit into memory set aside for one.
    #[error("{path}: line {line} is longer than {max_bytes} bytes")]
    LineTooLong {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// The bound.
        max_bytes: usize,
    },
    /// A document that would have to be tokenized in one piece.
    #[error("{path}: {place} holds a document of more than {max_bytes} bytes")]
    LongDocument {
        /// The file.
        path: PathBuf,
        /// "line N" or "the table".
        place: String,
        /// The bound.
        max_bytes: usize,
    },
    /// Text that is not JSON, or not the JSON expected.
    #[error("{path}: line {line}: {detail}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// What was expected and what was found.
        detail: String,
    },
    /// A record or a table without the text field.
    #[error("{path}: {place} has no field {field:?}; it has {available}")]
    NoField {
        /// The file.
        path: PathBuf,
        /// "line N" or "the table".
        place: String,
        /// The field asked for.
        field: String,
        /// Names (and types, of a table) that are there.
        available: String,
    },
    /// The text field holds something else.
    #[error("{path}: {place}: field {field:?} is not text but {found}")]
    NotText {
        /// The file.
        path: PathBuf,
        /// "line N" or "the table".
        place: String,
        /// The field.
        field: String,
        /// Its type.
        found: String,
    },
    /// A parquet file that cannot be read.
    #[error("{path}: not a readable parquet file: {detail}")]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The reader's words.
        detail: String,
    },
    /// A token id outside the model's vocabulary.
    #[error(
        "{source_name}: sequence {sequence}, position {position}: token id {id} is outside the vocabulary of {vocab_size}"
    )]
    TokenId {
        /// The file or the data set.
        source_name: String,
        /// Sequence, from 0.
        sequence: usize,
        /// Position, from 0.
        position: usize,
        /// The id.
        id: u32,
        /// Number of ids that the model has.
        vocab_size: usize,
    },
    /// An empty list of token ids.
    #[error("{source_name}: sequence {sequence} is empty")]
    EmptySequence {
        /// The file.
        source_name: String,
        /// Sequence, from 0.
        sequence: usize,
    },
    /// A list of more token ids than one sequence may have.
    #[error("{source_name}: sequence {sequence} is longer than {max} tokens")]
    LongSequence {
        /// The file.
        source_name: String,
        /// Sequence, from 0.
        sequence: usize,
        /// The bound.
        max: usize,
    },
    /// More sequences than are taken in.
    #[error("{source_name}: more than {max} sequences")]
    TooManySequences {
        /// The file.
        source_name: String,
        /// The bound.
        max: usize,
    },
    /// More token ids than are taken in.
    #[error("{source_name}: more than {max} token ids")]
    TooManyIds {
        /// The file.
        source_name: String,
        /// The bound.
        max: usize,
    },
    /// Too little data for what was asked.
    #[error("{source_name}: {wanted} sequence{}{} wanted, found {found}{}", if *.wanted == 1 { "" } else { "s" }, .of_length.map(|n| format!(" of {n} tokens")).unwrap_or_default(), .n_tokens.map(|n| format!(" ({n} tokens)")).unwrap_or_default())]
    TooLittle {
        /// The file, folder or data set.
        source_name: String,
        /// Sequences found.
        found: usize,
        /// Sequences wanted.
        wanted: usize,
        /// Tokens in a sequence; `None` for token-id lists.
        of_length: Option<usize>,
        /// Tokens of all the text; `None` for token-id lists.
        n_tokens: Option<usize>,
    },
    /// Text was given, and no tokenizer.
    #[error("{source_name}: text needs the model's tokenizer")]
    NoTokenizer {
        /// The file, folder or data set.
        source_name: String,
    },
    /// A length that cannot hold anything.
    #[error("a sequence of {seq_len} tokens has no room for text{}", if *with_bos { " after its BOS" } else { "" })]
    SeqLen {
        /// The length.
        seq_len: usize,
        /// The tokenizer adds a BOS.
        with_bos: bool,
    },
    /// No sequence was asked for.
    #[error("zero sequences were asked for")]
    ZeroSequences,
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl From<CheckpointError> for DataError {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Interrupted => Self::Interrupted,
            error => Self::Checkpoint(error),
        }
    }
}

/// What the options of a text are called where it is asked for, for hints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextOptions {
    /// The source.
    pub source: &'static str,
    /// The column or key of the text.
    pub field: &'static str,
    /// The number of sequences.
    pub sequences: &'static str,
    /// Tokens of each.
    pub seq_len: &'static str,
}

impl TextOptions {
    /// Those of calibration text.
    pub const CALIBRATION: Self =
        Self { source: "--calib", field: "--text-field", sequences: "--sequences", seq_len: "--seq-len" };
}

impl DataError {
    /// The remedy, if one is known, for a text with these options.
    pub fn hint(&self, options: &TextOptions) -> Option<String> {
        let TextOptions { source, field, sequences, seq_len } = options;
        let hint = match self {
            Self::Format(error) => return error.hint(),
            Self::Checkpoint(error) => return error.hint(),
            Self::BadSource { .. } | Self::UnknownKind { .. } | Self::NotFound { .. } | Self::NoFiles { .. } => {
                format!("pass {source} FILE, a folder, or hf:org/name[@revision][:glob]")
            }
            Self::InvalidUtf8 { .. } => "convert the file to UTF-8, for example with iconv".to_owned(),
            Self::LineTooLong { .. } | Self::LongDocument { .. } => "break the text into lines or documents".to_owned(),
            Self::Json { .. } => {
                ".jsonl holds one JSON object a line; .json holds lists of token ids: [[1, 2, …], …]".to_owned()
            }
            Self::NoField { .. } | Self::NotText { .. } => format!("name the text with {field}"),
            Self::Parquet { .. } => "download or write the file again".to_owned(),
            Self::TokenId { .. } => "make the ids with this model's own tokenizer".to_owned(),
            Self::EmptySequence { .. } => "leave the empty list out".to_owned(),
            Self::LongSequence { .. } => {
                "cut it: beyond its longest position a model computes nonsense (--rope-scaling extends it)".to_owned()
            }
            Self::Damaged { .. } => "the file is damaged or cut short: copy or download it again".to_owned(),
            Self::TooManyIds { .. } | Self::TooManySequences { .. } => {
                format!("take fewer with {sequences}, or split the file; `wush merge` adds statistics of its parts")
            }
            Self::TooLittle { found: 0, of_length: None, .. } => {
                "put at least one list of token ids into it: [[1, 2, …], …]".to_owned()
            }
            Self::TooLittle { found: 0, of_length: Some(_), .. } => format!("pass more text, or a smaller {seq_len}"),
            Self::TooLittle { found, of_length, .. } => {
                let shorter = of_length.map(|_| format!(", a smaller {seq_len}")).unwrap_or_default();
                format!("ask for {sequences} {found}{shorter}, or pass more data")
            }
            Self::NoTokenizer { .. } => format!("pass {source} FILE.json with token ids, or add tokenizer.json"),
            Self::SeqLen { .. } => format!("pass a larger {seq_len}"),
            Self::ZeroSequences => format!("pass {sequences} 1 or more"),
            Self::Interrupted => return None,
        };
        Some(hint)
    }
}
