"""Which of the newest queries paid a token less than the average: an exact ring of bits per token (see `ops.record_token`)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..ops.reference import AVERAGE, HISTORY_BITS
from .base import Candidates
from .select import NEG_INF


def words(window: int) -> int:
    """int32 words that hold a history of `window` queries."""
    return -(-window // HISTORY_BITS)


def place(position: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Word and bit of the query at `position`."""
    slot = position % window
    return slot // HISTORY_BITS, slot % HISTORY_BITS


def less_than_average(weights: Tensor, readable: Tensor) -> Tensor:
    """Which of n readable tokens got less than 1/n. `weights`, `readable`: `[…, N]`."""
    return readable & (weights * readable.sum(-1, keepdim=True) < AVERAGE)


def count_bits(history: Tensor) -> Tensor:
    """`[…, words]` -> `[…]`: queries in the history that paid less than the average."""
    return sum(((history >> bit) & 1).sum(-1) for bit in range(HISTORY_BITS))


def record_many(candidates: Candidates, history: Tensor, window: int, use: str) -> tuple[Tensor, Tensor]:
    """The history after a multi-token forward, of which the last `window` queries matter.

    Args:
        history: `[B, H, N, words]` int32, of the candidates.
        use: "mean" or "max" over the query heads of a group, before the comparison with the average.

    Returns:
        The history, and `[B, H, N]` fp32: the attention received from those queries, a query counting `(1 - 1/window) ** age`.
    """
    history = history.clone()
    received = torch.zeros(history.shape[:3], device=history.device)
    fade = 1.0 - 1.0 / window
    for word, index, mask in _query_blocks(candidates, window):
        weights, readable = _attention(candidates, index, mask > 0)
        mean = weights.mean(2)
        below = less_than_average(mean if use == "mean" else weights.amax(2), readable)  # [B, H, t, N]
        new = (below * mask[:, None, :, None]).sum(2).to(torch.int32)
        history[..., word] = history[..., word] & ~mask.sum(-1).to(torch.int32)[:, None, None] | new
        weight = torch.where(mask > 0, fade ** (candidates.length - 1 - index), 0.0)
        received += torch.einsum("bhtn,bt->bhn", mean, weight)
    return history, received


def _query_blocks(candidates: Candidates, window: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The newest queries of the forward, a few at a time, by the word of the history they belong to.

    Yields:
        word; `[B, t]` indices of the queries among the candidates, and their bits: 0 for a query that is not there.
    """
    keys, query = candidates.keys, candidates.query
    newest = candidates.positions[:, 0, -1:]
    oldest = candidates.length - query.shape[2]
    # A block of attention weights takes about as much memory as the keys.
    step = max(1, keys.numel() // (2 * query.shape[0] * query.shape[1] * candidates.length))
    for word in range(words(window)):
        last = min((word + 1) * HISTORY_BITS, window)
        for first in range(word * HISTORY_BITS, last, step):
            slot = torch.arange(first, min(first + step, last), device=newest.device)
            age = (newest - slot) % window
            index = candidates.length - 1 - age
            real = (index >= oldest) & (age <= newest)
            yield word, index, torch.where(real, torch.ones_like(age) << place(slot, window)[1], 0)


def _attention(candidates: Candidates, index: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, H, G, t, N]` fp32 weights of the queries at candidates `index` `[B, t]`, and `[B, H, t, N]` what they can read."""
    keys, query = candidates.keys, candidates.query
    heads, length, dim = keys.shape[1:]
    row = (index - length + query.shape[2]).clamp(min=0)[:, None, :, None].expand(-1, query.shape[1], -1, dim)
    chosen = query.gather(2, row).float().unflatten(1, (heads, -1)) * candidates.scale
    readable = torch.arange(length, device=keys.device) <= index[:, None, :, None]
    readable = readable & candidates.valid.unsqueeze(2) & real[:, None, :, None]
    logits = chosen @ keys.unsqueeze(2).float().transpose(-1, -2)
    if candidates.softcap:
        logits = torch.tanh(logits / candidates.softcap) * candidates.softcap
    logits = logits.masked_fill_(~readable.unsqueeze(2), NEG_INF)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    if candidates.sinks is not None:
        lse = torch.logaddexp(lse, candidates.sinks.float().view(1, heads, -1, 1, 1))
    return logits.sub_(lse.masked_fill(lse.isinf(), 0.0)).exp_(), readable
