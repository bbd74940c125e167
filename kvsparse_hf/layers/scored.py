"""Layers that follow the attention of every decoded token."""

from dataclasses import replace

import torch
from torch import Tensor

from .. import ops
from ..policy.base import Candidates
from ..policy.scored import Entries, ObservingPolicy, choose_victim
from .base import AttentionCall
from .evicting import EvictingLayer
from .session import Clock


class ObservingLayer(EvictingLayer):
    """Updates what its policy remembers of each kept token at every decoded one.

    The memory lies beside the keys (`store.extra`), so that it follows every permutation, growth, save and later turn.
    """

    policy: ObservingPolicy

    def decode(self, query: Tensor, key: Tensor, value: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        store, policy = self.store, self.policy
        # A full segment gives up the slot that `cursor` names.
        slot = torch.where(store.length < store.capacity, store.length, store.pinned + store.cursor)
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
            return_lse=policy.reads_weights,
            return_logits=policy.reads_weights,
            backend=self.backend,
        )
        weights = torch.exp(logits.detach() - lse.detach().unsqueeze(-1)) if policy.reads_weights else None
        self.follow(clock, slot, weights)
        return out

    def follow(self, clock: Clock, slot: Tensor, weights: Tensor | None) -> Entries:
        """After a decoded token was stored in `slot` `[B, H]`: updates the memory."""
        entries = self._entries(clock.newest, slot)
        memory = self.policy.step(entries, weights)
        for name, facts in memory.items():
            self.store.put(name, facts, entries.valid)
        return replace(entries, memory=memory)

    def _entries(self, newest: Tensor, new_slot: Tensor | None = None) -> Entries:
        """All slots of the store; what was remembered of the token before the one in `new_slot` is forgotten."""
        store = self.store
        rows, valid = store.slots()
        memory = {name: held[rows] for name, held in store.extra.items()}
        if new_slot is not None:
            is_new = torch.arange(store.max_capacity, device=rows.device) == new_slot.unsqueeze(-1)
            memory = {name: torch.where(is_new.view(*is_new.shape, *[1] * (m.dim() - 3)), 0, m) for name, m in memory.items()}
        keys = store.keys[rows] if self.policy.reads_keys else None
        return Entries(memory, store.positions[rows], valid, newest, keys)


class ScoredLayer(ObservingLayer):
    """One in, one out: at the end of each step the layer names the token that the next one replaces.

    So a decode step attends to exactly as many tokens as the budget says, the new one included, and the choice has seen
    this step's attention: the same as attending to `budget - 1` kept tokens and the new one, and dropping one afterwards.
    """

    def _rebuild(self, candidates: Candidates, index: Tensor, limit: Tensor) -> None:
        super()._rebuild(candidates, index, limit)
        self._name_victim(self._entries(candidates.positions[:, 0, -1]))

    def follow(self, clock: Clock, slot: Tensor, weights: Tensor | None) -> Entries:
        entries = super().follow(clock, slot, weights)
        self._name_victim(entries)
        return entries

    def _name_victim(self, entries: Entries) -> None:
        policy, store = self.policy, self.store
        worth = policy.worth(entries)
        victim = choose_victim(worth, entries, store.capacity, policy.sinks, policy.tails(store.capacity))
        store.cursor.copy_(victim)
