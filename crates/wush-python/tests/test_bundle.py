"""A bundle is read as it was written, and refused when any part of it is another's."""

import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import wush_kv
from conftest import DEMO
from wush_kv import Bundle, WushError

# Both matrices were rounded to f32 once (6e-8 of each term), and cond(T), some tens, times √d is what terms sum to.
INVERSE_TOLERANCE = 1e-4


def list_again(bundle, name):
    """Has the manifest list the file of `wush/` as it is now."""
    manifest = bundle / "wush/manifest.json"
    stated = json.loads(manifest.read_text())
    (entry,) = (entry for entry in stated["files"] if entry["path"] == f"wush/{name}")
    data = (bundle / "wush" / name).read_bytes()
    entry["sha256"], entry["n_bytes"] = hashlib.sha256(data).hexdigest(), len(data)
    manifest.write_text(json.dumps(stated))


def test_what_it_says_is_what_the_files_say(bundle):
    found = Bundle.open(bundle)
    manifest = json.loads((bundle / "wush/manifest.json").read_text())
    assert json.loads(found.manifest_json) == manifest
    assert found.model_hash == manifest["basis"]["model_hash"]
    assert found.layers == [layer["layer"] for layer in manifest["layers"]]
    assert found.method == ("quest-wide" if manifest["solve"]["feedback"] else "quest")
    config = json.loads((bundle / "config.json").read_text())
    heads = config["num_key_value_heads"], config["head_dim"]
    assert {found.shape(layer) for layer in found.layers} == {heads}
    assert f"{heads[0]} KV heads of {heads[1]}" in found.describe()


def test_queries_undo_what_keys_get(bundle):
    found = Bundle.open(bundle, verify=False)
    for layer in found.layers:
        key, query = (np.asarray(found.matrix(layer, name), np.float64) for name in ("key", "query"))
        assert key.shape == query.shape == (found.shape(layer)[0], *2 * [found.shape(layer)[1]])
        product = key @ query.swapaxes(1, 2)
        np.testing.assert_allclose(product, np.broadcast_to(np.eye(key.shape[-1]), key.shape), atol=INVERSE_TOLERANCE)
        assert np.abs(key - np.eye(key.shape[-1])).max() > 0.01, "a transform that does nothing tests nothing"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "wush/README.md"])
def test_a_changed_file_is_named(copy, name):
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(WushError, match=rf"(?s){name}: not the file that the manifest lists.*\nhint: "):
        Bundle.open(copy)


@pytest.mark.parametrize("name", ["key_transforms.safetensors", "value_feedback.safetensors"])
def test_a_sidecar_of_other_weights_is_refused_without_hashing_those(copy, other_bundle, name):
    shutil.copy(other_bundle / "wush" / name, copy / "wush" / name)
    with pytest.raises(WushError, match=f"{name}: does not fit its bundle: SHA-256 that the manifest lists"):
        Bundle.open(copy, verify=False)
    list_again(copy, name)
    with pytest.raises(WushError, match=f"{name}: does not fit its bundle: hash of the weights"):
        Bundle.open(copy, verify=False)


def test_a_sidecar_whose_queries_do_not_undo_its_keys_is_refused(copy):
    path = copy / "wush/key_transforms.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin = 8 + int.from_bytes(data[:8], "little") + header["layers.0.query"]["data_offsets"][0]
    data[begin : begin + 4] = np.float32(0.5 + np.frombuffer(data[begin : begin + 4], "<f4")[0]).tobytes()
    path.write_bytes(data)
    list_again(copy, path.name)
    with pytest.raises(WushError, match=r"layer 0, KV head 0: query is not key\^\{-T\}"):
        Bundle.open(copy, verify=False)


@pytest.mark.parametrize(
    "name", ["model-extra.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "adapter_config.json"]
)
def test_further_weights_beside_it_are_refused(copy, name):
    (copy / name).write_bytes(b"{}")
    with pytest.raises(WushError, match=f"{name}: weights that the manifest does not list"):
        Bundle.open(copy, verify=False)


def test_a_failed_bundle_and_another_list_of_weights_are_refused(copy):
    path = copy / "wush/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"status": "failed"}))
    with pytest.raises(WushError, match="equivalence check failed"):
        Bundle.open(copy, verify=False)
    for file in manifest["files"]:
        if file["path"].endswith(".safetensors") and "/" not in file["path"]:
            file["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(WushError, match="the listed weights have hash"):
        Bundle.open(copy, verify=False)


def test_what_is_no_bundle_and_what_it_has_not(bundle, tmp_path):
    with pytest.raises(WushError, match=r"manifest\.json"):
        Bundle.open(tmp_path)
    found = Bundle.open(bundle, verify=False)
    with pytest.raises(WushError, match="layer 999"):
        found.matrix(999, "key")
    with pytest.raises(WushError, match='key_feedback or value_feedback, found "keys"'):
        found.matrix(0, "keys")


def test_the_command_line(bundle, tmp_path):
    def run(path):
        return subprocess.run([sys.executable, "-m", "wush_kv", path], capture_output=True, text=True, check=False)

    good, bad = run(bundle), run(tmp_path)
    assert (good.returncode, good.stdout) == (0, Bundle.open(bundle).describe() + "\n")
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert bad.stderr.startswith("error: ")
    assert wush_kv.__version__


def test_a_checkpoint_is_no_bundle():
    with pytest.raises(WushError, match=r"not a bundle: it has no wush/manifest.json\nhint: .*wush convert"):
        Bundle.open(DEMO)
