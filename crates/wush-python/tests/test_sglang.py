"""The plugin for SGLang without SGLang: what its hooks do with what they are given. tests/external/sglang_kv.py runs it inside."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from wush_kv import WushError, sglang  # noqa: E402

X = torch.ones(2, 4)


def layer(**matrices):
    return SimpleNamespace(layer_id=7, **matrices)


@pytest.fixture
def served():
    eye = torch.eye(4)[None]
    return layer(wush_key=2 * eye, wush_query=eye / 2, wush_mean=torch.ones(1, 4) / 2)


def original(layer, *args, **kwargs):
    return args, kwargs


def test_keys_and_queries_are_transformed_and_all_else_is_passed_on(served):
    (q, k, v, batch), kwargs = sglang._attention(
        original, served, X, X, X, "batch", save_kv_cache=True, return_lse=True
    )
    assert q.tolist() == (X / 2).tolist() and k.tolist() == X.tolist() and v is X
    assert (batch, kwargs) == ("batch", {"save_kv_cache": True, "return_lse": True})


def test_a_model_that_is_no_bundle_is_left_alone():
    given = ((X, None, None, "batch", False), {"q_rope": X})
    assert sglang._attention(original, layer(), *given[0], **given[1]) == given


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X, None, None, "batch"), {}), ((X, X, X, "batch", False), {}), ((X, X, X), {"save_kv_cache": False})],
)
def test_keys_that_were_stored_before_are_refused(served, args, kwargs):
    with pytest.raises(WushError, match="layer 7: SGLang stored keys before"):
        sglang._attention(original, served, *args, **kwargs)


def test_unknown_arguments_are_refused(served):
    assert sglang._attention(original, served, X, X, X, "batch", k_rope=None)
    with pytest.raises(WushError, match="layer 7: attention is given k_rope"):
        sglang._attention(original, served, X, X, X, "batch", k_rope=X)


def test_the_fused_store_is_off_for_a_bundle_alone(monkeypatch):
    assert sglang._fused_store(lambda batch: True, "batch") is True
    monkeypatch.setattr(sglang, "_serves_bundle", True)
    assert sglang._fused_store(lambda batch: True, "batch") is False


def test_it_knows_whether_it_is_reached():
    def hooked(*args):
        return sglang._attention(original, layer(), *args)

    assert sglang._is_reached(SimpleNamespace(forward=hooked))
    assert not sglang._is_reached(SimpleNamespace(forward=lambda *args: None))
    assert not sglang._is_reached(SimpleNamespace(forward=lambda q, k, v, batch: q.shape))
