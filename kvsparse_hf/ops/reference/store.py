"""Writes into a flat store: one decode token, and the rows kept from a prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def _put_rows(dst: Tensor, rows: Tensor, new: Tensor, ok: Tensor) -> None:
    """``dst[rows[i]] = new[i]`` where ok[i], in place and without a shape that depends on data.

    Entries that are not ok repeat the write of the first one that is (or rewrite what is there when none is):
    their own row may be a neighbour's, so writing "the old value" back there would race with that neighbour.
    """
    first = ok.int().argmax(dim=0, keepdim=True)  # [1]
    target = torch.where(ok, rows, torch.where(ok.any(), rows[first], 0))
    fallback = torch.where(ok.any(), new[first].to(dst.dtype), dst[torch.zeros_like(first)])
    lift = (...,) + (None,) * (new.dim() - 1)
    dst[target] = torch.where(ok[lift], new.to(dst.dtype), fallback)


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
    slot_override: Tensor | None = None,
    summary: Tensor | None = None,
    page_size: int = 0,
) -> None:
    """Store one token per (row, KV head), in place: append while there is room, overwrite one entry afterwards.

    Args:
        k, v, pos: [R, D], [R, Dv], [R] int32, the flat store and the true position of each entry.
        k_new, v_new: [B, H, D], [B, H, Dv]; cast to the store's dtype.
        new_pos: [B] int32, position of the new token.
        start, capacity, length: [B, H], first row, size and fill of each segment; ``length`` advances while below
            capacity.
        pinned, cursor: [B, H] int32. A full segment overwrites slot pinned + cursor, and the cursor advances round the
            capacity - pinned unpinned slots.
        slot_override: [B, H] int32, the slot a full segment overwrites instead; the cursor then stays.
        summary: [B, H, P, 2, D], elementwise maximum (row 0) and minimum (row 1) of the keys of each page. The page of
            the written slot is updated; the first key of a page initialises it. Overwriting an entry only widens the
            bounds of its page, so they still hold.
        page_size: slots of a page; needed with ``summary``.

    A full segment whose entries are all pinned, and a slot outside [0, capacity), write nothing.
    """
    room = length < capacity
    free = capacity - pinned
    victim = pinned + cursor if slot_override is None else slot_override
    slot = torch.where(room, length, victim)
    ok = (slot >= 0) & (slot < capacity)
    rows = (start + slot).flatten()
    _put_rows(k, rows, k_new.flatten(0, 1), ok.flatten())
    _put_rows(v, rows, v_new.flatten(0, 1), ok.flatten())
    _put_rows(pos, rows, new_pos.unsqueeze(1).expand(ok.shape).flatten(), ok.flatten())
    if slot_override is None:
        cursor.copy_(torch.where(room, cursor, (cursor + 1) % free.clamp(min=1)))
    length.add_(room.to(length.dtype))
    if summary is not None:
        _update_summary(summary, k_new.to(k.dtype).to(summary.dtype), slot, ok, length, page_size)


def _update_summary(summary: Tensor, key: Tensor, slot: Tensor, ok: Tensor, length: Tensor, page_size: int) -> None:
    page = torch.where(ok, slot, 0) // page_size
    index = page[:, :, None, None, None].long().expand(-1, -1, 1, *summary.shape[3:])
    old = summary.gather(2, index).squeeze(2)  # [B, H, 2, D]
    alone = (length == slot + 1) & (slot % page_size == 0) if page_size > 1 else torch.ones_like(ok)
    pair = torch.stack([torch.maximum(old[:, :, 0], key), torch.minimum(old[:, :, 1], key)], dim=2)
    pair = torch.where(alone[:, :, None, None], key.unsqueeze(2), pair)
    summary.scatter_(2, index, torch.where(ok[:, :, None, None], pair, old).unsqueeze(2))


def gather_rows(src_k: Tensor, src_v: Tensor, index: Tensor, start: Tensor, dst_k: Tensor, dst_v: Tensor) -> None:
    """Copy chosen tokens of dense keys and values into the segments of a flat store, in place.

    Args:
        src_k, src_v: [B, H, N, D], [B, H, N, Dv].
        index: [B, H, M] int32 or int64, token of entry m; -1 leaves that entry as it is.
        start: [B, H], first row of each segment; entry m goes to row start + m.
        dst_k, dst_v: [R, D], [R, Dv], written.
    """
    if index.shape[-1] == 0:
        return
    ok = index >= 0
    take = index.clamp(min=0).long().unsqueeze(-1)
    rows = start.unsqueeze(-1) + torch.arange(index.shape[-1], device=index.device)
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        chosen = src.gather(2, take.expand(-1, -1, -1, src.shape[-1]))
        _put_rows(dst, rows.flatten(), chosen.flatten(0, 2), ok.flatten())
