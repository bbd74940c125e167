"""Which implementation runs a call: the choice, its environment variable, and what happens when it cannot."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cache

import torch
from torch import Tensor

from .errors import BackendError

BACKENDS = ("auto", "triton", "flash", "torch")
ENV_BACKEND = "KVSPARSE_BACKEND"
MAX_HEAD_DIM = 256
HAS_TRITON = importlib.util.find_spec("triton") is not None
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1), which needs no GPU."""
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def _triton_obstacle(device: torch.device, dtypes: tuple[torch.dtype, ...], dims: tuple[int, ...]) -> str | None:
    """Why the Triton kernels cannot take these tensors, or None."""
    if not HAS_TRITON:
        return "the triton package is not installed"
    if device.type != "cuda" and not interpreting():
        return f"its kernels run on CUDA devices, not on {device.type!r}"
    for dtype in dtypes:
        if dtype.is_floating_point and dtype not in _KERNEL_DTYPES:
            return f"its kernels take float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if dims and max(dims) > MAX_HEAD_DIM:
        return f"its kernels take head sizes up to {MAX_HEAD_DIM}, not {max(dims)}"
    return None


def resolve(op: str, backend: str, *tensors: Tensor, dims: tuple[int, ...] = (), flash: bool = False) -> str:
    """Turn a requested backend into "triton", "flash" or "torch".

    Args:
        op: name of the op, for messages.
        backend: what the caller asked for. "auto" follows the environment variable KVSPARSE_BACKEND; without it,
            Triton on CUDA tensors it supports and the torch reference elsewhere, with one warning where a CUDA tensor
            has to go without kernels.
        tensors: the floating-point tensors of the call; the first names the device.
        dims: head sizes of the call.
        flash: whether the op has a flash backend.

    Raises:
        BackendError: an unknown name, or a backend asked for by name that cannot run this call.
    """
    asked = os.environ.get(ENV_BACKEND, "auto") if backend == "auto" else backend
    if asked not in BACKENDS:
        raise BackendError(f"backend must be one of {', '.join(BACKENDS)}; got {asked!r}")
    if asked == "torch":
        return "torch"
    if asked == "flash" and (flash or backend == "flash"):
        if not flash:
            raise BackendError(f"{op} has no flash backend: use backend='auto', 'triton' or 'torch'")
        return "flash"
    device = tensors[0].device
    if asked in ("auto", "flash") and device.type != "cuda":
        return "torch"
    obstacle = _triton_obstacle(device, tuple(t.dtype for t in tensors), dims)
    if obstacle is None:
        return "triton"
    if asked == "triton":
        raise BackendError(f"{op}: the triton backend cannot run this call: {obstacle}. Use backend='auto' or 'torch'")
    if not torch.compiler.is_compiling():
        _warn_once(f"{op}: falling back to the torch reference, which is slow on a GPU: {obstacle}")
    return "torch"


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def through_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether a call must go through its registered torch op rather than straight to the launcher.

    It must while torch.compile traces, and when autograd records: the registered op refuses to be differentiated,
    where a bare launch would silently give no gradient.
    """
    if torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
