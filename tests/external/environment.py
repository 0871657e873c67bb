"""A cached virtual environment for the tests of this folder: the wheel of this checkout, and what a test needs from PyPI.

What the calling interpreter has already is used, since torch takes gigabytes. Where something cannot be installed the test is
skipped, loudly: exit code 77.
"""
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSIDE = "WUSH_EXTERNAL_INSIDE"


def enter(name, *requirements, unpinned=None, alone=()):
    """Returns inside the environment `name`, in a new process that runs the same script, and never in the calling one.

    `unpinned`: a package, and names of its requirements that are left out, because it pins them to what PyPI does not have.
    `alone`: packages that are installed without what they require.
    """
    if os.environ.get(INSIDE) == name:
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "wush-external"
    home = cache / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin/python"
    try:
        if not python.exists():
            venv.create(home, with_pip=True)
        packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        purelib = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home)}))
        (purelib / "caller.pth").write_text("\n".join(packages) + "\n")
        install(python, "maturin>=1.9,<2", *requirements)
        if unpinned:
            install_without(python, *unpinned)
        if alone:
            install(python, "--no-deps", *alone)
        wheels = home / "wheels"
        for old in wheels.glob("*.whl"):
            old.unlink()
        maturin = [home / "bin/maturin", "build", "--release", "--quiet", "--manifest-path", ROOT / "crates/wush-python/Cargo.toml"]
        subprocess.run([*maturin, "--out", wheels], check=True)
        install(python, "--force-reinstall", "--no-deps", *map(str, wheels.glob("*.whl")))
    except subprocess.CalledProcessError as error:
        print(f"SKIPPED: {' '.join(map(str, error.cmd))} failed with {error.returncode}", file=sys.stderr)
        sys.exit(77)
    environment = os.environ | {INSIDE: name, "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    sys.exit(subprocess.run([python, *sys.argv], env=environment, check=False).returncode)


def install(python, *what):
    subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True)


LIST = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for text in importlib.metadata.requires(sys.argv[1]):
    wanted = Requirement(text)
    if wanted.name not in sys.argv[2:] and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
"""


def install_without(python, package, left_out):
    install(python, "--no-deps", package)
    command = [python, "-c", LIST, package.partition("==")[0], *left_out]
    install(python, *subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())
