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
from .plan import plan_pages


@triton.jit
def forced(scores, page, valid_pages, sink_pages, recent_pages):
    """-inf beyond the valid pages, +inf on the pages that must be chosen."""
    always = (page < sink_pages) | (page >= valid_pages - recent_pages)
    return tl.where(page < valid_pages, tl.where(always, float("inf"), scores), float("-inf"))


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


@triton.jit
def _page_softmax_kernel(
    Bounds, PartMax, PartSum, Length, Out, num_pages, blocks, page_size, sink_pages, recent_pages,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One (block of pages, KV head, batch row): softmax over all pages per query head, mean over the group."""
    join_previous(DEPENDENT, True)
    unit = tl.program_id(2).to(tl.int64) * HEADS + tl.program_id(1)
    page = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    g = tl.arange(0, BLOCK_G)
    row = unit * GROUP + g
    part = tl.arange(0, BLOCKS)
    part_mask = (g < GROUP)[:, None] & (part < blocks)[None, :]
    valid_pages = tl.cdiv(tl.load(Length + unit).to(tl.int32), page_size)
    bounds = tl.load(Bounds + row[:, None] * num_pages + page[None, :],
                     mask=(g < GROUP)[:, None] & (page < num_pages)[None, :], other=float("-inf"))
    peaks = tl.load(PartMax + row[:, None] * blocks + part[None, :], mask=part_mask, other=float("-inf"))
    masses = tl.load(PartSum + row[:, None] * blocks + part[None, :], mask=part_mask, other=0.0)
    peak = finite_or_zero(tl.max(peaks, 1))
    mass = tl.sum(masses * tl.exp2(peaks - peak[:, None]), 1)
    share = tl.exp2(bounds - peak[:, None]) / tl.where(mass > 0, mass, 1.0)[:, None]
    mean = tl.sum(share, 0) / GROUP
    tl.store(Out + unit * num_pages + page, forced(mean, page, valid_pages, sink_pages, recent_pages),
             mask=page < num_pages)


def softmax_over_blocks(
    bounds: Tensor,
    parts: Tensor,
    length: Tensor,
    out: Tensor,
    page_size: int,
    sink_pages: int,
    recent_pages: int,
    block: int,
) -> None:
    """Second pass of "softmax_mean": bounds [B, Hq, P] and parts [2, B * Hq, blocks] of the first, out [B, H, P]."""
    batch, heads, pages = out.shape
    group, blocks = bounds.shape[1] // heads, parts.shape[-1]
    _page_softmax_kernel[(triton.cdiv(pages, block), heads, batch)](
        bounds, parts[0], parts[1], length, out, pages, blocks, page_size, sink_pages, recent_pages,
        HEADS=heads, GROUP=group, BLOCK_G=next_power_of_2(group), BLOCKS=next_power_of_2(blocks), BLOCK_P=block,
        num_warps=4, **launch_options(out.device),
    )


def page_scores(
    q: Tensor,
    summary: Tensor,
    length: Tensor,
    *,
    page_size: int,
    scale: float,
    group_reduce: str,
    sink_pages: int,
    recent_pages: int,
) -> Tensor:
    """See :func:`kvsparse_hf.ops.page_scores`."""
    check_reduction(group_reduce)
    batch, heads, pages, _, dim = summary.shape
    group = q.shape[1] // heads
    require_contiguous(summary=summary)
    q, length = inner_contiguous(q), length.contiguous()
    out = torch.empty(batch, heads, pages, dtype=torch.float32, device=q.device)
    if pages == 0:
        return out
    softmax = group_reduce == "softmax_mean"
    plan = plan_pages(pages, batch * heads, summary.element_size(), multiprocessors(q.device))
    blocks = triton.cdiv(pages, plan.pages)
    parts = torch.empty(2, batch * heads * group, blocks, dtype=torch.float32, device=q.device) if softmax else None
    bounds = torch.empty(batch, heads * group, pages, dtype=torch.float32, device=q.device) if softmax else out
    _page_bound_kernel[(blocks, heads, batch)](
        q, summary, length, bounds, *((parts[0], parts[1]) if softmax else (None, None)),
        q.stride(0), q.stride(1), pages, page_size, scale, sink_pages, recent_pages,
        HEADS=heads, GROUP=group, D=dim, BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_D=max(16, next_power_of_2(dim)), BLOCK_P=plan.pages,
        REDUCE=group_reduce, EAGER=plan.eager, PRECISION=dot_precision(summary.dtype), **launch_options(q.device),
        num_warps=plan.warps, num_stages=1,
    )
    if softmax:
        softmax_over_blocks(bounds, parts, length, out, page_size, sink_pages, recent_pages, plan.softmax_pages)
    return out
