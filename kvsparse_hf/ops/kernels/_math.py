"""Device functions shared by the kernels, and small host helpers for their launches."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without programmatic dependent launch: the constexpr that guards the calls stays False
    gdc_launch_dependents = gdc_wait = None

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def join_previous(DEPENDENT: tl.constexpr, RELEASE: tl.constexpr):
    """First statement of every kernel: wait for the kernel before to complete; RELEASE lets the one behind be placed.

    With programmatic dependent launch a kernel is on the chip already when its predecessor drains, which hides the
    launch latency. Nothing is read or written before this, so memory is as ordered as without it. Long kernels do not
    release: what is placed beside them takes their room and waits.
    """
    if DEPENDENT:
        gdc_wait()
        if RELEASE:
            gdc_launch_dependents()


@triton.jit
def log2_logits(dots, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Dot products -> scaled (and capped) logits in units of log 2, so that the softmax needs exp2 only."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): no overflow that is not the right limit, at either end
        grown = tl.exp2(dots * (scale / softcap) * (2 * LOG2E))
        return (1 - 2 / (grown + 1)) * (softcap * LOG2E)
    return dots * (scale * LOG2E)


@triton.jit
def finite_or_zero(peak):
    """A running maximum that may still be -inf, made safe to subtract."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def attend_tile(q, k, v, ok, acc, peak, total, scale, softcap, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
                PRECISION: tl.constexpr):
    """One tile of online softmax attention.

    q [M, D], k [N, D], v [N, Dv], ok [M or 1, N]. Returns the updated acc [M, Dv], peak [M] and total [M], and the
    logits [M, N] in units of log 2.
    """
    logits = log2_logits(tl.dot(q, k.T, input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
    if MASKED:
        logits = tl.where(ok, logits, float("-inf"))
    peak_new = tl.maximum(peak, tl.max(logits, 1))
    safe = finite_or_zero(peak_new)
    shrink = tl.exp2(peak - safe)
    p = tl.exp2(logits - safe[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, peak_new, total, logits


@triton.jit
def add_sink(acc, peak, total, sink):
    """Let an extra logit (natural units) join the denominators: acc [M, Dv], peak, total, sink [M]."""
    sink = sink.to(tl.float32) * LOG2E
    peak_new = tl.maximum(peak, sink)
    safe = finite_or_zero(peak_new)
    shrink = tl.exp2(peak - safe)
    return acc * shrink[:, None], peak_new, total * shrink + tl.exp2(sink - safe)


@triton.jit
def normalise(acc, peak, total):
    """Output rows and their lse (natural log); rows that saw nothing give 0 and -inf."""
    empty = total == 0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    return out, lse


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 inputs are multiplied exactly, not as tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Data tensors may have any strides but the last one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def contiguous(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Tables and counters that are only read: the kernels index them without strides."""
    return tuple(None if t is None else t.contiguous() for t in tensors)


def require_contiguous(**tensors: torch.Tensor | None) -> None:
    """Stores and what is written in place: a copy would be the wrong one to write, or as large as the cache."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got shape {tuple(tensor.shape)}, strides {tensor.stride()}")


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@cache
def _device_facts(index: int) -> tuple[int, bool]:
    properties = torch.cuda.get_device_properties(index)
    dependent_launch = gdc_wait is not None and torch.version.hip is None and properties.major >= 9
    return properties.multi_processor_count, dependent_launch


def multiprocessors(device: torch.device) -> int:
    """Number of SMs; a few for the interpreter, so that it splits the keys too."""
    return _device_facts(device.index)[0] if device.type == "cuda" else 8


def launch_options(device: torch.device) -> dict:
    """Arguments that every launch takes: programmatic dependent launch where the device has it (see join_previous)."""
    if device.type == "cuda" and _device_facts(device.index)[1]:
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
