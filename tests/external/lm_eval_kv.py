#!/usr/bin/env python3
"""lm-evaluation-harness through the packed cache, offline, on a task of local text.

    python3 lm_eval_kv.py BASE BUNDLE TEXT [--characters N]

Scores one document of TEXT in the harness four times: BASE by its own `hf` model; BUNDLE by `wush` at 16 bits, which must agree within
LIMIT; at 2 bits, which must differ, and must have met quantized tokens; and at 2 bits with the counters of a run without windows, in which all
but the first token of a window meet quantized ones. Prints one JSON line. Installs lm-eval, see environment.py.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import lm_eval_task
from environment import enter

# Folding rounds bf16 weights once, and sums run in another order.
LIMIT = 5e-3


def run(folder, kind, arguments):
    out = folder / "out" / f"{kind}-{abs(hash(arguments))}"
    module = "wush_kv.lm_eval" if kind == "wush" else "lm_eval"
    command = [sys.executable, "-m", module, "--model", kind, "--model_args", f"{arguments},dtype=float32", "--tasks", lm_eval_task.NAME]
    options = ["--include_path", folder, "--output_path", out, "--device", "cpu", "--batch_size", "1"]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    perplexity, config = lm_eval_task.result(out)
    return perplexity, config.get("wush")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--characters", type=int, default=6000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lm_eval_task.write(folder, args.text, args.characters)
        base, _ = run(folder, "hf", f"pretrained={args.base}")
        full, _ = run(folder, "wush", f"pretrained={args.bundle},kv_bits=16")
        two, met = run(folder, "wush", f"pretrained={args.bundle},kv_bits=2")
        bare, all_met = run(folder, "wush", f"pretrained={args.bundle},kv_bits=2,sink=0,keep=0,flush=1,chunk=1")
    every = all_met["queries"] - all_met["met_quantized"]
    moved = all(abs(other / full - 1) > lm_eval_task.MOVED for other in (two, bare))
    ok = abs(full / base - 1) <= LIMIT and moved and met["met_quantized"] > 0 and every < 0.05 * all_met["queries"]
    report = {"byte_perplexity": {"base": base, "16 bits": full, "2 bits": two, "2 bits, no windows": bare}}
    print(json.dumps(report | {"met": met, "met without windows": all_met, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    enter("lm-eval", "torch", "numpy", "lm-eval>=0.4.9")
    sys.exit(main())
