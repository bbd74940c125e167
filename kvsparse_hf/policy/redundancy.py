"""R-KV's two scores: attention from a window of queries, and how much a key repeats others."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Candidates
from .pooling import pool_scores
from .select import NEG_INF

BLOCK_ELEMENTS = 1 << 25


def redundancy(
    keys: Tensor, pad: Tensor, threshold: float, count_self: bool = True, block_elements: int = BLOCK_ELEMENTS
) -> Tensor:
    """How much each key repeats the others: softmax over the tokens of its mean cosine with all of them.

    For every token, the newest of its near-duplicates (cosine above `threshold`) is not blamed for the similarity, so that
    of a set of duplicates the newest one stays.

    Args:
        keys: `[B, H, N, D]` in order of position; pad: `[B, H]` invalid leading ones.
        count_self: a token counts among its own near-duplicates. Without (the published code), two duplicates of each other
            excuse one another and neither is redundant, and a token without near-duplicates excuses the first token of all.
        block_elements: similarities that are held at one time.

    Returns:
        `[B, H, N]` fp32, 0 for padding.
    """
    batch, heads, length, _ = keys.shape
    index = torch.arange(length, device=keys.device)
    valid = index >= pad.unsqueeze(-1)
    unit = F.normalize(keys.float(), dim=-1) * valid.unsqueeze(-1)
    total = torch.zeros(batch, heads, length, device=keys.device)
    step = max(1, block_elements // max(1, batch * heads * length))
    for first in range(0, length, step):
        rows = index[first : first + step]
        similar = unit[:, :, rows] @ unit.transpose(-1, -2)
        own = index == rows.unsqueeze(-1)
        close = (similar > threshold) & ~own & valid.unsqueeze(2)
        if count_self:
            close = close | own
        newest = torch.where(close, index, pad[..., None, None]).amax(-1, keepdim=True)
        total += similar.masked_fill(own | (index == newest), 0.0).sum(2)
    mean = total / valid.sum(-1, keepdim=True).clamp(min=1)
    return torch.softmax(mean.masked_fill(~valid, NEG_INF), dim=-1).nan_to_num(nan=0.0)


def window_importance(candidates: Candidates, window: int, kernel: int) -> Tensor:
    """Attention of the last `window` queries to each token before them, by R-KV's rule.

    The largest logit of a group's query heads, softmax over the tokens before the window alone, mean over the queries, then
    a maximum over `kernel` neighbours.

    Returns:
        `[B, H, N - W]` fp32.
    """
    keys, pad = candidates.keys, candidates.pad
    batch, heads, length, dim = keys.shape
    before = length - window
    query = candidates.query[:, :, -window:].float().view(batch, heads, -1, window, dim)
    logits = query @ keys[:, :, None, :before].float().transpose(-1, -2) * candidates.scale
    if candidates.softcap:
        logits = torch.tanh(logits / candidates.softcap) * candidates.softcap
    logits = logits.amax(2)
    is_pad = torch.arange(before, device=keys.device) < pad.unsqueeze(-1)
    weights = torch.softmax(logits.masked_fill(is_pad.unsqueeze(2), NEG_INF), dim=-1).nan_to_num(nan=0.0)
    return pool_scores(weights.mean(2), pad, kernel, "max")
