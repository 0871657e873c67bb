"""Attention of a few new queries over a packed cache, in Triton. Enters: transformed queries `[batch, n_heads, queries, d]`; sink, packed
tokens and recent window of keys and values; a mask over columns. Leaves: outputs of the queries' shape and dtype.

    score_t = scale_t (Σᵢ qᵢ codeᵢ − zero_t Σᵢ qᵢ)        out = Σ_t (p_t scale_t) code_t − Σ_t (p_t scale_t) zero_t

Codes are read packed and go to the matrix units as integers in the queries' dtype; sums are float32. All queries of a KV head share a
program, so packed bytes are read once. Tokens are split into parts, a program each; `_combine` weighs the parts by their softmax sums.

A tile of codes has the coordinates in the order in which words hold them (`_coordinates`); queries are read, and outputs written, in that
order. In bfloat16 and float16 a code becomes a number by its place: the bits of 2^b with the code on top of the fraction are 2^b + code,
two of them made at once, and the zero point takes the 2^b. Eight bits do not fit bfloat16's fraction; they, and all bits in float32, are
converted.

On an H200, 32 query and 8 KV heads of 128, 2 bits, bfloat16: 225 µs for 8 × 32768 tokens, 0.72 TB/s of packed bytes where torch reads
its own bfloat16 cache at 4.3 (249 µs): unpacking bounds it, not bytes. docs/serving.md has more.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from wush_kv.transformers.kernels import on

BLOCK = 64
"""Tokens of a tile of packed ones."""
WINDOW_BLOCK = 64
"""Tokens of a part of the windows: about as many bytes as a part of packed ones has."""
MIN_ROWS = 16
"""Rows of the smallest matrix product."""
MAX_ROWS = 64
"""Queries of one KV head, heads times tokens, for which registers suffice."""
PROGRAMS_PER_PROCESSOR = 8
"""Parts for every multiprocessor. With tiles of 64 and two warps: best or near it from 1 × 4096 to 8 × 32768 tokens on an H200."""
WARPS = 2
COMBINE_BLOCK = 16

# How a dtype is called in Triton, its exponent's bias, and the bits of its fraction (none where codes are converted instead).
DTYPES = {torch.float32: (tl.float32, 0, 0), torch.bfloat16: (tl.bfloat16, 127, 7), torch.float16: (tl.float16, 15, 10)}


@dataclass(frozen=True)
class Stored:
    """Keys or values, contiguous: `[batch, n_kv_heads, tokens, d]`; the packed ones int32 `[batch, n_kv_heads, slots, n_words]`."""

    sink: Tensor | None
    packed: Tensor
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
    padded = max(triton.next_power_of_2(d), MIN_ROWS)
    with on(query.device):
        _attend_part[(n_pairs, n_parts)](
            query, *_pointers(keys), *_pointers(values), places.rows, seen, sums, stats,
            batch, n_kv_heads, slots, n_sink, n_recent, places.sink, places.n_freed, places.n_used,
            places.recent_begin, places.first_query, split, n_packed_parts,
            seen.stride(0) if seen.shape[0] > 1 else 0, seen.stride(2), scaling, softcap or 0.0,
            HAS_MASK=mask is not None, SOFTCAP=softcap is not None,
            N_ROWS=n_rows, N_QUERIES=n_queries, ROWS=max(triton.next_power_of_2(n_rows), MIN_ROWS),
            D=d, D_PAD=padded, BITS=bits, PER_WORD=per_word, N_WORDS=triton.cdiv(d, per_word), RECORD=record,
            DTYPE=dtype, BIAS=bias, FRACTION=fraction if fraction >= bits else 0, T=BLOCK, T_WINDOW=WINDOW_BLOCK, num_warps=WARPS,
        )  # fmt: skip
        _combine[(n_pairs * n_rows,)](sums, stats, out, n_parts, D=d, D_PAD=padded, N_ROWS=n_rows, T=COMBINE_BLOCK)
    return out


def _pointers(stored: Stored) -> tuple[Tensor, Tensor, Tensor]:
    recent = stored.recent.contiguous()
    return recent if stored.sink is None else stored.sink, stored.packed, recent


def _split(n_used: int, n_pairs: int, device: torch.device) -> int:
    """Packed tokens of a part: whole tiles, and about so many parts that every processor has some."""
    n_parts = max(PROGRAMS_PER_PROCESSOR * _n_processors(device) // n_pairs, 1)
    return max(triton.cdiv(triton.cdiv(n_used, n_parts), BLOCK), 1) * BLOCK


@lru_cache
def _n_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=[  # they change from step to step, and must not compile anew
    "batch", "slots", "n_sink", "n_recent", "sink", "n_freed", "n_used", "recent_begin", "first_query", "split",
    "n_packed_parts", "mask_of_batch", "mask_of_query",
])  # fmt: skip
def _attend_part(
    query, k_sink, k_packed, k_recent, v_sink, v_packed, v_recent, rows, mask, sums, stats,
    batch, n_kv_heads, slots, n_sink, n_recent, sink, n_freed, n_used, recent_begin, first_query, split, n_packed_parts,
    mask_of_batch, mask_of_query, scaling, softcap,
    HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr, N_ROWS: tl.constexpr, N_QUERIES: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, PER_WORD: tl.constexpr, N_WORDS: tl.constexpr,
    RECORD: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, FRACTION: tl.constexpr,
    T: tl.constexpr, T_WINDOW: tl.constexpr,
):  # fmt: skip
    """One part of one KV head of one row of the batch: its unscaled sum, and the maximum and sum of its softmax."""
    pair, part = tl.program_id(0), tl.program_id(1)
    pair_64, row = pair.to(tl.int64), pair // n_kv_heads
    pad, n_packed = tl.load(rows + row), tl.load(rows + batch + row)
    r = tl.arange(0, ROWS)
    query_row, mask_row = query + (pair_64 * N_ROWS + r[:, None]) * D, mask + row.to(tl.int64) * mask_of_batch
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total, minus = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    if part < n_packed_parts:
        i = _coordinates(D, D_PAD, PER_WORD, N_WORDS)
        q = tl.load(query_row + i[None, :], mask=(r[:, None] < N_ROWS) & (i[None, :] < D), other=0.0)
        q_sum = tl.sum(q.to(tl.float32), 1)
        k_packed += pair_64 * slots * RECORD
        v_packed += pair_64 * slots * RECORD
        end = tl.minimum(tl.minimum((part + 1) * split, n_used), n_packed - n_freed)
        for begin in range(part * split, end, T):
            slot = begin + tl.arange(0, T)
            there = slot < end
            k, k_scale, k_zero = _read(
                k_packed, slot, there, D_PAD, BITS, PER_WORD, N_WORDS, RECORD, DTYPE, BIAS, FRACTION
            )
            dots = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = scaling * k_scale[None, :] * (dots - k_zero[None, :] * q_sum[:, None])
            column = pad + sink + n_freed + slot
            visible = _visible(mask_row, mask_of_query, column, there, first_query, HAS_MASK, N_QUERIES, ROWS)
            p, shrink, top = _softmax(scores, visible, top, softcap, SOFTCAP)
            v, v_scale, v_zero = _read(
                v_packed, slot, there, D_PAD, BITS, PER_WORD, N_WORDS, RECORD, DTYPE, BIAS, FRACTION
            )
            weights = (p * v_scale[None, :]).to(DTYPE)
            total = total * shrink + tl.sum(p, 1)
            minus = minus * shrink + tl.sum(weights.to(tl.float32) * v_zero[None, :], 1)
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
        acc -= minus[:, None]
    else:
        i = tl.arange(0, D_PAD)
        in_head = i[None, :] < D
        q = tl.load(query_row + i[None, :], mask=(r[:, None] < N_ROWS) & in_head, other=0.0)
        t = (part - n_packed_parts) * T_WINDOW + tl.arange(0, T_WINDOW)
        in_sink, after = t < n_sink, t - n_sink
        column = tl.where(in_sink, pad + t, recent_begin + after)
        first_recent = pad + tl.where(n_packed > 0, sink + n_packed, 0)
        # A row has its sink once it has packed tokens; what it packed itself is still in the recent part of rows that are behind.
        there = (tl.where(in_sink, n_packed, column + 1 - first_recent) > 0) & (after < n_recent)
        at_sink, at_recent = (pair_64 * n_sink + t) * D, (pair_64 * n_recent + after) * D
        filled = there[:, None] & in_head
        k = tl.load(
            tl.where(in_sink, k_sink + at_sink, k_recent + at_recent)[:, None] + i[None, :], mask=filled, other=0.0
        )
        v = tl.load(
            tl.where(in_sink, v_sink + at_sink, v_recent + at_recent)[:, None] + i[None, :], mask=filled, other=0.0
        )
        scores = scaling * tl.dot(q, tl.trans(k), input_precision="ieee")
        visible = _visible(mask_row, mask_of_query, column, there, first_query, HAS_MASK, N_QUERIES, ROWS)
        p, shrink, top = _softmax(scores, visible, top, softcap, SOFTCAP)
        total = tl.sum(p, 1)
        acc = tl.dot(p.to(DTYPE), v, input_precision="ieee")
    at = (pair_64 * tl.num_programs(1) + part) * N_ROWS + r
    tl.store(sums + at[:, None] * D + i[None, :], acc, mask=(r[:, None] < N_ROWS) & (i[None, :] < D))
    tl.store(stats + at * 2, top, mask=r < N_ROWS)
    tl.store(stats + at * 2 + 1, total, mask=r < N_ROWS)


@triton.jit
def _coordinates(D: tl.constexpr, D_PAD: tl.constexpr, PER_WORD: tl.constexpr, N_WORDS: tl.constexpr):
    """Coordinate of every place of a tile of codes; D where there is none.

    Places are `[word, p, 2]`, codes p and p + PER_WORD / 2 of a word side by side.
    """
    at = tl.arange(0, D_PAD)
    word, rest = at // PER_WORD, at % PER_WORD
    i = (rest // 2 + rest % 2 * (PER_WORD // 2)) * N_WORDS + word
    return tl.where(word < N_WORDS, tl.minimum(i, D), D)


@triton.jit
def _read(
    packed, slot, there, D_PAD: tl.constexpr, BITS: tl.constexpr, PER_WORD: tl.constexpr, N_WORDS: tl.constexpr,
    RECORD: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, FRACTION: tl.constexpr,
):  # fmt: skip
    """Codes `[T, D_PAD]` of some slots, as numbers, their scales and zero points `[T]`; the zero points are the numbers' own."""
    w = tl.arange(0, D_PAD // PER_WORD)
    record = packed + slot.to(tl.int64) * RECORD
    last = tl.load(record + RECORD - 1, mask=there, other=0)
    scale = (last << 16).to(tl.float32, bitcast=True)
    zero = (last & -65536).to(tl.float32, bitcast=True)
    valid = there[:, None] & (w[None, :] < N_WORDS)
    words = tl.load(record[:, None] + w[None, :], mask=valid, other=0)
    halves = words
    if BITS == 3:
        halves = tl.load(record[:, None] + N_WORDS + w[None, :] // 2, mask=valid, other=0) >> (w[None, :] % 2 * 16)
    if FRACTION == 0:
        codes = _converted(words, halves, BITS, PER_WORD, DTYPE)
    else:
        codes = _placed(words, halves, BITS, PER_WORD, DTYPE, BIAS, FRACTION)
        zero += 2**BITS
    return tl.reshape(codes, [slot.shape[0], D_PAD]), scale, zero


@triton.jit
def _converted(words, halves, BITS: tl.constexpr, PER_WORD: tl.constexpr, DTYPE: tl.constexpr):
    """Codes `[T, W, PER_WORD]`, converted."""
    at = tl.arange(0, PER_WORD)
    p = (at // 2 + at % 2 * (PER_WORD // 2))[None, None, :]
    if BITS == 3:
        codes = (words[:, :, None] >> 2 * p & 3) + (halves[:, :, None] >> p & 1) * 4
    else:
        codes = words[:, :, None] >> BITS * p & 2**BITS - 1
    return codes.to(tl.float32).to(DTYPE)


@triton.jit
def _placed(
    words, halves, BITS: tl.constexpr, PER_WORD: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, FRACTION: tl.constexpr
):  # fmt: skip
    """Codes `[T, W, PER_WORD / 2, 2]` as 2^b + code, placed in the fractions of two numbers at once."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    p = tl.arange(0, PER_WORD // 2)[None, None, :]
    pairs = (
        _rotated(words[:, :, None], (32 + WIDTH * p + BITS - FRACTION) % 32)
        & (2**WIDTH - 1 << FRACTION - BITS) * 0x10001
    )
    if BITS == 3:
        two = (halves & 0xFF) | (halves & 0xFF00) << 8
        pairs |= _rotated(two[:, :, None], (33 + p - FRACTION) % 32) & (1 << FRACTION - 1) * 0x10001
    pairs |= (BIAS + BITS << FRACTION) * 0x10001
    low, high = pairs.to(tl.int16).to(DTYPE, bitcast=True), (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _rotated(x, right):
    """Bits rotated to the right: for bits that stay inside their half a shift, of either direction."""
    x = x.to(tl.uint32, bitcast=True)
    return (x >> right | x << (32 - right) % 32).to(tl.int32, bitcast=True)


@triton.jit
def _visible(
    mask_row, mask_of_query, column, there, first_query, HAS_MASK: tl.constexpr, N_QUERIES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Which tokens each query sees, `[ROWS, T]` or, for one query of every head, `[1, T]`."""
    q = tl.zeros([1, 1], tl.int32) if N_QUERIES == 1 else (tl.arange(0, ROWS) % N_QUERIES)[:, None]
    if HAS_MASK:
        seen = tl.load(mask_row + q * mask_of_query + column[None, :], mask=there[None, :] & (q >= 0), other=0) != 0
    else:
        seen = column[None, :] <= first_query + q
    return seen & there[None, :]


@triton.jit
def _softmax(scores, visible, top, softcap, SOFTCAP: tl.constexpr):
    """Powers of scores against the new maximum, 0 where nothing is seen; by how much older sums shrink; the maximum, in units of log 2.

    The cap of logits is c tanh(s / c).
    """
    if SOFTCAP:
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0)
    scores = tl.where(visible, scores * LOG2_E, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    # Where nothing was seen yet, -inf less -inf would be no number.
    safe = tl.where(new == float("-inf"), 0.0, new)
    return tl.exp2(scores - safe[:, None]), tl.exp2(top - safe), new


LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=["n_parts"])
def _combine(sums, stats, out, n_parts, D: tl.constexpr, D_PAD: tl.constexpr, N_ROWS: tl.constexpr, T: tl.constexpr):
    """Outputs of one query: its parts' sums, weighed by what their maxima are below the largest. Zeros where it sees nothing."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, D_PAD)
    first = row // N_ROWS * n_parts * N_ROWS + row % N_ROWS
    top, total, acc = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32), tl.zeros([D_PAD], tl.float32)
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
