"""Algorithm 2's cache as a cache of transformers: sink, packed tokens, recent window; rows of a batch with left padding.

`update` only takes keys and values in: the attention function (`attention.py`) calls `WushLayer.attend`, which knows the mask, and with it
the padding. Positions are *columns* of the batch, padding included, as transformers counts them; windows count real tokens.
"""

from collections import defaultdict
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from wush_kv import WushError
from wush_kv.transformers import kernels
from wush_kv.transformers.attention import MARK, attend
from wush_kv.transformers.packer import Packer
from wush_kv.transformers.plan import Counters, LayerPlan

PAGE = 256
"""Tokens by which the packed part grows, and by which sliding layers let go."""

Rows: TypeAlias = slice | Tensor
"""All rows of a batch, or the indices of some."""


class Side:
    """Keys or values of one layer, `[batch, n_kv_heads, tokens, …]`: which token is where, `WushLayer` knows."""

    def __init__(self, packer: Packer | None) -> None:
        """Begin empty."""
        self.packer = packer
        self.sink: Tensor | None = None
        self.packed: Tensor | None = None
        self.scales: Tensor | None = None
        self.recent: Tensor | None = None

    def append(self, x: Tensor) -> None:
        """Add new tokens in full precision."""
        self.recent = x if self.recent is None else torch.cat([self.recent, x], dim=2)

    def keep_sink(self, rows: Rows, begin: int, n_sink: int) -> None:
        """Copy the sink of some rows out of the recent window."""
        assert self.recent is not None
        if self.sink is None:
            batch, heads, _, d = self.recent.shape
            self.sink = self.recent.new_zeros(batch, heads, n_sink, d)
        self.sink[rows] = self.recent[rows][:, :, begin : begin + n_sink]

    def pack(self, rows: Rows, begin: int, slot: int, n: int) -> None:
        """Pack `n` tokens of some rows, from `begin` of the recent window to `slot` of the packed part."""
        assert self.recent is not None and self.packer is not None
        words = self.packer.pack(self.recent[rows][:, :, begin : begin + n])
        if self.packed is None:
            none = words.new_zeros(self.recent.shape[0], words.shape[1], 0, words.shape[3])
            self.packed, self.scales = none[..., 1:], none[..., 0]
        assert self.scales is not None
        # Apart: so codes lie at round addresses, and a kernel reads several words at once.
        self.packed, self.scales = (_with_slots(x, slot + n) for x in (self.packed, self.scales))
        self.packed[rows, :, slot : slot + n] = words[..., :-1]
        self.scales[rows, :, slot : slot + n] = words[..., -1]

    def drop(self, n_recent: int, n_packed: int) -> None:
        """Forget the oldest tokens of the recent window and of the packed part."""
        if n_recent > 0 and self.recent is not None:
            self.recent = self.recent[:, :, n_recent:].contiguous()
        if n_packed > 0 and self.packed is not None:
            assert self.scales is not None
            self.packed, self.scales = (x[:, :, n_packed:].contiguous() for x in (self.packed, self.scales))

    def read(self, n_packed: int) -> Tensor:
        """Sink, the first packed tokens unpacked, recent window: one tensor in the model's dtype."""
        assert self.recent is not None
        parts = [] if self.sink is None else [self.sink]
        if n_packed > 0 and self.packed is not None and self.packer is not None:
            assert self.scales is not None
            words = torch.cat([self.packed[:, :, :n_packed], self.scales[:, :, :n_packed, None]], dim=-1)
            parts.append(self.packer.unpack(words).to(self.recent.dtype))
        return torch.cat([*parts, self.recent], dim=2) if parts else self.recent

    def select(self, rows: Tensor) -> None:
        """Take these rows of the batch, in this order."""
        for name in ("sink", "packed", "scales", "recent"):
            x = getattr(self, name)
            setattr(self, name, None if x is None else x.index_select(0, rows.to(x.device)))

    def n_bytes(self) -> int:
        """Bytes allocated."""
        return sum(x.nbytes for x in (self.sink, self.packed, self.scales, self.recent) if x is not None)


def _with_slots(x: Tensor, n_slots: int) -> Tensor:
    """The same with at least so many slots, `[batch, n_kv_heads, slots, …]`: whole pages more where it has fewer."""
    missing = n_slots - x.shape[2]
    if missing <= 0:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:2], -(-missing // PAGE) * PAGE, *x.shape[3:])], dim=2)


class WushLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's cache of a batch."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, plan: LayerPlan, counters: Counters) -> None:
        """Begin empty."""
        super().__init__()
        self.plan, self.counters = plan, counters
        self.is_sliding = plan.sliding_window is not None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.sides = tuple(Side(packer) for packer in self.plan.packers)
        self.pending: tuple[Tensor, Tensor] | None = None
        self.was_reached = False
        self.seen = 0
        self.pads: list[int] = []
        self.n_packed: list[int] = []
        self._rows_of: tuple[list[int], list[int]] | None = None
        self.n_freed = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Learn the batch size."""
        self.pads = [0] * key_states.shape[0]
        self.n_packed = [0] * key_states.shape[0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take in a chunk; returns it, the keys with a mark by which the attention function finds this layer."""
        self.plan.check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        if key_states.shape[0] != len(self.pads):
            raise WushError(f"the cache holds {len(self.pads)} sequences, and was given {key_states.shape[0]}")
        # A view of its own: a mark on the model's tensor would outlive this call.
        key_states = key_states.view_as(key_states)
        self.pending, self.was_reached = (key_states, value_states), False
        self.seen += key_states.shape[2]
        setattr(key_states, MARK, self)
        return key_states, value_states

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
        """Algorithm 2, lines 4 to 12, of the chunk that `update` took in; outputs `[batch, n_heads, tokens, d]`."""
        assert self.pending is not None
        key, value = self.pending
        n_queries = query.shape[2]
        if mask is not None and self.seen - n_queries in self.pads:
            self._count_padding(mask, n_queries)
        matrices = self.plan.matrices(key.device)
        for side, x in zip(self.sides, (matrices.keys(key), value), strict=True):
            side.append(x)
        if self.seen == n_queries:
            # Nothing before this chunk: transforms would cancel.
            out = attend(query, key, value, mask, scaling, softcap)
        else:
            out = self._attend_cached(matrices.queries(query), mask, scaling, softcap)
            if max(self.n_packed) > self.n_freed and torch.is_grad_enabled() and query.requires_grad:
                out = _WithoutGradients.apply(out, query)
        self.counters.queries += n_queries * len(self.n_packed)
        self.counters.met_quantized += n_queries * sum(n > self.n_freed for n in self.n_packed)
        self._flush()
        self.pending = None
        return out

    def _attend_cached(self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
        """Attend to all that is cached, by the kernel where it can."""
        n_used, n_queries = max(self.n_packed) - self.n_freed, query.shape[2]
        if n_used > 0 and kernels.use(query.device, self.plan.use_kernels):
            from wush_kv.transformers.kernels import attend as kernel

            if kernel.fits(query.shape[1], self.plan.n_kv_heads, n_queries, query.dtype):
                keys, values = (
                    kernel.Stored(side.sink, side.packed, side.scales, side.recent)  # type: ignore[arg-type]
                    for side in self.sides
                )
                places = kernel.Places(
                    rows=self._rows(query.device),
                    sink=self.plan.windows.sink,
                    n_freed=self.n_freed,
                    n_used=n_used,
                    recent_begin=self._recent_begin(),
                    first_query=self.seen - n_queries,
                )
                return kernel.attend_packed(query, keys, values, self.plan.bits, places, mask, scaling, softcap)
        key, value = (side.read(n_used) for side in self.sides)
        return attend(query, key, value, self._fit(mask, n_queries, n_used), scaling, softcap)

    def _rows(self, device: torch.device) -> Tensor:
        """Padding and packed tokens of every row, int32 `[2, batch]` on a device, copied there when they changed."""
        if self._rows_of != (self.pads, self.n_packed):
            self._rows_of = (list(self.pads), list(self.n_packed))
            self._rows_there = torch.tensor(self._rows_of, dtype=torch.int32, device=device)
        return self._rows_there

    def _count_padding(self, mask: Tensor, n_queries: int) -> None:
        """Padding is on the left: a token that does not see itself, with none before it that does. Asked until every row has begun."""
        sees_itself = mask.diagonal(self.seen - n_queries, dim1=-2, dim2=-1)[:, 0, :n_queries]
        n_leading = (sees_itself.cumsum(-1) == 0).sum(-1).expand(len(self.pads)).tolist()
        before = self.seen - n_queries
        self.pads = [pad + n if pad == before else pad for pad, n in zip(self.pads, n_leading, strict=True)]

    def _first_recent(self, row: int) -> int:
        """Column of a row's first token that is neither in the sink nor packed."""
        in_front = self.plan.windows.sink + self.n_packed[row] if self.n_packed[row] > 0 else 0
        return self.pads[row] + in_front

    def _flush(self) -> None:
        """Quantize what has left both windows; let go of what a sliding window has passed."""
        if self.plan.packers[0] is None:
            return
        groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for row, state in enumerate(zip(self.pads, self.n_packed, strict=True)):
            groups[state].append(row)
        for (pad, n_packed), rows in groups.items():
            n = self.plan.windows.n_to_pack(self.seen - pad, n_packed)
            if n > 0:
                self._pack(rows if len(groups) > 1 else None, n)
        begin = min(self._first_recent(row) for row in range(len(self.pads)))
        n_freed = self._n_to_free()
        for side in self.sides:
            side.drop(begin - self._recent_begin(), n_freed)
        self.n_freed += n_freed

    def _recent_begin(self) -> int:
        recent = self.sides[1].recent
        assert recent is not None
        return self.seen - recent.shape[2]

    def _pack(self, rows: list[int] | None, n: int) -> None:
        """Pack `n` tokens of rows (all, if None) that have the same padding and as many packed tokens."""
        first, sink = rows[0] if rows else 0, self.plan.windows.sink
        begin, done = self._first_recent(first) - self._recent_begin(), self.n_packed[first]
        index = slice(None) if rows is None else torch.tensor(rows, device=self.sides[0].recent.device)  # type: ignore[union-attr]
        for side in self.sides:
            if done == 0 and sink > 0:
                side.keep_sink(index, begin, sink)
            side.pack(index, begin + (sink if done == 0 else 0), done - self.n_freed, n)
        for row in rows or range(len(self.n_packed)):
            self.n_packed[row] += n
            self.counters.packed += n

    def _n_to_free(self) -> int:
        """Whole pages of packed tokens that no later query of a sliding layer reads."""
        if self.plan.sliding_window is None:
            return 0
        passed = self.seen + 1 - self.plan.sliding_window - self.plan.windows.sink
        unread = min(min(passed - pad, n) for pad, n in zip(self.pads, self.n_packed, strict=True))
        return max(unread // PAGE * PAGE - self.n_freed, 0)

    def _fit(self, mask: Tensor | None, n_queries: int, n_used: int) -> Tensor | None:
        """A mask over columns as a mask over what `Side.read` gives, bool `[batch, 1, queries, tokens]`."""
        is_plain = self.n_freed == 0 and not any(self.pads)
        if is_plain and (mask is not None or n_queries == 1):
            return mask
        device = self.sides[1].recent.device  # type: ignore[union-attr]
        columns, is_there = self._columns(n_used, device)
        if mask is None:
            positions = torch.arange(self.seen - n_queries, self.seen, device=device)
            visible = columns[:, None, None] <= positions[:, None]
        else:
            index = columns.clamp(0, self.seen - 1)[:, None, None].expand(-1, 1, n_queries, -1)
            visible = mask.expand(columns.shape[0], -1, -1, -1).gather(-1, index)
        return visible & is_there[:, None, None]

    def _columns(self, n_used: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Column of every token that `Side.read` gives, and whether it is one of that row, `[batch, tokens]`."""
        pads, packed = (torch.tensor(x, device=device)[:, None] for x in (self.pads, self.n_packed))
        sink = self.plan.windows.sink if self.sides[1].sink is not None else 0
        slots = torch.arange(self.n_freed, self.n_freed + n_used, device=device)
        recent = torch.arange(self._recent_begin(), self.seen, device=device)[None]
        columns = [
            pads + torch.arange(sink, device=device),
            pads + self.plan.windows.sink + slots,
            recent.expand(len(pads), -1),
        ]
        first_recent = pads + (self.plan.windows.sink + packed) * (packed > 0)
        is_there = [(packed > 0).expand(-1, sink), slots < packed, recent >= first_recent]
        return torch.cat(columns, dim=1), torch.cat(is_there, dim=1)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Masks are over all columns; 4.57 passes positions of queries, later versions their number."""
        n_queries = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.seen + n_queries, 0

    def get_seq_length(self, *_: Any) -> int:
        """Columns seen."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit: the name of 4.57."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these rows of the batch, in this order."""
        for side in self.sides:
            side.select(beam_idx)
        rows = beam_idx.tolist()
        self.pads, self.n_packed = [self.pads[row] for row in rows], [self.n_packed[row] for row in rows]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self.reorder_cache(torch.arange(len(self.pads), device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.reorder_cache(torch.arange(len(self.pads)).repeat_interleave(repeats))

    def crop(self, *_: Any) -> None:
        """Refused: what is quantized is not taken back."""
        raise WushError("a packed cache takes no tokens back: assisted decoding is not supported")

    def offload(self) -> None:
        """Refused: the packed part is small, and its windows are read at every step."""
        raise WushError("a packed cache is not offloaded")

    def n_bytes(self) -> int:
        """Bytes allocated."""
        return sum(side.n_bytes() for side in self.sides)


class _WithoutGradients(torch.autograd.Function):  # type: ignore[misc]
    """Attention to packed tokens, of which gradients know nothing: they are refused rather than left incomplete."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        """Pass the output on, as one that depends on the query."""
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        """Refuse."""
        raise WushError("gradients do not pass packed keys and values: train without a cache (use_cache=False)")


class WushCache(Cache):  # type: ignore[misc]
    """The cache of a batch: what `generate` of a loaded model uses, or to be passed by hand."""

    def __init__(self, plans: list[LayerPlan], counters: Counters) -> None:
        """Begin empty."""
        super().__init__(layers=[WushLayer(plan, counters) for plan in plans])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in a layer's chunk; refused after a forward that did not end in every layer."""
        if layer_idx == 0:
            self._check_whole()
        taken: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return taken

    def _check_whole(self) -> None:
        unread = [layer for layer in self.layers if layer.pending is not None]
        if unread and not any(layer.was_reached for layer in self.layers):
            raise WushError(
                'keys were cached, but no attention read them: the model\'s attention is not "wush" any more, '
                "or passes by transformers' AttentionInterface"
            )
        if unread or len({layer.seen for layer in self.layers}) > 1:
            raise WushError("an earlier forward through this cache failed on its way: begin with a new cache")

    def n_bytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.n_bytes() for layer in self.layers)

    def n_quantized(self, layer: int = 0) -> list[int]:
        """Tokens of each row that one layer has quantized."""
        return list(self.layers[layer].n_packed)
