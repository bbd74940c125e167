"""Upper bounds of the logits of each page, from elementwise maxima and minima of its keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference._common import check_reduction
from ._math import (
    LOG2E,
    dot_precision,
    finite_or_zero,
    inner_contiguous,
    join_previous,
    launch_options,
    multiprocessors,
    next_power_of_2,
    require_contiguous,
)
from .bounds import Bounds, forced
from .plan import plan_pages
from .topk import topk_bounds, topk_pages


@triton.jit
def _page_bound_kernel(
    Q, Summary, Length, Out, PartMax, PartSum,
    q_stride_b, q_stride_h, num_pages, page_size, scale, sink_pages, recent_pages,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    REDUCE: tl.constexpr, EAGER: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (block of pages, KV head, batch row).

    REDUCE "softmax_mean" writes the bounds of every query head [B, Hq, P] in units of log 2 and the softmax statistics
    of the block; "max" and "mean" write the final scores [B, H, P].
    """
    join_previous(DEPENDENT, True)
    block = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    unit = batch * HEADS + head
    page = block * BLOCK_P + tl.arange(0, BLOCK_P)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    g_ok = g < GROUP
    d_ok = d < D
    q = tl.load(Q + batch * q_stride_b + (head * GROUP + g)[:, None] * q_stride_h + d[None, :],
                mask=g_ok[:, None] & d_ok[None, :], other=0.0).to(Summary.dtype.element_ty)
    valid_pages = tl.cdiv(tl.load(Length + unit).to(tl.int32), page_size)
    mask = (page < num_pages)[:, None] & d_ok[None, :]
    if not EAGER:
        mask = mask & (page < valid_pages)[:, None]
    base = Summary + (unit * num_pages + page)[:, None] * (2 * D) + d[None, :]
    high = tl.load(base, mask=mask, other=0.0)
    low = tl.load(base + D, mask=mask, other=0.0)
    zero = tl.zeros_like(q)
    bound = tl.dot(tl.where(q > 0, q, zero), high.T, input_precision=PRECISION)
    bound = tl.dot(tl.where(q > 0, zero, q), low.T, bound, input_precision=PRECISION) * scale

    if REDUCE == "softmax_mean":
        bound = tl.where((page < valid_pages)[None, :], bound * LOG2E, float("-inf"))
        peak = tl.max(bound, 1)
        mass = tl.sum(tl.exp2(bound - finite_or_zero(peak)[:, None]), 1)
        row = unit * GROUP + g
        tl.store(Out + row[:, None] * num_pages + page[None, :], bound,
                 mask=g_ok[:, None] & (page < num_pages)[None, :])
        tl.store(PartMax + row * tl.num_programs(0) + block, peak, mask=g_ok)
        tl.store(PartSum + row * tl.num_programs(0) + block, mass, mask=g_ok)
    else:
        if REDUCE == "max":
            reduced = tl.max(tl.where(g_ok[:, None], bound, float("-inf")), 0)
        else:
            reduced = tl.sum(bound, 0) / GROUP
        tl.store(Out + unit * num_pages + page, forced(reduced, page, valid_pages, sink_pages, recent_pages),
                 mask=page < num_pages)


def _bound_pages(
    q: Tensor,
    summary: Tensor,
    length: Tensor,
    *,
    page_size: int,
    scale: float,
    group_reduce: str,
    sink_pages: int,
    recent_pages: int,
) -> Tensor | Bounds:
    """The first pass: final scores [B, H, P], or what "softmax_mean" has still to reduce."""
    check_reduction(group_reduce)
    batch, heads, pages, _, dim = summary.shape
    group = q.shape[1] // heads
    require_contiguous(summary=summary)
    q, length = inner_contiguous(q), length.contiguous()
    softmax = group_reduce == "softmax_mean"
    plan = plan_pages(pages, batch * heads, summary.element_size(), multiprocessors(q.device))
    blocks = triton.cdiv(pages, plan.pages)
    parts = torch.empty(2, batch * heads * group, blocks, dtype=torch.float32, device=q.device) if softmax else None
    out = torch.empty(batch, heads * (group if softmax else 1), pages, dtype=torch.float32, device=q.device)
    if pages:
        _page_bound_kernel[(blocks, heads, batch)](
            q, summary, length, out, *((parts[0], parts[1]) if softmax else (None, None)),
            q.stride(0), q.stride(1), pages, page_size, scale, sink_pages, recent_pages,
            HEADS=heads, GROUP=group, D=dim, BLOCK_G=max(16, next_power_of_2(group)),
            BLOCK_D=max(16, next_power_of_2(dim)), BLOCK_P=plan.pages,
            REDUCE=group_reduce, EAGER=plan.eager, PRECISION=dot_precision(summary.dtype), **launch_options(q.device),
            num_warps=plan.warps, num_stages=1,
        )
    return Bounds(out, parts, length, page_size, sink_pages, recent_pages, plan.softmax_pages) if softmax else out


def page_scores(q: Tensor, summary: Tensor, length: Tensor, **options) -> Tensor:
    """See :func:`kvsparse_hf.ops.page_scores`."""
    found = _bound_pages(q, summary, length, **options)
    return found.reduced().view(summary.shape[:3]) if isinstance(found, Bounds) else found


def choose_pages(q: Tensor, summary: Tensor, length: Tensor, k: int, **options) -> Tensor:
    """See :func:`kvsparse_hf.ops.choose_pages`."""
    found = _bound_pages(q, summary, length, **options)
    return topk_bounds(found, k).view(*summary.shape[:2], k) if isinstance(found, Bounds) else topk_pages(found, k)
