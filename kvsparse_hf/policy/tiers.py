"""Which tier an entry belongs to: the best on the device, then the host, then few bits, the worst nowhere.

Tiers are numbered in this order; a *bound* is the rank at which one ends and the next begins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Candidates, Policy
from .budgets import Cost
from .select import NEG_INF

DEVICE, HOST, QUANTIZED, GONE = range(4)
_EXACT = 1e-9  # so that 0.3 * 10 counts as 3


@dataclass(frozen=True)
class Shares:
    """Shares of the tokens that a row has seen; the device holds the rest of 1, and what rounding leaves over.

    The evicted share counts everything the row ever saw, so that ranking again drops only what is missing from it.

    Attributes:
        host, quantized, evicted: shares in [0, 1].
        protected: entries that always stay on the device; where the shares leave it less, the host gets less.
    """

    host: float = 0.0
    quantized: float = 0.0
    evicted: float = 0.0
    protected: int = 0

    @property
    def tiers(self) -> tuple[bool, bool, bool]:
        """Which of the tiers can hold anything."""
        return True, self.host > 0, self.quantized > 0

    @property
    def lossy(self) -> bool:
        """Whether a decision can lose something."""
        return self.quantized > 0 or self.evicted > 0

    def _parts(self, seen: Tensor) -> list[Tensor]:
        return [(seen.double() * share + _EXACT).floor().long() for share in (self.host, self.quantized, self.evicted)]

    def counts(self, policy: Policy, candidates: Candidates, available: Tensor, seen: Tensor, cost: Cost) -> Tensor:
        """`[B, H]` entries of the device, on the host; as `Policy.counts`."""
        return self.bounds(available, seen)[..., DEVICE]

    def bounds(self, counts: Tensor, seen: Tensor) -> Tensor:
        """Where each tier ends.

        Args:
            counts: `[B, H]`; only its shape matters here.
            seen: `[B]` real tokens each row has seen, on the host.

        Returns:
            `[B, H, 3]` ranks on the host.
        """
        host, quantized, evicted = self._parts(seen)
        ends = torch.stack((seen - evicted - quantized - host, seen - evicted - quantized, seen - evicted), dim=-1)
        ends = torch.maximum(ends, seen.clamp(max=self.protected).unsqueeze(-1))
        return ends.unsqueeze(1).expand(*counts.shape, 3)

    def room(self, counts: Tensor, seen: Tensor) -> Tensor:
        """`[B, H, 3]` entries that no tier exceeds until a row has seen so many tokens. Arguments as `bounds`."""
        host, quantized, _ = self._parts(seen)
        # One more token can end a step of all three other shares at once, so an earlier count may be larger by two.
        device = self.bounds(counts, seen)[:, 0, DEVICE] + 2
        return torch.stack((device, host, quantized), dim=-1).unsqueeze(1).expand(*counts.shape, 3)


@dataclass(frozen=True)
class Rest:
    """A method's budget on the device, and everything else in one other tier: "offload" or "quantize" instead of "evict".

    Attributes:
        tier: HOST or QUANTIZED.
    """

    tier: int

    @property
    def tiers(self) -> tuple[bool, bool, bool]:
        """Which of the tiers can hold anything."""
        return True, self.tier == HOST, self.tier == QUANTIZED

    @property
    def lossy(self) -> bool:
        """Whether a decision can lose something."""
        return self.tier == QUANTIZED

    def counts(self, policy: Policy, candidates: Candidates, available: Tensor, seen: Tensor, cost: Cost) -> Tensor:
        """`[B, H]` entries of the device: the policy's budget."""
        return policy.counts(candidates, available, seen, cost)

    def bounds(self, counts: Tensor, seen: Tensor) -> Tensor:
        """Where each tier ends: `[B, H, 3]`; the last one holds all the rest. Arguments as `Shares.bounds`."""
        everything = torch.maximum(counts, seen.unsqueeze(1))
        return torch.stack((counts, everything if self.tier == HOST else counts, everything), dim=-1)

    def room(self, counts: Tensor, seen: Tensor) -> Tensor:
        """`[B, H, 3]` entries that no tier exceeds until a row has seen so many tokens."""
        rest = (seen.unsqueeze(1) - counts).clamp(min=0)
        none = torch.zeros_like(rest)
        return torch.stack((counts, rest if self.tier == HOST else none, none if self.tier == HOST else rest), dim=-1)


def rank_tiers(scores: Tensor, pad: Tensor, protect: Tensor, bounds: Tensor) -> Tensor:
    """Divides entries by rank.

    Args:
        scores: `[B, H, N]`, higher is better; among equals the earlier entry ranks higher.
        pad: `[B, H]` invalid leading entries.
        protect: `[B, H, N]` bool, ranked before all others.
        bounds: `[B, H, 3]` where the tiers end, ascending.

    Returns:
        `[B, H, N]` int64: DEVICE, HOST, QUANTIZED or GONE; invalid entries are GONE.
    """
    limits = torch.finfo(torch.float32)
    invalid = torch.arange(scores.shape[-1], device=scores.device) < pad.unsqueeze(-1)
    rank_by = scores.float().nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    rank_by = rank_by.masked_fill(protect, float("inf")).masked_fill(invalid, NEG_INF)
    order = torch.sort(rank_by, dim=-1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, places)
    tier = (rank.unsqueeze(-1) >= bounds.unsqueeze(-2)).sum(-1)
    return tier.masked_fill(invalid, GONE)
