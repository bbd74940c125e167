"""What the layers that read one owner's keys and values bring to it in one forward."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


def as_one_group(parts: tuple[Tensor, ...], heads: int, dim: int = 1) -> Tensor:
    """Tensors of several layers with query heads at `dim`, as those of one layer whose groups hold the heads of all.

    Head `h` of the result reads key/value head `h // group` again, so that whatever is averaged over a group is averaged over
    the layers as well.
    """
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(dim, (heads, -1)) for part in parts], dim=dim + 1).flatten(dim, dim + 1)


@dataclass
class OpenForward:
    """A multi-token forward of an owner whose readers are still to come. Until the last of them has read, the owner's store
    is as it was before, and the new tokens are here.

    Attributes:
        key, value: `[B, H, T, D]` the owner's new tokens, with their graph where gradients are wanted.
        positions, pad: as `absorb_prompt` or `take_turn` want them.
        is_first: nothing was seen before.
        trains: a first forward of a training step: it ends with this step, and nothing is stored.
        brought: query, logs of the softmax denominators (or None) and call of each layer so far.
    """

    key: Tensor
    value: Tensor
    positions: Tensor
    pad: Tensor
    is_first: bool
    trains: bool = False
    brought: list = field(default_factory=list)

    def bring(self, query: Tensor, lse: Tensor | None, call, newest: int | None) -> None:
        """Adds one layer.

        Args:
            query: `[B, Hq, T', D]`; a model may compute a reader for the newest tokens alone.
            newest: how many of the queries will be looked at; None for all, and then they are taken as they are.
        """
        if newest is not None and newest < query.shape[2]:
            first = query.shape[2] - newest
            query, lse = query[:, :, first:].detach().clone(), None if lse is None else lse[:, :, first:].clone()
        self.brought.append((query, lse, call))

    def together(self) -> tuple[Tensor, Tensor | None, object]:
        """Queries, logs and call of all layers as one. A layer that brought fewer queries than the owner is left out; queries
        that are scaled otherwise are brought to the owner's scale."""
        heads = self.key.shape[1]
        owned, _, call = self.brought[0]
        brought = [part for part in self.brought if part[0].shape[2] == owned.shape[2]]
        queries = tuple(q if c.scale == call.scale else q * (c.scale / call.scale) for q, _, c in brought)
        logs = tuple(lse for _, lse, _ in brought)
        sinks = tuple(c.sinks for _, _, c in brought)
        if sinks[0] is not None:
            call = replace(call, sinks=as_one_group(sinks, heads, dim=0))
        lse = None if any(part is None for part in logs) else as_one_group(logs, heads)
        query = as_one_group(queries, heads)
        self.brought.clear()  # frees the parts
        return query, lse, call
