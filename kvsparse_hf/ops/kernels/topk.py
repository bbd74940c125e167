"""Exact top-k of each row of page scores, one program per row (or chunk of one) with all of it in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import join_previous, launch_options
from .bounds import Bounds, forced, mean_share, share_offsets
from .plan import TOPK_MOST, topk_chunk, topk_tiles

_LOWEST = tl.constexpr(-(2**31))
_INFINITE = tl.constexpr(0x7F800000)  # +inf, ordered
_THIRD = tl.constexpr((2**32 + 2) // 3)  # the high half of a product with it is a third


@triton.jit
def _ordered(x):
    """fp32 -> int32 that compares alike: negative numbers have their magnitude bits flipped."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _keys_of(scores):
    """Scores as they are compared: -0 like +0, and what cannot be chosen (-inf, NaN) below all others."""
    return tl.where(scores > float("-inf"), _ordered(tl.where(scores == 0, 0.0, scores)), _LOWEST)


@triton.jit
def _count_two(keys, first, second):
    """How many keys [R, LANES] are at or above each of two thresholds: a lane's two counts in an int32, [LANES]."""
    return tl.sum((keys >= first).to(tl.int32) + (keys >= second).to(tl.int32) * 65536, 0)


@triton.jit
def _ranks(keys, threshold, R: tl.constexpr, LANES: tl.constexpr):
    """Running counts of the keys above the threshold (low half) and at it (high half), [R, LANES], and the counts of all."""
    packed = (keys > threshold).to(tl.int32) + (keys == threshold).to(tl.int32) * 65536
    table = tl.reshape(packed, [R * LANES // 32, 32])  # a row for each warp's registers
    sums = tl.sum(table, 1)
    before = tl.cumsum(sums, 0) - sums
    return tl.reshape(tl.cumsum(table, 1) + before[:, None], [R, LANES]), tl.sum(sums, 0)


@triton.jit
def _store_chosen(
    Ids, Out, OutScores, at, page, scores, keys, threshold, ranks, room, N: tl.constexpr, HAS_IDS: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """Writes the pages above the threshold and the first ``room`` of those at it, each at its rank."""
    tied_rank = ranks >> 16
    chosen = (keys > threshold) | ((keys == threshold) & (tied_rank <= room))
    at += (ranks & 0xFFFF) + tl.minimum(tied_rank, room) - 1
    # flat: of a table whose addresses follow no pattern, stores would first turn rows into columns
    at, chosen = tl.reshape(at, [N]), tl.reshape(chosen, [N])
    page = tl.reshape(page, [N])
    if HAS_IDS:
        page = tl.load(Ids + page, mask=chosen, other=-1)
    tl.store(Out + at, page, mask=chosen)
    if HAS_SCORES:
        tl.store(OutScores + at, tl.reshape(scores, [N]), mask=chosen)


@triton.jit
def _load_scores(Scores, offsets, row, page, pages, valid_pages, sink_pages, recent_pages, GROUP: tl.constexpr):
    """Scores that are stored, or (GROUP > 0) those that the bounds of so many query heads give."""
    if GROUP:
        return forced(mean_share(Scores, offsets, row, page, pages, GROUP), page, valid_pages, sink_pages, recent_pages)
    return tl.load(Scores + row * pages + page, mask=page < pages, other=float("-inf"))


@triton.jit(do_not_specialize=["pages"])
def _topk_pages_kernel(
    Scores, PartMax, PartSum, Length, Ids, Out, OutScores, pages, k, blocks, page_size, sink_pages, recent_pages,
    MAIN: tl.constexpr, TAIL: tl.constexpr, LANES: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    BLOCKS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SCORES: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (row, chunk of it) of (MAIN + TAIL) * LANES scores: two tiles, since one would have to be as long as a power of two.

    A tile is [R, LANES]: R registers of every lane, so that what goes over a lane's own scores moves nothing. (With `pages`
    specialized, loads would be of several neighbours at once, and lie otherwise.) The threshold is found by trisection on the
    ordered bits; each step costs one reduction over the lanes.
    HAS_IDS: the indices to give for the scores, ascending. HAS_SCORES: also give the chosen scores, -inf behind them.
    """
    join_previous(DEPENDENT, True)
    row = tl.program_id(0).to(tl.int64)
    chunk = row * tl.num_programs(1) + tl.program_id(1)  # of the output
    lane = tl.program_id(1) * ((MAIN + TAIL) * LANES) + tl.arange(0, LANES)[None, :]
    page = tl.arange(0, MAIN)[:, None] * LANES + lane
    offsets = row  # unless there are bounds, nothing is read of these two
    valid_pages = pages
    if GROUP:
        valid_pages = tl.cdiv(tl.load(Length + row).to(tl.int32), page_size)
        offsets = share_offsets(PartMax, PartSum, row, blocks, GROUP, BLOCKS)
    scores = _load_scores(Scores, offsets, row, page, pages, valid_pages, sink_pages, recent_pages, GROUP)
    keys = _keys_of(scores)
    # what must be taken (+inf) is not searched: it would stretch the range to all numbers there are
    counts = _count_two(keys, _LOWEST + 1, _INFINITE)
    highest = tl.max(tl.where(keys < _INFINITE, keys, _LOWEST), 0)
    lowest = tl.min(tl.where(keys > _LOWEST, keys, _INFINITE), 0)
    if TAIL:
        tail_page = (MAIN + tl.arange(0, TAIL))[:, None] * LANES + lane
        tail_scores = _load_scores(Scores, offsets, row, tail_page, pages, valid_pages, sink_pages, recent_pages, GROUP)
        tail = _keys_of(tail_scores)
        counts += _count_two(tail, _LOWEST + 1, _INFINITE)
        highest = tl.maximum(highest, tl.max(tl.where(tail < _INFINITE, tail, _LOWEST), 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(tail > _LOWEST, tail, _INFINITE), 0))
    count = tl.sum(counts, 0)
    take = tl.minimum(count & 0xFFFF, k)
    only_forced = (count >> 16) >= take
    hi = tl.where(only_forced, _INFINITE, tl.max(highest, 0))
    lo = tl.where(only_forced, _INFINITE, tl.min(lowest, 0))

    # invariant: count(keys >= lo) >= take > count(keys > hi), so the take-th largest key is in lo .. hi
    while lo < hi:
        third = tl.umulhi((hi - lo).to(tl.uint32, bitcast=True), _THIRD).to(tl.int32, bitcast=True)
        first = lo + tl.maximum(third, 1)
        second = tl.maximum(hi - third, first)
        counts = _count_two(keys, first, second)
        if TAIL:
            counts += _count_two(tail, first, second)
        count = tl.sum(counts, 0)
        count_first = count & 0xFFFF
        count_second = count >> 16
        lo = tl.where(count_second >= take, second, tl.where(count_first >= take, first, lo))
        hi = tl.where(count_second >= take, hi, tl.where(count_first >= take, second - 1, first - 1))
        # exactly enough keys at or above a threshold: no need to find the very key
        exact = ((count_second == take) & (lo == second)) | ((count_first == take) & (lo == first))
        hi = tl.where(exact, lo, hi)

    ranks, above = _ranks(keys, lo, MAIN, LANES)
    if TAIL:
        tail_ranks, tail_above = _ranks(tail, lo, TAIL, LANES)
        tail_ranks += above
        above += tail_above
    room = take - (above & 0xFFFF)
    if HAS_IDS:
        Ids += row * pages
    _store_chosen(Ids, Out, OutScores, chunk * k, page, scores, keys, lo, ranks, room, MAIN * LANES, HAS_IDS, HAS_SCORES)
    if TAIL:
        _store_chosen(Ids, Out, OutScores, chunk * k, tail_page, tail_scores, tail, lo, tail_ranks, room, TAIL * LANES,
                      HAS_IDS, HAS_SCORES)
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
    tiles = topk_tiles(chunk)
    lanes = 32 * tiles.warps
    chunks = triton.cdiv(pages, (tiles.main + tiles.tail) * lanes)
    out = torch.empty(rows, chunks * k, dtype=torch.int32, device=device)
    kept = torch.empty(rows, chunks * k, dtype=torch.float32, device=device) if keep_scores else None
    source = bounds.arguments() if bounds else (scores, None, None, None)
    numbers, constants = bounds.numbers(tiles.warps) if bounds else ((0, 1, 0, 0), dict(GROUP=0, BLOCKS=1))
    _topk_pages_kernel[(rows, chunks)](
        *source, ids, out, kept, pages, k, *numbers, **constants, MAIN=tiles.main, TAIL=tiles.tail, LANES=lanes,
        BLOCK_K=256, HAS_IDS=ids is not None, HAS_SCORES=keep_scores, num_warps=tiles.warps, **launch_options(device),
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
