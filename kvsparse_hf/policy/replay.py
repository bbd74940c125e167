"""How much a text's tokens are needed to say the text again (KVzip)."""

import torch
from torch import Tensor

from .select import NEG_INF

_BLOCK_ELEMENTS = 1 << 24


def replayed_attention(
    query: Tensor, held: Tensor, new: Tensor, judged: int, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """The largest attention that each judged key gets from any replayed query of its group.

    The softmax runs over the held keys given and the replayed ones (causally), not over the whole cache.

    Args:
        query: `[Hq, T, D]` of the replayed tokens; new: `[H, T, D]` their keys.
        held: `[H, S, D]`; the last `judged` of them are judged.
        sinks: `[Hq]` learned logits in the denominator, or None.

    Returns:
        `[H, judged]` fp32; memory O(T + S).
    """
    heads, tokens, _ = new.shape
    query = query.unflatten(0, (heads, -1))
    group, total = query.shape[1], held.shape[1] + tokens
    keys = torch.cat((held, new), dim=1)[:, None].float().transpose(-1, -2)  # [H, 1, D, S + T]
    best = torch.zeros(heads, judged, device=new.device)
    step = max(1, _BLOCK_ELEMENTS // (heads * group * total))
    own = torch.arange(total, device=new.device) - held.shape[1]
    for first in range(0, tokens, step):
        block = query[:, :, first : first + step].float()
        logits = block @ keys * scale
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        at = torch.arange(first, first + block.shape[2], device=new.device)
        logits = logits.masked_fill(own > at.unsqueeze(-1), NEG_INF)
        lse = torch.logsumexp(logits, dim=-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float().view(heads, group, 1, 1))
        weights = torch.exp(logits[..., held.shape[1] - judged : held.shape[1]] - lse)
        best = torch.maximum(best, weights.amax(dim=(1, 2)))
    return best


def keep_best(scores: Tensor, length: int, protected: int, total: int) -> Tensor:
    """Which entries of one row stay when all layers and heads share one threshold.

    Args:
        scores: `[L, H, N]`; the first `length` of N exist, the first `protected` of those always stay.
        total: entries to keep, over all layers and heads; ties go to the lower layer, head and index.

    Returns:
        `[L, H, N]` bool with exactly `total` set (or all that exist).
    """
    limits = torch.finfo(torch.float32)
    index = torch.arange(scores.shape[-1], device=scores.device)
    rank_by = scores.float().nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    rank_by = torch.where(index < protected, float("inf"), rank_by).masked_fill(index >= length, NEG_INF).flatten()
    order = torch.sort(rank_by, descending=True, stable=True).indices[: min(total, scores[..., 0].numel() * length)]
    keep = torch.zeros_like(rank_by, dtype=torch.bool)
    keep[order] = True
    return keep.view(scores.shape)
