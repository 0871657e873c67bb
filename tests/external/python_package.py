#!/usr/bin/env python3
"""The tests of the Python package `wush-kv`, against the newest transformers and the oldest that is supported.

    python3 python_package.py WUSH [PYTEST ARGUMENT ...]

WUSH is the program, which makes the bundles. Builds the wheel and installs pytest, torch and transformers into a cached virtual
environment (see environment.py); `TRANSFORMERS=4.57.*` in the environment tests that version.
"""
import os
import subprocess
import sys
from pathlib import Path

from environment import ROOT, enter

WANTED = os.environ.get("TRANSFORMERS", "5.*")


def main(wush, *arguments):
    tests = ROOT / "crates/wush-python"
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=tests, env=os.environ | {"WUSH": str(Path(wush).resolve())}, check=False).returncode


if __name__ == "__main__":
    enter(f"package-transformers-{WANTED.rstrip('.*')}", "pytest", "numpy", "torch", f"transformers=={WANTED}")
    sys.exit(main(*sys.argv[1:]))
