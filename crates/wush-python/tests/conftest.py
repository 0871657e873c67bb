"""A bundle to test with: `WUSH_BUNDLE`, or one of the demonstration model, made by `WUSH` (or target/release/wush)."""

import json
import os
import random
import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

# The kernels' tests run under Triton's interpreter where there is no GPU; triton reads this when it is imported.
if find_spec("torch") and not import_module("torch").cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "tests/fixtures/demo-model"


def convert(out: Path, *options: str, model: Path = DEMO, calib: Path = DEMO / "calibration.txt") -> Path:
    wush = Path(os.environ.get("WUSH", ROOT / "target/release/wush")).resolve()
    if not wush.exists():
        pytest.skip(f"SKIPPED: no bundle: set WUSH_BUNDLE to one, or build {wush}")
    command = [wush, "convert", model, "--out", out, "--calib", calib, "--verify-sequences", "0", "--quiet", *options]
    subprocess.run(command, check=True, capture_output=True)
    return out


TEXT = ["--sequences", "4", "--seq-len", "512", "--factor", "random"]


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    given = os.environ.get("WUSH_BUNDLE")
    return Path(given) if given else convert(tmp_path_factory.mktemp("bundles") / "demo-wush", *TEXT)


@pytest.fixture(scope="session")
def other_bundle(tmp_path_factory):
    """Of the same model with other random factors."""
    return convert(tmp_path_factory.mktemp("others") / "demo-wush", *TEXT, "--seed", "1")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Makes bundles of the small random models of every family, in float32."""
    made = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            rng = random.Random(0)
            ids = [[1, *(rng.randrange(3, 60) for _ in range(59))] for _ in range(8)]
            (folder / "ids.json").write_text(json.dumps(ids))
            model = ROOT / "tests/fixtures/tiny" / name
            made[name] = convert(folder / "bundle", "--fold-dtype", "f32", model=model, calib=folder / "ids.json")
        return made[name]

    return make


@pytest.fixture
def copy(bundle, tmp_path):
    return Path(shutil.copytree(bundle, tmp_path / "copy"))
