"""Where the Triton kernels run: on CUDA, if triton is there, and anywhere under its interpreter, for tests.

`attend` and `encode` import triton, so they are imported where this module has said that they can be.
"""

import importlib.util
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from wush_kv import WushError


def why_not(device: torch.device) -> str | None:
    """Why kernels cannot run on a device; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton kernels run on CUDA, not on {device.type}"
    return None


@cache
def use(device: torch.device, wanted: bool | None) -> bool:
    """Whether to use kernels: as `wanted`, or where it is None, on CUDA. Says once where CUDA has to go without."""
    reason = why_not(device)
    if wanted and reason:
        raise WushError(f"kernels=True: {reason}")
    if wanted is None and device.type == "cuda" and reason:
        warnings.warn(
            f"{reason}: packed keys and values are unpacked at every step, and packed on the CPU; `pip install triton`",
            stacklevel=2,
        )
    return bool(wanted) or (wanted is None and device.type == "cuda" and reason is None)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch what follows on this device: triton launches on the current one, wherever its arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
