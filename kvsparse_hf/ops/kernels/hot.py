"""The hot buffer over a host pool: the append of a token, the plan of a step, and the fetch of what it misses."""

from __future__ import annotations

import torch
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

FETCH_PROGRAMS = 32  # enough to fill the link with 8 KiB each in flight, few enough to leave the chip to other kernels
_TILE_BYTES = 8192
_UNITS = 1024
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _hot_append_kernel(
    Hot, Host, PageTable, SlotPage, Stamp, Tick, Length, Visible, KNew, VNew, Summary,
    k_stride_b, k_stride_h, v_stride_b, v_stride_h, num_pages, slots, capacity, pinned,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr, HAS_HOST: tl.constexpr, HAS_SUMMARY: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (KV head, batch row)."""
    join_previous(DEPENDENT, True)
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    unit = batch * HEADS + head
    length = tl.load(Length + unit)
    room = length < capacity
    fill = length % PAGE_SIZE
    page = length // PAGE_SIZE
    PAGE: tl.constexpr = 2 * PAGE_SIZE * D
    tail = Hot + (unit * slots + slots - 1) * PAGE
    if room & (fill == 0) & (length > 0):
        # The newest page is full: it goes to the host, and to the least recently used slot.
        old = page - 1
        s = tl.arange(0, BLOCK_S)
        stamp = tl.load(Stamp + unit * slots + s, mask=(s >= pinned) & (s < slots - 1), other=_LAST)
        oldest = tl.min(tl.where(stamp == tl.min(stamp, 0), s, BLOCK_S), 0)
        target = tl.where(old < pinned, old, oldest)
        gone = tl.load(SlotPage + unit * slots + target)
        tl.store(PageTable + unit * num_pages + gone, -1, mask=gone >= 0)
        tl.store(PageTable + unit * num_pages + old, target)
        tl.store(SlotPage + unit * slots + target, old)
        tl.store(Stamp + unit * slots + target, tl.load(Tick + unit))
        to_slot = Hot + (unit * slots + target) * PAGE
        for first in range(0, PAGE, BLOCK):
            e = first + tl.arange(0, BLOCK)
            values = tl.load(tail + e, mask=e < PAGE)
            if HAS_HOST:
                tl.store(Host + (unit * num_pages + old) * PAGE + e, values, mask=e < PAGE)
            tl.store(to_slot + e, values, mask=e < PAGE)
        tl.debug_barrier()  # the page was read before its first row is overwritten

    d = tl.arange(0, BLOCK_D)
    key = tl.load(KNew + batch * k_stride_b + head * k_stride_h + d, mask=d < D).to(Hot.dtype.element_ty)
    value = tl.load(VNew + batch * v_stride_b + head * v_stride_h + d, mask=d < D).to(Hot.dtype.element_ty)
    tl.store(tail + fill * D + d, key, mask=(d < D) & room)
    tl.store(tail + (PAGE_SIZE + fill) * D + d, value, mask=(d < D) & room)
    tl.store(SlotPage + unit * slots + slots - 1, page, mask=room)
    tl.store(PageTable + unit * num_pages + page, slots - 1, mask=room)
    tl.store(Length + unit, length + 1, mask=room)
    tl.store(Visible + unit, (slots - 1) * PAGE_SIZE + fill + 1, mask=room)

    if HAS_SUMMARY:
        high = Summary + (unit * num_pages + page) * 2 * D + d
        low = high + D
        key = key.to(Summary.dtype.element_ty)
        ok = (d < D) & room
        old_high = tl.load(high, mask=ok)
        old_low = tl.load(low, mask=ok)
        alone = fill == 0
        tl.store(high, tl.where(alone | (key > old_high), key, old_high), mask=ok)
        tl.store(low, tl.where(alone | (key < old_low), key, old_low), mask=ok)


def hot_append(
    hot: Tensor,
    host: Tensor | None,
    page_table: Tensor,
    slot_page: Tensor,
    stamp: Tensor,
    tick: Tensor,
    length: Tensor,
    visible: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    capacity: int,
    pinned: int,
    summary: Tensor | None,
) -> None:
    """See :func:`kvsparse_hf.ops.hot_append`."""
    batch, heads, slots, _, size, dim = hot.shape
    require_contiguous(hot=hot, host=host, page_table=page_table, slot_page=slot_page, stamp=stamp, length=length,
                       visible=visible, summary=summary)
    k_new, v_new = inner_contiguous(k_new), inner_contiguous(v_new)
    _hot_append_kernel[(heads, batch)](
        hot, host, page_table, slot_page, stamp, tick, length, visible, k_new, v_new, summary,
        k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1), page_table.shape[2], slots, capacity, pinned,
        HEADS=heads, D=dim, PAGE_SIZE=size, BLOCK_D=next_power_of_2(dim), BLOCK_S=next_power_of_2(slots),
        BLOCK=min(next_power_of_2(2 * size * dim), 4096), HAS_HOST=host is not None, HAS_SUMMARY=summary is not None, num_warps=4,
        **launch_options(hot.device),
    )


@triton.jit
def _hot_plan_kernel(
    Pages, PageTable, SlotPage, Stamp, Tick, Counters, Slots, MissPage, MissSlot, MissCount,
    listed, num_pages, slots, pinned,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (batch row, KV head): it alone reads and writes its tables."""
    join_previous(DEPENDENT, True)
    unit = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    s = tl.arange(0, BLOCK_S)
    lists = unit * listed + k
    now = tl.load(Tick + unit) + 1
    pages = tl.load(Pages + lists, mask=k < listed, other=-1)
    valid = pages >= 0
    found = tl.load(PageTable + unit * num_pages + pages, mask=valid, other=-1)
    hit = found >= 0
    miss = valid & (found < 0)
    misses = tl.sum(miss.to(tl.int32), 0)
    tl.store(Stamp + unit * slots + found, now, mask=hit)
    new = found
    if misses > 0:
        tl.debug_barrier()  # the stamps of the hits are in memory
        open_ = (s >= pinned) & (s < slots - 1)
        stamp = tl.load(Stamp + unit * slots + s, mask=open_, other=_LAST)
        stamp = tl.where(stamp == now, _LAST, stamp)
        # The stamp of the last slot to be given up: the smallest that enough slots do not exceed.
        lo = tl.min(stamp, 0)
        hi = now - 1
        while lo < hi:
            middle = lo + (hi - lo) // 2
            enough = tl.sum((stamp <= middle).to(tl.int32), 0) >= misses
            hi = tl.where(enough, middle, hi)
            lo = tl.where(enough, lo, middle + 1)
        older = stamp < lo
        tied = stamp == lo
        room = misses - tl.sum(older.to(tl.int32), 0)
        given = older | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
        place = tl.cumsum(given.to(tl.int32), 0) - 1
        gone = tl.load(SlotPage + unit * slots + s, mask=given, other=-1)
        tl.store(PageTable + unit * num_pages + gone, -1, mask=given & (gone >= 0))
        tl.store(Stamp + unit * slots + s, now, mask=given)
        tl.store(MissSlot + unit * listed + place, s, mask=given)
        tl.debug_barrier()  # the slots that were given up are listed, and their pages were read
        rank = tl.cumsum(miss.to(tl.int32), 0) - 1
        new = tl.load(MissSlot + unit * listed + rank, mask=miss, other=-1)
        tl.store(PageTable + unit * num_pages + pages, new, mask=miss)
        tl.store(SlotPage + unit * slots + new, pages, mask=miss)
        tl.store(MissPage + unit * listed + rank, pages, mask=miss)
    behind = (k >= misses) & (k < listed)
    nothing = tl.full([BLOCK_K], -1, tl.int32)
    tl.store(MissPage + lists, nothing, mask=behind)
    tl.store(MissSlot + lists, nothing, mask=behind)
    tl.store(Slots + lists, tl.where(hit, found, new), mask=k < listed)
    tl.store(MissCount + unit, misses)
    tl.store(Tick + unit, now)
    hits = tl.sum(hit.to(tl.int32), 0)
    tl.store(Counters + unit * 2, tl.load(Counters + unit * 2) + hits)
    tl.store(Counters + unit * 2 + 1, tl.load(Counters + unit * 2 + 1) + misses)


def hot_plan(
    pages: Tensor, page_table: Tensor, slot_page: Tensor, stamp: Tensor, tick: Tensor, counters: Tensor, pinned: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`kvsparse_hf.ops.hot_plan`."""
    batch, heads, listed = pages.shape
    slots = stamp.shape[-1]
    require_contiguous(page_table=page_table, slot_page=slot_page, stamp=stamp, tick=tick, counters=counters)
    (pages,) = contiguous(pages)
    out, miss_page, miss_slot = (torch.empty_like(pages) for _ in range(3))
    miss_count = torch.empty(batch, heads, dtype=torch.int32, device=pages.device)
    block_k, block_s = next_power_of_2(listed), next_power_of_2(slots)
    widest = max(block_k, block_s)
    _hot_plan_kernel[(batch * heads,)](
        pages, page_table, slot_page, stamp, tick, counters, out, miss_page, miss_slot, miss_count,
        listed, page_table.shape[-1], slots, pinned, BLOCK_K=block_k, BLOCK_S=block_s,
        num_warps=2 if widest <= 256 else 4 if widest <= 1024 else 8, **launch_options(pages.device),
    )
    return out, miss_page, miss_slot, miss_count


@triton.jit
def _hot_fetch_kernel(
    Host, Hot, MissPage, MissSlot, MissCount, units, listed, num_pages, slots,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Some of all misses: they are numbered through, and dealt out to the programs ROWS at a time.

    The number of a miss leads to its unit by the ends of the units' shares, so that any program can find any miss.
    """
    join_previous(DEPENDENT, False)
    step = tl.num_programs(0) * ROWS
    for first in range(0, units, UNITS):
        u = first + tl.arange(0, UNITS)
        ends = tl.cumsum(tl.load(MissCount + u, mask=u < units, other=0), 0)
        total = tl.max(ends, 0)
        for begin in range(tl.program_id(0) * ROWS, total, step):
            number = begin + tl.arange(0, ROWS)
            ok = number < total
            before = ends[None, :] <= number[:, None]
            unit = (first + tl.sum(before.to(tl.int32), 1)).to(tl.int64)
            entry = unit * listed + number - tl.max(tl.where(before, ends[None, :], 0), 1)
            page = tl.load(MissPage + entry, mask=ok, other=0)
            slot = tl.load(MissSlot + entry, mask=ok, other=0)
            source = Host + ((unit * num_pages + page) * PAGE)[:, None]
            target = Hot + ((unit * slots + slot) * PAGE)[:, None]
            for part in range(0, PAGE, BLOCK):
                e = part + tl.arange(0, BLOCK)[None, :]
                mask = ok[:, None] & (e < PAGE)
                tl.store(target + e, tl.load(source + e, mask=mask), mask=mask)


def hot_fetch(host: Tensor, hot: Tensor, miss_page: Tensor, miss_slot: Tensor, miss_count: Tensor) -> None:
    """See :func:`kvsparse_hf.ops.hot_fetch`."""
    require_contiguous(host=host, hot=hot)
    miss_page, miss_slot, miss_count = contiguous(miss_page, miss_slot, miss_count)
    page = hot.shape[3] * hot.shape[4] * hot.shape[5]
    most = _TILE_BYTES // hot.element_size()
    block = min(next_power_of_2(page), most)
    units = miss_count.numel()
    _hot_fetch_kernel[(FETCH_PROGRAMS,)](
        host, hot, miss_page, miss_slot, miss_count, units, miss_page.shape[-1], host.shape[2], hot.shape[2],
        PAGE=page, BLOCK=block, ROWS=max(1, most // block), UNITS=min(next_power_of_2(units), _UNITS), num_warps=4,
        **launch_options(hot.device),
    )
