"""The Triton kernels against the CPU path: on CUDA where there is a GPU, else under Triton's interpreter (see conftest.py)."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="SKIPPED: the kernels' tests take torch")
pytest.importorskip("transformers", reason="SKIPPED: the kernels' tests take transformers")
pytest.importorskip("triton", reason="SKIPPED: the kernels' tests take triton")

import wush_kv.transformers as wush  # noqa: E402
from wush_kv import Codec, WushError  # noqa: E402
from wush_kv.transformers import Windows, cache, kernels  # noqa: E402
from wush_kv.transformers.packer import Packer  # noqa: E402
from wush_kv.transformers.plan import Counters, LayerPlan  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"
BITS = [2, 3, 4, 8]
# The interpreter takes a second for what a GPU does at once: a part of the heads and groups there.
HEADS = [16, 64, 80] if INTERPRETED else [16, 64, 80, 96, 128, 256]
GROUPS = [1, 3, 8] if INTERPRETED else [1, 2, 3, 4, 5, 6, 7, 8]
SMALL = Windows(sink=4, keep=8, flush=4)
KV_HEADS = 2


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lower_of(n_heads, d, seed=0):
    """Unit lower triangular, of elements that carry errors far."""
    lower = random(n_heads, d, d, seed=seed).tril(-1) * 0.3
    return lower + torch.eye(d)


class Made:
    """What a plan reads of a bundle, from random numbers."""

    def __init__(self, d, *, feedback=True, mean=True, n_heads=KV_HEADS):
        key = torch.eye(d) + 0.3 * random(n_heads, d, d, seed=1) / d**0.5
        self.d, self.n_heads, self.feedback = d, n_heads, feedback
        self.parts = {
            "key": key,
            "query": torch.linalg.inv(key.double()).mT.float().contiguous(),
            "key_mean": random(n_heads, d, seed=2) if mean else None,
            "key_feedback": lower_of(n_heads, d, seed=3) if feedback else None,
            "value_feedback": lower_of(n_heads, d, seed=4) if feedback else None,
        }

    def shape(self, layer):
        return self.n_heads, self.d

    def matrix(self, layer, name):
        part = self.parts[name]
        return None if part is None else memoryview(part.numpy())

    def codec(self, layer, role, bits, *, method=None):
        lower = self.parts[f"{role}_feedback"]
        return Codec(
            self.d, bits, method=method or "quest-wide", role=role, feedback=None if lower is None else lower.numpy()
        )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("d", HEADS)
@pytest.mark.parametrize("feedback", [False, True])
def test_words_are_those_of_rust(bits, d, feedback):
    lower = lower_of(KV_HEADS, d) if feedback else None
    codec = Codec(d, bits, method="quest-wide", feedback=None if lower is None else lower.numpy())
    x = random(2, KV_HEADS, 7, d, seed=bits) * torch.logspace(-3, 2, 7)[:, None]
    x[0, 0, 0] = 0.0
    x[0, 1, 2, ::2] = 0.0
    x[1, 0, 3] = 1e-40  # denormal, and a scale that bfloat16 does not hold
    x[1, 1, 4] = -(2.0**120)
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        if INTERPRETED and dtype != torch.float32:
            given[1, 0, 3] = 0.0  # the interpreter's bfloat16 has no denormals
        expected = Packer(codec, lower, use_kernels=False).pack(given)
        # A view, as the cache passes it.
        found = Packer(codec, lower, use_kernels=True).pack(torch.cat([given, given], 2).to(DEVICE)[:, :, 2:9])
        np.testing.assert_array_equal(found.cpu()[:, :, :5].numpy(), expected[:, :, 2:].numpy())
        np.testing.assert_array_equal(found.cpu()[:, :, 5:].numpy(), expected[:, :, :2].numpy())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**121])
def test_what_cannot_be_packed_is_refused_at_the_next_call(bad):
    packer = Packer(Codec(64, 2), use_kernels=True)
    x = random(1, 1, 5, 64).to(DEVICE)
    packer.pack(x)
    x[0, 0, 3, 9] = bad
    packer.pack(x)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(WushError, match="NaN, an infinity or a magnitude beyond"):
        packer.pack(x)


def layer_of(made, bits, use_kernels, windows=SMALL, sliding=None):
    plan = LayerPlan(made, 0, bits, None, windows, use_kernels)
    plan.sliding_window = sliding
    return cache.WushLayer(plan, Counters())


def mask_of(pads, first, n, sliding):
    """What transformers passes: causal, without padding, and of sliding layers no further back than their window."""
    columns, queries = torch.arange(first + n), torch.arange(first, first + n)[:, None]
    mask = (columns <= queries) & (columns >= torch.tensor(pads)[:, None, None])
    return (mask & (columns > queries - (sliding or first + n + 1)))[:, None]


def run(layer, device, dtype, *, d, group, chunks, pads, masked, sliding=None, softcap=None):
    """Outputs of chunks of random keys, values and queries through one layer, the first chunk's left out: it meets nothing packed."""
    first, outs = 0, []
    for step, n in enumerate(chunks):
        heads = layer.plan.n_kv_heads
        key, value = (random(len(pads), heads, n, d, seed=10 * step + k, dtype=dtype).to(device) for k in (1, 2))
        query = random(len(pads), heads * group, n, d, seed=10 * step + 3, dtype=dtype).to(device)
        mask = mask_of(pads, first, n, sliding).to(device) if masked else None
        layer.update(key, value)
        out = layer.attend(query, mask, d**-0.5, softcap).float().cpu()
        # What padding computes nobody reads.
        real = torch.arange(first, first + n) >= torch.tensor(pads)[:, None]
        outs.append(out * real[:, None, :, None])
        first += n
    return torch.cat(outs[1:], 2)


# Sums of some hundred products in another order. In bfloat16 the CPU path rounds what it unpacks, weights and outputs, each to 2^-9 of
# values whose largest is about 4, and the kernel the weights and outputs.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 3 * 4 * 2**-9, torch.float16: 3 * 4 * 2**-12}


def compare(made, bits, dtype=torch.float32, windows=SMALL, **kwargs):
    sliding = kwargs.get("sliding")
    plain = layer_of(made, bits, False, windows, sliding)
    fast = layer_of(made, bits, True, windows, sliding)
    expected = run(plain, torch.device("cpu"), dtype, d=made.d, **kwargs)
    found = run(fast, DEVICE, dtype, d=made.d, **kwargs)
    assert plain.n_packed == fast.n_packed and max(plain.n_packed) > 0
    assert plain.n_freed == fast.n_freed
    off = (found - expected).abs().max().item()
    assert off <= CLOSE[dtype], f"off by {off}"


@pytest.fixture(autouse=True)
def through_the_kernel(monkeypatch):
    """Counts calls, so that no comparison passes by the kernel."""
    from wush_kv.transformers.kernels import attend, encode

    calls, real = [], attend.attend_packed
    monkeypatch.setattr(attend, "attend_packed", lambda *args: calls.append(1) or real(*args))
    monkeypatch.setattr(attend, "MIN_PART", 64)  # several parts of two tiles each
    if INTERPRETED:
        monkeypatch.setattr(encode, "TOKENS", 64)  # a program takes as long as a token
    return calls


STEPS = [60, 1, 1, 3, 1]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("d", HEADS)
def test_every_width_and_head(bits, d, through_the_kernel):
    compare(Made(d), bits, group=3, chunks=STEPS, pads=[0], masked=False)
    assert len(through_the_kernel) == 4


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(bits, dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("SKIPPED: Triton's interpreter multiplies bfloat16 as integers")
    compare(Made(64), bits, dtype, group=2, chunks=STEPS, pads=[0], masked=False)


@pytest.mark.parametrize("group", GROUPS)
def test_groups(group):
    compare(Made(64), 2, group=group, chunks=[70, 1, 8], pads=[0, 0], masked=False)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_padded_rows_sliding_windows_and_caps(bits, softcap, monkeypatch):
    monkeypatch.setattr(cache, "PAGE", 8)
    for sliding in (None, 24):
        compare(
            Made(64),
            bits,
            group=2,
            chunks=[50, 1, 6, 1, 1, 16, 1],
            pads=[0, 9, 49, 56],
            masked=True,
            sliding=sliding,
            softcap=softcap,
        )


@pytest.mark.parametrize("windows", [Windows(0, 0, 1), Windows(0, 8, 4), Windows(8, 0, 3), Windows(70, 100, 8)])
def test_windows(windows):
    compare(
        Made(64, mean=False, feedback=False),
        2,
        windows=windows,
        group=2,
        chunks=[200, 1, 1, 5, 1],
        pads=[0],
        masked=False,
    )


def test_many_queries_are_the_cpus_way(through_the_kernel):
    compare(Made(64), 2, group=4, chunks=[60, 30, 17, 16], pads=[0], masked=True)
    assert len(through_the_kernel) == 1, "4 heads of 16 queries are 64 rows, of 17 more"


def test_kernels_are_chosen_on_cuda_and_never_missed_silently(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not kernels.use(cpu, None) and kernels.use(cuda, None) and not kernels.use(cuda, False)
    kernels.use.cache_clear()
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _: None)
    with pytest.warns(UserWarning, match="triton is not installed: packed keys and values are unpacked at every step"):
        assert not kernels.use(cuda, None)
    with pytest.raises(WushError, match="kernels=True: triton is not installed"):
        kernels.use(cuda, True)
    kernels.use.cache_clear()
    monkeypatch.undo()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(WushError, match="run on CUDA, not on cpu"):
        kernels.use(cpu, True)
    kernels.use.cache_clear()


def test_other_quantizers_are_packed_on_the_cpu_with_a_warning():
    codec = Codec(64, 2, method="oscar")
    x = random(1, 2, 5, 64)
    with pytest.warns(UserWarning, match="no kernel packs with this quantizer"):
        found = Packer(codec, use_kernels=True).pack(x.to(DEVICE))
    np.testing.assert_array_equal(found.cpu().numpy(), Packer(codec, use_kernels=False).pack(x).numpy())


def test_a_model_generates_what_it_generates_without_kernels(bundle, through_the_kernel):
    kwargs = {"windows": SMALL, "dtype": torch.float32, "verify": False}
    plain = wush.load(bundle, 2, kernels=False, **kwargs)
    fast = wush.load(bundle, 2, kernels=True, **kwargs).to(DEVICE)
    ids = torch.randint(3, plain.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = plain.generate(ids, attention_mask=mask, **options)
    found = fast.generate(ids.to(DEVICE), attention_mask=mask.to(DEVICE), **options)
    assert found.tolist() == expected.tolist()
    assert plain.wush.counters == fast.wush.counters
    assert len(through_the_kernel) == 3 * len(fast.wush.plans), "every new token but the first, in every layer"
