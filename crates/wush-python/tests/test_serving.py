"""What the plugins share, without a server. tests/external/vllm_kv.py and sglang_kv.py run them inside."""

import hashlib

import pytest

torch = pytest.importorskip("torch")

from wush_kv import Bundle, WushError, serving  # noqa: E402


def heads(n_total, n_ranks):
    shared = max(1, n_total // n_ranks)
    return [serving.Heads(n_total, shared, rank, n_ranks).own() for rank in range(n_ranks)]


def test_heads_of_every_rank():
    assert heads(8, 2) == [slice(0, 4), slice(4, 8)]
    # More ranks than heads: two ranks hold each.
    assert heads(4, 8) == [slice(n, n + 1) for n in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert heads(3, 1) == [slice(0, 3)]


@pytest.mark.parametrize("given", [(8, 8, 0, 2), (3, 1, 0, 2), (2, 1, 0, 3), (4, 2, 1, 8)])
def test_an_uneven_share_is_refused(given):
    with pytest.raises(WushError, match="unevenly"):
        serving.Heads(*given).own()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_computes_its_heads(bundle, flat, rank):
    found = Bundle.open(bundle, verify=False)
    n_kv_heads, d = found.shape(1)
    n_ranks, group = n_kv_heads, 3
    layer = torch.nn.Module()
    serving.give_transforms(layer, found, 1, serving.Heads(n_kv_heads, 1, rank % n_ranks, n_ranks), torch.device("cpu"))
    assert not layer.state_dict()
    key, query = (torch.tensor(found.matrix(1, name).tolist())[rank % n_ranks] for name in ("key", "query"))
    mean = found.matrix(1, "key_mean")
    mean = torch.zeros(d) if mean is None else torch.tensor(mean.tolist())[rank % n_ranks]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, n, d, generator=generator) for n in (group, 1))
    expected = q @ query.T, (k - mean) @ key.T
    given = serving.apply(layer, q.flatten(1), k.flatten(1)) if flat else serving.apply(layer, q, k)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.view(other.shape), other, rtol=1e-5, atol=1e-5)
    assert all(x.dtype == torch.bfloat16 for x in serving.apply(layer, q.bfloat16(), k.bfloat16()))


def test_products_of_queries_and_keys_stay():
    """With a mean, all of a query's products move by one number, which no softmax notices."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Module()
    # I + a part of norm < 1/2: well conditioned.
    layer.wush_key = torch.eye(8) + torch.randn(1, 8, 8, generator=generator) / 16
    layer.wush_query = torch.linalg.inv(layer.wush_key).mT.contiguous()
    layer.wush_mean = torch.randn(1, 8, generator=generator)
    q, k = (torch.randn(6, 8, generator=generator) for _ in range(2))
    query, key = serving.apply(layer, q, k)
    moved = query @ key.T - q @ k.T
    torch.testing.assert_close(moved, moved[:, :1].expand(-1, 6), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("found", "all_here"), [([], False), ([0, 1, 1], True), ([1, 1], False), ([0, 99], False)])
def test_other_layers_are_refused(bundle, found, all_here):
    with pytest.raises(WushError, match="the bundle has transforms of layers"):
        serving.check_layers(Bundle.open(bundle, verify=False), found, all_here)


def test_its_own_layers_are_not_refused(bundle):
    opened = Bundle.open(bundle, verify=False)
    serving.check_layers(opened, opened.layers[::-1], True)
    serving.check_layers(opened, opened.layers[1:], False)
    serving.check_shape(opened, 0, *opened.shape(0))
    with pytest.raises(WushError, match="the model"):
        serving.check_shape(opened, 0, opened.shape(0)[0] + 1, opened.shape(0)[1])


def test_a_directory_that_is_no_bundle(tmp_path):
    assert serving.bundle_of(str(tmp_path)) is None


def test_problems_are_named_together():
    serving.refuse("here", {"one": False}, "SWITCH")
    with pytest.raises(WushError, match=r"here: .*: one, three. SWITCH=off"):
        serving.refuse("here", {"one": True, "two": False, "three": True}, "SWITCH")


def test_the_servers_log_says_that_keys_are_transformed(bundle, caplog):
    found = Bundle.open(bundle, verify=False)
    with caplog.at_level("INFO", logger="vllm"):
        serving.announce("vllm", found, 6, "SWITCH")
    [record] = caplog.records
    assert record.name == "vllm.wush_kv"
    sidecar = hashlib.sha256((bundle / "wush/key_transforms.safetensors").read_bytes()).hexdigest()
    assert f"keys of 6 layers (sidecar {sidecar[:12]}); SWITCH=off" in record.getMessage()
