"""What a server makes of a bundle beside its base, for the tests of servers that have a plugin.

A test gives a function that starts its server's engine, `engine(model, args, max_len)`, with two methods: `greedy(prompts, n)`, the n tokens
that follow each list of tokens, and `nlls(windows)`, minus the log probability of every token of some lists after their first. Every
engine is a process of its own: the same script with --child and the names of further methods, which are called one after the other. What
such a method returns is told; one that returns nothing has altered the engine, and the two are asked again.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Windows whose first halves are continued, and by how many tokens; all windows are scored.
N_PROMPTS, N_NEW = 4, 32
N_TOKENS = N_PROMPTS * N_NEW


def parser(description):
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("base", type=Path)
    made.add_argument("bundle", type=Path)
    made.add_argument("text", type=Path)
    made.add_argument("--windows", type=int, default=4)
    made.add_argument("--tokens", type=int, default=256, help="of a window (256)")
    made.add_argument("--kv-dtypes", nargs="+", default=[], metavar="DTYPE", help="mean NLL over caches of these too")
    made.add_argument("--bundles", nargs="+", type=Path, default=[], metavar="BUNDLE", help="and of these, beside BUNDLE")
    made.add_argument("--together", type=int, default=1, metavar="N", help="engines at a time (1)")
    made.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    made.add_argument("--model", help=argparse.SUPPRESS)
    made.add_argument("--kv", default="auto", help=argparse.SUPPRESS)
    return made


def child(args, engine):
    from transformers import AutoTokenizer

    n_tokens = args.tokens
    ids = AutoTokenizer.from_pretrained(args.base)(args.text.read_text()[: 8 * args.windows * n_tokens]).input_ids
    windows = [ids[i * n_tokens : (i + 1) * n_tokens] for i in range(args.windows)]
    server = engine(args.model, args, n_tokens + N_NEW)
    found = answers(server, windows)
    for name in args.child:
        found[name] = getattr(server, name)() or answers(server, windows)
    print("RESULT " + json.dumps(found), flush=True)


def answers(server, windows):
    nlls = server.nlls(windows)
    prompts = [window[: len(window) // 2] for window in windows[:N_PROMPTS]]
    return {"nll": sum(nlls) / len(nlls), "scored": len(nlls), "tokens": server.greedy(prompts, N_NEW)}


class Runs:
    """Children, some at a time; what each found goes to stderr as it comes."""

    def __init__(self, n_together):
        self.pool = ThreadPoolExecutor(n_together)

    def start(self, model, *methods, kv="auto", env=None):
        return self.pool.submit(self.run, str(model), methods, kv, env or {})

    def run(self, model, methods, kv, env):
        begun = time.monotonic()
        command = [sys.executable, *sys.argv, "--model", model, "--kv", kv, "--child", *methods]
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        # Ranks in processes of their own log their errors to stdout.
        error = {"error": (done.stdout + done.stderr)[-40000:].strip() or f"exit code {done.returncode}"}
        found = json.loads(lines[-1].removeprefix("RESULT ")) if lines else error
        said = {"model": Path(model).name, "kv": kv, **env, "seconds": round(time.monotonic() - begun, 1), "nll": short(found)}
        said |= {name: found[name].get("nll", found[name]) for name in methods if name in found}
        if "error" in found:
            said["error"] = found["error"][-2000:]
        print(json.dumps(said), file=sys.stderr, flush=True)
        return found


def damaged(bundle, folder):
    """A copy with one bit of the key sidecar changed."""
    copy = Path(shutil.copytree(bundle, Path(folder) / bundle.name, copy_function=os.link))
    path = copy / "wush/key_transforms.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.unlink()
    path.write_bytes(data)
    return copy


def compare(args, switch, *methods):
    """With an unquantized cache: the base, the bundle (with what `methods` find), the bundle left alone by `switch=off`, and a damaged one."""
    runs = Runs(args.together)
    with tempfile.TemporaryDirectory(dir=args.bundle.resolve().parent) as scratch:
        started = {
            "base": runs.start(args.base),
            "bundle": runs.start(args.bundle, *methods),
            "off": runs.start(args.bundle, env={switch: "off"}),
            "damaged": runs.start(damaged(args.bundle, scratch)),
        }
        return {name: run.result() for name, run in started.items()}


def same_tokens(base, found):
    """How many greedy tokens of an engine are the base's; none of one that failed."""
    pairs = zip(base.get("tokens", []), found.get("tokens", []))
    return sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))


def report(args, found):
    """Of `compare`: mean NLLs, and how many of the base's greedy tokens each engine gave."""
    base, name = found["base"], args.bundle.name
    engines = {"base": base, name: found["bundle"], f"{name}, no key transforms": found["off"]}
    engines |= {f"{name}, {how}": part for how, part in found["bundle"].items() if isinstance(part, dict)}
    nll = {name: short(engine) for name, engine in engines.items()}
    tokens = {name: same_tokens(base, engine) for name, engine in engines.items()}
    return {"tokens scored": base.get("scored"), "nll": nll, f"greedy tokens of {N_TOKENS} the base's": tokens}


def checks(found):
    """Of `compare`, in float32: greedy tokens are exactly the base's."""
    return {
        "right sidecar: the base's tokens": same_tokens(found["base"], found["bundle"]) == N_TOKENS,
        "no key transforms: the base's tokens": same_tokens(found["base"], found["off"]) == N_TOKENS,
        "damaged sidecar: refused": refused(found),
    }


def refused(found):
    return "key_transforms.safetensors" in found["damaged"].get("error", "")


def nll_over(args, switch, plain=None):
    """Mean NLL over each dtype of `--kv-dtypes`. `plain`: the engine's method that takes the key transforms away, else a child with `switch`."""
    runs, started = Runs(args.together), {}
    for kv in args.kv_dtypes:
        row = started[kv] = {"base": (runs.start(args.base, kv=kv), None)}
        for bundle in (args.bundle, *args.bundles):
            row[bundle.name] = (runs.start(bundle, *filter(None, [plain]), kv=kv), None)
            off = row[bundle.name][0] if plain else runs.start(bundle, kv=kv, env={switch: "off"})
            row[f"{bundle.name}, no key transforms"] = (off, plain)
    return {kv: {name: short(run.result(), part) for name, (run, part) in row.items()} for kv, row in started.items()}


def short(found, part=None):
    """The mean NLL, of what a method left if one is named, or the line of an error that names it."""
    if "error" in found:
        lines = found["error"].splitlines()
        return next((line for line in reversed(lines) if "Error: " in line), lines[-1])[:300]
    return (found[part] if part else found)["nll"]


def finish(report, checks):
    print(json.dumps(report | {"checks": checks, "ok": all(checks.values())}))
    return 0 if all(checks.values()) else 1
