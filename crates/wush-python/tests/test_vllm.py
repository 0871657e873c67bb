"""The plugin for vLLM without vLLM: what it computes. tests/external/vllm_kv.py runs it inside."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from wush_kv import Bundle  # noqa: E402
from wush_kv.transformers.plan import SERVING, LayerPlan  # noqa: E402
from wush_kv.vllm import rank_heads, transform  # noqa: E402


def test_heads_of_every_rank():
    assert [rank_heads(8, 4, rank, 2) for rank in range(2)] == [slice(0, 4), slice(4, 8)]
    # More ranks than heads: two ranks hold each.
    assert [rank_heads(4, 1, rank, 8) for rank in range(8)] == [slice(n, n + 1) for n in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert rank_heads(3, 3, 0, 1) == slice(0, 3)


@pytest.mark.parametrize("flat", [True, False])
def test_it_computes_what_the_adapter_for_transformers_computes(bundle, flat):
    found = Bundle.open(bundle, verify=False)
    plan = LayerPlan(found, 1, 16, None, SERVING)
    matrices = plan.matrices(torch.device("cpu"))
    n_kv_heads, d = found.shape(1)
    generator = torch.Generator().manual_seed(0)
    for group, own, mean in (
        (1, matrices.key, torch.randn(n_kv_heads, d, generator=generator)),
        (3, matrices.query, None),
    ):
        x = torch.randn(5, n_kv_heads * group, d, generator=generator)
        wide = x if mean is None else x - mean.repeat_interleave(group, 0)
        expected = torch.einsum("tnd,ned->tne", wide, own.repeat_interleave(group, 0))
        given = x.flatten(1) if flat else x
        torch.testing.assert_close(transform(given, own, mean).view(x.shape), expected, rtol=1e-5, atol=1e-5)
        assert transform(given.bfloat16(), own, mean).dtype == torch.bfloat16
