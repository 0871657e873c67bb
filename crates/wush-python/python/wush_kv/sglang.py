"""A plugin of SGLang (`sglang.srt.plugins`): a bundle's key transforms between RoPE and the cache, for every dtype of SGLang's cache.

SGLang loads it by itself, through `plugins`, and applies its three hooks: on `RadixAttention.forward`, which computes `k ← T_K (k − μ)` and
`q ← T_K^{-T} q`; on loading a model, which gives the layers of a bundle their matrices or ends the start; and on the choice to store keys
together with RoPE, which a bundle's keys must not. Nothing changes for a model that is no bundle.
"""

import pkgutil
from typing import Any

from torch import Tensor

from wush_kv import WushError, serving

SWITCH = "WUSH_KV_SGLANG"
"""`off` in the environment: bundles are served without their key transforms."""

ATTENTION = "sglang.srt.layers.radix_attention.RadixAttention.forward"
LOADING = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FUSED_STORE = "sglang.srt.models.utils.enable_fused_set_kv_buffer"

KNOWN = frozenset(("forward_batch", "save_kv_cache", "key_value_num_tokens", "return_lse"))
"""Arguments of attention that leave keys and queries as they are. Others can be positions that are still to be encoded."""

BYPASSES = ("enable_amd_monokernel", "enable_nvidia_megakernel")
"""Options by which kernels take the place of a model's attention."""

SHARES = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
"""Options by which keys come from, or go to, other servers, which may transform them otherwise."""

PROBE = object()
"""A query by which `_attention` is asked whether it is there."""

_serves_bundle = False


def register() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in (
        (ATTENTION, _attention, HookType.AROUND),
        (LOADING, _loaded, HookType.AFTER),
        (FUSED_STORE, _fused_store, HookType.AROUND),
    ):
        # SGLang would only log a target that it does not have.
        pkgutil.resolve_name(target)
        HookRegistry.register(target, hook, kind)


def _attention(original: Any, layer: Any, q: Any, k: Any = None, v: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Attention with transformed queries and keys; args: the batch, and whether its keys are still to be stored."""
    if q is PROBE:
        return PROBE
    if getattr(layer, "wush_key", None) is None:
        return original(layer, q, k, v, *args, **kwargs)
    stores = args[1] if len(args) > 1 else kwargs.get("save_kv_cache", True)
    if not isinstance(k, Tensor) or v is None or not stores:
        raise WushError(
            f"layer {layer.layer_id}: SGLang stored keys before its attention (a fused store, or keys of another layer), "
            f"where a bundle's key transforms do not reach them. {SWITCH}=off serves without"
        )
    if unknown := [name for name, given in kwargs.items() if name not in KNOWN and given is not None]:
        raise WushError(
            f"layer {layer.layer_id}: attention is given {', '.join(unknown)}, which the plugin does not know. "
            f"{SWITCH}=off serves without"
        )
    q, k = serving.apply(layer, q, k)
    return original(layer, q, k, v, *args, **kwargs)


def _fused_store(original: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether RoPE stores its keys at once: never those of a bundle."""
    return not _serves_bundle and bool(original(*args, **kwargs))


def _loaded(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Give the layers of a bundle that was just loaded this rank's matrices, or refuse."""
    global _serves_bundle
    bundle = serving.bundle_of(runner.model_config.model_path)
    if bundle is None:
        return
    _refuse(runner)
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.runtime_context import get_parallel

    parallel, n_total = get_parallel(), runner.model_config.get_total_num_kv_heads()
    layers = [layer for layer in runner.model.modules() if isinstance(layer, RadixAttention)]
    serving.check_layers(bundle, [layer.layer_id for layer in layers], parallel.pp_size == 1)
    device = next(runner.model.parameters()).device
    for layer in layers:
        _refuse_layer(layer)
        serving.check_shape(bundle, layer.layer_id, n_total, layer.qk_head_dim)
        heads = serving.Heads(n_total, layer.tp_k_head_num, parallel.attn_tp_rank, parallel.attn_tp_size)
        serving.give_transforms(layer, bundle, layer.layer_id, heads, device)
    _serves_bundle = True
    serving.announce("sglang", bundle, len(layers), SWITCH)


def _refuse(runner: Any) -> None:
    """Refuse what no hook would reach, what was made in the base's coordinates, and keys that other servers read."""
    args = runner.server_args
    problems = {
        "multi-head latent attention": runner.model_config.attention_arch.name == "MLA",
        "speculative decoding": runner.is_draft_worker or args.speculative_algorithm is not None,
        "LoRA adapters": bool(args.enable_lora or args.lora_paths),
        "prefill and decoding on different servers": args.disaggregation_mode != "null",
        **{name: bool(getattr(args, name, None)) for name in BYPASSES + SHARES},
    }
    serving.refuse("this server", problems, SWITCH)


def _refuse_layer(layer: Any) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    problems = {
        f"attention of the kind {type(layer).__name__}": type(layer).forward is not RadixAttention.forward,
        "an attention whose hook was not applied": not _is_reached(layer),
        "attention that is no decoder's": layer.is_cross_attention or not layer.attn_type.value.startswith("decoder"),
        "positions that attention encodes": layer.pos_encoding_mode != "NONE",
        "values of another head dimension": layer.v_head_dim != layer.qk_head_dim,
        "stored scales of the cache": any(
            scale is not None and float(scale) != 1.0 for scale in (layer.k_scale, layer.v_scale)
        ),
    }
    serving.refuse(f"layer {layer.layer_id}", problems, SWITCH)


def _is_reached(layer: Any) -> bool:
    """Whether a call of the layer's attention comes through `_attention`, whatever else is hooked there."""
    try:
        return layer.forward(PROBE, None, None, None) is PROBE
    except Exception:
        return False
