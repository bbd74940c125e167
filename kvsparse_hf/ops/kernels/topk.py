"""Exact top-k of each row of page scores, one program per row (or chunk of one) with all of it in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import join_previous, launch_options, next_power_of_2
from .bounds import Bounds, forced, mean_share
from .plan import TOPK_MOST, topk_chunk, topk_warps

COLUMNS = 16
_LOWEST = tl.constexpr(-(2**31))
_INFINITE = tl.constexpr(0x7F800000)  # +inf, ordered
_THIRD = tl.constexpr((2**32 + 2) // 3)  # the high half of a product with it is a third


@triton.jit
def _ordered(x):
    """fp32 -> int32 that compares alike: negative numbers have their magnitude bits flipped."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _count_two(keys, first, second):
    """How many keys are at or above each of two thresholds: one reduction, two counts in an int32."""
    packed = tl.sum((keys >= first).to(tl.int32) + (keys >= second).to(tl.int32) * 65536, 0)
    return packed & 0xFFFF, packed >> 16


@triton.jit
def _topk_pages_kernel(
    Scores, PartMax, PartSum, Length, Ids, Out, OutScores, pages, k, blocks, page_size, sink_pages, recent_pages,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_SCORES: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (row, chunk of it) of ROWS x COLUMNS scores; as a table only for the scans, which a few columns keep short.

    The threshold is found by trisection on the ordered bits; each step costs one reduction over the chunk.
    GROUP > 0: Scores are the bounds of so many query heads a row, whose softmax and mean are taken here.
    HAS_IDS: the indices to give for the scores, ascending. HAS_SCORES: also give the chosen scores, -inf behind them.
    """
    join_previous(DEPENDENT, True)
    row = tl.program_id(0).to(tl.int64)
    chunk = row * tl.num_programs(1) + tl.program_id(1)  # of the output
    page = tl.program_id(1) * ROWS * COLUMNS + tl.arange(0, ROWS * COLUMNS)
    if GROUP:
        valid_pages = tl.cdiv(tl.load(Length + row).to(tl.int32), page_size)
        scores = mean_share(Scores, PartMax, PartSum, row, page, pages, blocks, GROUP, BLOCKS)
        scores = forced(scores, page, valid_pages, sink_pages, recent_pages)
    else:
        scores = tl.load(Scores + row * pages + page, mask=page < pages, other=float("-inf"))
    scores = tl.where(scores == 0, 0.0, scores)  # -0 ties with +0
    usable = scores > float("-inf")  # false for NaN too
    keys = tl.where(usable, _ordered(scores), _LOWEST)
    # what must be taken (+inf) is not searched: it would stretch the range to all numbers there are
    found, must = _count_two(keys, _LOWEST + 1, _INFINITE)
    take = tl.minimum(found, k)
    hi = tl.max(tl.where(keys < _INFINITE, keys, _LOWEST), 0)
    lo = tl.min(tl.where(usable, keys, _INFINITE), 0)
    hi = tl.where(must >= take, _INFINITE, hi)
    lo = tl.where(must >= take, _INFINITE, lo)

    # invariant: count(keys >= lo) >= take > count(keys > hi), so the take-th largest key is in lo .. hi
    while lo < hi:
        third = tl.umulhi((hi - lo).to(tl.uint32, bitcast=True), _THIRD).to(tl.int32, bitcast=True)
        first = lo + tl.maximum(third, 1)
        second = tl.maximum(hi - third, first)
        count_first, count_second = _count_two(keys, first, second)
        lo = tl.where(count_second >= take, second, tl.where(count_first >= take, first, lo))
        hi = tl.where(count_second >= take, hi, tl.where(count_first >= take, second - 1, first - 1))
        # exactly enough keys at or above a threshold: no need to find the very key
        exact = ((count_second == take) & (lo == second)) | ((count_first == take) & (lo == first))
        hi = tl.where(exact, lo, hi)

    # above and tied in one scan: counts of keys above in the low half, of ties in the high half
    above = usable & (keys > lo)
    tied = usable & (keys == lo)
    packed = above.to(tl.int32) + tied.to(tl.int32) * 65536
    table = tl.reshape(packed, [ROWS, COLUMNS])
    sums = tl.sum(table, 1)
    ranks = tl.cumsum(table, 1) + (tl.cumsum(sums, 0) - sums)[:, None]
    ranks = tl.reshape(ranks, [ROWS * COLUMNS])
    room = take - (tl.sum(sums, 0) & 0xFFFF)
    tied_rank = ranks >> 16
    chosen = above | (tied & (tied_rank <= room))
    at = chunk * k + (ranks & 0xFFFF) + tl.minimum(tied_rank, room) - 1
    ids = page
    if HAS_IDS:
        ids = tl.load(Ids + row * pages + page, mask=chosen, other=-1)
    tl.store(Out + at, ids, mask=chosen)
    if HAS_SCORES:
        tl.store(OutScores + at, scores, mask=chosen)
    for begin in range(take // BLOCK_K * BLOCK_K, k, BLOCK_K):
        slot = begin + tl.arange(0, BLOCK_K)
        behind = (slot >= take) & (slot < k)
        tl.store(Out + chunk * k + slot, tl.full([BLOCK_K], -1, tl.int32), mask=behind)
        if HAS_SCORES:
            tl.store(OutScores + chunk * k + slot, tl.full([BLOCK_K], float("-inf"), tl.float32), mask=behind)


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


def _launch(
    scores: Tensor | Bounds, k: int, chunk: int, ids: Tensor | None = None, keep_scores: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Best k of every chunk of every row of scores [rows, n]: indices and scores [rows, chunks * k]."""
    bounds = scores if isinstance(scores, Bounds) else None
    rows, pages = bounds.shape if bounds else scores.shape
    device = (bounds.logits if bounds else scores).device
    block = max(2 * COLUMNS, next_power_of_2(chunk))
    chunks = triton.cdiv(pages, chunk)
    out = torch.empty(rows, chunks * k, dtype=torch.int32, device=device)
    kept = torch.empty(rows, chunks * k, dtype=torch.float32, device=device) if keep_scores else None
    source = bounds.arguments() if bounds else (scores, None, None, None)
    warps = topk_warps(block)
    numbers, constants = bounds.numbers(warps) if bounds else ((0, 1, 0, 0), dict(GROUP=0, BLOCKS=1))
    _topk_pages_kernel[(rows, chunks)](
        *source, ids, out, kept, pages, k, *numbers, **constants, ROWS=block // COLUMNS, COLUMNS=COLUMNS, BLOCK_K=256,
        HAS_IDS=ids is not None, HAS_SCORES=keep_scores, num_warps=warps, **launch_options(device),
    )
    return out, kept


def _topk(scores: Tensor | Bounds, k: int) -> Tensor:
    """Best k of every row of scores [rows, n]: indices [rows, k]."""
    pages = scores.shape[1]
    chunk = topk_chunk(pages, k)
    if chunk:
        ids, best = _launch(scores, k, chunk, keep_scores=True)
        while chunk := topk_chunk(best.shape[1], k):
            ids, best = _launch(best, k, chunk, ids, keep_scores=True)
        if best.shape[1] <= TOPK_MOST:
            return _launch(best, k, best.shape[1], ids)[0]
        chosen = _topk_large(best, k)
        return torch.where(chosen < 0, -1, ids.gather(-1, chosen.clamp(min=0).long()))
    if pages <= TOPK_MOST:
        return _launch(scores, k, pages)[0]
    return _topk_large(scores.reduced() if isinstance(scores, Bounds) else scores, k)


def topk_pages(scores: Tensor, k: int) -> Tensor:
    """See :func:`kvsparse_hf.ops.topk_pages`."""
    batch, heads, pages = scores.shape
    scores = scores.float().contiguous().view(batch * heads, pages)
    if k == 0 or pages == 0:
        return torch.full((batch, heads, k), -1, dtype=torch.int32, device=scores.device)
    return _topk(scores, k).view(batch, heads, k)


def topk_bounds(bounds: Bounds, k: int) -> Tensor:
    """Pages of the k largest scores that `bounds` reduce to: int32 [rows, k]."""
    if k == 0 or bounds.shape[1] == 0:
        return torch.full((bounds.shape[0], k), -1, dtype=torch.int32, device=bounds.logits.device)
    return _topk(bounds, k)
