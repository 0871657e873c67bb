//! safetensors as hostile input: one case a documented refusal, round trips, and arbitrary bytes.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use wush_format::FormatError;
use wush_format::hash::hash_file;
use wush_format::tensor_file::{
    Dtype, HeaderEntry, MAX_HEADER_BYTES, MAX_RANK, NewTensor, TensorFile, encode_header, write_tensor_file,
};

/// A file of this header text and data.
fn file_of(json: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn parse(bytes: Vec<u8>) -> Result<TensorFile, FormatError> {
    TensorFile::from_bytes(Path::new("x.safetensors"), bytes)
}

/// The refusal's text, which must name the file.
fn refusal(bytes: Vec<u8>) -> String {
    let error = parse(bytes).expect_err("must be refused");
    assert!(matches!(error, FormatError::Invalid { .. }), "{error:?}");
    assert!(error.hint().is_some());
    let text = error.to_string();
    assert!(text.starts_with("x.safetensors: not a valid safetensors file: "), "{text}");
    text
}

#[test]
fn every_documented_defect_is_refused_with_its_reason() {
    let deep = format!(r#"{{"a":{{"dtype":"U8","shape":[{}1],"data_offsets":[0,1]}}}}"#, "1,".repeat(MAX_RANK));
    let cases: [(&str, &[u8], &str); 24] = [
        (" {}", b"", "does not begin with {"),
        ("{", b"", "header: EOF"),
        ("{}x", b"", "trailing characters"),
        ("{}", b"\0", "1 bytes after the last tensor"),
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#, b"abc", "1 bytes after the last tensor"),
        (r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#, b"ab", "data section of 2 bytes"),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}"#, b"ab", "data offsets [1, 0]"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,2]}}"#, b"ab", "needs 4 bytes, its offsets span 2"),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#, b"ab", "follows a gap: begins at 1, expected 0"),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
            b"abc",
            "tensor \"b\" overlaps the tensor before it: begins at 1, expected 2",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
            b"ab",
            "key \"a\" appears twice",
        ),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, b"", "key \"__metadata__\" appears twice"),
        (r#"{"__metadata__":{"k":"1","k":"2"}}"#, b"", "key \"k\" appears twice"),
        (r#"{"__metadata__":{"k":1}}"#, b"", "expected a string"),
        (r#"{"a":{"dtype":"F7","shape":[],"data_offsets":[0,1]}}"#, b"a", "tensor \"a\": unknown dtype \"F7\""),
        (r#"{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, b"a", "duplicate field `dtype`"),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":0}}"#, b"a", "unknown field `x`"),
        (r#"{"a":["U8",[1],[0,1]]}"#, b"a", "expected an object"),
        (r#"{"a":{"dtype":"U8","shape":[1]}}"#, b"a", "missing field `data_offsets`"),
        (r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#, b"a", "expected usize"),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}"#, b"a", "header: "),
        (
            r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,1]}}"#,
            b"a",
            "not a whole number of bytes that fits memory",
        ),
        (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#, b"a", "not a whole number of bytes"),
        (&deep, b"a", "a shape of at most 64 dimensions"),
    ];
    for (json, data, expected) in cases {
        let text = refusal(file_of(json, data));
        assert!(text.contains(expected), "{json}\n expected: {expected}\n found: {text}");
    }
}

#[test]
fn the_header_length_is_checked_before_anything_is_allocated() {
    assert!(refusal(vec![0; 7]).contains("expected at least 8 bytes, found 7"));
    assert!(refusal(100_u64.to_le_bytes().to_vec()).contains("header of 100 bytes, but only 0 follow"));
    for length in [MAX_HEADER_BYTES as u64 + 1, u64::MAX, 1 << 63] {
        assert!(refusal(length.to_le_bytes().to_vec()).contains("at most 100000000 are allowed"));
    }
}

#[test]
fn a_hostile_name_does_not_flood_the_message() {
    let name = "n".repeat(1 << 20);
    let json = format!(r#"{{"{name}":{{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}}}"#);
    assert!(refusal(file_of(&json, b"a")).len() < 1000);
}

#[test]
fn misaligned_elements_empty_tensors_and_scalars_are_read() {
    let json = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "b":{"dtype":"F64","shape":[1,2],"data_offsets":[1,17]},
        "c":{"dtype":"F32","shape":[],"data_offsets":[17,21]},
        "d":{"dtype":"F32","shape":[0,7],"data_offsets":[1,1]}}   "#;
    let mut data = vec![7];
    data.extend([1.5_f64, -0.0].iter().flat_map(|v| v.to_le_bytes()));
    data.extend(2.5_f32.to_le_bytes());
    let file = parse(file_of(json, &data)).expect("valid");
    assert_eq!(file.f64("b", &[1, 2]).expect("b"), [1.5, -0.0]);
    assert_eq!(file.f32("c", &[]).expect("c"), [2.5]);
    assert_eq!(file.f32("d", &[0, 7]).expect("d"), [0.0_f32; 0]);
    assert_eq!(file.tensor("a").expect("a").bytes, [7]);
    assert_eq!(file.header_bytes().len() + data.len(), file.bytes().len());
}

#[test]
fn another_shape_dtype_or_name_is_an_error_value() {
    let file = parse(file_of(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, &[0; 4])).expect("valid");
    let wrong = file.f64("a", &[1]).expect_err("it is f32").to_string();
    assert_eq!(wrong, "x.safetensors: tensor a: expected F64 [1], found F32 [1]");
    assert!(matches!(file.f32("a", &[1, 1]), Err(FormatError::WrongTensor { .. })));
    assert!(matches!(file.tensor("b"), Err(FormatError::MissingTensor { .. })));
    assert!(matches!(file.meta("k"), Err(FormatError::Invalid { .. })));
}

#[test]
fn an_absent_an_empty_and_a_special_file_are_error_values() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    assert!(matches!(TensorFile::open(&dir.path().join("none")), Err(FormatError::Io { .. })));
    assert!(matches!(TensorFile::open(dir.path()), Err(FormatError::Io { .. })));
    let empty = dir.path().join("empty.safetensors");
    std::fs::write(&empty, b"").expect("writes");
    assert!(matches!(TensorFile::open(&empty), Err(FormatError::Invalid { .. })));
}

#[test]
fn the_same_content_gives_the_same_aligned_bytes() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("x.safetensors");
    let tensors = BTreeMap::from([
        ("a".to_owned(), NewTensor::u8(&[3], &[1, 2, 3])),
        ("b".to_owned(), NewTensor::f32(&[1], &[1.0])),
        ("c\"\n".to_owned(), NewTensor::f64(&[2], &[f64::NAN, 2.0])),
        ("d".to_owned(), NewTensor::f64(&[0], &[])),
    ]);
    let metadata = BTreeMap::from([("z".to_owned(), "é\"".to_owned()), ("a".to_owned(), String::new())]);
    let (sha, n_bytes) = write_tensor_file(&path, &tensors, &metadata).expect("writes");
    assert_eq!(hash_file(&path).expect("reads"), (sha, n_bytes));
    assert_eq!(write_tensor_file(&path, &tensors, &metadata).expect("writes"), (sha, n_bytes));
    let file = TensorFile::open(&path).expect("valid");
    assert_eq!(file.metadata(), &metadata);
    for (name, info) in file.tensors() {
        assert_eq!(info.range.start * 8 % info.dtype.bitsize(), 0, "{name} is misaligned");
    }
    assert_eq!(std::fs::read_dir(dir.path()).expect("lists").count(), 1, "a temporary file stayed");
}

#[test]
fn what_could_not_be_read_back_is_not_written() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("x.safetensors");
    let write = |name: &str, tensor| write_tensor_file(&path, &[(name.to_owned(), tensor)].into(), &BTreeMap::new());
    let wrong = write("a", NewTensor::f32(&[3], &[1.0])).expect_err("3 elements, one value").to_string();
    assert!(wrong.contains("expected the bytes of F32 [3], found 4 bytes"), "{wrong}");
    assert!(matches!(write("__metadata__", NewTensor::u8(&[0], &[])), Err(FormatError::Invalid { .. })));
    assert_eq!(std::fs::read_dir(dir.path()).expect("lists").count(), 0, "something was left behind");
    let entry = HeaderEntry { name: "a", dtype: Dtype::U8, shape: &[] };
    assert!(encode_header(&path, &[entry, entry], &BTreeMap::new()).is_err(), "a name twice");
    let huge = HeaderEntry { name: "b", dtype: Dtype::U8, shape: &[usize::MAX / 8] };
    let more = HeaderEntry { name: "c", ..huge };
    let entries = [huge, more, HeaderEntry { name: "d", ..huge }];
    assert!(encode_header(&path, &entries[..2], &BTreeMap::new()).is_ok());
    let nine: Vec<String> = (0..9).map(|i| i.to_string()).collect();
    let nine: Vec<_> = nine.iter().map(|name| HeaderEntry { name, ..huge }).collect();
    assert!(encode_header(&path, &nine, &BTreeMap::new()).is_err(), "the offsets overflow");
}

fn tensor() -> impl Strategy<Value = NewTensor> {
    let dtypes = [Dtype::F64, Dtype::F32, Dtype::BF16, Dtype::U8, Dtype::I64, Dtype::BOOL];
    (prop::sample::select(dtypes.to_vec()), prop::collection::vec(0_usize..4, 0..4)).prop_flat_map(|(dtype, shape)| {
        let n_bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        prop::collection::vec(any::<u8>(), n_bytes).prop_map(move |bytes| NewTensor {
            dtype,
            shape: shape.clone(),
            bytes,
        })
    })
}

/// The same cases in every run.
fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(128))]

    #[test]
    fn what_is_written_is_read(
        tensors in prop::collection::btree_map("[a-z.\"\\\\é]{1,6}", tensor(), 0..6),
        metadata in prop::collection::btree_map(".{0,5}", ".{0,9}", 0..4),
    ) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("x.safetensors");
        write_tensor_file(&path, &tensors, &metadata).expect("writes");
        let file = TensorFile::open(&path).expect("valid");
        prop_assert_eq!(file.metadata(), &metadata);
        prop_assert!(file.tensors().keys().eq(tensors.keys()));
        for (name, tensor) in &tensors {
            let view = file.tensor(name).expect("written");
            prop_assert_eq!((view.dtype, view.shape, view.bytes), (tensor.dtype, &tensor.shape[..], &tensor.bytes[..]));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(bytes);
    }

    #[test]
    fn a_damaged_file_never_panics_nor_reaches_outside(
        position in 0_usize..140,
        byte in any::<u8>(),
        cut in 0_usize..200,
    ) {
        let json = r#"{"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}}"#;
        let mut bytes = file_of(json, &[1; 9]);
        bytes[position] = byte;
        bytes.truncate(cut.max(position + 1));
        if let Ok(file) = parse(bytes) {
            let total: usize = file.tensors().keys().map(|name| file.tensor(name).expect("listed").bytes.len()).sum();
            prop_assert_eq!(total + file.header_bytes().len(), file.bytes().len());
        }
    }
}
