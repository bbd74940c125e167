"""Small helpers shared by the references."""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def acc_dtype(x: Tensor) -> torch.dtype:
    """fp32 for every input but fp64, which stays fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def filled_width(length: Tensor, most: int) -> int:
    """How many slots of a segment need to be looked at: all that can be (`most`), or, where asking costs nothing (on a CPU,
    outside of a traced step), as many as the fullest segment has filled, but one at least."""
    if length.device.type != "cpu" or torch.compiler.is_compiling() or length.numel() == 0:
        return most
    return min(most, max(int(length.max()), 1))


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


def check_reduction(how: str) -> None:
    if how not in ("softmax_mean", "max", "mean"):
        raise ValueError(f"group_reduce must be 'softmax_mean', 'max' or 'mean', got {how!r}")


def rank_scores(logits: Tensor, how: str, valid: Tensor, forced: Tensor) -> Tensor:
    """[B, H, G, N] logits as fp32 scores [B, H, N]: reduced over the group, +inf where forced, -inf where not valid."""
    check_reduction(how)
    scores = torch.where(valid.unsqueeze(2), logits, NEG_INF)
    if how == "softmax_mean":
        scores, how = safe_softmax(scores)[0], "mean"
    reduced = reduce_group(scores.flatten(1, 2), scores.shape[1], how)
    return torch.where(valid, torch.where(forced, float("inf"), reduced), NEG_INF).float()
