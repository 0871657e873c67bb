//! What files say of themselves, each false claim by itself: with all hashes recomputed, the check that knows better must fail,
//! and no other.

mod bundle;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bundle::support::{Layout, Tiny};
use bundle::{Bundle, assert_only, complete, detail, failed, solved, statistics, tiny, value_problem};
use tempfile::TempDir;
use wush_fold::{FoldDtype, invert};
use wush_format::bundle::{
    FeedbackLayer, KEY_TRANSFORMS, KeySidecar, VALUE_FEEDBACK, VALUE_TRANSFORMS, ValueFeedback, WUSH_DIR,
};
use wush_format::hash::Sha;
use wush_format::manifest::{HeadReport, Manifest};
use wush_format::monitor::Quiet;
use wush_format::tensor_file::{NewTensor, TensorFile, write_tensor_file};
use wush_format::transforms::Transforms;
use wush_inspect::{Report, head_report, inspect, to_html, to_text};
use wush_stats::Statistics;
use wush_transform::{HeadProblem, Role, Settings, find, measure, solve};

fn honest() -> Bundle {
    Bundle::of(&tiny(Layout::Llama), FoldDtype::Keep)
}

type ManifestEdit = fn(&mut Manifest);

#[test]
fn false_claims_of_a_manifest_are_found_without_a_base() {
    let record = "solver's record";
    let cases: &[(&str, &[&str], ManifestEdit)] = &[
        ("family", &["family"], |m| m.source.family = "qwen3".into()),
        ("basis", &["basis"], |m| m.basis.kind = "original".into()),
        ("dtype", &["fold dtype"], |m| m.fold.dtype = "f16".into()),
        ("wide", &["fold dtype"], |m| m.fold.dtype = "f32".into()),
        ("source hash", &["source files"], |m| m.source.model_hash = Sha([7; 32])),
        ("a source file", &["source files"], |m| m.source.files[0].sha256 = Sha([7; 32])),
        ("a source shard", &["source files"], |m| m.source.files.last_mut().expect("shard").sha256 = Sha([7; 32])),
        ("a length", &["source files"], |m| m.source.files.last_mut().expect("shard").n_bytes += 2),
        ("a name", &["source files"], |m| m.source.files[0].path = "LICENCE".into()),
        ("no tokens", &["calibration figures", "solver's figures", "enough calibration"], |m| {
            calibration(m).tokens = 0
        }),
        ("tokens", &["calibration figures"], |m| calibration(m).tokens = 257),
        ("few tokens", &["solver's figures", "enough calibration"], |m| {
            let calibration = calibration(m);
            (calibration.tokens, calibration.max_seq_len) = (7, 2);
        }),
        ("length", &["calibration figures", "calibrated length"], |m| calibration(m).max_seq_len = 257),
        ("sequences", &["calibration figures"], |m| calibration(m).sequences = 3),
        ("no sequences", &["calibration figures"], |m| calibration(m).sequences = 0),
        ("beyond the model", &["calibrated length"], |m| {
            *calibration(m) = bundle::one_sequence(1 << 20);
        }),
        ("scaling", &["calibration figures"], |m| calibration(m).rope_scaling = Some("magic".into())),
        ("device", &["calibration figures"], |m| calibration(m).device = "cpu + abacus".into()),
        ("GPU", &[], |m| {
            let calibration = calibration(m);
            (calibration.device, calibration.compute) = ("cuda".into(), "bf16".into());
        }),
        ("compute", &["calibration figures"], |m| calibration(m).compute = "u2".into()),
        ("preset", &[record], |m| m.solve.preset = "magic".into()),
        ("undamped", &["solver's figures"], |m| {
            m.solve.damping = 0.0;
            m.layers[0].key[0].cond_gram = 4e15;
        }),
        ("unknown", &[record], |m| m.solve.transform = "magic".into()),
        ("no statistics", &[record], |m| m.solve.stats_hash = None),
        ("no calibration", &[record], |m| m.calibration = None),
        ("no report", &[record], |m| m.layers.clear()),
        ("damping", &[record], |m| m.solve.damping = -0.01),
        ("nll", &["equivalence"], |m| m.equivalence.as_mut().expect("there").max_nll_diff = 1e-5),
        ("logits", &["equivalence"], |m| m.equivalence.as_mut().expect("there").max_logit_diff = 1e-5),
        ("kl", &["equivalence"], |m| m.equivalence.as_mut().expect("there").mean_kl = 0.0015),
    ];
    for (what, expected, edit) in cases {
        let bundle = honest();
        bundle.edit_manifest(edit);
        println!("{what}");
        assert_only(&bundle.inspect(false), expected);
    }
}

fn calibration(manifest: &mut Manifest) -> &mut wush_format::manifest::Calibration {
    manifest.calibration.as_mut().expect("there")
}

type FigureEdit = fn(&mut HeadReport);

#[test]
fn figures_that_no_statistics_give_are_found() {
    let (possible, stored) = ("solver's figures", "value transforms are the solver's");
    let cases: &[(&str, &[&str], FigureEdit)] = &[
        ("cond_gram", &[possible], |f| f.cond_gram = 0.99),
        ("cond_gram", &[possible], |f| f.cond_gram = 802.0),
        ("cond_hessian", &[possible], |f| f.cond_hessian = 1e17),
        ("cond_transform", &[possible, stored], |f| f.cond_transform = 0.5),
        ("cond_transform", &[possible, stored], |f| f.cond_transform = 29.0),
        ("rank_gram", &[possible], |f| f.rank_gram = 9),
        ("rank_gram", &[possible], |f| f.dead_channels = 1),
        ("dead_channels", &[possible], |f| (f.dead_channels, f.rank_gram, f.rank_hessian) = (9, 0, 0)),
        ("trace_product_over_bound", &[possible], |f| f.trace_product_over_bound = 0.9),
        ("predicted_gain", &[possible], |f| f.predicted_gain = -2.0),
        ("predicted_gain", &[possible], |f| f.predicted_gain = 0.5),
        ("imbalance", &[possible], |f| f.imbalance = 7.5),
        // Possible, but not this matrix's.
        ("condition number", &[stored], |f| f.cond_transform *= 1.0001),
    ];
    for (name, expected, edit) in cases {
        let bundle = honest();
        bundle.edit_manifest(|manifest| edit(&mut manifest.layers[1].value[0]));
        let report = bundle.inspect(false);
        assert_only(&report, expected);
        let found = detail(&report, expected[0]);
        assert!(found.starts_with("layer 1, KV head 0") && found.contains(name), "{name}: {found}");
    }
}

#[test]
fn claims_on_the_source_and_the_fold_are_compared_with_the_base() {
    let cases: &[(&str, ManifestEdit)] = &[
        ("fold error", |m| m.fold.max_rel_error *= 1.001),
        ("fold error", |m| m.fold.max_rel_error = 0.0),
        ("fold error", |m| m.fold.worst_layer = 1 - m.fold.worst_layer),
        ("fold error", |m| m.fold.worst_layer = 99),
        ("files of the source", |m| {
            let shard = m.source.files.last_mut().expect("a shard");
            shard.sha256 = Sha([7; 32]);
            m.source.model_hash = wush_checkpoint::weights_hash(&m.source.files[m.source.files.len() - 1..]);
        }),
    ];
    for (expected, edit) in cases {
        let bundle = honest();
        bundle.edit_manifest(edit);
        assert_only(&bundle.inspect(false), &[]);
        let report = bundle.inspect(true);
        assert!(failed(&report).contains(expected), "{}", to_text(&report));
    }
    // A shard's length can be told from f32 folds by the base alone.
    let bundle = Bundle::of(&Tiny { n_shards: 2, ..tiny(Layout::Qwen2) }, FoldDtype::F32);
    assert_only(&bundle.inspect(true), &[]);
    bundle.edit_manifest(|m| m.source.files.iter_mut().for_each(|file| file.n_bytes += 1));
    assert_only(&bundle.inspect(true), &["files of the source"]);
}

#[test]
fn figures_of_values_are_held_to_the_base() {
    let cases: &[(&str, FigureEdit)] = &[
        ("cond_hessian", |f| f.cond_hessian *= 1.0 + 1e-5),
        ("rank_hessian", |f| f.rank_hessian -= 1),
        ("imbalance", |f| f.imbalance += 1e-3),
        ("predicted_gain", |f| f.predicted_gain *= 1.0 + 1e-3),
    ];
    for (name, edit) in cases {
        let bundle = honest();
        bundle.edit_manifest(|manifest| edit(&mut manifest.layers[1].value[0]));
        assert_only(&bundle.inspect(false), &[]);
        let report = bundle.inspect(true);
        assert_only(&report, &["value transforms fit the base"]);
        let found = detail(&report, "value transforms fit the base");
        assert!(found.starts_with(&format!("layer 1, KV head 0: {name} ")), "{found}");
    }
}

#[test]
fn a_value_transform_that_eq_1_does_not_give_is_found_with_the_base() {
    let (root, tiny) = (TempDir::new().expect("temporary directory"), tiny(Layout::Llama));
    let source = root.path().join("source");
    tiny.write(&source);
    let mut transforms = solved(tiny.transforms(&source), &source);
    let (dim, (sin, cos)) = (8, 0.3_f64.sin_cos());
    let value = transforms.layers.get_mut(&1).expect("there").value.head_mut(0);
    for column in 0..dim {
        let (a, b) = (value[column], value[dim + column]);
        (value[column], value[dim + column]) = (cos * a - sin * b, sin * a + cos * b);
    }
    // Everything that is said of it is true.
    let (gram, hessian) = value_problem(&source, 1, 0);
    let problem = HeadProblem::new(&gram, &hessian, dim);
    let measures = measure(value, &invert(value, dim).matrix, &problem, 0.01).expect("measured");
    transforms.report[1].value[0] = head_report(&measures);
    complete(transforms.clone()).save(&root.path().join("t.safetensors")).expect("saved");
    let bundle = Bundle::make(root, source, &transforms, FoldDtype::Keep);
    assert_only(&bundle.inspect(false), &[]);
    let file = inspect(&bundle.source.with_file_name("t.safetensors"), Some(&bundle.source), &Quiet);
    for report in [bundle.inspect(true), file.expect("transforms")] {
        assert_only(&report, &["value transforms fit the base"]);
        assert!(detail(&report, "value transforms fit the base").contains("not the solution of Eq. 1"));
    }
}

#[test]
fn transforms_scaled_beyond_all_measure_are_no_transforms() {
    let (root, tiny) = (TempDir::new().expect("temporary directory"), tiny(Layout::Llama));
    let (source, path) = (root.path().join("source"), root.path().join("t.safetensors"));
    tiny.write(&source);
    let mut transforms = complete(solved(tiny.transforms(&source), &source));
    transforms.layers.get_mut(&1).expect("there").value.data.iter_mut().for_each(|x| *x *= 1e200);
    transforms.save(&path).expect("saved");
    let report = inspect(&path, None, &Quiet).expect("transforms");
    assert_only(&report, &["value transforms are the solver's"]);
}

#[cfg(unix)]
#[test]
fn a_listed_file_that_is_a_link_out_of_the_bundle_is_refused() {
    let bundle = honest();
    let (path, elsewhere) = (bundle.dir.join("config.json"), bundle.source.with_file_name("elsewhere.json"));
    fs::rename(&path, &elsewhere).expect("moved");
    std::os::unix::fs::symlink(&elsewhere, &path).expect("linked");
    assert!(detail(&bundle.inspect(false), "files").contains("config.json: a link that leads out of the bundle"));
}

#[test]
fn a_tolerance_beyond_the_default_is_told() {
    let bundle = honest();
    bundle.edit_manifest(|m| m.equivalence.as_mut().expect("there").tolerance = 0.5);
    let report = bundle.inspect(false);
    assert_only(&report, &[]);
    assert!(to_text(&report).contains("0.50, as asked for"), "{}", to_text(&report));
    assert!(!to_text(&honest().inspect(false)).contains("as asked for"));
}

/// The key sidecar after an edit, with hashes that fit.
fn with_keys(bundle: Bundle, edit: impl Fn(&mut KeySidecar)) -> Bundle {
    let path = bundle.dir.join(WUSH_DIR).join(KEY_TRANSFORMS);
    let mut sidecar = KeySidecar::load(&path).expect("loads");
    edit(&mut sidecar);
    sidecar.save(&path).expect("saves");
    bundle.rehash();
    bundle
}

fn identity(dim: usize, n: usize) -> Vec<f32> {
    (0..n * dim * dim).map(|at| if at / dim % dim == at % dim { 1.0 } else { 0.0 }).collect()
}

#[test]
fn transforms_of_other_heads_no_transforms_and_scaled_ones_are_found() {
    let edits: [fn(&mut KeySidecar); 4] = [
        |keys| {
            let layer = keys.layers.get_mut(&0).expect("there");
            layer.key.rotate_left(64);
            layer.query.rotate_left(64);
        },
        |keys| {
            let (a, b) = (keys.layers[&0].clone(), keys.layers[&1].clone());
            keys.layers = [(0, b), (1, a)].into();
        },
        |keys| {
            let layer = keys.layers.get_mut(&1).expect("there");
            (layer.key, layer.query) = (identity(8, 2), identity(8, 2));
        },
        |keys| {
            let layer = keys.layers.get_mut(&1).expect("there");
            layer.key.iter_mut().for_each(|x| *x *= 16.0);
            layer.query.iter_mut().for_each(|x| *x /= 16.0);
        },
    ];
    for edit in edits {
        assert_only(&with_keys(honest(), edit).inspect(false), &["key transforms are the solver's"]);
    }
}

/// A bundle of transforms that need no statistics, solved as the pipeline does.
fn named(name: &str) -> Bundle {
    let (root, tiny) = (TempDir::new().expect("temporary directory"), tiny(Layout::Llama));
    let source = root.path().join("source");
    tiny.write(&source);
    let mut transforms = tiny.transforms(&source);
    transforms.solve.transform = name.to_owned();
    transforms.solve.seed = 5;
    let kind = find(name).expect("known");
    for (&layer, entry) in &mut transforms.layers {
        for (role, matrices) in [(Role::Key, &mut entry.key), (Role::Value, &mut entry.value)] {
            for head in 0..matrices.n_heads {
                let problem = HeadProblem::new(&[], &[], matrices.dim);
                let settings = Settings { seed: 5, ..Settings::published(layer, head, role) };
                let solution = solve(kind, &problem, &settings).expect("solved");
                matrices.head_mut(head).copy_from_slice(&solution.transform);
            }
        }
    }
    transforms.save(&root.path().join("t.safetensors")).expect("saved");
    let bundle = Bundle::make(root, source, &transforms, FoldDtype::Keep);
    bundle.edit_manifest(|manifest| {
        (manifest.solve.transform, manifest.solve.seed, manifest.solve.stats_hash) = (name.to_owned(), 5, None);
        (manifest.calibration, manifest.layers) = (None, Vec::new());
    });
    bundle
}

#[test]
fn a_name_that_determines_the_matrices_is_held_to_them() {
    for name in ["identity", "hadamard", "random"] {
        let bundle = named(name);
        assert_only(&bundle.inspect(true), &[]);
        let transforms = inspect(&bundle.source.with_file_name("t.safetensors"), None, &Quiet).expect("transforms");
        assert_only(&transforms, &[]);
        for other in ["identity", "hadamard", "random"].into_iter().filter(|other| *other != name) {
            bundle.edit_manifest(|manifest| manifest.solve.transform = other.to_owned());
            let both = ["key transforms are the solver's", "value transforms are the solver's"];
            assert_only(&bundle.inspect(false), &both);
        }
        bundle.edit_manifest(|manifest| manifest.solve.transform = "wush".to_owned());
        assert_only(&bundle.inspect(false), &["solver's record"]);
    }
    let bundle = named("random");
    bundle.edit_manifest(|manifest| manifest.solve.seed = 6);
    assert_eq!(failed(&bundle.inspect(false)).len(), 2, "another seed gives other matrices");
    let swapped = with_keys(named("random"), |keys| {
        let layer = keys.layers.get_mut(&0).expect("there");
        layer.key.rotate_left(64);
        layer.query.rotate_left(64);
    });
    assert_only(&swapped.inspect(false), &["key transforms are the solver's"]);
}

#[test]
fn the_wush_folder_holds_what_wush_writes_and_no_links() {
    let wush = |bundle: &Bundle, name: &str| bundle.dir.join(WUSH_DIR).join(name);
    let bundle = honest();
    fs::write(wush(&bundle, "more.safetensors"), "x").expect("write");
    bundle.rehash();
    assert_only(&bundle.inspect(false), &["wush folder"]);
    let bundle = honest();
    fs::create_dir(wush(&bundle, "folder")).expect("directory");
    assert_only(&bundle.inspect(false), &["wush folder"]);
    let bundle = honest();
    fs::create_dir(bundle.dir.join(".git")).expect("directory");
    let report = bundle.inspect(false);
    assert_only(&report, &[]);
    assert!(to_text(&report).contains(".git, which are not part of a bundle"), "{}", to_text(&report));
}

#[cfg(unix)]
#[test]
fn links_in_the_wush_folder_are_refused_but_for_blobs_of_a_snapshot() {
    let link = |bundle: &Bundle, blobs: &Path| {
        let path = bundle.dir.join(WUSH_DIR).join(VALUE_TRANSFORMS);
        fs::create_dir_all(blobs).expect("directory");
        fs::rename(&path, blobs.join("0123")).expect("moved");
        std::os::unix::fs::symlink(blobs.join("0123"), &path).expect("linked");
    };
    let bundle = honest();
    link(&bundle, &bundle.source.with_file_name("elsewhere"));
    let report = bundle.inspect(false);
    assert_only(&report, &["wush folder", "files"]);
    assert!(detail(&report, "wush folder").contains("value_transforms.safetensors is a link"));

    let mut bundle = honest();
    let repo = bundle.source.with_file_name("models--org--name");
    fs::create_dir_all(repo.join("snapshots")).expect("directory");
    fs::rename(&bundle.dir, repo.join("snapshots/abc")).expect("moved");
    bundle.dir = repo.join("snapshots/abc");
    link(&bundle, &repo.join("blobs"));
    assert_only(&bundle.inspect(false), &[]);
}

#[test]
fn the_index_says_how_large_the_shards_are() {
    for (dtype, alone) in [(FoldDtype::Keep, &["index"][..]), (FoldDtype::F32, &[])] {
        let bundle = Bundle::of(&Tiny { n_shards: 2, ..tiny(Layout::Llama) }, dtype);
        let report = bundle.inspect(true);
        assert_only(&report, &[]);
        assert!(detail(&report, "index").ends_with("as the shards"), "{}", to_text(&report));
        let path = bundle.dir.join("model.safetensors.index.json");
        let text = fs::read_to_string(&path).expect("readable");
        let at = text.find("total_size\": ").expect("there") + "total_size\": ".len();
        fs::remove_file(&path).expect("remove");
        fs::write(&path, format!("{}1{}", &text[..at], &text[at..])).expect("write");
        bundle.rehash();
        let files = if dtype == FoldDtype::Keep { vec!["source files", "index"] } else { alone.to_vec() };
        assert_only(&bundle.inspect(false), &files);
        assert!(failed(&bundle.inspect(true)).contains(&"other files"));
    }
}

#[test]
fn a_plain_checkpoint_must_be_in_its_base_s_own_coordinates() {
    for layout in [Layout::Llama, Layout::Qwen2] {
        let bundle = Bundle::of(&tiny(layout), FoldDtype::Keep);
        fs::remove_dir_all(bundle.dir.join(WUSH_DIR)).expect("removed");
        // The same function, folded: without its manifest it does not say so.
        assert_only(&bundle.inspect(true), &["same coordinates"]);
    }
    // A change of basis as small as one row added to another, a thirtieth of it.
    let root = TempDir::new().expect("temporary directory");
    let (source, dir) = (root.path().join("source"), root.path().join("other"));
    let tiny = Tiny { hidden: 512, ..tiny(Layout::Llama) };
    tiny.write(&source);
    let mut tensors = tiny.tensors();
    let by = 1.0 / 30.0;
    for (name, shape, values) in &mut tensors {
        let n = shape.last().copied().unwrap_or(0);
        if name == "model.layers.0.self_attn.v_proj.weight" {
            (0..n).for_each(|at| values[at] += by * values[n + at]);
        } else if name == "model.layers.0.self_attn.o_proj.weight" {
            // Both query heads that read KV head 0.
            values.chunks_exact_mut(n).for_each(|row| (0..2).for_each(|head| row[8 * head + 1] -= by * row[8 * head]));
        }
    }
    tiny.write_tensors(&dir, &tensors);
    let report = inspect(&dir, Some(&source), &Quiet).expect("a checkpoint");
    assert_only(&report, &["same coordinates"]);
    assert!(detail(&report, "same coordinates").contains("layer 0, KV head 0"), "{}", to_text(&report));
}

/// A statistics file of the tiny model after an edit, inspected with its base.
fn statistics_after(edit: impl FnOnce(&mut Statistics)) -> Report {
    let root = TempDir::new().expect("temporary directory");
    let (source, path, tiny) = (root.path().join("source"), root.path().join("s.safetensors"), tiny(Layout::Llama));
    tiny.write(&source);
    let mut statistics = statistics(&tiny, &source);
    edit(&mut statistics);
    statistics.save(&path).expect("saved");
    inspect(&path, Some(&source), &Quiet).expect("statistics")
}

#[test]
fn statistics_are_compared_with_their_base_and_themselves() {
    assert_only(&statistics_after(|_| ()), &[]);
    let doubled =
        |s: &mut Statistics| s.layers.get_mut(&1).expect("there").output_gram.data.iter_mut().for_each(|x| *x *= 2.0);
    assert_only(&statistics_after(doubled), &["output Gram matrices"]);
    assert_only(&statistics_after(|s| s.info.family = "qwen3".into()), &["same model"]);
    assert_only(&statistics_after(|s| s.info.n_heads = 8), &["same model"]);
    assert_only(&statistics_after(|s| drop(s.layers.remove(&1))), &["same model"]);
    assert_only(&statistics_after(|s| s.info.device = "abacus".into()), &["forward pass"]);
    let on_a_gpu = |s: &mut Statistics| (s.info.device, s.info.compute) = ("cuda".into(), "bf16".into());
    assert_only(&statistics_after(on_a_gpu), &[]);
    let long = |s: &mut Statistics| (s.info.positions, s.info.max_seq_len) = (1 << 20, 1 << 20);
    assert_only(&statistics_after(long), &["calibrated length"]);
    let twice = |s: &mut Statistics| {
        s.info.sequence_hashes.push(s.info.sequence_hashes[0]);
        s.info.max_seq_len = 32;
    };
    assert_only(&statistics_after(twice), &["sequences"]);
    // Seven directions cannot have come from two positions; the mean key allows them, where it is zero.
    let few = |s: &mut Statistics| {
        s.layers.values_mut().for_each(|layer| layer.key_sum.fill(0.0));
        (s.info.positions, s.info.max_seq_len) = (2, 2);
    };
    assert_only(&statistics_after(few), &["enough calibration", "ranks"]);
    let indefinite = |s: &mut Statistics| {
        let gram = s.layers.get_mut(&0).expect("there").value_gram.head_mut(0);
        let (a, b) = ((gram[0] * gram[9]).sqrt(), gram[0]);
        (gram[1], gram[8]) = (-a, -a);
        gram[0] = b;
    };
    assert_only(&statistics_after(indefinite), &["solvable"]);
}

#[test]
fn escapes_reach_no_terminal_and_no_page() {
    let hostile = "\u{1b}[2J\u{1b}[1;1HVerdict: ok";
    let root = TempDir::new().expect("temporary directory");
    let (source, path, tiny) = (root.path().join("source"), root.path().join("t.safetensors"), tiny(Layout::Llama));
    tiny.write(&source);
    complete(tiny.transforms(&source)).save(&path).expect("saved");
    let clean = |report: &Report, expected: &[&str]| {
        assert_only(report, expected);
        for text in [to_text(report), to_html(report)] {
            assert!(!text.contains('\u{1b}') && text.contains("\\u{1b}[2J"), "{text:?}");
        }
    };
    let json = serde_json::json!({ "source": hostile }).to_string();
    for (key, value) in [("transform", hostile), ("calibration", json.as_str()), (hostile, "x")] {
        let (tensors, mut metadata) = parts(&path);
        metadata.insert(key.to_owned(), value.to_owned());
        let spoiled = path.with_file_name("spoiled.safetensors");
        write_tensor_file(&spoiled, &tensors, &metadata).expect("written");
        clean(&inspect(&spoiled, None, &Quiet).expect("inspected"), &["transforms"]);
    }
    // Names of files and tensors are repeated, escaped.
    let bundle = honest();
    fs::write(bundle.dir.join("a\u{1b}[2J.txt"), "x").expect("write");
    clean(&bundle.inspect(false), &["unlisted files"]);
    let other = root.path().join("other");
    let mut tensors = tiny.tensors();
    tensors.push(("\u{1b}[2J".to_owned(), vec![1], vec![0.0]));
    tiny.write_tensors(&other, &tensors);
    let report = inspect(&source, Some(&other), &Quiet);
    assert!(report.as_ref().map_or_else(|error| !error.to_string().contains('\u{1b}'), |_| true), "{report:?}");
    if let Ok(report) = report {
        assert!(!to_text(&report).contains('\u{1b}'));
    }
}

type Parts = (BTreeMap<String, NewTensor>, BTreeMap<String, String>);

fn parts(path: &Path) -> Parts {
    Transforms::load(path).expect("valid");
    let file = TensorFile::open(path).expect("valid");
    let tensor = |name: &String| {
        let view = file.tensor(name).expect("there");
        NewTensor { dtype: view.dtype, shape: view.shape.to_vec(), bytes: view.bytes.to_vec() }
    };
    (file.tensors().keys().map(|name| (name.clone(), tensor(name))).collect(), file.metadata().clone())
}

/// What cannot be read is said to be that, and nothing is said of what was not seen.
#[test]
fn of_what_cannot_be_read_nothing_else_is_said() {
    let bundle = honest();
    let feedback = ValueFeedback {
        layers: BTreeMap::from([(0, FeedbackLayer { n_kv_heads: 1, head_dim: 1, value_feedback: vec![1.0] })]),
        model_hash: Sha([1; 32]),
    };
    feedback.save(&bundle.dir.join(WUSH_DIR).join(VALUE_FEEDBACK)).expect("saved");
    fs::write(bundle.manifest_path(), b"{").expect("written");
    let report = bundle.inspect(false);
    assert_only(&report, &["manifest"]);
    assert!(!to_text(&report).contains("nothing that wush writes"), "{}", to_text(&report));
    fs::write(bundle.dir.join(WUSH_DIR).join("more"), b"").expect("written");
    assert_only(&bundle.inspect(false), &["wush folder", "manifest"]);

    let statistics = bundle.source.with_file_name("s.safetensors");
    let transforms = bundle.source.with_file_name("t.safetensors");
    statistics_of(&bundle.source, &statistics);
    complete(tiny(Layout::Llama).transforms(&bundle.source)).save(&transforms).expect("saved");
    for (path, check) in [(statistics, "statistics"), (transforms, "transforms")] {
        assert!(inspect(&path, Some(&bundle.source), &Quiet).expect("read").checks.len() > 2);
        let mut bytes = fs::read(&path).expect("there");
        *bytes.last_mut().expect("not empty") ^= 1;
        fs::write(&path, bytes).expect("written");
        let report = inspect(&path, Some(&bundle.source), &Quiet).expect("read");
        assert_only(&report, &[check]);
        assert!(!to_text(&report).contains("belongs to base"), "{}", to_text(&report));
    }
}

fn statistics_of(source: &Path, path: &Path) {
    statistics(&tiny(Layout::Llama), source).save(path).expect("saved");
}
