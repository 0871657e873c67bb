"""The quantizers against Eq. 5 and the packed layout of docs/formats.md, written down again in numpy."""

import math
import os

import numpy as np
import pytest
from wush_kv import Bundle, Codec, WushError

WIDTHS = [2, 3, 4, 8]


def codes_of(packed, d, bits):
    """Codes of one packed token-head, by the layout's own words."""
    per_word = {2: 16, 3: 16, 4: 8, 8: 4}[bits]
    n_words = math.ceil(d / per_word)
    words = np.frombuffer(packed[: 4 * n_words].tobytes(), "<u4")
    halves = np.frombuffer(packed[4 * n_words : 4 * n_words + 2 * n_words].tobytes(), "<u2")
    codes = []
    for i in range(d):
        p, w = divmod(i, n_words)
        width = 2 if bits == 3 else bits
        code = int(words[w]) >> (p * width) & (2**width - 1)
        codes.append(code | (int(halves[w]) >> p & 1) << 2 if bits == 3 else code)
    return np.array(codes)


def bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
def test_codes_are_those_of_equation_5(bits, d):
    alpha = 1.7
    x = np.random.default_rng(d + bits).standard_normal((5, d)).astype(np.float32)
    codec = Codec(d, bits, method=f"quest:{alpha}")
    packed = np.asarray(codec.pack(x))
    assert packed.shape == (5, codec.n_bytes)
    wide = x.astype(np.float64)
    scale = 2 * alpha / (2**bits - 1) * np.sqrt((wide**2).mean(1, keepdims=True))
    expected = np.clip(np.floor(wide / scale) + 2 ** (bits - 1), 0, 2**bits - 1)
    np.testing.assert_array_equal([codes_of(row, d, bits) for row in packed], expected)
    # The zero point is exact in bf16, so what is read is one product in f32.
    read = bf16(scale) * (expected.astype(np.float32) - np.float32(2 ** (bits - 1) - 0.5))
    np.testing.assert_array_equal(np.asarray(codec.unpack(packed)), read)


@pytest.mark.parametrize("bits", WIDTHS)
def test_feedback_lowers_the_error_that_counts(bits):
    heads, tokens, d = 3, 200, 64
    rng = np.random.default_rng(bits)
    metric = np.empty((heads, d, d))
    lower = np.empty((heads, d, d), np.float32)
    for head in range(heads):
        root = rng.standard_normal((d, d)) * np.geomspace(1, 0.05, d)
        metric[head] = root @ root.T + 1e-3 * np.eye(d)
        factor = np.linalg.cholesky(metric[head])
        lower[head] = factor / np.diag(factor)
    lower = np.tril(lower, -1) + np.eye(d, dtype=np.float32)
    x = rng.standard_normal((2, heads, tokens, d)).astype(np.float32)

    def error(**kwargs):
        codec = Codec(d, bits, method="quest-wide", **kwargs)
        e = np.asarray(codec.unpack(codec.pack(x)), np.float64) - x
        return np.einsum("bhti,hij,bhtj->h", e, metric, e)

    assert (error(feedback=lower) < 0.7 * error()).all()
    same = np.broadcast_to(np.eye(d, dtype=np.float32), lower.shape).copy()
    np.testing.assert_array_equal(error(feedback=same), error())


def test_alpha_is_that_of_the_grid():
    assert Codec(64, 2, method="quest:1.7").alpha == 1.7
    # 2 bits, keys: α_2 of Eq. 5, a quarter wider.
    assert Codec(64, 2, method="quest-wide").alpha == 1.25 * 1.4935300289152595
    assert Codec(64, 2, method="oscar").alpha is None


def test_heads_take_their_own_feedback_and_batches_change_nothing(bundle):
    found = Bundle.open(bundle, verify=False)
    heads, d = found.shape(0)
    x = np.random.default_rng(0).standard_normal((3, heads, 70, d)).astype(np.float32)
    for role in ("key", "value"):
        codec = found.codec(0, role, 2)
        assert codec.has_feedback
        lower = np.asarray(found.matrix(0, f"{role}_feedback"))
        together = np.asarray(codec.pack(x))
        for head in range(heads):
            alone = Codec(d, 2, method=found.method, role=role, feedback=lower[head : head + 1].copy())
            np.testing.assert_array_equal(together[1, head], np.asarray(alone.pack(x[1, head])))


def test_what_cannot_be_packed_is_refused():
    x = np.ones((2, 100, 64), np.float32)
    x[1, 70, 5] = np.nan
    with pytest.raises(WushError, match=r"token 170, coordinate 5: NaN.*\nhint: "):
        Codec(64, 2).pack(x)
    with pytest.raises(WushError, match="x's last axis: expected 128, found 64"):
        Codec(128, 2).pack(x)
    with pytest.raises(WushError, match="bits: expected 2, 3, 4 or 8, found 5"):
        Codec(64, 5)
    with pytest.raises(WushError, match="role: expected"):
        Codec(64, 2, role="query")
    with pytest.raises(WushError, match="x's heads"):
        Codec(64, 2, feedback=np.stack([np.eye(64, dtype=np.float32)] * 3)).pack(x)
    with pytest.raises(WushError, match="unit lower triangular"):
        Codec(64, 2, feedback=np.ones((1, 64, 64), np.float32))
    with pytest.raises(WushError, match="none empty"):
        Codec(64, 2).pack(x[:, :0])
    with pytest.raises((BufferError, TypeError, ValueError)):
        Codec(64, 2).pack(x.astype(np.float64))


def test_numbers_in_another_order_of_bytes_are_refused():
    codec = Codec(4, 2)
    x = np.ones((2, 4), np.float32)
    with pytest.raises(WushError, match="x: expected numbers in this machine's order of bytes"):
        codec.pack(x.astype(x.dtype.newbyteorder("S")))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_a_process_that_used_it_is_refused_and_does_not_wait():
    codec, x = Codec(4, 2), np.ones((2, 4), np.float32)
    codec.pack(x)
    child = os.fork()
    if child == 0:
        try:
            codec.pack(x)
        except WushError as error:
            os._exit(17 if "forked" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 17
