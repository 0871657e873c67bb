"""What the plugins of servers share: a bundle's matrices on attention layers, and refusals of what they cannot serve.

Enters: a model's directory and its attention layers. Leaves: layers with matrices, which `apply` multiplies. Knows no server.
"""

import functools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wush_kv import Bundle, WushError

if TYPE_CHECKING:
    from wush_kv._native import Matrix


@functools.cache
def bundle_of(path: str) -> Bundle | None:
    """The bundle in a directory, all of it checked; None for what is none."""
    return Bundle.open(path) if (Path(path) / "wush").is_dir() else None


def transforms_hash(bundle: Bundle) -> str:
    """SHA-256 of the key sidecar."""
    files = json.loads(bundle.manifest_json)["files"]
    return next(str(file["sha256"]) for file in files if file["path"] == "wush/key_transforms.safetensors")


@dataclass(frozen=True)
class Heads:
    """KV heads of a layer, and how a tensor parallel group of ranks shares them."""

    n_total: int
    n_local: int
    rank: int
    n_ranks: int

    def own(self) -> slice:
        """Heads of this rank: an equal share, or one that several ranks hold where there are more ranks than heads."""
        more, fewer = max(self.n_total, self.n_ranks), min(self.n_total, self.n_ranks)
        if more % fewer or self.n_local != max(1, self.n_total // self.n_ranks):
            raise WushError(
                f"{self.n_total} KV heads on {self.n_ranks} ranks with {self.n_local} each: shared unevenly"
            )
        first = self.rank * self.n_total // self.n_ranks
        return slice(first, first + self.n_local)


def give_transforms(layer: nn.Module, bundle: Bundle, index: int, heads: Heads, device: torch.device) -> None:
    """Give an attention layer its rank's matrices of layer `index`, as buffers that no checkpoint has."""
    names: dict[str, Matrix] = {"wush_key": "key", "wush_query": "query", "wush_mean": "key_mean"}
    for name, matrix in names.items():
        found = bundle.matrix(index, matrix)
        tensor = None
        if found is not None:
            shared = torch.frombuffer(found, dtype=torch.float32).reshape(found.shape)
            tensor = shared[heads.own()].clone().to(device)
        layer.register_buffer(name, tensor, persistent=False)


def check_shape(bundle: Bundle, index: int, n_kv_heads: int, head_dim: int) -> None:
    """Refuse a layer of other heads than the bundle's."""
    expected = bundle.shape(index)
    if expected != (n_kv_heads, head_dim):
        raise WushError(f"layer {index}: the bundle has (KV heads, d) = {expected}, the model {(n_kv_heads, head_dim)}")


def check_layers(bundle: Bundle, found: list[int], all_here: bool) -> None:
    """Refuse a model whose attention layers are not the bundle's: once each, and all unless a pipeline has some elsewhere."""
    rising = sorted(found)
    if rising != (bundle.layers if all_here else sorted(set(found) & set(bundle.layers))) or not found:
        raise WushError(
            f"the bundle has transforms of layers {bundle.layers}, the server's attention has layers {rising}"
        )


def announce(server: str, bundle: Bundle, n_layers: int, switch: str) -> None:
    """Say in the server's own log that keys are transformed: without the plugin it would serve the bundle all the same."""
    logging.getLogger(f"{server}.wush_kv").info(
        "wush-kv: transforms the keys of %d layers (sidecar %.12s); %s=off serves without",
        n_layers,
        transforms_hash(bundle),
        switch,
    )


def refuse(where: str, problems: dict[str, bool], switch: str) -> None:
    """Refuse what is so of some problems, where a hook would not reach or the function would be another one."""
    found = [what for what, is_so in problems.items() if is_so]
    if found:
        raise WushError(
            f"{where}: not supported with a bundle's key transforms: {', '.join(found)}. {switch}=off serves without"
        )


def apply(layer: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """`T_K^{-T} q` and `T_K (k − μ)` of a layer that has matrices."""
    return transform(query, layer.wush_query, None), transform(key, layer.wush_key, layer.wush_mean)


def transform(x: Tensor, matrices: Tensor, mean: Tensor | None) -> Tensor:
    """Each KV head's matrix times its vectors: x `[tokens, heads · d]` or `[tokens, heads, d]`, matrices `[n_kv_heads, d, d]`."""
    n_kv_heads, d, _ = matrices.shape
    wide = x.reshape(x.shape[0], n_kv_heads, -1, d).float()
    if mean is not None:
        wide = wide - mean[:, None]
    return torch.einsum("tkgd,ked->tkge", wide, matrices).to(x.dtype).reshape(x.shape)
