"""Loading: a bundle's model with the attention function and the cache of this package, checked before it is handed out."""

import inspect
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from wush_kv import Bundle, WushError
from wush_kv.transformers.attention import NAME, attend, register
from wush_kv.transformers.cache import WushCache, WushLayer
from wush_kv.transformers.plan import SERVING, UNQUANTIZED, Counters, LayerPlan, Windows

# Tokens of each of the two chunks of `Adapter.check_live`, and by how much a layer's attention may differ with its transforms, relative to
# its norm. T_K and T_K^{-T} are float32, so a logit moves by some 2^-24 cond(T) ‖q‖ ‖k‖: 1e-3 where cond(T) is 10 and the norms' product
# 2000 (below 1e-4 was measured). A query that meets keys of other coordinates is off by about all of it.
PROBE_TOKENS = 8
PROBE_TOLERANCE = 1e-3


class Adapter:
    """What a loaded model has as `model.wush`: its bundle, its caches' settings, counters."""

    def __init__(
        self,
        model: PreTrainedModel,
        bundle: Bundle,
        kv_bits: int,
        windows: Windows,
        method: str | None = None,
        kernels: bool | None = None,
    ) -> None:
        """Plan every layer, after the bundle's layers were held against the model's configuration."""
        self.model, self.bundle, self.kv_bits, self.windows = model, bundle, kv_bits, windows
        self.counters = Counters()
        self.plans = [LayerPlan(bundle, layer, kv_bits, method, windows, kernels) for layer in bundle.layers]
        self.calibration: dict[str, Any] = json.loads(bundle.manifest_json)["calibration"] or {}
        self.cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._check_config()

    def new_cache(self) -> WushCache:
        """Return an empty cache, for `generate` or to be passed to `forward` by hand."""
        if getattr(self.model, "_hf_peft_config_loaded", False):
            raise WushError(
                "an adapter (LoRA) was loaded: adapters of the original do not fit a bundle; merge, then convert"
            )
        return WushCache(self.plans, self.counters)

    def forward(self, ids: Tensor, cache: WushCache, **kwargs: Any) -> Tensor:
        """Logits `[batch, tokens, vocabulary]` of the next chunk of token ids, through a cache."""
        logits: Tensor = self.model(ids, use_cache=True, **{self.cache_argument: cache}, **kwargs).logits
        return logits

    @torch.inference_mode()
    def logits(self, ids: Tensor, chunk: int = 16) -> Iterator[Tensor]:
        """Logits of sequences `[batch, tokens]`, chunk after chunk through one cache (Section 5.2's protocol)."""
        cache = self.new_cache()
        for part in ids.split(chunk, dim=1):
            yield self.forward(part, cache)

    def _check_config(self) -> None:
        config = self.model.config.get_text_config(decoder=True)
        n_layers = config.num_hidden_layers
        if self.bundle.layers != list(range(n_layers)):
            raise WushError(
                f"the bundle has transforms of layers {self.bundle.layers}, the model has {n_layers} layers"
            )
        for plan, sliding in zip(self.plans, _sliding_windows(config), strict=True):
            plan.sliding_window = sliding
        self._check_rope(config)
        if config._attn_implementation != NAME:
            raise WushError(f'attention: expected "{NAME}", found {config._attn_implementation!r}')

    def _check_rope(self, config: Any) -> None:
        """Keys must lie where calibration saw them: a scaling that it was told of must be the model's."""
        scaling = self.calibration.get("rope_scaling")
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if scaling and rope.get("rope_type") != scaling.partition(":")[0]:
            raise WushError(
                f"RoPE scaling: the bundle was calibrated with {scaling}, the model has {rope}: pass a `config` with it"
            )

    def warn_beyond(self, n_tokens: int) -> None:
        """Say once a length that statistics do not cover."""
        covered = self.calibration.get("max_seq_len")
        if covered is not None and n_tokens > covered:
            warnings.warn(
                f"up to {n_tokens} tokens, but the bundle was calibrated up to position {covered}: beyond it, nothing is known of "
                "how well its keys are quantized",
                stacklevel=4,
            )

    @torch.inference_mode()
    def check_live(self) -> None:
        """Prove that every layer's attention reads this cache, and that the transforms cancel where nothing is quantized."""
        counters = Counters()
        probe = WushCache([], counters)
        probe.layers = [_ProbeLayer(plan, counters) for plan in self.plans]
        ids = torch.arange(1, 2 * PROBE_TOKENS + 1, device=self.model.device)[None]
        for part in ids.split(PROBE_TOKENS, dim=1):
            self.forward(part, probe)
        expected = ids.shape[1] * len(self.plans)
        if counters.queries != expected:
            raise WushError(f"attention passed by the cache: {counters.queries} of {expected} queries were seen")


class _ProbeLayer(WushLayer):
    """A layer that computes attention with and without its transforms, in float32, and refuses a difference."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.plain: list[Tensor] = []

    def _flush(self) -> None:
        """Quantize nothing."""

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
        """Attend through the cache, and to the keys as they are; the latter is what the next layer gets."""
        assert self.pending is not None
        (key, value), dtype = self.pending, query.dtype
        self.plain.append(key)
        self.pending = (key.float(), value.float())
        found = super().attend(query.float(), mask, scaling, softcap)
        values = self.sides[1].read(0)
        if mask is None and query.shape[2] < self.seen:
            raise WushError(f"layer {self.plan.layer}: a chunk after others has no mask")
        expected = attend(query.float(), torch.cat(self.plain, dim=2).float(), values, mask, scaling, softcap)
        off = (found - expected).norm() / expected.norm()
        if not off <= PROBE_TOLERANCE:
            raise WushError(
                f"layer {self.plan.layer}: its transforms do not cancel: attention is off by {off:.2e} of its norm"
            )
        return expected.to(dtype)


def load(
    bundle: str | os.PathLike[str],
    kv_bits: int = 2,
    *,
    windows: Windows = SERVING,
    quantizer: str | None = None,
    kernels: bool | None = None,
    verify: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """Return the bundle's model; its `generate` uses a cache packed at `kv_bits` bits, and `model.wush` is its `Adapter`.

    `kv_bits`: 2, 3, 4, 8, or 16 for none quantized (transforms are applied all the same, and cancel). `windows`: which tokens
    stay in full precision. `quantizer`: as `wush eval ppl` names it; the bundle's own by default. `kernels`: decode and pack with
    Triton kernels; by default on CUDA, with a warning where triton is not installed; True refuses to go without, False goes without.
    `verify`: check the SHA-256 of every file. Other arguments go to `from_pretrained` (`device_map`, `dtype`, …).

    Raises `WushError` for a bundle whose parts do not belong together, weights that do not fit it, a model whose attention does not
    go through this package, or is changed by the transforms.
    """
    if not isinstance(windows, Windows):
        raise WushError(f"windows: expected wush_kv.transformers.Windows(sink=…, keep=…, flush=…), found {windows!r}")
    if "attn_implementation" in kwargs:
        raise WushError(f'attn_implementation: the attention is the bundle\'s, "{NAME}"')
    if not isinstance(kv_bits, int):
        raise WushError(f"kv_bits: expected 2, 3, 4, 8 or 16, found {kv_bits!r}")
    _check_files(bundle)
    found = Bundle.open(bundle, verify=verify)
    register()
    kwargs = {"dtype": "auto"} | kwargs
    model, info = AutoModelForCausalLM.from_pretrained(
        bundle, attn_implementation=NAME, output_loading_info=True, **kwargs
    )
    problems = {name: sorted(map(str, keys)) for name, keys in info.items() if keys}
    if problems:
        raise WushError(f"{bundle}: the weights do not fit the model: {problems}")
    model.eval()
    model.wush = Adapter(model, found, kv_bits, windows, quantizer, kernels)
    model.wush.check_live()
    _give_cache(model)
    return model


def _check_files(bundle: str | os.PathLike[str]) -> None:
    """Refuse pipes and the like, on which a reader would wait for ever."""
    for path in Path(bundle).rglob("*"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise WushError(f"{path}: not a regular file")


def _give_cache(model: PreTrainedModel) -> None:
    """Let `generate` begin with the packed cache, unless it is given one or told to use none."""
    usual = model._prepare_cache_for_generation
    adapter: Adapter = model.wush

    def prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given = model_kwargs.get(adapter.cache_argument)
        if isinstance(given, WushCache):
            _check_prompt(given, model_kwargs)
        if generation_config.use_cache is False or given is not None:
            return usual(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.cache_implementation not in (None, "dynamic", "hybrid"):
            raise WushError(
                f"cache_implementation={generation_config.cache_implementation!r}: the cache is the bundle's"
            )
        if adapter.kv_bits != UNQUANTIZED:
            adapter.warn_beyond(generation_config.max_length)
        model_kwargs[adapter.cache_argument] = adapter.new_cache()
        return None

    model._prepare_cache_for_generation = prepare


def _check_prompt(cache: WushCache, model_kwargs: dict[str, Any]) -> None:
    """Refuse a prompt that the cache holds already: nothing would be left to compute."""
    n_cached = cache.get_seq_length()
    for name in ("attention_mask", "position_ids"):
        given = model_kwargs.get(name)
        if isinstance(given, Tensor) and given.dim() == 2 and given.shape[1] <= n_cached:
            raise WushError(f"no new tokens: the cache holds {n_cached}, the prompt has {given.shape[1]}")


def _sliding_windows(config: Any) -> list[int | None]:
    """Each layer's sliding window, None for full attention."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]
