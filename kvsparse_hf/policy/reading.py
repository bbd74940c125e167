"""Which stored entries a decode step reads: scores of single tokens, and the union of partial attentions."""

import torch
from torch import Tensor

NEG_INF = float("-inf")


def key_logits(query: Tensor, keys: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Attention logits of one query per head.

    Args:
        query: `[B, Hq, D]`; keys: `[B, H, C, D]`. The product runs in their dtype (they may be slices of the real ones).

    Returns:
        `[B, H, G, C]` fp32 (fp64 for fp64 keys).
    """
    grouped = query.unflatten(1, (keys.shape[1], -1)).to(keys.dtype)
    logits = grouped @ keys.transpose(-1, -2)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * scale
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def masked_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension, zeros for a row of nothing but -inf; and its log-sum-exp."""
    lse = torch.logsumexp(logits, dim=-1)
    return torch.exp(logits - torch.where(torch.isinf(lse), 0.0, lse).unsqueeze(-1)), lse


def reduce_logits(logits: Tensor, how: str) -> Tensor:
    """`[B, H, G, C]` logits (-inf where invalid) as scores: `[B, H, C]`, or `[B, Hq, C]` with "none".

    "softmax_mean" compares the query heads of a group by attention weight; "max", "mean" and "sum" take the logits as
    they are; "none" lets every query head rank for itself.
    """
    if how == "softmax_mean":
        return masked_softmax(logits)[0].mean(2)
    if how == "max":
        return logits.amax(2)
    if how == "none":
        return logits.flatten(1, 2)
    return logits.mean(2) if how == "mean" else logits.sum(2)


def force(scores: Tensor, length: Tensor, sinks: int, recent: int) -> Tensor:
    """+inf on the first `sinks` and the newest `recent` entries, -inf beyond `length`.

    Args:
        scores: `[B, Hs, C]` with Hs a multiple of H; length: `[B, H]`.
    """
    length = per_query_head(length, scores.shape[1]).unsqueeze(-1)
    slot = torch.arange(scores.shape[-1], device=scores.device)
    forced = (slot < sinks) | (slot >= length - recent)
    return torch.where(slot < length, torch.where(forced, float("inf"), scores), NEG_INF)


def per_query_head(table: Tensor, heads: int) -> Tensor:
    """`[B, H, …]` as `[B, heads, …]`: every query head gets the entry of its key/value head."""
    group = heads // table.shape[1]
    return table if group == 1 else table.repeat_interleave(group, dim=1)


def top_ragged(scores: Tensor, width: int, limit: Tensor) -> Tensor:
    """As `ops.topk_pages`, but row `b` gets only its `limit[b]` best (at most `width`).

    Returns:
        int32 `[B, Hs, width]`, ascending, -1 behind the last.
    """
    total = scores.shape[-1]
    order = torch.sort(scores, dim=-1, descending=True, stable=True)
    take = min(width, total)
    rank = torch.arange(take, device=scores.device)
    chosen = (order.values[..., :take] > NEG_INF) & (rank < limit.view(-1, 1, 1))
    index = torch.where(chosen, order.indices[..., :take], total).sort(dim=-1).values
    index = torch.where(index == total, -1, index).int()
    return torch.nn.functional.pad(index, (0, width - take), value=-1)


def merge_partials(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    Args:
        outs: `[B, Hq, Dv]` each, softmax-weighted over its own keys.
        lses: `[B, Hq]` each, log of its softmax denominator; -inf for an empty set.
    """
    weights, _ = masked_softmax(torch.stack(lses, dim=-1))
    parts = torch.stack([out.to(weights.dtype) for out in outs], dim=-1)
    return (parts * weights.unsqueeze(-2)).sum(-1).to(outs[0].dtype)
