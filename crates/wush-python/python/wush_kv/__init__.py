"""Bundles of wush in Python: read and checked by the code that made them, with its quantizers.

`wush_kv.transformers.load` gives a model of transformers whose cache is quantized; `wush_kv.lm_eval` measures it.
`wush_kv.vllm` and `wush_kv.sglang` are plugins, which those servers load by themselves.
"""

from wush_kv._native import Bundle, Codec, WushError, __version__

__all__ = ["Bundle", "Codec", "WushError", "__version__"]
