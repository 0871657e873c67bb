"""A bundle as a model of transformers whose cache is packed at 2 bits (Algorithm 2 of the WUSH-KV paper).

    model = wush_kv.transformers.load("BUNDLE", kv_bits=2)
    model.generate(**inputs)

Everything that a mismatch could spoil without a word is refused: see `load`.
"""

from wush_kv.transformers.adapter import Adapter, load
from wush_kv.transformers.cache import WushCache
from wush_kv.transformers.plan import SERVING, STUDY, Counters, Windows

__all__ = ["SERVING", "STUDY", "Adapter", "Counters", "Windows", "WushCache", "load"]
