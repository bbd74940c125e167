"""Attention mass that each key receives: from a window of last queries, or from all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common import NEG_INF, acc_dtype, apply_softcap, reduce_group

_BLOCK_ELEMENTS = 1 << 25


def window_scores(
    q_win: Tensor,
    k: Tensor,
    *,
    scale: float,
    pad: Tensor | None = None,
    softcap: float = 0.0,
    group_reduce: str = "mean",
) -> Tensor:
    """Attention that the last W queries pay to every key, summed over the queries and reduced over the group.

    Args:
        q_win: [B, Hq, W, D]; query w stands at key index N - W + w and sees the keys up to there.
        k: [B, H, N, D], dense, any strides with a contiguous last dimension.
        pad: [B] int32, number of leading padded keys; padded keys get 0, padded queries count for nothing.
        group_reduce: "mean", "max" or "sum" over the query heads of a KV head, after the sum over the queries.

    Returns:
        fp32 [B, H, N].
    """
    return column_sums(q_win, k, scale=scale, pad=pad, softcap=softcap, group_reduce=group_reduce)


def column_sums(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    pad: Tensor | None = None,
    softcap: float = 0.0,
    lse: Tensor | None = None,
    group_reduce: str = "mean",
) -> Tensor:
    """Column sums of the causal attention matrix: how much attention each key received in all.

    Args:
        q: [B, Hq, N, D] (or the last W <= N queries, as in :func:`window_scores`).
        k: [B, H, N, D].
        lse: [B, Hq, N], natural log of each query's softmax denominator (scaled, capped logits); computed when None.
        scale, pad, softcap, group_reduce: as in :func:`window_scores`.

    Returns:
        fp32 [B, H, N]. Memory stays O(N), about that of the keys: queries are taken in blocks.
    """
    batch, heads_q, window, dim = q.shape
    heads, total = k.shape[1], k.shape[2]
    acc = acc_dtype(q)
    keys = k.to(acc).transpose(-1, -2).unsqueeze(2)
    j = torch.arange(total, device=q.device)
    real = torch.ones(batch, total, dtype=torch.bool, device=q.device) if pad is None else j >= pad.unsqueeze(-1)
    sums = torch.zeros(batch, heads_q, total, dtype=acc, device=q.device)
    row = max(1, batch * heads_q * total)
    step = max(1, min(window, _BLOCK_ELEMENTS // row, max(4, k.numel() // (2 * row))))
    for first in range(0, window, step):
        block = slice(first, min(first + step, window))
        seen = total - window + block.stop  # no query of the block sees a later key
        at = j[total - window + first : seen]
        queries = q[:, :, block].to(acc).unflatten(1, (heads, heads_q // heads)) * scale
        valid = (j[:seen] <= at.unsqueeze(-1)) & real[:, None, :seen] & real[:, at].unsqueeze(-1)  # [B, w, seen]
        logits = apply_softcap(queries @ keys[..., :seen], softcap)
        logits = logits.masked_fill_(~valid[:, None, None], NEG_INF).flatten(1, 2)
        if lse is None:
            known = torch.logsumexp(logits, dim=-1)
            known = torch.where(torch.isinf(known), 0.0, known)
        else:
            known = torch.where(real[:, None, at], lse[:, :, block].to(acc), 0)
        sums[..., :seen] += logits.sub_(known.unsqueeze(-1)).exp_().sum(2)
    return reduce_group(sums, heads, group_reduce).float()
