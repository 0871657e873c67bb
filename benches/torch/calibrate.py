#!/usr/bin/env python3
"""What `wush calibrate` is compared with: the same forward pass and the same sums in transformers on torch, CPU, float32.

    python3 calibrate.py MODEL TOKENS.json [--threads 2] [--mode forward|grams]

TOKENS.json holds token-id lists, one a sequence. `forward` runs the bare decoder (no output head, no statistics), the
most favourable case for torch; `grams` also sums K Kᵀ, V Vᵀ and Q Qᵀ per KV head in float64. Prints one JSON line.
"""
import argparse
import json
import time

import torch
from transformers import AttentionInterface, AutoModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SUMS = {}


def observed(module, query, key, value, attention_mask, **kwargs):
    """SDPA attention that first adds each KV head's Gram matrices; tensors are [1, heads, tokens, d]."""
    group = query.shape[1] // key.shape[1]
    wide = {"k": key[0].double(), "v": value[0].double()}
    wide["q"] = query[0].double().reshape(key.shape[1], group * query.shape[2], -1)
    for name, x in wide.items():
        gram = x.transpose(1, 2) @ x
        slot = (module.layer_idx, name)
        SUMS[slot] = SUMS[slot] + gram if slot in SUMS else gram
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mode", choices=["forward", "grams"], default="grams")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    attention = "sdpa"
    if args.mode == "grams":
        AttentionInterface.register("observed", observed)
        attention = "observed"
    model = AutoModel.from_pretrained(args.model, dtype=torch.float32, attn_implementation=attention).eval()
    sequences = json.load(open(args.tokens))
    with torch.inference_mode():
        model(torch.tensor([sequences[0]]), use_cache=False)
        SUMS.clear()
        start = time.perf_counter()
        for ids in sequences:
            model(torch.tensor([ids]), use_cache=False)
        seconds = time.perf_counter() - start
    n_tokens = sum(map(len, sequences))
    print(json.dumps({"mode": args.mode, "tokens": n_tokens, "seconds": seconds, "tokens_per_s": n_tokens / seconds}))


if __name__ == "__main__":
    main()
