//! Every kind of source, and every error, with a word-level tokenizer: word `wN` is id 10 + N.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_array::types::Int32Type;
use arrow_array::{ArrayRef, BinaryArray, DictionaryArray, Int64Array, LargeStringArray, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use tempfile::TempDir;
use wush_checkpoint::hub::HubOptions;
use wush_checkpoint::tokenizer::TextTokenizer;
use wush_data::{CalibSource, DataError, PackOptions, Packed, TextOptions, load};
use wush_format::monitor::{Monitor, Quiet};

const EOS: u32 = 0;
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

struct Room {
    dir: TempDir,
    tokenizer: TextTokenizer,
}

fn room() -> Room {
    let dir = tempfile::tempdir().expect("temporary directory");
    let model = dir.path().join("model");
    fs::create_dir(&model).expect("creatable");
    let words: Vec<String> = (0..90).map(|i| format!("\"w{i}\":{}", i + 10)).collect();
    let tokenizer = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{{"id":0,"content":"<|endoftext|>",
        "single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],"normalizer":null,
        "pre_tokenizer":{{"type":"WhitespaceSplit"}},"post_processor":null,"decoder":null,"model":{{"type":"WordLevel",
        "vocab":{{"<|endoftext|>":0,"[UNK]":1,{}}},"unk_token":"[UNK]"}}}}"#,
        words.join(",")
    );
    fs::write(model.join("tokenizer.json"), tokenizer).expect("writable");
    let tokenizer = TextTokenizer::open(&model).expect("valid");
    Room { dir, tokenizer }
}

fn options(seq_len: usize, sequences: usize) -> PackOptions {
    PackOptions {
        seq_len,
        sequences: Some(sequences),
        text_field: "text".to_owned(),
        bos: None,
        eos: Some(EOS),
        vocab_size: 100,
    }
}

fn offline(cache: &Path) -> HubOptions {
    HubOptions { endpoint: None, token: None, cache_dir: Some(cache.to_owned()), offline: true }
}

impl Room {
    fn write(&self, name: &str, bytes: &[u8]) -> CalibSource {
        let path = self.dir.path().join(name);
        fs::create_dir_all(path.parent().expect("has one")).expect("creatable");
        fs::write(&path, bytes).expect("writable");
        CalibSource::Path(path)
    }

    fn folder(&self, name: &str) -> CalibSource {
        CalibSource::Path(self.dir.path().join(name))
    }

    fn load(&self, source: &CalibSource, options: &PackOptions) -> Result<Packed, DataError> {
        load(source, Some(&self.tokenizer), options, &offline(self.dir.path()), &Quiet)
    }

    /// Loads one sequence of `seq_len` tokens.
    fn first(&self, source: &CalibSource, seq_len: usize) -> Vec<u32> {
        let packed = self.load(source, &options(seq_len, 1)).expect("enough");
        assert_eq!(packed.sequences.len(), 1);
        packed.sequences[0].clone()
    }

    fn fails(&self, source: &CalibSource) -> DataError {
        let error = self.load(source, &options(2, 1)).expect_err("an error");
        assert!(error.hint(&TextOptions::CALIBRATION).is_some(), "{error}: no hint");
        error
    }
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("a Vec takes all");
    encoder.finish().expect("a Vec takes all")
}

fn zst(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).expect("a Vec takes all")
}

fn path_of(source: &CalibSource) -> PathBuf {
    match source {
        CalibSource::Path(path) => path.clone(),
        CalibSource::Hub { .. } => panic!("not a path"),
    }
}

#[test]
fn a_text_file_is_one_document() {
    let room = room();
    let source = room.write("a.txt", b"w0 w1\n\nw2\nw3\n");
    let packed = room.load(&source, &options(2, 2)).expect("enough");
    assert_eq!(packed.sequences, [[10, 11], [12, 13]]);
    assert_eq!(packed.source, "a.txt");
}

#[test]
fn separator_lines_part_documents() {
    let room = room();
    let text = b"<|endoftext|>\nw0 w1\n<|endoftext|>\r\nw2\n \n<|endoftext|>\n<|endoftext|>\nw3 w4\n";
    assert_eq!(room.first(&room.write("a.txt", text), 7), [10, 11, EOS, 12, EOS, 13, 14]);
}

#[test]
fn a_blank_start_of_any_length_is_passed_over_in_one_go() {
    let room = room();
    let mut text = vec![b'\n'; 12 << 20];
    text.extend_from_slice(b"w0 w1\n");
    assert_eq!(room.first(&room.write("a.txt", &text), 2), [10, 11]);
}

#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_refused_and_not_waited_for() {
    let room = room();
    let CalibSource::Path(path) = room.folder("pipe.txt") else { unreachable!("a path") };
    let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo runs");
    assert!(made.success());
    let error = room.load(&CalibSource::Path(path), &options(2, 1)).expect_err("a pipe");
    assert!(error.to_string().contains("not a regular file"), "{error}");
}

#[test]
fn a_separator_inside_a_line_is_the_tokenizers() {
    let room = room();
    assert_eq!(room.first(&room.write("a.txt", b"w0 <|endoftext|> w1"), 3), [10, 0, 11]);
}

#[test]
fn compressed_text_reads_the_same() {
    let room = room();
    let (text, lines) =
        (b"w0 w1 w2\n", b"{\"text\":\"w0 w1\"}\n\n{\"text\":\" \"}\n{\"text\":null}\n{\"id\":1,\"text\":\"w2\"}\n");
    for (name, bytes) in [("a.txt", text.to_vec()), ("a.txt.gz", gz(text)), ("a.txt.zst", zst(text))] {
        assert_eq!(room.first(&room.write(name, &bytes), 3), [10, 11, 12], "{name}");
    }
    // Several members and frames, as `cat a.gz b.gz` makes them.
    let twice = [gz(b"w0 w1 "), gz(b"w2\n")].concat();
    assert_eq!(room.first(&room.write("b.txt.gz", &twice), 3), [10, 11, 12]);
    let twice = [zst(b"w0 w1 "), zst(b"w2\n")].concat();
    assert_eq!(room.first(&room.write("b.txt.zst", &twice), 3), [10, 11, 12]);
    for (name, bytes) in [("a.jsonl", lines.to_vec()), ("a.jsonl.gz", gz(lines)), ("a.jsonl.zst", zst(lines))] {
        assert_eq!(room.first(&room.write(name, &bytes), 4), [10, 11, EOS, 12], "{name}");
    }
}

fn write_table(path: &Path, columns: Vec<(&str, ArrayRef)>, rows_per_group: usize) {
    let batch =
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, c)| (n, c, true))).expect("one length");
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(rows_per_group)).build();
    let file = fs::File::create(path).expect("creatable");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).expect("valid");
    writer.write(&batch).expect("writable");
    writer.close().expect("writable");
}

#[test]
fn tables_of_every_string_type() {
    let room = room();
    let rows = vec![Some("w0 w1"), None, Some("  "), Some("w2"), Some("w0 w1")];
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3, 4, 5]));
    let columns: [(&str, ArrayRef); 3] = [
        ("string", Arc::new(StringArray::from(rows.clone()))),
        ("large_string", Arc::new(LargeStringArray::from(rows.clone()))),
        ("dictionary", Arc::new(rows.clone().into_iter().collect::<DictionaryArray<Int32Type>>())),
    ];
    for (name, column) in columns {
        let path = room.dir.path().join(format!("{name}.parquet"));
        write_table(&path, vec![("id", numbers.clone()), ("text", column)], 2);
        assert_eq!(room.first(&CalibSource::Path(path), 7), [10, 11, EOS, 12, EOS, 10, 11], "{name}");
    }
}

#[test]
fn tables_without_the_text_say_what_they_have() {
    let room = room();
    let path = room.dir.path().join("t.parquet");
    let body: ArrayRef = Arc::new(StringArray::from(vec!["w0 w1"]));
    let number: ArrayRef = Arc::new(Int64Array::from(vec![1]));
    let bytes: ArrayRef = Arc::new(BinaryArray::from(vec![b"w0".as_slice()]));
    write_table(&path, vec![("id", number), ("body", body), ("raw", bytes)], 10);
    let source = CalibSource::Path(path.clone());
    let error = room.fails(&source);
    let expected =
        format!("{}: the table has no field \"text\"; it has id (Int64), body (Utf8), raw (Binary)", path.display());
    assert_eq!(error.to_string(), expected);
    assert!(error.hint(&TextOptions::CALIBRATION).is_some_and(|hint| hint.contains("--text-field")));
    let named = |field: &str| PackOptions { text_field: field.to_owned(), ..options(2, 1) };
    assert_eq!(room.load(&source, &named("body")).expect("text").sequences, [[10, 11]]);
    for (field, kind) in [("id", "Int64"), ("raw", "Binary")] {
        let error = room.load(&source, &named(field)).expect_err("not text");
        assert!(matches!(&error, DataError::NotText { found, .. } if found == kind), "{error}");
    }
    let broken = room.write("broken.parquet", b"PAR1 is not all");
    assert!(matches!(room.fails(&broken), DataError::Parquet { .. }));
}

#[test]
fn folders_are_read_in_the_order_of_their_paths() {
    let room = room();
    room.write("texts/b/1.txt.gz", &gz(b"w2"));
    room.write("texts/a.jsonl", b"{\"text\":\"w0 w1\"}");
    room.write("texts/c.txt", b"w3");
    room.write("texts/README.md", b"w9");
    room.write("texts/ids.json", b"[[9]]");
    room.write("texts/.hidden.txt", b"w9");
    let packed = room.load(&room.folder("texts"), &options(6, 1)).expect("enough");
    assert_eq!(packed.sequences, [[10, 11, EOS, 12, EOS, 13]]);
    assert_eq!(packed.source, "texts");
}

#[test]
fn token_lists_are_used_as_they_are() {
    let room = room();
    let lists = b"[[1, 2, 3], [4],\n [5, 99]]\n";
    let all = PackOptions { sequences: None, bos: Some(7), ..options(3, 1) };
    for (name, bytes) in [("i.json", lists.to_vec()), ("i.json.gz", gz(lists)), ("i.json.zst", zst(lists))] {
        let source = room.write(name, &bytes);
        let packed = load(&source, None, &all, &offline(room.dir.path()), &Quiet).expect("needs no tokenizer");
        assert_eq!(packed.sequences, [vec![1, 2, 3], vec![4], vec![5, 99]], "{name}");
        assert_eq!(packed.source, name);
        let two = load(&source, None, &options(3, 2), &offline(room.dir.path()), &Quiet).expect("enough");
        assert_eq!(two.sequences, [vec![1, 2, 3], vec![4]]);
        let error = room.load(&source, &options(3, 4)).expect_err("three only");
        assert_eq!(error.to_string(), format!("{name}: 4 sequences wanted, found 3"));
        assert_eq!(error.hint(&TextOptions::CALIBRATION).as_deref(), Some("ask for --sequences 3, or pass more data"));
    }
    let unread = room.write("unread.json", b"[[1], [2], this is never looked at");
    assert_eq!(room.load(&unread, &options(2, 2)).expect("enough").sequences, [[1], [2]]);
}

#[test]
fn wrong_token_lists_are_located() {
    let room = room();
    let all = PackOptions { sequences: None, ..options(2, 1) };
    let outside = room.load(&room.write("i.json", b"[[1], [2, 100]]"), &all).expect_err("100 is outside");
    assert_eq!(outside.to_string(), "i.json: sequence 1, position 1: token id 100 is outside the vocabulary of 100");
    let cases: [&[u8]; 7] =
        [b"[1, 2]", b"[[1],\n[-1]]", b"[[1],\n[4294967296]]", b"{\"a\":1}", b"[[1], [2]", b"[[1]] x", b"[[\"a\"]]"];
    for text in cases {
        let error = room.load(&room.write("j.json", text), &all).expect_err("not lists of ids");
        assert!(matches!(error, DataError::Json { line: 1 | 2, .. }), "{}: {error}", String::from_utf8_lossy(text));
        assert!(error.hint(&TextOptions::CALIBRATION).is_some_and(|hint| hint.contains("[[1, 2, …], …]")));
    }
    let empty = room.load(&room.write("k.json", b"[[1], []]"), &all).expect_err("an empty list");
    assert!(matches!(empty, DataError::EmptySequence { sequence: 1, .. }));
    let none = room.load(&room.write("l.json", b"[]"), &all).expect_err("no list");
    assert!(matches!(none, DataError::TooLittle { found: 0, .. }));
}

#[test]
fn bad_lines_are_located() {
    let room = room();
    let json = room.fails(&room.write("a.jsonl", b"{\"text\":\"w0\"}\n{\"text\":\n"));
    assert!(matches!(json, DataError::Json { line: 2, .. }), "{json}");
    let array = room.fails(&room.write("b.jsonl", b"\n[1]\n"));
    assert!(array.to_string().ends_with("b.jsonl: line 2: expected a JSON object, found an array"), "{array}");
    let field = room.fails(&room.write("c.jsonl", b"{\"body\":\"w0\",\"id\":1}\n"));
    assert!(field.to_string().ends_with("c.jsonl: line 1 has no field \"text\"; it has body, id"), "{field}");
    let kind = room.fails(&room.write("d.jsonl", b"{\"text\":[\"w0\"]}\n"));
    assert!(kind.to_string().ends_with("d.jsonl: line 1: field \"text\" is not text but an array"), "{kind}");
    let bytes = room.fails(&room.write("e.txt", b"w0\nw1 \xff\xfe\n"));
    assert!(bytes.to_string().ends_with("e.txt: not UTF-8 at byte 6, in line 2"), "{bytes}");
    let packed = room.fails(&room.write("f.txt.gz", &gz(b"w0\n\xc3")));
    assert!(matches!(packed, DataError::InvalidUtf8 { offset: 3, line: 2, .. }), "{packed}");
    let whole = gz(&[b'a'; 100_000]);
    let cut = room.load(&room.write("g.txt.gz", &whole[..whole.len() / 2]), &options(2, 1));
    assert!(matches!(cut, Err(DataError::Damaged { .. })), "{cut:?}");
    let not_zstd = room.fails(&room.write("h.txt.zst", b"not zstd"));
    assert!(matches!(not_zstd, DataError::Damaged { .. }), "{not_zstd}");
    assert!(not_zstd.hint(&TextOptions::CALIBRATION).is_some_and(|hint| hint.contains("damaged or cut short")));
}

#[test]
fn what_cannot_be_a_source_is_refused() {
    let room = room();
    assert!(matches!(room.fails(&room.folder("missing.txt")), DataError::NotFound { .. }));
    assert!(matches!(room.fails(&room.folder("missing.json")), DataError::NotFound { .. }));
    let unknown = room.fails(&room.write("a.csv", b"text"));
    assert!(unknown.to_string().contains("expected .txt, .jsonl, .json"), "{unknown}");
    room.write("empty/README.md", b"");
    assert!(matches!(room.fails(&room.folder("empty")), DataError::NoFiles { .. }));
    let text = room.write("a.txt", b"w0 w1");
    let error = load(&text, None, &options(2, 1), &offline(room.dir.path()), &Quiet).expect_err("no tokenizer");
    assert_eq!(error.to_string(), "a.txt: text needs the model's tokenizer");
    let small = PackOptions { vocab_size: 11, ..options(2, 1) };
    let error = room.load(&text, &small).expect_err("w1 is 11");
    assert!(matches!(error, DataError::TokenId { sequence: 0, position: 1, id: 11, .. }), "{error}");
    let blank = room.fails(&room.write("blank.txt", b" \n\n"));
    assert!(matches!(blank, DataError::TooLittle { found: 0, n_tokens: Some(0), .. }), "{blank}");
    let zero = room.load(&text, &options(2, 0)).expect_err("none wanted");
    assert!(matches!(zero, DataError::ZeroSequences));
}

#[test]
fn no_more_is_read_than_needed() {
    let room = room();
    // 400 kB of records, then what would be errors: read ahead is 64 KiB here.
    let mut lines = "{\"text\":\"w0 w1 w2 w3\"}\n".repeat(20_000).into_bytes();
    lines.extend_from_slice(b"\xff not JSON\n");
    room.write("long/a.jsonl", &lines);
    room.write("long/b.jsonl", b"not JSON either\n");
    let packed = room.load(&room.folder("long"), &options(5, 3)).expect("the start is enough");
    assert_eq!(packed.sequences, vec![[10, 11, 12, 13, EOS]; 3]);
}

#[test]
fn damaged_tables_are_errors_and_no_panics() {
    let room = room();
    let path = room.dir.path().join("t.parquet");
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["w0 w1", "w2", "w0 w1"]));
    write_table(&path, vec![("text", texts)], 10);
    let bytes = fs::read(&path).expect("readable");
    let mut n_caught = 0;
    for at in 0..bytes.len() {
        for value in [0x00, 0x7f, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] = value;
            let result = room.load(&room.write("damaged.parquet", &damaged), &options(2, 1));
            n_caught += usize::from(result.is_err_and(|error| error.to_string().contains("library cannot handle it")));
        }
    }
    assert!(n_caught > 0, "the guard was never needed");
}

#[test]
fn documents_too_long_for_one_piece_are_refused() {
    let room = room();
    let long = "w0 ".repeat((16 << 20) / 3 + 1);
    let line = format!("{{\"text\":\"{long}\"}}\n");
    let error = room.fails(&room.write("a.jsonl", line.as_bytes()));
    assert!(error.to_string().ends_with("a.jsonl: line 1 holds a document of more than 16777216 bytes"), "{error}");
    assert!(matches!(room.fails(&room.write("a.txt", long.as_bytes())), DataError::LineTooLong { line: 1, .. }));
    // Of another field no more than its line is held.
    let line = format!("{{\"id\":\"{long}\",\"text\":\"w0 w1\"}}\n");
    assert_eq!(room.first(&room.write("b.jsonl", line.as_bytes()), 2), [10, 11]);
    let path = room.dir.path().join("t.parquet");
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["w0", &long]));
    write_table(&path, vec![("text", texts)], 10);
    assert!(matches!(room.fails(&CalibSource::Path(path)), DataError::LongDocument { .. }));
}

#[test]
fn a_file_without_lists_says_what_to_put_into_it() {
    let room = room();
    let error = room.fails(&room.write("a.json", b"[]"));
    assert_eq!(
        error.hint(&TextOptions::CALIBRATION).as_deref(),
        Some("put at least one list of token ids into it: [[1, 2, …], …]")
    );
}

#[test]
fn a_line_without_end_is_refused() {
    let room = room();
    let bomb = room.write("bomb.jsonl.gz", &gz(&vec![b' '; (64 << 20) + 1]));
    let size = fs::metadata(path_of(&bomb)).expect("there").len();
    assert!(size < 1 << 20, "{size} bytes");
    assert!(matches!(room.fails(&bomb), DataError::LineTooLong { line: 1, .. }));
}

#[test]
fn long_text_comes_in_pieces_of_one_document() {
    let room = room();
    let line = "w0 w1 w2 w3 w4 w5 w6 w7\n";
    let n_lines = (9 << 20) / line.len();
    let source = room.write("long.txt", line.repeat(n_lines).as_bytes());
    let packed = room.load(&source, &options(8, n_lines)).expect("exactly enough: no separator between pieces");
    assert!(packed.sequences.iter().all(|ids| ids[..] == [10, 11, 12, 13, 14, 15, 16, 17]));
}

#[test]
fn cached_data_sets_are_read_offline() {
    let room = room();
    let snapshot = format!("datasets--org--texts/snapshots/{COMMIT}");
    room.write("datasets--org--texts/refs/main", COMMIT.as_bytes());
    room.write(&format!("{snapshot}/data/1.jsonl"), b"{\"text\":\"w2\"}\n");
    room.write(&format!("{snapshot}/data/0.txt"), b"w0 w1");
    room.write(&format!("{snapshot}/README.md"), b"w9");
    let source: CalibSource = "hf:org/texts:data/*".parse().expect("valid");
    let packed = room.load(&source, &options(4, 1)).expect("cached");
    assert_eq!(packed.sequences, [[10, 11, EOS, 12]]);
    assert_eq!(packed.source, format!("hf:org/texts@{COMMIT}:data/*"));
    let whole = room.load(&"hf:org/texts@main".parse().expect("valid"), &options(4, 1)).expect("cached");
    assert_eq!((whole.sequences, whole.source), (packed.sequences, format!("hf:org/texts@{COMMIT}")));
    let error = room.fails(&"hf:org/other".parse().expect("valid"));
    assert!(
        error.hint(&TextOptions::CALIBRATION).is_some_and(|hint| hint.contains("--calib FILE")),
        "{:?}",
        error.hint(&TextOptions::CALIBRATION)
    );
}

/// Counts tokens; interrupts when told.
#[derive(Default)]
struct Watch {
    total: AtomicU64,
    done: AtomicU64,
    stop: bool,
}

impl Monitor for Watch {
    fn begin(&self, _stage: &str, unit: &'static str, total: u64) {
        assert_eq!(unit, "tokens");
        self.total.store(total, Ordering::Relaxed);
    }
    fn advance(&self, n: u64) {
        self.done.fetch_add(n, Ordering::Relaxed);
    }
    fn end(&self) {}
    fn note(&self, _line: &str) {}
    fn interrupted(&self) -> bool {
        self.stop
    }
}

#[test]
fn progress_counts_tokens_and_stops_on_demand() {
    let room = room();
    let source = room.write("a.txt", b"w0 w1 w2 w3 w4\n");
    let watch = Watch::default();
    let bos = PackOptions { bos: Some(9), ..options(3, 2) };
    let packed = load(&source, Some(&room.tokenizer), &bos, &offline(room.dir.path()), &watch).expect("enough");
    assert_eq!(packed.sequences, [[9, 10, 11], [9, 12, 13]]);
    assert_eq!((watch.total.into_inner(), watch.done.into_inner()), (6, 6));
    let watch = Watch { stop: true, ..Watch::default() };
    let error = load(&source, Some(&room.tokenizer), &options(3, 9), &offline(room.dir.path()), &watch);
    assert!(matches!(error, Err(DataError::Interrupted)), "{error:?}");
}
