"""Exact top-k of each row of page scores, one program per row with the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import next_power_of_2

MAX_PAGES = 16384
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _ordered(x):
    """fp32 -> int32 that compares alike: negative numbers have their magnitude bits flipped."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _topk_pages_kernel(Scores, Out, pages, k, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr):
    """One row. The threshold is found by bisection on the ordered bits, each step one count over the row."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.arange(0, BLOCK_P)
    scores = tl.load(Scores + row * pages + page, mask=page < pages, other=float("-inf"))
    scores = tl.where(scores == 0, 0.0, scores)  # -0 ties with +0
    usable = scores > float("-inf")  # false for NaN too
    keys = tl.where(usable, _ordered(scores), _LOWEST)

    # invariant: count(keys >= lo) >= take, count(keys > hi) < take; so the take-th largest key is in lo .. hi
    take = tl.minimum(tl.sum(usable.to(tl.int32), 0), k)
    hi = tl.max(keys, 0)
    lo = tl.min(tl.where(usable, keys, hi), 0)
    while lo < hi:
        middle = (lo | hi) - ((lo ^ hi) >> 1)  # mean rounded up, without overflow
        count = tl.sum((keys >= middle).to(tl.int32), 0)
        lo = tl.where(count >= take, middle, lo)
        # exactly enough keys at or above the middle: no need to find the very key
        hi = tl.where(count == take, middle, tl.where(count > take, hi, middle - 1))
    above = usable & (keys > lo)
    tied = usable & (keys == lo)

    # one scan for both counts: keys above in the low half, ties in the high half
    ranks = tl.cumsum(above.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
    above_rank = ranks & 0xFFFF
    tied_rank = ranks >> 16
    room = take - tl.sum(above.to(tl.int32), 0)
    chosen = above | (tied & (tied_rank <= room))
    tl.store(Out + row * k + above_rank + tl.minimum(tied_rank, room) - 1, page, mask=chosen)
    for first in range(0, k, BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)
        tl.store(Out + row * k + slot, tl.full([BLOCK_K], -1, tl.int32), mask=(slot >= take) & (slot < k))


def _topk_large(scores: Tensor, k: int) -> Tensor:
    """Rows too long for the registers of one program: torch.topk on keys made unique by their index."""
    pages = scores.shape[-1]
    clean = torch.where(scores == 0, 0.0, torch.where(scores.isnan(), float("-inf"), scores))
    bits = clean.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    index = torch.arange(pages, device=scores.device)
    best = torch.topk((ordered << 32) | (pages - 1 - index), min(k, pages), dim=-1, sorted=False).values
    chosen = pages - 1 - (best & 0xFFFFFFFF)
    chosen = torch.where(clean.gather(-1, chosen) > float("-inf"), chosen, pages).sort(dim=-1).values
    chosen = torch.where(chosen == pages, -1, chosen).int()
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[-1]), value=-1)


def topk_pages(scores: Tensor, k: int) -> Tensor:
    """See :func:`kvsparse_hf.ops.topk_pages`."""
    batch, heads, pages = scores.shape
    scores = scores.float().contiguous()
    if pages > MAX_PAGES:
        return _topk_large(scores, k)
    out = torch.empty(batch, heads, k, dtype=torch.int32, device=scores.device)
    if k == 0:
        return out
    block = max(16, next_power_of_2(pages))
    _topk_pages_kernel[(batch * heads,)](
        scores, out, pages, k, BLOCK_P=block, BLOCK_K=256,
        num_warps=4 if block <= 2048 else 8 if block <= 4096 else 16,
    )
    return out
