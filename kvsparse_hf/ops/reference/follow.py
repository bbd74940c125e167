"""What a decoded token's attention leaves behind: the scores of the kept entries, and which of them goes next."""

from __future__ import annotations

import torch
from torch import Tensor

from .store import _put_rows


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
    *,
    decay: float = 1.0,
    accumulate: bool = True,
    per_query: bool = False,
    across_heads: bool = False,
    sinks: int = 0,
    recent: int = 0,
) -> None:
    """Update the score of every entry by the attention of the token just stored, and choose the entry the next one
    replaces: the lowest score that is not protected, among equals the newest entry.

    Args:
        scores: [R] fp32, written.
        cursor: [B, H] int32, written: the slot to overwrite next. It means nothing for a segment that is not full.
        pos: [R] int32, true positions.
        logits, lse: [B, Hq, C] and [B, Hq] fp32, as :func:`decode_attention` returns them.
        start, length, capacity: [B, H], first row, fill and size of each segment.
        newest: [B] int32, position of the token just stored; its entry starts from 0.
        decay: factor on the old scores.
        accumulate: scores add up; otherwise they are the attention of this token alone.
        per_query: compare scores divided by the number of queries that could see the entry (with ``decay``, by the sum
            of their weights).
        across_heads: average the attention over all query heads of the row; otherwise over those of the KV head.
        sinks, recent: entries at positions below ``sinks``, and the ``recent - 1`` newest, are protected (the next token
            will be one of the recent). ``recent`` = -1 is half of the capacity. A segment too small for both keeps the
            newest.
    """
    heads = start.shape[1]
    slot = torch.arange(logits.shape[-1], device=logits.device)
    valid = slot < length.unsqueeze(-1)
    rows = torch.where(valid, start.unsqueeze(-1) + slot, 0)
    at = pos[rows]
    now = newest.view(-1, 1, 1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).unflatten(1, (heads, -1)).mean(2)
    if across_heads:
        weights = weights.mean(1, keepdim=True).expand_as(weights)
    if accumulate:
        weights = torch.where(at == now, 0.0, scores[rows]) * decay + weights
    _put_rows(scores, rows.flatten(), weights.flatten(), valid.flatten())

    worth = weights
    if per_query:
        age = (now - at + 1).clamp(min=1).to(weights.dtype)
        worth = worth / (age if decay == 1.0 else (1 - torch.pow(decay, age)) / (1 - decay))
    tail = capacity // 2 if recent < 0 else capacity.clamp(max=recent)
    tail = torch.minimum(tail, (capacity - sinks).clamp(min=1)).unsqueeze(-1)
    sink = (capacity.unsqueeze(-1) - tail).clamp(max=sinks)
    free = valid & (at >= sink) & (at <= now - tail + 1)
    worth = torch.where(free, worth, float("inf"))
    worst = free & (worth == worth.amin(-1, keepdim=True))
    cursor.copy_(torch.where(worst, at, -1).argmax(-1))
