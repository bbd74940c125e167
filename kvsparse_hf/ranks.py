"""Tensor parallelism: the key/value heads of every layer are divided among processes, and some decisions are made together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the heads, or the model. With one process every method hands back what it was given.

    The collectives wait for the other ranks, which must call them at the same place: never inside a one-token step, but for
    `mean`.

    Attributes:
        rank, size: this process, and how many there are.
        group: their process group.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def share(self, heads: int) -> slice:
        """Which of all `heads` are this rank's: they are dealt out in order, equally many to each."""
        each = heads // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def largest(self, number: int, device: torch.device) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        highest = torch.tensor(number, device=device)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        return int(highest)

    def total(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """The sum of the ranks' numbers, by place."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, device=device)
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def first(self, text: str) -> str:
        """What rank 0 says."""
        if self.size == 1:
            return text
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, text, group=self.group)
        return said[0]

    def only_first(self, act: Callable[[], None]) -> None:
        """Rank 0 does `act`, once all have come so far; the others wait until it is done, or has failed."""
        if self.size > 1:
            dist.barrier(group=self.group)
        try:
            if self.rank == 0:
                act()
        finally:
            if self.size > 1:
                dist.barrier(group=self.group)

    def gather(self, mine: Tensor) -> Tensor:
        """`[B, H / size, …]` of each rank, in equal shapes, as `[B, H, …]`; on the device it was given on."""
        if self.size == 1:
            return mine
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def gather_ragged(self, mine: Tensor, length: int) -> Tensor:
        """`gather` of `[B, H / size, N]` with another N on each rank: shorter ones get zeros in front, up to `length`."""
        return self.gather(F.pad(mine, (length - mine.shape[2], 0)))

    def mean(self, mine: Tensor) -> Tensor:
        """The mean over the ranks, by element."""
        if self.size == 1:
            return mine
        total = mine.clone()
        dist.all_reduce(total, group=self.group)
        return total / self.size


ALONE = Ranks()


def several_processes() -> bool:
    """Whether this process runs with others, whatever they divide."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
