"""Exact top-k of each row of scores, one program per row with the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import join_previous, launch_options, next_power_of_2
from .plan import TOPK_MOST, plan_shares, topk_chunk, topk_warps
from .shares import BlockLogits, forced, mean_share, share_scores

COLUMNS = 16
_LOWEST = tl.constexpr(-(2**31))
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
    Scores, Ids, Out, OutScores, pages, k,
    PartMax, PartSum, Length, blocks, page_size, sink_pages, recent_pages,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_SCORES: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One (row, chunk of it), as ROWS x COLUMNS scores: a few columns in a row keep the scans short.

    The threshold is found by trisection on the ordered bits; each step costs one reduction over the chunk.
    HAS_IDS: the indices to give for the scores, ascending. HAS_SCORES: also give the chosen scores, -inf behind them.
    GROUP: Scores are logits of so many query heads, whose softmax is still to be taken; 0: they are scores.
    """
    join_previous(DEPENDENT, True)
    row = tl.program_id(0).to(tl.int64)
    chunk = row * tl.num_programs(1) + tl.program_id(1)  # of the output
    page = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :] + tl.program_id(1) * ROWS * COLUMNS
    if GROUP == 0:
        scores = tl.load(Scores + row * pages + page, mask=page < pages, other=float("-inf"))
    else:
        valid_pages = tl.cdiv(tl.load(Length + row).to(tl.int32), page_size)
        scores = mean_share(Scores, PartMax, PartSum, row, page, pages, blocks, GROUP, BLOCKS)
        scores = forced(scores, page, valid_pages, sink_pages, recent_pages)
    scores = tl.where(scores == 0, 0.0, scores)  # -0 ties with +0
    usable = scores > float("-inf")  # false for NaN too
    keys = tl.where(usable, _ordered(scores), _LOWEST)
    flat = tl.reshape(keys, [ROWS * COLUMNS], can_reorder=True)  # counting needs no order, and moves nothing
    take = tl.minimum(tl.sum((flat != _LOWEST).to(tl.int32), 0), k)
    hi = tl.max(flat, 0)
    lo = tl.min(tl.where(flat == _LOWEST, hi, flat), 0)

    # invariant: count(keys >= lo) >= take > count(keys > hi), so the take-th largest key is in lo .. hi
    while lo < hi:
        third = tl.umulhi((hi - lo).to(tl.uint32, bitcast=True), _THIRD).to(tl.int32, bitcast=True)
        first = lo + tl.maximum(third, 1)
        second = tl.maximum(hi - third, first)
        count_first, count_second = _count_two(flat, first, second)
        lo = tl.where(count_second >= take, second, tl.where(count_first >= take, first, lo))
        hi = tl.where(count_second >= take, hi, tl.where(count_first >= take, second - 1, first - 1))
        # exactly enough keys at or above a threshold: no need to find the very key
        exact = ((count_second == take) & (lo == second)) | ((count_first == take) & (lo == first))
        hi = tl.where(exact, lo, hi)

    # above and tied in one scan: counts of keys above in the low half, of ties in the high half
    above = usable & (keys > lo)
    tied = usable & (keys == lo)
    packed = above.to(tl.int32) + tied.to(tl.int32) * 65536
    sums = tl.sum(packed, 1)
    ranks = tl.cumsum(packed, 1) + (tl.cumsum(sums, 0) - sums)[:, None]
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
    source: Tensor | BlockLogits, rows: int, pages: int, k: int, chunk: int, ids: Tensor | None, keep_scores: bool
) -> tuple[Tensor, Tensor | None]:
    """Best k of every chunk of every row, of scores [rows, pages] or of what a first pass leads to: indices and scores
    [rows, chunks * k]."""
    scores, group, softmax = source, 0, (None, None, None, 0, 1, 0, 0)
    if isinstance(source, BlockLogits):
        scores, group = source.logits, source.group
        blocks = source.parts.shape[-1]
        softmax = (source.parts[0], source.parts[1], source.length, blocks, source.size, source.sinks, source.recent)
    block = max(2 * COLUMNS, next_power_of_2(chunk))
    chunks = triton.cdiv(pages, chunk)
    out = torch.empty(rows, chunks * k, dtype=torch.int32, device=scores.device)
    kept = torch.empty(rows, chunks * k, dtype=torch.float32, device=scores.device) if keep_scores else None
    _topk_pages_kernel[(rows, chunks)](
        scores, ids, out, kept, pages, k, *softmax, ROWS=block // COLUMNS, COLUMNS=COLUMNS, BLOCK_K=256,
        HAS_IDS=ids is not None, HAS_SCORES=keep_scores, GROUP=group, BLOCKS=next_power_of_2(softmax[3]),
        num_warps=topk_warps(block), **launch_options(scores.device),
    )
    return out, kept


def _topk(source: Tensor | BlockLogits, rows: int, pages: int, k: int) -> Tensor:
    chunk = topk_chunk(pages, k)
    if not chunk:
        return _launch(source, rows, pages, k, pages, None, False)[0]
    ids, best = _launch(source, rows, pages, k, chunk, None, True)
    return _launch(best, *best.shape, k, best.shape[-1], ids, False)[0]


def _in_registers(pages: int, k: int) -> bool:
    return pages <= TOPK_MOST or topk_chunk(pages, k) > 0


def topk_pages(scores: Tensor, k: int) -> Tensor:
    """See :func:`kvsparse_hf.ops.topk_pages`."""
    batch, heads, pages = scores.shape
    if k == 0 or pages == 0:
        return torch.full((batch, heads, k), -1, dtype=torch.int32, device=scores.device)
    scores, rows = scores.float().contiguous(), batch * heads
    best = _topk(scores, rows, pages, k) if _in_registers(pages, k) else _topk_large(scores.view(rows, pages), k)
    return best.view(batch, heads, k)


def scores_of(first: BlockLogits | Tensor) -> Tensor:
    """Scores [B, H, N] of a first pass; those that need no softmax as they are."""
    if isinstance(first, Tensor):
        return first
    if not first.logits.shape[-1]:
        return first.logits.new_empty((*first.length.shape, 0))
    return share_scores(first, plan_shares(first.logits.shape[-1], first.size))


def topk_of(first: BlockLogits | Tensor, k: int) -> Tensor:
    """Best k of a first pass, int32 [B, H, k]. The softmax is taken on the way, without a pass of its own."""
    if isinstance(first, Tensor):
        return topk_pages(first, k)
    pages = first.logits.shape[-1]
    if k == 0 or pages == 0 or not _in_registers(pages, k):
        return topk_pages(scores_of(first), k)
    batch, heads = first.length.shape
    return _topk(first, batch * heads, pages, k).view(batch, heads, k)
