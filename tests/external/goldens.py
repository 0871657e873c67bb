#!/usr/bin/env python3
"""`wush calibrate` against reference Gram matrices of a real checkpoint.

    python3 goldens.py WUSH MODEL GOLDEN.safetensors...

A golden file holds `input_ids` and, for some layers, `layerN.gram_k`, `gram_v`, `gram_q`: per KV head the lower triangle, row by row, of
the sum over positions (and over the group's query heads), computed by transformers in float32 and summed in float64. Needs numpy
and safetensors. Prints the largest |difference| / sqrt(G_ii G_jj) of each file; exits 1 above 1e-3.
"""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

LIMIT = 1e-3
NAMES = {"k": "key_gram", "v": "value_gram", "q": "query_gram"}


def worst_difference(stats, golden):
    worst = 0.0
    for name, packed in golden.items():
        found = re.fullmatch(r"layer(\d+)\.gram_([kvq])", name)
        if not found:
            continue
        ours = stats[f"layers.{found[1]}.{NAMES[found[2]]}"]
        rows, cols = np.tril_indices(ours.shape[1])
        for gram, lower in zip(ours, packed):
            expected = np.zeros_like(gram)
            expected[rows, cols] = lower
            scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))[rows, cols]
            diff = np.abs(gram[rows, cols] - lower)
            worst = max(worst, float(np.max(np.divide(diff, scale, out=np.where(diff > 0, np.inf, 0.0), where=scale > 0))))
    return worst


def main():
    wush, model, *files = sys.argv[1:]
    ok = True
    for path in files:
        golden = load_file(path)
        with tempfile.TemporaryDirectory() as work:
            ids, out = Path(work, "ids.json"), Path(work, "stats.safetensors")
            ids.write_text(json.dumps([golden["input_ids"].tolist()]))
            subprocess.run([wush, "calibrate", model, "--calib", ids, "--out", out, "--quiet"], check=True, stdout=subprocess.DEVNULL)
            worst = worst_difference(load_file(out), golden)
        ok &= worst <= LIMIT
        print(f"{path}: {worst:.1e}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
