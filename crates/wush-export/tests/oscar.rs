//! Rotation checkpoints as another program reads them: candle's reader of torch's files, which shares no code with the writer.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use candle_core::pickle::{Object, Stack};
use proptest::prelude::*;
use wush_export::{ExportError, Format, KEY_FILE, Rotations, Tensor, VALUE_FILE, Value, write_torch_file};
use wush_format::bundle::{KeyLayer, KeySidecar};
use wush_format::hash::Sha;
use wush_format::manifest::Solve;
use wush_format::transforms::{HeadMatrices, LayerTransforms, Transforms};

/// A tensor: its shape, and its elements in row-major order.
type Read32 = (Vec<usize>, Vec<f32>);

/// The pickle program's value, and the archive to take tensors from.
fn open(path: &Path) -> (Object, zip::ZipArchive<File>) {
    let mut zip = zip::ZipArchive::new(File::open(path).expect("a file")).expect("a zip archive");
    let mut stack = Stack::empty();
    stack.read_loop(&mut BufReader::new(zip.by_name("archive/data.pkl").expect("a program"))).expect("opcodes");
    (stack.finalize().expect("one value"), zip)
}

fn tensor(object: Object, zip: &mut zip::ZipArchive<File>) -> Read32 {
    let name = Object::Unicode("any".to_owned());
    let info = object.into_tensor_info(name, Path::new("archive/data")).expect("read").expect("a tensor");
    // Of no elements the strides are torch's, which candle does not call contiguous.
    let is_empty = info.layout.shape().elem_count() == 0;
    assert!((is_empty || info.layout.is_contiguous()) && info.layout.start_offset() == 0, "{:?}", info.layout);
    let mut bytes = Vec::new();
    let mut entry = zip.by_name(&info.path).expect("a storage");
    assert_eq!(entry.data_start().expect("known") % 64, 0, "storages are aligned");
    entry.read_to_end(&mut bytes).expect("read");
    assert_eq!(bytes.len(), 4 * info.storage_size);
    let data = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes"))).collect();
    (info.layout.dims().to_vec(), data)
}

/// Items in the file's order: candle's reader has the last first.
fn dict(object: Object) -> Vec<(Object, Object)> {
    let mut items = object.dict().expect("a dictionary");
    items.reverse();
    items
}

/// The header's entries as text, and the rotations by layer.
fn read(path: &Path) -> (BTreeMap<String, String>, BTreeMap<i32, Read32>) {
    let (object, mut zip) = open(path);
    let (mut header, mut layers) = (BTreeMap::new(), BTreeMap::new());
    for (key, value) in dict(object) {
        match key.unicode().expect("text") {
            key if key == "layers" => {
                for (id, layer) in dict(value) {
                    let id = id.int().expect("a layer id");
                    let [(first, own_id), (second, rotation)]: [_; 2] = dict(layer).try_into().expect("two entries");
                    let names = [first, second].map(|name| name.unicode().expect("text"));
                    assert_eq!(names, ["layer_id", "rotation"]);
                    assert_eq!(own_id.int().expect("a number"), id);
                    layers.insert(id, tensor(rotation, &mut zip));
                }
            }
            key => {
                let text = match value {
                    Object::Int(number) => number.to_string(),
                    other => other.unicode().expect("text"),
                };
                header.insert(key, text);
            }
        }
    }
    (header, layers)
}

/// A rotation of the plane, as T: column vectors.
fn turn(angle: f64) -> [f64; 4] {
    let (sin, cos) = angle.sin_cos();
    [cos, -sin, sin, cos]
}

fn matrices(heads: &[[f64; 4]]) -> HeadMatrices {
    HeadMatrices { n_heads: heads.len(), dim: 2, data: heads.concat() }
}

fn transforms(layers: BTreeMap<usize, LayerTransforms>) -> Transforms {
    let solve = Solve::as_published("random");
    Transforms { layers, model_hash: Sha::of(b"model"), solve, calibration: None, report: Vec::new() }
}

fn one_layer(key: &[[f64; 4]], value: &[[f64; 4]]) -> Transforms {
    transforms(BTreeMap::from([(3, LayerTransforms::new(matrices(key), matrices(value)))]))
}

fn write(format: &str, rotations: &Rotations) -> (tempfile::TempDir, u32) {
    let dir = tempfile::tempdir().expect("a directory");
    let version = Format::find(format).expect("registered").write(rotations, dir.path()).expect("written");
    (dir, version)
}

fn transposed(t: [f64; 4]) -> Vec<f32> {
    [t[0], t[2], t[1], t[3]].map(|x| x as f32).to_vec()
}

#[test]
fn format_1_has_one_matrix_a_layer_for_row_vectors() {
    let (key, value) = (turn(0.3), turn(-1.1));
    let rotations = Rotations::of_transforms(&one_layer(&[key; 2], &[value; 2])).expect("orthogonal");
    let (dir, version) = write("oscar", &rotations);
    assert_eq!(version, 1);
    let expected = [("format_version", "1"), ("objective", "random"), ("source_grouping", "layer")];
    for (file, t) in [(KEY_FILE, key), (VALUE_FILE, value)] {
        let (header, layers) = read(&dir.path().join(file));
        assert_eq!(header, expected.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
        assert_eq!(layers, BTreeMap::from([(3, (vec![2, 2], transposed(t)))]), "{file}");
    }
}

#[test]
fn format_2_has_one_matrix_a_head_and_is_taken_where_heads_differ() {
    let (a, b, value) = (turn(0.3), turn(0.4), turn(0.5));
    let rotations = Rotations::of_transforms(&one_layer(&[a, b], &[value; 2])).expect("orthogonal");
    for format in ["oscar", "oscar-2"] {
        let (dir, version) = write(format, &rotations);
        assert_eq!(version, 2);
        for (file, heads) in [(KEY_FILE, [a, b]), (VALUE_FILE, [value, value])] {
            let (header, layers) = read(&dir.path().join(file));
            assert_eq!((&*header["format_version"], &*header["source_grouping"]), ("2", "per_kv_head"));
            let expected = (vec![2, 2, 2], heads.map(transposed).concat());
            assert_eq!(layers, BTreeMap::from([(3, expected)]), "{file}");
        }
    }
    let dir = tempfile::tempdir().expect("a directory");
    let error = Format::find("oscar-1").expect("registered").write(&rotations, dir.path()).expect_err("two");
    assert!(matches!(error, ExportError::HeadsDiffer { layer: 3, head: 1, .. }), "{error}");
    assert!(error.hint().expect("a way").contains("--to oscar-2"));
    assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 0, "nothing is written");
}

/// A bundle's keys, one layer of one head.
fn bundle(key: [f64; 4]) -> KeySidecar {
    let key = key.map(|x| x as f32).to_vec();
    let layers = BTreeMap::from([(0, KeyLayer::new(1, 2, key.clone(), key))]);
    KeySidecar { layers, model_hash: Sha::of(b"folded") }
}

#[test]
fn a_bundles_values_are_left_as_its_weights_have_them() {
    let rotations = Rotations::of_bundle(&bundle(turn(0.7)), "oscar").expect("orthogonal keys");
    let (dir, _) = write("oscar", &rotations);
    let (header, layers) = read(&dir.path().join(VALUE_FILE));
    assert_eq!(header["objective"], "identity");
    assert_eq!(layers[&0], (vec![2, 2], vec![1.0, 0.0, 0.0, 1.0]));
    let (header, layers) = read(&dir.path().join(KEY_FILE));
    assert_eq!(header["objective"], "oscar");
    assert_eq!(layers[&0].1, transposed(turn(0.7)));
}

#[test]
fn what_a_rotation_cannot_hold_is_refused_with_a_way_on() {
    let refused = |transforms: &Transforms, expected: &str, way: &str| {
        let error = Rotations::of_transforms(transforms).expect_err("refused");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.hint().expect("a way").contains(way), "{error}: {:?}", error.hint());
    };
    let (turned, skew) = (turn(0.2), [1.0, 0.5, 0.0, 1.0]);
    refused(&one_layer(&[turned, skew], &[turned; 2]), "layer 3, KV head 1: the key transform", "--transform oscar");
    refused(&one_layer(&[turned; 2], &[skew, turned]), "layer 3, KV head 0: the value transform", "--transform oscar");
    refused(&one_layer(&[turned.map(|x| 2.0 * x)], &[turned]), "is not orthogonal", "--transform oscar");
    refused(&one_layer(&[turned.map(|x| 1e300 * x)], &[turned]), "is not orthogonal", "--transform oscar");

    let mut centered = one_layer(&[turned; 2], &[turned; 2]);
    centered.layers.get_mut(&3).expect("there").key_mean = Some(vec![0.0; 4]);
    Rotations::of_transforms(&centered).expect("a mean of zeros is none");
    centered.layers.get_mut(&3).expect("there").key_mean = Some(vec![0.0, 0.0, 0.0, 0.1]);
    refused(&centered, "layer 3, KV head 1: a mean", "--center-keys never");

    let mut feedback = one_layer(&[turned], &[turned]);
    feedback.layers.get_mut(&3).expect("there").value_feedback = Some(matrices(&[turn(0.0)]));
    refused(&feedback, "error feedback", "--feedback false");
}

#[test]
fn a_bundle_is_refused_for_its_keys() {
    let error = Rotations::of_bundle(&bundle([1.0, 0.5, 0.0, 1.0]), "wush").expect_err("not orthogonal");
    assert!(matches!(error, ExportError::NotOrthogonal { layer: 0, head: 0, .. }), "{error}");
    let mut keys = bundle(turn(0.7));
    keys.layers.get_mut(&0).expect("there").key_mean = Some(vec![0.5, 0.0]);
    let error = Rotations::of_bundle(&keys, "oscar").expect_err("centred");
    assert!(matches!(error, ExportError::CenteredKeys { layer: 0, head: 0 }), "{error}");
    let mut keys = bundle(turn(0.7));
    keys.layers.get_mut(&0).expect("there").key_feedback = Some(vec![1.0, 0.0, 0.0, 1.0]);
    let error = Rotations::of_bundle(&keys, "oscar").expect_err("feedback");
    assert!(matches!(error, ExportError::Feedback), "{error}");
}

#[test]
fn the_same_content_is_the_same_bytes() {
    let rotations = Rotations::of_transforms(&one_layer(&[turn(0.3)], &[turn(0.4)])).expect("orthogonal");
    let bytes = || std::fs::read(write("oscar", &rotations).0.path().join(KEY_FILE)).expect("read");
    assert_eq!(bytes(), bytes());
}

proptest! {
    /// Whatever is written is what candle reads: names, order, shapes, every bit.
    #[test]
    fn tensors_come_back(
        tensors in prop::collection::vec((prop::collection::vec(0_usize..5, 0..4), any::<u32>()), 0..5),
        names in prop::collection::vec("\\PC{0,12}", 5),
    ) {
        let make = |(shape, seed): &(Vec<usize>, u32)| {
            let n: usize = shape.iter().product();
            let data = (0..n as u32).map(|i| f32::from_bits(seed.wrapping_mul(2_654_435_761).wrapping_add(i))).collect();
            Tensor::new(shape.clone(), data).expect("as many")
        };
        let written: Vec<Tensor> = tensors.iter().map(make).collect();
        let items = names.iter().zip(&written).map(|(name, tensor)| (name.as_str().into(), Value::Tensor(tensor.clone())));
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("any.pt");
        write_torch_file(&path, &Value::Dict(items.collect())).expect("written");
        let (object, mut zip) = open(&path);
        let found = dict(object);
        prop_assert_eq!(found.len(), written.len());
        for ((name, object), (expected_name, expected)) in found.into_iter().zip(names.iter().zip(&written)) {
            prop_assert_eq!(&name.unicode().expect("text"), expected_name);
            let (shape, data) = tensor(object, &mut zip);
            prop_assert_eq!(shape, expected.shape());
            let bits = |data: &[f32]| data.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&data), bits(expected.data()));
        }
    }
}
