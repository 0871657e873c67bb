//! Checkpoints as they are found in the wild and in bad hands: one case a documented refusal, built in a temporary
//! directory from a few tiny tensors.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tempfile::TempDir;
use wush_checkpoint::{Checkpoint, CheckpointError, weights_hash};
use wush_format::hash::Sha;
use wush_format::manifest::FileEntry;
use wush_format::tensor_file::{Dtype, NewTensor, write_tensor_file};

const INDEX: &str = "model.safetensors.index.json";

fn tensor(dtype: Dtype) -> NewTensor {
    NewTensor { dtype, shape: vec![2, 1], bytes: vec![0; 2 * dtype.bitsize() / 8] }
}

fn shard_of(path: &Path, tensors: &[(&str, NewTensor)]) {
    let tensors = tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
    write_tensor_file(path, &tensors, &BTreeMap::new()).expect("writes");
}

fn shard(path: &Path, names: &[&str]) {
    let tensors: Vec<_> = names.iter().map(|name| (*name, tensor(Dtype::F32))).collect();
    shard_of(path, &tensors);
}

fn write(dir: &TempDir, name: &str, text: &str) {
    fs::write(dir.path().join(name), text).expect("writes");
}

/// A directory with a configuration only.
fn bare() -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    write(&dir, "config.json", r#"{"model_type": "llama"}"#);
    dir
}

/// One file of weights.
fn single() -> TempDir {
    let dir = bare();
    shard(&dir.path().join("model.safetensors"), &["b", "a"]);
    dir
}

/// Two shards and their index.
fn sharded() -> TempDir {
    let dir = bare();
    shard(&dir.path().join("model-00001-of-00002.safetensors"), &["c", "a"]);
    shard(&dir.path().join("model-00002-of-00002.safetensors"), &["b"]);
    index(&dir, &[("a", 1), ("b", 2), ("c", 1)]);
    dir
}

fn index(dir: &TempDir, entries: &[(&str, u32)]) {
    let lines: Vec<_> =
        entries.iter().map(|(name, n)| format!(r#""{name}":"model-0000{n}-of-00002.safetensors""#)).collect();
    write(dir, INDEX, &format!(r#"{{"metadata":{{"total_size":24}},"weight_map":{{{}}}}}"#, lines.join(",")));
}

/// The error of opening `dir`, as text; it must have a remedy.
fn refusal(dir: &TempDir) -> String {
    let error = Checkpoint::open(dir.path()).expect_err("must be refused");
    assert!(error.hint().is_some(), "no remedy for: {error}");
    error.to_string()
}

#[test]
fn one_file_and_many_are_opened() {
    let dir = single();
    let one = Checkpoint::open(dir.path()).expect("opens");
    assert_eq!(one.tensor_names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!((one.shards().len(), one.n_weight_bytes()), (1, 16));
    assert_eq!(one.config()["model_type"], "llama");
    assert!(!one.is_bundle());

    let dir = sharded();
    let many = Checkpoint::open(dir.path()).expect("opens");
    assert_eq!(many.tensor_names().collect::<Vec<_>>(), ["a", "b", "c"]);
    let shards: Vec<_> = many.shards().iter().map(|shard| shard.file_name.as_str()).collect();
    assert_eq!(shards, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
    assert_eq!(many.locate("b").expect("there").0, 1);
    assert_eq!(many.tensor("c").expect("there").shape, [2, 1]);
    assert!(many.locate("d").is_none());
    assert!(matches!(many.tensor("d"), Err(CheckpointError::MissingTensor { .. })));
    assert_eq!(many.n_weight_bytes(), 24);

    fs::remove_file(dir.path().join(INDEX)).expect("removes");
    let names: Vec<_> = many.tensor_names().map(str::to_owned).collect();
    let unlisted = Checkpoint::open(dir.path()).expect("the names say that it is whole");
    assert!(unlisted.tensor_names().eq(names.iter().map(String::as_str)));
}

#[test]
fn floats_and_plain_buffers_are_accepted_other_dtypes_are_quantized_weights() {
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::F64, Dtype::I64, Dtype::BOOL] {
        let dir = bare();
        shard_of(&dir.path().join("model.safetensors"), &[("w", tensor(dtype))]);
        Checkpoint::open(dir.path()).expect("opens");
    }
    for dtype in [Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::F8_E8M0, Dtype::I8, Dtype::U8, Dtype::F4] {
        let dir = bare();
        shard_of(&dir.path().join("model.safetensors"), &[("layers.0.w", tensor(dtype))]);
        let text = refusal(&dir);
        let expected = format!("tensor \"layers.0.w\" is not supported: dtype {dtype}, expected BF16");
        assert!(text.contains(&expected), "{text}");
    }
    let mask = NewTensor { dtype: Dtype::U8, shape: vec![1, 1, 3, 3], bytes: vec![1; 9] };
    let dir = bare();
    shard_of(&dir.path().join("model.safetensors"), &[("h.0.attn.bias", mask)]);
    Checkpoint::open(dir.path()).expect("a causal mask is no weight");
}

#[test]
fn tensors_of_quantized_layers_are_named() {
    for name in ["l.q_proj.weight_scale", "l.q_proj.weight_scale_inv", "l.q_proj.qweight", "l.experts.down_proj_scales"]
    {
        let dir = bare();
        shard(&dir.path().join("model.safetensors"), &["l.q_proj.weight", name]);
        let text = refusal(&dir);
        assert!(
            text.contains(&format!("tensor \"{name}\" is not supported: it belongs to quantized weights")),
            "{text}"
        );
    }
}

#[test]
fn a_configuration_of_quantized_weights_is_refused_by_its_key() {
    let cases = [
        (r#"{"quantization_config":{"quant_method":"fp8"}}"#, "quantization_config is not supported", "\"fp8\""),
        (r#"{"text_config":{"quantization_config":{}}}"#, "text_config.quantization_config is not", "unknown"),
        (r#"{"compression_config":{"x":1}}"#, "compression_config is not supported", "unknown"),
    ];
    for (config, key, method) in cases {
        let dir = single();
        write(&dir, "config.json", config);
        let text = refusal(&dir);
        assert!(text.contains(key) && text.contains(method), "{text}");
    }
    let dir = single();
    write(&dir, "config.json", r#"{"quantization_config":null}"#);
    Checkpoint::open(dir.path()).expect("null means none");
}

#[test]
fn a_bad_or_absent_configuration_is_refused() {
    for (config, expected) in
        [("[1]", "expected a JSON object"), ("{", "EOF"), ("", "EOF"), ("{\"a\":NaN}", "expected value")]
    {
        let dir = single();
        write(&dir, "config.json", config);
        let text = refusal(&dir);
        assert!(text.contains("config.json: not a valid config.json file") && text.contains(expected), "{text}");
    }
    let dir = single();
    fs::remove_file(dir.path().join("config.json")).expect("removes");
    assert!(refusal(&dir).contains("it has no config.json"));
}

#[test]
fn a_directory_without_usable_weights_says_what_it_holds() {
    assert!(refusal(&bare()).contains("no model.safetensors.index.json and no model*.safetensors"));
    for (name, expected) in [
        ("pytorch_model.bin", "pytorch_model.bin is not supported: pickled weights"),
        ("pytorch_model-00001-of-00002.bin", "pickled weights"),
        ("consolidated.00.pth", "pickled weights"),
        ("model-q4_k_m.gguf", "model-q4_k_m.gguf is not supported: a GGUF file"),
    ] {
        let dir = bare();
        write(&dir, name, "x");
        let text = refusal(&dir);
        assert!(text.contains(expected), "{text}");
    }
    let dir = single();
    write(&dir, "adapter_config.json", "{}");
    assert!(refusal(&dir).contains("adapter_config.json is not supported: a LoRA adapter"));
    let dir = tempfile::tempdir().expect("a temporary directory");
    write(&dir, "adapter_config.json", "{}");
    shard(&dir.path().join("adapter_model.safetensors"), &["lora_A"]);
    assert!(refusal(&dir).contains("a LoRA adapter"));
}

#[test]
fn a_path_that_is_no_directory_is_refused() {
    let dir = bare();
    write(&dir, "x.gguf", "GGUF");
    let open = |name| Checkpoint::open(&dir.path().join(name)).expect_err("no directory");
    assert!(open("none").to_string().contains("there is nothing at this path"));
    assert!(open("x.gguf").to_string().contains("it is a file"));
    assert!(open("x.gguf").hint().expect("a remedy").contains("original checkpoint"));
}

#[test]
fn an_index_that_disagrees_with_the_shards_is_refused() {
    let dir = sharded();
    fs::remove_file(dir.path().join("model-00002-of-00002.safetensors")).expect("removes");
    assert!(refusal(&dir).contains("shard \"model-00002-of-00002.safetensors\" is missing"));

    let dir = sharded();
    index(&dir, &[("a", 1), ("b", 1), ("c", 1), ("d", 2)]);
    let text = refusal(&dir);
    let expected =
        "tensor \"b\": expected in model-00001-of-00002.safetensors, found in model-00002-of-00002.safetensors";
    assert!(text.contains(expected), "{text}");

    let dir = sharded();
    index(&dir, &[("a", 1), ("b", 2), ("c", 1), ("d", 2)]);
    assert!(refusal(&dir).contains("tensor \"d\": expected in model-00002-of-00002.safetensors, found in no shard"));

    let dir = sharded();
    index(&dir, &[("a", 1), ("b", 2)]);
    assert!(refusal(&dir).contains("tensor \"c\" of model-00001-of-00002.safetensors is not listed"));

    let dir = sharded();
    shard(&dir.path().join("model.safetensors"), &["a", "b", "c"]);
    assert!(refusal(&dir).contains("\"model.safetensors\" is beside the shards"));

    let dir = sharded();
    write(&dir, INDEX, r#"{"weight_map":{"a":"../model.safetensors"}}"#);
    assert!(refusal(&dir).contains("which leads out of the directory"));
}

#[test]
fn a_tensor_in_two_shards_is_refused_with_and_without_an_index() {
    let dir = sharded();
    shard(&dir.path().join("model-00002-of-00002.safetensors"), &["a", "b"]);
    let expected = "tensor a is in two shards: model-00001-of-00002.safetensors and model-00002-of-00002.safetensors";
    assert!(refusal(&dir).contains(expected));
    fs::remove_file(dir.path().join(INDEX)).expect("removes");
    assert!(refusal(&dir).contains(expected));
}

#[test]
fn an_incomplete_series_without_an_index_is_refused() {
    let dir = sharded();
    fs::remove_file(dir.path().join(INDEX)).expect("removes");
    fs::remove_file(dir.path().join("model-00001-of-00002.safetensors")).expect("removes");
    assert!(refusal(&dir).contains("model-00002-of-00002.safetensors is one of 2 shards, found 1"));
}

#[test]
fn a_damaged_shard_is_named() {
    let dir = sharded();
    let path = dir.path().join("model-00002-of-00002.safetensors");
    let bytes = fs::read(&path).expect("reads");
    fs::write(&path, &bytes[..bytes.len() - 1]).expect("writes");
    let text = refusal(&dir);
    assert!(text.contains("model-00002-of-00002.safetensors: not a valid safetensors file: tensor \"b\""), "{text}");
}

#[test]
fn further_copies_of_the_weights_are_told_from_other_files() {
    let room = tempfile::tempdir().expect("a directory");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/demo-model");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(demo.join(name), room.path().join(name)).expect("copied");
    }
    fs::create_dir(room.path().join("original")).expect("made");
    for name in ["consolidated.safetensors", "pytorch_model.bin", "original/consolidated.00.pth", "vocab.txt"] {
        fs::write(room.path().join(name), "x").expect("written");
    }
    let checkpoint = Checkpoint::open(room.path()).expect("a checkpoint");
    let expected = ["consolidated.safetensors", "original/consolidated.00.pth", "pytorch_model.bin"];
    assert_eq!(checkpoint.other_weights().expect("lists"), expected);
    assert_eq!(checkpoint.other_files().expect("lists"), ["config.json", "vocab.txt"]);
}

#[test]
fn other_files_are_everything_but_shards_and_wush_itself() {
    let dir = sharded();
    for path in ["wush/manifest.json", ".git/HEAD", ".cache/x", "sub/wush/y.py", "sub/model.safetensors", "LICENSE"] {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().expect("below the directory")).expect("makes");
        fs::write(path, "x").expect("writes");
    }
    write(&dir, "training_args.bin", "x");
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    let expected = ["LICENSE", "config.json", INDEX, "sub/model.safetensors", "sub/wush/y.py", "training_args.bin"];
    assert_eq!(checkpoint.other_files().expect("lists"), expected);
    assert!(checkpoint.is_bundle());
}

#[cfg(unix)]
mod links {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_out_of_the_directory_is_refused() {
        let elsewhere = single();
        let dir = bare();
        symlink(elsewhere.path().join("model.safetensors"), dir.path().join("model.safetensors")).expect("links");
        assert!(refusal(&dir).contains("model.safetensors leads out of the checkpoint directory"));

        let dir = single();
        fs::remove_file(dir.path().join("config.json")).expect("removes");
        symlink(elsewhere.path().join("config.json"), dir.path().join("config.json")).expect("links");
        assert!(refusal(&dir).contains("config.json leads out"));

        let dir = single();
        symlink("/etc/hostname", dir.path().join("NOTICE")).expect("links");
        let checkpoint = Checkpoint::open(dir.path()).expect("its weights are its own");
        let error = checkpoint.other_files().expect_err("a stranger's file").to_string();
        assert!(error.contains("NOTICE leads out"), "{error}");
    }

    #[test]
    fn links_inside_are_followed_and_linked_folders_and_dangling_links_are_not() {
        let dir = single();
        symlink("config.json", dir.path().join("again.json")).expect("links");
        let checkpoint = Checkpoint::open(dir.path()).expect("opens");
        assert_eq!(checkpoint.other_files().expect("lists"), ["again.json", "config.json"]);
        symlink(".", dir.path().join("loop")).expect("links");
        assert!(checkpoint.other_files().expect_err("a loop").to_string().contains("loop is not supported"));
        fs::remove_file(dir.path().join("loop")).expect("removes");
        symlink("nothing", dir.path().join("dangling")).expect("links");
        let error = checkpoint.other_files().expect_err("nothing there").to_string();
        assert!(error.ends_with("dangling is not supported: it is a link to nothing"), "{error}");
    }

    /// The hub's cache: files are links from a snapshot to blobs of the same repository, never of another.
    #[test]
    fn a_snapshot_may_link_to_its_own_blobs_only() {
        let cache = tempfile::tempdir().expect("a temporary directory");
        let source = single();
        for repo in ["ours", "theirs"] {
            let blobs = cache.path().join(repo).join("blobs");
            fs::create_dir_all(&blobs).expect("makes");
            fs::copy(source.path().join("model.safetensors"), blobs.join("1")).expect("copies");
            fs::copy(source.path().join("config.json"), blobs.join("2")).expect("copies");
        }
        let snapshot = cache.path().join("ours/snapshots/abc");
        fs::create_dir_all(&snapshot).expect("makes");
        symlink("../../blobs/1", snapshot.join("model.safetensors")).expect("links");
        symlink("../../blobs/2", snapshot.join("config.json")).expect("links");
        let checkpoint = Checkpoint::open(&snapshot).expect("opens");
        assert_eq!(checkpoint.other_files().expect("lists"), ["config.json"]);
        symlink("../../../theirs/blobs/2", snapshot.join("generation_config.json")).expect("links");
        assert!(matches!(checkpoint.other_files(), Err(CheckpointError::Escapes { .. })));
    }
}

#[test]
fn the_model_hash_depends_on_names_and_digests_alone() {
    let entry = |path: &str, n_bytes| FileEntry { path: path.to_owned(), n_bytes, sha256: Sha::of(path.as_bytes()) };
    let hash = weights_hash(&[entry("a", 1), entry("b", 2)]);
    assert_eq!(hash, weights_hash(&[entry("b", 0), entry("a", 0)]));
    assert_ne!(hash, weights_hash(&[entry("a", 1)]));
    let line = |path: &str| format!("{path}\0{}\n", Sha::of(path.as_bytes()));
    assert_eq!(hash, Sha::of(format!("{}{}", line("a"), line("b")).as_bytes()));
}
