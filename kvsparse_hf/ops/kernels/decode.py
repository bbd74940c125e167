"""Attention of one query token over a ragged flat store: split over the keys, query heads of a group packed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import (
    LN2,
    add_sink,
    attend_tile,
    contiguous,
    dot_precision,
    inner_contiguous,
    join_previous,
    launch_options,
    multiprocessors,
    next_power_of_2,
    normalise,
    require_contiguous,
)
from .merge import merge_splits, partial_buffers
from .plan import plan_decode


@triton.jit
def _decode_attention_kernel(
    Q, K, V, Start, Length, Pages, Sinks, Out, Lse, Logits, Part, PartMax, PartSum,
    q_stride_b, q_stride_h, width, num_pages, page_stride, tokens_per_split, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_LOGITS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (split, KV head, batch row). ``width`` counts the candidate keys: max_len, or the slots of all listed pages.

    PAGE_SIZE == 0 reads the segment in order; otherwise key i is slot i % PAGE_SIZE of page Pages[i // PAGE_SIZE].
    """
    join_previous(DEPENDENT, SPLIT)
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    unit = batch * HEADS + head
    length = tl.load(Length + unit).to(tl.int32)
    first_row = tl.load(Start + unit).to(tl.int64)
    lo = split * tokens_per_split
    end = tl.minimum(lo + tokens_per_split, width)
    hi = end
    if PAGE_SIZE == 0:
        hi = tl.minimum(end, length)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    g_ok = g < GROUP
    head_q = head * GROUP + g
    row_q = unit * GROUP + g  # row of [B, Hq, ...] outputs
    nothing = tl.full([BLOCK_G], float("-inf"), tl.float32)
    if HAS_LOGITS:
        for n in range(lo + tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N) * BLOCK_N, end, BLOCK_N):
            offs = n + tl.arange(0, BLOCK_N)
            tl.store(Logits + row_q[:, None] * width + offs[None, :], nothing[:, None],
                     mask=g_ok[:, None] & (offs < end)[None, :])
    if SPLIT:
        if lo >= hi:
            tl.store(PartMax + row_q * splits + split, nothing, mask=g_ok)
            return

    q_rows = Q + batch * q_stride_b + head_q.to(tl.int64) * q_stride_h
    q = tl.load(q_rows[:, None] + d[None, :], mask=g_ok[:, None] & (d < D)[None, :], other=0.0)
    q = q.to(K.dtype.element_ty)
    peak = nothing
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for n in range(lo, hi, BLOCK_N):
        offs = n + tl.arange(0, BLOCK_N)
        ok = offs < hi
        if PAGE_SIZE == 0:
            rows = first_row + offs
        else:
            page = tl.load(Pages + unit * num_pages + offs // PAGE_SIZE, mask=ok, other=-1)
            slot = page * PAGE_SIZE + offs % PAGE_SIZE
            ok = (page >= 0) & (slot < length)
            rows = first_row + page * page_stride + offs % PAGE_SIZE
        k_ok = ok[:, None]
        v_ok = ok[:, None]
        if D != BLOCK_D:
            k_ok = k_ok & (d < D)[None, :]
        if DV != BLOCK_DV:
            v_ok = v_ok & (dv < DV)[None, :]
        k = tl.load(K + rows[:, None] * D + d[None, :], mask=k_ok, other=0.0)
        v = tl.load(V + rows[:, None] * DV + dv[None, :], mask=v_ok, other=0.0)
        acc, peak, total, logits = attend_tile(q, k, v, ok[None, :], acc, peak, total, scale, softcap,
                                               HAS_SOFTCAP, True, PRECISION)
        if HAS_LOGITS:
            tl.store(Logits + row_q[:, None] * width + offs[None, :], logits * LN2,
                     mask=g_ok[:, None] & (offs < end)[None, :])

    if SPLIT:
        at = row_q * splits + split
        tl.store(PartMax + at, peak, mask=g_ok)
        tl.store(PartSum + at, total, mask=g_ok)
        tl.store(Part + at[:, None] * DV + dv[None, :], acc, mask=g_ok[:, None] & (dv < DV)[None, :])
    else:
        if HAS_SINKS:
            acc, peak, total = add_sink(acc, peak, total, tl.load(Sinks + head_q, mask=g_ok, other=0.0))
        out, lse = normalise(acc, peak, total)
        tl.store(Out + row_q[:, None] * DV + dv[None, :], out.to(Out.dtype.element_ty),
                 mask=g_ok[:, None] & (dv < DV)[None, :])
        if HAS_LSE:
            tl.store(Lse + row_q, lse, mask=g_ok)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    *,
    max_len: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    pages: Tensor | None,
    page_size: int,
    page_stride: int,
    return_lse: bool,
    return_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`kvsparse_hf.ops.decode_attention`; results not asked for are empty."""
    batch, heads_q, dim = q.shape
    heads, dim_v = start.shape[1], v.shape[-1]
    group = heads_q // heads
    require_contiguous(k=k, v=v)
    q = inner_contiguous(q)
    start, length, pages, sinks = contiguous(start, length, pages, sinks)
    width = max_len if pages is None else pages.shape[-1] * page_size
    out = torch.empty(batch, heads_q, dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads_q) if return_lse else (0,), dtype=torch.float32, device=q.device)
    logits = torch.empty((batch, heads_q, width) if return_logits else (0,), dtype=torch.float32, device=q.device)

    block_d, block_dv = max(16, next_power_of_2(dim)), max(16, next_power_of_2(dim_v))
    plan = plan_decode(width, batch * heads, max(block_d, block_dv), k.element_size(), multiprocessors(q.device),
                       paged=pages is not None)
    split = plan.splits > 1
    parts = partial_buffers(batch * heads_q, plan.splits, dim_v, q.device) if split else (None, None, None)
    _decode_attention_kernel[(plan.splits, heads, batch)](
        q, k, v, start, length, pages, sinks, out, lse, logits, *parts,
        q.stride(0), q.stride(1), width, 0 if pages is None else pages.shape[-1], page_stride or page_size,
        plan.tokens,
        scale, softcap,
        HEADS=heads, GROUP=group, D=dim, DV=dim_v, PAGE_SIZE=0 if pages is None else page_size,
        BLOCK_G=max(16, next_power_of_2(group)), BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_N=plan.tile.keys,
        HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None, HAS_LSE=return_lse, HAS_LOGITS=return_logits,
        SPLIT=split, PRECISION=dot_precision(k.dtype), **launch_options(q.device), num_warps=plan.tile.warps,
        num_stages=plan.tile.stages,
    )
    if split:
        merge_splits(parts, sinks, None, out.unsqueeze(2), lse.unsqueeze(-1) if return_lse else None)
    return out, lse, logits
