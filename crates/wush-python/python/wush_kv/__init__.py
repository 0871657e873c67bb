"""Bundles of wush in Python: read and checked by the code that made them, with its quantizers.

`wush_kv.transformers.load` gives a model of transformers whose cache is quantized; `wush_kv.lm_eval` measures it.
`wush_kv.plugins` has what vLLM and SGLang load by themselves.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wush_kv._native import Bundle, Codec, WushError, __version__

__all__ = ["Bundle", "Codec", "WushError", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the native library when it is first needed: without it, `plugins` must still be there to end a server's start."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("wush_kv._native"), name)
