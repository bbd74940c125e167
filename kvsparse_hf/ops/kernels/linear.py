"""The product of a few rows with a weight: it reads the weight once, and that is all its time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import contiguous, dot_precision, gdc_launch_dependents, gdc_wait, launch_options
from .plan import plan_linear


@triton.jit
def _few_rows_linear_kernel(
    X, Weight, Bias, Out, rows, features, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One block of output features of all rows. The weight is the left operand: it is the large one."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    m_ok = (m < rows)[None, :]
    n_ok = (n < features)[:, None]
    weight = Weight + n.to(tl.int64)[:, None] * inner + k[None, :]
    x = X + m[None, :] * inner + k[:, None]
    if DEPENDENT:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, inner, BLOCK_K):
        if EVEN:
            left = tl.load(weight + first)
            right = tl.load(x + first, mask=m_ok, other=0.0)
        else:
            k_ok = first + k < inner
            left = tl.load(weight + first, mask=n_ok & k_ok[None, :], other=0.0)
            right = tl.load(x + first, mask=m_ok & k_ok[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    if DEPENDENT:
        gdc_launch_dependents()  # late: what is placed beside this kernel takes room that its loads in flight need
    if HAS_BIAS:
        acc += tl.load(Bias + n, mask=n < features, other=0.0).to(tl.float32)[:, None]
    tl.store(Out + m[None, :] * features + n[:, None], acc.to(Out.dtype.element_ty), mask=m_ok & n_ok)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See :func:`kvsparse_hf.ops.few_rows_linear`."""
    features, inner = weight.shape
    x, weight, bias = contiguous(x, weight, bias)
    rows = x.numel() // inner
    out = torch.empty(*x.shape[:-1], features, dtype=x.dtype, device=x.device)
    plan = plan_linear(rows, weight.element_size())
    even = features % plan.features == 0 and inner % plan.inner == 0
    _few_rows_linear_kernel[(triton.cdiv(features, plan.features),)](
        x, weight, bias, out, rows, features, inner,
        BLOCK_M=plan.rows, BLOCK_N=plan.features, BLOCK_K=plan.inner, EVEN=even, HAS_BIAS=bias is not None,
        PRECISION=dot_precision(weight.dtype), num_warps=plan.warps, num_stages=plan.stages, **launch_options(x.device),
    )
    return out
