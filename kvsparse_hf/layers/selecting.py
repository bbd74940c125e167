"""A layer that holds everything and reads, at each step, only what its selector chooses."""

import torch
from torch import Tensor

from .. import ops
from ..policy.budgets import Budget, Cost
from ..policy.reading import per_query_head
from .base import AttentionCall, SparseLayer
from .selectors.base import Selector
from .session import Clock, Session
from .store import RaggedStore

_STATE = "selector."


class SelectingLayer(SparseLayer):
    """Nothing is evicted: a prompt, its later chunks, further turns and drafts are attended densely and exactly; a decoded
    token reads the selector's choice.

    All segments are alike, and a whole number of the selector's pages long, so that the store can be viewed as
    `[B, H, C, D]`. While drafts may be taken back (assisted decoding) one-token steps read everything, as the verification
    of several tokens does: what is generated then does not depend on how the drafts fall.

    Args:
        layer_idx: index of the decoder layer.
        session: shared by the layers of the cache.
        selector: what a step reads.
        budget: how much it reads per key/value head; a share counts against what the row has seen.
        reserve: slots allocated ahead for decoded tokens.
        backend: kernels to use ("auto", "triton", "flash", "torch").
    """

    def __init__(
        self, layer_idx: int, session: Session, selector: Selector, budget: Budget, reserve: int, backend: str = "auto"
    ):
        super().__init__(layer_idx, session)
        self.selector = selector
        self.budget = budget
        self.reserve = reserve
        self.backend = backend

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` may compile the step."""
        return self.selector.is_compileable

    # --- multi-token forwards --------------------------------------------------------------------------------------

    def absorb_prompt(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None = None) -> None:
        selector = self.selector
        selector.begin(key.shape[0])
        self._set_budget(positions[:, 0], key, value)
        selector.observe(query, key, pad[:, 0])
        key = selector.enter(key)
        held = key.shape[2] - pad
        needed = self._whole_pages(int(held.max()) + self.reserve)
        capacity = torch.full(pad.shape, needed)
        if self.store is None or not self.store.fits(capacity, key, value):
            self.store = None  # free the old buffers before the new ones are allocated
            self.store = RaggedStore(capacity, key, value)
        store = self.store
        slot = torch.arange(int(held.max()), device=key.device)
        index = torch.where(slot < held.unsqueeze(-1), pad.unsqueeze(-1) + slot, -1)
        store.fill(key, value, positions, index, store.allocated, store.allocated)
        selector.refresh(store, 0)

    def absorb_turn(self, query, key, value, positions, pad, call: AttentionCall) -> Tensor:
        self.open_turn(query, key, value, positions, pad)
        out, _ = self.attend_turn(query, key, value, pad, call)
        self.take_turn(query, key, value, positions, pad, call, None)
        return out

    def open_turn(self, query, key, value, positions, pad) -> None:
        if not self.session.record_past:  # drafts come and go; the budget must not
            self._set_budget(positions, key, value)
        self.selector.observe(query, key, pad)

    def attend_turn(self, query, key, value, pad, call: AttentionCall) -> tuple[Tensor, None]:
        query, key = self.selector.enter(query), self.selector.enter(key)
        store = self.store
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
        return out, None

    def take_turn(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None) -> None:
        store, selector = self.store, self.selector
        key = selector.enter(key)
        longest = int(store.length.max())
        if store.max_capacity - longest < key.shape[2]:
            self._enlarge(longest + key.shape[2] + self.reserve)
            store = self.store
        since = int(store.length.min())
        store.append(key.detach(), value.detach(), positions, pad)
        selector.refresh(store, since)

    @property
    def queries_read(self) -> int | None:
        return None if self.selector.reads_queries else 0

    def _set_budget(self, positions: Tensor, key: Tensor, value: Tensor) -> None:
        self.selector.set_budget(self._budget_of(positions, key, value), key.device)

    def _budget_of(self, positions: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[B]` tokens that a step reads per key/value head, on the host."""
        seen = (positions[:, -1].cpu() + 1).clamp(min=1)
        entry = key.shape[-1] * key.element_size() + value.shape[-1] * value.element_size()
        return self.budget.per_head(seen, Cost(entry * key.shape[1] * self.session.binding.ranks.size * self.session.budgeted_layers, 0))

    def _whole_pages(self, tokens: int) -> int:
        size = self.selector.page_size
        return -(-tokens // size) * size

    # --- one-token steps -------------------------------------------------------------------------------------------

    def decode(self, query: Tensor, key: Tensor, value: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        self.append_token(key, value, clock)
        return self.read_token(query, clock, call)

    def append_token(self, key: Tensor, value: Tensor, clock: Clock) -> None:
        store, selector = self.store, self.selector
        key = selector.enter(key)
        store.add_token(key, value, clock.newest, self.backend, selector.summary(), selector.page_size)
        selector.appended(store, key, value)

    def read_token(self, query: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        store, selector = self.store, self.selector
        query = selector.enter(query)
        if self.session.record_past or selector.covers(store):
            return self.read(query, None, call)[0]
        selection = selector.select(query, store, call)
        out, lse = self.read(query, selection.pages, call)
        return selector.finish(out, lse, selection, store, call)

    def read(self, query: Tensor, pages: Tensor | None, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention over the chosen pages, or over everything: `[B, Hq, Dv]`, and its log-sum-exp where it is needed.

        The only place that touches stored keys and values in a step, apart from selectors that score every key.
        """
        store, selector = self.store, self.selector
        # Where query heads choose for themselves, each is given its key/value head's segment as its own.
        heads = store.heads if pages is None else pages.shape[1]
        out, lse, _ = ops.decode_attention(
            query,
            store.keys,
            store.values,
            per_query_head(store.start, heads),
            per_query_head(store.length, heads),
            max_len=store.max_capacity,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            pages=pages,
            page_size=selector.page_size,
            return_lse=pages is not None and selector.needs_lse,
            backend=self.backend,
        )
        return out, lse

    # --- between the steps -----------------------------------------------------------------------------------------

    def open_room(self) -> int | None:
        return int((self.store.capacity - self.store.length).min())

    def grow(self, room: int) -> None:
        self._enlarge(self.store.max_capacity + room)
        self.selector.refresh(self.store, int(self.store.length.max()))

    def _enlarge(self, capacity: int) -> None:
        self.store = self.store.grown(torch.full_like(self.store.allocated, self._whole_pages(capacity)))
        self.store.pinned.copy_(self.store.capacity)

    def due_in(self) -> int | None:
        return self.selector.due_in(self.store)

    def maintain(self) -> bool:
        return self.selector.maintain(self.store)

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.is_initialized:
            self.selector.select_batch(beam_idx)

    def crop(self, first_removed: Tensor) -> None:
        super().crop(first_removed)
        if self.is_initialized:
            self.selector.refresh(self.store, int(self.store.length.min()))

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **{_STATE + name: tensor for name, tensor in self.selector.tensors().items()}}

    def saved_state(self) -> dict:
        return {**super().saved_state(), "selector": self.selector.saved_state()}

    def restore(self, tensors: dict[str, Tensor], saved: dict, device: torch.device) -> None:
        mine = {name: tensor for name, tensor in tensors.items() if not name.startswith(_STATE)}
        super().restore(mine, saved, device)
        self._restore_selector(tensors, saved)

    def _restore_selector(self, tensors: dict[str, Tensor], saved: dict) -> None:
        state = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items() if name.startswith(_STATE)}
        self.selector.restore(state, saved["selector"], self.store)

    def host_bytes(self) -> int:
        return self.selector.host_bytes()

    def bytes_read_per_step(self) -> int:
        store, selector = self.store, self.selector
        entry = self._entry_bytes() - store.positions.element_size()
        group = max(self.session.binding.query_heads // max(self.session.binding.kv_heads, 1), 1)
        if self.session.record_past or selector.covers(store):
            return int(store.length.sum()) * entry
        read = selector.entries_read(store)
        readers = group if selector.reduce == "none" else 1
        return int(read.sum()) * entry * readers + selector.bytes_read(store, group)
