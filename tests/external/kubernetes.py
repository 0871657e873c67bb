#!/usr/bin/env python3
"""The Jobs of deploy/kubernetes without a cluster: both files against Kubernetes' schemas, and what their pods run, run here.

    python3 kubernetes.py WUSH

Needs pyyaml and kubernetes-validate from PyPI; skips loudly (exit code 77) without them. Each pod's command runs with the job's own
environment, its index, and paths of a temporary directory in place of the volume's; the merged statistics must be those of one run.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import kubernetes_validate
    import yaml
except ImportError as missing:
    print(f"SKIPPED: {missing}; pip install pyyaml kubernetes-validate", file=sys.stderr)
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/fixtures/demo-model"
SEQUENCES = ["--sequences", "10", "--seq-len", "512"]


def job(name):
    found = yaml.safe_load((ROOT / "deploy/kubernetes" / name).read_text())
    kubernetes_validate.validate(found, "1.30", strict=True)
    return found["spec"]


def run(spec, bin_dir, changes):
    container = spec["template"]["spec"]["containers"][0]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    env |= changes | {"PATH": f"{bin_dir}:{os.environ['PATH']}"}
    args = [arg.replace("exec wush calibrate", f"exec wush calibrate {' '.join(SEQUENCES)}", 1) for arg in container["args"]]
    return subprocess.run([*container["command"], *args], env=env, check=True, capture_output=True, text=True)


def main(wush):
    calibrate, merge = job("calibrate.yaml"), job("merge.yaml")
    shares = next(e["value"] for e in calibrate["template"]["spec"]["containers"][0]["env"] if e["name"] == "SHARES")
    assert calibrate["completions"] == calibrate["parallelism"] == int(shares), "as many pods as shares"
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        (scratch / "bin").mkdir()
        (scratch / "bin/wush").symlink_to(Path(wush).resolve())
        paths = {"MODEL": str(MODEL), "CALIB": str(MODEL / "calibration.txt"), "OUT_DIR": str(scratch / "stats")}
        for index in range(int(shares)):
            run(calibrate, scratch / "bin", paths | {"JOB_COMPLETION_INDEX": str(index)})
        again = run(calibrate, scratch / "bin", paths | {"JOB_COMPLETION_INDEX": "0"})
        assert "is there already" in again.stdout, again
        run(merge, scratch / "bin", paths)
        one = scratch / "one.safetensors"
        subprocess.run(
            [wush, "calibrate", MODEL, "--calib", paths["CALIB"], *SEQUENCES, "--out", one, "--quiet"],
            check=True,
            capture_output=True,
        )
        worst = subprocess.run(
            [sys.executable, Path(__file__).with_name("same_statistics.py"), one, scratch / "stats/stats.safetensors"], check=True
        )
    return worst.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
