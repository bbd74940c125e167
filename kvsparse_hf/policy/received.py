"""Attention that tokens received so far, without the attention matrix."""

import math

import torch
from torch import Tensor

from .. import ops
from .base import Candidates


def received_attention(candidates: Candidates, decay: float, reduce: str, backend: str) -> Tensor:
    """Attention of the queries at hand to every candidate, summed over the queries.

    Args:
        decay: weight `decay ** age` of a query, age 0 for the newest. It costs nothing: a query weighs less when its
            softmax denominator is larger.
        reduce: over the query heads of a group, after the softmax.

    Returns:
        `[B, H, N]` fp32, exact over all candidates; memory O(N).
    """
    query = candidates.query
    batch, heads, length = candidates.keys.shape[:3]
    tokens, group = query.shape[2], query.shape[1] // heads
    lse = candidates.lse
    if lse is None and (decay < 1.0 or candidates.sinks is not None):
        lse = _prompt_lse(candidates, backend)
    if lse is not None:
        age = torch.arange(tokens - 1, -1, -1, device=query.device)
        lse = (lse - age * math.log(decay)).reshape(batch * heads, group, tokens)
    # Heads become rows, because the kept tokens of a ragged layer leave each head another padding.
    return ops.column_sums(
        query.reshape(batch * heads, group, tokens, -1),
        candidates.keys.reshape(batch * heads, 1, length, -1),
        scale=candidates.scale,
        pad=candidates.pad.reshape(-1).to(torch.int32),
        softcap=candidates.softcap,
        lse=lse,
        group_reduce=reduce,
        backend=backend,
    ).view(batch, heads, length)


def _prompt_lse(candidates: Candidates, backend: str) -> Tensor:
    """`[B, Hq, T]` logs of the softmax denominators of a first prompt's last T queries, learned sinks included."""
    query, keys, values = candidates.query, candidates.keys, candidates.values
    batch, heads, length = keys.shape[:3]
    earlier = length - query.shape[2]
    width = max(earlier, 1)
    first = torch.arange(batch * heads, device=keys.device).view(batch, heads) * width
    skipped = candidates.pad.clamp(max=earlier)
    _, lse = ops.chunk_attention(
        query,
        keys[:, :, :width].reshape(-1, keys.shape[-1]).contiguous(),
        values[:, :, :width].reshape(-1, values.shape[-1]).contiguous(),
        first + skipped,
        (earlier - skipped).to(torch.int32),
        keys[:, :, earlier:],
        values[:, :, earlier:],
        max_len=width,
        scale=candidates.scale,
        pad=(candidates.pad[:, 0] - earlier).clamp(min=0).to(torch.int32),
        softcap=candidates.softcap,
        sinks=candidates.sinks,
        return_lse=True,
        backend=backend,
    )
    return lse
