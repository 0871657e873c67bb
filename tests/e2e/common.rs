//! What the end-to-end tests share: the program, a small calibration, and schema checks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use serde_json::Value;
use wush_tests::{Program, Scratch, fixture, root};

/// A short calibration on the demonstration model: done in a moment, and enough to solve.
pub const SHORT: [&str; 4] = ["--sequences", "6", "--seq-len", "96"];

/// The program, run in `scratch`.
pub fn wush(scratch: &Scratch) -> Program {
    Program::new(env!("CARGO_BIN_EXE_wush"), scratch.path())
}

/// The demonstration model.
pub fn model() -> PathBuf {
    fixture("demo-model")
}

/// Its calibration text.
pub fn text() -> PathBuf {
    model().join("calibration.txt")
}

/// A model that is small enough to be copied and spoiled, made by an independent program.
pub fn tiny() -> PathBuf {
    fixture("tiny/llama-gqa")
}

/// Token ids below 64, as a `--calib` file: a seeded linear congruential sequence.
pub fn token_ids(scratch: &Scratch, name: &str, n_sequences: usize, len: usize) -> PathBuf {
    let mut state = 12_345_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 58) as u32
    };
    let lists: Vec<Vec<u32>> = (0..n_sequences).map(|_| (0..len).map(|_| next()).collect()).collect();
    scratch.write(name, serde_json::to_string(&lists).expect("numbers are JSON"))
}

/// Arguments as owned strings: paths and options mix.
pub fn args<const N: usize>(parts: [&dyn AsArg; N]) -> Vec<String> {
    parts.iter().map(|part| part.as_arg()).collect()
}

/// Something that can be an argument.
pub trait AsArg {
    /// The argument.
    fn as_arg(&self) -> String;
}

impl AsArg for &str {
    fn as_arg(&self) -> String {
        (*self).to_owned()
    }
}

impl AsArg for PathBuf {
    fn as_arg(&self) -> String {
        self.to_str().expect("test paths are UTF-8").to_owned()
    }
}

/// `command` on the demonstration model with the short calibration, then `more`.
pub fn on_demo(command: &str, more: &[&str]) -> Vec<String> {
    let mut all = args([&command, &model(), &"--calib", &text()]);
    all.extend(SHORT.iter().chain(more).map(|arg| (*arg).to_owned()));
    all
}

/// `command` on the tiny model with random token ids, then `more`.
pub fn on_tiny(scratch: &Scratch, command: &str, model: &Path, more: &[&str]) -> Vec<String> {
    let ids = token_ids(scratch, "ids.json", 4, 24);
    let mut all = args([&command, &model.to_owned(), &"--calib", &ids]);
    all.extend(more.iter().map(|arg| (*arg).to_owned()));
    all
}

/// Asserts that `report` fits `schemas/{name}.json`.
pub fn assert_schema(name: &str, report: &Value) {
    let path = root().join(format!("schemas/{name}.json"));
    let text = fs::read_to_string(&path).expect("a schema");
    let schema: Value = serde_json::from_str(&text).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a valid schema");
    let errors: Vec<String> = validator.iter_errors(report).map(|e| format!("{}: {e}", e.instance_path())).collect();
    assert!(errors.is_empty(), "{name}: {errors:#?}");
}

/// Text with everything that differs between machines or versions left out: times, rates, floats, sizes, hashes, paths.
pub fn stable(text: &str, scratch: &Scratch) -> String {
    let path = scratch.path().to_str().expect("test paths are UTF-8");
    text.replace(path, "[DIR]").replace(root().to_str().expect("test paths are UTF-8"), "[ROOT]")
}

/// Filters for snapshots: see [`stable`].
pub fn filters() -> Vec<(&'static str, &'static str)> {
    vec![
        (r"[0-9a-f]{64}", "[sha]"),
        (r"wush \d+\.\d+\.\d+", "wush [version]"),
        (r"no GPU: .*", "no GPU: [why]"),
        (r"\d+ tokens/s", "[rate]"),
        (r"in layer \d+", "in layer [n]"),
        (r"[+-]?\d+(\.\d+)?e[+-]?\d+", "[float]"),
        (r"\d+(\.\d+)? (B|kB|MB|GB)\b", "[bytes]"),
        (r"\d+(\.\d+)? s\b", "[time]"),
        (r"[+-]?\d+\.\d+", "[float]"),
        (r" +\[float\]", " [float]"),
    ]
}

/// Edits `config.json` of a model's copy.
pub fn edit_config(model: &Path, edit: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).expect("read")).expect("JSON");
    edit(config.as_object_mut().expect("an object"));
    fs::write(path, config.to_string()).expect("written");
}

/// Tensors by name: dtype, shape, bytes.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Edits the tensors of a one-shard copy.
pub fn edit_tensors(model: &Path, edit: impl FnOnce(&mut Tensors)) {
    let path = model.join("model.safetensors");
    let bytes = fs::read(&path).expect("read");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let own = |(name, view): (&str, TensorView<'_>)| {
        (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    let mut tensors: Tensors = file.iter().map(own).collect();
    edit(&mut tensors);
    save(&path, &tensors);
}

/// Writes a shard.
pub fn save(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("a consistent tensor"))
    });
    serialize_to_file(views, None, path).expect("written");
}

/// Makes the first element of a tensor a NaN.
pub fn not_finite(model: &Path, name: &str) {
    edit_tensors(model, |tensors| {
        let (dtype, _, bytes) = tensors.get_mut(name).expect("there");
        match dtype {
            Dtype::F32 => bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes()),
            _ => bytes[..2].copy_from_slice(&0x7fc0_u16.to_le_bytes()),
        }
    });
}
