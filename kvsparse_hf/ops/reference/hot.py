"""Two levels of memory: every page on the host, some of them in the slots of a hot buffer on the device.

``host`` is [B, H, N, 2, P, D] and ``hot`` [B, H, S, 2, P, D]: the P keys of a page, then its P values. The newest page is
always in the last slot, and nowhere else until it is full; the first ``pinned`` pages stay in the slots of their own
number once they are full. Tables: ``page_table`` [B, H, N], slot of a page, -1 = on the host alone; ``slot_page``
[B, H, S], page in a slot, -1 = none; ``stamp`` [B, H, S], number of the last plan that used the slot; ``tick`` [B, H],
plans so far; all int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .store import _put_rows, _update_summary

_LAST = torch.iinfo(torch.int32).max


def _replaceable(stamp: Tensor, pinned: int, busy: Tensor | None = None) -> Tensor:
    """[B, H, S] order in which slots are given up: the stamp, or the largest number where they may not be."""
    slots = stamp.shape[-1]
    slot = torch.arange(slots, device=stamp.device)
    kept = (slot < pinned) | (slot == slots - 1)
    return torch.where(kept if busy is None else kept | busy, _LAST, stamp)


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
    pinned: int = 0,
    summary: Tensor | None = None,
) -> None:
    """Store one token per (row, KV head) in the newest page.

    Where that page is full, it first goes to the host, and to the least recently used slot (or its own, below ``pinned``).

    Args:
        hot, host, page_table, slot_page, stamp, tick: see above; all but ``tick`` written. None for ``host`` where the
            caller has written full pages to it.
        length: [B, H] int32 tokens held, written; at ``capacity`` nothing is stored.
        visible: [B, H] int32, written: length in terms of slots, so that attention over slots masks what is not filled:
            (S - 1) * P + tokens of the newest page.
        k_new, v_new: [B, H, D]; cast to the buffer's dtype.
        capacity: tokens that a segment may hold, a multiple of P.
        pinned: first pages with a slot of their own.
        summary: [B, H, N, 2, D], elementwise maximum and minimum of the keys of each page, updated as in `store_token`.
    """
    slots, size = hot.shape[2], hot.shape[4]
    units = length.numel()
    unit = torch.arange(units, device=hot.device)
    room = length < capacity
    fill = length % size
    page = (length // size).long()
    moves = room & (fill == 0) & (length > 0)
    old = (page - 1).clamp(min=0)
    oldest = _replaceable(stamp, pinned).argmin(-1)
    target = torch.where(old < pinned, old, oldest)

    tail = hot[:, :, -1].flatten(0, 1)  # [U, 2, P, D]
    if host is not None:
        pool = host.view(units * host.shape[2], *host.shape[3:])
        _put_rows(pool, unit * host.shape[2] + old.flatten(), tail, moves.flatten())
    _put_rows(hot.view(units * slots, *hot.shape[3:]), unit * slots + target.flatten(), tail, moves.flatten())
    at = torch.where(moves, target, slots - 1).unsqueeze(-1)  # the last slot stands for "nothing", and is set below
    gone = slot_page.gather(2, at)
    gone = torch.where(moves.unsqueeze(-1), gone, -1)
    _set(page_table, gone, torch.full_like(gone, -1), "amin")
    _set(page_table, torch.where(moves, old, -1).unsqueeze(-1), target.unsqueeze(-1).int(), "amax", clear=True)
    slot_page.scatter_(2, at, torch.where(moves.unsqueeze(-1), old.unsqueeze(-1).int(), slot_page.gather(2, at)))
    stamp.scatter_(2, at, torch.where(moves.unsqueeze(-1), tick.unsqueeze(-1), stamp.gather(2, at)))
    slot_page[:, :, -1] = torch.where(room, page.int(), slot_page[:, :, -1])
    _set(page_table, torch.where(room, page, -1).unsqueeze(-1), torch.full_like(gone, slots - 1), "amax")

    row = (unit * slots + slots - 1) * 2 * size + fill.flatten()
    rows = hot.view(-1, hot.shape[-1])
    _put_rows(rows, row, k_new.flatten(0, 1), room.flatten())
    _put_rows(rows, row + size, v_new.flatten(0, 1), room.flatten())
    length.add_(room.to(length.dtype))
    visible.copy_((slots - 1) * size + torch.where(length > 0, (length - 1) % size + 1, 0))
    if summary is not None:
        key = k_new.to(hot.dtype).to(summary.dtype)
        _update_summary(summary, key, (length - 1).clamp(min=0), room, length, size)


def _set(table: Tensor, index: Tensor, value: Tensor, how: str, clear: bool = False) -> None:
    """``table[b, h, index] = value`` where index >= 0, for values below ("amin") or above ("amax") what is there.

    clear: set what is there to -1 first, so that any value is above it.
    """
    ok = index >= 0
    at = index.clamp(min=0).long()
    if clear:
        _set(table, index, torch.full_like(index, -1, dtype=table.dtype), "amin")
    idle = _LAST if how == "amin" else -_LAST
    table.scatter_reduce_(2, at, torch.where(ok, value.to(table.dtype), idle), how)


def hot_plan(
    pages: Tensor,
    page_table: Tensor,
    slot_page: Tensor,
    stamp: Tensor,
    tick: Tensor,
    counters: Tensor,
    pinned: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give every listed page a slot: the one it is in, or that of the least recently used page that is not listed.

    Slots that were used by an older plan go first, among equals the lower slot; the pages they held are on the host. The
    misses, in the order of the list, get these slots in ascending order. Whoever calls this fetches the misses
    (:func:`hot_fetch`) before anything reads the slots.

    Args:
        pages: [B, H, K] int32 page ids without repetition, anywhere -1 for none; K + pinned < S.
        page_table, slot_page, stamp, tick: see above; written.
        counters: [B, H, 2] int64, hits and misses, added to.
        pinned: first slots that are never given to another page.

    Returns:
        slots [B, H, K] int32, in the order of ``pages``, -1 for none; the pages and slots of the misses, [B, H, K] int32
        each, -1 behind the last; and how many there are, [B, H] int32.
    """
    slots, listed = stamp.shape[-1], pages.shape[-1]
    tick.add_(1)
    now = tick.unsqueeze(-1)
    valid = pages >= 0
    found = torch.where(valid, page_table.gather(2, pages.clamp(min=0).long()), -1)
    hit, miss = found >= 0, valid & (found < 0)
    _set(stamp, found, now.expand_as(found), "amax")
    rank = (miss.cumsum(2) - 1).clamp(0, slots - 1)
    count = miss.sum(2)

    order = torch.sort(_replaceable(stamp, pinned, stamp == now), dim=-1, stable=True).indices
    slot = torch.arange(slots, device=pages.device)
    given = torch.zeros_like(stamp, dtype=torch.bool).scatter(2, order, slot < count.unsqueeze(-1))
    victims = torch.where(given, slot, slots - 1).sort(dim=-1).values
    new = victims.gather(2, rank)

    gone = torch.where(given, slot_page, -1)
    _set(page_table, gone, torch.full_like(gone, -1), "amin")
    _set(page_table, torch.where(miss, pages, -1), new, "amax")
    slot_page.copy_(torch.where(given, -1, slot_page))
    _set(slot_page, torch.where(miss, new, -1), pages, "amax")
    stamp.copy_(torch.where(given, now, stamp))
    counters.add_(torch.stack((hit.sum(2), count), dim=-1))

    result = torch.where(hit, found, torch.where(miss, new, -1)).int()
    at = torch.where(miss, rank, listed)  # the last column takes what is no miss
    empty = pages.new_full((*pages.shape[:2], listed + 1), -1)
    miss_page = empty.scatter(2, at, torch.where(miss, pages, -1))[..., :listed]
    miss_slot = empty.scatter(2, at, torch.where(miss, new, -1).int())[..., :listed]
    return result, miss_page.contiguous(), miss_slot.contiguous(), count.int()


def hot_fetch(host: Tensor, hot: Tensor, miss_page: Tensor, miss_slot: Tensor, miss_count: Tensor) -> None:
    """Copy pages from the host to their slots.

    Args:
        host, hot: see above; ``hot`` is written.
        miss_page, miss_slot, miss_count: as :func:`hot_plan` returns them.
    """
    units, listed = miss_count.numel(), miss_page.shape[-1]
    unit = torch.arange(units, device=hot.device).unsqueeze(-1)
    ok = torch.arange(listed, device=hot.device) < miss_count.view(-1, 1)
    page = torch.where(ok, miss_page.view(units, listed), 0)
    slot = torch.where(ok, miss_slot.view(units, listed), 0)
    pages = host.view(units * host.shape[2], *host.shape[3:])[(unit * host.shape[2] + page).flatten()]
    _put_rows(hot.view(units * hot.shape[2], *hot.shape[3:]), (unit * hot.shape[2] + slot).flatten(), pages, ok.flatten())
