#!/usr/bin/env python3
"""The CPU figures of docs/benchmarks.md, each beside its comparison in the same run. Linux; standard library only.

    python3 benches/cpu.py --wush target/release/wush --small DIR --large DIR --tokens TOKENS.json --work DIR [--torch PYTHON]

--small is a small checkpoint (SmolLM2-135M), --large one of a few gigabytes (Qwen2.5-1.5B), --tokens 16 lists of 1024 token ids for
the small one; --torch an interpreter with torch and transformers. Rounds alternate between the two sides of a comparison, and a
ratio is of medians.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 3
HERE = Path(__file__).parent


def timed(command):
    """Seconds, peak resident KiB and standard output of a command that must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return time.perf_counter() - start, usage.ru_maxrss, output


def fresh(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return path


def row(what, ours, theirs, ratio):
    print(f"| {what} | {ours} | {theirs} | {ratio:.2f} |", flush=True)


def calibrate(args):
    ours, theirs = {"the whole process": [], "after planning": []}, {"forward": [], "grams": []}
    n_tokens = sum(map(len, json.load(open(args.tokens))))
    for _ in range(ROUNDS):
        out = fresh(args.work / "bench.stats.safetensors")
        command = [args.wush, "calibrate", args.small, "--calib", args.tokens, "--out", out, "--quiet", "--format", "json"]
        seconds, _, text = timed(command)
        ours["the whole process"].append(n_tokens / seconds)
        ours["after planning"].append(n_tokens / json.loads(text)["seconds"])
        for mode, rates in theirs.items():
            _, _, text = timed([args.torch, HERE / "torch/calibrate.py", args.small, args.tokens, "--mode", mode])
            rates.append(json.loads(text.splitlines()[-1])["tokens_per_s"])
    for what, rates in ours.items():
        for mode, other in theirs.items():
            rate, other = statistics.median(rates), statistics.median(other)
            row(f"calibrate, {what} (torch: {mode})", f"{rate:.0f} tokens/s", f"{other:.0f} tokens/s", rate / other)


def fold(args):
    ours, theirs = [], []
    transforms, out = fresh(args.work / "bench.transforms.safetensors"), args.work / "bench-fold"
    stats = fresh(args.work / "bench.large.safetensors")
    ids = args.work / "bench.ids.json"
    ids.write_text(json.dumps([[(7919 * i) % 1000 for i in range(256)]]))
    timed([args.wush, "calibrate", args.large, "--calib", ids, "--out", stats, "--quiet"])
    timed([args.wush, "solve", stats, "--out", transforms, "--quiet"])
    copy = f"cp -r {args.large} {args.work}/bench-copy && sha256sum {args.work}/bench-copy/* > /dev/null"
    for _ in range(ROUNDS):
        fresh(args.work / "bench-copy")
        theirs.append(timed(["sh", "-c", copy])[0])
        fresh(out)
        ours.append(timed([args.wush, "fold", args.large, transforms, "--out", out, "--quiet"])[0])
    fresh(args.work / "bench-copy"), fresh(out)
    ours, theirs = statistics.median(ours), statistics.median(theirs)
    row("fold and write (cp -r, then sha256sum)", f"{ours:.2f} s", f"{theirs:.2f} s", ours / theirs)


def memory(args):
    for name, model, limit in (("small", args.small, 1.5e9), ("large", args.large, 6e9)):
        ids = args.work / "bench.ids.json"
        ids.write_text(json.dumps([[(7919 * i + k) % 1000 for i in range(2048)] for k in range(2)]))
        out = fresh(args.work / f"bench-{name}")
        seconds, peak, _ = timed([args.wush, "convert", model, "--calib", ids, "--out", out, "--quiet"])
        fresh(out)
        row(f"convert the {name} model at 2048 tokens, peak resident", f"{peak * 1024 / 1e9:.2f} GB",
            f"limit {limit / 1e9:.1f} GB", peak * 1024 / limit)


def main():
    parser = argparse.ArgumentParser()
    for name in ("wush", "small", "large", "tokens", "work", "torch"):
        parser.add_argument(f"--{name}", type=Path, required=name != "torch")
    parser.add_argument("--only", choices=["calibrate", "fold", "memory"])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    print("| what | wush | comparison | ratio |\n|---|---|---|---|")
    for name, bench in (("calibrate", calibrate), ("fold", fold), ("memory", memory)):
        if args.only in (None, name) and (name != "calibrate" or args.torch):
            bench(args)


if __name__ == "__main__":
    main()
