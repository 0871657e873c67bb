//! The one pass over a checkpoint: every source file is hashed, every output file written and hashed, once.
//!
//! Three threads: one hashes the source, one computes folded tensors ahead (rayon inside), and the calling one writes
//! and hashes the output. At most [`TENSORS_AHEAD`] folded tensors wait; everything else is written straight from the
//! map, so memory does not grow with the checkpoint.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write, sink};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use wush_checkpoint::Checkpoint;
use wush_format::FormatError;
use wush_format::hash::{HashingWriter, Sha};
use wush_format::manifest::FileEntry;
use wush_format::monitor::Monitor;
use wush_format::tensor_file::TensorFile;

use crate::block::{FoldedTensor, fold_tensor};
use crate::header::{growth, rewrite, rewrite_index};
use crate::plan::{FoldPlan, TensorPlan, Tensors};
use crate::report::{Collector, FoldReport};
use crate::{FoldError, Result};

/// Bytes written and hashed at a time: what was just written is still in the cache when it is hashed.
const BLOCK: usize = 1 << 20;
/// Folded tensors that may wait for the writer.
const TENSORS_AHEAD: usize = 2;

/// What the pass leaves: the files' digests, sorted by path, and the fold's error.
pub(crate) struct Written {
    pub(crate) source_files: Vec<FileEntry>,
    pub(crate) files: Vec<FileEntry>,
    pub(crate) source_shards: Vec<FileEntry>,
    pub(crate) shards: Vec<FileEntry>,
    pub(crate) report: FoldReport,
}

/// One piece of an output shard.
enum Piece<'a> {
    /// Copied from the source's map.
    Copy(Range<usize>),
    /// Comes from the folding thread.
    Folded(&'a str),
}

/// One shard's output: its new header, then the pieces.
struct ShardPlan<'a> {
    file_name: &'a str,
    header: Vec<u8>,
    file: &'a TensorFile,
    pieces: Vec<Piece<'a>>,
    growth: i64,
}

/// Writes the folded checkpoint into `out`, which exists.
pub(crate) fn write(checkpoint: &Checkpoint, plan: &FoldPlan, out: &Path, monitor: &dyn Monitor) -> Result<Written> {
    let shards = plan_shards(checkpoint, &plan.tensors)?;
    let others = checkpoint.other_files()?;
    let stop = Stop { flag: AtomicBool::new(false), monitor };
    let total = shards.iter().map(|shard| shard.file.bytes().len() as u64).sum();
    monitor.begin("fold", "bytes", total);
    let result = thread::scope(|scope| {
        let hashing = scope.spawn(|| hash_shards(&shards, &stop));
        let (sender, receiver) = sync_channel(TENSORS_AHEAD);
        let folding = scope.spawn(|| fold_ahead(checkpoint, plan, &shards, sender, &stop));
        let written = write_shards(&shards, out, receiver, &stop);
        if written.is_err() {
            stop.flag.store(true, Ordering::Relaxed);
        }
        // The folding thread knows why it ended early; the writer then only saw its channel close.
        let report = folding.join().map_err(|_| FoldError::Internal { thread: "folding" });
        let hashed = hashing.join().map_err(|_| FoldError::Internal { thread: "hashing" });
        match (written, report?) {
            (Err(FoldError::Internal { .. }), Err(error)) | (Err(error), _) | (_, Err(error)) => Err(error),
            (Ok(written), Ok(report)) => Ok((hashed??, written, report)),
        }
    });
    monitor.end();
    let (source_shards, shards_written, report) = result?;
    let growth = shards.iter().map(|shard| shard.growth).sum();
    let (mut source_files, mut files) = (source_shards.clone(), shards_written.clone());
    for name in &others {
        let (source, written) = copy_other(checkpoint.dir(), out, name, growth)?;
        source_files.push(source);
        files.push(written);
    }
    source_files.sort_by(|a, b| a.path.cmp(&b.path));
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(Written { source_files, files, source_shards, shards: shards_written, report })
}

/// Why a thread should end: the user asked, or another thread failed.
struct Stop<'a> {
    flag: AtomicBool,
    monitor: &'a dyn Monitor,
}

impl Stop<'_> {
    fn check(&self) -> Result<()> {
        if self.flag.load(Ordering::Relaxed) || self.monitor.interrupted() {
            Err(FoldError::Interrupted)
        } else {
            Ok(())
        }
    }
}

/// Finds headers and an index that cannot follow a change of dtype; writes nothing.
pub(crate) fn check_layout(checkpoint: &Checkpoint, tensors: &Tensors) -> Result<()> {
    let growth = plan_shards(checkpoint, tensors)?.iter().map(|shard| shard.growth).sum();
    for name in checkpoint.other_files()?.iter().filter(|name| changes_index(name, growth)) {
        rewritten_index(&checkpoint.dir().join(name), name, growth)?;
    }
    Ok(())
}

fn plan_shards<'a>(checkpoint: &'a Checkpoint, tensors: &'a Tensors) -> Result<Vec<ShardPlan<'a>>> {
    checkpoint.shards().iter().map(|shard| plan_shard(shard, tensors)).collect()
}

fn plan_shard<'a>(shard: &'a wush_checkpoint::Shard, planned: &'a Tensors) -> Result<ShardPlan<'a>> {
    let tensors = shard.file.tensors();
    let changes: HashMap<&str, &TensorPlan> = planned
        .iter()
        .filter(|(name, _)| tensors.contains_key(*name))
        .map(|(name, plan)| (name.as_str(), plan))
        .collect();
    let mut order: Vec<_> = tensors.iter().filter(|(name, _)| changes.contains_key(name.as_str())).collect();
    order.sort_by_key(|(_, info)| info.range.start);
    let mut pieces = Vec::new();
    let mut copied = shard.file.header_bytes().len();
    for (name, info) in order {
        pieces.push(Piece::Copy(copied..info.range.start));
        pieces.push(Piece::Folded(name));
        copied = info.range.end;
    }
    pieces.push(Piece::Copy(copied..shard.file.bytes().len()));
    let header = rewrite(&shard.file_name, &shard.file, &changes)?;
    Ok(ShardPlan {
        file_name: &shard.file_name,
        header,
        file: &shard.file,
        pieces,
        growth: growth(&shard.file, &changes),
    })
}

/// Digests of the source's shards, in their order.
fn hash_shards(shards: &[ShardPlan<'_>], stop: &Stop<'_>) -> Result<Vec<FileEntry>> {
    let hash = |shard: &ShardPlan<'_>| {
        let mut hasher = HashingWriter::new(sink());
        for (at, block) in shard.file.bytes().chunks(BLOCK).enumerate() {
            stop.check()?;
            hasher.write_all(block).map_err(|error| FormatError::io(shard.file_name, "hash", error))?;
            shard.file.release(at * BLOCK..at * BLOCK + block.len());
        }
        let (_, sha256, n_bytes) = hasher.finish();
        Ok(entry(shard.file_name, sha256, n_bytes))
    };
    shards.iter().map(hash).collect()
}

/// Computes the folded tensors in the order in which the writer needs them.
fn fold_ahead(
    checkpoint: &Checkpoint,
    plan: &FoldPlan,
    shards: &[ShardPlan<'_>],
    sender: SyncSender<(String, Vec<u8>)>,
    stop: &Stop<'_>,
) -> Result<FoldReport> {
    let mut collector = Collector::new(plan);
    let names = shards.iter().flat_map(|shard| &shard.pieces).filter_map(|piece| match piece {
        Piece::Folded(name) => Some(*name),
        Piece::Copy(_) => None,
    });
    for name in names {
        stop.check()?;
        let source = checkpoint.tensor(name)?.bytes;
        let FoldedTensor { name, bytes, grams } = fold_tensor(name, &plan.tensors[name], &plan.heads, source)?;
        grams.into_iter().for_each(|(edit, grams)| collector.add(&edit, grams));
        if sender.send((name, bytes)).is_err() {
            return Err(FoldError::Internal { thread: "writing" });
        }
    }
    Ok(collector.finish())
}

fn write_shards(
    shards: &[ShardPlan<'_>],
    out: &Path,
    folded: Receiver<(String, Vec<u8>)>,
    stop: &Stop<'_>,
) -> Result<Vec<FileEntry>> {
    let write = |shard: &ShardPlan<'_>| {
        let path = out.join(shard.file_name);
        let file = File::create_new(&path).map_err(|error| FormatError::io(&path, "create", error))?;
        let mut output = Output { writer: HashingWriter::new(file), path, stop };
        output.write(&shard.header)?;
        for piece in &shard.pieces {
            match piece {
                Piece::Copy(range) => {
                    output.write(&shard.file.bytes()[range.clone()])?;
                    shard.file.release(range.clone());
                }
                Piece::Folded(name) => match folded.recv() {
                    Ok((folded_name, bytes)) if folded_name == *name => output.write(&bytes)?,
                    _ => return Err(FoldError::Internal { thread: "folding" }),
                },
            }
        }
        let (_, sha256, n_bytes) = output.writer.finish();
        Ok(entry(shard.file_name, sha256, n_bytes))
    };
    shards.iter().map(write).collect()
}

struct Output<'a> {
    writer: HashingWriter<File>,
    path: PathBuf,
    stop: &'a Stop<'a>,
}

impl Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        for block in bytes.chunks(BLOCK) {
            self.stop.check()?;
            self.writer.write_all(block).map_err(|error| FormatError::io(&self.path, "write", error))?;
            self.stop.monitor.advance(block.len() as u64);
        }
        Ok(())
    }
}

/// Copies a file that is not a shard, hashing it as it passes; the index follows a change of dtypes.
fn copy_other(source_dir: &Path, out: &Path, name: &str, growth: i64) -> Result<(FileEntry, FileEntry)> {
    let (from, to) = (source_dir.join(name), out.join(name));
    if let Some(parent) = to.parent() {
        std::fs::create_dir_all(parent).map_err(|error| FormatError::io(parent, "create", error))?;
    }
    let mut target = File::create_new(&to).map_err(|error| FormatError::io(&to, "create", error))?;
    if changes_index(name, growth) {
        let (text, changed) = rewritten_index(&from, name, growth)?;
        target.write_all(&changed).map_err(|error| FormatError::io(&to, "write", error))?;
        return Ok((
            entry(name, Sha::of(&text), text.len() as u64),
            entry(name, Sha::of(&changed), changed.len() as u64),
        ));
    }
    let mut source = File::open(&from).map_err(|error| FormatError::io(&from, "open", error))?;
    let mut writer = HashingWriter::new(target);
    let mut block = vec![0; BLOCK];
    loop {
        let n = source.read(&mut block).map_err(|error| FormatError::io(&from, "read", error))?;
        if n == 0 {
            break;
        }
        writer.write_all(&block[..n]).map_err(|error| FormatError::io(&to, "write", error))?;
    }
    let (_, sha256, n_bytes) = writer.finish();
    Ok((entry(name, sha256, n_bytes), entry(name, sha256, n_bytes)))
}

/// Whether the file `name` is an index that must follow folded tensors of other sizes.
fn changes_index(name: &str, growth: i64) -> bool {
    growth != 0 && name.ends_with(".safetensors.index.json")
}

/// An index as it is, and as it must become.
fn rewritten_index(path: &Path, name: &str, growth: i64) -> Result<(Vec<u8>, Vec<u8>)> {
    let text = std::fs::read(path).map_err(|error| FormatError::io(path, "read", error))?;
    let changed = rewrite_index(name, &text, growth)?;
    Ok((text, changed))
}

fn entry(path: &str, sha256: Sha, n_bytes: u64) -> FileEntry {
    FileEntry { path: path.to_owned(), n_bytes, sha256 }
}
