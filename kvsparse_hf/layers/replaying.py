"""A layer that keeps everything, can watch its tokens being replayed, and then drops those that are told to go."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policy.replay import replayed_attention
from ..policy.select import select_top
from .base import AttentionCall
from .evicting import EvictingLayer


@dataclass(frozen=True)
class Replay:
    """What the coming forward replays, one number per row.

    Attributes:
        first, last: positions of the part that is replayed (nothing where they are equal).
        tokens: leading new tokens that are real.
        context: first tokens of the text that take part in every softmax.
    """

    first: list[int]
    last: list[int]
    tokens: list[int]
    context: int


class ReplayingLayer(EvictingLayer):
    """A dense layer until `keep` is called; what comes later is added.

    Attributes:
        replay: set while tokens are replayed: they are attended to and judged by, but not taken.
        needed: `[B, H, N]` by position, what the replays found.
    """

    replay: Replay | None = None
    needed: Tensor | None = None

    def begin_replay(self) -> None:
        """Forgets what earlier replays found."""
        store = self.store
        self.needed = torch.zeros(store.batch, store.heads, int(store.length.max()), device=store.keys.device)

    def attend_turn(self, query, key, value, pad, call: AttentionCall) -> tuple[Tensor, Tensor]:
        if self.replay is not None:
            for row, (first, last, tokens) in enumerate(zip(self.replay.first, self.replay.last, self.replay.tokens, strict=True)):
                if first < last:
                    self._judge(row, first, last, query[row, :, :tokens], key[row, :, :tokens], call)
        return super().attend_turn(query, key, value, pad, call)

    def take_turn(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None) -> None:
        if self.replay is None:
            super().take_turn(query, key, value, positions, pad, call, lse)

    def _judge(self, row: int, first: int, last: int, query: Tensor, key: Tensor, call: AttentionCall) -> None:
        # Nothing was dropped yet, so that slots are positions.
        slots = torch.cat((torch.arange(min(self.replay.context, first)), torch.arange(first, last))).to(key.device)
        held = self.store.keys[self.store.start[row].unsqueeze(-1) + slots]
        found = replayed_attention(query, held, key, last - first, call.scale, call.softcap, call.sinks)
        self.needed[row, :, first:last] = torch.maximum(self.needed[row, :, first:last], found)

    def keep(self, chosen: Tensor) -> None:
        """Drops every token but those `chosen` `[B, H, N]` by position."""
        keys, values, positions, pad, memory = self._kept()
        candidates = self._candidates(keys[:, :, :0], keys, values, positions, pad, AttentionCall(1.0), memory=memory)
        stays = chosen.gather(2, positions.clamp(min=0)) & candidates.valid
        counts = stays.sum(-1)
        self._settled = positions[:, 0, -1].cpu() + 1
        index = select_top(stays.float(), pad, stays, counts)
        self.store = None  # its buffers would fit, but are to be freed
        self._rebuild(candidates, index, counts.cpu())
        self.needed = None

    def _sizes(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_compressed:
            return super()._sizes(kept)
        wanted = (kept + self.reserve).clamp(min=1)  # every segment by its own length
        return wanted, wanted

    @property
    def is_compressed(self) -> bool:
        return self._settled is not None

    def reset(self) -> None:
        if self.is_compressed and self is self.session.first_sparse:
            warnings.warn(
                "the compressed prompt is forgotten: the whole sequence was sent again. Pass at least one token after it, or reset() "
                "the cache first.",
                stacklevel=2,
            )
        super().reset()
        self.needed = self.replay = None
