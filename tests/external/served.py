"""What a server makes of a bundle beside its base, for the tests of servers that have a plugin.

A test gives a function that starts its server's engine, `engine(model, kv_dtype, max_len)`, with two methods: `greedy(prompts, n)`, the n tokens
that follow each list of tokens, and `nlls(windows)`, minus the log probability of every token of some lists after their first. Every
engine is a process of its own: the same script with --child.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Windows whose first halves are continued, and by how many tokens; all windows are scored.
N_PROMPTS, N_NEW = 4, 32


def parse(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    parser.add_argument("--fp8", nargs="*", type=Path, metavar="BUNDLE", help="an fp8 cache too, of this bundle and others")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spoil", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kv", default="auto", help=argparse.SUPPRESS)
    return parser.parse_args()


def child(args, engine):
    from transformers import AutoTokenizer

    n_tokens = args.tokens
    ids = AutoTokenizer.from_pretrained(args.base)(args.text.read_text()[: 8 * args.windows * n_tokens]).input_ids
    windows = [ids[i * n_tokens : (i + 1) * n_tokens] for i in range(args.windows)]
    server = engine(str(args.base), args.kv, n_tokens + N_NEW)
    tokens = server.greedy([window[: n_tokens // 2] for window in windows[:N_PROMPTS]], N_NEW)
    nlls = server.nlls(windows)
    print("RESULT " + json.dumps({"tokens": tokens, "nll": sum(nlls) / len(nlls), "scored": len(nlls)}), flush=True)


def run(args, model, *options, env=None):
    """What a child found, or its error."""
    text = [args.text, "--windows", str(args.windows), "--tokens", str(args.tokens)]
    command = [sys.executable, sys.argv[0], model, "-", *text, "--child", *options]
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"error": done.stderr[-20000:] or f"exit code {done.returncode}"}


def damaged(bundle, folder):
    """A copy with one bit of the key sidecar changed."""
    copy = Path(shutil.copytree(bundle, Path(folder) / bundle.name, copy_function=os.link))
    path = copy / "wush/key_transforms.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.unlink()
    path.write_bytes(data)
    return copy


def compare(args):
    """A report and its checks in float32, with an unquantized cache."""
    base, right = run(args, args.base), run(args, args.bundle)
    with tempfile.TemporaryDirectory(dir=args.bundle.resolve().parent) as scratch:
        refused = run(args, damaged(args.bundle, scratch))
    checks = {
        "right sidecar: the base's tokens": "tokens" in right and right["tokens"] == base.get("tokens"),
        "damaged sidecar: refused": "key_transforms.safetensors" in refused.get("error", ""),
    }
    nll = {"base": base.get("nll", base.get("error")), args.bundle.name: right.get("nll", right.get("error"))}
    return {"tokens scored": base.get("scored"), "nll": nll}, checks, base


def fp8_rows(args, kv_dtype, switch):
    """Mean NLL over an fp8 cache; `switch`: the variable by which a plugin leaves bundles alone."""
    rows = {"base": run(args, args.base, "--kv", kv_dtype)}
    for bundle in (args.bundle, *args.fp8):
        rows[bundle.name] = run(args, bundle, "--kv", kv_dtype)
        rows[f"{bundle.name}, no key transforms"] = run(args, bundle, "--kv", kv_dtype, env={switch: "off"})
    return {name: found.get("nll", found.get("error")) for name, found in rows.items()}


def finish(report, checks):
    print(json.dumps(report | {"checks": checks, "ok": all(checks.values())}))
    return 0 if all(checks.values()) else 1
