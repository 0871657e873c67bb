//! Tests of the workspace as a whole: who may depend on whom, and every source file's opening.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use cargo_metadata::{DependencyKind, MetadataCommand};
use wush_tests::root;

/// Every allowed edge between crates of this workspace, as `docs/architecture.md` draws them. Tests and benches may use more.
const ALLOWED: &[(&str, &[&str])] = &[
    ("wush-format", &[]),
    ("wush-transform", &[]),
    ("wush-quant", &[]),
    ("wush-runtime", &["wush-format", "wush-quant"]),
    ("wush-tests", &[]),
    ("wush-checkpoint", &["wush-format"]),
    ("wush-data", &["wush-format", "wush-checkpoint"]),
    ("wush-model", &["wush-format", "wush-checkpoint"]),
    ("wush-stats", &["wush-format", "wush-checkpoint", "wush-model"]),
    ("wush-gpu", &["wush-format", "wush-checkpoint", "wush-model", "wush-stats"]),
    ("wush-fold", &["wush-format", "wush-checkpoint", "wush-model"]),
    ("wush-inspect", &["wush-format", "wush-checkpoint", "wush-model", "wush-stats", "wush-transform", "wush-fold"]),
    ("wush-export", &["wush-format"]),
    (
        "wush-pipeline",
        &[
            "wush-format",
            "wush-checkpoint",
            "wush-data",
            "wush-model",
            "wush-stats",
            "wush-gpu",
            "wush-transform",
            "wush-fold",
            "wush-inspect",
            "wush-export",
            "wush-quant",
            "wush-eval",
            "wush-generate",
            "wush-runtime",
            "wush-serve",
        ],
    ),
    ("wush-eval", &["wush-format", "wush-model", "wush-quant", "wush-runtime"]),
    ("wush-generate", &["wush-format", "wush-model", "wush-quant", "wush-runtime"]),
    ("wush-python", &["wush-format", "wush-quant", "wush-runtime"]),
    ("wush-serve", &["wush-format", "wush-checkpoint", "wush-model", "wush-generate", "wush-runtime"]),
    ("wush", &["wush-pipeline"]),
];

/// Direct dependencies that a crate must never have, with the reason.
const FORBIDDEN: &[(&str, &str, &str)] = &[
    ("wush-format", "faer", "the runtime stands on the formats and keeps a small tree"),
    ("wush-format", "zip", "the runtime stands on the formats and keeps a small tree"),
    ("wush-format", "rayon", "the runtime stands on the formats and keeps a small tree"),
    ("wush-format", "tokenizers", "the runtime stands on the formats and keeps a small tree"),
    ("wush-quant", "safetensors", "the quantizers know no files"),
    ("wush-quant", "rayon", "whoever calls the quantizers decides about threads"),
    ("wush-runtime", "faer", "a server links the runtime: a small tree, no solver"),
    ("wush-runtime", "tokenizers", "the runtime knows no text"),
    ("wush-runtime", "tokio", "only the server answers over a network"),
    ("wush-generate", "tokio", "only the server answers over a network"),
    ("wush-pipeline", "tokio", "only the server answers over a network"),
    ("wush-pipeline", "axum", "only the server answers over a network"),
    ("wush-serve", "safetensors", "the server knows no files"),
    ("wush-transform", "safetensors", "the solver knows no files"),
    ("wush-transform", "rayon", "whoever calls the solver decides about threads"),
    ("wush-model", "safetensors", "the forward pass reads through the checkpoint"),
    ("wush-export", "candle-core", "pickles are written, and read by nobody but the tests"),
    ("wush-pipeline", "clap", "only the binary knows the command line"),
    ("wush-pipeline", "indicatif", "only the binary draws"),
    ("wush", "safetensors", "the binary knows no tensors"),
    ("wush", "faer", "the binary knows no numbers"),
    ("wush", "half", "the binary knows no dtypes"),
];

fn direct_dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let mut command = MetadataCommand::new();
    command.manifest_path(root().join("Cargo.toml")).no_deps().other_options(["--offline".to_owned()]);
    let metadata = command.exec().expect("cargo metadata runs");
    let normal = |package: &cargo_metadata::Package| {
        let kept = package.dependencies.iter().filter(|dep| dep.kind == DependencyKind::Normal);
        kept.map(|dep| dep.name.clone()).collect()
    };
    metadata.packages.iter().map(|package| (package.name.to_string(), normal(package))).collect()
}

#[test]
fn crates_depend_only_down_the_flow() {
    let found = direct_dependencies();
    let members: BTreeSet<_> = found.keys().cloned().collect();
    let known: BTreeSet<_> = ALLOWED.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(members, known, "a new crate enters ALLOWED here and docs/architecture.md");
    for (name, allowed) in ALLOWED {
        for dependency in found[*name].intersection(&members) {
            assert!(allowed.contains(&dependency.as_str()), "{name} must not depend on {dependency}");
        }
    }
}

#[test]
fn crates_stay_free_of_what_they_must_not_know() {
    let found = direct_dependencies();
    for (name, dependency, reason) in FORBIDDEN {
        assert!(!found[*name].contains(*dependency), "{name} must not depend on {dependency}: {reason}");
    }
}

#[test]
fn the_architecture_page_names_every_crate() {
    let page = fs::read_to_string(root().join("docs/architecture.md")).expect("docs/architecture.md");
    for (name, _) in ALLOWED {
        assert!(page.contains(&format!("`{name}`")), "docs/architecture.md does not mention {name}");
    }
}

#[test]
fn every_source_file_says_what_it_is() {
    let mut n_files = 0;
    for dir in ["crates", "tests"] {
        for_each_source(&root().join(dir), &mut |path| {
            n_files += 1;
            let text = fs::read_to_string(path).expect("read");
            assert!(text.starts_with("//!"), "{} does not open with //!", path.display());
        });
    }
    assert!(n_files > 20, "only {n_files} source files found");
}

fn for_each_source(dir: &Path, visit: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(dir).expect("listed") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            for_each_source(&path, visit);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            visit(&path);
        }
    }
}
