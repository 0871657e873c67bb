#!/usr/bin/env python3
"""A bundle against its base in unmodified transformers.

    python3 bundle_vs_base.py BASE BUNDLE TOKENS.json [--dtype bfloat16|float32] [--sequences N] [--threads N]

TOKENS.json holds token-id lists. Checks that the bundle loads with no missing, unexpected or mismatched key, and compares the
negative log likelihoods of both. Prints one JSON line; exits 1 when the mean NLL differs by more than 0.05 %, or, for a bundle made
with `--fold-dtype f32`, when any token's differs by more than 1e-3 nats. With `--dtype bfloat16` torch rounds every activation: the
two models then differ by that noise, which is larger than the fold's (compare a base in both dtypes).
"""
import argparse
import json
import sys

import torch
from transformers import AutoModelForCausalLM

MEAN_LIMIT = 5e-4
TOKEN_LIMIT = 1e-3


def load(path, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    found = {name: sorted(map(str, keys)) for name, keys in info.items() if keys}
    if found:
        sys.exit(f"{path}: {found}")
    return model.eval()


def token_nlls(model, ids):
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    targets = torch.tensor(ids[1:])
    return torch.cat([
        torch.nn.functional.cross_entropy(part.float(), target, reduction="none")
        for part, target in zip(logits.split(256), targets.split(256))
    ])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("bundle")
    parser.add_argument("tokens")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sequences = json.load(open(args.tokens))[: args.sequences]
    nlls = []
    for path in (args.base, args.bundle):
        model = load(path, getattr(torch, args.dtype))
        with torch.inference_mode():
            nlls.append(torch.cat([token_nlls(model, ids) for ids in sequences]))
        del model
    base, bundle = nlls
    mean_diff = abs((bundle.mean() / base.mean() - 1).item())
    token_diff = (bundle - base).abs()
    print(json.dumps({
        "dtype": args.dtype, "tokens": len(base), "nll_base": base.mean().item(), "nll_bundle": bundle.mean().item(),
        "relative_mean_diff": mean_diff, "mean_token_diff": token_diff.mean().item(), "max_token_diff": token_diff.max().item(),
    }))
    wide = json.load(open(f"{args.bundle}/wush/manifest.json"))["fold"]["dtype"] == "f32"
    ok = mean_diff <= MEAN_LIMIT and (not wide or token_diff.max().item() <= TOKEN_LIMIT)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
