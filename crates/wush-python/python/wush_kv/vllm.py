"""A plugin of vLLM (`vllm.general_plugins`): a bundle's key transforms between RoPE and the cache, for every dtype of vLLM's cache.

vLLM loads it by itself. It changes nothing unless the model is a bundle; then every attention layer computes `k ← T_K (k − μ)` and
`q ← T_K^{-T} q` before it writes its cache, and a start that cannot do so ends. Values are folded: vLLM knows nothing of them.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wush_kv import Bundle, WushError

SWITCH = "WUSH_KV_VLLM"
"""`off` in the environment: bundles are served without their key transforms."""


def register() -> None:
    """Patch vLLM's attention; called by vLLM in each of its processes, perhaps twice."""
    if os.environ.get(SWITCH) == "off":
        return
    try:
        from vllm.model_executor.layers.attention.attention import Attention
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    except ImportError as error:
        # vLLM only logs what a plugin raises, and would go on without transforms.
        raise SystemExit(
            f"wush-kv: this vLLM is not known to the plugin: {error}. {SWITCH}=off serves without it"
        ) from error
    if getattr(Attention, "_wush", False):
        return
    Attention._wush = True
    Attention.__init__ = _after(Attention.__init__, _give_transforms)
    Attention.forward = _before_attention(Attention.forward)
    BaseModelLoader.load_model = _checked(BaseModelLoader.load_model)


def transform(x: Tensor, matrices: Tensor, mean: Tensor | None) -> Tensor:
    """Each KV head's matrix times its vectors: x `[tokens, heads · d]` or `[tokens, heads, d]`, matrices `[n_kv_heads, d, d]`."""
    n_kv_heads, d, _ = matrices.shape
    wide = x.reshape(x.shape[0], n_kv_heads, -1, d).float()
    if mean is not None:
        wide = wide - mean[:, None]
    return torch.einsum("tkgd,ked->tkge", wide, matrices).to(x.dtype).reshape(x.shape)


def rank_heads(n_total: int, n_local: int, rank: int, n_ranks: int) -> slice:
    """KV heads of a rank: an equal share, or one that several ranks hold where there are more ranks than heads."""
    first = rank * n_local if n_ranks <= n_total else rank * n_total // n_ranks
    return slice(first, first + n_local)


def _after(original: Any, then: Any) -> Any:
    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self)

    return init


def _before_attention(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if getattr(self, "wush_key", None) is not None:
            query = transform(query, self.wush_query, None)
            key = transform(key, self.wush_key, self.wush_mean)
        return original(self, query, key, value, *args, **kwargs)

    return forward


def _checked(original: Any) -> Any:
    """Loading, and then the proof that every layer of the bundle has its transforms: MLA and others have another attention."""

    @functools.wraps(original)
    def load_model(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = original(self, vllm_config, *args, **kwargs)
        bundle = _bundle_of(vllm_config.model_config.model)
        if bundle is not None and vllm_config.parallel_config.pipeline_parallel_size == 1:
            found = sorted(layer.wush_layer for layer in model.modules() if hasattr(layer, "wush_layer"))
            if found != bundle.layers:
                raise WushError(
                    f"the bundle has transforms of layers {bundle.layers}, vLLM's attention has layers {found}"
                )
        return model

    return load_model


@functools.cache
def _bundle_of(path: str) -> Bundle | None:
    """The bundle in a directory, all of it checked; None for what is none."""
    return Bundle.open(path) if (Path(path) / "wush").is_dir() else None


def _transforms_hash(bundle: Bundle) -> str:
    """SHA-256 of the key sidecar."""
    files = json.loads(bundle.manifest_json)["files"]
    return next(str(file["sha256"]) for file in files if file["path"] == "wush/key_transforms.safetensors")


def _give_transforms(layer: Any) -> None:
    """Give a layer that was just made its rank's matrices, or refuse."""
    # Imported here: vLLM loads its plugins before its devices.
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.models.utils import extract_layer_index

    config = get_current_vllm_config()
    if config.model_config is None or (bundle := _bundle_of(config.model_config.model)) is None:
        return
    _refuse(layer, config)
    index, n_total = extract_layer_index(layer.layer_name), config.model_config.get_total_num_kv_heads()
    expected = bundle.shape(index)
    if expected != (n_total, layer.head_size):
        raise WushError(
            f"layer {index}: the bundle has (KV heads, d) = {expected}, the model {(n_total, layer.head_size)}"
        )
    ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    heads = rank_heads(n_total, layer.num_kv_heads, *ranks)
    for name, matrix in (("wush_key", "key"), ("wush_query", "query"), ("wush_mean", "key_mean")):
        found = bundle.matrix(index, matrix)  # type: ignore[arg-type]
        tensor = (
            None if found is None else torch.frombuffer(found, dtype=torch.float32).reshape(found.shape)[heads].clone()
        )
        layer.register_buffer(name, None if tensor is None else tensor.to(torch.get_default_device()), persistent=False)
    layer.wush_layer = index
    # vLLM keeps compiled graphs by configuration: other transforms must be another one.
    config.additional_config = {**(config.additional_config or {}), "wush": _transforms_hash(bundle)}


def _refuse(layer: Any, config: Any) -> None:
    """Refuse what the hook would not reach."""
    problems = {
        "KV sharing between layers": layer.kv_sharing_target_layer_name is not None,
        "attention that is no decoder's": str(layer.attn_type) not in ("decoder", "AttentionType.DECODER"),
        f"attention of the kind {type(layer).__name__}": _overrides(layer),
        "speculative decoding": config.speculative_config is not None,
        "stored scales of the cache": getattr(layer.quant_config, "kv_cache_scheme", None) is not None,
        "values of another head dimension": layer.head_size_v != layer.head_size,
    }
    found = [what for what, is_so in problems.items() if is_so]
    if found:
        raise WushError(
            f"{layer.layer_name}: not supported with a bundle's key transforms: {', '.join(found)}. {SWITCH}=off serves without"
        )


def _overrides(layer: Any) -> bool:
    """Whether a subclass has a forward of its own."""
    from vllm.model_executor.layers.attention.attention import Attention

    return type(layer).forward is not Attention.forward
