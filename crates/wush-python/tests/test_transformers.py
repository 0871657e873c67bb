"""The adapter for transformers: a model's own `generate` over the packed cache, with padding, beams, sliding layers and chunks."""

import json
import os
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # small tensors: threads would only wait for each other

import wush_kv.transformers as wush  # noqa: E402
from conftest import DEMO, TEXT, convert  # noqa: E402
from wush_kv import Bundle, WushError  # noqa: E402
from wush_kv.transformers import Windows, attention, cache, packer  # noqa: E402

SMALL = Windows(sink=4, keep=8, flush=4)
# Sums of float32 in another order, through some layers.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
FAMILIES = [
    "llama-gqa",
    "llama-mqa",
    "mistral-sliding",
    "qwen2-sliding",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "smollm3",
]


def load(bundle, bits=2, windows=SMALL, **kwargs):
    return wush.load(bundle, bits, windows=windows, dtype=torch.float32, verify=False, **kwargs)


def ids_of(model, *lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, model.config.vocab_size, (1, n), generator=generator) for n in lengths]


def padded(rows):
    longest = max(row.shape[1] for row in rows)
    pad = [torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=0) for row in rows]
    mask = [torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0), value=0) for row in rows]
    return torch.cat(pad), torch.cat(mask)


def through_cache(model, ids, mask, chunks):
    """Logits of chunks of these lengths, with left padding, as `generate` passes it."""
    store, logits, end = model.wush.new_cache(), [], 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        for n in chunks:
            part = slice(end, end + n)
            end += n
            kwargs = {"attention_mask": mask[:, :end], "position_ids": positions[:, part]}
            logits.append(model.wush.forward(ids[:, part], store, **kwargs))
    return torch.cat(logits, 1), store


def test_16_bits_generate_what_the_base_generates(bundle):
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = load(bundle, 16)
    ids, mask = padded(ids_of(model, 60, 33))
    kwargs = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 3):
        expected = base.generate(ids, num_beams=beams, **kwargs)
        torch.testing.assert_close(model.generate(ids, num_beams=beams, **kwargs), expected)
    assert model.wush.counters.queries > 0
    assert model.wush.counters.met_quantized == 0


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_is_unpacked_is_what_rust_unpacks(bundle, bits):
    found = Bundle.open(bundle, verify=False)
    heads, d = found.shape(0)
    codec = found.codec(0, "key", bits)
    ours = packer.Packer(codec)
    x = torch.randn(2, heads, 7, d, generator=torch.Generator().manual_seed(bits))
    words = ours.pack(x)
    assert words.shape == (2, heads, 7, codec.n_bytes // 4)
    expected = torch.frombuffer(codec.unpack(codec.pack(x.numpy())), dtype=torch.float32).view(x.shape)
    for unpack in (ours.unpack, ours.unpack_here):
        torch.testing.assert_close(unpack(words), expected, rtol=0, atol=0)
    assert 0 < (expected - x).norm() < x.norm()


def test_without_windows_all_before_a_token_is_quantized(bundle):
    model = load(bundle, windows=Windows(sink=0, keep=0, flush=1))
    ids, mask = padded(ids_of(model, 40, 25))
    _, store = through_cache(model, ids, mask, [1] * 40)
    assert store.n_quantized() == [40, 25]
    assert store.layers[0].sides[0].recent.shape[2] == 0
    # All but the first token of each row, and the 15 of padding.
    assert model.wush.counters.met_quantized == (39 + 24) * len(model.wush.plans)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_padded_batch_are_what_they_are_alone(tiny, monkeypatch, name):
    monkeypatch.setattr(cache, "PAGE", 4)  # so that sliding layers let go of something
    model = load(tiny(name), windows=Windows(sink=2, keep=4, flush=2))
    rows = ids_of(model, 56, 31, 9, 1)
    ids, mask = padded(rows)
    for chunks in ([56], [40, 5, 1, 1, 9], [1] * 56, [16, 16, 16, 8]):
        together, store = through_cache(model, ids, mask, chunks)
        for row, alone in enumerate(rows):
            n = alone.shape[1]
            cuts = cut(chunks, 56 - n)
            expected, single = through_cache(model, alone, torch.ones_like(alone), cuts)
            torch.testing.assert_close(together[row, 56 - n :], expected[0], **CLOSE, msg=f"row {row}, chunks {chunks}")
            assert single.n_quantized() == [store.n_quantized()[row]]
    assert model.wush.counters.met_quantized > 0


def cut(chunks, n_padding):
    """The chunks without their first tokens."""
    ends = torch.tensor(chunks).cumsum(0).sub(n_padding).clamp(min=0)
    return [n for n in ends.diff(prepend=torch.zeros(1, dtype=torch.long)).tolist() if n > 0]


def test_a_sliding_layer_lets_go_and_a_full_one_keeps_all(tiny, monkeypatch):
    monkeypatch.setattr(cache, "PAGE", 4)
    model = load(tiny("gemma3"), windows=Windows(sink=2, keep=4, flush=2))
    (ids,) = ids_of(model, 60)
    _, store = through_cache(model, ids, torch.ones_like(ids), [1] * 60)
    sliding = [layer.plan.sliding_window is not None for layer in store.layers]
    assert True in sliding and False in sliding, "the fixture has both kinds"
    for layer, is_sliding in zip(store.layers, sliding, strict=True):
        assert (layer.n_freed > 0) == is_sliding
        assert layer.sides[0].packed.shape[2] <= layer.n_packed[0] - layer.n_freed + 4


def test_windows_are_those_of_algorithm_2(bundle):
    model = load(bundle)
    (ids,) = ids_of(model, 50)
    _, store = through_cache(model, ids, torch.ones_like(ids), [50])
    # 50 − 8 kept − 4 of the sink, in multiples of 4.
    assert store.n_quantized(3) == [36]
    assert store.layers[3].sides[0].sink.shape[2] == 4
    assert store.layers[3].sides[0].recent.shape[2] == 10
    (first,) = ids_of(model, 15)
    _, store = through_cache(model, first, torch.ones_like(first), [15])
    assert store.n_quantized() == [0]


def test_quantized_is_not_exact_and_more_bits_are_nearer(bundle):
    full = load(bundle, 16)
    (ids,) = ids_of(full, 200)
    one = torch.ones_like(ids)
    exact, plain = through_cache(full, ids, one, [10] * 20)
    off = []
    for bits in (2, 3, 4, 8):
        found, store = through_cache(load(bundle, bits), ids, one, [10] * 20)
        off.append((found - exact).norm().item() / exact.norm().item())
        assert store.n_bytes() < plain.n_bytes()
    assert off == sorted(off, reverse=True)
    assert off[0] > 10 * off[3] > 0, off


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_generate_over_a_padded_batch_is_generate_of_each(bundle, options):
    model = load(bundle)
    rows = ids_of(model, 120, 64, 30)
    ids, mask = padded(rows)
    kwargs = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    together = model.generate(ids, attention_mask=mask, **kwargs)[:, 120:]
    each = [model.generate(row, attention_mask=torch.ones_like(row), **kwargs)[:, row.shape[1] :] for row in rows]
    torch.testing.assert_close(together, torch.cat(each))


def test_generate_in_chunks_of_a_prompt(bundle):
    model = load(bundle)
    (ids,) = ids_of(model, 150)
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    before = model.wush.counters.met_quantized
    model.generate(ids, **kwargs)
    whole = model.wush.counters.met_quantized - before
    model.generate(ids, prefill_chunk_size=16, **kwargs)
    in_chunks = model.wush.counters.met_quantized - before - whole
    n_layers = len(model.wush.plans)
    assert whole == 3 * n_layers, "one prefill meets nothing quantized, each new token does"
    assert in_chunks > 100 * n_layers, "chunks meet what the chunks before them left"


def test_another_cache_meets_plain_keys_and_plain_queries(bundle):
    model = load(bundle)
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    (ids,) = ids_of(model, 40)
    store = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = [model.wush.forward(part, store) for part in ids.split(20, 1)]
        expected = base(ids).logits
    # The fold rounds to bf16 once.
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=0.05 * expected.abs().max().item())
    assert model.wush.counters.queries == 0


def test_mismatches_are_refused(bundle, copy):
    model = load(bundle)
    adapter = model.wush
    adapter.plans[2]._host["query"] = adapter.plans[2]._host["query"].flip(0)
    for plan in adapter.plans:
        plan._on_device.clear()
    with pytest.raises(WushError, match="layer 2: its transforms do not cancel"):
        adapter.check_live()
    config = json.loads((copy / "config.json").read_text())
    shorter = {"num_hidden_layers": 5, "max_window_layers": 5, "layer_types": config["layer_types"][:5]}
    (copy / "config.json").write_text(json.dumps(config | shorter))
    with pytest.raises(WushError, match=r"(transforms of layers|do not fit the model)"):
        load(copy)
    with pytest.raises(WushError, match="not the file that the manifest lists"):
        wush.load(copy)
    with pytest.raises(WushError, match="bits: expected"):
        load(bundle, 5)


def test_what_would_degrade_quietly_is_refused(bundle):
    model = load(bundle)
    (ids,) = ids_of(model, 30)
    store = model.wush.new_cache()
    model.set_attn_implementation("sdpa")
    with torch.inference_mode(), pytest.raises(WushError, match="no attention read them"):
        for part in ids.split(10, 1):
            model.wush.forward(part, store)
    model.set_attn_implementation("wush")
    with pytest.raises(WushError, match="assisted decoding"):
        store.crop(-1)
    with pytest.raises(WushError, match="cache_implementation"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2)
    additive = torch.zeros(1, 1, 30, 30)
    with torch.inference_mode(), pytest.raises(WushError, match="additive"):
        model.wush.forward(ids, model.wush.new_cache(), attention_mask=additive)
    with pytest.raises(WushError, match="windows"):
        Windows(sink=0, keep=-1, flush=1)


def test_a_cache_that_a_forward_left_half_way_is_refused(bundle):
    model = load(bundle)
    (ids,) = ids_of(model, 30)
    additive = torch.zeros(1, 1, 30, 30)
    for failing in (
        model.model.layers[0].mlp,
        model.model.layers[3].self_attn.q_proj,
        model.model.layers[-1].self_attn,
    ):
        store = model.wush.new_cache()
        handle = failing.register_forward_hook(lambda *_: 1 / 0)
        with torch.inference_mode(), pytest.raises(ZeroDivisionError):
            model.wush.forward(ids, store)
        handle.remove()
        if failing is not model.model.layers[-1].self_attn:  # every layer has read its part
            with torch.inference_mode(), pytest.raises(WushError, match="an earlier forward through this cache failed"):
                model.wush.forward(ids, store)
    store = model.wush.new_cache()
    with torch.inference_mode(), pytest.raises(WushError, match="additive"):
        model.wush.forward(ids, store, attention_mask=additive)
    with torch.inference_mode(), pytest.raises(WushError, match="an earlier forward through this cache failed"):
        model.wush.forward(ids, store)


def test_a_returned_cache_takes_its_own_text_alone(bundle):
    model = load(bundle)
    (ids,) = ids_of(model, 40)
    kwargs = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    store = model.wush.new_cache()
    given = {model.wush.cache_argument: store}
    text = model.generate(ids, attention_mask=torch.ones_like(ids), **given, **kwargs)
    for other, message in (
        (ids[:, :20], "no new tokens: the cache holds 43"),
        (text.repeat(2, 1), "holds 1 sequences"),
    ):
        with pytest.raises(WushError, match=message):
            model.generate(other, attention_mask=torch.ones_like(other), **given, **kwargs)
    # Nothing was taken in: the text goes on as if it had not stopped.
    found = model.generate(text, attention_mask=torch.ones_like(text), **given, **kwargs)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **{**kwargs, "max_new_tokens": 8})
    torch.testing.assert_close(found, expected)


def test_gradients_through_packed_tokens_are_refused(bundle):
    model = load(bundle)
    (ids,) = ids_of(model, 60)
    store = model.wush.new_cache()
    model.wush.forward(ids[:, :40], store).sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    later = model.wush.forward(ids[:, 40:], store)
    with pytest.raises(WushError, match="gradients do not pass packed"):
        later.sum().backward()


def test_one_query_is_the_same_by_groups_and_by_repeated_heads(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((6, 1), (2, 33), (2, 33)))
    expected = attention.attend(query, key, value, None, 0.3, None)
    monkeypatch.setattr(attention, "_takes_groups", lambda *_: True)
    torch.testing.assert_close(attention.attend(query, key, value, None, 0.3, None), expected, rtol=1e-5, atol=1e-5)
    mask = torch.ones(2, 1, 1, 33, dtype=torch.bool)
    torch.testing.assert_close(attention.attend(query, key, value, mask, 0.3, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["config.json", "wush/README.md", "chat_template.jinja"])
def test_a_pipe_in_a_bundle_is_refused_and_not_waited_for(copy, name):
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    with pytest.raises(WushError, match="not a regular file"):
        load(copy)


def test_lengths_and_scalings_that_calibration_did_not_see(bundle, tmp_path):
    model = load(bundle)
    (ids,) = ids_of(model, 20)
    one = torch.ones_like(ids)
    with pytest.warns(UserWarning, match="up to position 512"):
        model.generate(ids, attention_mask=one, max_new_tokens=493, stopping_criteria=[lambda *_: torch.tensor([True])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(ids, attention_mask=one, max_new_tokens=2)
    scaled = convert(tmp_path / "yarn", *TEXT, "--rope-scaling", "yarn:2")
    with pytest.raises(WushError, match="calibrated with yarn:2"):
        load(scaled)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"windows": (4, 16, 4)}, "windows: expected"),
        ({"bits": "auto:2.5"}, "kv_bits: expected"),
        ({"attn_implementation": "sdpa"}, "attn_implementation: "),
    ],
)
def test_arguments_that_mean_nothing_here_are_refused_at_once(bundle, arguments, message):
    with pytest.raises(WushError, match=message):
        load(bundle, **arguments)
