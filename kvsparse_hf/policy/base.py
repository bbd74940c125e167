"""What an evicting method decides: the score of each token, how many stay, and what is always kept."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ranks import ALONE, Ranks
from .budgets import Budget, Cost


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
        lse: `[B, Hq, T]` logs of the queries' softmax denominators, where the attention pass left them.
        memory: what the policy remembers of each candidate, `[B, H, N, …]` by name; zeros for new ones.
        fresh: newest candidates that no earlier compression has seen; None where those are the ones with queries.
        counts: `[B, H]` entries that may stay, once they are known.
        ranks: who holds the other heads of the layer, under tensor parallelism; H counts this rank's.
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
    lse: Tensor | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)
    fresh: int | None = None
    counts: Tensor | None = None
    ranks: Ranks = ALONE

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def settled(self) -> int:
        """Leading candidates that an earlier compression has seen."""
        return self.length - (self.query.shape[2] if self.fresh is None else self.fresh)

    @property
    def valid(self) -> Tensor:
        """`[B, H, N]` bool."""
        return torch.arange(self.length, device=self.keys.device) >= self.pad.unsqueeze(-1)


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
    def evicts(self) -> bool:
        """Whether tokens can be lost."""
        return self.budget is not None

    @property
    def couples_heads(self) -> bool:
        """Whether what one head keeps depends on the others, so that ranks which share the heads decide together."""
        return False

    @property
    def grid(self) -> int:
        """More than 1 where the next prompt may share out the same entries in another way (see `RaggedStore`)."""
        return 1

    @property
    def moved_slots(self) -> int | None:
        """Leading slots whose keys move with `positions="cache"`; None for all that are kept."""
        return None

    @property
    def tail(self) -> int:
        """Newest tokens that are protected when the layer compresses."""
        return self.recent

    def tails(self, counts: Tensor) -> Tensor | int:
        """`tail` where it depends on how many entries a segment may hold. `counts` `[B, H]`."""
        return self.tail

    @property
    def memory_bytes(self) -> int:
        """Bytes remembered per entry (`observe`), which count against a budget in bytes."""
        return 0

    @property
    def newest_queries(self) -> int:
        """How many of the newest queries `scores` looks at; a layer that compresses while decoding keeps as many."""
        return 0

    @property
    def queries_read(self) -> int | None:
        """How many of the newest queries of a multi-token forward `observe` and `scores` look at; None for all. Layers whose
        keys and values others read as well keep no more than these of everyone's."""
        return None if self.evicts else 0

    @property
    def reads_lse(self) -> bool:
        """Whether `observe` or `scores` need the softmax denominators of all queries, so that a layer should get hold of them."""
        return False

    def observe(self, candidates: Candidates) -> dict[str, Tensor]:
        """What to remember of each candidate after a multi-token forward, `[B, H, N, …]` by name. Kept entries carry it
        through every later step and permutation."""
        return {}

    def scores(self, candidates: Candidates) -> Tensor | None:
        """`[B, H, N]` fp32, higher is better; None when position alone decides."""
        return None

    def counts(self, candidates: Candidates, available: Tensor, seen: Tensor, cost: Cost) -> Tensor:
        """Entries that may stay.

        Args:
            available: `[B, H]` valid candidates, on the host.
            seen: `[B]` real tokens each row has seen, on the host.
            cost: what tokens cost, for a budget in bytes.

        Returns:
            `[B, H]` int64 on the host.
        """
        if self.budget is None:
            return available
        return self.budget.per_head(seen, cost).unsqueeze(1).expand_as(available)

    def must_choose(self, candidates: Candidates, available: Tensor, counts: Tensor) -> bool:
        """Whether some head holds more than may stay; `available`, `counts` `[B, H]` on the host. Ranks that decide together
        all choose where one of them must."""
        over = bool((available > counts).any())
        if not self.couples_heads:
            return over
        return bool(candidates.ranks.largest(int(over), candidates.pad.device))

    def allocate(self, candidates: Candidates, scores: Tensor, counts: Tensor) -> Tensor:
        """Last word on `counts` `[B, H]` (on the host) where tokens must go, once their scores `[B, H, N]` are known."""
        return counts

    def pinned(self, counts: Tensor, kept: Tensor) -> Tensor:
        """`[B, H]` leading slots that bounded decode never overwrites; the rest is a ring of the newest tokens.

        Args:
            counts: `[B, H]` capacity; kept: `[B, H]` entries kept of the candidates (at most the capacity).
        """
        return torch.minimum(kept, counts - max(self.tail, 1)).clamp(min=0)
