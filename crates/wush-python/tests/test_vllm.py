"""The plugin for vLLM without vLLM: that it refuses one it does not know. tests/external/vllm_kv.py runs it inside."""

import importlib.util

import pytest

pytest.importorskip("torch")

from wush_kv import vllm


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_unknown_vllm_ends_the_process(monkeypatch):
    with pytest.raises(SystemExit, match=r"vLLM is not known.*WUSH_KV_VLLM=off"):
        vllm.register()
    monkeypatch.setenv(vllm.SWITCH, "off")
    vllm.register()
