//! A sequence's cache as a safetensors file: written whole or not at all, with the same bytes for the same content, and read
//! as hostile input.
//!
//! `layers.{i}.{sink,page,recent}_{keys,values}`, each `[n_kv, tokens, d]` in f32 or bf16, or packed `[n_kv, tokens, n_bytes]`
//! as U8 (`wush_quant::Layout`); tensors of no token are left out. Metadata: `format`, `version`, `config` (JSON of what the
//! numbers depend on), `layers` (JSON: tokens held, quantized, let go) and `content_hash` (`wush_format::seal`).

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use wush_format::FormatError;
use wush_format::hash::Sha;
use wush_format::seal::{check_seal, content_hash, seal};
use wush_format::tensor_file::{Dtype, NewTensor, TensorFile, write_tensor_file};
use wush_format::text::printable;
use wush_quant::MAX_MAGNITUDE;

use crate::config::{CacheConfig, FullDtype, LayerConfig};
use crate::kernels::first_beyond;
use crate::layer::{Head, Layer, Page};
use crate::plan::{LayerPlan, Pair};
use crate::rows::{Full, Rows, Store};
use crate::{KvCache, Result, RuntimeError, SequenceId, Windows};

/// Version of the file's layout.
pub const CACHE_VERSION: u32 = 2;
/// `format` in its metadata.
const FORMAT: &str = "wush-kv-cache";
/// Most tokens of a sequence: far above every model, and sums with a window stay within 64 bits.
const MAX_TOKENS: usize = 1 << 40;
const ROLES: [&str; 2] = ["keys", "values"];

/// What the stored numbers depend on.
#[derive(Serialize)]
struct Saved<'a> {
    model_hash: Option<Sha>,
    key_transforms: Option<Sha>,
    rope: Option<&'a str>,
    feedback: FeedbackHashes,
    full: FullDtype,
    windows: Windows,
    page_tokens: usize,
    layers: &'a [LayerConfig],
}

/// What the encoder was given, over all layers; none where it was given nothing that it uses.
#[derive(Serialize)]
struct FeedbackHashes {
    keys: Option<Sha>,
    values: Option<Sha>,
}

/// Tokens of one layer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Counts {
    len: usize,
    n_packed: usize,
    n_freed: usize,
}

impl Counts {
    fn of(layer: &Layer) -> Self {
        Self { len: layer.len, n_packed: layer.n_packed, n_freed: layer.n_freed }
    }

    /// Tokens of each tensor's part.
    fn parts(&self, sink: usize) -> [(&'static str, usize); 3] {
        let n_sink = self.len.min(sink);
        [("sink", n_sink), ("page", self.n_packed - self.n_freed), ("recent", self.len - n_sink - self.n_packed)]
    }
}

impl KvCache {
    /// Writes one sequence.
    ///
    /// # Errors
    /// `NoSequence`; `Uneven` in the middle of a forward pass; `Format` when the file cannot be written.
    pub fn save(&self, sequence: SequenceId, path: &Path) -> Result<()> {
        let layers = self.layers(sequence)?;
        let expected = layers.first().map_or(0, |layer| layer.len);
        if let Some(layer) = layers.iter().position(|layer| layer.len != expected) {
            return Err(RuntimeError::Uneven { sequence, layer, expected, found: layers[layer].len });
        }
        let mut tensors = BTreeMap::new();
        for (plan, layer) in self.plans.iter().zip(layers) {
            put_layer(plan, layer, &mut tensors);
        }
        let counts: Vec<_> = layers.iter().map(Counts::of).collect();
        let mut metadata = BTreeMap::from([
            ("format".to_owned(), FORMAT.to_owned()),
            ("version".to_owned(), CACHE_VERSION.to_string()),
            ("config".to_owned(), self.saved().to_string()),
            ("layers".to_owned(), serde_json::json!(counts).to_string()),
        ]);
        seal(&tensors, &mut metadata);
        write_tensor_file(path, &tensors, &metadata)?;
        Ok(())
    }

    /// Reads a saved sequence as a new one. Only `rewind` may differ from the cache that saved it.
    ///
    /// # Errors
    /// `Format` for a file that is none, damaged, or of another version; `OtherConfig`. Nothing has changed then.
    pub fn load(&mut self, path: &Path) -> Result<SequenceId> {
        let file = TensorFile::open(path)?;
        check_format(&file)?;
        check_seal(&file, FORMAT)?;
        check_config(&file, &self.saved())?;
        let counts: Vec<Counts> = json(&file, "layers")?;
        if counts.len() != self.plans.len() {
            return Err(invalid(&file, format!("expected {} layers, found {}", self.plans.len(), counts.len())));
        }
        if let Some(layer) = counts.iter().position(|layer| layer.len != counts[0].len) {
            let (found, expected) = (counts[layer].len, counts[0].len);
            return Err(invalid(&file, format!("layer {layer} holds {found} tokens, layer 0 holds {expected}")));
        }
        let layers = self.plans.iter().zip(&counts).map(|(plan, counts)| read_layer(&file, plan, counts));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        check_tensors(&file, &counts, self.config.windows.sink)?;
        Ok(self.insert(layers))
    }

    fn saved(&self) -> Value {
        let &CacheConfig { ref layers, windows, full, model_hash, key_transforms, ref rope, page_tokens, rewind: _ } =
            &self.config;
        let feedback = FeedbackHashes { keys: self.feedback_hash(0), values: self.feedback_hash(1) };
        let rope = rope.as_deref();
        serde_json::json!(Saved { model_hash, key_transforms, rope, feedback, full, windows, page_tokens, layers })
    }

    /// Over the feedback of keys (0) or values (1) of every layer that packs them with some.
    fn feedback_hash(&self, role: usize) -> Option<Sha> {
        let of_layer = |plan: &LayerPlan| {
            let is_packed = matches!(plan.stores.each()[role], Store::Packed(_));
            let hash = plan.feedback_hashes.each()[role].filter(|_| is_packed)?;
            Some((plan.layer.to_string(), hash.0))
        };
        let hashes: Vec<(String, [u8; 32])> = self.plans.iter().filter_map(of_layer).collect();
        (!hashes.is_empty()).then(|| content_hash(hashes.iter().map(|(layer, hash)| (layer.as_str(), hash.as_slice()))))
    }
}

fn tensor_name(layer: usize, part: &str, role: &str) -> String {
    format!("layers.{layer}.{part}_{role}")
}

fn put_layer(plan: &LayerPlan, layer: &Layer, tensors: &mut BTreeMap<String, NewTensor>) {
    let parts = Counts::of(layer).parts(plan.windows.sink);
    for (part, n_tokens) in parts.into_iter().filter(|(_, n_tokens)| *n_tokens > 0) {
        for (role, name) in ROLES.into_iter().enumerate() {
            let mut bytes = Vec::new();
            for head in &layer.heads {
                match part {
                    "sink" => put_window(plan, head.sink.each()[role], n_tokens, &mut bytes),
                    "page" => put_pages(plan, head, role, n_tokens, &mut bytes),
                    _ => put_window(plan, head.recent.each()[role], n_tokens, &mut bytes),
                }
            }
            let (dtype, width) = stored_as(plan, part, role);
            let shape = vec![layer.heads.len(), n_tokens, width];
            tensors.insert(tensor_name(plan.layer, part, name), NewTensor { dtype, shape, bytes });
        }
    }
}

fn put_window(plan: &LayerPlan, rows: &Full, n_tokens: usize, bytes: &mut Vec<u8>) {
    rows.to_le_bytes(n_tokens * plan.head_dim(), bytes);
}

fn put_pages(plan: &LayerPlan, head: &Head, role: usize, n_tokens: usize, bytes: &mut Vec<u8>) {
    let row_len = plan.stores.each()[role].row_len(plan.head_dim());
    for (index, page) in head.pages.iter().enumerate() {
        let n = (n_tokens - index * plan.page_tokens).min(plan.page_tokens) * row_len;
        match page.each()[role] {
            Rows::Full(rows) => rows.to_le_bytes(n, bytes),
            Rows::Packed(packed) => bytes.extend_from_slice(&packed[..n]),
        }
    }
}

/// Element type and row length of a tensor.
fn stored_as(plan: &LayerPlan, part: &str, role: usize) -> (Dtype, usize) {
    match (part, plan.stores.each()[role], plan.full) {
        ("page", Store::Packed(codec), _) => (Dtype::U8, codec.layout().n_bytes()),
        (_, _, FullDtype::F32) => (Dtype::F32, plan.head_dim()),
        (_, _, FullDtype::Bf16) => (Dtype::BF16, plan.head_dim()),
    }
}

fn check_format(file: &TensorFile) -> Result<()> {
    let found = file.metadata().get("format").map_or("", String::as_str);
    if found != FORMAT {
        return Err(invalid(file, format!("expected the metadata entry format = {FORMAT}, found {found:?}")));
    }
    let found = file.meta("version")?;
    if found != CACHE_VERSION.to_string() {
        let (path, found) = (file.path().to_owned(), format!("{found:?}"));
        return Err(FormatError::Version { path, kind: FORMAT, found, expected: CACHE_VERSION }.into());
    }
    Ok(())
}

fn check_config(file: &TensorFile, expected: &Value) -> Result<()> {
    let found: Value = json(file, "config")?;
    match first_difference("", expected, &found) {
        None => Ok(()),
        Some((field, expected, found)) => {
            Err(RuntimeError::OtherConfig { path: file.path().to_owned(), field, expected, found })
        }
    }
}

/// Path of the first place where two JSON values differ, and both values there.
fn first_difference(at: &str, expected: &Value, found: &Value) -> Option<(String, String, String)> {
    match (expected, found) {
        (Value::Object(a), Value::Object(b)) if a.keys().eq(b.keys()) => {
            a.iter().zip(b.values()).find_map(|((key, a), b)| first_difference(&format!("{at}.{key}"), a, b))
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().find_map(|(i, (a, b))| first_difference(&format!("{at}[{i}]"), a, b))
        }
        (a, b) if a == b => None,
        (a, b) => Some((at.trim_start_matches('.').to_owned(), shortened(a), shortened(b))),
    }
}

/// JSON text of a value, cut where a message would become a page.
fn shortened(value: &Value) -> String {
    const MAX_CHARS: usize = 120;
    let text = printable(&value.to_string()).into_owned();
    match text.char_indices().nth(MAX_CHARS) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

fn read_layer(file: &TensorFile, plan: &LayerPlan, counts: &Counts) -> Result<Layer> {
    let Counts { len, n_packed, n_freed } = *counts;
    let n_sink = len.min(plan.windows.sink);
    let fits = len <= MAX_TOKENS && n_packed <= len - n_sink && n_freed <= n_packed;
    let mut layer = Layer { len, n_packed, n_freed, heads: Vec::new() };
    if !fits || !n_freed.is_multiple_of(plan.page_tokens) || layer.missing_after(plan, len).is_some() {
        return Err(invalid(file, format!("layer {}: {counts:?} contradict each other", plan.layer)));
    }
    let tensors = |part, n_tokens| -> Result<Pair<&[u8]>> {
        Ok(Pair::new(tensor(file, plan, (part, 0), n_tokens)?, tensor(file, plan, (part, 1), n_tokens)?))
    };
    let sink = tensors("sink", n_sink)?;
    let pages = tensors("page", n_packed - n_freed)?;
    let recent = tensors("recent", len - n_sink - n_packed)?;
    for head in 0..plan.config.n_kv_heads {
        layer.heads.push(Head {
            sink: Arc::new(read_window(file, plan, &sink, head)?),
            pages: read_pages(file, plan, &pages, head)?,
            recent: read_window(file, plan, &recent, head)?,
        });
    }
    Ok(layer)
}

/// Bytes of `layers.{i}.{part}_{role}`, `[n_kv, n_tokens, row]`; none for no token.
fn tensor<'a>(
    file: &'a TensorFile,
    plan: &LayerPlan,
    (part, role): (&str, usize),
    n_tokens: usize,
) -> Result<&'a [u8]> {
    if n_tokens == 0 {
        return Ok(&[]);
    }
    let name = tensor_name(plan.layer, part, ROLES[role]);
    let view = file.tensor(&name)?;
    let (dtype, row) = stored_as(plan, part, role);
    let shape = [plan.config.n_kv_heads, n_tokens, row];
    if view.dtype == dtype && view.shape == shape {
        return Ok(view.bytes);
    }
    let (path, expected, found) =
        (file.path().to_owned(), format!("{dtype} {shape:?}"), format!("{} {:?}", view.dtype, view.shape));
    Err(FormatError::WrongTensor { path, name, expected, found }.into())
}

/// The bytes of one head in a tensor of all.
fn of_head<'a>(plan: &LayerPlan, bytes: &'a [u8], head: usize) -> &'a [u8] {
    let size = bytes.len() / plan.config.n_kv_heads;
    &bytes[head * size..][..size]
}

fn read_window(file: &TensorFile, plan: &LayerPlan, tensors: &Pair<&[u8]>, head: usize) -> Result<Pair<Full>> {
    let mut rows = Pair::new(Full::new(plan.full), Full::new(plan.full));
    for (rows, bytes) in rows.each_mut().into_iter().zip(tensors.each()) {
        rows.extend_from_le_bytes(of_head(plan, bytes, head));
        check_finite(file, plan, rows)?;
    }
    Ok(rows)
}

fn read_pages(file: &TensorFile, plan: &LayerPlan, tensors: &Pair<&[u8]>, head: usize) -> Result<VecDeque<Arc<Page>>> {
    let d = plan.head_dim();
    let mut pages = VecDeque::new();
    for (role, (bytes, store)) in tensors.each().into_iter().zip(plan.stores.each()).enumerate() {
        let (dtype, row_len) = stored_as(plan, "page", role);
        let page_bytes = plan.page_tokens * row_len * dtype.bitsize() / 8;
        for (index, bytes) in of_head(plan, bytes, head).chunks(page_bytes).enumerate() {
            if role == 0 {
                let [keys, values] = plan.stores.each().map(|store| Rows::empty(store, d, plan.page_tokens));
                pages.push_back(Pair::new(keys, values));
            }
            match pages[index].each_mut()[role] {
                Rows::Full(rows) => {
                    rows.extend_from_le_bytes(bytes);
                    check_finite(file, plan, rows)?;
                }
                Rows::Packed(packed) => {
                    check_packed(file, plan, store, bytes)?;
                    packed.extend_from_slice(bytes);
                }
            }
        }
    }
    Ok(pages.into_iter().map(Arc::new).collect())
}

/// What an append would have refused is not loaded.
fn check_finite(file: &TensorFile, plan: &LayerPlan, rows: &Full) -> Result<()> {
    let mut scratch = Vec::new();
    match first_beyond(rows.read(0..rows.len(), &mut scratch), MAX_MAGNITUDE) {
        None => Ok(()),
        Some(_) => Err(invalid(file, format!("layer {}: a number that cannot be cached", plan.layer))),
    }
}

/// Every scale and zero point is such that the numbers are finite.
fn check_packed(file: &TensorFile, plan: &LayerPlan, store: &Store, bytes: &[u8]) -> Result<()> {
    let Store::Packed(codec) = store else { return Ok(()) };
    let mut unpacked = vec![0.0; bytes.len() / codec.layout().n_bytes() * plan.head_dim()];
    codec.unpack(bytes, &mut unpacked).map_err(|source| RuntimeError::Quant { layer: plan.layer, source })?;
    match first_beyond(&unpacked, f32::MAX) {
        None => Ok(()),
        Some(_) => Err(invalid(file, format!("layer {}: a packed number is not finite", plan.layer))),
    }
}

/// Refuses tensors that no layer asks for.
fn check_tensors(file: &TensorFile, layers: &[Counts], sink: usize) -> Result<()> {
    let expected: usize =
        layers.iter().map(|counts| counts.parts(sink).iter().filter(|(_, n)| *n > 0).count() * ROLES.len()).sum();
    match file.tensors().len() {
        found if found == expected => Ok(()),
        found => Err(invalid(file, format!("expected {expected} tensors, found {found}"))),
    }
}

fn json<T: serde::de::DeserializeOwned>(file: &TensorFile, key: &str) -> Result<T> {
    serde_json::from_str(file.meta(key)?).map_err(|e| invalid(file, format!("metadata entry {key}: {e}")))
}

fn invalid(file: &TensorFile, detail: String) -> RuntimeError {
    FormatError::invalid(file.path(), FORMAT, detail).into()
}
