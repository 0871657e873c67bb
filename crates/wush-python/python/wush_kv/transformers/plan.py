"""What the cache of one model is made of: windows, every layer's matrices and quantizers. Knows nothing of sequences."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wush_kv import Bundle, WushError
from wush_kv.transformers.packer import Packer

UNQUANTIZED = 16
Role = Literal["key", "value"]


@dataclass(frozen=True)
class Windows:
    """Sizes of Algorithm 2's windows, in real tokens (padding does not count)."""

    sink: int
    """The first tokens, in full precision for ever."""
    keep: int
    """The newest tokens, in full precision."""
    flush: int
    """Tokens between both are quantized in multiples of this."""

    def __post_init__(self) -> None:
        """Refuse sizes that no window has."""
        whole = all(isinstance(n, int) for n in (self.sink, self.keep, self.flush))
        if not whole or self.sink < 0 or self.keep < 0 or self.flush < 1:
            raise WushError(f"windows: expected sink and keep of at least 0 and flush of at least 1, found {self}")

    def n_to_pack(self, length: int, n_packed: int) -> int:
        """Tokens to quantize now, of `length` with `n_packed` quantized already (lines 7 to 9)."""
        return max(length - self.keep - self.sink - n_packed, 0) // self.flush * self.flush


SERVING = Windows(sink=64, keep=256, flush=8)
"""Those of the paper's serving runs (Section 5.3)."""
STUDY = Windows(sink=16, keep=128, flush=16)
"""Those of its perplexity study (Section 5.2)."""


@dataclass
class Counters:
    """What a model's caches have done, summed over layers: the proof that tokens meet quantized keys and values."""

    queries: int = 0
    """Query tokens that went through the cache."""
    met_quantized: int = 0
    """Those of them that had quantized tokens before them in the cache."""
    packed: int = 0
    """Tokens quantized."""


@dataclass(frozen=True)
class Matrices:
    """One layer's transforms on one device, float32 `[n_kv_heads, d, d]`; the mean `[n_kv_heads, 1, d]`."""

    key: Tensor
    query: Tensor
    mean: Tensor | None

    def keys(self, keys: Tensor) -> Tensor:
        """`T_K (k − μ)` of keys `[batch, n_kv_heads, tokens, d]`, in their dtype; sums in float32."""
        wide = keys.float() if self.mean is None else keys.float() - self.mean
        return (wide @ self.key.mT).to(keys.dtype)

    def queries(self, queries: Tensor) -> Tensor:
        """`T_K^{-T} q` of queries `[batch, n_heads, tokens, d]`; head n takes KV head ⌊n / group⌋'s matrix."""
        batch, _, _, d = queries.shape
        of_groups = queries.float().reshape(batch, self.query.shape[0], -1, d)
        return (of_groups @ self.query.mT).to(queries.dtype).reshape(queries.shape)


class LayerPlan:
    """One attention layer: its transforms and quantizers, and what all sequences share of it."""

    def __init__(
        self,
        bundle: Bundle,
        layer: int,
        bits: int,
        method: str | None,
        windows: Windows,
        use_kernels: bool | None = None,
    ) -> None:
        """Read a layer of the bundle; at 16 bits nothing is quantized. `use_kernels`: see `kernels.use`."""
        self.layer = layer
        self.n_kv_heads, self.head_dim = bundle.shape(layer)
        self.windows = windows
        self.sliding_window: int | None = None
        self.bits, self.use_kernels = bits, use_kernels
        self.packers: tuple[Packer | None, ...] = (None, None)
        if bits != UNQUANTIZED:
            self.packers = tuple(_packer(bundle, layer, role, bits, method, use_kernels) for role in ("key", "value"))
        self._host = {name: _tensor(bundle.matrix(layer, name)) for name in ("key", "query", "key_mean")}
        self._on_device: dict[torch.device, Matrices] = {}

    def matrices(self, device: torch.device) -> Matrices:
        """Return the transforms on a device, copied there once."""
        if device not in self._on_device:
            key, query, mean = (None if x is None else x.to(device) for x in self._host.values())
            assert key is not None and query is not None
            self._on_device[device] = Matrices(key, query, None if mean is None else mean[:, None])
        return self._on_device[device]

    def check(self, keys: Tensor, values: Tensor) -> None:
        """Refuse keys or values of other heads than the bundle's."""
        expected = (self.n_kv_heads, self.head_dim)
        for what, x in (("keys", keys), ("values", values)):
            if (x.shape[1], x.shape[3]) != expected:
                found = (x.shape[1], x.shape[3])
                raise WushError(
                    f"layer {self.layer}, {what}: the bundle has (KV heads, d) = {expected}, the model {found}"
                )


def _packer(bundle: Bundle, layer: int, role: Role, bits: int, method: str | None, use_kernels: bool | None) -> Packer:
    codec = bundle.codec(layer, role, bits, method=method)
    return Packer(codec, _tensor(bundle.matrix(layer, f"{role}_feedback")), use_kernels)


def _tensor(matrix: memoryview | None) -> Tensor | None:
    if matrix is None:
        return None
    return torch.frombuffer(matrix, dtype=torch.float32).reshape(matrix.shape)
