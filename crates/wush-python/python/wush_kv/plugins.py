"""What servers load by themselves. They only log a plugin that fails, and go on without transforms: here a failure ends the process.

So nothing of this package is imported before `_register`, where a library that cannot be loaded is such a failure, too.
"""

import os
from importlib import import_module


def vllm() -> None:
    """Patch vLLM's attention; called by vLLM in each of its processes, perhaps twice."""
    _register("vLLM", "wush_kv.vllm", "WUSH_KV_VLLM")


def sglang() -> None:
    """Register the hooks; called by SGLang in each of its processes."""
    _register("SGLang", "wush_kv.sglang", "WUSH_KV_SGLANG")


def _register(server: str, module: str, switch: str) -> None:
    if os.environ.get(switch) == "off":
        return
    try:
        import_module(module).register()
    except Exception as error:
        raise SystemExit(
            f"wush-kv: the plugin does not work in this {server}: {type(error).__name__}: {error}. "
            f"{switch}=off serves without it"
        ) from error
