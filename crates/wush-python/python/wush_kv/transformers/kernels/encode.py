"""The quantizer QuEST with error feedback, in Triton: the bits of the Rust encoder (docs/formats.md). Enters: keys or values
`[batch, n_kv_heads, tokens, d]`. Leaves: their words. Other quantizers stay with Rust, on the CPU.

Arithmetic is float64 in the order of `wush-quant`: sums of squares in 16 partial sums; targets x_i + Σ_{j>i} L_ji (x_j − x̂_j) summed
from the last coordinate down, products and sums rounded apart (`enable_fp_fusion=False`). A program codes a few tokens, coordinate
after coordinate; when one is coded, its error is added to the targets of all that follow: the same order of additions for each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wush_kv.transformers.kernels import on

TOKENS = 4
"""Tokens of a program, a warp: their targets are its registers."""
PARTIAL_SUMS = 16
MAX_MAGNITUDE = tl.constexpr(2.0**120)
ZERO_BITS = {2: 0x3FC0, 3: 0x4060, 4: 0x40F0, 8: 0x42FF}
"""The zero point 2^(b−1) − ½ in bfloat16, which holds it exactly."""


def encode(x: Tensor, bits: int, step: Tensor, lower: Tensor | None, n_record: int, fault: Tensor) -> Tensor:
    """Pack `[batch, n_kv_heads, tokens, d]`, its last axis contiguous, to int32 `[batch, n_kv_heads, tokens, n_record]`.

    `step`: float64 `[1]`, the step in units of the RMS; `lower`: L, float32 `[n_kv_heads, d, d]`, None without feedback; `fault`:
    int32 `[1]`, set to 1 where a number is none, or beyond 2^120.
    """
    batch, n_kv_heads, n_tokens, d = x.shape
    per_word = 16 if bits == 3 else 32 // bits
    n_words = triton.cdiv(d, per_word)
    words = torch.empty(batch, n_kv_heads, n_tokens, n_record, dtype=torch.int32, device=x.device)
    with on(x.device):
        _encode[(triton.cdiv(n_tokens, TOKENS), batch * n_kv_heads)](
            x, words if lower is None else lower, step, words, fault, n_kv_heads, n_tokens, x.stride(0), x.stride(1), x.stride(2),
            D=d, D_PAD=max(triton.next_power_of_2(d), PARTIAL_SUMS), BITS=bits, PER_WORD=per_word, N_WORDS=n_words,
            WORDS_PAD=triton.next_power_of_2(n_words), RECORD=n_record, ZERO=ZERO_BITS[bits],
            FEEDBACK=lower is not None, T=TOKENS, LANES=PARTIAL_SUMS, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return words


@triton.jit(do_not_specialize=["n_tokens", "of_batch", "of_head", "of_token"])
def _encode(
    x, lower, step, words, fault, n_kv_heads, n_tokens, of_batch, of_head, of_token,
    D: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, PER_WORD: tl.constexpr, N_WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr, RECORD: tl.constexpr, ZERO: tl.constexpr, FEEDBACK: tl.constexpr, T: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Codes of T tokens of one head."""
    HALF_RANGE: tl.constexpr = 2 ** (BITS - 1)
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    pair = tl.program_id(1).to(tl.int64)
    head, t = pair % n_kv_heads, tl.program_id(0) * T + tl.arange(0, T)
    there = t < n_tokens
    x += pair // n_kv_heads * of_batch + head * of_head + t.to(tl.int64) * of_token
    lower += head * D * D
    scale = tl.load(step) * tl.sqrt(_sum_of_squares(x, there, fault, D, LANES) / D)
    stored = _bf16_bits(scale.to(tl.float32))
    read = (stored << 16).to(tl.float32, bitcast=True).to(tl.float64)
    divisor = tl.where(scale > 0.0, scale, 1.0)
    column, word = tl.arange(0, D_PAD)[None, :], tl.arange(0, WORDS_PAD)[None, :]
    made_up = tl.zeros([T, D_PAD], tl.float64)
    low, high = tl.zeros([T, WORDS_PAD], tl.int32), tl.zeros([T, WORDS_PAD], tl.int32)
    for n in range(D):
        i = D - 1 - n
        x_i = tl.load(x + i, mask=there, other=0.0).to(tl.float32).to(tl.float64)
        target = x_i
        if FEEDBACK:
            target += tl.sum(tl.where(column == i, made_up, 0.0), 1)
        code = tl.floor(target / divisor) + HALF_RANGE
        code = tl.where(scale > 0.0, tl.minimum(tl.maximum(code, 0.0), 2.0**BITS - 1.0), HALF_RANGE)
        if FEEDBACK:
            error = x_i - read * (code - (HALF_RANGE - 0.5))
            factor = tl.load(lower + i * D + column, mask=column < i, other=0.0).to(tl.float64)
            made_up += factor * error[:, None]
        code = code.to(tl.int32)[:, None]
        p, w = i // N_WORDS, i % N_WORDS
        low |= tl.where(word == w, (code & 2**WIDTH - 1) << p * WIDTH, 0)
        if BITS == 3:
            high |= tl.where(word == w // 2, (code >> 2) << p + w % 2 * 16, 0)
    record = words + (pair * n_tokens + t)[:, None] * RECORD
    tl.store(record + word, low, mask=there[:, None] & (word < N_WORDS))
    if BITS == 3:
        tl.store(record + N_WORDS + word, high, mask=there[:, None] & (word < (N_WORDS + 1) // 2))
    tl.store(words + (pair * n_tokens + t) * RECORD + RECORD - 1, stored & 0xFFFF | ZERO << 16, mask=there)


@triton.jit
def _sum_of_squares(x, there, fault, D: tl.constexpr, LANES: tl.constexpr):
    """Σ x² in 16 partial sums, which are then added in order; says where a number is out of range."""
    lane = tl.arange(0, LANES)[None, :]
    sums = tl.zeros([x.shape[0], LANES], tl.float64)
    for first in range(0, D, LANES):
        part = tl.load(x[:, None] + first + lane, mask=there[:, None] & (first + lane < D), other=0.0).to(tl.float32)
        # A NaN is not at most anything.
        in_range = tl.min(tl.min((tl.abs(part) <= MAX_MAGNITUDE).to(tl.int32), 1), 0)
        tl.store(fault, 1, mask=in_range == 0)
        part = part.to(tl.float64)
        sums += part * part
    total = tl.zeros([x.shape[0]], tl.float64)
    for n in tl.static_range(LANES):
        total += tl.sum(tl.where(lane == n, sums, 0.0), 1)
    return total


@triton.jit
def _bf16_bits(x):
    """Bits of a float32 in bfloat16, to nearest with ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
