"""Layers that let decoded tokens gather and compress between two steps, outside the compiled one."""

import torch
from torch import Tensor

from .. import ops
from ..errors import KVSparseError, UnsupportedOperationError
from ..policy.base import Candidates, Policy
from ..policy.budgets import Cost
from ..policy.scored import DroppingPolicy
from .base import AttentionCall
from .evicting import EvictingLayer
from .scored import ObservingLayer
from .session import Clock, Session
from .store import static_copy, static_zeros


class QueryRing:
    """The newest queries of every row, in a fixed buffer. The query at position p lies in slot `p % width`.

    Attributes:
        buffer: `[B, Hq, W, D]`, None before the first forward.
    """

    def __init__(self, width: int):
        self.width = width
        self.buffer: Tensor | None = None

    def extend(self, query: Tensor, newest: Tensor) -> None:
        """Takes the last of `query` `[B, Hq, T, D]`, the newest of which stand at positions `newest` `[B]`."""
        batch, heads, tokens, dim = query.shape
        if self.buffer is None or self.buffer.shape != (batch, heads, self.width, dim):
            self.buffer = static_zeros(batch, heads, self.width, dim, dtype=query.dtype, device=query.device)
        taken = min(tokens, self.width)
        # Padding stands at negative positions; the slots it lands in are written again before they are read.
        slot = (newest.long().unsqueeze(1) + torch.arange(1 - taken, 1, device=query.device)) % self.width
        index = slot[:, None, :, None].expand(-1, heads, -1, dim)
        self.buffer.scatter_(2, index, query[:, :, tokens - taken :].detach())

    def push(self, query: Tensor, newest: Tensor) -> None:
        """Takes one query `[B, Hq, D]` per row. Static."""
        batch, heads, dim = query.shape
        index = (newest.long() % self.width).view(batch, 1, 1, 1).expand(-1, heads, -1, dim)
        self.buffer.scatter_(2, index, query.detach().unsqueeze(2))

    def newest(self, newest: Tensor, count: int) -> Tensor:
        """`[B, Hq, count, D]` in order of position. In a row that has seen fewer tokens the leading ones mean nothing."""
        slot = (newest.long().unsqueeze(1) + torch.arange(1 - count, 1, device=newest.device)) % self.width
        return self.buffer.gather(2, slot[:, None, :, None].expand(-1, self.buffer.shape[1], -1, self.buffer.shape[3]))

    def select_batch(self, index: Tensor) -> None:
        selected = self.buffer[index.to(self.buffer.device)]
        if selected.shape == self.buffer.shape:
            self.buffer.copy_(selected)
        else:
            self.buffer = static_copy(selected)


class RecompressingLayer(EvictingLayer):
    """Adds decoded tokens, and compresses to the budget again after every `interval` of them.

    The choice is made by the policy's own scores from the newest queries, which a ring keeps. Between two choices a
    segment holds up to `budget + interval` entries. Steps are counted from the end of the last multi-token forward, the
    same for all rows, so that a padded row is compressed when the row alone would be.

    Args:
        interval: decoded tokens between two compressions.
    """

    def __init__(self, layer_idx: int, session: Session, policy: Policy, reserve: int, backend: str, interval: int):
        super().__init__(layer_idx, session, policy, reserve, backend)
        self.interval = interval
        self.ring = QueryRing(policy.newest_queries) if policy.newest_queries else None
        self._due = 0  # tokens seen, padding included, when the next compression is due
        self._call = AttentionCall(1.0)

    @property
    def can_rewind(self) -> bool:
        return False

    def check_crop(self, first_removed: Tensor) -> None:
        raise UnsupportedOperationError("tokens cannot be taken back: this cache is compressed again while it decodes.")

    def _compresses_turns(self) -> bool:
        return True

    def absorb_prompt(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None = None) -> None:
        self._note(query, positions[:, 0, -1], call)
        super().absorb_prompt(query, key, value, positions, pad, call, lse)

    def take_turn(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None) -> None:
        self._note(query, positions[:, -1], call)
        super().take_turn(query, key, value, positions, pad, call, lse)

    def _note(self, query: Tensor, newest: Tensor, call: AttentionCall) -> None:
        self._call = AttentionCall(call.scale, call.softcap)
        self._due = self._seen(query.device) + self.interval
        if self.ring is not None:
            self.ring.extend(query, newest)

    def _seen(self, device: torch.device) -> int:
        return int(self.session.clock(device).seen)

    def _candidates(self, query, keys, *args, **more):
        # A short turn brings fewer queries than the policy looks at; the ring has the ones before.
        if self.ring is not None and query.shape[2] < min(self.ring.width, keys.shape[2]):
            more["lse"] = None
            query = self.ring.newest(self.session.clock(keys.device).newest, min(self.ring.width, keys.shape[2]))
        return super()._candidates(query, keys, *args, **more)

    def _cost(self, keys: Tensor, values: Tensor) -> Cost:
        cost = super()._cost(keys, values)
        if self.ring is None:
            return cost
        ring = self.ring.buffer[0].numel() * self.ring.buffer.element_size()
        return Cost(cost.per_token, cost.fixed + ring * self.session.budgeted_layers)

    def _rebuild(self, candidates: Candidates, index: Tensor, limit: Tensor) -> None:
        self._limit = limit
        super()._rebuild(candidates, index, limit)

    def _sizes(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        least = kept + self.interval
        return least, torch.minimum(kept + max(self.reserve, self.interval), self._limit + self.interval)

    def read_token(self, query: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        out = super().read_token(query, clock, call)
        if self.ring is not None:
            queries = self.gather(query)
            if queries is not None:
                self.ring.push(queries[0], clock.newest)
        return out

    # --- between two steps -----------------------------------------------------------------------------------------

    def due_in(self) -> int | None:
        return max(self._due - self._seen(self.device), 0)

    @torch.no_grad()
    def maintain(self) -> bool:
        """Compresses to the budget. Buffers move only where a row has not reached its budget yet and needs more room."""
        seen = self._seen(self.device)
        steps = seen - (self._due - self.interval)
        self._due = seen + self.interval
        before = self.store
        keys, values, positions, pad, memory = self._kept()
        query = keys[:, :, :0]
        if self.ring is not None:
            newest = self.session.clock(self.device).newest
            query = self.ring.newest(newest, min(self.ring.width, keys.shape[2]))
        fresh = min(steps, keys.shape[2])
        candidates = super()._candidates(query, keys, values, positions, pad, self._call, memory=memory, fresh=fresh)
        self._compress(candidates, self._limit)
        return self.store is not before

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.is_initialized and self.ring is not None:
            self.ring.select_batch(beam_idx)

    def tensors(self) -> dict[str, Tensor]:
        held = super().tensors()
        return held if self.ring is None or self.ring.buffer is None else {**held, "newest_queries": self.ring.buffer}

    def saved_state(self) -> dict:
        return {**super().saved_state(), "due": self._due, "scale": self._call.scale, "softcap": self._call.softcap}

    def restore(self, tensors: dict[str, Tensor], saved: dict, device: torch.device) -> None:
        queries = tensors.pop("newest_queries", None)
        super().restore(tensors, saved, device)
        self._due, self._call = saved["due"], AttentionCall(saved["scale"], saved["softcap"])
        if not (0 < self._call.scale < 1e6 and 0 <= self._call.softcap < 1e6):
            raise KVSparseError("the factor or the cap on the logits is none.")
        if (queries is None) != (self.ring is None):
            raise KVSparseError("the newest queries are missing, or not wanted.")
        if queries is not None:
            batch, heads, width, dim = queries.shape
            expected = (self.store.batch, self.ring.width, self.store.keys.shape[1], self.store.keys.dtype)
            if (batch, width, dim, queries.dtype) != expected or heads % self.store.heads:
                raise KVSparseError(f"the newest queries are {tuple(queries.shape)}, which this layer cannot have seen.")
            self.ring.buffer = static_copy(queries)


class BlockDroppingLayer(ObservingLayer):
    """Follows the attention of every decoded token, and drops many at once from a segment that is full.

    Each segment drops by its own length, so that a padded row does what the row alone would.
    """

    policy: DroppingPolicy

    def follow(self, clock: Clock, logits: Tensor, lse: Tensor) -> None:
        store = self.store
        ops.record_token(
            store.extra["history"],
            store.extra["received"],
            store.positions,
            logits,
            lse,
            store.start,
            store.length,
            clock.newest,
            window=self.policy.window,
            use_max=self.policy.use == "max",
            backend=self.backend,
        )

    def due_in(self) -> int | None:
        full_size = self.store.allocated >= self._limit  # the others grow first
        if not bool(full_size.any()):
            return None
        return int((self._limit - self.store.length.cpu())[full_size].min())

    @torch.no_grad()
    def maintain(self) -> bool:
        """Drops the policy's block from every full segment."""
        limit, length, before = self._limit, self.store.length.cpu().long(), self.store
        counts = torch.where(length >= limit, limit - self.policy.dropped(limit), length)
        keys, values, positions, pad, memory = self._kept()
        nothing = keys[:, :, :0]
        candidates = self._candidates(nothing, keys, values, positions, pad, AttentionCall(1.0), memory=memory, fresh=0)
        self._compress(candidates, counts, limit)
        return self.store is not before
