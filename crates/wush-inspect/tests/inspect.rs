//! Bundles, honest and tampered. The attacker of these tests recomputes every hash, so nothing but the numbers can tell.

mod bundle;

use std::fs;
use std::path::{Path, PathBuf};

use bundle::support::{Layout, Tiny};
use bundle::{Bundle, assert_only, complete, detail, failed, one_sequence, solved, statistics, tiny};
use tempfile::TempDir;
use wush_checkpoint::Checkpoint;
use wush_fold::{FoldDtype, UnfoldDtype, unfold};
use wush_format::bundle::{KEY_TRANSFORMS, KeySidecar, VALUE_TRANSFORMS, ValueLayer, ValueSidecar, WUSH_DIR};
use wush_format::hash::Sha;
use wush_format::manifest::Status;
use wush_format::monitor::Quiet;
use wush_format::tensor_file::TensorFile;
use wush_inspect::{Kind, Report, Verdict, inspect, to_html, to_text};
use wush_model::arch::resolve;

#[test]
fn an_honest_bundle_passes_alone_and_against_its_base() {
    for layout in [Layout::Llama, Layout::LlamaBias, Layout::Qwen2, Layout::Phi3] {
        for (dtype, stored, n_shards) in [
            (FoldDtype::Keep, "BF16", 1),
            (FoldDtype::F32, "BF16", 3),
            (FoldDtype::Keep, "F16", 2),
            (FoldDtype::Keep, "F32", 1),
        ] {
            let bundle = Bundle::of(&Tiny { dtype: stored, n_shards, ..tiny(layout) }, dtype);
            let report = bundle.inspect(false);
            assert_only(&report, &[]);
            assert_eq!((report.kind, report.calibrated_length), (Kind::Bundle, Some(64)));
            let report = bundle.inspect(true);
            assert_only(&report, &[]);
            assert!(report.checks.len() > 15);
            let heads: Vec<_> = report.layers.iter().flat_map(|layer| &layer.heads).collect();
            assert_eq!(heads.len(), 4);
            for head in heads {
                let fold = head.fold.as_ref().expect("compared");
                assert!(fold.ok && fold.rel_error.is_some_and(|error| error > 0.0 && error < 0.02));
                assert!(head.key_condition.is_some() && head.value_condition.is_some() && head.key.is_some());
            }
            let json = serde_json::to_string(&report).expect("JSON");
            assert_eq!(serde_json::from_str::<Report>(&json).expect("the same back"), report);
        }
    }
}

#[test]
fn an_unfolded_bundle_passes_against_the_original_and_a_changed_one_does_not() {
    for layout in [Layout::Llama, Layout::Qwen2, Layout::Phi3] {
        let bundle = Bundle::of(&Tiny { head_dim: 16, ..tiny(layout) }, FoldDtype::Keep);
        let out = bundle.dir.with_file_name("unfolded");
        fs::create_dir(&out).expect("directory");
        let checkpoint = Checkpoint::open(&bundle.dir).expect("opens");
        let spec = resolve(&checkpoint, None).expect("understood");
        let values = ValueSidecar::load(&bundle.dir.join(WUSH_DIR).join(VALUE_TRANSFORMS)).expect("loads");
        unfold(&checkpoint, &spec, &values, &out, UnfoldDtype::Original, &Quiet).expect("unfolds");
        let report = inspect(&out, Some(&bundle.source), &Quiet).expect("it can be inspected");
        assert_only(&report, &[]);
        for name in ["folded values", "folded outputs", "same function"] {
            assert!(detail(&report, name).contains("of what two roundings"), "{}", to_text(&report));
            assert!(detail(&bundle.inspect(true), name).contains("of what one rounding explains"));
        }
        let changed = Bundle { _root: TempDir::new().expect("temporary directory"), dir: out, ..bundle };
        changed.poke("model.layers.1.self_attn.o_proj.weight", 100, |x| x + 0.5);
        let report = inspect(&changed.dir, Some(&changed.source), &Quiet).expect("it can be inspected");
        assert!(failed(&report).contains(&"folded outputs"), "{}", to_text(&report));
    }
}

#[test]
fn an_equivalence_that_was_not_checked_is_said() {
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    bundle.edit_manifest(|manifest| manifest.equivalence = None);
    let report = bundle.inspect(false);
    assert_only(&report, &[]);
    let expected = "not checked when the bundle was made; inspect with --base proves the fold";
    assert_eq!(detail(&report, "equivalence"), expected);
    assert!(detail(&bundle.inspect(true), "equivalence").contains("comparison of the weights with the base decides"));
}

#[test]
fn a_calibration_shorter_than_the_head_dimension_fails_and_a_short_one_is_called_few() {
    for (tokens, expected, part) in [
        (7, &["solver's figures", "enough calibration"][..], "fewer than dimensions"),
        (8, &[], "few: below 80"),
        (79, &[], "few: below 80"),
        (80, &[], "at least 10 a dimension"),
    ] {
        let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
        bundle.edit_manifest(|manifest| manifest.calibration = Some(one_sequence(tokens)));
        let report = bundle.inspect(false);
        assert_only(&report, expected);
        assert!(detail(&report, "enough calibration").contains(part), "{}", to_text(&report));
        let is_noted = report.notes.iter().any(|note| note.starts_with("enough calibration: "));
        assert_eq!(is_noted, part.starts_with("few:"), "{:?}", report.notes);

        let mut transforms = complete(tiny(Layout::Llama).transforms(&bundle.source));
        transforms.calibration = Some(one_sequence(tokens));
        let path = bundle.source.with_file_name("t.safetensors");
        transforms.save(&path).expect("saved");
        let report = inspect(&path, None, &Quiet).expect("transforms");
        assert_only(&report, expected);
        assert!(detail(&report, "enough calibration").contains(part), "{}", to_text(&report));
    }
}

#[test]
fn the_condition_number_is_that_of_the_two_norm_everywhere() {
    let root = TempDir::new().expect("temporary directory");
    let (source, path) = (root.path().join("source"), root.path().join("t.safetensors"));
    let tiny = tiny(Layout::Llama);
    tiny.write(&source);
    let mut transforms = tiny.transforms(&source);
    // The Hadamard matrix of order 8, orthogonal: 1 in the 2-norm, 8 in the 1-norm.
    let hadamard = wush_transform::hadamard(8).expect("a power of 2");
    for layer in transforms.layers.values_mut() {
        layer.key.data = [hadamard.clone(), hadamard.clone()].concat();
        layer.value.data = layer.key.data.clone();
    }
    let transforms = complete(transforms);
    transforms.save(&path).expect("saved");
    let bundle = Bundle::make(root, source, &transforms, FoldDtype::Keep);
    for report in [bundle.inspect(false), inspect(&path, None, &Quiet).expect("transforms")] {
        assert_only(&report, &[]);
        for head in report.layers.iter().flat_map(|layer| &layer.heads) {
            for found in [head.key_condition, head.value_condition] {
                assert!(found.is_some_and(|found| (found - 1.0).abs() < 1e-6), "{found:?}");
            }
        }
        assert!(to_text(&report).contains("condition number at most 1.00"), "{}", to_text(&report));
    }
}

#[test]
fn text_and_page_say_what_was_found() {
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    let report = bundle.inspect(true);
    let text = to_text(&report);
    for part in
        ["calibrated length  64 tokens", "query = key^{-T}", "key gain", "1.50 – 1.75", "fold error", "Worst heads"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    for part in ["predicted on the calibration text itself", "1.00 is expected", "enough calibration"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let long = |text: &str| text.split(|c: char| !c.is_ascii_hexdigit()).any(|word| word.len() > 12);
    assert!(!long(&text) && !long(&to_html(&report)), "a digest is shown whole:\n{text}");
    let hash = report.model_hash.expect("hashed").to_string();
    assert!(serde_json::to_string(&report).expect("JSON").contains(&hash), "JSON has it whole");
    assert!(text.contains(&hash[..12]));
    assert!(text.trim_end().lines().last().is_some_and(|line| line.starts_with("Verdict: ok, 1 warning (")), "{text}");
    let page = to_html(&report);
    for part in [
        "Keys: predicted gain",
        "Values: condition number",
        "Keys: sensitivity imbalance",
        "Fold error",
        "prefers-color-scheme:dark",
        "max-width:640px",
        "calibration text itself",
        "class=\"numbers\"",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert!(page.matches("<title>layer 1, KV head 1: ").count() >= 8);
    if let Some(dir) = std::env::var_os("WUSH_KEEP_PAGE") {
        fs::write(Path::new(&dir).join("inspect.html"), page).expect("write");
    }
}

#[test]
fn a_changed_file_is_found_by_its_hash() {
    let name = "model.layers.0.mlp.up_proj.weight";
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    bundle.poke(name, 7, |x| x + 0.5);
    assert_only(
        &bundle.inspect(false),
        &["files", "folded weights", "key sidecar belongs to the weights", "value sidecar belongs to the weights"],
    );
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    fs::remove_file(bundle.dir.join("LICENSE")).expect("remove");
    fs::write(bundle.dir.join("wush/extra.bin"), "x").expect("write");
    let report = bundle.inspect(false);
    assert_only(&report, &["wush folder", "files", "unlisted files"]);
    assert!(
        report.checks.iter().any(|check| check.detail.contains("LICENSE"))
            && to_text(&report).contains("wush/extra.bin")
    );
}

/// Twice the half spacing of bf16 at `x`.
fn spacing(x: f64) -> f64 {
    2f64.powi(x.abs().log2().floor() as i32 - 7)
}

/// Tampers, recomputes all hashes, and expects exactly these checks to fail when the base is at hand, and none without.
#[track_caller]
fn tampered(layout: Layout, tamper: impl Fn(&Bundle), expected: &[&str]) {
    let bundle = Bundle::of(&tiny(layout), FoldDtype::Keep);
    tamper(&bundle);
    bundle.rehash();
    assert_only(&bundle.inspect(false), &[]);
    let report = bundle.inspect(true);
    for name in expected {
        assert!(failed(&report).contains(name), "{name} did not fail:\n{}", to_text(&report));
    }
    assert_eq!(report.verdict, Verdict::Failed);
    // A large enough change of a folded tensor is also a change of the function, and any of the fold's error.
    let also = if expected.len() > 1 { "same function" } else { "" };
    let foreign =
        failed(&report).into_iter().find(|name| ![also, "fold error"].contains(name) && !expected.contains(name));
    assert_eq!(foreign, None, "{}", to_text(&report));
}

#[test]
fn tampering_is_found_although_the_hashes_were_recomputed() {
    let layer = "model.layers.1.self_attn";
    let sidecar = "value sidecar is what was folded";
    // One element, by eight spacings of numbers about as large as the largest of these rows.
    let by = 8.0 * spacing(1.5);
    tampered(
        Layout::Llama,
        |b| b.poke(&format!("{layer}.v_proj.weight"), 100, |x| x + by),
        &["folded values", sidecar],
    );
    tampered(
        Layout::Llama,
        |b| b.poke(&format!("{layer}.o_proj.weight"), 100, |x| x - by),
        &["folded outputs", sidecar],
    );
    tampered(
        Layout::Phi3,
        |b| b.poke(&format!("{layer}.qkv_proj.weight"), (32 + 16 + 3) * 96 + 5, |x| x + by),
        &["folded values", sidecar],
    );
    tampered(
        Layout::Qwen2,
        |b| b.poke(&format!("{layer}.v_proj.bias"), 3, |x| x + 2.0 * by),
        &["folded values", sidecar],
    );
    // What is not folded must be the base's to the bit.
    tampered(
        Layout::Phi3,
        |b| b.poke(&format!("{layer}.qkv_proj.weight"), 5, |x| x + spacing(x)),
        &["untouched tensors"],
    );
    tampered(
        Layout::LlamaBias,
        |b| b.poke(&format!("{layer}.o_proj.bias"), 5, |x| x + spacing(x)),
        &["untouched tensors"],
    );
    tampered(Layout::Llama, |b| b.poke("model.embed_tokens.weight", 0, |x| x + spacing(x)), &["untouched tensors"]);
    tampered(
        Layout::Llama,
        |b| fs::write(b.dir.join("LICENSE"), "Another.\n").expect("write"),
        &["files of the source", "other files"],
    );
    tampered(
        Layout::Llama,
        |b| fs::write(b.dir.join("more.py"), "import os\n").expect("write"),
        &["files of the source", "other files"],
    );
}

#[test]
fn one_spacing_is_found_with_the_sidecar() {
    let sidecar = "value sidecar is what was folded";
    tampered(
        Layout::Llama,
        |b| b.poke("model.layers.0.self_attn.v_proj.weight", 200, |x| x + 1.5 * spacing(x)),
        &[sidecar],
    );
    tampered(
        Layout::Llama,
        |b| b.poke("model.layers.0.self_attn.o_proj.weight", 200, |x| x + 1.5 * spacing(x)),
        &[sidecar],
    );
}

#[test]
fn a_changed_configuration_is_found() {
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    let path = bundle.dir.join("config.json");
    let text = fs::read_to_string(&path).expect("readable").replace("10000.0", "20000.0");
    fs::write(&path, text).expect("write");
    bundle.rehash();
    assert_only(&bundle.inspect(true), &["files of the source", "other files", "same model"]);
}

#[test]
fn sidecars_are_checked_against_themselves_and_the_weights() {
    let keys = |edit: &dyn Fn(&mut KeySidecar)| {
        let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
        let path = bundle.dir.join(WUSH_DIR).join(KEY_TRANSFORMS);
        let mut sidecar = KeySidecar::load(&path).expect("loads");
        edit(&mut sidecar);
        sidecar.save(&path).expect("saves");
        bundle.rehash();
        bundle
    };
    let bundle = keys(&|sidecar| sidecar.layers.get_mut(&1).expect("layer 1").key[70] += 1e-4);
    assert_only(&bundle.inspect(false), &["query = key^{-T}"]);
    let bundle = keys(&|sidecar| sidecar.layers.get_mut(&0).expect("layer 0").query[3] *= 1.001);
    assert_only(&bundle.inspect(false), &["query = key^{-T}"]);
    let bundle = keys(&|sidecar| drop(sidecar.layers.remove(&1)));
    assert_only(&bundle.inspect(false), &["key sidecar"]);
    let bundle = keys(&|sidecar| {
        let layer = sidecar.layers.get_mut(&0).expect("layer 0");
        layer.key.copy_within(0..8, 8);
    });
    assert_only(&bundle.inspect(false), &["query = key^{-T}", "key conditioning", "key transforms are the solver's"]);

    let values = |edit: &dyn Fn(&mut ValueLayer)| {
        let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
        let path = bundle.dir.join(WUSH_DIR).join(VALUE_TRANSFORMS);
        let mut sidecar = ValueSidecar::load(&path).expect("loads");
        edit(sidecar.layers.get_mut(&1).expect("layer 1"));
        sidecar.save(&path).expect("saves");
        bundle.rehash();
        bundle
    };
    let bundle = values(&|layer| layer.value[9] += 0.05);
    // Its condition number tells; a change of sign leaves that, and only the base tells.
    assert_only(&bundle.inspect(false), &["value transforms are the solver's"]);
    let bundle = values(&|layer| layer.value[..8].iter_mut().for_each(|x| *x = -*x));
    assert_only(&bundle.inspect(false), &[]);
    assert_only(&bundle.inspect(true), &["value sidecar is what was folded", "value transforms fit the base"]);
    let bundle = values(&|layer| layer.value.copy_within(0..8, 8));
    assert_only(&bundle.inspect(false), &["value transforms invertible", "value transforms are the solver's"]);
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    fs::remove_file(bundle.dir.join(WUSH_DIR).join(VALUE_TRANSFORMS)).expect("remove");
    bundle.rehash();
    assert_only(&bundle.inspect(true), &["wush folder", "value sidecar"]);
}

#[test]
fn the_manifest_is_not_believed() {
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    bundle.edit_manifest(|manifest| manifest.status = Status::Failed);
    assert_only(&bundle.inspect(false), &["status"]);
    bundle.rehash();
    bundle.edit_manifest(|manifest| {
        manifest.status = Status::Complete;
        manifest.equivalence.as_mut().expect("there").nll_bundle = 2.1;
    });
    assert_only(&bundle.inspect(false), &["equivalence"]);
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    bundle.edit_manifest(|manifest| manifest.basis.model_hash = Sha([9; 32]));
    assert_only(&bundle.inspect(false), &["folded weights"]);
    bundle.rehash();
    bundle.edit_manifest(|manifest| {
        manifest.layers[1].key.truncate(1);
        manifest.layers[1].value.truncate(1);
    });
    assert_only(&bundle.inspect(false), &["solver's report"]);
    fs::write(bundle.manifest_path(), "{\"format_version\": 99}").expect("write");
    assert_only(&bundle.inspect(false), &["manifest"]);
    fs::remove_file(bundle.manifest_path()).expect("remove");
    assert!(failed(&bundle.inspect(true)).contains(&"manifest"));
}

#[test]
fn another_base_is_not_the_source() {
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    let other = TempDir::new().expect("temporary directory");
    Tiny { seed: 2, ..tiny(Layout::Llama) }.write(other.path());
    let report = inspect(&bundle.dir, Some(other.path()), &Quiet).expect("it can be inspected");
    let names = failed(&report);
    for name in ["base is the source", "untouched tensors", "folded values", "folded outputs", "same function"] {
        assert!(names.contains(&name), "{name}: {}", to_text(&report));
    }
    let missing = inspect(&bundle.dir, Some(&other.path().join("nowhere")), &Quiet).expect_err("no base");
    assert!(missing.to_string().starts_with("base: "), "{missing}");
}

#[test]
fn a_damaged_shard_is_a_failed_check() {
    let bundle = Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep);
    let path = bundle.dir.join("model.safetensors");
    let bytes = fs::read(&path).expect("readable");
    fs::write(&path, &bytes[..bytes.len() - 9]).expect("write");
    assert_only(&bundle.inspect(false), &["files", "checkpoint"]);
}

/// A key sidecar alone, which has no facts.
fn bundle_key_sidecar(tiny: &Tiny, dir: &Path) -> PathBuf {
    let path = dir.join("keys.safetensors");
    let bundle = Bundle::of(tiny, FoldDtype::Keep);
    fs::copy(bundle.dir.join(WUSH_DIR).join(KEY_TRANSFORMS), &path).expect("copied");
    path
}

#[test]
fn a_checkpoint_transforms_and_other_files_are_told_apart() {
    let root = TempDir::new().expect("temporary directory");
    let (source, path) = (root.path().join("source"), root.path().join("t.safetensors"));
    let tiny = tiny(Layout::Llama);
    tiny.write(&source);
    let report = inspect(&source, None, &Quiet).expect("a checkpoint");
    assert_only(&report, &[]);
    assert_eq!(report.kind, Kind::Checkpoint);
    let text = to_text(&report);
    assert!(text.contains("llama, 2 layers, 4 query and 2 KV heads of dimension 8"), "{text}");
    assert!(!text.contains("\n\n\n") && !text.contains("Layers"), "{text}");
    assert!(
        !to_text(&inspect(&bundle_key_sidecar(&tiny, root.path()), None, &Quiet).expect("a sidecar"))
            .contains("\n\n\n")
    );
    assert_only(&inspect(&source, Some(&source), &Quiet).expect("the same twice"), &[]);

    let mut transforms = complete(solved(tiny.transforms(&source), &source));
    transforms.save(&path).expect("saved");
    let report = inspect(&path, Some(&source), &Quiet).expect("transforms");
    assert_only(&report, &[]);
    assert_eq!((report.kind, report.calibrated_length), (Kind::Transforms, Some(64)));
    transforms.model_hash = Sha([3; 32]);
    transforms.layers.get_mut(&1).expect("layer 1").key.data.copy_within(0..8, 8);
    transforms.save(&path).expect("saved");
    assert_only(
        &inspect(&path, Some(&source), &Quiet).expect("transforms"),
        &["key transforms invertible", "key transforms are the solver's", "belongs to base"],
    );

    let shard = source.join("model.safetensors");
    for (path, part) in [
        (&shard, "format"),
        (&source.join("LICENSE"), "expected a directory"),
        (&root.path().to_path_buf(), "not a checkpoint"),
    ] {
        let error = inspect(path, None, &Quiet).expect_err("nothing of wush's");
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(inspect(&root.path().join("nowhere"), None, &Quiet).is_err());
}

#[test]
fn statistics_show_ranks_gains_and_the_mean_key() {
    let root = TempDir::new().expect("temporary directory");
    let (source, path) = (root.path().join("source"), root.path().join("s.safetensors"));
    let tiny = tiny(Layout::Llama);
    tiny.write(&source);
    statistics(&tiny, &source).save(&path).expect("saved");
    let report = inspect(&path, Some(&source), &Quiet).expect("statistics");
    assert_only(&report, &[]);
    assert_eq!(report.kind, Kind::Statistics);
    for head in report.layers.iter().flat_map(|layer| &layer.heads) {
        let (key, value) = (head.key.as_ref().expect("measured"), head.value.as_ref().expect("measured"));
        assert_eq!((key.rank_gram, key.rank_hessian, value.rank_gram, value.rank_hessian), (1, 8, 7, 8));
        assert!(head.mean_key_energy.is_some_and(|share| (share - 1.0).abs() < 1e-12));
        assert!(key.predicted_gain >= 1.0 && value.predicted_gain >= 1.0);
    }
    assert!(detail(&report, "enough calibration").starts_with("64 tokens for a head dimension of 8, few"));
    let text = to_text(&report);
    assert!(
        text.contains("on the calibration text itself")
            && text.contains("1, 8, 7, 8")
            && text.contains("mean-key energy"),
        "{text}"
    );
    // A file that no calibration made.
    let file = TensorFile::open(&path).expect("opens");
    let range = file.tensors()["layers.0.key_gram"].range.clone();
    let mut bytes = file.bytes().to_vec();
    drop(file);
    bytes[range.start..range.start + 8].copy_from_slice(&f64::NAN.to_le_bytes());
    fs::write(&path, bytes).expect("write");
    assert_only(&inspect(&path, None, &Quiet).expect("inspected"), &["statistics"]);
}

#[test]
fn the_demonstration_model_folded_passes() {
    let root = TempDir::new().expect("temporary directory");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/demo-model");
    let source = root.path().join("source");
    fs::create_dir(&source).expect("directory");
    for name in
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    {
        fs::copy(demo.join(name), source.join(name)).expect("copied");
    }
    let checkpoint = Checkpoint::open(&source).expect("opens");
    let spec = resolve(&checkpoint, None).expect("understood");
    let tiny = Tiny { n_layers: spec.layers.len(), n_kv_heads: 2, head_dim: 64, ..Tiny::default() };
    let transforms = solved(tiny.transforms(&source), &source);
    let bundle = Bundle::make(root, source.clone(), &transforms, FoldDtype::Keep);
    let report = bundle.inspect(true);
    assert_only(&report, &[]);
    // A trained model's values, and one element of one of them.
    bundle.poke("model.layers.3.self_attn.v_proj.weight", 64 * 256 + 17, |x| x + 0.3);
    bundle.rehash();
    let report = bundle.inspect(true);
    assert!(failed(&report).contains(&"folded values"), "{}", to_text(&report));
    assert!(report.checks.iter().any(|check| check.detail.contains("layer 3, KV head 1")));
}
