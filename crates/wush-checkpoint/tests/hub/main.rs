//! The hub's client against a local server that answers like the hub, and misbehaves as the network does.

mod server;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use server::{COMMIT, Fault, HubServer, Served, etag_of};
use tempfile::TempDir;
use wush_checkpoint::CheckpointError;
use wush_checkpoint::hub::{HubOptions, HubProblem, ResolvedModel, resolve_dataset, resolve_model};
use wush_format::monitor::{Monitor, Quiet};

const MODEL: &str = "models/org/tiny";
const DATASET: &str = "datasets/org/texts";

/// Counts, notes, and interrupts after so many bytes.
#[derive(Default)]
struct Watch {
    total: AtomicU64,
    done: AtomicU64,
    notes: Mutex<Vec<String>>,
    stop_after: Option<u64>,
}

impl Monitor for Watch {
    fn begin(&self, _stage: &str, unit: &'static str, total: u64) {
        assert_eq!(unit, "bytes");
        self.total.store(total, Ordering::Relaxed);
    }
    fn advance(&self, n: u64) {
        self.done.fetch_add(n, Ordering::Relaxed);
    }
    fn end(&self) {}
    fn note(&self, line: &str) {
        self.notes.lock().expect("no thread panicked").push(line.to_owned());
    }
    fn interrupted(&self) -> bool {
        self.stop_after.is_some_and(|n| self.done.load(Ordering::Relaxed) >= n)
    }
}

/// A server with a small model, and an empty cache.
struct Setup {
    server: HubServer,
    cache: TempDir,
    options: HubOptions,
}

/// 300 kB that do not repeat in step with any block size.
fn weights() -> Vec<u8> {
    (0..300_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn setup() -> Setup {
    let server = HubServer::start();
    server
        .put(MODEL, "config.json", b"{\"model_type\":\"llama\"}", false)
        .put(MODEL, "tokenizer.json", b"{}", true)
        .put(MODEL, "model.safetensors", &weights(), true)
        .put(MODEL, "LICENSE", b"Apache-2.0", false)
        .put(MODEL, "sub/modeling tiny.py", b"pass\n", false)
        .put(MODEL, "pytorch_model.bin", b"pickle", true)
        .put(MODEL, "tiny-q4.gguf", b"gguf", true)
        .put(MODEL, "consolidated.safetensors", b"twice", true)
        .put(MODEL, "onnx/config.json", b"{}", false);
    let cache = tempfile::tempdir().expect("temporary directory");
    let options = HubOptions {
        endpoint: Some(server.endpoint.clone()),
        token: Some("hf_test".to_owned()),
        cache_dir: Some(cache.path().to_owned()),
        offline: false,
    };
    Setup { server, cache, options }
}

impl Setup {
    fn resolve(&self, arg: &str) -> Result<ResolvedModel, CheckpointError> {
        resolve_model(arg, &self.options, &Quiet)
    }

    fn offline(&self) -> HubOptions {
        HubOptions { offline: true, endpoint: Some("http://127.0.0.1:1".to_owned()), ..self.options.clone() }
    }

    fn repository(&self) -> PathBuf {
        self.cache.path().join("models--org--tiny")
    }

    fn partial(&self) -> PathBuf {
        let etag = etag_of(&Served { bytes: weights(), large: true, etag: None });
        self.repository().join("blobs").join(format!("{etag}.incomplete"))
    }

    /// The `GET`s of weights since the last look, by the byte that they start at.
    fn weight_requests(&self) -> Vec<u64> {
        let log = self.server.take_log();
        let gets = log.iter().filter(|line| line.contains("storage GET") && line.contains("model.safetensors"));
        gets.map(|line| line.split(" from ").nth(1).map_or(0, |start| start.parse().expect("a number"))).collect()
    }
}

fn problem(error: CheckpointError) -> HubProblem {
    match error {
        CheckpointError::Hub { problem, .. } => problem,
        other => panic!("expected a problem of the hub, found {other}"),
    }
}

fn assert_weights(model: &ResolvedModel) {
    let found = fs::read(model.dir.join("model.safetensors")).expect("readable");
    assert!(found == weights(), "{} bytes, not those served", found.len());
}

fn relative_files(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("readable").flatten() {
        let name = entry.file_name().into_string().expect("UTF-8");
        if entry.path().is_dir() {
            found.extend(relative_files(&entry.path()).iter().map(|below| format!("{name}/{below}")));
        } else {
            found.push(name);
        }
    }
    found.sort_unstable();
    found
}

#[test]
fn fetches_what_is_needed_into_pythons_layout() {
    let setup = setup();
    let watch = Watch::default();
    let model = resolve_model("org/tiny", &setup.options, &watch).expect("served");
    let expected = ResolvedModel {
        dir: setup.repository().join("snapshots").join(COMMIT),
        id: "org/tiny".into(),
        revision: Some(COMMIT.into()),
    };
    assert_eq!(model, expected);
    assert_weights(&model);
    let files = ["LICENSE", "config.json", "model.safetensors", "sub/modeling tiny.py", "tokenizer.json"];
    assert_eq!(relative_files(&model.dir), files);
    assert_eq!(fs::read_to_string(setup.repository().join("refs/main")).expect("written"), COMMIT);
    let link = fs::read_link(model.dir.join("sub/modeling tiny.py")).expect("a link");
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    assert!(!setup.partial().exists());
    let n_bytes: u64 = files.iter().map(|name| fs::metadata(model.dir.join(name)).expect("there").len()).sum();
    assert_eq!((watch.total.into_inner(), watch.done.into_inner()), (n_bytes, n_bytes));
}

#[test]
fn token_goes_to_the_hub_and_not_to_storage() {
    let setup = setup();
    setup.resolve("org/tiny").expect("served");
    let log = setup.server.take_log();
    let (hub, storage): (Vec<_>, Vec<_>) = log.iter().partition(|line| line.starts_with("hub"));
    assert!(hub.iter().all(|line| line.ends_with("with Bearer hf_test")), "{hub:#?}");
    assert!(!storage.is_empty() && storage.iter().all(|line| !line.contains("Bearer")), "{storage:#?}");
}

#[test]
fn what_is_cached_is_not_fetched_again() {
    let setup = setup();
    let first = setup.resolve("org/tiny").expect("served");
    setup.server.take_log();
    assert_eq!(setup.resolve("org/tiny").expect("cached"), first);
    let log = setup.server.take_log();
    assert!(log.iter().all(|line| line.contains(" /api/")), "{log:#?}");
    assert_eq!(resolve_model("org/tiny", &setup.offline(), &Quiet).expect("cached"), first);
    let pinned = resolve_model(&format!("org/tiny@{COMMIT}"), &setup.offline(), &Quiet);
    assert_eq!(pinned.expect("cached"), first);
}

#[test]
fn a_blob_of_another_commit_is_linked() {
    let setup = setup();
    setup.resolve("org/tiny").expect("served");
    fs::remove_dir_all(setup.repository().join("snapshots")).expect("removable");
    setup.server.take_log();
    assert_weights(&setup.resolve("org/tiny").expect("served"));
    let log = setup.server.take_log();
    assert!(log.iter().any(|line| line.contains("hub HEAD")), "{log:#?}");
    assert!(!log.iter().any(|line| line.contains("storage GET")), "{log:#?}");
}

#[test]
fn revisions_are_branches_tags_and_commits() {
    let setup = setup();
    for revision in ["main", "refs/pr/1", COMMIT] {
        let model = setup.resolve(&format!("org/tiny@{revision}")).expect("served");
        assert_eq!(model.revision.as_deref(), Some(COMMIT), "{revision}");
    }
    assert!(setup.repository().join("refs/refs/pr/1").is_file());
}

#[test]
fn a_cut_transfer_resumes() {
    let setup = setup();
    setup.server.fault("model.safetensors", &[Fault::Cut(100_000), Fault::Cut(50_000)]);
    assert_weights(&setup.resolve("org/tiny").expect("resumed"));
    assert_eq!(setup.weight_requests(), [0, 100_000, 150_000]);
}

#[test]
fn an_interrupted_transfer_is_resumed_by_the_next_run() {
    let setup = setup();
    setup.server.fault("model.safetensors", &[Fault::Cut(120_000)]);
    let watch = Watch { stop_after: Some(100_000), ..Watch::default() };
    let error = resolve_model("org/tiny", &setup.options, &watch).expect_err("interrupted");
    assert!(matches!(error, CheckpointError::Interrupted), "{error}");
    let kept = fs::metadata(setup.partial()).expect("the partial file is kept").len();
    assert!(kept > 0 && kept <= 120_000, "{kept}");
    assert!(!setup.repository().join("refs/main").exists(), "an unfinished download must not look whole");
    setup.weight_requests();
    let watch = Watch::default();
    assert_weights(&resolve_model("org/tiny", &setup.options, &watch).expect("resumed"));
    assert_eq!(setup.weight_requests(), [kept]);
    assert_eq!(watch.done.into_inner(), watch.total.into_inner(), "kept bytes count as progress");
}

#[test]
fn a_server_without_ranges_starts_over() {
    for fault in [Fault::IgnoreRange, Fault::WrongRange] {
        let setup = setup();
        setup.server.fault("model.safetensors", &[Fault::Cut(100_000), fault.clone()]);
        assert_weights(&setup.resolve("org/tiny").expect("started over"));
        assert_eq!(setup.weight_requests()[..2], [0, 100_000], "{fault:?}");
    }
}

#[test]
fn a_partial_file_that_is_too_long_is_dropped() {
    let setup = setup();
    fs::create_dir_all(setup.partial().parent().expect("has one")).expect("creatable");
    fs::write(setup.partial(), vec![7; 400_000]).expect("writable");
    assert_weights(&setup.resolve("org/tiny").expect("fetched"));
    assert_eq!(setup.weight_requests(), [0]);
}

#[test]
fn wrong_content_is_found_and_deleted() {
    let setup = setup();
    setup.server.fault("model.safetensors", &[Fault::Corrupt]);
    let error = setup.resolve("org/tiny").expect_err("another SHA-256");
    assert!(error.hint().is_some_and(|hint| hint.contains("again")), "{:?}", error.hint());
    assert!(matches!(problem(error), HubProblem::Mismatch { .. }));
    assert_eq!(fs::metadata(setup.partial()).expect("there").len(), 0);
    assert_weights(&setup.resolve("org/tiny").expect("fetched anew"));
}

#[test]
fn a_damaged_partial_file_is_found() {
    let setup = setup();
    fs::create_dir_all(setup.partial().parent().expect("has one")).expect("creatable");
    fs::write(setup.partial(), b"not the weights' first bytes").expect("writable");
    assert!(matches!(problem(setup.resolve("org/tiny").expect_err("damaged")), HubProblem::Mismatch { .. }));
    assert_weights(&setup.resolve("org/tiny").expect("fetched anew"));
}

#[test]
fn a_body_of_the_wrong_length_is_refused() {
    let setup = setup();
    setup.server.fault("model.safetensors", &[Fault::Longer]);
    let error = setup.resolve("org/tiny").expect_err("one byte more than announced");
    assert!(matches!(&error, CheckpointError::Hub { problem: HubProblem::BadAnswer { .. }, .. }), "{error}");
    assert!(error.to_string().contains("more than the announced 300000 bytes"), "{error}");

    let cuts = vec![Fault::Cut(0); 20];
    setup.server.fault("model.safetensors", &[vec![Fault::Cut(1000)], cuts].concat());
    let error = setup.resolve("org/tiny").expect_err("it never gets further");
    let expected = "model.safetensors: the transfer broke off at 1000 of 300000 bytes";
    assert!(error.to_string().contains(expected), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("resumes")));
}

#[test]
fn a_server_that_recovers_is_waited_for() {
    let setup = setup();
    setup.server.fault("config.json", &[Fault::Status(503, ""), Fault::Status(429, "")]);
    assert_weights(&setup.resolve("org/tiny").expect("recovered"));
}

#[test]
fn refusals_say_what_to_set() {
    let setup = setup();
    let cases = [
        ((403, "GatedRepo"), "the hub refuses access (HTTP 403, gated repository)", "accept the terms"),
        ((401, "GatedRepo"), "the hub refuses access (HTTP 401, gated repository)", "HF_TOKEN"),
        ((401, ""), "the hub refuses access (HTTP 401)", "HF_TOKEN"),
        ((403, ""), "the hub refuses access (HTTP 403)", "local checkpoint directory"),
    ];
    for (refuse, message, hint) in cases {
        setup.server.state.lock().expect("no thread panicked").refuse = Some(refuse);
        let error = setup.resolve("org/tiny").expect_err("refused");
        assert_eq!(error.to_string(), format!("model org/tiny: {message}"));
        assert!(error.hint().is_some_and(|text| text.contains(hint)), "{:?}", error.hint());
    }
}

#[test]
fn what_is_not_there_is_named() {
    let setup = setup();
    let cases = [
        ("org/other", "model org/other: the hub has no model of this name"),
        ("org/tiny@v9", "model org/tiny: the hub has no model of this name with revision v9"),
    ];
    for (arg, message) in cases {
        assert_eq!(setup.resolve(arg).expect_err("absent").to_string(), message);
    }
    setup.server.state.lock().expect("no thread panicked").refuse = Some((404, "EntryNotFound"));
    let error = setup.resolve("org/tiny").expect_err("absent");
    assert_eq!(error.to_string(), "model org/tiny: the hub has no file LICENSE");
}

#[test]
fn arguments_that_are_no_model_are_refused() {
    let setup = setup();
    let file = setup.cache.path().join("file");
    fs::write(&file, b"").expect("writable");
    let file = file.to_str().expect("UTF-8");
    for arg in ["tiny", "a/b/c", "./missing", "/missing/dir", "org/", "org/na me", "../tiny", "org/a..b", "", file] {
        let error = setup.resolve(arg).expect_err(arg);
        assert!(error.hint().is_some_and(|hint| hint.contains("org/name")), "{arg}");
        assert!(matches!(problem(error), HubProblem::BadId { .. }), "{arg}");
    }
    for revision in ["", "..", "../../x", "a//b", "/abs", "a b", "-/../.."] {
        let error = setup.resolve(&format!("org/tiny@{revision}")).expect_err(revision);
        assert!(matches!(problem(error), HubProblem::BadId { .. }), "{revision}");
    }
    assert_eq!(setup.server.take_log(), Vec::<String>::new(), "nothing of this is asked of the hub");
}

#[test]
fn an_existing_directory_needs_no_hub() {
    let setup = setup();
    let dir = setup.cache.path().join("my-model");
    fs::create_dir(&dir).expect("creatable");
    let model = setup.resolve(dir.to_str().expect("UTF-8")).expect("a directory");
    assert_eq!(model, ResolvedModel { dir, id: "my-model".to_owned(), revision: None });
    assert_eq!(setup.server.take_log(), Vec::<String>::new());
}

#[test]
fn models_of_other_formats_are_named() {
    let setup = setup();
    setup.server.put("models/org/old", "config.json", b"{}", false).put(
        "models/org/old",
        "pytorch_model.bin",
        b"x",
        true,
    );
    let error = setup.resolve("org/old").expect_err("no safetensors");
    let expected = "model org/old: the repository has no safetensors weights (found pytorch_model.bin)";
    assert_eq!(error.to_string(), expected);
    assert!(!setup.cache.path().join("models--org--old").exists(), "nothing is fetched in vain");
}

#[test]
fn shards_are_those_of_the_index() {
    let setup = setup();
    for name in ["config.json", "model.safetensors.index.json"] {
        setup.server.put("models/org/big", name, b"{}", false);
    }
    for name in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "extra.safetensors"] {
        setup.server.put("models/org/big", name, name.as_bytes(), true);
    }
    let model = setup.resolve("org/big").expect("served");
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let found = relative_files(&model.dir);
    assert_eq!(found[1..3], shards, "{found:?}");
    assert_eq!(found.len(), 4, "{found:?}");
}

#[test]
fn offline_says_what_to_pass() {
    let setup = setup();
    let error = resolve_model("org/tiny", &setup.offline(), &Quiet).expect_err("nothing is cached");
    assert_eq!(error.to_string(), "model org/tiny: not in the local cache at revision main");
    let hint = error.hint().expect("there is a remedy");
    assert!(hint.contains("local checkpoint directory") && hint.contains("hf download org/tiny"), "{hint}");

    let model = setup.resolve("org/tiny").expect("served");
    fs::remove_file(model.dir.join("model.safetensors")).expect("removable");
    let error = resolve_model("org/tiny", &setup.offline(), &Quiet).expect_err("not whole");
    assert_eq!(error.to_string(), "model org/tiny: a *.safetensors file is not in the local cache at revision main");
}

#[test]
fn a_hub_that_does_not_answer_is_replaced_by_the_cache() {
    let setup = setup();
    let silent = HubOptions { endpoint: Some("http://127.0.0.1:1".to_owned()), ..setup.options.clone() };
    let error = resolve_model("org/tiny", &silent, &Quiet).expect_err("nothing is cached");
    assert!(matches!(problem(error), HubProblem::Unreachable { .. }));
    let first = setup.resolve("org/tiny").expect("served");
    let watch = Watch::default();
    assert_eq!(resolve_model("org/tiny", &silent, &watch).expect("cached"), first);
    let notes = watch.notes.into_inner().expect("no thread panicked");
    assert!(notes.len() == 1 && notes[0].contains("does not answer") && notes[0].contains(COMMIT), "{notes:?}");
}

#[test]
fn a_cache_filled_by_python_is_used_as_is() {
    let setup = setup();
    let snapshot = setup.repository().join("snapshots").join(COMMIT);
    for dir in [&snapshot, &setup.repository().join("blobs"), &setup.repository().join("refs")] {
        fs::create_dir_all(dir).expect("creatable");
    }
    fs::write(setup.repository().join("refs/main"), COMMIT).expect("writable");
    for name in ["config.json", "model.safetensors"] {
        fs::write(setup.repository().join("blobs").join(name), b"{}").expect("writable");
        std::os::unix::fs::symlink(format!("../../blobs/{name}"), snapshot.join(name)).expect("linkable");
    }
    let model = resolve_model("org/tiny", &setup.offline(), &Quiet).expect("cached");
    assert_eq!(model.dir, snapshot);
}

#[test]
fn hostile_answers_do_not_leave_the_cache() {
    let evil_path = setup();
    evil_path.server.put(MODEL, "../../evil.json", b"{}", false);
    assert!(matches!(problem(evil_path.resolve("org/tiny").expect_err("refused")), HubProblem::BadAnswer { .. }));

    let evil_commit = setup();
    evil_commit.server.state.lock().expect("no thread panicked").commit = Some("../../../evil".to_owned());
    assert!(matches!(problem(evil_commit.resolve("org/tiny").expect_err("refused")), HubProblem::BadAnswer { .. }));

    let evil_etag = setup();
    let served = Served { bytes: b"{}".to_vec(), large: false, etag: Some("../../evil".to_owned()) };
    let mut state = evil_etag.server.state.lock().expect("no thread panicked");
    state.repositories.get_mut(MODEL).expect("served").insert("config.json".to_owned(), served);
    drop(state);
    assert!(matches!(problem(evil_etag.resolve("org/tiny").expect_err("refused")), HubProblem::BadAnswer { .. }));
}

fn with_texts() -> Setup {
    let setup = setup();
    setup
        .server
        .put(DATASET, "data/b.jsonl", b"{\"text\":\"b\"}\n", true)
        .put(DATASET, "data/a.jsonl", b"{\"text\":\"a\"}\n", true)
        .put(DATASET, "data/deep/c.jsonl", b"{\"text\":\"c\"}\n", true)
        .put(DATASET, "README.md", b"# texts", false);
    setup
}

#[test]
fn data_sets_are_fetched_file_by_file() {
    let setup = with_texts();
    let dataset = resolve_dataset("org/texts", None, "data/*", &setup.options, &Quiet).expect("served");
    assert_eq!(dataset.files, ["data/a.jsonl", "data/b.jsonl"]);
    assert_eq!((dataset.id.as_str(), dataset.revision.as_str()), ("org/texts", COMMIT));
    let log = setup.server.take_log();
    assert!(log.iter().any(|line| line.contains(&format!("tree/{COMMIT}/data"))), "only data/ is listed: {log:#?}");
    assert!(log.iter().all(|line| line.contains(" /api/")), "{log:#?}");
    let path = dataset.fetch(1, &Quiet).expect("served");
    assert_eq!(fs::read(path).expect("readable"), b"{\"text\":\"b\"}\n");
    assert!(setup.server.take_log().iter().all(|line| !line.contains("a.jsonl")), "the other file is not touched");
    let all = resolve_dataset("org/texts", None, "**/*.jsonl", &setup.options, &Quiet).expect("served");
    assert_eq!(all.files, ["data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl"]);
}

#[test]
fn offline_data_sets_are_what_is_cached() {
    let setup = with_texts();
    let error = resolve_dataset("org/texts", None, "data/*", &setup.offline(), &Quiet).expect_err("nothing cached");
    assert_eq!(error.to_string(), "data set org/texts: not in the local cache at revision main");
    assert!(error.hint().is_some_and(|hint| hint.contains("--calib FILE") && hint.contains("--repo-type dataset")));
    let dataset = resolve_dataset("org/texts", None, "data/*", &setup.options, &Quiet).expect("served");
    let path = dataset.fetch(0, &Quiet).expect("served");
    let watch = Watch::default();
    let cached = resolve_dataset("org/texts", None, "data/*", &setup.offline(), &watch).expect("cached");
    assert_eq!(cached.files, ["data/a.jsonl"]);
    assert_eq!(cached.fetch(0, &Quiet).expect("cached"), path);
    let notes = watch.notes.into_inner().expect("no thread panicked");
    assert!(notes.len() == 1 && notes[0].contains("1 cached files"), "{notes:?}");
}

#[test]
fn globs_that_match_nothing_are_named() {
    let setup = with_texts();
    let error = resolve_dataset("org/texts", None, "*.parquet", &setup.options, &Quiet).expect_err("none");
    assert_eq!(error.to_string(), format!("data set org/texts: no file matches *.parquet at commit {COMMIT}"));
    let error = resolve_dataset("org/texts", None, "nowhere/*", &setup.options, &Quiet).expect_err("none");
    assert_eq!(error.to_string(), "data set org/texts: the hub has no directory nowhere");
    let error = resolve_dataset("org/texts", None, "a[", &setup.options, &Quiet).expect_err("no glob");
    assert!(matches!(problem(error), HubProblem::BadGlob { .. }));
    let error = resolve_dataset("org/none", Some("main"), "*", &setup.options, &Quiet).expect_err("absent");
    assert_eq!(error.to_string(), "data set org/none: the hub has no data set of this name");
}
