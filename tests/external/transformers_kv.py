#!/usr/bin/env python3
"""The adapter for transformers on real models: what it measures is what `wush eval ppl` measures.

    python3 transformers_kv.py WUSH TEXT MODEL ... [--calib TEXT] [--windows N] [--bits 2,4] [--device cuda] [--keep DIR]

Converts each checkpoint directory MODEL (or takes it, if it is a bundle), then checks in float32, on the CPU or on a GPU, that

- the perplexity of TEXT through the packed cache, in chunks of 16 over windows of 2048 tokens, is that of `wush eval ppl` within 0.5 %,
- what `generate` gives at 16 bits, greedy, is token for token what the base gives (where the base is at hand),
- on a GPU, every chunk that met quantized tokens went through the decode kernel.

Prints one JSON line a check; exits 1 if one fails. Installs torch and transformers, see environment.py.
"""
import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import enter

# Both programs pack the same codes from keys that differ by the rounding of f32 sums in another order; a code that lands on the other side
# of a step moves one token's NLL, and the mean of thousands by far less than this.
LIMIT = 5e-3
SEQ_LEN, CHUNK, NEW_TOKENS, PROMPT_TOKENS = 2048, 16, 32, 64


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wush", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--calib", type=Path, help="text to calibrate on: by default TEXT, which makes its perplexities optimistic")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--bits", default="2")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; `wush eval ppl` runs on the CPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a folder to keep the bundles in")
    args = parser.parse_args()
    args.wush = args.wush.resolve()
    return args


def convert(args, model, folder):
    if (model / "wush").is_dir():
        return model
    out = folder / f"{model.name}-wush"
    if not out.exists():
        text = ["--calib", args.calib or args.text, "--sequences", "16", "--seq-len", str(SEQ_LEN)]
        subprocess.run([args.wush, "convert", model, "--out", out, *text, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return out


def expected_rows(args, bundle):
    command = [args.wush, "eval", "ppl", bundle, "--text", args.text, "--windows", str(args.windows), "--seq-len", str(SEQ_LEN)]
    done = subprocess.run([*command, "--bits", args.bits, "--format", "json", "--quiet"], check=True, capture_output=True)
    return {int(row["bits"]): row["ppl"] for row in json.loads(done.stdout)["rows"]}


def load(bundle, bits, device):
    import torch
    import wush_kv.transformers as adapter

    return adapter.load(bundle, bits, windows=adapter.STUDY, dtype=torch.float32).to(device)


def count_kernel_calls(device):
    """A list that grows by one at every call of the decode kernel, in a layer."""
    calls = []
    if device != "cpu":
        from wush_kv.transformers.kernels import attend

        real = attend.attend_packed
        attend.attend_packed = lambda *args: calls.append(1) or real(*args)
    return calls


def token_ids(bundle, text):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundle)(text, return_tensors="pt", add_special_tokens=False).input_ids[0]


def windows_of(bundle, text, n_windows):
    """The text's windows as `wush eval ppl` cuts them: a model whose tokenizer adds a BOS gets it at the start of each."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundle)
    bos = tokenizer("").input_ids[:1]
    body = SEQ_LEN - len(bos)
    ids = token_ids(bundle, text)[: n_windows * body].reshape(n_windows, body)
    return torch.cat([torch.tensor(bos, dtype=ids.dtype).expand(n_windows, -1), ids], 1)


def perplexity(model, windows):
    import torch

    nll, n_tokens = 0.0, 0
    for ids in windows:
        last = None
        chunks = model.wush.logits(ids[None].to(model.device), CHUNK)
        for part, logits in zip(ids.split(CHUNK), chunks, strict=True):
            logits = logits.cpu()
            scored = logits[0] if last is None else torch.cat([last, logits[0]])
            targets = part[1:] if last is None else part
            nll += torch.nn.functional.cross_entropy(scored[: len(targets)].float(), targets, reduction="sum").item()
            n_tokens += len(targets)
            last = logits[0, -1:]
    return math.exp(nll / n_tokens)


def check_perplexity(args, bundle):
    windows = windows_of(bundle, args.text.read_text(), args.windows)
    ok = True
    calls = count_kernel_calls(args.device)
    for bits, expected in expected_rows(args, bundle).items():
        model = load(bundle, bits, args.device)
        calls.clear()
        found = perplexity(model, windows)
        counters = model.wush.counters
        through_kernel = len(calls) * CHUNK / counters.queries
        passed = abs(found / expected - 1) <= LIMIT and (counters.met_quantized > 0) == (bits < 16)
        passed &= args.device == "cpu" or through_kernel == counters.met_quantized / counters.queries
        ok &= passed
        report = {"bundle": bundle.name, "bits": bits, "ppl": found, "wush_eval_ppl": expected, "off": found / expected - 1}
        report |= {"device": args.device, "met_quantized": counters.met_quantized / counters.queries, "through_kernel": through_kernel}
        print(json.dumps(report | {"ok": passed}), flush=True)
    return ok


def check_generate(bundle, base, text, device):
    import torch
    from transformers import AutoModelForCausalLM

    ids = token_ids(bundle, text)[None, :PROMPT_TOKENS].to(device)
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device).generate(ids, **kwargs)
    found = load(bundle, 16, device).generate(ids, **kwargs)
    passed = found.tolist() == expected.tolist()
    print(json.dumps({"bundle": bundle.name, "generate": "16 bits", "tokens": found.shape[1] - PROMPT_TOKENS, "ok": passed}), flush=True)
    return passed


def main():
    import torch

    args, ok = parse(), True
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.models:
            bundle = convert(args, model, args.keep or Path(scratch))
            ok &= check_perplexity(args, bundle)
            if bundle != model:
                ok &= check_generate(bundle, model, args.text.read_text(), args.device)
    return 0 if ok else 1


if __name__ == "__main__":
    enter("transformers", "torch", "numpy", "transformers>=4.57")
    sys.exit(main())
