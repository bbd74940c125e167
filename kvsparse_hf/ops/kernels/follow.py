"""What a decoded token's attention leaves behind with the kept entries: scores or history. One launch a layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..reference.record import AVERAGE, HISTORY_BITS
from ._math import contiguous, join_previous, launch_options, next_power_of_2, require_contiguous

MAX_BLOCK = 1024
MAX_TILE = 8192  # weights a program asks for at once: it waits once for all of them


@triton.jit
def _weights(Logits, Lse, row, row_ok, slot, ok, width):
    """Attention [rows, slots] of query heads ``row`` to ``slot``; 0 where either is not valid."""
    lse = tl.load(Lse + row, mask=row_ok, other=0.0)
    logits = tl.load(Logits + row[:, None] * width + slot[None, :], mask=row_ok[:, None] & ok[None, :], other=float("-inf"))
    return tl.exp(logits - lse[:, None])


@triton.jit
def _follow_token_kernel(
    Scores, Cursor, Pos, Logits, Lse, Start, Length, Capacity, Newest, width, decay, log2_decay, sinks, recent,
    HEADS: tl.constexpr, QUERY_HEADS: tl.constexpr, ACCUMULATE: tl.constexpr, PER_QUERY: tl.constexpr,
    DECAYS: tl.constexpr, ACROSS: tl.constexpr, HALF: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One (KV head, batch row). ACROSS: every head of a row does the same sums, in the same order."""
    join_previous(DEPENDENT, True)
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    unit = batch * HEADS + head
    COUNT: tl.constexpr = QUERY_HEADS if ACROSS else QUERY_HEADS // HEADS
    first = batch * QUERY_HEADS
    if not ACROSS:
        first += head * COUNT
    length = tl.load(Length + unit).to(tl.int32)
    capacity = tl.load(Capacity + unit).to(tl.int32)
    newest = tl.load(Newest + batch).to(tl.int32)
    first_row = tl.load(Start + unit).to(tl.int64)
    tail = capacity // 2 if HALF else tl.minimum(capacity, recent)
    tail = tl.minimum(tail, tl.maximum(capacity - sinks, 1))
    sink = tl.minimum(capacity - tail, sinks)

    lowest = float("inf")
    lowest_at = -1
    lowest_slot = 0
    for begin in range(0, length, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        ok = slot < length
        score = tl.zeros([BLOCK], tl.float32)
        for begin_g in range(0, COUNT, AT_ONCE):
            g = begin_g + tl.arange(0, AT_ONCE)
            score += tl.sum(_weights(Logits, Lse, first + g, g < COUNT, slot, ok, width), 0)
        score = score / COUNT
        at = tl.load(Pos + first_row + slot, mask=ok, other=-1)
        if ACCUMULATE:
            old = tl.load(Scores + first_row + slot, mask=ok & (at != newest), other=0.0)
            score += old * decay
        tl.store(Scores + first_row + slot, score, mask=ok)
        worth = score
        if PER_QUERY:
            age = tl.maximum(newest - at + 1, 1).to(tl.float32)
            worth = worth / ((1 - tl.exp2(age * log2_decay)) / (1 - decay) if DECAYS else age)
        free = ok & (at >= sink) & (at <= newest - tail + 1)
        worth = tl.where(free, worth, float("inf"))
        low = tl.min(worth, 0)
        low_at = tl.max(tl.where(free & (worth == low), at, -1), 0)
        low_slot = tl.max(tl.where(free & (at == low_at), slot, 0), 0)
        better = (low < lowest) | ((low == lowest) & (low_at > lowest_at))
        lowest = tl.where(better, low, lowest)
        lowest_at = tl.where(better, low_at, lowest_at)
        lowest_slot = tl.where(better, low_slot, lowest_slot)
    tl.store(Cursor + unit, lowest_slot)


def follow_token(
    scores: Tensor,
    cursor: Tensor,
    pos: Tensor,
    logits: Tensor,
    lse: Tensor,
    start: Tensor,
    length: Tensor,
    capacity: Tensor,
    newest: Tensor,
    decay: float,
    log2_decay: float,
    accumulate: bool,
    per_query: bool,
    across_heads: bool,
    sinks: int,
    recent: int,
) -> None:
    """See :func:`kvsparse_hf.ops.follow_token`; ``log2_decay`` is the logarithm of ``decay``."""
    require_contiguous(scores=scores, cursor=cursor, pos=pos)
    logits, lse, start, length, capacity, newest = contiguous(logits, lse, start, length, capacity, newest)
    batch, heads = start.shape
    width = logits.shape[-1]
    block = min(MAX_BLOCK, max(16, next_power_of_2(width)))
    _follow_token_kernel[(heads, batch)](
        scores, cursor, pos, logits, lse, start, length, capacity, newest, width, decay, log2_decay, sinks, recent,
        HEADS=heads, QUERY_HEADS=logits.shape[1], ACCUMULATE=accumulate, PER_QUERY=per_query, DECAYS=decay < 1.0,
        ACROSS=across_heads, HALF=recent < 0, BLOCK=block,
        AT_ONCE=min(next_power_of_2(logits.shape[1] if across_heads else logits.shape[1] // heads), MAX_TILE // block),
        num_warps=8, **launch_options(scores.device),
    )


@triton.jit
def _record_token_kernel(
    History, Received, Pos, Logits, Lse, Start, Length, Newest, width, window, fade, average,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, USE_MAX: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (KV head, batch row)."""
    join_previous(DEPENDENT, True)
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    unit = batch * HEADS + head
    first = unit * GROUP
    length = tl.load(Length + unit).to(tl.int32)
    newest = tl.load(Newest + batch).to(tl.int32)
    first_row = tl.load(Start + unit).to(tl.int64)
    word = newest % window // BITS
    mask = tl.full([BLOCK], 1, tl.int32) << (newest % window % BITS)
    for begin in range(0, length, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        ok = slot < length
        mean = tl.zeros([BLOCK], tl.float32)
        most = tl.zeros([BLOCK], tl.float32)
        for begin_g in range(0, GROUP, AT_ONCE):
            g = begin_g + tl.arange(0, AT_ONCE)
            weight = _weights(Logits, Lse, first + g, g < GROUP, slot, ok, width)
            mean += tl.sum(weight, 0)
            most = tl.maximum(most, tl.max(weight, 0))
        mean = mean / GROUP
        row = first_row + slot
        is_new = tl.load(Pos + row, mask=ok, other=-1) == newest
        received = tl.load(Received + row, mask=ok & (is_new == 0), other=0.0)
        tl.store(Received + row, received * fade + mean, mask=ok)
        below = (most if USE_MAX else mean) * length < average
        bits = tl.load(History + row * WORDS + word, mask=ok & (is_new == 0), other=0)
        bits = tl.where(below, bits | mask, bits & ~mask)
        tl.store(History + row * WORDS + word, bits, mask=ok)
        for w in range(WORDS):
            tl.store(History + row * WORDS + w, tl.zeros([BLOCK], tl.int32), mask=ok & is_new & (word != w))


def record_token(
    history: Tensor,
    received: Tensor,
    pos: Tensor,
    logits: Tensor,
    lse: Tensor,
    start: Tensor,
    length: Tensor,
    newest: Tensor,
    window: int,
    use_max: bool,
) -> None:
    """See :func:`kvsparse_hf.ops.record_token`."""
    require_contiguous(history=history, received=received, pos=pos)
    logits, lse, start, length, newest = contiguous(logits, lse, start, length, newest)
    batch, heads = start.shape
    width, group = logits.shape[-1], logits.shape[1] // heads
    block = min(MAX_BLOCK, max(16, next_power_of_2(width)))
    _record_token_kernel[(heads, batch)](
        history, received, pos, logits, lse, start, length, newest, width, window, 1.0 - 1.0 / window, AVERAGE,
        HEADS=heads, GROUP=group, WORDS=history.shape[-1], BITS=HISTORY_BITS, USE_MAX=use_max,
        AT_ONCE=min(next_power_of_2(group), MAX_TILE // block), BLOCK=block, num_warps=4, **launch_options(history.device),
    )
