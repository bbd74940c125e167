"""Attention of a chunk of new tokens over a ragged flat store and, causally, over itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import (
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
from .plan import plan_chunk


@triton.jit
def _load_rows(base, rows, stride, cols, rows_ok, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[N, BLOCK] from rows of ``stride`` elements; masked entries are zeros."""
    at = base + rows[:, None] * stride + cols[None, :]
    if MASKED:
        if DIM != BLOCK:
            return tl.load(at, mask=rows_ok[:, None] & (cols < DIM)[None, :], other=0.0)
        return tl.load(at, mask=rows_ok[:, None], other=0.0)
    if DIM != BLOCK:
        return tl.load(at, mask=(cols < DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _attend_stored(q, K, V, first_row, lo, hi, acc, peak, total, scale, softcap,
                   D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                   BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Stored entries lo .. hi of one segment."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for n in range(lo, hi, BLOCK_N):
        offs = n + tl.arange(0, BLOCK_N)
        ok = offs < hi
        k = _load_rows(K, first_row + offs, D, d, ok, D, BLOCK_D, MASKED)
        v = _load_rows(V, first_row + offs, DV, dv, ok, DV, BLOCK_DV, MASKED)
        acc, peak, total, _ = attend_tile(q, k, v, ok[None, :], acc, peak, total, scale, softcap,
                                          HAS_SOFTCAP, MASKED, PRECISION)
    return acc, peak, total


@triton.jit
def _attend_new(q, token, K, V, k_stride_t, v_stride_t, lo, hi, pad, tokens, acc, peak, total, scale, softcap,
                D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """New tokens lo .. hi for query rows that stand at ``token`` [M]."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for n in range(lo, hi, BLOCK_N):
        offs = n + tl.arange(0, BLOCK_N)
        real = (offs >= pad) & (offs < tokens)
        k = _load_rows(K, offs.to(tl.int64), k_stride_t, d, real, D, BLOCK_D, MASKED)
        v = _load_rows(V, offs.to(tl.int64), v_stride_t, dv, real, DV, BLOCK_DV, MASKED)
        ok = real[None, :] & (offs[None, :] <= token[:, None])
        acc, peak, total, _ = attend_tile(q, k, v, ok, acc, peak, total, scale, softcap,
                                          HAS_SOFTCAP, MASKED, PRECISION)
    return acc, peak, total


@triton.jit
def _chunk_attention_kernel(
    Q, K, V, Start, Length, KNew, VNew, Pad, Sinks, Out, Lse, Part, PartMax, PartSum,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    out_stride_b, out_stride_h, out_stride_t, tokens, max_len, tokens_per_split, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_PAD: tl.constexpr, HAS_LSE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (block of query rows, split, KV head and batch row); a query row is token * GROUP + head of the group.

    With SPLIT the last split takes the new tokens and the others share the stored entries; otherwise one does all.
    """
    join_previous(DEPENDENT, SPLIT)
    # the blocks with the most new tokens to read come first, so that the last wave is of short ones
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    unit = tl.program_id(2).to(tl.int64)
    batch = unit // HEADS
    head = unit % HEADS
    first_row = tl.load(Start + unit).to(tl.int64)
    length = tl.minimum(tl.load(Length + unit).to(tl.int32), max_len)
    pad = 0
    if HAS_PAD:
        pad = tl.load(Pad + batch).to(tl.int32)

    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    row_ok = token < tokens
    head_q = head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_rows = Q + batch * q_stride_b + head_q * q_stride_h + token.to(tl.int64) * q_stride_t
    q = tl.load(q_rows[:, None] + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    q = q.to(K.dtype.element_ty)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    # the last token of the block decides whether anything but padding is here, the first where the diagonal begins
    token_lo = block * BLOCK_M // GROUP
    token_hi = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, tokens - 1)
    lo = 0
    hi = length
    new_hi = token_hi + 1
    if SPLIT:
        lo = split * tokens_per_split
        hi = tl.minimum(lo + tokens_per_split, length)
        if split == splits - 1:
            hi = lo
        else:
            new_hi = 0
    if token_hi < pad:
        hi = lo
        new_hi = 0
    whole = lo + tl.maximum(hi - lo, 0) // BLOCK_N * BLOCK_N
    acc, peak, total = _attend_stored(q, K, V, first_row, lo, whole, acc, peak, total, scale, softcap,
                                      D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, HAS_SOFTCAP, False, PRECISION)
    acc, peak, total = _attend_stored(q, K, V, first_row, whole, hi, acc, peak, total, scale, softcap,
                                      D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, HAS_SOFTCAP, True, PRECISION)

    k_base = KNew + batch * k_stride_b + head * k_stride_h
    v_base = VNew + batch * v_stride_b + head * v_stride_h
    inner = tl.cdiv(pad, BLOCK_N) * BLOCK_N  # first tile without padding
    diagonal = tl.maximum(inner, (token_lo + 1) // BLOCK_N * BLOCK_N)
    if HAS_PAD:
        acc, peak, total = _attend_new(q, token, k_base, v_base, k_stride_t, v_stride_t,
                                       pad // BLOCK_N * BLOCK_N, tl.minimum(inner, new_hi), pad, tokens,
                                       acc, peak, total, scale, softcap,
                                       D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, HAS_SOFTCAP, True, PRECISION)
    acc, peak, total = _attend_new(q, token, k_base, v_base, k_stride_t, v_stride_t,
                                   inner, tl.minimum(diagonal, new_hi), pad, tokens, acc, peak, total, scale, softcap,
                                   D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, HAS_SOFTCAP, False, PRECISION)
    acc, peak, total = _attend_new(q, token, k_base, v_base, k_stride_t, v_stride_t,
                                   diagonal, new_hi, pad, tokens, acc, peak, total, scale, softcap,
                                   D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, HAS_SOFTCAP, True, PRECISION)

    if SPLIT:
        at = ((batch * HEADS * GROUP + head_q) * tokens + token) * splits + split
        tl.store(PartMax + at, peak, mask=row_ok)
        tl.store(PartSum + at, total, mask=row_ok)
        tl.store(Part + at[:, None] * DV + dv[None, :], acc, mask=row_ok[:, None] & (dv < DV)[None, :])
    else:
        if HAS_SINKS:
            acc, peak, total = add_sink(acc, peak, total, tl.load(Sinks + head_q))
        out, lse = normalise(acc, peak, total)
        if HAS_PAD:
            out = tl.where((token >= pad)[:, None], out, 0.0)
            lse = tl.where(token >= pad, lse, float("-inf"))
        out_row = Out + batch * out_stride_b + head_q * out_stride_h + token.to(tl.int64) * out_stride_t
        tl.store(out_row[:, None] + dv[None, :], out.to(Out.dtype.element_ty),
                 mask=row_ok[:, None] & (dv < DV)[None, :])
        if HAS_LSE:
            tl.store(Lse + (batch * HEADS * GROUP + head_q) * tokens + token, lse, mask=row_ok)


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    *,
    max_len: int,
    scale: float,
    pad: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """See :func:`kvsparse_hf.ops.chunk_attention`.

    ``out`` lies in memory as [B, T, Hq, Dv], the order in which a model goes on; lse is empty when not asked for.
    """
    batch, heads_q, tokens, dim = q.shape
    heads, dim_v = start.shape[1], v.shape[-1]
    group = heads_q // heads
    require_contiguous(k=k, v=v)
    start, length, pad, sinks = contiguous(start, length, pad, sinks)
    q, k_new, v_new = inner_contiguous(q), inner_contiguous(k_new.to(k.dtype)), inner_contiguous(v_new.to(v.dtype))
    out = torch.empty(batch, tokens, heads_q, dim_v, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty((batch, heads_q, tokens) if return_lse else (0,), dtype=torch.float32, device=q.device)

    block_d, block_dv = max(16, next_power_of_2(dim)), max(16, next_power_of_2(dim_v))
    plan = plan_chunk(max_len, tokens * group, batch * heads, max(block_d, block_dv), k.element_size(),
                      multiprocessors(q.device))
    split = plan.splits > 1
    parts = partial_buffers(batch * heads_q * tokens, plan.splits, dim_v, q.device) if split else (None, None, None)
    _chunk_attention_kernel[(triton.cdiv(tokens * group, plan.rows), plan.splits, batch * heads)](
        q, k, v, start, length, k_new, v_new, pad, sinks, out, lse, *parts,
        *q.stride()[:3], *k_new.stride()[:3], *v_new.stride()[:3], *out.stride()[:3],
        tokens, max_len, plan.tokens, scale, softcap,
        HEADS=heads, GROUP=group, D=dim, DV=dim_v,
        BLOCK_M=plan.rows, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_N=plan.tile.keys,
        HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None, HAS_PAD=pad is not None, HAS_LSE=return_lse,
        SPLIT=split, PRECISION=dot_precision(k.dtype), **launch_options(q.device),
        num_warps=plan.tile.warps, num_stages=plan.tile.stages,
    )
    if split:
        merge_splits(parts, sinks, pad, out, lse if return_lse else None)
    return out, lse
