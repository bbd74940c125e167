"""Layers that follow the attention of every decoded token."""

from torch import Tensor

from .. import ops
from ..policy.base import Candidates
from ..policy.scored import Entries, FollowingPolicy, ObservingPolicy, choose_victim
from .base import AttentionCall
from .evicting import EvictingLayer
from .session import Clock


class ObservingLayer(EvictingLayer):
    """Follows every decoded token: its attention, or its key.

    What the policy remembers lies beside the keys (`store.extra`), so that it follows every permutation, growth, save and
    later turn.
    """

    policy: ObservingPolicy

    def read_token(self, query: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        store, wanted = self.store, self.policy.reads_weights
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
        followed = self.gather(logits.detach(), lse.detach()) if wanted else self.gather()
        if followed is not None:
            self.follow(clock, *followed)
        return out

    def follow(self, clock: Clock, logits: Tensor | None = None, lse: Tensor | None = None) -> None:
        """After a decoded token was stored and everyone has read. `logits` `[B, Hq, C]` and `lse` `[B, Hq]` are its attention.
        A full segment then gives up the slot that `cursor` names. Static."""
        raise TypeError(f"{type(self).__name__} must define this.")


class ScoredLayer(ObservingLayer):
    """One in, one out: at the end of each step the layer names the token that the next one replaces.

    So a decode step attends to exactly as many tokens as the budget says, the new one included, and the choice has seen
    this step's attention: the same as attending to `budget - 1` kept tokens and the new one, and dropping one afterwards.
    """

    def _rebuild(self, candidates: Candidates, index: Tensor, limit: Tensor) -> None:
        super()._rebuild(candidates, index, limit)
        self._name_victim(candidates.positions[:, 0, -1])

    def follow(self, clock: Clock, logits: Tensor | None = None, lse: Tensor | None = None) -> None:
        self._name_victim(clock.newest)

    def _name_victim(self, newest: Tensor) -> None:
        policy, store = self.policy, self.store
        rows, valid = store.slots()
        memory = {name: held[rows] for name, held in store.extra.items()}
        entries = Entries(memory, store.positions[rows], valid, newest, store.keys[rows] if policy.reads_keys else None)
        tails = policy.tails(store.capacity)
        store.cursor.copy_(choose_victim(policy.worth(entries), entries, store.capacity, policy.sinks, tails))


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
        if policy.agree(store.extra[policy.remembers], self.session.binding.ranks):
            self._name_victim(clock.newest)
