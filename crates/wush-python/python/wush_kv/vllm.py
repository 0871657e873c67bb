"""A plugin of vLLM (`vllm.general_plugins`): a bundle's key transforms between RoPE and the cache, for every dtype of vLLM's cache.

vLLM loads it by itself, through `plugins`. It changes nothing unless the model is a bundle; then every attention layer computes
`k ← T_K (k − μ)` and `q ← T_K^{-T} q` before it writes its cache, and a start that cannot do so ends. Values are folded: vLLM knows
nothing of them.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from wush_kv import serving

SWITCH = "WUSH_KV_VLLM"
"""`off` in the environment: bundles are served without their key transforms."""


def register() -> None:
    """Patch vLLM's attention, once."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if getattr(Attention, "_wush", False):
        return
    Attention._wush = True
    Attention.__init__ = _after(Attention.__init__, _give_transforms)
    Attention.forward = _before_attention(Attention.forward)
    BaseModelLoader.load_model = _checked(BaseModelLoader.load_model)


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
            query, key = serving.apply(self, query, key)
        return original(self, query, key, value, *args, **kwargs)

    return forward


def _checked(original: Any) -> Any:
    """Loading, and then the proof that every layer of the bundle has its transforms: MLA and others have another attention."""

    @functools.wraps(original)
    def load_model(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = original(self, vllm_config, *args, **kwargs)
        bundle = serving.bundle_of(vllm_config.model_config.model)
        if bundle is not None:
            found = [layer.wush_layer for layer in model.modules() if hasattr(layer, "wush_layer")]
            serving.check_layers(bundle, found, vllm_config.parallel_config.pipeline_parallel_size == 1)
            serving.announce("vllm", bundle, len(found), SWITCH)
        return model

    return load_model


def _give_transforms(layer: Any) -> None:
    """Give a layer that was just made its rank's matrices, or refuse."""
    # Imported here: vLLM loads its plugins before its devices.
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.models.utils import extract_layer_index

    config = get_current_vllm_config()
    if config.model_config is None or (bundle := serving.bundle_of(config.model_config.model)) is None:
        return
    _refuse(layer, config)
    index, n_total = extract_layer_index(layer.layer_name), config.model_config.get_total_num_kv_heads()
    serving.check_shape(bundle, index, n_total, layer.head_size)
    rank, n_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    heads = serving.Heads(n_total, layer.num_kv_heads, rank, n_ranks)
    serving.give_transforms(layer, bundle, index, heads, torch.get_default_device())
    layer.wush_layer = index
    # vLLM keeps compiled graphs by configuration: other transforms must be another one.
    config.additional_config = {**(config.additional_config or {}), "wush": serving.transforms_hash(bundle)}


def _refuse(layer: Any, config: Any) -> None:
    """Refuse what the hook would not reach, and what was made in the base's coordinates."""
    problems = {
        "KV sharing between layers": layer.kv_sharing_target_layer_name is not None,
        "attention that is no decoder's": str(layer.attn_type) not in ("decoder", "AttentionType.DECODER"),
        f"attention of the kind {type(layer).__name__}": _overrides(layer),
        "speculative decoding": config.speculative_config is not None,
        "LoRA adapters": config.lora_config is not None,
        "a cache from or for another server": config.kv_transfer_config is not None,
        "stored scales of the cache": getattr(layer.quant_config, "kv_cache_scheme", None) is not None,
        "values of another head dimension": layer.head_size_v != layer.head_size,
    }
    serving.refuse(layer.layer_name, problems, SWITCH)


def _overrides(layer: Any) -> bool:
    """Whether a subclass has a forward of its own."""
    from vllm.model_executor.layers.attention.attention import Attention

    return type(layer).forward is not Attention.forward
