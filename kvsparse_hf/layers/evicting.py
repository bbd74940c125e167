"""A layer that keeps the tokens its policy chooses, and drops the others for good."""

import torch
from torch import Tensor

from .. import ops
from ..hf.rotary import KeyRotation
from ..policy.base import Candidates, Policy
from ..policy.select import protected_mask, select_top
from .base import AttentionCall, SparseLayer
from .positions import CachePositions
from .session import Clock, Session
from .store import RaggedStore, mark_static


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

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back without a trace: not where decode overwrites older ones."""
        return not self.policy.bounded

    # --- multi-token forwards --------------------------------------------------------------------------------------

    def absorb_prompt(self, query, key, value, positions, pad, call: AttentionCall) -> None:
        self._compress(query, key, value, positions, pad, call)

    def absorb_turn(self, query, key, value, positions, pad, call: AttentionCall) -> Tensor:
        store, session = self.store, self.session
        out = ops.chunk_attention(
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
            backend=self.backend,
        )
        if self._compresses_turns():
            self._compress(query, *self._with_kept(key, value, positions, pad), call)
        else:
            room = int((store.capacity - store.length).min())
            if room < key.shape[2]:
                self.grow(key.shape[2] - room + self.reserve)
            self.store.append(key, value, positions, pad)
        return out

    def _compresses_turns(self) -> bool:
        """The chunks of one prompt are compressed as they come. Later turns (and drafts, which may be taken back) only
        where decode is bounded: otherwise they are appended, as published."""
        if self.policy.budget is None:
            return False
        return self.policy.bounded or not (self.session.decoding or self.session.record_past)

    def _with_kept(self, key, value, positions, pad) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Kept and new tokens as one candidate list, `[B, H, M + T, …]`, in order of position."""
        keys, values, kept_positions, kept_pad, rows = self.store.export()
        if self.cache_positions is not None:
            keys = self.cache_positions.unrotate(keys, rows, self.store)
        heads = key.shape[1]
        positions = torch.cat((kept_positions, positions.unsqueeze(1).expand(-1, heads, -1)), dim=2)
        keys, values = torch.cat((keys, key.to(keys.dtype)), dim=2), torch.cat((values, value.to(values.dtype)), dim=2)
        # Padding among the new tokens stands between the kept and the new only while nothing real was kept.
        return keys, values, positions, kept_pad + pad.unsqueeze(1)

    def _compress(self, query, keys, values, positions, pad, call: AttentionCall) -> None:
        """Chooses among the candidates and rebuilds the store from the chosen ones."""
        policy, session = self.policy, self.session
        candidates = Candidates(
            query, keys, values, positions, pad, call.scale, call.softcap, call.sinks, self.layer_idx, session.binding.layers
        )
        available = (keys.shape[2] - pad).cpu()
        seen = positions[:, 0, -1].cpu() + 1
        counts = policy.counts(candidates, available, seen, session.bytes_per_token(keys, values))
        if bool((available <= counts).all()):
            index = _all_valid(pad, keys.shape[2])
        else:
            scores = policy.scores(candidates)
            if scores is None:
                scores = torch.zeros(keys.shape[:3], device=keys.device)
            on_device = counts.to(pad.device)
            protect = protected_mask(pad, keys.shape[2], on_device, policy.sinks, policy.tail)
            index = select_top(scores, pad, protect, on_device)
        self._rebuild(keys, values, positions, index, counts)

    def _rebuild(self, keys, values, positions, index, counts: Tensor) -> None:
        policy = self.policy
        kept = (index >= 0).sum(-1).cpu()
        if policy.bounded:
            capacity, pinned = counts, policy.pinned(counts, kept)
        else:
            capacity = kept + self.reserve
            pinned = capacity
        if self.store is None or not self.store.fits(capacity, keys, values):
            self.store = None  # free the old buffers before the new ones are allocated
            self.store = RaggedStore(capacity.clamp(min=1), keys, values)
        elif not policy.bounded:
            capacity = pinned = self.store.allocated
        self.store.fill(keys, values, positions, index, capacity, pinned)
        if self.cache_positions is not None:
            self.cache_positions.rebuild(self.store, int(pinned.max()) if policy.bounded else int(kept.max()))

    # --- one-token steps -------------------------------------------------------------------------------------------

    def decode(self, query: Tensor, key: Tensor, value: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        store = self.store
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
        if self.cache_positions is not None and self.policy.bounded:
            self.cache_positions.step(store, clock.newest)
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
        if self.policy.bounded or self.store is None:
            return None
        return int((self.store.capacity - self.store.length).min())

    def grow(self, room: int) -> None:
        self.store = self.store.grown(room)

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.is_initialized and self.cache_positions is not None:
            self.cache_positions.select_batch(beam_idx)

    def restore(self, tensors: dict[str, Tensor], saved: dict, device: torch.device) -> None:
        raw = tensors.pop("raw_keys", None)
        super().restore(tensors, saved, device)
        if raw is not None:
            self.cache_positions.raw = mark_static(raw)

    def tensors(self) -> dict[str, Tensor]:
        extra = self.cache_positions.tensors() if self.cache_positions is not None else {}
        return {**super().tensors(), **extra}


def _all_valid(pad: Tensor, length: int) -> Tensor:
    """`[B, H, M]` indices of every valid candidate, -1 trailing."""
    width = max(int(length - pad.min()), 0)
    index = pad.unsqueeze(-1) + torch.arange(width, device=pad.device)
    return index.masked_fill(index >= length, -1)
