"""Policies that judge what is held again while a layer decodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ranks import Ranks
from .base import Candidates, Policy


@dataclass(frozen=True)
class Entries:
    """The entries of one layer, N per head in any order.

    Attributes:
        memory: what the policy remembers of each, `[B, H, N, …]` by name.
        positions: `[B, H, N]` true positions; valid: `[B, H, N]` bool.
        newest: `[B]` position of each row's newest token.
        keys: `[B, H, N, D]`, for policies that say `reads_keys`.
    """

    memory: dict[str, Tensor]
    positions: Tensor
    valid: Tensor
    newest: Tensor
    keys: Tensor | None = None

    @classmethod
    def of(cls, candidates: Candidates) -> "Entries":
        """All candidates of a multi-token forward, seen from its newest token."""
        newest = candidates.positions[:, 0, -1]
        return cls(candidates.memory, candidates.positions, candidates.valid, newest, candidates.keys)

    @property
    def age(self) -> Tensor:
        """`[B, H, N]` queries that have seen each entry, its own included."""
        return self.newest.view(-1, 1, 1) - self.positions + 1


@dataclass(frozen=True)
class ObservingPolicy(Policy):
    """Judges what is held while the layer decodes: by attention that it remembers, or by the keys.

    Attributes:
        reads_weights: the layer must follow the attention of decoded tokens.
        reads_keys: `worth` needs the keys.
    """

    bounded: bool = True

    reads_weights = True
    reads_keys = False

    def worth(self, entries: Entries) -> Tensor:
        """`[B, H, N]` fp32, higher is better."""
        raise TypeError(f"{type(self).__name__} must define this.")

    def scores(self, candidates: Candidates) -> Tensor:
        return self.worth(Entries.of(candidates))

    def pinned(self, counts: Tensor, kept: Tensor) -> Tensor:
        # No ring: which slot is overwritten is chosen at every step.
        return torch.zeros_like(counts)


@dataclass(frozen=True)
class FollowingPolicy(ObservingPolicy):
    """Remembers one score per entry, made of attention by a rule that `ops.follow_token` knows.

    Attributes:
        remembers: the name of the score.
    """

    remembers = ""
    memory_bytes = 4

    @property
    def rule(self) -> dict:
        """How a decoded token's attention changes the score, as options of `ops.follow_token`."""
        raise TypeError(f"{type(self).__name__} must define this.")

    def agree(self, scores: Tensor, ranks: Ranks) -> bool:
        """Makes the scores `[R]` of all ranks one where all heads of a layer share their choice: every head then holds the same
        tokens in the same slots. True where they changed."""
        if ranks.size == 1 or not self.couples_heads:
            return False
        scores.copy_(ranks.mean(scores))
        return True


@dataclass(frozen=True)
class DroppingPolicy(ObservingPolicy):
    """Remembers a history that `ops.record_token` keeps; lets a segment fill up, then drops a block of the worst entries.

    Attributes:
        window: newest queries in the history.
        use: "mean" or "max" over the query heads of a group.
    """

    window: int = 400
    use: str = "mean"

    def dropped(self, limit: Tensor) -> Tensor:
        """How many a full segment of `limit` `[B, H]` entries drops, at least 1."""
        raise TypeError(f"{type(self).__name__} must define this.")


def choose_victim(worth: Tensor, entries: Entries, capacity: Tensor, sinks: int, tails: Tensor | int) -> Tensor:
    """The entry that the next token replaces: the worst that is not protected; among equals the newest one.

    The next token counts among the `tails` newest, so only `tails - 1` of those held are protected. Where a segment is
    too small for sinks and tail, the newest come first, as in `protected_mask`.

    Args:
        worth: `[B, H, N]` fp32.
        capacity: `[B, H]` entries a segment holds when full.
        sinks: first tokens to protect; tails: newest tokens to protect, a number or `[B, H]`.

    Returns:
        `[B, H]` int32 slots. Meaningless for a segment that is not full.
    """
    tail = torch.minimum(capacity.clamp(max=tails), (capacity - sinks).clamp(min=1)).unsqueeze(-1)
    sink = (capacity.unsqueeze(-1) - tail).clamp(max=sinks)
    newest = entries.newest.view(-1, 1, 1)
    recent = entries.positions > newest - (tail - 1)
    free = entries.valid & ~recent & (entries.positions >= sink)
    limits = torch.finfo(torch.float32)
    worth = worth.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    worth = torch.where(free, worth, float("inf"))
    worst = free & (worth == worth.amin(-1, keepdim=True))
    return torch.where(worst, entries.positions, -1).argmax(-1).to(torch.int32)
