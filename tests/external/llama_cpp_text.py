#!/usr/bin/env python3
"""A bundle in unmodified llama.cpp: its converter, the base's greedy text, and what a quantized cache costs.

    python3 llama_cpp_text.py BASE BUNDLE [BUNDLE ...] [--text FILE] [--windows N] [--tokens N] [--caches q4_0,f16:q4_0]

Converts the directories with llama.cpp's convert_hf_to_gguf.py to f32 and continues some prompts greedily by 32 tokens each, on the CPU over an f16
cache; exits 1 unless every BUNDLE gives BASE's text. With --text also, as measured, no limit: over N windows of FILE the mean NLL and the mean KL
divergence from BASE over an f16 cache, of every model and cache, with llama.cpp's rotation of quantized caches and without
(LLAMA_ATTN_ROT_DISABLE). Prints one JSON line. Every model and cache is a process of its own. Builds llama-cpp-python, whose source has
llama.cpp and its converter, see environment.py.
"""
import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from environment import enter

PACKAGE = "llama-cpp-python==0.3.36"
PROMPTS = ["The sky is blue because", "In the year 1815,", "def fibonacci(n):", "A recipe for bread: take"]
N_NEW = 32
# ggml's numbers of the types of a cache.
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}


def open_model(gguf, cache, n_ctx):
    from llama_cpp import Llama

    keys, _, values = cache.partition(":")
    kinds = {"type_k": TYPES[keys], "type_v": TYPES[values or keys]}
    # A quantized cache of values needs flash attention.
    return Llama(str(gguf), n_ctx=n_ctx, n_batch=n_ctx, logits_all=True, flash_attn=True, verbose=False, **kinds)


def child_texts(gguf, _):
    model = open_model(gguf, "f16", 128)
    texts = [model(prompt, max_tokens=N_NEW, temperature=0.0, top_k=1)["choices"][0]["text"] for prompt in PROMPTS]
    print("RESULT " + json.dumps(texts), flush=True)


def child_logits(gguf, args):
    """Log probabilities of every position but the last of all windows, to a file."""
    import numpy as np

    model = open_model(gguf, args.cache, args.tokens)
    ids = model.tokenize(args.text.read_bytes()[: 8 * args.windows * args.tokens], add_bos=False)
    windows = np.array(ids[: args.windows * args.tokens]).reshape(args.windows, args.tokens)
    found = np.empty((args.windows, args.tokens - 1, model.n_vocab()), np.float32)
    for window, rows in zip(windows, found, strict=True):
        model.reset()
        model.eval(window.tolist())
        logits = model.scores[: args.tokens - 1].astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        rows[:] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.save(args.out, found)
    print("RESULT " + json.dumps(windows.tolist()), flush=True)


def run(gguf, *options, env=None):
    command = [sys.executable, __file__, gguf, "--child", *options]
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        sys.exit(f"{gguf}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(found[0].removeprefix("RESULT "))


def converter(folder):
    """llama.cpp's converter, out of the package's source."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*download, "-d", folder, PACKAGE], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))


def convert(script, model, folder):
    out = folder / f"{model.name}.gguf"
    subprocess.run([sys.executable, script, model, "--outfile", out, "--outtype", "f32"], check=True, capture_output=True)
    return out


def measure(args, ggufs, folder):
    """NLL and KL divergence of every model, cache, and rotation."""
    import numpy as np

    def log_probabilities(gguf, cache, rotated):
        out = folder / "log_probabilities.npy"
        options = ["--text", args.text, "--windows", str(args.windows), "--tokens", str(args.tokens), "--cache", cache, "--out", out]
        windows = run(gguf, *options, env={} if rotated else {"LLAMA_ATTN_ROT_DISABLE": "1"})
        return np.array(windows)[:, 1:], np.load(out)

    targets, base = log_probabilities(ggufs[0], "f16", True)
    rows = []
    for gguf in ggufs:
        for cache, rotated in [("f16", True), *((cache, rotated) for cache in args.caches.split(",") for rotated in (True, False))]:
            _, found = log_probabilities(gguf, cache, rotated)
            nll = -np.take_along_axis(found, targets[..., None], 2).astype(np.float64).mean()
            divergence = mean_divergence(base, found)
            rows.append({"model": gguf.stem, "cache": cache, "rotated": rotated and cache != "f16", "nll": nll, "kl": divergence})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def mean_divergence(base, found):
    """Mean over positions of KL(base ‖ found), summed in float64."""
    import numpy as np

    positions = (row for pair in zip(base, found, strict=True) for row in zip(*pair, strict=True))
    return float(np.mean([np.exp(b, dtype=np.float64) @ (b.astype(np.float64) - f) for b, f in positions]))


def main(args):
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        script = converter(folder)
        ggufs = [convert(script, model.resolve(), folder) for model in args.models]
        expected, *others = [run(gguf) for gguf in ggufs]
        same = {model.name: [a == b for a, b in zip(expected, found, strict=True)] for model, found in zip(args.models[1:], others, strict=True)}
        ok = all(expected) and bool(same) and all(map(all, same.values()))
        report = {"tokens each": N_NEW, "the base's text": same, "first": expected[0]}
        if args.text:
            report["rows"] = measure(args, ggufs, folder)
    print(json.dumps(report | {"ok": ok}))
    return 0 if ok else 1


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--caches", default="q4_0,f16:q4_0", help="of keys and values, or keys:values")
    parser.add_argument("--scratch", type=Path, help="a folder for GGUF files and logits")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    if arguments.child:
        (child_logits if arguments.out else child_texts)(arguments.models[0], arguments)
    else:
        enter("llama-cpp", PACKAGE, "torch", "transformers", "sentencepiece", "gguf", "protobuf")
        sys.exit(main(arguments))
