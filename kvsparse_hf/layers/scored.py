"""Layers that follow the attention of every decoded token."""

from dataclasses import replace

import torch
from torch import Tensor

from .. import ops
from ..policy.base import Candidates
from ..policy.scored import Entries, FollowingPolicy, ObservingPolicy, choose_victim
from .base import AttentionCall
from .evicting import EvictingLayer
from .session import Clock


class ObservingLayer(EvictingLayer):
    """Updates what its policy remembers of each kept token at every decoded one.

    The memory lies beside the keys (`store.extra`), so that it follows every permutation, growth, save and later turn.
    """

    policy: ObservingPolicy

    def decode(self, query: Tensor, key: Tensor, value: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        store, wanted = self.store, self.policy.reads_weights
        # A full segment gives up the slot that `cursor` names.
        ops.store_token(
            store.keys,
            store.values,
            store.positions,
            key,
            value,
            clock.newest,
            store.start,
            store.capacity,
            store.length,
            store.pinned,
            store.cursor,
            backend=self.backend,
        )
        out, lse, logits = ops.decode_attention(
            query,
            store.keys,
            store.values,
            store.start,
            store.length,
            max_len=store.max_capacity,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            return_lse=wanted,
            return_logits=wanted,
            backend=self.backend,
        )
        self.follow(clock, logits.detach() if wanted else None, lse.detach() if wanted else None)
        return out

    def follow(self, clock: Clock, logits: Tensor | None, lse: Tensor | None) -> Entries:
        """After a decoded token was stored: updates the memory. `logits` `[B, Hq, C]` and `lse` `[B, Hq]` are its attention."""
        entries = self._entries(clock.newest, forget_newest=True)
        weights = None if logits is None else torch.exp(logits - lse.unsqueeze(-1))
        memory = self.policy.step(entries, weights)
        for name, facts in memory.items():
            self.store.put(name, facts, entries.valid)
        return replace(entries, memory=memory)

    def _entries(self, newest: Tensor, forget_newest: bool = False) -> Entries:
        """All slots of the store. The newest token's slot may still hold what was remembered of the one it replaced."""
        store = self.store
        rows, valid = store.slots()
        positions = store.positions[rows]
        memory = {name: held[rows] for name, held in store.extra.items()}
        if forget_newest:
            old = positions != newest.view(-1, 1, 1)
            memory = {name: held * old.view(*old.shape, *[1] * (held.dim() - 3)) for name, held in memory.items()}
        return Entries(memory, positions, valid, newest, store.keys[rows] if self.policy.reads_keys else None)


class ScoredLayer(ObservingLayer):
    """One in, one out: at the end of each step the layer names the token that the next one replaces.

    So a decode step attends to exactly as many tokens as the budget says, the new one included, and the choice has seen
    this step's attention: the same as attending to `budget - 1` kept tokens and the new one, and dropping one afterwards.
    """

    def _rebuild(self, candidates: Candidates, index: Tensor, limit: Tensor) -> None:
        super()._rebuild(candidates, index, limit)
        self._name_victim(self._entries(candidates.positions[:, 0, -1]))

    def follow(self, clock: Clock, logits: Tensor | None, lse: Tensor | None) -> Entries:
        entries = super().follow(clock, logits, lse)
        self._name_victim(entries)
        return entries

    def _name_victim(self, entries: Entries) -> None:
        policy, store = self.policy, self.store
        worth = policy.worth(entries)
        victim = choose_victim(worth, entries, store.capacity, policy.sinks, policy.tails(store.capacity))
        store.cursor.copy_(victim)


class FollowingLayer(ScoredLayer):
    """A `ScoredLayer` whose scores come from attention alone: one kernel updates them and names the victim."""

    policy: FollowingPolicy

    def follow(self, clock: Clock, logits: Tensor, lse: Tensor) -> None:
        store, policy = self.store, self.policy
        ops.follow_token(
            store.extra[policy.remembers],
            store.cursor,
            store.positions,
            logits,
            lse,
            store.start,
            store.length,
            store.capacity,
            clock.newest,
            **policy.rule,
            sinks=policy.sinks,
            recent=-1 if policy.recent is None else policy.recent,
            backend=self.backend,
        )
