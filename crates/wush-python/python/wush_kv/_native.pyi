# What the Rust crate gives. A Buffer is anything with Python's buffer protocol, C-contiguous: bytes, numpy arrays, …

from os import PathLike
from pathlib import Path
from typing import Literal, final

from typing_extensions import Buffer

Role = Literal["key", "value"]
Matrix = Literal["key", "query", "key_mean", "key_feedback", "value_feedback"]

__version__: str

class WushError(ValueError):
    """A bundle that is not what it says, or numbers that cannot be cached."""

@final
class Bundle:
    """A bundle whose parts belong together."""

    @staticmethod
    def open(path: str | PathLike[str], *, verify: bool = True) -> Bundle:
        """Read and check a bundle; with `verify` also the SHA-256 of every file.

        Raises `WushError` for sidecars of other weights, `query` that is not `key^{-T}`, feedback that is none, files
        that are not those of the manifest, further weights beside them, and a bundle whose own check had failed.
        """

    @property
    def path(self) -> Path: ...
    @property
    def manifest_json(self) -> str: ...
    @property
    def model_hash(self) -> str:
        """Hash of the folded weights, hex."""

    @property
    def method(self) -> str:
        """Name of the quantizer that suits the encoder: "quest-wide" with error feedback, else "quest"."""

    @property
    def layers(self) -> list[int]:
        """Ids of the layers that have transforms, rising."""

    def shape(self, layer: int) -> tuple[int, int]:
        """`(KV heads, head dimension)`."""

    def matrix(self, layer: int, name: Matrix) -> memoryview | None:
        """A matrix, float32 `[n_kv_heads, d, d]` (`key_mean`: `[n_kv_heads, d]`), row-major; None if there is none."""

    def codec(self, layer: int, role: Role, bits: int, *, method: str | None = None, scales: str = "bf16") -> Codec:
        """Return the quantizer of a layer's keys or values, with the bundle's feedback."""

    def describe(self) -> str:
        """What it is, in a few lines."""

@final
class Codec:
    """A quantizer of token-heads at 2, 3, 4 or 8 bits; the packed layout is that of docs/formats.md."""

    def __new__(
        cls,
        head_dim: int,
        bits: int,
        *,
        method: str = "quest",
        role: Role = "key",
        scales: str = "bf16",
        feedback: Buffer | None = None,
    ) -> Codec:
        """Make one; `feedback`: L, float32 `[n_kv_heads, d, d]`, unit lower triangular."""

    @property
    def head_dim(self) -> int: ...
    @property
    def bits(self) -> int: ...
    @property
    def alpha(self) -> float | None:
        """End of QuEST's grid in units of the RMS (Eq. 5); None for another rule."""

    @property
    def n_bytes(self) -> int:
        """Bytes of a packed token-head."""

    @property
    def has_feedback(self) -> bool: ...
    def pack(self, x: Buffer) -> memoryview:
        """Pack float32 `[…, tokens, d]`, with feedback `[…, n_kv_heads, tokens, d]`, to uint8 `[…, tokens, n_bytes]`.

        Raises `WushError` for a NaN, an infinity or a magnitude beyond 2^120.
        """

    def unpack(self, packed: Buffer) -> memoryview:
        """Unpack uint8 `[…, tokens, n_bytes]` to float32 `[…, tokens, d]`."""
