"""Small helpers shared by the references."""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def acc_dtype(x: Tensor) -> torch.dtype:
    """fp32 for every input but fp64, which stays fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def apply_softcap(logits: Tensor, softcap: float) -> Tensor:
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def safe_softmax(logits: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension that turns a row of nothing but -inf into zeros.

    ``sinks`` broadcasts against ``logits[..., 0]`` and joins the denominator only.
    Returns the weights and the log of the denominator (-inf for an empty row without sink).
    """
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype))
    weights = torch.exp(logits - torch.where(torch.isinf(lse), 0.0, lse).unsqueeze(-1))
    return weights, lse


def reduce_group(x: Tensor, heads: int, how: str, dim: int = 1) -> Tensor:
    """[B, Hq, ...] -> [B, H, ...]: reduce the query heads that share a KV head."""
    grouped = x.unflatten(dim, (heads, -1))
    if how == "mean":
        return grouped.mean(dim + 1)
    if how == "sum":
        return grouped.sum(dim + 1)
    if how == "max":
        return grouped.amax(dim + 1)
    raise ValueError(f"group_reduce must be 'mean', 'max' or 'sum', got {how!r}")
