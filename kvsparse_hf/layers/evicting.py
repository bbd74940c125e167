"""A layer that keeps the tokens its policy chooses, and drops the others for good."""

from dataclasses import replace

import torch
from torch import Tensor

from .. import ops
from ..errors import KVSparseError, UnsupportedOperationError
from ..hf.rotary import KeyRotation
from ..policy.base import Candidates, Policy
from ..policy.budgets import Cost
from ..policy.select import all_valid, append_zeros, protected_mask, select_top
from .base import AttentionCall, SparseLayer
from .drafts import Held
from .positions import CachePositions
from .session import Clock, Session
from .store import RaggedStore


class EvictingLayer(SparseLayer):
    """Compresses at the end of a prompt, layer by layer; decodes in place.

    Without a budget it keeps everything (`FullCache`).

    Args:
        layer_idx: index of the decoder layer.
        session: shared by the layers of the cache.
        policy: what stays.
        reserve: slots allocated ahead for decoded tokens when the layer grows.
        backend: kernels to use ("auto", "triton", "flash", "torch").
        rotation: set for `positions="cache"`.
    """

    def __init__(
        self,
        layer_idx: int,
        session: Session,
        policy: Policy,
        reserve: int,
        backend: str = "auto",
        rotation: KeyRotation | None = None,
    ):
        super().__init__(layer_idx, session)
        self.policy = policy
        self.reserve = reserve
        self.backend = backend
        self.cache_positions = CachePositions(rotation) if rotation is not None else None
        self._limit: Tensor | None = None  # [B, H] entries a bounded segment may reach
        self._settled: Tensor | None = None  # [B] tokens that went through a compression which dropped some

    @property
    def is_croppable(self) -> bool:
        """Only where nothing is ever evicted: what came with the prompt would take part in the choice."""
        return not self.policy.evicts

    @property
    def can_rewind(self) -> bool:
        return not self.policy.bounded

    @property
    def grid(self) -> int:
        return self.policy.grid

    def check_crop(self, first_removed: Tensor) -> None:
        if self.policy.bounded:
            raise UnsupportedOperationError(
                "tokens cannot be taken back: newer tokens replaced older ones in place. Use decode='grow' or a method that evicts "
                "nothing."
            )
        if self._settled is not None and bool((first_removed < self._settled).any()):
            raise UnsupportedOperationError(
                f"tokens before position {int(self._settled.max())} were compressed and cannot be taken back; reset() the cache."
            )

    # --- multi-token forwards --------------------------------------------------------------------------------------

    def absorb_prompt(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None = None) -> None:
        self._compress(self._candidates(query, key, value, positions, pad, call, lse=lse, fresh=key.shape[2]))

    def attend_turn(self, query, key, value, pad, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Attention of new tokens over the kept ones and themselves, and the logs of its softmax denominators."""
        store = self.store
        return ops.chunk_attention(
            query,
            store.keys,
            store.values,
            store.start,
            store.length,
            key,
            value,
            max_len=store.max_capacity,
            scale=call.scale,
            pad=pad.to(torch.int32),
            softcap=call.softcap,
            sinks=call.sinks,
            return_lse=True,
            backend=self.backend,
        )

    def absorb_turn(self, query, key, value, positions, pad, call: AttentionCall) -> Tensor:
        out, lse = self.attend_turn(query, key, value, pad, call)
        self.take_turn(query, key, value, positions, pad, call, lse)
        return out

    def take_turn(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None) -> None:
        store = self.store
        if self._compresses_turns():
            kept = self._kept()
            new = (key, value, positions.unsqueeze(1).expand(-1, key.shape[1], -1))
            keys, values, positions = (torch.cat((old, extra.to(old.dtype)), dim=2) for old, extra in zip(kept[:3], new, strict=True))
            # Padding among the new tokens stands between the kept and the new only while nothing real was kept.
            pad = kept[3] + pad.unsqueeze(1)
            memory = {name: append_zeros(held, key.shape[2]) for name, held in kept[4].items()}
            fresh = key.shape[2]
            self._compress(self._candidates(query, keys, values, positions, pad, call, lse=lse, memory=memory, fresh=fresh))
        else:
            room = int((store.capacity - store.length).min())
            if room < key.shape[2]:
                self.grow(key.shape[2] - room + self.reserve)
            self.store.append(key.detach(), value.detach(), positions, pad)

    def try_drafts(self, drafts: Held) -> Tensor:
        if not self.can_rewind:
            return super().try_drafts(drafts)
        return self.attend_turn(*drafts.states, drafts.no_padding, drafts.call)[0]

    def take_draft(self, index: int) -> None:
        if not self.can_rewind:
            super().take_draft(index)
            return
        _, key, value = self.drafts.step(index)
        self.append_token(key, value, self.session.advance(self.layer_idx, self.device, 1))

    @property
    def queries_read(self) -> int | None:
        return self.policy.queries_read

    @property
    def reads_lse(self) -> bool:
        return self.policy.reads_lse

    def _compresses_turns(self) -> bool:
        """The chunks of one prompt are compressed as they come. Later turns only where decode is bounded: otherwise they are
        appended, as published."""
        return self.policy.evicts and (self.policy.bounded or not self.session.decoding)

    def _kept(self) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Keys, values, positions, padding and memory of the kept tokens, in order of position (see `Candidates`)."""
        keys, values, positions, pad, rows = self.store.export()
        if self.cache_positions is not None:
            keys = self.cache_positions.unrotate(keys, rows, self.store)
        return keys, values, positions, pad, {name: held[rows] for name, held in self.store.extra.items()}

    def _compress(self, candidates: Candidates, counts: Tensor | None = None, limit: Tensor | None = None) -> None:
        """Chooses among the candidates and rebuilds the store from the chosen ones.

        Args:
            counts: `[B, H]` how many may stay; default: what the budget says.
            limit: `[B, H]` how many a bounded segment may hold later; default: `counts`.
        """
        policy, pad, length = self.policy, candidates.pad, candidates.length
        available = (length - pad).cpu()
        seen = candidates.positions[:, 0, -1].cpu() + 1
        if counts is None:
            counts = policy.counts(candidates, available, seen, self._cost(candidates.keys, candidates.values))
        candidates = replace(candidates, memory=policy.observe(candidates))
        if not policy.must_choose(candidates, available, counts):
            index = all_valid(pad, length)
        else:
            self._settled = seen
            on_device = counts.to(pad.device)
            scores = policy.scores(replace(candidates, counts=on_device))
            if scores is None:
                scores = torch.zeros(candidates.keys.shape[:3], device=pad.device)
            counts = policy.allocate(candidates, scores, counts)
            on_device = counts.to(pad.device)
            protect = protected_mask(pad, length, on_device, policy.sinks, policy.tails(on_device))
            index = select_top(scores, pad, protect, on_device)
        self._rebuild(candidates, index, counts if limit is None else limit)

    def _cost(self, keys: Tensor, values: Tensor) -> Cost:
        """What one row pays over all budgeted layers: key, value, position and what the policy remembers per entry, five
        counters per head, and the second copy of the keys that `positions="cache"` moves."""
        heads = keys.shape[1] * self.session.binding.ranks.size * self.session.budgeted_layers
        key = keys.shape[-1] * keys.element_size()
        entry, fixed = key + values.shape[-1] * values.element_size() + 4 + self.policy.memory_bytes, 24
        if self.cache_positions is not None:
            moved = self.policy.moved_slots
            entry, fixed = (entry + key, fixed) if moved is None else (entry, fixed + moved * key)
        return Cost(entry * heads, fixed * heads)

    def _rebuild(self, candidates: Candidates, index: Tensor, limit: Tensor) -> None:
        """Fills the store with the chosen candidates `index` `[B, H, M]`."""
        policy, keys, values = self.policy, candidates.keys, candidates.values
        kept = (index >= 0).sum(-1).cpu()
        if policy.bounded:
            self._limit = limit
        least, wanted = self._sizes(kept)
        if self.store is None or not self.store.arrange(least, keys, values):
            self.store = None  # free the old buffers before the new ones are allocated
            self.store = RaggedStore(wanted, keys, values, self.grid)
        allocated = self.store.allocated
        capacity = torch.minimum(allocated, limit) if policy.bounded else allocated
        pinned = torch.minimum(policy.pinned(limit, kept), capacity) if policy.bounded else capacity
        self.store.fill(keys, values, candidates.positions, index, capacity, pinned, candidates.memory)
        if self.cache_positions is not None:
            self.cache_positions.rebuild(self.store, int(pinned.max()) if policy.bounded else int(kept.max()))

    def _sizes(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, H]` entries that a segment must be able to hold, and how many to allocate where it cannot."""
        wanted = (kept + self.reserve).clamp(min=1)
        if self.policy.bounded:
            wanted = torch.minimum(wanted, self._limit)
        elif self.policy.budget is None:
            # Whole multiples of the reserve, so that prompts of similar length share a compiled graph.
            return wanted, torch.full_like(wanted, -(-int(wanted.max()) // self.reserve) * self.reserve)
        return wanted, wanted

    # --- one-token steps -------------------------------------------------------------------------------------------

    def decode(self, query: Tensor, key: Tensor, value: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        self.append_token(key, value, clock)
        return self.read_token(query, clock, call)

    def append_token(self, key: Tensor, value: Tensor, clock: Clock) -> None:
        store = self.store
        store.add_token(key, value, clock.newest, self.backend)
        if self.cache_positions is not None and self.policy.bounded:
            self.cache_positions.step(store, clock.newest)

    def read_token(self, query: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        store = self.store
        out, _, _ = ops.decode_attention(
            query,
            store.keys,
            store.values,
            store.start,
            store.length,
            max_len=store.max_capacity,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            backend=self.backend,
        )
        return out

    def open_room(self) -> int | None:
        if self.store is None:
            return None
        room = (self.store.capacity - self.store.length).cpu()
        if not self.policy.bounded:
            return int(room.min())
        growing = self.store.allocated < self._limit
        return int(room[growing].min()) if bool(growing.any()) else None

    def grow(self, room: int) -> None:
        allocated = self.store.allocated + room
        if self.policy.bounded:
            self.store = self.store.grown(torch.minimum(allocated, self._limit))
        else:
            self.store = self.store.grown(allocated)
            self.store.pinned.copy_(self.store.capacity)

    def reset(self) -> None:
        super().reset()
        self._settled = None

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if not self.is_initialized:
            return
        host = beam_idx.cpu()
        self._limit = None if self._limit is None else self._limit[host]
        self._settled = None if self._settled is None else self._settled[host]
        if self.cache_positions is not None:
            self.cache_positions.select_batch(beam_idx)

    def saved_state(self) -> dict:
        limit, settled = self._limit, self._settled
        lists = {"limit": limit, "settled": settled}
        return {**super().saved_state(), **{name: None if t is None else t.tolist() for name, t in lists.items()}}

    def restore(self, tensors: dict[str, Tensor], saved: dict, device: torch.device) -> None:
        raw = tensors.pop("raw_keys", None)
        super().restore(tensors, saved, device)
        remembered = sum(held[0].nbytes for held in self.store.extra.values())
        if remembered != self.policy.memory_bytes:
            raise KVSparseError(f"{remembered} bytes are remembered of each entry, the method needs {self.policy.memory_bytes}.")
        batch, heads = self.store.batch, self.store.heads
        self._limit, self._settled = _saved_counts(saved["limit"], batch, heads), _saved_counts(saved["settled"], batch)
        if self.policy.bounded and (self._limit is None or bool((self._limit < 1).any())):
            raise KVSparseError("the number of entries that a head may hold is missing.")
        if (raw is None) != (self.cache_positions is None):
            raise KVSparseError("the keys before their rotation are missing, or not wanted.")
        if raw is not None:
            batch, heads, _, dim = raw.shape
            if (batch, heads, dim, raw.dtype) != (self.store.batch, self.store.heads, self.store.keys.shape[1], self.store.keys.dtype):
                raise KVSparseError(f"the keys before their rotation are {tuple(raw.shape)}, which this layer cannot hold.")
            self.cache_positions.restore(raw)

    def tensors(self) -> dict[str, Tensor]:
        extra = self.cache_positions.tensors() if self.cache_positions is not None else {}
        return {**super().tensors(), **extra}


def _saved_counts(value: list | None, *shape: int) -> Tensor | None:
    """Numbers of tokens as a file names them, `shape` of them, or None where it names none."""
    counts = None if value is None else torch.tensor(value)
    if counts is not None and (counts.shape != shape or counts.dtype != torch.int64 or bool((counts < 0).any())):
        raise KVSparseError(f"counts of tokens of shape {tuple(counts.shape)}: whole numbers from 0 on of shape {shape} are needed.")
    return counts
