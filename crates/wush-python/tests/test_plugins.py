"""The entry points of servers, without the servers: whatever fails ends the process. Inside they run in tests/external/."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import wush_kv

SERVERS = {"vllm": "WUSH_KV_VLLM", "sglang": "WUSH_KV_SGLANG"}

# What the servers do with an entry point.
SERVER = """
import importlib.metadata
try:
    importlib.metadata.EntryPoint("wush", "wush_kv.plugins:{name}", "plugins").load()()
except Exception as error:
    print("only logged:", error)
"""


def start(name, path, **environment):
    return subprocess.run(
        [sys.executable, "-c", SERVER.format(name=name)],
        env={**os.environ, **environment, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("name", "switch"), SERVERS.items())
def test_an_unknown_server_ends_the_process(name, switch):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"SKIPPED: {name} is installed")
    package = Path(wush_kv.__file__).parents[1]
    done = start(name, package)
    assert done.returncode == 1 and done.stdout == ""
    assert "does not work in this" in done.stderr and f"{switch}=off serves without it" in done.stderr
    assert start(name, package, **{switch: "off"}).returncode == 0


@pytest.mark.parametrize(("name", "switch"), SERVERS.items())
def test_a_native_library_that_cannot_be_loaded_ends_the_process(name, switch, tmp_path):
    broken = tmp_path / "wush_kv"
    shutil.copytree(Path(wush_kv.__file__).parent, broken, ignore=shutil.ignore_patterns("_native.*", "__pycache__"))
    (broken / "_native.abi3.so").write_bytes(b"not a library")
    done = start(name, tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert "ImportError" in done.stderr.splitlines()[-1] and f"{switch}=off" in done.stderr
    off = start(name, tmp_path, **{switch: "off"})
    assert (off.returncode, off.stdout) == (0, "")


def test_the_entry_points_are_those_of_the_package():
    project = Path(__file__).parents[1] / "pyproject.toml"
    for name in SERVERS:
        assert f'wush = "wush_kv.plugins:{name}"' in project.read_text()
        assert callable(importlib.metadata.EntryPoint("wush", f"wush_kv.plugins:{name}", "plugins").load())
