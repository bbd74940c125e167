"""A store on two levels: all pages in host memory, the ones in use in a hot buffer on the device."""

import copy

import torch
from torch import Tensor

from .. import ops
from ..errors import KVSparseError
from . import staging
from .host import HostMemory
from .store import RaggedStore, copy_checked, static_zeros

_CHUNK_BYTES = 64 << 20  # of a pool that is permuted at a time


class PagedStore:
    """Keys and values of one layer, page by page; see `ops.hot_append` for the layout and the tables.

    To a selector it looks like a `RaggedStore` whose segments are all alike and begin with the row's first real token.
    A token's slot is its position, since nothing is ever evicted.

    Args:
        memory: where the host pool is taken from.
        shape: batch rows, key/value heads, pages of a segment, slots of the hot buffer.
        page_size: tokens of a page; pinned: first pages that, once full, never leave the device.
        like: tensor whose last dimension, dtype and device the buffers take.

    Attributes:
        host: `[B, H, N, 2, P, D]`; hot: `[B, H, S, 2, P, D]`.
        length: `[B, H]` int32 tokens held; visible: the same in terms of slots.
        counters, early: `[B, H, 2]` int64 hits and misses of the steps' own lists, and of what is brought in early.
        staged: the device cannot read the host pool in place.
    """

    _TABLES = ("hot", "page_table", "slot_page", "stamp", "tick", "length", "visible", "counters", "early")
    grid = 1

    def __init__(self, memory: HostMemory, shape: tuple[int, int, int, int], page_size: int, pinned: int, like: Tensor):
        batch, heads, pages, slots = shape
        device, dim = like.device, like.shape[-1]
        self.memory, self.page_size, self.pinned = memory, page_size, pinned
        self.host = memory.zeros(batch, heads, pages, 2, page_size, dim, dtype=like.dtype, device=device)
        self.hot = static_zeros(batch, heads, slots, 2, page_size, dim, dtype=like.dtype, device=device)
        ints = dict(dtype=torch.int32, device=device)
        self.page_table = static_zeros(batch, heads, pages, **ints).fill_(-1)
        self.slot_page = static_zeros(batch, heads, slots, **ints).fill_(-1)
        self.stamp = static_zeros(batch, heads, slots, **ints)
        self.tick, self.length, self.visible = (static_zeros(batch, heads, **ints) for _ in range(3))
        self.counters, self.early = (static_zeros(batch, heads, 2, dtype=torch.int64, device=device) for _ in range(2))

    # --- what it looks like ----------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        return self.hot.shape[0]

    @property
    def heads(self) -> int:
        return self.hot.shape[1]

    @property
    def pages(self) -> int:
        return self.host.shape[2]

    @property
    def slots(self) -> int:
        return self.hot.shape[2]

    @property
    def max_capacity(self) -> int:
        return self.pages * self.page_size

    @property
    def staged(self) -> bool:
        return self.host.device != self.hot.device

    @property
    def capacity(self) -> Tensor:
        return torch.full_like(self.length, self.max_capacity)

    @property
    def allocated(self) -> Tensor:
        return torch.full((self.batch, self.heads), self.max_capacity)

    @property
    def start(self) -> Tensor:
        """`[B, H]` number of each segment's first token, in the order of `positions`."""
        return self.firsts(self.max_capacity)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.max_capacity, device=self.hot.device, dtype=torch.int32).repeat(self.batch * self.heads)

    @property
    def keys(self) -> Tensor:
        """`[R, D]` rows of the hot buffer; the key `i` of slot `s` is row `2 P s + i` of its segment."""
        return self.hot.view(-1, self.hot.shape[-1])

    @property
    def values(self) -> Tensor:
        """The same rows, `P` further on: where a key is in `keys`, its value is here."""
        return self.keys[self.page_size :]

    def firsts(self, rows: int) -> Tensor:
        """`[B, H]` first row of each segment, where segments are `rows` long."""
        return torch.arange(self.batch * self.heads, device=self.hot.device).view(self.batch, self.heads) * rows

    def fits(self, shape: tuple[int, int, int, int], like: Tensor) -> bool:
        """Whether buffers for `shape` (see the class) of such keys are these."""
        mine = (self.batch, self.heads, self.pages, self.slots, self.hot.shape[-1], self.hot.dtype, self.hot.device)
        return mine == (*shape, like.shape[-1], like.dtype, like.device)

    # --- in the step -----------------------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, summary: Tensor | None, backend: str) -> None:
        """Stores one token per segment: `key`, `value` `[B, H, D]`."""
        if self.staged:
            staging.write_full_pages(self)
        tables = (self.page_table, self.slot_page, self.stamp, self.tick, self.length, self.visible)
        host = None if self.staged else self.host
        ops.hot_append(self.hot, host, *tables, key, value, self.max_capacity, self.pinned, summary, backend=backend)

    def bring(self, pages: Tensor, counters: Tensor, backend: str) -> Tensor:
        """Makes the listed pages `[B, H, K]` resident; their slots, in the order of the list."""
        tables = (self.page_table, self.slot_page, self.stamp, self.tick)
        slots, *misses = ops.hot_plan(pages, *tables, counters, self.pinned, backend=backend)
        if self.staged:
            staging.fetch(self, *misses)
        else:
            ops.hot_fetch(self.host, self.hot, *misses, backend=backend)
        return slots

    # --- outside the step ------------------------------------------------------------------------------------------

    def _newest(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, head and number of the newest page of every segment that holds something."""
        row, head = (self.length > 0).nonzero(as_tuple=True)
        return row, head, ((self.length[row, head] - 1) // self.page_size).long()

    def flush(self) -> None:
        """Writes the newest pages to the host, which then holds everything."""
        row, head, page = self._newest()
        where = tuple(index.to(self.host.device) for index in (row, head, page))
        self.host[where] = self.hot[row, head, -1].to(self.host.device)

    def span(self, first: int, last: int, row: int | None = None) -> tuple[Tensor, Tensor]:
        """As `RaggedStore.span`, copied from the host."""
        self.flush()
        rows = slice(None) if row is None else slice(row, row + 1)
        begin, end = first // self.page_size, -(-last // self.page_size)
        pages = self.host[rows, :, begin:end].to(self.hot.device)
        skip = first - begin * self.page_size
        return tuple(pages[:, :, :, part].flatten(2, 3)[:, :, skip : skip + last - first] for part in (0, 1))

    def dense(self, capacity: int) -> RaggedStore:
        """Everything on the device, in segments of `capacity` tokens (a multiple of the page size)."""
        self.flush()
        store = RaggedStore(torch.full((self.batch, self.heads), capacity), self.hot, self.hot)
        used = -(-int(self.length.max()) // self.page_size)
        shape = (self.batch, self.heads, -1, self.page_size, self.hot.shape[-1])
        for part, rows in enumerate((store.keys, store.values)):
            rows.view(shape)[:, :, :used].copy_(self.host[:, :, :used, part])
        store.positions.copy_(torch.arange(capacity, device=self.hot.device).repeat(self.batch * self.heads))
        store.length.copy_(self.length)
        for limit in (store.capacity, store.pinned):
            limit.fill_(capacity)
        return store

    def take(self, dense: RaggedStore, since: int, votes: Tensor | None = None) -> None:
        """Becomes what `dense` is. The hot buffer begins with the pages that got most votes, then the newest ones.

        Args:
            dense: segments all alike, a whole number of pages long.
            since: tokens before this slot are on the host already.
            votes: `[B, H, N]` for every page that `dense` can hold.
        """
        self.length.copy_(dense.length)
        used = -(-int(dense.length.max()) // self.page_size)
        shape = (self.batch, self.heads, -1, self.page_size, self.hot.shape[-1])
        parts = [rows.view(shape)[:, :, :used] for rows in (dense.keys, dense.values)]
        first = since // self.page_size
        for index, part in enumerate(parts):
            self.host[:, :, first:used, index].copy_(part[:, :, first:])
        votes = dense.length.new_zeros(self.batch, self.heads, used) if votes is None else votes[:, :, :used]
        self._settle(votes)
        index = self.slot_page.long().clamp(min=0)[..., None, None].expand(-1, -1, -1, *shape[3:])
        empty = (self.slot_page < 0)[..., None, None]
        for number, part in enumerate(parts):
            self.hot[:, :, :, number] = torch.where(empty, self.hot[:, :, :, number], part.gather(2, index))

    def _settle(self, votes: Tensor) -> None:
        """Fills the tables anew: pinned pages, the best voted and the newest full ones, and the newest page at the end."""
        newest = (self.length - 1).long().div(self.page_size, rounding_mode="floor").unsqueeze(-1)  # -1 where empty
        page = torch.arange(votes.shape[-1], device=votes.device)
        pinned = page[: self.pinned].expand(self.batch, self.heads, -1)
        self.slot_page.fill_(-1)
        self.slot_page[:, :, : pinned.shape[-1]] = torch.where(pinned < newest, pinned, -1).int()
        rank = votes.long() * votes.shape[-1] + page
        rank = torch.where((page >= self.pinned) & (page < newest), rank, -1)
        best = torch.sort(rank, dim=-1, descending=True)
        free = min(self.slots - 1 - self.pinned, votes.shape[-1])
        chosen = torch.where(best.values >= 0, best.indices, -1)[..., :free]
        self.slot_page[:, :, self.pinned : self.pinned + free] = chosen.int()
        self.slot_page[:, :, -1:] = newest.int()
        voted = votes.gather(2, self.slot_page.long().clamp(min=0)) > 0
        self.stamp.copy_(voted & (self.slot_page >= 0))
        self.tick.fill_(1)
        self._index_slots()

    def _index_slots(self) -> None:
        """`page_table` and `visible` from `slot_page` and `length`."""
        self.page_table.fill_(-1)
        row, head, slot = (self.slot_page >= 0).nonzero(as_tuple=True)
        self.page_table[row, head, self.slot_page[row, head, slot].long()] = slot.int()
        within = torch.where(self.length > 0, (self.length - 1) % self.page_size + 1, 0)
        self.visible.copy_((self.slots - 1) * self.page_size + within)

    def truncate(self, first_removed: Tensor) -> None:
        """Forgets the tokens at positions `first_removed[b]` and later."""
        self.flush()
        self.length.copy_(torch.minimum(self.length, first_removed.clamp(min=0).unsqueeze(1).to(torch.int32)))
        newest = ((self.length - 1).div(self.page_size, rounding_mode="floor")).unsqueeze(-1)
        gone = self.slot_page >= newest
        self.slot_page.masked_fill_(gone, -1)
        self.stamp.masked_fill_(gone, 0)
        self.slot_page[:, :, -1:] = newest.int()
        row, head, page = self._newest()
        where = tuple(index.to(self.host.device) for index in (row, head, page))
        self.hot[row, head, -1] = self.host[where].to(self.hot.device)
        self._index_slots()

    def grow(self, pages: int) -> None:
        """Makes room for so many pages, in a new host pool."""
        host = self.memory.zeros(*self.host.shape[:2], pages, *self.host.shape[3:], dtype=self.host.dtype, device=self.hot.device)
        table = static_zeros(self.batch, self.heads, pages, dtype=torch.int32, device=self.hot.device).fill_(-1)
        host[:, :, : self.pages].copy_(self.host)
        table[:, :, : self.pages].copy_(self.page_table)
        self.host, self.page_table = host, table

    def select_batch(self, index: Tensor) -> "PagedStore":
        """The store whose row `i` is row `index[i]` of this one; itself, changed in place, where there are as many."""
        index = index.to(self.hot.device)
        target = self
        if len(index) != self.batch:
            shape = (len(index), self.heads, self.pages, self.slots)
            target = PagedStore(self.memory, shape, self.page_size, self.pinned, self.hot)
        rows = torch.arange(len(index), device=index.device)
        rows = (rows[index != rows] if target is self else rows).to(self.host.device)  # the others hold what they shall
        used, source = -(-int(self.length.max()) // self.page_size), index.to(self.host.device)[rows]
        step = max(1, _CHUNK_BYTES // (self.host[:, :, 0].nbytes + 1))
        for first in range(0, used if len(rows) else 0, step):  # not the whole pool at once: the device may be smaller
            target.host[rows, :, first : first + step] = self.host[:, :, first : first + step][source]
        for name in self._TABLES:
            getattr(target, name).copy_(getattr(self, name)[index])
        return target

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name, and where the segments start."""
        return {"start": self.start, "host": self.host, **{name: getattr(self, name) for name in self._TABLES}}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over saved tensors (as `tensors()` names them) of a store of the same shape.

        Raises:
            KVSparseError: they cannot be those of such a store.
        """
        copy_checked({name: getattr(self, name) for name in ("host", *self._TABLES)}, tensors)
        bounds = {"length": (0, self.max_capacity), "visible": (0, self.slots * self.page_size)}
        bounds |= {"slot_page": (-1, self.pages - 1), "page_table": (-1, self.slots - 1)}
        for name, (low, high) in bounds.items():
            table = getattr(self, name)
            if int(table.min()) < low or int(table.max()) > high:
                raise KVSparseError(f"the table {name!r} points to what does not exist.")

    def __deepcopy__(self, memo: dict) -> "PagedStore":
        other = memo[id(self)] = object.__new__(PagedStore)
        for name, value in vars(self).items():
            if name != "host":  # an ordinary copy would be one on the device
                setattr(other, name, copy.deepcopy(value, memo))
        other.host = other.memory.like(self.host, self.hot.device)
        return other
