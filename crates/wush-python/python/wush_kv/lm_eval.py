"""lm-evaluation-harness through a packed cache: `python -m wush_kv.lm_eval --model wush --model_args pretrained=BUNDLE,kv_bits=2 …`.

The harness scores a text in one forward pass, in which no key is quantized yet. This model scores it in chunks, so that what a token
reads is what a server's cache would give it; generation uses the cache anyhow. The counters at the end say how many tokens met
quantized ones.
"""

import sys
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from wush_kv.transformers import Windows, load


@register_model("wush")
class WushLM(HFLM):  # type: ignore[misc]
    """A bundle in the harness; arguments beside these are those of its `hf` model."""

    def __init__(
        self,
        pretrained: str,
        kv_bits: int = 2,
        chunk: int = 16,
        sink: int = 16,
        keep: int = 128,
        flush: int = 16,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        """Load the bundle; windows and chunks are those of the paper's study (Section 5.2), unless others are given."""
        windows = Windows(sink=sink, keep=keep, flush=flush)
        if str(kwargs.get("device") or "").startswith("cuda") and not torch.cuda.is_available():
            # The harness's default, where nobody asked for another.
            print("wush: no GPU is there: on the CPU", file=sys.stderr)
            kwargs["device"] = "cpu"
        device = {"device_map": kwargs["device"]} if kwargs.get("device") else {}
        model = load(pretrained, kv_bits, windows=windows, dtype=dtype, **device)
        self.chunk = chunk
        super().__init__(pretrained=model, tokenizer=pretrained, **kwargs)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits `[batch, tokens, vocabulary]`. Rows end in padding, which no token sees that is scored."""
        assert attn_mask is None and labels is None, "decoders alone"
        return torch.cat(list(self.model.wush.logits(inps, self.chunk)), dim=1)

    def get_model_info(self) -> dict[str, Any]:
        """What the results name: the harness's own, the bundle's hash, and the proof that its cache was met."""
        info: dict[str, Any] = super().get_model_info()
        adapter = self.model.wush
        wush = {"model_hash": adapter.bundle.model_hash, "kv_bits": adapter.kv_bits, **vars(adapter.windows)}
        counters = adapter.counters
        print(f"wush: {counters.met_quantized} of {counters.queries} queries met quantized tokens", file=sys.stderr)
        return info | {"wush": wush | vars(counters)}


if __name__ == "__main__":
    cli_evaluate()
