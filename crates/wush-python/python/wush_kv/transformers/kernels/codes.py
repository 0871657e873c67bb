"""Packed codes as numbers for the matrix units, in Triton. Enters: words of packed tokens. Leaves: tiles of keys and of values.

In bfloat16 and float16 a code becomes a number by its place, two at once: an `and` of two half words and an `or` of an exponent leave
codes on fractions, offset + code / factor. Several codes of a half word fit a fraction side by side, so one shift serves them; who
multiplies takes the factors of coordinates and the offset into account. The two halves of a word of keys are two coordinates; words of
values are first regrouped, so that halves are two tokens: matrix units want two neighbours of a sum in a register. Eight bits do not fit
bfloat16's fraction; they, and all bits in float32, are converted.

A tile's coordinates are in the order in which words have them, of keys `[p, word, 2]`, numbers p and p + PER_WORD / 2 of a word side by
side, and of values `[p, word]`: `coordinate` gives each place's.
"""

from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl

CODES_PER_SHIFT = 3
"""In bfloat16: three of two bits fill its fraction."""
BFLOAT16_BIAS = 127


@dataclass(frozen=True)
class Placing:
    """How codes become numbers by their place, see `_placed`."""

    per_shift: int
    """Codes of a half word that one shift brings to their places; 0 where codes are converted."""
    lowest: int
    """Place of the lowest of them."""
    offset: int
    """What the numbers of no code are."""
    exponent: int
    """The bits of two such numbers. Not a constant to the compiler: with the mask, a second one would cost an instruction."""


@lru_cache
def placing_of(bits: int, bias: int, fraction: int) -> Placing:
    """Places for a dtype of this exponent's bias and bits of the fraction."""
    if fraction < bits:
        return Placing(0, 0, 0, 0)
    width = 2 if bits == 3 else bits
    # Float16 has room for more codes, but not for queries times their factors.
    per_shift = min((fraction - bits) // width + 1, CODES_PER_SHIFT) if bias == BFLOAT16_BIAS else 1
    lowest = 0 if bias == BFLOAT16_BIAS else fraction - bits
    exponent = fraction - lowest - (per_shift - 1) * width
    return Placing(per_shift, lowest, 2**exponent, (bias + exponent << fraction) * 0x10001)


@triton.jit
def coordinate(p, word, D: tl.constexpr, N_WORDS: tl.constexpr):
    """Coordinate of code number p of a word; D where there is none."""
    return tl.where(word < N_WORDS, tl.minimum(p * N_WORDS + word, D), D)


@triton.jit
def factor(p, BITS: tl.constexpr, PER_SHIFT: tl.constexpr):
    """By what code number p of a half word counts for less than the highest of its fraction."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    return (1 << (PER_SHIFT - 1 - p % PER_SHIFT) * WIDTH).to(tl.float32)


@triton.jit
def scales(scales, T: tl.constexpr):
    """Scales and zero points `[T]`."""
    both = tl.load(scales + tl.arange(0, T))
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _words(packed, at, w, W: tl.constexpr, N_WORDS: tl.constexpr):
    """Words number w of the records at `at`, and anything where a record has none: nobody reads those coordinates."""
    # Not a mask that always holds: it would cost a test a word.
    return tl.load(packed + (at + w), mask=None if N_WORDS == W else (w < N_WORDS) & (at >= 0))


@triton.jit
def _third_bits(packed, at, w, W: tl.constexpr, N_WORDS: tl.constexpr):
    """At three bits, the half words of the highest bits, two in a word behind the others."""
    mask = None if N_WORDS == W else (w < N_WORDS) & (at >= 0)
    return tl.load(packed + (at + N_WORDS + w // 2), mask=mask) >> w % 2 * 16


@triton.jit
def keys(
    packed, T: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, PER_WORD: tl.constexpr, N_WORDS: tl.constexpr,
    RECORD: tl.constexpr, DTYPE: tl.constexpr, PER_SHIFT: tl.constexpr, LOWEST: tl.constexpr, exponent,
):  # fmt: skip
    """Codes of T tokens as numbers, `[T, D_PAD]`."""
    W: tl.constexpr = D_PAD // PER_WORD
    w, at = tl.arange(0, W)[None, :], tl.arange(0, T)[:, None] * RECORD
    words = _words(packed, at, w, W, N_WORDS)
    thirds = _third_bits(packed, at, w, W, N_WORDS) if BITS == 3 else words
    words, thirds = words[:, None, :], thirds[:, None, :]
    p = tl.arange(0, PER_WORD // 2)[None, :, None]
    if PER_SHIFT == 0:
        low = _code(words, thirds, p, BITS).to(tl.float32).to(DTYPE)
        high = _code(words, thirds, p + PER_WORD // 2, BITS).to(tl.float32).to(DTYPE)
    else:
        thirds = (thirds & 0xFF) | (thirds & 0xFF00) << 8
        low, high = _placed(words, thirds, p, BITS, DTYPE, PER_SHIFT, LOWEST, exponent)
    return tl.reshape(tl.join(low, high), [T, D_PAD])


@triton.jit
def values(
    packed, T: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, PER_WORD: tl.constexpr, N_WORDS: tl.constexpr,
    RECORD: tl.constexpr, DTYPE: tl.constexpr, PER_SHIFT: tl.constexpr, LOWEST: tl.constexpr, exponent,
):  # fmt: skip
    """Codes of T tokens as numbers, `[D_PAD, T]`."""
    W: tl.constexpr = D_PAD // PER_WORD
    w, at = tl.arange(0, W)[:, None], tl.arange(0, T // 2)[None, :] * (2 * RECORD)
    even, odd = _words(packed, at, w, W, N_WORDS), _words(packed, at + RECORD, w, W, N_WORDS)
    thirds_even, thirds_odd = even, odd
    if BITS == 3:
        thirds_even, thirds_odd = (
            _third_bits(packed, at, w, W, N_WORDS),
            _third_bits(packed, at + RECORD, w, W, N_WORDS),
        )
    if PER_SHIFT == 0:
        words = tl.reshape(tl.join(even, odd), [W, T])[None, :, :]
        thirds = tl.reshape(tl.join(thirds_even, thirds_odd), [W, T])[None, :, :]
        codes = _code(words, thirds, tl.arange(0, PER_WORD)[:, None, None], BITS).to(tl.float32).to(DTYPE)
    else:
        # Two tokens' halves side by side: of the words' low halves, then of the high ones.
        words = tl.join((even & 0xFFFF) | odd << 16, (even >> 16 & 0xFFFF) | (odd & -65536))
        words = tl.permute(words, 2, 0, 1)[:, None, :, :]
        half = tl.arange(0, 2)[:, None, None, None]
        thirds = ((thirds_even & 0xFFFF) | thirds_odd << 16)[None, None, :, :] >> 8 * half & 0xFF00FF
        p = tl.arange(0, PER_WORD // 2)[None, :, None, None]
        low, high = _placed(words, thirds, p, BITS, DTYPE, PER_SHIFT, LOWEST, exponent)
        codes = tl.join(low, high)
    return tl.reshape(codes, [D_PAD, T])


@triton.jit
def _code(words, thirds, p, BITS: tl.constexpr):
    return (words >> 2 * p & 3) + (thirds >> p & 1) * 4 if BITS == 3 else words >> BITS * p & 2**BITS - 1


@triton.jit
def _placed(
    words, thirds, p, BITS: tl.constexpr, DTYPE: tl.constexpr, PER_SHIFT: tl.constexpr, LOWEST: tl.constexpr, exponent
):  # fmt: skip
    """Codes number p of both halves of words as numbers: offset + code / factor."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    place = LOWEST + p % PER_SHIFT * WIDTH
    # One shift for PER_SHIFT codes.
    pairs = _rotated(words, p // PER_SHIFT * (PER_SHIFT * WIDTH) - LOWEST) & ((1 << WIDTH) - 1) * 0x10001 << place
    if BITS == 3:
        pairs |= _rotated(thirds, p - place - 2) & 0x10001 << place + 2
    pairs |= exponent
    return pairs.to(tl.int16).to(DTYPE, bitcast=True), (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _rotated(x, right):
    """Bits rotated to the right: a shift, to the left for a negative number, of bits that stay inside."""
    x = x.to(tl.uint32, bitcast=True)
    return (x >> (right & 31) | x << (-right & 31)).to(tl.int32, bitcast=True)
