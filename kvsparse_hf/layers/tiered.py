"""A layer whose tokens lie in several tiers, ranked anew while it decodes."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..errors import BudgetError, UnsupportedOperationError
from ..policy.base import Candidates, Policy
from ..policy.budgets import Cost
from ..policy.scored import Entries, FollowingPolicy, ObservingPolicy
from ..policy.select import protected_mask
from ..policy.tiers import DEVICE, GONE, Rest, Shares, rank_tiers
from .base import AttentionCall
from .drafts import Held
from .holding import TierHolder
from .host import HostMemory
from .moving import NEW, Census, move
from .session import Clock, Session
from .tiers import Coding, DeviceTier


class TieredLayer(TierHolder):
    """Every step attends to all tiers exactly as they hold their tokens, and appends to the device.

    Ranked by the policy, the best tokens stay on the device, the next go to host memory, then to few bits, the worst away
    (`split`). Multi-token forwards rank at their end; decoded tokens gather on the device, and every `interval` of them all
    entries are ranked again between two steps, and move both ways. Without an interval they stay where they are, and so do
    later turns: the choice is that of a method that compresses prompts alone.

    Args:
        layer_idx: index of the decoder layer.
        session: shared by the layers of the cache.
        policy: ranks the entries. With an interval, it must judge what is held (`ObservingPolicy`).
        split: how many each tier gets.
        interval: decoded tokens between two rankings; None for never.
        reserve: tokens for which room is allocated ahead; doubles as it fills.
        backend: kernels to use.
        memory: where host tokens go; coding: how quantized ones are written.
    """

    def __init__(
        self,
        layer_idx: int,
        session: Session,
        policy: Policy,
        split: Shares | Rest,
        interval: int | None,
        reserve: int,
        backend: str,
        memory: HostMemory,
        coding: Coding,
    ):
        super().__init__(layer_idx, session, split, interval, reserve, memory, coding)
        self.policy = policy
        self.backend = backend
        self._open: tuple[Census, Tensor, Tensor] | None = None  # everything held, while a turn attends to it

    # --- multi-token forwards --------------------------------------------------------------------------------------

    def absorb_prompt(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None = None) -> None:
        self._ahead = self.reserve
        candidates = self._candidates(query, key, value, positions, pad, call, lse=lse, fresh=key.shape[2])
        self._settle(candidates, Census.fresh(positions))

    def absorb_turn(self, query, key, value, positions, pad, call: AttentionCall) -> Tensor:
        self.open_turn(query, key, value, positions, pad)
        out, lse = self.attend_turn(query, key, value, pad, call)
        self.take_turn(query, key, value, positions, pad, call, lse)
        return out

    def try_drafts(self, drafts: Held) -> Tensor:
        if self.interval is not None:
            return super().try_drafts(drafts)
        self.open_turn(*drafts.states, None, drafts.no_padding)
        out, _ = self.attend_turn(*drafts.states, drafts.no_padding, drafts.call)
        self._open = None
        return out

    def open_turn(self, query, key, value, positions, pad) -> None:
        census = Census.of(self.tiers)
        self._open = census, *census.collect(self.tiers)

    def attend_turn(self, query, key, value, pad, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """New tokens over everything held and themselves; the held ones as one dense store in order of position."""
        census, keys, values = self._open
        length = census.length
        first = torch.arange(census.pad.numel(), device=keys.device).view_as(census.pad) * length
        return ops.chunk_attention(
            query,
            keys.flatten(0, 2),
            values.flatten(0, 2),
            first + census.pad,
            (length - census.pad).to(torch.int32),
            key,
            value,
            max_len=length,
            scale=call.scale,
            pad=pad.to(torch.int32),
            softcap=call.softcap,
            sinks=call.sinks,
            return_lse=True,
            backend=self.backend,
        )

    def take_turn(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None) -> None:
        (census, keys, values), self._open = self._open, None
        fresh = key.shape[2]
        memory = {name: F.pad(facts, (0, fresh)) for name, facts in census.remembered(self.tiers, self.remembered).items()}
        census = census.joined(positions.unsqueeze(1).expand(-1, key.shape[1], -1))
        whole = (torch.cat(pair, dim=2) for pair in ((keys, key.detach()), (values, value.detach())))
        options = dict(lse=lse, memory=memory, fresh=fresh)
        candidates = self._candidates(query, *whole, census.positions, census.pad, call, **options)
        if not self.appends_turns:
            self._settle(candidates, census)
        else:
            target = torch.where(census.tier == NEW, DEVICE, census.tier)
            self._place(census, target, {}, _seen_at(positions[:, -1]), candidates)

    @property
    def queries_read(self) -> int | None:
        policy = self.policy
        if isinstance(policy, ObservingPolicy):
            return None if policy.reads_weights else 0
        return policy.queries_read

    @property
    def reads_lse(self) -> bool:
        return self.policy.reads_lse

    def reset(self) -> None:
        super().reset()
        self._open = None

    def _settle(self, candidates: Candidates, census: Census) -> None:
        """Ranks all entries after a multi-token forward, and puts each where it belongs."""
        policy, device = self.policy, census.pad.device
        candidates = replace(candidates, memory=policy.observe(candidates))
        available, seen = (census.length - census.pad).cpu(), _seen_at(census.positions[:, 0, -1])
        counts = self.split.counts(policy, candidates, available, seen, Cost(1))
        if not policy.must_choose(candidates, available, counts):
            scores = torch.zeros(census.tier.shape, device=device)
        else:
            scores = policy.scores(replace(candidates, counts=counts.to(device)))
            counts = policy.allocate(candidates, scores, counts)
        self._counts = counts
        self._place(census, self._rank(census, scores, seen), candidates.memory, seen, candidates)
        if self.interval is not None:
            self._due = self._seen(device) + self.interval

    def _rank(self, census: Census, scores: Tensor, seen: Tensor) -> Tensor:
        """`[B, H, M]` tier of each entry."""
        policy, pad = self.policy, census.pad
        bounds = self.split.bounds(self._counts, seen).to(pad.device)
        counts = bounds[..., DEVICE]
        protect = protected_mask(pad, census.length, counts, policy.sinks, policy.tails(counts))
        return rank_tiers(scores, pad, protect, bounds)

    def _place(
        self, census: Census, target: Tensor, memory: dict[str, Tensor], seen: Tensor, new: Candidates | None = None
    ) -> bool:
        """Moves every entry to its target tier, after making room. True when buffers moved."""
        needed = torch.stack([((target == tier) & census.valid).sum(-1).cpu() for tier in range(GONE)], dim=-1)
        given = None if new is None else (new.keys, new.values)
        try:
            moved = self.make_room(needed, seen, None if self.is_initialized else given)
        except BudgetError:
            if new is not None:  # in the middle of a forward: until a reset the layers disagree on what was seen
                self.session.unclaimed = self.layer_idx
            raise
        if new is not None and self.quantized is not None and not self.is_initialized:
            self.quantized.fit(new.keys, census.pad)
        for store in self.stores:
            for name in memory:
                store.remember(name)
        move(self.tiers, census, target, memory, given)
        return moved

    # --- one-token steps -------------------------------------------------------------------------------------------

    def decode(self, query: Tensor, key: Tensor, value: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        self.append_token(key, value, clock)
        return self.read_token(query, clock, call)

    def append_token(self, key: Tensor, value: Tensor, clock: Clock) -> None:
        self.store.add_token(key, value, clock.newest, self.backend)

    def read_token(self, query: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        follows = isinstance(self.policy, FollowingPolicy) and self.interval is not None
        stores = self.stores
        several = len(stores) > 1
        parts = []
        for store in stores:
            sinks = None if parts else call.sinks  # once in the merged denominator
            parts.append(store.attend(query, call, sinks, several or follows, follows, self.backend))
        out, lse, _ = parts[0]
        if several:
            out, lse = ops.merge_attention([part[0] for part in parts], [part[1] for part in parts], backend=self.backend)
        followed = self.gather(*(part[2].detach() for part in parts), lse.detach()) if follows else None
        if followed is not None:
            *logits, lse = followed
            for store, mine in zip(stores, logits, strict=True):
                self._follow(store, mine, lse, clock)
        return out

    def _follow(self, store: DeviceTier, logits: Tensor, lse: Tensor, clock: Clock) -> None:
        """Updates the scores of one tier. (The victim that the op names too is of no use here.)"""
        policy = self.policy
        scores = store.extra[policy.remembers]
        args = (store.cursor, store.positions, logits, lse, store.start, store.length, store.capacity, clock.newest)
        ops.follow_token(scores, *args, **policy.rule, backend=self.backend)
        policy.agree(scores, self.session.binding.ranks)

    # --- between the steps -----------------------------------------------------------------------------------------

    def _seen(self, device: torch.device) -> int:
        return int(self.session.clock(device).seen)

    def due_in(self) -> int | None:
        return None if self.interval is None else max(self._due - self._seen(self.device), 0)

    @torch.no_grad()
    def maintain(self) -> bool:
        """Ranks all entries again and moves those whose tier changed. Buffers move where a tier had to grow."""
        census = Census.of(self.tiers)
        memory = census.remembered(self.tiers, self.remembered)
        keys = census.collect(self.tiers)[0] if self.policy.reads_keys else None
        newest = self.session.clock(self.device).newest
        entries = Entries(memory, census.positions, census.valid, newest, keys)
        seen = _seen_at(newest)
        moved = self._place(census, self._rank(census, self.policy.worth(entries), seen), memory, seen)
        self._due = self._seen(self.device) + self.interval
        return moved

    # --- taking tokens back ----------------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:
        return not self.split.lossy

    @property
    def can_rewind(self) -> bool:
        return not self.split.lossy

    def check_crop(self, first_removed: Tensor) -> None:
        if self.split.lossy:
            raise UnsupportedOperationError(
                "tokens cannot be taken back: older ones may have been evicted or rounded on their account. Use shares of hbm and "
                "host alone (or action='offload')."
            )

    def crop(self, first_removed: Tensor) -> None:
        """All tokens are still reachable, so nothing but the ranking remembers those taken back; it is due at once."""
        if not self.is_initialized:
            return
        census = Census.of(self.tiers)
        stays = census.positions < first_removed.to(self.device).view(-1, 1, 1)
        move(self.tiers, census, torch.where(stays, census.tier, GONE), census.remembered(self.tiers, self.remembered))
        self._due = 0


def _seen_at(newest: Tensor) -> Tensor:
    """`[B]` real tokens seen, on the host, where the newest stands at these positions (negative: padding)."""
    return (newest.long().cpu() + 1).clamp(min=0)
