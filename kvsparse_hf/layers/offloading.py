"""A selecting layer whose keys and values live in host memory, with a hot buffer on the device."""

import torch
from torch import Tensor

from ..errors import OptionError, UnsupportedModelError
from ..policy.budgets import Budget
from .base import AttentionCall
from .host import HostMemory
from .hot import PagedStore
from .hot_attention import attend_all, attend_slots
from .placement import Placement, pinned_pages
from .selecting import SelectingLayer
from .selectors.base import Selector
from .session import Clock, Session
from .store import storage_bytes

_SEEDING = 4  # newest queries of a forward whose choices the hot buffer begins with
_ALIGNMENT = 16  # bytes that the kernels move at once


class OffloadingLayer(SelectingLayer):
    """Everything is kept in host memory, page by page; a step brings in what its selector chose and is not there yet.

    While all pages fit into the hot buffer, or `device_bytes` has room for this layer, it is a plain selecting layer. The
    decision depends on sizes alone, which all layers share; where it changes, buffers move between two steps.

    A prompt is attended and chosen from while its keys are dense on the device, one layer at a time. So is a later turn and a
    draft: for it the pages of the layer come back. One-token steps between drafts read the host pool in place.

    Args:
        placement: shared by the layers of the cache; ordinal: which of them this is.
        memory: shared by the layers of the cache.
    """

    def __init__(
        self,
        layer_idx: int,
        session: Session,
        selector: Selector,
        budget: Budget,
        reserve: int,
        backend: str,
        placement: Placement,
        ordinal: int,
        memory: HostMemory,
    ):
        super().__init__(layer_idx, session, selector, budget, reserve, backend)
        self.placement, self.ordinal, self.memory = placement, ordinal, memory
        self._floor = 0  # tokens that the next dense store must have room for
        selector.spare = placement.prefetch

    @property
    def is_compileable(self) -> bool:
        return super().is_compileable and self.memory.pinned

    @property
    def offloaded(self) -> bool:
        """Whether this layer is on two levels now."""
        return isinstance(self.store, PagedStore)

    # --- where it belongs ------------------------------------------------------------------------------------------

    def _place(self, batch: int, heads: int, like: Tensor, capacity: int, width: int) -> tuple[int, int, int, int] | None:
        """Shape of the store on two levels that segments of `capacity` tokens need; None where they stay on the device.

        Raises:
            BudgetError: the hot buffer, `device_bytes`, `host_bytes` or the machine's memory is too small. Nothing has
                changed then.
        """
        size, entry = self.selector.page_size, 2 * like.shape[-1] * like.element_size()
        pages, slots = capacity // size, self.placement.slots(self.selector, width)
        dense = batch * heads * (capacity * (entry + 4) + 24)
        hot = batch * heads * (slots * (size * entry + 8) + 4 * pages + 44)
        resident = self.placement.resident(dense, hot)
        if self.ordinal < resident or pages <= slots:
            return None
        pool = batch * heads * capacity * entry
        mine = self.store.host.nbytes if self.offloaded else 0
        same = self.offloaded and self.store.host.shape[:3] == (batch, heads, pages)
        if not same:
            # All pools together, and the old one of a layer beside its new one.
            wanted = (self.placement.layers - resident) * pool - self.memory.held + (mine if self.is_initialized else 0)
            self.memory.require(max(wanted, 0))
        return batch, heads, pages, slots

    def _check_kind(self, key: Tensor, value: Tensor) -> None:
        if key.shape[-1] != value.shape[-1]:
            raise UnsupportedModelError(
                f"keys of {key.shape[-1]} and values of {value.shape[-1]} channels do not share pages; use a selecting method, which "
                "keeps them on the device."
            )
        nbytes = 2 * self.selector.page_size * key.shape[-1] * key.element_size()
        if nbytes % _ALIGNMENT:
            raise OptionError(f"a page takes {nbytes} bytes, which is no multiple of {_ALIGNMENT}; use a larger page_size.")

    def _width(self, positions: Tensor, key: Tensor, value: Tensor) -> int:
        """Pages that a step will read with this layer's budget (see `_set_budget`)."""
        return int(self.selector.page_budget(self._budget_of(positions, key, value)).max())

    def _whole_pages(self, tokens: int) -> int:
        return super()._whole_pages(max(tokens, self._floor))

    # --- multi-token forwards --------------------------------------------------------------------------------------

    def absorb_prompt(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None = None) -> None:
        self._check_kind(key, value)
        old, batch, heads = self.store, key.shape[0], key.shape[1]
        capacity = self._whole_pages(int((key.shape[2] - pad).max()) + self.reserve)
        if old is not None and (old.batch, old.heads) == (batch, heads):
            capacity = max(capacity, old.max_capacity)
        width = self._width(positions[:, 0], key, value)
        shape = self._place(batch, heads, key, capacity, width)
        paged = old if isinstance(old, PagedStore) and shape is not None and old.fits(shape, key) else None
        if shape is not None or isinstance(old, PagedStore):
            self.store = None
        del old  # what is not needed again is free before the new buffers are allocated
        self._floor = capacity
        try:
            super().absorb_prompt(query, key, value, positions, pad, call, lse)
        finally:
            self._floor = 0
        if shape is not None:
            if paged is not None:
                for counters in (paged.counters, paged.early):
                    counters.zero_()
            self._offload(shape, paged, 0, self._votes(query, call))

    def check_turn(self, tokens: int) -> None:
        newest = self.session.clock(self.device).newest.unsqueeze(1) + tokens
        self._place_turn(newest, tokens)

    def _place_turn(self, positions: Tensor, tokens: int) -> tuple[int, tuple | None]:
        """Capacity that `tokens` more per row need, the last at `positions[:, -1]`, and what `_place` says of it."""
        store = self.store
        capacity, longest = store.max_capacity, int(store.length.max())
        if longest + tokens > capacity:
            capacity = self._whole_pages(longest + tokens + self.reserve)
        like = store.keys.view(1, 1, -1, store.keys.shape[-1]).expand(1, store.heads, -1, -1)
        width = self.selector.width if self.session.record_past else self._width(positions, like, like)
        return capacity, self._place(store.batch, store.heads, store.keys, capacity, width)

    def absorb_turn(self, query, key, value, positions, pad, call: AttentionCall) -> Tensor:
        store = self.store
        capacity, shape = self._place_turn(positions, key.shape[2])
        paged, since = (store, int(store.length.min())) if self.offloaded else (None, 0)
        if paged is not None:
            shape = shape or (*store.host.shape[:2], capacity // store.page_size, store.slots)
            self.store = paged.dense(store.max_capacity)
        try:
            out = super().absorb_turn(query, key, value, positions, pad, call)
        except BaseException:
            self.store = store
            raise
        if shape is not None:
            self._offload(shape, paged, since, self._votes(query, call))
        return out

    def _votes(self, query: Tensor, call: AttentionCall) -> Tensor:
        """`[B, H, N]` how many of the newest queries `[B, Hq, T, D]` choose each page of the (dense) store."""
        store, selector = self.store, self.selector
        pages = store.max_capacity // selector.page_size
        votes = torch.zeros(store.batch, store.heads, pages + 1, dtype=torch.int32, device=query.device)
        for newest in selector.enter(query[:, :, -_SEEDING:]).unbind(2):
            chosen = selector.select(newest, store, call).pages.long()
            chosen = torch.where(chosen < 0, pages, chosen)
            votes.scatter_add_(2, chosen, torch.ones_like(chosen, dtype=torch.int32))
        return votes[..., :pages]

    def _offload(self, shape: tuple, paged: PagedStore | None, since: int, votes: Tensor | None) -> None:
        """From a dense store to one on two levels; `paged`, where it fits or can grow, else a new one."""
        dense, selector = self.store, self.selector
        target = paged
        if paged is None or paged.slots != shape[3]:
            target = PagedStore(self.memory, shape, selector.page_size, pinned_pages(selector), dense.keys)
            since = 0
            if paged is not None:
                target.counters.copy_(paged.counters)
                target.early.copy_(paged.early)
        elif paged.pages < shape[2]:
            paged.grow(shape[2])
        target.take(dense, since, votes)
        self.store = target

    # --- one-token steps -------------------------------------------------------------------------------------------

    def decode(self, query: Tensor, key: Tensor, value: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        if not self.offloaded:
            return super().decode(query, key, value, clock, call)
        store, selector = self.store, self.selector
        query, key = selector.enter(query), selector.enter(key)
        store.append(key, value, selector.summary(), self.backend)
        selector.appended(store, key, value)
        options = dict(scale=call.scale, softcap=call.softcap, sinks=call.sinks, backend=self.backend)
        if self.session.record_past:
            return attend_all(store, query, options)
        selection = selector.select(query, store, call)
        slots = store.bring(selection.pages, store.counters, self.backend)
        out, lse = attend_slots(store, query, slots, {**options, "return_lse": selector.needs_lse})
        if selection.wider is not None:
            store.bring(selection.wider, store.early, self.backend)
        return selector.finish(out, lse, selection, store, call)

    # --- between the steps -----------------------------------------------------------------------------------------

    def grow(self, room: int) -> None:
        store = self.store
        capacity = self._whole_pages(store.max_capacity + room)
        shape = self._place(store.batch, store.heads, store.keys, capacity, self.selector.width)
        if self.offloaded:
            store.grow(capacity // store.page_size)
        elif shape is None:
            super().grow(room)
            return
        else:
            self._offload(shape, None, 0, None)
        self.selector.refresh(self.store, int(self.store.length.max()))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not self.is_initialized:
            return
        store = self.store
        place = (len(beam_idx), store.heads, store.keys, store.max_capacity, self.selector.width)
        shape = self._place(*place)
        super().reorder_cache(beam_idx)
        if shape is not None and not self.offloaded:
            self._offload(shape, None, 0, None)

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def saved_state(self) -> dict:
        return {**super().saved_state(), "slots": self.store.slots if self.offloaded else 0}

    def restore(self, tensors: dict[str, Tensor], saved: dict, device: torch.device) -> None:
        if not saved["slots"]:
            super().restore(tensors, saved, device)
            return
        self.device = device
        shape = tensors["host"].shape
        self.store = PagedStore(
            self.memory, (*shape[:3], saved["slots"]), self.selector.page_size, pinned_pages(self.selector), tensors["hot"]
        )
        self.store.load(tensors)
        self.is_initialized = True
        self._restore_selector(tensors, saved)

    def device_bytes(self) -> int:
        return storage_bytes(tensor for name, tensor in self.tensors().items() if not self.offloaded or name not in ("host", "start"))

    def host_bytes(self) -> int:
        return super().host_bytes() + (self.store.host.nbytes if self.offloaded else 0)

    def reserve_bytes(self) -> int:
        return 0 if self.offloaded else super().reserve_bytes()

    def token_places(self, row: int, seen: int) -> dict[str, Tensor]:
        if not self.offloaded:
            return super().token_places(row, seen)
        page = torch.arange(seen) // self.store.page_size
        held = torch.arange(seen) < self.store.length[row].cpu().unsqueeze(-1)
        here = self.store.page_table[row].cpu()[:, page] >= 0
        return {"device": held & here, "host": held & ~here}

    def traffic(self) -> tuple[int, int, int]:
        if not self.offloaded:
            return 0, 0, 0
        store = self.store
        hits, misses = store.counters.sum((0, 1)).tolist()
        page = store.host[0, 0, 0].nbytes
        return hits, misses, (misses + int(store.early[..., 1].sum())) * page
