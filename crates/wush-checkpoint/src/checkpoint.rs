//! A checkpoint directory: `config.json`, the shards and their index, checked against each other before anything is used.
//!
//! Afterwards every tensor name leads to exactly one range of one shard. Refused here is what can be seen without
//! knowing the architecture (see `refusals.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;
use wush_format::FormatError;
use wush_format::bundle::WUSH_DIR;
use wush_format::index::{WeightMap, load_index};
use wush_format::json::{read_bounded, shown};
use wush_format::tensor_file::{TensorFile, TensorInfo, TensorView};

use crate::files::{self, Home};
use crate::{CheckpointError, Result, refusals};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
/// Longest `config.json`, in bytes; real ones have some thousand.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Most shards; each is an open map. The largest public checkpoints have some hundred.
const MAX_SHARDS: usize = 10_000;

/// One weight file of a checkpoint.
#[derive(Debug)]
pub struct Shard {
    /// Its name in the checkpoint's directory.
    pub file_name: String,
    /// The open file.
    pub file: TensorFile,
}

/// An open checkpoint. Shards are memory-mapped: nothing but their headers is read before it is asked for.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: Value,
    shards: Vec<Shard>,
    /// Tensor name to shard number.
    tensors: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Opens a directory with `config.json` and either `model.safetensors.index.json` and its shards, or
    /// `model*.safetensors`. Every entry of the index is checked against the shard, and every tensor against the index.
    ///
    /// # Errors
    /// `NotACheckpoint`, `Unsupported` (adapter, quantized weights, pickle, GGUF), `Index`, `DuplicateTensor`,
    /// `Escapes`, `Format`: each names the file, key or tensor.
    pub fn open(dir: &Path) -> Result<Self> {
        if !dir.is_dir() {
            return Err(refusals::not_a_directory(dir));
        }
        let names = files::top_level(dir)?;
        refusals::refuse_adapter(dir, &names)?;
        let (shard_names, index) = find_shards(dir, &names)?;
        let config = read_config(dir, &names)?;
        refusals::refuse_quantized_config(&dir.join(CONFIG), &config)?;
        let shards = open_shards(dir, shard_names)?;
        let tensors = join_shards(dir, &shards)?;
        if let Some(index) = index {
            check_index(&dir.join(INDEX), &index, &shards, &tensors)?;
        }
        Ok(Self { dir: dir.to_owned(), config, shards, tensors })
    }

    /// The directory, as it was given.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `config.json`, always an object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The shards, sorted by name.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// `MissingTensor`.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let Some(&shard) = self.tensors.get(name) else {
            return Err(CheckpointError::MissingTensor { dir: self.dir.clone(), name: name.to_owned() });
        };
        Ok(self.shards[shard].file.tensor(name)?)
    }

    /// Lets the system take back the memory of a tensor's pages (see [`TensorFile::release`]): after a layer was widened,
    /// its stored form is not needed until the next pass.
    pub fn release(&self, name: &str) {
        if let Some((shard, info)) = self.locate(name) {
            self.shards[shard].file.release(info.range.clone());
        }
    }

    /// The number of a tensor's shard in [`Checkpoint::shards`], and its place there; none when there is no such tensor.
    pub fn locate(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        let shard = *self.tensors.get(name)?;
        Some((shard, self.shards[shard].file.tensors().get(name)?))
    }

    /// All tensor names, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors together.
    pub fn n_weight_bytes(&self) -> u64 {
        let bytes_of = |shard: &Shard| (shard.file.bytes().len() - shard.file.header_bytes().len()) as u64;
        self.shards.iter().map(bytes_of).sum()
    }

    /// Everything that is no weights: relative paths with forward slashes, sorted, at any depth, without the folders
    /// `wush/`, `.git/` and `.cache/` at the top, and without [`Checkpoint::other_weights`].
    ///
    /// # Errors
    /// `Escapes` for a link that leads out of the directory (blobs of the same repository in the hub's cache do not),
    /// `Unsupported` for a linked folder, a special file or a name that is not UTF-8, `Format` for what cannot be read.
    pub fn other_files(&self) -> Result<Vec<String>> {
        let mut paths = self.files_beside_shards()?;
        paths.retain(|path| !is_weights_name(path));
        Ok(paths)
    }

    /// Further copies of the weights beside the shards (`consolidated.safetensors`, `pytorch_model.bin`, …), sorted. A fold
    /// would leave them as they are, and which copy a loader takes is its own choice: they do not belong in a bundle.
    ///
    /// # Errors
    /// As [`Checkpoint::other_files`].
    pub fn other_weights(&self) -> Result<Vec<String>> {
        let mut paths = self.files_beside_shards()?;
        paths.retain(|path| is_weights_name(path));
        Ok(paths)
    }

    fn files_beside_shards(&self) -> Result<Vec<String>> {
        let mut paths = files::all_files(&self.dir)?;
        paths.retain(|path| self.shards.binary_search_by(|shard| shard.file_name.as_str().cmp(path)).is_err());
        Ok(paths)
    }

    /// Whether `dir` looks like a checkpoint: it has `config.json` and the weights or their index. Says nothing of whether
    /// it can be used.
    pub fn is_at(dir: &Path) -> bool {
        let is_weights = |name: &String| name == INDEX || is_shard_name(name);
        dir.join(CONFIG).is_file() && files::top_level(dir).is_ok_and(|names| names.iter().any(is_weights))
    }

    /// Whether the directory is a bundle of wush, or what is left of one: it has a folder `wush`.
    pub fn is_bundle(&self) -> bool {
        self.dir.join(WUSH_DIR).is_dir()
    }
}

/// The names of the shards, sorted, and the index when there is one.
fn find_shards(dir: &Path, names: &[String]) -> Result<(Vec<String>, Option<WeightMap>)> {
    let on_disk: Vec<String> = names.iter().filter(|name| is_shard_name(name)).cloned().collect();
    if !names.iter().any(|name| name == INDEX) {
        if on_disk.is_empty() {
            return Err(refusals::no_weights(dir, names));
        }
        check_series(dir, &on_disk)?;
        return Ok((on_disk, None));
    }
    let path = dir.join(INDEX);
    let index = load_index(&path)?;
    let listed: BTreeSet<&String> = index.values().collect();
    let refuse = |detail| Err(CheckpointError::Index { path: path.clone(), detail });
    if let Some(missing) = listed.iter().find(|name| names.binary_search(name).is_err()) {
        return refuse(format!("shard {} is missing from the directory", shown(missing)));
    }
    // Which of the two sets a loader takes is its own choice, so neither can be left unfolded.
    if let Some(extra) = on_disk.iter().find(|name| !listed.contains(name)) {
        return refuse(format!("{} is beside the shards, but the index does not list it", shown(extra)));
    }
    let listed = listed.into_iter().cloned().collect();
    Ok((listed, Some(index)))
}

/// Whether a file's name says that it is a further copy of the model's weights, in whatever format: any other safetensors
/// file at the top, and at any depth the names and endings under which hubs keep original weights.
fn is_weights_name(path: &str) -> bool {
    const ENDINGS: [&str; 5] = [".pth", ".gguf", ".h5", ".msgpack", ".onnx"];
    const NAMES: [&str; 2] = ["consolidated", "pytorch_model"];
    let name = path.rsplit('/').next().unwrap_or(path);
    (name == path && name.ends_with(".safetensors"))
        || ENDINGS.iter().any(|ending| name.ends_with(ending))
        || (NAMES.iter().any(|start| name.starts_with(start)) && !name.ends_with(".json"))
}

fn is_shard_name(name: &str) -> bool {
    name.starts_with("model") && name.ends_with(".safetensors")
}

/// Without an index, names of the form `model-00002-of-00005.safetensors` say themselves what is missing.
fn check_series(dir: &Path, names: &[String]) -> Result<()> {
    for name in names {
        let Some(total) = series_total(name) else { continue };
        if total != names.len() {
            return Err(CheckpointError::NotACheckpoint {
                dir: dir.to_owned(),
                detail: format!("{name} is one of {total} shards, found {}, and there is no index", names.len()),
                hint: "download the missing shards and model.safetensors.index.json",
            });
        }
    }
    Ok(())
}

/// 5 of `model-00002-of-00005.safetensors`.
fn series_total(name: &str) -> Option<usize> {
    name.strip_suffix(".safetensors")?.rsplit_once("-of-")?.1.parse().ok()
}

fn read_config(dir: &Path, names: &[String]) -> Result<Value> {
    if names.binary_search_by(|name| name.as_str().cmp(CONFIG)).is_err() {
        return Err(CheckpointError::NotACheckpoint {
            dir: dir.to_owned(),
            detail: "it has no config.json".to_owned(),
            hint: "pass the directory that holds config.json and the .safetensors files",
        });
    }
    Home::new(dir)?.check_file(CONFIG)?;
    let path = dir.join(CONFIG);
    let invalid = |detail| FormatError::Invalid { path: path.clone(), kind: CONFIG, detail };
    let bytes = read_bounded(&path, CONFIG, MAX_CONFIG_BYTES)?;
    let config: Value = serde_json::from_slice(&bytes).map_err(|e| invalid(e.to_string()))?;
    if !config.is_object() {
        return Err(invalid("expected a JSON object".to_owned()).into());
    }
    Ok(config)
}

fn open_shards(dir: &Path, names: Vec<String>) -> Result<Vec<Shard>> {
    if names.len() > MAX_SHARDS {
        return Err(CheckpointError::NotACheckpoint {
            dir: dir.to_owned(),
            detail: format!("{} shards, at most {MAX_SHARDS} can be open", names.len()),
            hint: "save it again with larger shards",
        });
    }
    let home = Home::new(dir)?;
    let open = |file_name: String| {
        home.check_file(&file_name)?;
        let file = TensorFile::open(&dir.join(&file_name))?;
        refusals::refuse_quantized_tensors(&file)?;
        Ok(Shard { file_name, file })
    };
    names.into_iter().map(open).collect()
}

/// Tensor name to shard number.
fn join_shards(dir: &Path, shards: &[Shard]) -> Result<BTreeMap<String, usize>> {
    let mut tensors = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        for name in shard.file.tensors().keys() {
            if let Some(first) = tensors.insert(name.clone(), number) {
                return Err(CheckpointError::DuplicateTensor {
                    dir: dir.to_owned(),
                    name: name.clone(),
                    first: shards[first].file_name.clone(),
                    second: shard.file_name.clone(),
                });
            }
        }
    }
    Ok(tensors)
}

/// The index says of every tensor what the shards say, and the other way round.
fn check_index(path: &Path, index: &WeightMap, shards: &[Shard], tensors: &BTreeMap<String, usize>) -> Result<()> {
    let refuse = |detail| Err(CheckpointError::Index { path: path.to_owned(), detail });
    for (name, listed) in index {
        match tensors.get(name).map(|&number| &shards[number].file_name) {
            Some(found) if found == listed => {}
            Some(found) => return refuse(format!("tensor {}: expected in {listed}, found in {found}", shown(name))),
            None => return refuse(format!("tensor {}: expected in {listed}, found in no shard", shown(name))),
        }
    }
    match tensors.iter().find(|(name, _)| !index.contains_key(*name)) {
        Some((name, &number)) => {
            refuse(format!("tensor {} of {} is not listed", shown(name), shards[number].file_name))
        }
        None => Ok(()),
    }
}
