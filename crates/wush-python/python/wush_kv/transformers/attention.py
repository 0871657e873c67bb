"""The attention function under the name "wush". Keys that a packed cache returned carry a mark, and are read from it; all others are
plain keys, met by plain queries: a bundle without its cache computes the original function.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from wush_kv import WushError

if TYPE_CHECKING:
    from wush_kv.transformers.cache import WushLayer

NAME = "wush"
MARK = "_wush_layer"


def register() -> None:
    """Make the attention function and its masks known to transformers under `NAME`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `[batch, heads, tokens, d]` tensors; the output is `[batch, tokens, heads, d]`."""
    layer: WushLayer | None = getattr(key, MARK, None)
    if layer is not None:
        layer.was_reached = True
    _refuse(module, attention_mask, dropout, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer is None:
        out = attend(query, key, value, attention_mask, scaling, softcap)
    else:
        out = layer.attend(query, attention_mask, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse what is not computed here, rather than leave it out."""
    unknown = [name for name in ("s_aux", "position_bias", "head_mask") if kwargs.get(name) is not None]
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        unknown.append("attention that is not causal")
    if dropout > 0.0:
        unknown.append("dropout")
    if unknown:
        raise WushError(f"{type(module).__name__}: {', '.join(unknown)} is not supported with a packed cache")
    if mask is not None and mask.dtype != torch.bool:
        raise WushError(f"attention masks: expected bool, found {mask.dtype}: additive masks are not supported")


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Softmax attention, causal where there is no mask; `mask`: bool, broadcast to `[batch, 1, queries, keys]`."""
    n_queries, group = query.shape[2], query.shape[1] // key.shape[1]
    if softcap is not None:
        return _attend_softcapped(query, key, value, mask, scaling, softcap)
    if n_queries == 1 and not (mask is None and _takes_groups(query, key, value)):
        # The group's heads as queries of one head: nothing is repeated.
        out = scaled_dot_product_attention(
            query.reshape(key.shape[0], key.shape[1], group, -1), key, value, mask, scale=scaling
        )
        return out.reshape(query.shape)
    if mask is None:
        return scaled_dot_product_attention(
            query, key, value, is_causal=n_queries > 1, scale=scaling, enable_gqa=group > 1
        )
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    return scaled_dot_product_attention(query, key, value, mask, scale=scaling)


def _takes_groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch has a kernel here that reads a KV head once for its group, and splits a long cache among processors."""
    return query.is_cuda and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True))


def _attend_softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """Attend with logits that become `cap · tanh(logits / cap)`."""
    of_groups = query.unflatten(1, (key.shape[1], -1))
    logits = of_groups @ key[:, :, None].mT * scaling
    logits = (logits.float() / softcap).tanh() * softcap
    if mask is None:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=key.device).tril(key.shape[2] - query.shape[2])
    else:
        mask = mask[:, :, None]
    # Not -inf: rows of padding see nothing, and must not become NaN.
    logits = logits.masked_fill(~mask, math.ldexp(-1.0, 100))
    return (logits.softmax(-1).to(value.dtype) @ value[:, :, None]).flatten(1, 2)
