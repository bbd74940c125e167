"""Writes into a flat store: one decode token, and the rows kept from a prompt."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._math import (
    contiguous,
    inner_contiguous,
    join_previous,
    launch_options,
    next_power_of_2,
    require_contiguous,
)

GATHER_ROWS = 32


@triton.jit
def _store_token_kernel(
    K, V, Pos, KNew, VNew, NewPos, Start, Capacity, Length, Pinned, Cursor, Override, Summary,
    k_stride_b, k_stride_h, v_stride_b, v_stride_h, num_pages, page_size,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_OVERRIDE: tl.constexpr, HAS_SUMMARY: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (KV head, batch row): it alone reads and writes its counters."""
    join_previous(DEPENDENT, True)
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    unit = batch * HEADS + head
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    key = tl.load(KNew + batch * k_stride_b + head * k_stride_h + d, mask=d < D).to(K.dtype.element_ty)
    value = tl.load(VNew + batch * v_stride_b + head * v_stride_h + dv, mask=dv < DV).to(V.dtype.element_ty)
    position = tl.load(NewPos + batch)
    length = tl.load(Length + unit)
    capacity = tl.load(Capacity + unit)
    pinned = tl.load(Pinned + unit)
    cursor = tl.load(Cursor + unit)
    first_row = tl.load(Start + unit).to(tl.int64)

    room = length < capacity
    if HAS_OVERRIDE:
        victim = tl.load(Override + unit)
    else:
        victim = pinned + cursor
        tl.store(Cursor + unit, (cursor + 1) % tl.maximum(capacity - pinned, 1), mask=room == 0)
    slot = tl.where(room, length, victim)
    ok = (slot >= 0) & (slot < capacity)
    row = first_row + slot
    tl.store(K + row * D + d, key, mask=(d < D) & ok)
    tl.store(V + row * DV + dv, value, mask=(dv < DV) & ok)
    tl.store(Pos + row, position, mask=ok)
    tl.store(Length + unit, length + 1, mask=room)

    if HAS_SUMMARY:
        high = Summary + ((unit * num_pages + slot // page_size) * 2) * D + d
        low = high + D
        # the only key of its page replaces the bounds, any other widens them
        alone = (slot % page_size == 0) & ((tl.where(room, length + 1, length) == slot + 1) | (page_size == 1))
        key = key.to(Summary.dtype.element_ty)
        old_high = tl.load(high, mask=(d < D) & ok)
        old_low = tl.load(low, mask=(d < D) & ok)
        tl.store(high, tl.where(alone | (key > old_high), key, old_high), mask=(d < D) & ok)
        tl.store(low, tl.where(alone | (key < old_low), key, old_low), mask=(d < D) & ok)


def store_token(
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    new_pos: Tensor,
    start: Tensor,
    capacity: Tensor,
    length: Tensor,
    pinned: Tensor,
    cursor: Tensor,
    slot_override: Tensor | None,
    summary: Tensor | None,
    page_size: int,
) -> None:
    """See :func:`kvsparse_hf.ops.store_token`."""
    batch, heads, dim = k_new.shape
    dim_v = v_new.shape[-1]
    require_contiguous(k=k, v=v, pos=pos, length=length, cursor=cursor, summary=summary)
    k_new, v_new = inner_contiguous(k_new), inner_contiguous(v_new)
    new_pos, start, capacity, pinned, slot_override = contiguous(new_pos, start, capacity, pinned, slot_override)
    _store_token_kernel[(heads, batch)](
        k, v, pos, k_new, v_new, new_pos, start, capacity, length, pinned, cursor, slot_override, summary,
        k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1),
        0 if summary is None else summary.shape[2], page_size,
        HEADS=heads, D=dim, DV=dim_v, BLOCK_D=next_power_of_2(dim), BLOCK_DV=next_power_of_2(dim_v),
        HAS_OVERRIDE=slot_override is not None, HAS_SUMMARY=summary is not None, num_warps=1,
        **launch_options(k.device),
    )


@triton.jit
def _gather_rows_kernel(
    SrcK, SrcV, Index, Start, DstK, DstV,
    k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, entries,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (block of entries, KV head, batch row)."""
    join_previous(DEPENDENT, True)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    unit = batch * HEADS + head
    entry = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    index = tl.load(Index + unit * entries + entry, mask=entry < entries, other=-1).to(tl.int64)
    rows = tl.load(Start + unit).to(tl.int64) + entry
    ok = (index >= 0)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    dv = tl.arange(0, BLOCK_DV)[None, :]
    k = tl.load(SrcK + batch * k_stride_b + head * k_stride_h + index[:, None] * k_stride_n + d, mask=ok & (d < D))
    v = tl.load(SrcV + batch * v_stride_b + head * v_stride_h + index[:, None] * v_stride_n + dv, mask=ok & (dv < DV))
    tl.store(DstK + rows[:, None] * D + d, k.to(DstK.dtype.element_ty), mask=ok & (d < D))
    tl.store(DstV + rows[:, None] * DV + dv, v.to(DstV.dtype.element_ty), mask=ok & (dv < DV))


def gather_rows(src_k: Tensor, src_v: Tensor, index: Tensor, start: Tensor, dst_k: Tensor, dst_v: Tensor) -> None:
    """See :func:`kvsparse_hf.ops.gather_rows`."""
    batch, heads, entries = index.shape
    if entries == 0:
        return
    dim, dim_v = src_k.shape[-1], src_v.shape[-1]
    require_contiguous(dst_k=dst_k, dst_v=dst_v)
    src_k, src_v = inner_contiguous(src_k), inner_contiguous(src_v)
    index, start = contiguous(index, start)
    block = GATHER_ROWS
    _gather_rows_kernel[(triton.cdiv(entries, block), heads, batch)](
        src_k, src_v, index, start, dst_k, dst_v,
        *src_k.stride()[:3], *src_v.stride()[:3], entries,
        HEADS=heads, D=dim, DV=dim_v, BLOCK_D=next_power_of_2(dim), BLOCK_DV=next_power_of_2(dim_v), BLOCK_M=block,
        num_warps=4, **launch_options(dst_k.device),
    )
