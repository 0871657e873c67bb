#!/usr/bin/env python3
"""The plugin for SGLang in SGLang's own registry, attention layers and cache, on the CPU.

    python3 sglang_kv.py BUNDLE TEXT [--tokens N] [--ranks N]

Queries, keys and values of BUNDLE on N tokens of TEXT, as transformers computes them in float32, go through SGLang's RadixAttention, its
MHATokenToKVPool and its torch backend: a chunk, a chunk after it, and single tokens; odd layers slide. Checks that

- SGLang finds the plugin, and has put its three hooks where they belong;
- with an unquantized pool outputs are those without the plugin, for one rank and for each of a tensor parallel group, while what
  the pool holds are transformed keys;
- queries that do not undo what keys got give other outputs;
- a damaged sidecar, a fused store, keys that were stored before, shared caches and the like end the start or the call, and a plugin that
  does not know its SGLang ends the process.

Reports the squared error of outputs that an fp8 pool makes, with the key transforms and without. Prints one JSON line; exits 1 if a check
failed. Installs SGLang without its kernels for GPUs, see environment.py.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from environment import enter
from served import damaged

# SGLang, alone: it requires kernels for GPUs. What follows is what its scheduler imports on a CPU.
SGLANG = "sglang==0.5.23"
IMPORTS = (
    "torch torchvision transformers>=5.19 aiohttp apache-tvm-ffi compressed-tensors dill einops fastapi gguf IPython msgspec openai orjson "
    "partial-json-parser pybase64 pyzmq requests sentencepiece setproctitle uvicorn uvloop xgrammar"
).split()

WINDOW = 31
N_SINGLE = 8
EPS = 2.0**-24


def record(bundle, text, n_tokens):
    """Of every layer: queries, keys after RoPE, values `[tokens, heads, d]`, and the scale."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found = {}

    def attention(module, query, key, value, mask, **kwargs):
        found[module.layer_idx] = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)], kwargs["scaling"]
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("record", attention)
    AttentionMaskInterface.register("record", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float32, attn_implementation="record")
    ids = AutoTokenizer.from_pretrained(bundle)(Path(text).read_text()[: 16 * n_tokens], return_tensors="pt").input_ids
    with torch.inference_mode():
        model(ids[:, :n_tokens])
    return [found[layer] for layer in sorted(found)]


class Server:
    """Attention layers of one rank, as SGLang's model runner has them after loading."""

    def __init__(self, model_path, recorded, rank=0, n_ranks=1, **options):
        from sglang.srt.configs.model_config import AttentionArch
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.runtime_context import get_parallel
        from torch import nn

        self.recorded, self.rank, self.n_ranks = recorded, rank, n_ranks
        self.layers = nn.ModuleList()
        for index, ((q, k, _), scaling) in enumerate(recorded):
            n_heads, n_kv_heads = q.shape[1] // n_ranks, k.shape[1] // n_ranks
            window = WINDOW if index % 2 else -1
            self.layers.append(RadixAttention(n_heads, q.shape[2], scaling, n_kv_heads, index, sliding_window_size=window))
        self.layers.register_parameter("weights", nn.Parameter(recorded[0][0][0].new_zeros(1)))
        defaults = {"speculative_algorithm": None, "enable_lora": None, "lora_paths": None, "disaggregation_mode": "null"}
        n_total = recorded[0][0][1].shape[1]
        config = SimpleNamespace(model_path=str(model_path), attention_arch=AttentionArch.MHA, get_total_num_kv_heads=lambda: n_total)
        runner = SimpleNamespace(
            model=self.layers, model_config=config, server_args=SimpleNamespace(**defaults | options), is_draft_worker=False
        )
        ranks = {"tp_size": n_ranks, "attn_tp_size": n_ranks, "attn_tp_rank": rank, "attn_dp_size": 1, "attn_cp_size": 1, "pp_size": 1}
        with get_parallel().override(**ranks):
            ModelRunner.load_model(runner)

    def own(self, index):
        """This rank's heads of a layer's tensors."""
        return [x.chunk(self.n_ranks, 1)[self.rank].clone() for x in self.recorded[index][0]]

    def run(self, dtype):
        """Outputs of all layers `[tokens, heads · d]`, and the pool's keys."""
        import torch
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        q, k, _ = self.own(0)
        n_tokens, n_kv_heads, d = k.shape
        pool = MHATokenToKVPool(n_tokens, 1, dtype, n_kv_heads, d, len(self.layers), "cpu", False)
        slots = SimpleNamespace(req_to_token=torch.arange(1, n_tokens + 1)[None])
        backend = TorchNativeAttnBackend(SimpleNamespace(device="cpu", req_to_token_pool=slots, token_to_kv_pool=pool))
        outputs = []
        with forward_context(ForwardContext(attn_backend=backend)), torch.inference_mode():
            for index, layer in enumerate(self.layers):
                parts = [
                    layer(*(x[start:end].flatten(1) for x in self.own(index)), batch(start, end, backend)) for start, end in spans(n_tokens)
                ]
                outputs.append(torch.cat([part.reshape(part.shape[0], -1) for part in parts]))
        return outputs, [pool.get_key_buffer(index)[1:].float() for index in range(len(self.layers))]


def spans(n_tokens):
    """Two chunks, then single tokens."""
    half, last = n_tokens // 2, n_tokens - N_SINGLE
    return [(0, half), (half, last), *((t, t + 1) for t in range(last, n_tokens))]


def batch(start, end, backend):
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    found = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND if end - start > 1 else ForwardMode.DECODE,
        out_cache_loc=torch.arange(start + 1, end + 1),
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([end]),
        extend_prefix_lens=torch.tensor([start]),
        extend_seq_lens=torch.tensor([end - start]),
        encoder_lens=None,
        global_num_token_non_padded_cpu=None,
    )
    backend.init_forward_metadata(found)
    return found


def tolerances(bundle, recorded):
    """What f32 sums may change of each layer's outputs.

    A score is a sum of d products, of vectors that are themselves sums of d products with a matrix rounded to f32: its error is below
    3 (d + 2) ε times the same sums over magnitudes. A softmax whose scores move by δ moves by at most 2 δ in the sum of its weights,
    so an output by 2 δ max |v|; sums over n tokens, on both sides, add 2 (n + 2) ε max |v|.
    """
    import torch

    limits = []
    for index, ((q, k, v), scaling) in enumerate(recorded):
        n_kv_heads, d = bundle.shape(index)
        key, query = (torch.tensor(bundle.matrix(index, name).tolist()).abs() for name in ("key", "query"))
        mean = bundle.matrix(index, "key_mean")
        mean = torch.zeros(n_kv_heads, d) if mean is None else torch.tensor(mean.tolist())
        largest_k = torch.einsum("ked,tkd->tke", key, k.abs() + mean.abs()).amax(0)
        largest_q = torch.einsum("ked,tkgd->tkge", query, q.abs().unflatten(1, (n_kv_heads, -1))).amax((0, 2))
        score = scaling * (largest_k * largest_q).sum(1).max().item()
        limits.append((2 * 3 * (d + 2) * score + 2 * (len(q) + 2)) * EPS * v.abs().max().item())
    return limits


def errors(found, expected, limits):
    """Of each layer: the largest difference over what is allowed."""
    return [((a - b).abs().max() / limit).item() for a, b, limit in zip(found, expected, limits, strict=True)]


def squared(found, expected):
    """Mean over layers of the relative squared error."""
    return sum(((a - b).square().sum() / b.square().sum()).item() for a, b in zip(found, expected, strict=True)) / len(found)


def refused(what, error, words):
    try:
        what()
    except error as raised:
        return words in str(raised)
    return False


UNKNOWN = """
import sglang.srt.models.utils as utils
from sglang.srt.plugins import load_plugins
del utils.enable_fused_set_kv_buffer
load_plugins()
print("served")
"""


def unknown_server_ends():
    done = subprocess.run([sys.executable, "-c", UNKNOWN], capture_output=True, text=True, check=False)
    return done.returncode != 0 and "served" not in done.stdout and "WUSH_KV_SGLANG=off" in done.stderr


def fused_store_is_off():
    """On a machine on which SGLang would store keys with RoPE."""
    import sglang.srt.models.utils as utils
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    given, utils._is_hip = SimpleNamespace(dcp_kv_mask=None), True
    with forward_context(ForwardContext(attn_backend=SimpleNamespace(token_to_kv_pool=None))):
        hooked = utils.enable_fused_set_kv_buffer
        return hooked.__wrapped__(given) is True and hooked(given) is False


def checks_of_numbers(bundle, recorded, n_ranks):
    import torch
    from wush_kv import Bundle

    base, server, spoiled = Server("no bundle", recorded), Server(bundle, recorded), Server(bundle, recorded)
    for layer in spoiled.layers:
        layer.wush_query = layer.wush_query.mT.contiguous()
    ranks = [Server(bundle, recorded, rank, n_ranks).run(torch.float32)[0] for rank in range(n_ranks)]
    expected, _ = base.run(torch.float32)
    outputs, keys = server.run(torch.float32)
    limits = tolerances(Bundle.open(bundle), recorded)
    found = {
        "one rank": max(errors(outputs, expected, limits)),
        f"{n_ranks} ranks": max(errors([torch.cat(parts, 1) for parts in zip(*ranks, strict=True)], expected, limits)),
        "wrong queries": max(errors(spoiled.run(torch.float32)[0], expected, limits)),
    }
    fp8 = {name: squared(one.run(torch.float8_e4m3fn)[0], expected) for name, one in (("without", base), ("with", server))}
    checks = {
        "outputs are those without": found["one rank"] <= 1,
        f"so are those of {n_ranks} ranks together": found[f"{n_ranks} ranks"] <= 1,
        "wrong queries: other outputs": found["wrong queries"] > 1,
        "the pool has transformed keys": all(holds_transformed(*x) for x in zip(keys, recorded, server.layers, strict=True)),
    }
    return {"largest difference over its limit": found, "squared error, fp8 pool": fp8}, checks


def holds_transformed(pooled, recorded, layer):
    """Whether a layer's pool has T_K (k − μ), and not k. Any f32 sum of 32 to 256 products is within 1e-4 of the other."""
    import torch
    from wush_kv import serving

    k = recorded[0][1]
    written = serving.transform(k, layer.wush_key, layer.wush_mean)
    return torch.allclose(pooled, written, rtol=1e-4, atol=1e-4 * written.abs().max().item()) and not torch.allclose(pooled, k, rtol=1e-2)


def checks_of_refusals(bundle, recorded):
    from sglang.srt.plugins.hook_registry import HookRegistry
    from wush_kv import WushError
    from wush_kv import sglang as plugin

    with tempfile.TemporaryDirectory(dir=bundle.resolve().parent) as scratch:
        spoilt = refused(lambda: Server(damaged(bundle, scratch), recorded), WushError, "key_transforms.safetensors")
    layer, x = Server(bundle, recorded).layers[0], recorded[0][0]
    return {
        "three hooks are applied": {plugin.ATTENTION, plugin.LOADING, plugin.FUSED_STORE} <= HookRegistry._patched,
        "damaged sidecar": spoilt,
        "other layers": refused(lambda: Server(bundle, recorded[:-1]), WushError, "has transforms of layers"),
        "speculative decoding": refused(lambda: Server(bundle, recorded, speculative_algorithm="EAGLE"), WushError, "speculative"),
        "a shared cache": refused(lambda: Server(bundle, recorded, enable_lmcache=True), WushError, "enable_lmcache"),
        "keys stored before": refused(lambda: layer(*x, None, save_kv_cache=False), WushError, "stored keys before"),
        "no keys": refused(lambda: layer(x[0], None, None, None), WushError, "stored keys before"),
        "fused store forced off": fused_store_is_off(),
        "an unknown SGLang ends the process": unknown_server_ends(),
    }


def main(args):
    from sglang.srt.model_executor.model_runner import ModelRunner

    # Layers are loaded by this script; the hook is on this name.
    ModelRunner.load_model = lambda runner: None
    from sglang.srt.plugins import load_plugins

    load_plugins()
    recorded = record(args.bundle, args.text, args.tokens)
    report, checks = checks_of_numbers(args.bundle, recorded, args.ranks)
    checks |= checks_of_refusals(args.bundle, recorded)
    print(json.dumps({"bundle": args.bundle.name, "layers": len(recorded)} | report | {"checks": checks, "ok": all(checks.values())}))
    return 0 if all(checks.values()) else 1


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=1, help="size of a tensor parallel group; must divide the model's KV heads")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    enter("sglang", *IMPORTS, alone=[SGLANG])
    sys.exit(main(arguments))
