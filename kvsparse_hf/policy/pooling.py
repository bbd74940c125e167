"""One-dimensional pooling of scores over the token axis, which must not leak padding into real tokens."""

import torch
import torch.nn.functional as F

from .select import NEG_INF


def pool_scores(scores: torch.Tensor, pad: torch.Tensor, kernel_size: int, pooling: str) -> torch.Tensor:
    """Smooths scores so that neighbours of an important token are kept with it.

    Args:
        scores: `[B, H, N]` fp32.
        pad: `[B, H]` invalid leading entries. They count as outside the sequence: -inf for "max", 0 for "avg" (the
            zeros beyond both ends count towards the average, as in the published code).
        kernel_size: odd width; 1 does nothing.
        pooling: "max" or "avg".
    """
    if kernel_size == 1 or scores.shape[-1] == 0:
        return scores
    is_pad = torch.arange(scores.shape[-1], device=scores.device) < pad.unsqueeze(-1)
    half = kernel_size // 2
    if pooling == "max":
        pooled = F.max_pool1d(scores.masked_fill(is_pad, NEG_INF), kernel_size, stride=1, padding=half)
    else:
        pooled = F.avg_pool1d(scores.masked_fill(is_pad, 0.0), kernel_size, stride=1, padding=half)
    return pooled.masked_fill(is_pad, NEG_INF)
