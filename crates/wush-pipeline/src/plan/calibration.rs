//! The calibration text of a run: found, read and cut into sequences, and described as its statistics will state it.

use std::collections::BTreeMap;

use wush_checkpoint::tokenizer::{TextTokenizer, eos_token_id};
use wush_data::{PackOptions, Packed, TextOptions};
use wush_format::hash::{Sha, sequence_hash};
use wush_format::text::is_plain;
use wush_stats::StatsInfo;

use crate::device::Device;
use crate::model::Model;
use crate::plan::{DEFAULT_EVAL_SEQ_LEN, DEFAULT_SEQ_LEN, DEFAULT_SEQUENCES, DEFAULT_TEXT_FIELD};
use crate::request::{ByteSize, CalibrationRequest, Environment, Gather, HessianChoice, SecondPassChoice};
use crate::{PipelineError, Result};

/// The sequences of a run and what its statistics will say of themselves.
#[derive(Debug, Clone)]
pub struct CalibrationPlan {
    /// Token ids, in order.
    pub sequences: Vec<Vec<u32>>,
    /// The statistics' description once all sequences are in, before a second pass.
    pub info: StatsInfo,
    /// Whether they were cut from text, and not given as token ids.
    pub(crate) is_text: bool,
    /// Whether the text is read a second time.
    pub second_pass: bool,
    /// The most that may be taken of a GPU; all that is free when none.
    pub max_gpu_memory: Option<ByteSize>,
}

impl CalibrationPlan {
    /// Describes the statistics of `sequences` on `model`.
    ///
    /// # Errors
    /// `SameSequence`: what is summed twice weighs double, and `merge` and `inspect` refuse it, too; `Io` when the weights
    /// cannot be hashed.
    pub fn new(model: &Model, packed: Packed, gather: Gather) -> Result<Self> {
        let sequence_hashes: Vec<Sha> = packed.sequences.iter().map(|ids| sequence_hash(ids)).collect();
        check_distinct(&sequence_hashes, &packed.source)?;
        let attn = &model.spec.layers[0].attn;
        let info = StatsInfo {
            format_version: wush_stats::STATS_VERSION,
            tool: crate::TOOL.to_owned(),
            model_id: model.id.clone(),
            model_hash: model.hash_weights()?,
            family: model.spec.family.to_owned(),
            n_heads: attn.n_heads,
            n_kv_heads: attn.n_kv_heads,
            head_dim: attn.head_dim,
            positions: n_tokens(&packed.sequences),
            max_seq_len: longest(&packed.sequences) as u64,
            source: packed.source,
            rope_scaling: model.rope_scaling.map(|scaling| scaling.to_string()),
            shift_invariant: model.spec.is_shift_invariant(),
            attention_hessians: gather.hessian == HessianChoice::Attention,
            second_pass: false,
            device: model.device.name().to_owned(),
            compute: model.device.compute().to_owned(),
            sequence_hashes,
        };
        let second_pass = gather.second_pass == SecondPassChoice::Oscar;
        let is_text = packed.text.n_bytes > 0;
        Ok(Self { sequences: packed.sequences, info, is_text, second_pass, max_gpu_memory: None })
    }

    /// The same within so much of a GPU's memory.
    ///
    /// # Errors
    /// `Option` where the CPU was asked for. Where there is merely no GPU, none of its memory is taken.
    pub(crate) fn within(self, device: &Device, max_gpu_memory: Option<ByteSize>) -> Result<Self> {
        match (device, max_gpu_memory) {
            (Device::Cpu { because: None }, Some(size)) => Err(PipelineError::Option {
                option: "--max-gpu-memory",
                expected: "none with --device cpu".to_owned(),
                found: size.to_string(),
            }),
            _ => Ok(Self { max_gpu_memory, ..self }),
        }
    }

    /// The description of the finished statistics.
    pub(crate) fn finished_info(&self) -> StatsInfo {
        StatsInfo { second_pass: self.second_pass, ..self.info.clone() }
    }
}

/// What sequences are read for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose {
    /// Statistics, and the equivalence check on the first of them: as many and as long as was asked for.
    Statistics,
    /// Scoring: as many as was asked for, of [`DEFAULT_EVAL_SEQ_LEN`] tokens unless another length was.
    Score,
    /// Statistics for a comparison at `seq_len` tokens: so long unless another length was asked for.
    Comparison { seq_len: usize },
    /// The equivalence check alone: at most `sequences`, of `seq_len` tokens unless another length was asked for.
    Check { sequences: usize, seq_len: usize },
}

impl Purpose {
    fn options(self) -> &'static TextOptions {
        const SCORED: TextOptions =
            TextOptions { source: "--text", sequences: "--windows", ..TextOptions::CALIBRATION };
        const COMPARED: TextOptions =
            TextOptions { seq_len: "--calib-seq-len", field: "--calib-text-field", ..TextOptions::CALIBRATION };
        match self {
            Self::Score => &SCORED,
            Self::Comparison { .. } => &COMPARED,
            Self::Statistics | Self::Check { .. } => &TextOptions::CALIBRATION,
        }
    }
}

/// Refuses sequences of the same tokens.
fn check_distinct(hashes: &[Sha], source_name: &str) -> Result<()> {
    let mut seen = BTreeMap::new();
    for (second, hash) in hashes.iter().enumerate() {
        if let Some(first) = seen.insert(hash, second) {
            return Err(PipelineError::SameSequence { source_name: source_name.to_owned(), first, second });
        }
    }
    Ok(())
}

/// Reads and cuts the calibration text of `model`.
pub(crate) fn load_sequences(
    model: &Model,
    request: &CalibrationRequest,
    purpose: Purpose,
    env: &Environment<'_>,
) -> Result<Packed> {
    let names = purpose.options();
    if request.sequences == Some(0) {
        let (expected, found) = ("at least 1".to_owned(), "0".to_owned());
        return Err(PipelineError::Option { option: names.sequences, expected, found });
    }
    let is_text = !request.source.is_token_ids();
    if !is_text {
        check_of_token_ids(request, names)?;
    } else if !request.source.has_fields() && request.text_field != DEFAULT_TEXT_FIELD {
        let (expected, found) = ("none with plain text, which has no fields".to_owned(), request.text_field.clone());
        return Err(PipelineError::Option { option: names.field, expected, found });
    }
    // How many of text, how many in any case, and how long.
    let (of_text, at_most, default_len) = match purpose {
        Purpose::Statistics => (Some(DEFAULT_SEQUENCES), None, DEFAULT_SEQ_LEN),
        Purpose::Score => (None, None, DEFAULT_EVAL_SEQ_LEN),
        Purpose::Comparison { seq_len } => (Some(DEFAULT_SEQUENCES), None, seq_len),
        Purpose::Check { sequences, seq_len } => (None, Some(sequences), seq_len),
    };
    let tokenizer = if is_text { Some(TextTokenizer::open(model.dir())?) } else { None };
    let options = PackOptions {
        seq_len: if is_text {
            seq_len(model, request, names.seq_len, default_len)?
        } else {
            model.spec.max_position_embeddings
        },
        // A file of token ids may hold fewer lists than the cap: it is cut below.
        sequences: if is_text { at_most.or(request.sequences).or(of_text) } else { request.sequences },
        text_field: request.text_field.clone(),
        bos: tokenizer.as_ref().and_then(TextTokenizer::bos),
        eos: if is_text { eos_token_id(&model.checkpoint)? } else { None },
        vocab_size: model.spec.vocab_size,
    };
    let failed = |source| PipelineError::Data { source, options: names };
    let mut packed =
        wush_data::load(&request.source, tokenizer.as_ref(), &options, &env.hub, env.monitor).map_err(failed)?;
    packed.sequences.truncate(at_most.unwrap_or(usize::MAX));
    // No manifest may state such a name, and the statistics would carry it there.
    if !is_plain(&packed.source) {
        let (expected, found) = ("a name without control characters".to_owned(), format!("{:?}", packed.source));
        return Err(PipelineError::Option { option: names.source, expected, found });
    }
    Ok(packed)
}

/// Lists of token ids are used as they are: there is nothing to cut, and no field to name.
fn check_of_token_ids(request: &CalibrationRequest, names: &TextOptions) -> Result<()> {
    let field = Some(&request.text_field).filter(|field| *field != DEFAULT_TEXT_FIELD);
    let given = [(names.seq_len, request.seq_len.map(|n| n.to_string())), (names.field, field.cloned())];
    match given.into_iter().find_map(|(option, found)| Some((option, found?))) {
        Some((option, found)) => {
            let expected = "none with token-id lists, which are used as they are".to_owned();
            Err(PipelineError::Option { option, expected, found })
        }
        None => Ok(()),
    }
}

/// The length that was asked for by `option`, which the model must reach; else `default_len`, capped by the model.
fn seq_len(model: &Model, request: &CalibrationRequest, option: &'static str, default_len: usize) -> Result<usize> {
    let longest = model.spec.max_position_embeddings;
    match request.seq_len {
        None => Ok(default_len.min(longest)),
        Some(n) if (2..=longest).contains(&n) => Ok(n),
        Some(n) => Err(PipelineError::Option {
            option,
            expected: format!("2 to {longest}, the model's longest position (--rope-scaling extends it)"),
            found: n.to_string(),
        }),
    }
}

/// Tokens of all sequences.
pub(crate) fn n_tokens(sequences: &[Vec<u32>]) -> u64 {
    sequences.iter().map(|ids| ids.len() as u64).sum()
}

/// Tokens of the longest sequence.
pub(crate) fn longest(sequences: &[Vec<u32>]) -> usize {
    sequences.iter().map(Vec::len).max().unwrap_or(0)
}
