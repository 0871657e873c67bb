//! How much memory a run will need, estimated before it starts, so that hours are not spent to find out.
//!
//! Mapped pages are the checkpoints' own bytes, which the system may drop and read again; anonymous memory must be there.
//! Stages follow each other, so the anonymous figure is that of the largest one and not their sum, and what the allocator keeps of
//! the stages before it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wush_checkpoint::tokenizer::TOKENIZER_FILE;
use wush_data::TextSize;
use wush_fold::FoldDtype;
use wush_model::cpu::Cpu;
use wush_model::decoder::Decoder;
use wush_model::spec::{LayerSpec, ModelSpec};

use crate::model::Model;
use crate::verify::LOGIT_BYTES;

/// Bytes of one statistic, and of one element of a transform while it is solved.
const F64_BYTES: u64 = 8;
/// Bytes of one element of a sidecar or of a widened weight.
const F32_BYTES: u64 = 4;
/// Matrices kept a head: the Grams of keys, queries, values and of the output projection; of a second pass and the Hessians of
/// Appendix C, at most three more.
const GRAMS_PER_HEAD: u64 = 7;
/// Matrices a head that the solver makes: the transforms of keys and values, and as many for an encoder with feedback.
const TRANSFORMS_PER_HEAD: u64 = 4;
/// The statistics and their copy while they are written.
const STATISTICS_COPIES: u64 = 2;
/// Blocks of logits at once: the source's, and the bundle's while it is put together from its parts.
const LOGIT_BLOCKS: u64 = 3;
/// The program before it does anything, and its share for each thread: stacks, the allocator's own pages, packed operands of a
/// product. Measured on one and two threads.
const PROGRAM_BYTES: u64 = 24 << 20;
/// See [`PROGRAM_BYTES`].
const THREAD_BYTES: u64 = 14 << 20;
/// Bytes of memory while a tokenizer is read, for one of its file. Measured: 9.5 to 10.4, on files of 3.5 to 33 MB.
const BYTES_PER_TOKENIZER_BYTE: u64 = 10;
/// Bytes of memory while text is tokenized, for one token: its text, offsets, word and ids. Measured: 300 to 310, on texts of 1 to
/// 4 bytes a token.
const BYTES_PER_TEXT_TOKEN: u64 = 310;
/// The same for one byte of text: the text, its normalized form and where each byte of that came from.
const BYTES_PER_TEXT_BYTE: u64 = 20;
/// The part of the text's memory, one in so many, that small pieces in use keep from being given back.
const TEXT_KEPT: u64 = 8;
/// What measuring a module at 2 bits holds of a token beside the forward pass: queries, keys and values transformed, quantized and
/// exact, and the outputs that come of them with their differences.
const MEASURED_COPIES: u64 = 4;
/// Rows of the output head that a thread widens at once.
const HEAD_ROWS_PER_THREAD: usize = 2048;

/// Estimated peak memory in bytes, by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryPlan {
    /// The checkpoint's shards, mapped.
    pub weights_map: u64,
    /// The bundle's shards, mapped beside them by the equivalence check.
    pub bundle_map: u64,
    /// The program and its threads.
    pub program: u64,
    /// The tokenizer and the text that it is given at once; 0 without text.
    pub text: u64,
    /// The largest layer, widened for the device.
    pub layer: u64,
    /// Activations of the sequences that run together.
    pub activations: u64,
    /// The statistics, and their copy while they are saved.
    pub statistics: u64,
    /// Logits of both models that the equivalence check compares at once, and the output head's widened rows.
    pub logits: u64,
    /// Sum of the maps: clean pages, which the system may drop.
    pub mapped: u64,
    /// Everything else, in the stage that needs most, with what is kept of earlier ones: an upper bound, seen to be up to a
    /// quarter too high.
    pub anonymous: u64,
}

/// What a run reads; 0 where a stage does not run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Lengths {
    /// Text that is tokenized at once.
    pub(crate) text: TextSize,
    /// Longest sequence of calibration, tokens.
    pub(crate) calibrate: usize,
    /// Longest sequence of the equivalence check, tokens.
    pub(crate) verify: usize,
    /// Whether calibration sums attention-aware Hessians.
    pub(crate) attention: bool,
}

impl MemoryPlan {
    /// The plan of a run over sequences of these lengths, whose bundle, if any, is stored as `dtype` says.
    pub(crate) fn new(model: &Model, lengths: Lengths, dtype: FoldDtype) -> Self {
        let weights_map = model.checkpoint.n_weight_bytes();
        let verifies = lengths.verify > 0;
        let bundle_map = if verifies { weights_map.saturating_add(widening(model, dtype)) } else { 0 };
        let mut calibrate = forward(model, lengths.calibrate);
        if lengths.attention {
            calibrate.activations = calibrate.activations.saturating_add(attention(model, lengths.calibrate));
        }
        let verify = forward(model, lengths.verify);
        let n_elements = |matrices: u64| head_elements(&model.spec, matrices);
        let statistics = match lengths.calibrate {
            0 => 0,
            // Also a sum of keys a head, which is nothing beside its matrices.
            _ => n_elements(GRAMS_PER_HEAD) * F64_BYTES * STATISTICS_COPIES,
        };
        let transforms = n_elements(TRANSFORMS_PER_HEAD) * F64_BYTES;
        let sidecar = n_elements(TRANSFORMS_PER_HEAD) * F32_BYTES;
        let logits = if verifies { logits(model, lengths.verify) } else { 0 };
        let sum = |parts: &[u64]| parts.iter().copied().fold(0, u64::saturating_add);
        let stages = [
            sum(&[calibrate.layer, calibrate.activations, statistics]),
            sum(&[statistics, transforms]),
            sum(&[verify.layer, verify.activations, logits, transforms, sidecar]),
        ];
        let program = PROGRAM_BYTES + THREAD_BYTES * rayon::current_num_threads() as u64;
        let text = text(model, lengths.text);
        let measure = if verifies { sum(&[verify.activations, measured(model, lengths.verify)]) } else { 0 };
        // What a stage's threads free they keep for their next calls: of a calibration in the check, of that in the measurement.
        let largest = stages.into_iter().max().unwrap_or(0);
        let computing = sum(&[largest, calibrate.activations, measure, text / TEXT_KEPT]);
        Self {
            weights_map,
            bundle_map,
            program,
            text,
            layer: calibrate.layer.max(verify.layer),
            activations: calibrate.activations.max(verify.activations),
            statistics,
            logits,
            mapped: weights_map.saturating_add(bundle_map),
            anonymous: program.saturating_add(computing.max(text)),
        }
    }
}

/// The tokenizer and text; nothing without text.
fn text(model: &Model, text: TextSize) -> u64 {
    if text.n_bytes == 0 {
        return 0;
    }
    let n_tokenizer = model.checkpoint.dir().join(TOKENIZER_FILE).metadata().map_or(0, |metadata| metadata.len());
    let of = |n: u64, bytes: u64| n.saturating_mul(bytes);
    of(text.n_bytes as u64, BYTES_PER_TEXT_BYTE)
        .saturating_add(of(text.n_tokens as u64, BYTES_PER_TEXT_TOKEN))
        .saturating_add(of(n_tokenizer, BYTES_PER_TOKENIZER_BYTE))
}

/// One forward pass over sequences of `seq_len` tokens.
fn forward(model: &Model, seq_len: usize) -> wush_model::decoder::Memory {
    match seq_len {
        0 => wush_model::decoder::Memory { layer: 0, activations: 0 },
        _ => Decoder::new(&model.checkpoint, &model.spec, &Cpu).memory(seq_len),
    }
}

/// The layer whose attention-aware Hessians need most.
fn attention(model: &Model, seq_len: usize) -> u64 {
    let threads = rayon::current_num_threads();
    let of_layer = |layer: &LayerSpec| wush_stats::attention_memory(&layer.attn, seq_len, threads);
    model.spec.layers.iter().map(of_layer).max().unwrap_or(0)
}

/// The widest module of sequences of `seq_len` tokens, one a thread, while it is measured.
fn measured(model: &Model, seq_len: usize) -> u64 {
    let in_work = (seq_len as u64).saturating_mul(rayon::current_num_threads() as u64);
    let of_token = |layer: &LayerSpec| {
        let attn = &layer.attn;
        MEASURED_COPIES * (attn.head_dim * (2 * attn.n_heads + 2 * attn.n_kv_heads)) as u64
    };
    let widest = model.spec.layers.iter().map(of_token).max().unwrap_or(0);
    in_work.saturating_mul(widest).saturating_mul(F32_BYTES)
}

/// Blocks of logits, and the output head: each thread widens its own part, together at most all of it.
fn logits(model: &Model, n_tokens: usize) -> u64 {
    let (vocab, hidden) = (model.spec.vocab_size as u64, model.spec.hidden_size as u64);
    let whole = vocab.saturating_mul(n_tokens as u64).saturating_mul(F32_BYTES);
    let block = whole.min(LOGIT_BYTES as u64).max(vocab * F32_BYTES);
    let rows = vocab.min((rayon::current_num_threads() * HEAD_ROWS_PER_THREAD) as u64);
    (LOGIT_BLOCKS * block).saturating_add(rows.saturating_mul(hidden).saturating_mul(F32_BYTES))
}

/// By how many bytes folded tensors grow.
fn widening(model: &Model, dtype: FoldDtype) -> u64 {
    if dtype == FoldDtype::Keep {
        return 0;
    }
    let folded = model.spec.layers.iter().flat_map(|layer| [&layer.attn.v.weight.name, &layer.attn.o.weight.name]);
    let grown = folded.filter_map(|name| model.checkpoint.tensor(name).ok()).map(|tensor| {
        let elements: usize = tensor.shape.iter().product();
        (elements as u64 * F32_BYTES).saturating_sub(tensor.bytes.len() as u64)
    });
    grown.sum()
}

/// Elements of `matrices` head matrices in every KV head of every layer.
fn head_elements(spec: &ModelSpec, matrices: u64) -> u64 {
    let layer = |layer: &LayerSpec| {
        let (heads, d) = (layer.attn.n_kv_heads as u64, layer.attn.head_dim as u64);
        heads * matrices * d * d
    };
    spec.layers.iter().map(layer).sum()
}
