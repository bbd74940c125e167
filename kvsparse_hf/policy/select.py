"""Which entries stay, given scores and counts. Ties break to the lower index; kept indices ascend."""

import torch
import torch.nn.functional as F

NEG_INF = float("-inf")


def protected_mask(pad: torch.Tensor, length: int, counts: torch.Tensor, sinks: int, tail: int) -> torch.Tensor:
    """Marks the entries that are kept whatever their score: by index, never by a score trick.

    When a row's count cannot hold all of them, the newest entries come first, then the sinks, so that the count is
    never exceeded and the newest token is never lost.

    Args:
        pad: `[B, H]` invalid leading entries.
        length: candidates per head, N.
        counts: `[B, H]` entries that may stay.
        sinks: first valid entries to protect.
        tail: newest entries to protect.

    Returns:
        `[B, H, N]` bool.
    """
    valid = length - pad
    counts = torch.minimum(counts, valid)
    tail_kept = torch.minimum(counts.clamp(max=tail), (counts - sinks).clamp(min=1))
    sinks_kept = torch.minimum(counts - tail_kept, torch.full_like(counts, sinks))
    index = torch.arange(length, device=pad.device)
    is_sink = (index >= pad.unsqueeze(-1)) & (index < (pad + sinks_kept).unsqueeze(-1))
    is_tail = (index >= (length - tail_kept).unsqueeze(-1)) & (index >= pad.unsqueeze(-1))
    return is_sink | is_tail


def select_top(scores: torch.Tensor, pad: torch.Tensor, protect: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The `counts` best entries of every head, protected ones first.

    Args:
        scores: `[B, H, N]`, higher is better.
        pad: `[B, H]` invalid leading entries; never selected.
        protect: `[B, H, N]` bool, always selected (at most `counts` of them).
        counts: `[B, H]` entries to select; capped at what is valid.

    Returns:
        `[B, H, M]` int64 with M the largest count: ascending indices, then -1 where a head keeps fewer than M.
    """
    batch, heads, length = scores.shape
    valid = length - pad
    counts = torch.minimum(counts.to(pad.device), valid)
    width = int(counts.max())
    index = torch.arange(length, device=scores.device)
    limits = torch.finfo(torch.float32)
    rank_by = scores.float().nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    rank_by = rank_by.masked_fill(protect, float("inf"))
    rank_by = rank_by.masked_fill(index < pad.unsqueeze(-1), NEG_INF)
    order = torch.sort(rank_by, dim=-1, descending=True, stable=True).indices[..., :width]
    # What exceeds a head's own count sorts behind every real index, then turns into -1.
    excess = torch.arange(width, device=scores.device) >= counts.unsqueeze(-1)
    order = torch.sort(order.masked_fill(excess, length), dim=-1).values
    return order.masked_fill(order == length, -1)


def all_valid(pad: torch.Tensor, length: int) -> torch.Tensor:
    """`[B, H, M]` indices of every valid candidate, -1 trailing."""
    width = max(int(length - pad.min()), 0)
    index = pad.unsqueeze(-1) + torch.arange(width, device=pad.device)
    return index.masked_fill(index >= length, -1)


def append_zeros(memory: torch.Tensor, tokens: int) -> torch.Tensor:
    """`[B, H, M, …]` -> `[B, H, M + tokens, …]`."""
    return F.pad(memory, (0, 0) * (memory.dim() - 3) + (0, tokens))
