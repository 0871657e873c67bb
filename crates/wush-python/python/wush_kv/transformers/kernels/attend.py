"""Attention of a few new queries over a packed cache, in Triton. Enters: transformed queries `[batch, n_heads, queries, d]`; sink, packed
tokens and recent window of keys and values; a mask over columns. Leaves: outputs of the queries' shape and dtype.

    score_t = scale_t (Σᵢ codeᵢ qᵢ − zero_t Σᵢ qᵢ)        out = Σ_t code_t (scale_t p_t) − Σ_t zero_t (scale_t p_t)

Codes are read packed and go to the matrix units as numbers in the queries' dtype (`codes`), from the left: tokens times coordinates for
the scores, coordinates times tokens for the sums. So a few queries fill few columns, and what a thread unpacks is what it multiplies:
nothing unpacked passes through shared memory. All queries of a KV head share a program, so packed bytes are read once. Tokens are split
into parts, a program each, of one warp for one query of a few heads; `_combine` weighs the parts by their softmax sums.

On an H200, 32 query and 8 KV heads of 128, 2 bits, bfloat16: 74 µs for 8 × 32768 tokens, where torch takes 252 over its own bfloat16 cache.
docs/serving.md has more.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from wush_kv.transformers.kernels import codes, on

BLOCK = 32
"""Tokens of a tile of packed ones."""
WINDOW_BLOCK = 32
"""Tokens of a part of the windows: about as many bytes as a part of packed ones has."""
MIN_ROWS = 8
"""Columns of the smallest matrix product."""
MIN_DIM = 16
"""Rows of it, and its depth."""
MAX_ROWS = 64
"""Queries of one KV head, heads times tokens, for which registers suffice."""
PROGRAMS_PER_PROCESSOR = 12
"""Parts for every multiprocessor: as many as registers let it hold. Best or near it on an H200, from 1 × 4096 to 8 × 32768 tokens."""
MIN_PART = 128
"""Tokens of a part, at least: each part costs what `_combine` reads of it."""
SUMS_PER_WARP = 1024
"""Of the sums of a program, queries times coordinates, those for which a warp has registers."""
FLOAT32_WARPS, MAX_WARPS = 4, 8
COMBINE_BLOCK, COMBINE_DIM = 128, 32
"""Parts and coordinates of a tile of `_combine`."""

# How a dtype is called in Triton, its exponent's bias, and the bits of its fraction (none where codes are converted instead).
DTYPES = {torch.float32: (tl.float32, 0, 0), torch.bfloat16: (tl.bfloat16, 127, 7), torch.float16: (tl.float16, 15, 10)}


@dataclass(frozen=True)
class Stored:
    """Keys or values, contiguous: `[batch, n_kv_heads, tokens, d]`; the packed ones int32 `[batch, n_kv_heads, slots, n_words]`."""

    sink: Tensor | None
    packed: Tensor
    """Codes, without scales."""
    scales: Tensor
    """Scales and zero points of the packed ones, int32 `[batch, n_kv_heads, slots]`."""
    recent: Tensor


@dataclass(frozen=True)
class Places:
    """Of which column of the batch each token is; columns count padding."""

    rows: Tensor
    """int32 `[2, batch]`: leading padding, and tokens packed so far."""
    sink: int
    """The sink's size."""
    n_freed: int
    """Packed tokens that are gone: slot 0 holds the next."""
    n_used: int
    """Slots in use, of the row that has most."""
    recent_begin: int
    """Column of the first recent token."""
    first_query: int
    """Column of the first query."""


def fits(n_heads: int, n_kv_heads: int, n_queries: int, dtype: torch.dtype) -> bool:
    """Whether these queries are few enough for one program a KV head, and of a dtype that matrix units take."""
    return n_heads // n_kv_heads * n_queries <= MAX_ROWS and dtype in DTYPES


def attend_packed(
    query: Tensor,
    keys: Stored,
    values: Stored,
    bits: int,
    places: Places,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend to a cache with packed tokens; causal where there is no mask, which is bool `[batch or 1, 1, queries, columns]`."""
    batch, n_heads, n_queries, d = query.shape
    keys, values = _at_least_a_tile(keys), _at_least_a_tile(values)
    n_kv_heads, slots, record = keys.packed.shape[1:]
    n_rows, n_pairs = n_heads // n_kv_heads * n_queries, batch * n_kv_heads
    n_sink, n_recent = 0 if keys.sink is None else keys.sink.shape[2], keys.recent.shape[2]
    split = _split(places.n_used, n_pairs, query.device)
    n_packed_parts = triton.cdiv(places.n_used, split)
    n_parts = n_packed_parts + triton.cdiv(n_sink + n_recent, WINDOW_BLOCK)
    query = query.contiguous()
    out = torch.empty_like(query)
    sums = torch.empty(n_pairs, n_parts, n_rows, d, dtype=torch.float32, device=query.device)
    stats = torch.empty(n_pairs, n_parts, n_rows, 2, dtype=torch.float32, device=query.device)
    seen = query if mask is None else mask.contiguous().view(torch.uint8)
    per_word = 16 if bits == 3 else 32 // bits
    dtype, bias, fraction = DTYPES[query.dtype]
    placing = codes.placing_of(bits, bias, fraction)
    rows, padded = max(triton.next_power_of_2(n_rows), MIN_ROWS), max(triton.next_power_of_2(d), MIN_DIM, per_word)
    warps = FLOAT32_WARPS if dtype == tl.float32 else min(max(rows * padded // SUMS_PER_WARP, 1), MAX_WARPS)
    with on(query.device):
        _attend_part[(n_pairs, n_parts)](
            query, *_pointers(keys), *_pointers(values), places.rows, seen, sums, stats,
            batch, n_kv_heads, slots, n_sink, n_recent, places.sink, places.n_freed, places.n_used,
            places.recent_begin, places.first_query, split, n_packed_parts,
            seen.stride(0) if seen.shape[0] > 1 else 0, seen.stride(2),
            placing.exponent, scaling * LOG2_E.value, (softcap or 0.0) * LOG2_E.value,
            HAS_MASK=mask is not None, SOFTCAP=softcap is not None,
            N_ROWS=n_rows, N_QUERIES=n_queries, ROWS=rows,
            D=d, D_PAD=padded, BITS=bits, PER_WORD=per_word, N_WORDS=triton.cdiv(d, per_word), RECORD=record,
            DTYPE=dtype, PER_SHIFT=placing.per_shift, LOWEST=placing.lowest, OFFSET=placing.offset,
            T=BLOCK, T_WINDOW=WINDOW_BLOCK, num_warps=warps,
        )  # fmt: skip
        _combine[(n_pairs * n_rows, triton.cdiv(d, COMBINE_DIM))](
            sums, stats, out, n_parts, D=d, N_ROWS=n_rows, T=COMBINE_BLOCK, T_DIM=COMBINE_DIM
        )
    return out


def _pointers(stored: Stored) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    recent = stored.recent.contiguous()
    return recent if stored.sink is None else stored.sink, stored.packed, stored.scales, recent


def _at_least_a_tile(stored: Stored) -> Stored:
    """The same with slots for a tile, which is read whole; a cache's pages are larger."""
    missing = BLOCK - stored.packed.shape[2]
    if missing <= 0:
        return stored
    packed, scales = pad(stored.packed, (0, 0, 0, missing)), pad(stored.scales, (0, missing))
    return Stored(stored.sink, packed, scales, stored.recent)


def _split(n_used: int, n_pairs: int, device: torch.device) -> int:
    """Packed tokens of a part: whole tiles, and about so many parts that every processor has some."""
    n_parts = max(PROGRAMS_PER_PROCESSOR * _n_processors(device) // n_pairs, 1)
    return triton.cdiv(max(triton.cdiv(n_used, n_parts), MIN_PART), BLOCK) * BLOCK


@lru_cache
def _n_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=[  # they change from step to step, and must not compile anew
    "batch", "slots", "n_sink", "n_recent", "sink", "n_freed", "n_used", "recent_begin", "first_query", "split",
    "n_packed_parts", "mask_of_batch", "mask_of_query", "exponent",
])  # fmt: skip
def _attend_part(
    query, k_sink, k_packed, k_scales, k_recent, v_sink, v_packed, v_scales, v_recent, rows, mask, sums, stats,
    batch, n_kv_heads, slots, n_sink, n_recent, sink, n_freed, n_used, recent_begin, first_query, split, n_packed_parts,
    mask_of_batch, mask_of_query, exponent, scaling, softcap,
    HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr, N_ROWS: tl.constexpr, N_QUERIES: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, PER_WORD: tl.constexpr, N_WORDS: tl.constexpr,
    RECORD: tl.constexpr, DTYPE: tl.constexpr, PER_SHIFT: tl.constexpr, LOWEST: tl.constexpr, OFFSET: tl.constexpr,
    T: tl.constexpr, T_WINDOW: tl.constexpr,
):  # fmt: skip
    """One part of one KV head of one row of the batch: its unscaled sum, and the maximum and sum of its softmax."""
    pair, part = tl.program_id(0), tl.program_id(1)
    pair_64, row = pair.to(tl.int64), pair // n_kv_heads
    r = tl.arange(0, ROWS)[None, :]
    query_row, mask_row = query + (pair_64 * N_ROWS + r) * D, mask + row.to(tl.int64) * mask_of_batch
    pad, n_packed = tl.load(rows + row), tl.load(rows + batch + row)
    if part < n_packed_parts:
        end = tl.minimum(tl.minimum((part + 1) * split, n_used), n_packed - n_freed)
        i, acc, total, top = _of_packed(
            query_row, mask_row, mask_of_query, k_packed, k_scales, v_packed, v_scales,
            pair_64 * slots, slots, part * split, end, pad + sink + n_freed, exponent, scaling, softcap,
            HAS_MASK, SOFTCAP, N_ROWS, N_QUERIES, ROWS, D, D_PAD, BITS, PER_WORD, N_WORDS, RECORD,
            DTYPE, PER_SHIFT, LOWEST, OFFSET, T,
        )  # fmt: skip
    else:
        t = (part - n_packed_parts) * T_WINDOW + tl.arange(0, T_WINDOW)
        in_sink, after = t < n_sink, t - n_sink
        column = tl.where(in_sink, pad + t, recent_begin + after)
        first_recent = pad + tl.where(n_packed > 0, sink + n_packed, 0)
        # A row has its sink once it has packed tokens; what it packed itself is still in the recent part of rows that are behind.
        there = (tl.where(in_sink, n_packed, column + 1 - first_recent) > 0) & (after < n_recent)
        at_sink, at_recent = (pair_64 * n_sink + t) * D, (pair_64 * n_recent + after) * D
        i, acc, total, top = _of_window(
            query_row, mask_row, mask_of_query,
            tl.where(in_sink, k_sink + at_sink, k_recent + at_recent), tl.where(in_sink, v_sink + at_sink, v_recent + at_recent),
            there, column, first_query, scaling, softcap, HAS_MASK, SOFTCAP, N_ROWS, N_QUERIES, ROWS, D, D_PAD, DTYPE,
        )  # fmt: skip
    out, r = (pair_64 * tl.num_programs(1) + part) * N_ROWS, tl.arange(0, ROWS)
    tl.store(sums + (out + r)[None, :] * D + i[:, None], acc, mask=(r[None, :] < N_ROWS) & (i[:, None] < D))
    tl.store(stats + (out + r) * 2, top, mask=r < N_ROWS)
    tl.store(stats + (out + r) * 2 + 1, total, mask=r < N_ROWS)


@triton.jit
def _of_packed(
    query_row, mask_row, mask_of_query, k_packed, k_scales, v_packed, v_scales,
    first_slot, slots, begin_slot, end_slot, first_column, exponent, scaling, softcap,
    HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr, N_ROWS: tl.constexpr, N_QUERIES: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, PER_WORD: tl.constexpr, N_WORDS: tl.constexpr,
    RECORD: tl.constexpr, DTYPE: tl.constexpr, PER_SHIFT: tl.constexpr, LOWEST: tl.constexpr, OFFSET: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Packed tokens: the coordinates of sums, sums `[D_PAD, ROWS]`, and the sum and maximum of their softmax."""
    W: tl.constexpr = D_PAD // PER_WORD
    r, at = tl.arange(0, ROWS)[None, :], tl.arange(0, D_PAD)
    i = codes.coordinate(at // (2 * W) + at % 2 * (PER_WORD // 2), at // 2 % W, D, N_WORDS)[:, None]
    q = tl.load(query_row + i, mask=(r < N_ROWS) & (i < D), other=0.0)
    q_sum, q_offset = tl.sum(q.to(tl.float32), 0), tl.zeros([ROWS], tl.float32)
    if PER_SHIFT > 0:
        scaled = q.to(tl.float32) * codes.factor(at // (2 * W), BITS, PER_SHIFT)[:, None]
        q, q_offset = scaled.to(DTYPE), OFFSET * tl.sum(scaled, 0)
    i = codes.coordinate(at // W, at % W, D, N_WORDS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    totals, minuses = tl.zeros([T, ROWS], tl.float32), tl.zeros([T, ROWS], tl.float32)
    acc = tl.zeros([D_PAD, ROWS], tl.float32)
    for begin in range(begin_slot, end_slot, T):
        # Tiles are read whole: the last one that there are slots for begins earlier, and counts what is its own.
        first = tl.minimum(begin, slots - T)
        slot, at_64 = first + tl.arange(0, T), first_slot + first
        there = (slot >= begin) & (slot < end_slot)
        k = codes.keys(
            k_packed + at_64 * RECORD, T, D_PAD, BITS, PER_WORD, N_WORDS, RECORD, DTYPE, PER_SHIFT, LOWEST, exponent
        )  # fmt: skip
        k_scale, k_zero = codes.scales(k_scales + at_64, T)
        dots = tl.dot(k, q, tl.broadcast_to(-q_offset[None, :], [T, ROWS]), input_precision="ieee")
        scores = (scaling * k_scale)[:, None] * (dots - k_zero[:, None] * q_sum[None, :])
        visible = there[:, None]
        if HAS_MASK:  # without, queries see all that is packed: they are newer
            visible = _seen(mask_row, mask_of_query, first_column + slot, there, N_QUERIES, ROWS)
        p, shrink, top = _softmax(scores, visible, top, softcap, SOFTCAP)
        v = codes.values(
            v_packed + at_64 * RECORD, T, D_PAD, BITS, PER_WORD, N_WORDS, RECORD, DTYPE, PER_SHIFT, LOWEST, exponent
        )  # fmt: skip
        v_scale, v_zero = codes.scales(v_scales + at_64, T)
        weights = (p * v_scale[:, None]).to(DTYPE)
        rounded = weights.to(tl.float32)
        totals = totals * shrink[None, :] + p
        minuses = minuses * shrink[None, :] + rounded * v_zero[:, None]
        # A tile's sum begins at minus its offset's part: in a sum of all tiles, which matrix units truncate, that would drown the rest.
        offsets = tl.broadcast_to((-OFFSET * tl.sum(rounded, 0))[None, :], [D_PAD, ROWS])
        acc = acc * shrink[None, :] + tl.dot(v, weights, offsets, input_precision="ieee")
    if PER_SHIFT > 0:
        acc *= codes.factor(at // W % (PER_WORD // 2), BITS, PER_SHIFT)[:, None]
    acc -= tl.sum(minuses, 0)[None, :]
    return i, acc, tl.sum(totals, 0), top


@triton.jit
def _of_window(
    query_row, mask_row, mask_of_query, k_row, v_row, there, column, first_query, scaling, softcap,
    HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr, N_ROWS: tl.constexpr, N_QUERIES: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Tokens in full precision, at `k_row` and `v_row`; what `_of_packed` gives."""
    r, i = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    q = tl.load(query_row + i[:, None], mask=(r[None, :] < N_ROWS) & (i[:, None] < D), other=0.0)
    filled = there[:, None] & (i[None, :] < D)
    k = tl.load(k_row[:, None] + i[None, :], mask=filled, other=0.0)
    v = tl.load(v_row[:, None] + i[None, :], mask=filled, other=0.0)
    scores = scaling * tl.dot(k, q, input_precision="ieee")
    if HAS_MASK:
        visible = _seen(mask_row, mask_of_query, column, there, N_QUERIES, ROWS)
    else:
        visible = there[:, None] & (column[:, None] <= first_query + (r % N_QUERIES)[None, :])
    p, _, top = _softmax(scores, visible, tl.full([ROWS], float("-inf"), tl.float32), softcap, SOFTCAP)
    return i, tl.dot(tl.trans(v), p.to(DTYPE), input_precision="ieee"), tl.sum(p, 0), top


@triton.jit
def _seen(mask_row, mask_of_query, column, there, N_QUERIES: tl.constexpr, ROWS: tl.constexpr):
    """Which tokens the mask lets each query see, `[T, ROWS]` or, for one query of every head, `[T, 1]`."""
    q = tl.zeros([1, 1], tl.int32) if N_QUERIES == 1 else (tl.arange(0, ROWS) % N_QUERIES)[None, :]
    return tl.load(mask_row + q * mask_of_query + column[:, None], mask=there[:, None] & (q >= 0), other=0) != 0


@triton.jit
def _softmax(scores, visible, top, softcap, SOFTCAP: tl.constexpr):
    """Powers of 2 of scores against the new maximum, 0 where nothing is seen; by how much older sums shrink; the maximum.

    Scores and their cap are in units of log 2. The cap is c tanh(s / c).
    """
    if SOFTCAP:
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0)
    scores = tl.where(visible, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 0))
    # Where nothing was seen yet, -inf less -inf would be no number.
    safe = tl.where(new == float("-inf"), 0.0, new)
    return tl.exp2(scores - safe[None, :]), tl.exp2(top - safe), new


@triton.jit(do_not_specialize=["n_parts"])
def _combine(sums, stats, out, n_parts, D: tl.constexpr, N_ROWS: tl.constexpr, T: tl.constexpr, T_DIM: tl.constexpr):
    """Some coordinates of one query's output: its parts' sums, weighed by what their maxima are below the largest.

    Zeros where it sees nothing.
    """
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * T_DIM + tl.arange(0, T_DIM)
    first = row // N_ROWS * n_parts * N_ROWS + row % N_ROWS
    top, total, acc = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32), tl.zeros([T_DIM], tl.float32)
    for begin in range(0, n_parts, T):
        part = begin + tl.arange(0, T)
        at = first + part * N_ROWS
        tops = tl.load(stats + at * 2, mask=part < n_parts, other=float("-inf"))
        new = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights, shrink = tl.exp2(tops - safe), tl.exp2(top - safe)
        filled = (part[:, None] < n_parts) & (i[None, :] < D)
        parts = tl.load(sums + at[:, None] * D + i[None, :], mask=filled, other=0.0)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(weights * tl.load(stats + at * 2 + 1, mask=part < n_parts, other=0.0), 0)
        top = new
    tl.store(out + row * D + i, (acc / tl.where(total > 0.0, total, 1.0)).to(out.dtype.element_ty), mask=i < D)
