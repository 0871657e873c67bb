//! Fold and write against `cp -r` plus `sha256sum` of the same files, in the same run.
//!
//! `WUSH_BENCH_MODEL=DIR cargo bench -p wush-fold` takes a checkpoint (the demonstration model otherwise); random
//! well-conditioned transforms stand for solved ones. Every round times both and the medians are compared, since disks and
//! neighbours make single rounds lie. Exits with 1 when the fold takes more than [`MAX_RATIO`] times the copy.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use wush_checkpoint::Checkpoint;
use wush_fold::{FoldDtype, fold};
use wush_format::hash::{Sha, hash_file};
use wush_format::manifest::{FileEntry, Solve};
use wush_format::monitor::Quiet;
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};
use wush_model::spec::ModelSpec;

const ROUNDS: usize = 5;
const MAX_RATIO: f64 = 1.5;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<ExitCode, Error> {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/demo-model");
    let model = std::env::var_os("WUSH_BENCH_MODEL").map_or(demo, PathBuf::from);
    let scratch =
        tempfile::tempdir_in(std::env::var_os("WUSH_BENCH_TMP").map_or_else(std::env::temp_dir, PathBuf::from))?;
    let checkpoint = Checkpoint::open(&model)?;
    let spec = wush_model::arch::resolve(&checkpoint, None)?;
    let transforms = transforms(&checkpoint, &spec)?;
    let (mut copies, mut folds) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let copy = time(|| copy_and_hash(&model, &scratch.path().join("copy")))?;
        let folded = time(|| {
            let out = scratch.path().join("fold");
            std::fs::create_dir(&out)?;
            fold(&checkpoint, &spec, &transforms, &out, FoldDtype::Keep, &Quiet)?;
            Ok(())
        })?;
        println!("round {round}: cp -r + sha256sum {copy:.3} s, fold {folded:.3} s, ratio {:.2}", folded / copy);
        copies.push(copy);
        folds.push(folded);
        std::fs::remove_dir_all(scratch.path().join("copy"))?;
        std::fs::remove_dir_all(scratch.path().join("fold"))?;
    }
    let (copy, folded) = (median(copies), median(folds));
    let bytes = checkpoint.n_weight_bytes() as f64;
    println!(
        "{}: {:.2} GB, median fold {folded:.3} s ({:.2} GB/s), copy {copy:.3} s",
        model.display(),
        bytes / 1e9,
        bytes / 1e9 / folded
    );
    println!("ratio {:.2}, at most {MAX_RATIO}", folded / copy);
    Ok(if folded <= MAX_RATIO * copy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn time(work: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

fn copy_and_hash(model: &Path, to: &Path) -> Result<(), Error> {
    let copied = Command::new("cp").arg("-r").arg(model).arg(to).status()?;
    let hashed =
        Command::new("sh").arg("-c").arg("find \"$0\" -type f -exec sha256sum {} + > /dev/null").arg(to).status()?;
    if copied.success() && hashed.success() { Ok(()) } else { Err("cp or sha256sum failed".into()) }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Diagonally dominant transforms from a fixed stream, for this checkpoint.
fn transforms(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<Transforms, Error> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1 << 24) as f64 - 0.5
    };
    let mut matrices = |n_heads: usize, dim: usize| {
        let mut out = HeadMatrices::zeros(n_heads, dim);
        out.data.iter_mut().for_each(|x| *x = next() / (dim as f64).sqrt());
        out.data
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| (i % (dim * dim)).is_multiple_of(dim + 1))
            .for_each(|(_, x)| *x += 1.0);
        out
    };
    let layer = |attn: &wush_model::spec::AttentionSpec| {
        LayerTransforms::new(
            HeadMatrices::zeros(attn.n_kv_heads, attn.head_dim),
            matrices(attn.n_kv_heads, attn.head_dim),
        )
    };
    let layers: Vec<_> = spec.layers.iter().map(|layer| &layer.attn).map(layer).collect();
    let entry = |shard: &wush_checkpoint::Shard| -> Result<FileEntry, Error> {
        let (sha256, n_bytes) = hash_file(&checkpoint.dir().join(&shard.file_name))?;
        Ok(FileEntry { path: shard.file_name.clone(), n_bytes, sha256 })
    };
    let shards = checkpoint.shards().iter().map(entry).collect::<Result<Vec<_>, _>>()?;
    let model_hash: Sha = wush_checkpoint::weights_hash(&shards);
    Ok(Transforms {
        layers: layers.into_iter().enumerate().collect(),
        model_hash,
        solve: Solve::as_published("random"),
        calibration: None,
        report: Vec::new(),
    })
}
