"""Attention that tokens can expect from future queries, taken to be Gaussian."""

from collections.abc import Callable

import torch
from torch import Tensor

from .select import NEG_INF

_BLOCK_ELEMENTS = 1 << 24


def query_statistics(blocks: Callable[[], "list[tuple[Tensor, Tensor]]"]) -> tuple[Tensor, Tensor]:
    """Mean and covariance of queries, per row and head, in two passes over blocks of tokens.

    Args:
        blocks: gives the same blocks at each call: queries `[B, Hq, t, D]` fp32 and which of them count, `[B, t]` bool.

    Returns:
        `[B, Hq, D]` and `[B, Hq, D, D]` fp32; zeros for a row without queries.
    """
    total, number = 0.0, 0.0
    for query, counts in blocks():
        total = total + (query * counts[:, None, :, None]).sum(2)
        number = number + counts.sum(-1)
    number = number.clamp(min=1)[:, None, None]
    mean = total / number
    spread = 0.0
    for query, counts in blocks():
        centred = (query - mean.unsqueeze(2)) * counts[:, None, :, None]
        spread = spread + centred.transpose(-1, -2) @ centred
    return mean, spread / number.unsqueeze(-1)


def expected_attention(keys: Tensor, allowed: Tensor, mean: Tensor, covariance: Tensor | None, scale: float) -> Tensor:
    """Softmax over the keys of the log of `E exp(scale q·k)` for Gaussian q, averaged over each group's query heads.

    The expectation has a closed form: `scale mean·k + scale² kᵀ Σ k / 2`.

    Args:
        keys: `[B, H, N, D]`; allowed: `[B, H, N]` bool, the keys that take part.
        mean: `[B, Hq, D]`; covariance: `[B, Hq, D, D]`, or None to leave the second term out.

    Returns:
        `[B, H, N]` fp32, 0 for keys that take no part.
    """
    batch, heads, length, dim = keys.shape
    mean = mean.view(batch, heads, -1, dim)
    group = mean.shape[2]
    logits = torch.empty(batch, heads, group, length, device=keys.device)
    # A block takes a fraction of the memory of the keys.
    step = max(16, min(_BLOCK_ELEMENTS // (batch * heads * group * dim), length // (8 * group)))
    for first in range(0, length, step):
        block = keys[:, :, None, first : first + step].float()  # [B, H, 1, n, D]
        part = (block @ mean.unsqueeze(-1)).squeeze(-1) * scale
        if covariance is not None:
            turned = block @ covariance.view(batch, heads, group, dim, dim)
            part = part + (turned * block).sum(-1) * (scale * scale / 2)
        logits[..., first : first + step] = part
    logits = logits.masked_fill(~allowed.unsqueeze(2), NEG_INF)
    return torch.softmax(logits, dim=-1).nan_to_num(nan=0.0).mean(2)
