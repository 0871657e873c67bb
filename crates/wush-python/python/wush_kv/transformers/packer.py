"""Packed token-heads as torch tensors. Enters: float32 `[batch, n_kv_heads, tokens, d]` on any device. Leaves: their words.

Packing is the Rust encoder's, error feedback included, on the CPU, and on CUDA a kernel's with the same bits; unpacking is Rust's on
the CPU, and shifts and masks on other devices. The layout is docs/formats.md's: W words, at 3 bits W half-words, one word with scale and
zero point in bfloat16.
"""

import warnings

import numpy as np
import torch
from torch import Tensor

from wush_kv import Codec, WushError
from wush_kv.transformers import kernels

WORD_BYTES = 4
TOKENS_AT_A_TIME = 4096
"""A long prompt is packed in parts, so that its copy on the host stays small."""


class Packer:
    """The quantizer of one layer's keys or values, all KV heads."""

    def __init__(self, codec: Codec, lower: Tensor | None = None, use_kernels: bool | None = None) -> None:
        """Wrap the bundle's quantizer. For kernels: `lower`, its feedback, float32 `[n_kv_heads, d, d]`; `use_kernels` of `kernels.use`."""
        self.codec, self.lower, self.use_kernels = codec, lower, use_kernels
        self.n_words = codec.n_bytes // WORD_BYTES
        self._encoders: dict[torch.device, _Encoder | None] = {}

    def pack(self, x: Tensor) -> Tensor:
        """Pack `[batch, n_kv_heads, tokens, d]` to int32 `[batch, n_kv_heads, tokens, n_words]`.

        Raises `WushError` for a NaN, an infinity or a magnitude beyond 2^120; a kernel, which nobody waits for, at a later call.
        """
        if x.device not in self._encoders:
            self._encoders[x.device] = self._find_encoder(x.device)
        encoder = self._encoders[x.device]
        if encoder is not None:
            return encoder.pack(x.detach())
        parts = [self._pack_part(part) for part in x.split(TOKENS_AT_A_TIME, dim=2)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _find_encoder(self, device: torch.device) -> "_Encoder | None":
        """The kernel that packs on a device; None where that is Rust's work."""
        if not kernels.use(device, self.use_kernels):
            return None
        if self.codec.has_feedback != (self.lower is not None):
            raise WushError(f"{self.codec}: its feedback is missing, or is of another quantizer")
        if self.codec.alpha is None:
            warnings.warn(f"{self.codec}: no kernel packs with this quantizer: the CPU does", stacklevel=2)
            return None
        return _Encoder(self.codec, self.codec.alpha, self.lower, device)

    def _pack_part(self, x: Tensor) -> Tensor:
        packed = self.codec.pack(x.detach().float().cpu().contiguous().numpy())
        return torch.from_numpy(np.asarray(packed).view(np.int32)).to(x.device)

    def unpack(self, words: Tensor) -> Tensor:
        """Unpack to float32 `[batch, n_kv_heads, tokens, d]`: `scale · (code − zero)`."""
        if words.device.type == "cpu":
            packed = words.contiguous().numpy().view(np.uint8)
            return torch.from_numpy(np.asarray(self.codec.unpack(packed)))
        return self.unpack_here(words)

    def unpack_here(self, words: Tensor) -> Tensor:
        """Unpack with the device's own shifts and masks: the same numbers."""
        codes = self._codes(words[..., :-1])[..., : self.codec.head_dim]
        last = words[..., -1:]
        scale, zero = (last << 16).view(torch.float32), (last & -0x10000).view(torch.float32)
        return scale * (codes - zero)

    def _codes(self, words: Tensor) -> Tensor:
        bits = self.codec.bits
        if bits != 3:
            return _plane(words, 32 // bits, bits)
        n_words = 2 * words.shape[-1] // 3  # W words and ⌈W / 2⌉ of half-words
        low, half_words = words[..., :n_words], words[..., n_words:]
        halves = _plane(half_words, 2, 16).unflatten(-1, (2, -1)).mT.flatten(-2)[..., :n_words]
        return _plane(low, 16, 2) + 4 * _plane(halves, 16, 1)


def _plane(words: Tensor, n_codes: int, width: int) -> Tensor:
    """Codes of `width` bits in words `[…, W]`: coordinate p W + w is number p of word w."""
    shifts = torch.arange(0, n_codes * width, width, dtype=torch.int32, device=words.device)
    return (words[..., None, :] >> shifts[:, None] & (1 << width) - 1).flatten(-2)


class _Encoder:
    """The kernel that packs on one device, and what it reads there."""

    def __init__(self, codec: Codec, alpha: float, lower: Tensor | None, device: torch.device) -> None:
        """Copy the parameters to the device."""
        from wush_kv.transformers.kernels.encode import encode

        self.codec, self.encode = codec, encode
        self.lower = None if lower is None else lower.to(device)
        step = 2.0 * alpha / (2**codec.bits - 1)
        self.step = torch.tensor([step], dtype=torch.float64, device=device)
        # In the host's memory, where it can be read without waiting for the device.
        self.fault = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def pack(self, x: Tensor) -> Tensor:
        """Pack; raises for numbers of an earlier call that cannot be."""
        if self.fault.item():
            raise WushError(f"{self.codec}: a NaN, an infinity or a magnitude beyond 2^120 was to be packed")
        return self.encode(x, self.codec.bits, self.step, self.lower, self.codec.n_bytes // WORD_BYTES, self.fault)
