"""Attention over a `PagedStore`."""

import torch
from torch import Tensor

from .. import ops
from .hot import PagedStore


def attend_slots(store: PagedStore, query: Tensor, slots: Tensor, options: dict) -> tuple[Tensor, Tensor | None]:
    """Attention of `query` `[B, Hq, D]` over the tokens in some slots `[B, H, K]`, -1 for none.

    Args:
        options: of `ops.decode_attention`: `scale`, `softcap`, `sinks`, `return_lse`, `backend`.

    Returns:
        `[B, Hq, D]`, and its log-sum-exp `[B, Hq]` where it was asked for.
    """
    rows = 2 * store.page_size
    out, lse, _ = ops.decode_attention(
        query,
        store.keys,
        store.values,
        store.firsts(store.slots * rows),
        store.visible,
        max_len=store.slots * store.page_size,
        pages=slots,
        page_size=store.page_size,
        page_stride=rows,
        **options,
    )
    return out, lse


def attend_all(store: PagedStore, query: Tensor, options: dict) -> Tensor:
    """Attention over everything, `[B, Hq, D]`: the full pages are read from the host in place, the newest one from its slot."""
    if store.staged:
        return _attend_staged(store, query, options)
    rows = 2 * store.page_size
    pool = store.host.view(-1, store.host.shape[-1])
    far = ops.decode_attention(
        query,
        pool,
        pool[store.page_size :],
        store.firsts(store.pages * rows),
        (store.length - 1).clamp(min=0) // store.page_size * store.page_size,
        max_len=store.max_capacity,
        pages=torch.arange(store.pages, dtype=torch.int32, device=query.device).expand(store.batch, store.heads, -1),
        page_size=store.page_size,
        page_stride=rows,
        **{**options, "sinks": None, "return_lse": True},  # learned sinks count once, below
    )
    newest = torch.full_like(store.length, store.slots - 1).unsqueeze(-1)
    near = attend_slots(store, query, newest, {**options, "return_lse": True})
    return ops.merge_attention([far[0], near[0]], [far[1], near[1]])[0]


@torch.compiler.disable
def _attend_staged(store: PagedStore, query: Tensor, options: dict) -> Tensor:
    """Attention over everything, which comes to the device for it."""
    dense = store.dense(store.max_capacity)
    return ops.decode_attention(
        query, dense.keys, dense.values, dense.start, dense.length, max_len=dense.max_capacity, **options
    )[0]
