#!/usr/bin/env python3
"""Rotation checkpoints of `wush export` as torch reads them, held against the transforms that they were made from.

    python3 export_oscar.py WUSH

WUSH is the program. Needs torch and safetensors; without them the test is skipped, loudly: exit code 77. Files are loaded with
weights_only=True, which runs nothing that they name, and once more mapped into memory.
"""
import json
import pickletools
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/fixtures/demo-model"
SHORT = ["--calib", MODEL / "calibration.txt", "--sequences", "6", "--seq-len", "96"]

# What the writer may use: data, and three names that torch itself allows.
OPCODES = {"PROTO", "EMPTY_DICT", "MARK", "BINUNICODE", "BININT", "GLOBAL", "TUPLE", "BINPERSID", "NEWFALSE", "EMPTY_TUPLE", "REDUCE", "SETITEMS", "STOP"}
NAMES = {"torch._utils _rebuild_tensor_v2", "torch FloatStorage", "collections OrderedDict"}

# A rotation in f32 keeps products up to 2 * 2^-24 of the lengths; twice that is left to the products' own rounding in f64.
PRODUCT_REL_TOL = 2.0**-22


def main(wush):
    wush = Path(wush).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        def run(*arguments):
            command = [wush, *map(str, arguments), "--quiet", "--format", "json"]
            return json.loads(subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True).stdout)

        scratch = Path(scratch)
        for transform in ["oscar", "oscar-per-head", "hadamard", "random"]:
            bundle = f"bundle-{transform}"
            run("convert", MODEL, *SHORT, "--transform", transform, "--verify-sequences", "0", "--out", bundle)
            report = run("export", bundle, "--out", f"{bundle}-rotations")
            keys = load_file(scratch / bundle / "wush/key_transforms.safetensors")
            check(scratch / f"{bundle}-rotations", report, lambda layer: (keys[f"layers.{layer}.key"], None))
            compare_queries(scratch / f"{bundle}-rotations", keys)

        run("calibrate", MODEL, *SHORT, "--second-pass", "oscar", "--out", "stats.safetensors")
        for transform in ["oscar", "oscar-per-head"]:
            file = f"{transform}.safetensors"
            run("solve", "stats.safetensors", "--transform", transform, "--out", file)
            report = run("export", file, "--out", transform)
            both = load_file(scratch / file)
            check(scratch / transform, report, lambda layer: (both[f"layers.{layer}.key"], both[f"layers.{layer}.value"]))
    print("ok")


def check(folder, report, transforms):
    """`transforms(layer)`: T_K and T_V `[n_kv, d, d]`, or None for values that the server leaves alone."""
    version = report["export"]["format_version"]
    for name, role in [("k_rotation.pt", 0), ("v_rotation.pt", 1)]:
        path = folder / name
        check_program(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        assert state["format_version"] == version
        assert state["source_grouping"] == {1: "layer", 2: "per_kv_head"}[version]
        assert list(state["layers"]) == [layer["layer"] for layer in report["export"]["layers"]]
        mapped = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for layer, entry in state["layers"].items():
            rotation = entry["rotation"]
            assert entry["layer_id"] == layer and rotation.dtype == torch.float32 and rotation.is_contiguous()
            assert torch.equal(mapped["layers"][layer]["rotation"], rotation)
            expected = transforms(layer)[role]
            if expected is None:
                keys = transforms(layer)[0]
                expected = torch.eye(keys.shape[-1]).expand(*keys.shape)
            expected = expected.transpose(1, 2).to(torch.float32)
            found = rotation if version == 2 else rotation.expand(*expected.shape)
            assert torch.equal(found, expected), f"{path}: layer {layer}"
        print(f"{folder.name}/{name}: format {version}, {len(state['layers'])} layers of {tuple(rotation.shape)}")


def check_program(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, f"{path}: a checksum is wrong"
        program = archive.read("archive/data.pkl")
    used = list(pickletools.genops(program))
    assert {opcode.name for opcode, _, _ in used} <= OPCODES
    assert {argument for opcode, argument, _ in used if opcode.name == "GLOBAL"} == NAMES


def compare_queries(folder, sidecar):
    """Rotating queries as the keys gives every product, and is what the bundle's own `query` does."""
    state = torch.load(folder / "k_rotation.pt", weights_only=True)
    generator = torch.Generator().manual_seed(0)
    for layer, entry in state["layers"].items():
        transforms = sidecar[f"layers.{layer}.query"].double()
        heads, dim, _ = transforms.shape
        rotation = entry["rotation"].double().expand(heads, dim, dim)
        queries, keys = torch.randn(2, heads, 8, dim, dtype=torch.float64, generator=generator)
        limit = PRODUCT_REL_TOL * queries.norm(dim=-1)[..., None] * keys.norm(dim=-1)[:, None]
        expected = queries @ keys.mT
        assert ((queries @ rotation @ (keys @ rotation).mT - expected).abs() <= limit).all()
        assert ((queries @ transforms.mT @ (keys @ rotation).mT - expected).abs() <= limit).all()


if __name__ == "__main__":
    try:
        import torch
        from safetensors.torch import load_file
    except ImportError as error:
        print(f"SKIPPED: {error}", file=sys.stderr)
        sys.exit(77)
    main(*sys.argv[1:])
