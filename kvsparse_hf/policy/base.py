"""What an evicting method decides: the score of each token, how many stay, and what is always kept."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .budgets import Budget


@dataclass(frozen=True)
class Candidates:
    """The tokens among which an evicting layer chooses: all of a first prompt, or the kept ones and the new ones.

    Attributes:
        query: `[B, Hq, T, D]` queries of the newest T candidates.
        keys: `[B, H, N, D]`, rotated; values: `[B, H, N, Dv]`; in order of position.
        positions: `[B, H, N]` true positions.
        pad: `[B, H]` invalid leading candidates.
        scale, softcap, sinks: of the attention call.
        layer_idx, layers: which layer this is, among how many.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    pad: Tensor
    scale: float
    softcap: float
    sinks: Tensor | None
    layer_idx: int
    layers: int

    @property
    def length(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True)
class Policy:
    """Keeps everything, unless a subclass says otherwise.

    Attributes:
        budget: entries per head, or None for all.
        sinks: first tokens of each row that are always kept.
        recent: newest tokens that are always kept when the layer compresses.
        bounded: in decode a new token takes the place of an old one, so that the budget holds at every step. Otherwise
            decoded tokens are added to what was kept.
    """

    budget: Budget | None = None
    sinks: int = 0
    recent: int = 0
    bounded: bool = False

    @property
    def tail(self) -> int:
        """Newest tokens that are protected when the layer compresses."""
        return self.recent

    def scores(self, candidates: Candidates) -> Tensor | None:
        """`[B, H, N]` fp32, higher is better; None when position alone decides."""
        return None

    def counts(self, candidates: Candidates, available: Tensor, seen: Tensor, bytes_per_token: int) -> Tensor:
        """Entries that may stay.

        Args:
            available: `[B, H]` valid candidates, on the host.
            seen: `[B]` real tokens each row has seen, on the host.
            bytes_per_token: cost of one token per row over all budgeted layers and heads.

        Returns:
            `[B, H]` int64 on the host.
        """
        if self.budget is None:
            return available
        return self.budget.per_head(seen, bytes_per_token).unsqueeze(1).expand_as(available)

    def pinned(self, counts: Tensor, kept: Tensor) -> Tensor:
        """`[B, H]` leading slots that bounded decode never overwrites; the rest is a ring of the newest tokens.

        Args:
            counts: `[B, H]` capacity; kept: `[B, H]` entries kept of the candidates (at most the capacity).
        """
        return torch.minimum(kept, counts - max(self.tail, 1)).clamp(min=0)
