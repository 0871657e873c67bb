"""Bundles of wush in Python: read and checked by the code that made them, with its quantizers.

`wush_kv.transformers.load` gives a model of transformers whose cache is quantized; `wush_kv.lm_eval` measures it.
"""

from wush_kv._native import Bundle, Codec, WushError, __version__

__all__ = ["Bundle", "Codec", "WushError", "__version__"]
