#!/usr/bin/env python3
"""The plugin for SGLang, in SGLang's whole engine on the CPU.

    python3 sglang_engine.py BASE BUNDLE TEXT [--windows N] [--tokens N] [--ranks N] [--kv-dtypes fp8_e4m3 [--bundles BUNDLE …]]

In float32 with an unquantized cache: BUNDLE with its transforms gives token for token what BASE gives, so it does without them, and a damaged
sidecar ends the start. With --kv-dtypes also the mean negative log likelihood of N windows of TEXT over caches of those dtypes: of BASE, of
BUNDLE and the further ones with their transforms and without, as measured; that the last two differ shows the hook at work (sglang_kv.py
has what shows it in detail). Prints one JSON line, and on stderr one of each engine as it ends. Installs SGLang without its kernels
for GPUs, see sglang_kv.py.
"""
import os
import sys
import tempfile
from pathlib import Path

import served
from environment import enter
from sglang_kv import IMPORTS, SGLANG

SWITCH = "WUSH_KV_SGLANG"


class Engine:
    def __init__(self, model, args, max_len):
        import sglang

        self.engine = sglang.Engine(
            model_path=model, device="cpu", dtype="float32", kv_cache_dtype=args.kv, attention_backend="torch_native", log_level="error",
            tp_size=args.ranks, max_total_tokens=4 * max_len, max_running_requests=4, chunked_prefill_size=128, disable_radix_cache=True,
            disable_cuda_graph=True, disable_overlap_schedule=True, skip_tokenizer_init=True,
        )

    def generate(self, prompts, n, **options):
        sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        return self.engine.generate(input_ids=prompts, sampling_params=sampling, **options)

    def greedy(self, prompts, n):
        return [out["output_ids"] for out in self.generate(prompts, n)]

    def nlls(self, windows):
        scored = self.generate(windows, 1, return_logprob=True, logprob_start_len=0)
        return [-step[0] for out in scored for step in out["meta_info"]["input_token_logprobs"][1:]]


def without_kernels(folder):
    """On a CPU that SGLang has no kernels for it imports two names of vLLM's, and calls its own torch code."""
    (Path(folder) / "vllm").mkdir()
    (Path(folder) / "vllm/__init__.py").touch()
    (Path(folder) / "vllm/_custom_ops.py").write_text("rotary_embedding = fused_add_rms_norm = rms_norm = None\n")
    os.environ["PYTHONPATH"] = str(folder)


def ranks_on_a_cpu(n):
    """A core each, and no NCCL: where torch's wheel has brought it SGLang would use it on a CPU, too."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(n))
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"


def main(args):
    with tempfile.TemporaryDirectory() as folder:
        without_kernels(folder)
        if args.ranks > 1:
            ranks_on_a_cpu(args.ranks)
        found = served.compare(args, SWITCH)
        report, checks = served.report(args, found), served.checks(found)
        if args.kv_dtypes:
            report["nll over"] = served.nll_over(args, SWITCH)
            name = args.bundle.name
            live = any(row[name] != row[f"{name}, no key transforms"] for row in report["nll over"].values())
            checks["transforms change what is rounded"] = live
    return served.finish(report, checks)


if __name__ == "__main__":
    parser = served.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="of a tensor parallel group, each a process (1)")
    arguments = parser.parse_args()
    if arguments.child is not None:
        served.child(arguments, Engine)
    else:
        enter("sglang", *IMPORTS, alone=[SGLANG])
        sys.exit(main(arguments))
