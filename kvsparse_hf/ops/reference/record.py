"""Which of the newest queries paid each kept entry less than the average: one bit per query, in a ring."""

from __future__ import annotations

import torch
from torch import Tensor

from .store import _put_rows

HISTORY_BITS = 31  # of an int32 word: the sign stays out of it
AVERAGE = 1.0 - 1e-5  # exactly the average must not count as less because of rounding


def record_token(
    history: Tensor,
    received: Tensor,
    pos: Tensor,
    logits: Tensor,
    lse: Tensor,
    start: Tensor,
    length: Tensor,
    newest: Tensor,
    *,
    window: int,
    use_max: bool = False,
) -> None:
    """Enter the attention of the token just stored into the history of every entry.

    Args:
        history: [R, W] int32, written: bit ``newest % window`` (31 bits a word) says whether an entry got less than
            1 / length. The history of the token just stored starts from 0.
        received: [R] fp32, written: the attention received, fading by 1 - 1 / window per token.
        pos: [R] int32, true positions.
        logits, lse: [B, Hq, C] and [B, Hq] fp32, as :func:`decode_attention` returns them.
        start, length: [B, H], first row and fill of each segment.
        newest: [B] int32, position of the token just stored.
        use_max: compare the largest attention of a KV head's query heads with the average; otherwise their mean.
    """
    slot = torch.arange(logits.shape[-1], device=logits.device)
    valid = slot < length.unsqueeze(-1)
    rows = torch.where(valid, start.unsqueeze(-1) + slot, 0)
    old = (pos[rows] != newest.view(-1, 1, 1)).unsqueeze(-1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).unflatten(1, (start.shape[1], -1))
    mean = weights.mean(2)
    used = weights.amax(2) if use_max else mean
    below = valid & (used * length.unsqueeze(-1) < AVERAGE)

    place = newest.long() % window
    word = torch.arange(history.shape[-1], device=history.device) == (place // HISTORY_BITS).unsqueeze(-1)  # [B, W]
    mask = (word.long() << (place % HISTORY_BITS).unsqueeze(-1)).to(torch.int32)[:, None, None]
    bits = ((history[rows] * old) & ~mask) | below.unsqueeze(-1) * mask
    _put_rows(history, rows.flatten(), bits.flatten(0, 2), valid.flatten())
    faded = received[rows] * old.squeeze(-1) * (1.0 - 1.0 / window) + mean
    _put_rows(received, rows.flatten(), faded.flatten(), valid.flatten())
