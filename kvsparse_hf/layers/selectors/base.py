"""The contract between a selecting layer and the object that chooses what a step reads."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...errors import KVSparseError
from ...options import MOST
from ...policy.reading import top_ragged
from ..base import AttentionCall
from ..store import RaggedStore, static_copy, static_zeros


class Selection(NamedTuple):
    """The entries one step reads.

    Attributes:
        pages: `[B, Hs, P]` int32 page ids relative to the segment, -1 for none. Hs is H, or Hq where every query head
            reads its own pages.
        extra: what `finish` needs of the choice.
        wider: `[B, Hs, P + spare]` the same choice with more pages, where the selector was asked for `spare` ones.
    """

    pages: Tensor
    extra: tuple[Tensor, ...] = ()
    wider: Tensor | None = None


class Selector(ABC):
    """Chooses the pages (or single tokens: pages of one) that a step reads, from its own metadata.

    The layer owns keys and values and reads the chosen pages. A selector sees of the store the lengths and, unless it keeps
    all it needs itself, the keys. Everything in `select`, `appended` and `finish` is static: fixed shapes, no wait for the
    device. The other calls run outside any compiled step.

    Args:
        sinks: first tokens of each row that are always read.
        recent: newest tokens that are always read (the one being decoded included).
        reduce: how the scores of the query heads of a group become one (see `policy.reading.reduce_logits`), or "none"
            where every query head reads its own pages.
        page_size: tokens of a page.
        backend: kernels to use.

    Attributes:
        width: pages that a step reads at most.
        limit: `[B]` pages of each row, where they differ (share budgets of rows of unlike length); else None.
        spare: pages beyond its budget that a choice also names, for a layer that brings them in early (see `Selection.wider`).
    """

    STATE: ClassVar[tuple[str, ...]] = ("limit",)
    is_compileable: ClassVar[bool] = True
    needs_lse: ClassVar[bool] = False

    def __init__(self, sinks: int, recent: int, reduce: str, page_size: int = 1, backend: str = "auto"):
        self.sinks = sinks
        self.recent = recent
        self.reduce = reduce
        self.page_size = page_size
        self.backend = backend
        self.width = 0
        self.spare = 0
        self.limit: Tensor | None = None

    def minimum_pages(self) -> int:
        """Pages that are always read, and one chosen freely."""
        return self.sinks + self.recent + 1

    def page_budget(self, tokens: Tensor) -> Tensor:
        """`[B]` pages that a step reads with a budget of `tokens` `[B]`."""
        return (tokens // self.page_size).clamp(min=self.minimum_pages())

    def listed_pages(self, width: int) -> int:
        """Length of the list that `select` gives with a budget of `width` pages."""
        return width

    def set_budget(self, tokens: Tensor, device: torch.device) -> None:
        """Fixes how much a step reads: `tokens` `[B]` per key/value head, on the host."""
        pages = self.page_budget(tokens)
        self.width = int(pages.max())
        if bool((pages == self.width).all()):
            self.limit = None
        else:
            self.keep("limit", pages.to(device, torch.int32))

    def covers(self, store: RaggedStore) -> bool:
        """Whether a step reads everything that `store` can hold, so that there is nothing to choose."""
        return self.limit is None and store.max_capacity <= self.width * self.page_size

    @property
    def reads_queries(self) -> bool:
        """Whether `observe` looks at the queries of a multi-token forward."""
        return False

    # --- outside the step ------------------------------------------------------------------------------------------

    def begin(self, batch: int) -> None:
        """A conversation of so many rows starts."""

    def observe(self, query: Tensor, key: Tensor, pad: Tensor) -> None:
        """Sees the tokens of a multi-token forward before they are stored.

        Args:
            query: `[B, Hq, T, D]`; key: `[B, H, T, D]`; pad: `[B]` leading padding among them.
        """

    @abstractmethod
    def refresh(self, store: RaggedStore, since: int) -> None:
        """Brings the metadata up to date with `store`, whose entries from slot `since` on may have come, changed or gone.
        Buffers follow the store's capacity; where they already fit they keep their address."""

    def due_in(self, store: RaggedStore) -> int | None:
        """One-token steps that may run before `maintain` must; None for never. Waits for the device."""
        return None

    def maintain(self, store: RaggedStore) -> bool:
        """Periodic work between two steps. True when buffers moved."""
        return False

    def entries_read(self, store: RaggedStore) -> Tensor:
        """`[B, H]` entries of which the next step reads key and value."""
        pages = self.width if self.limit is None else self.limit.view(-1, 1)
        return store.length.clamp(max=pages * self.page_size)

    def bytes_read(self, store: RaggedStore, group: int) -> int:
        """Bytes that the next step reads in order to choose, with `group` query heads to a key/value head. Waits for the
        device."""
        return 0

    # --- in the step -----------------------------------------------------------------------------------------------

    def enter(self, states: Tensor) -> Tensor:
        """Queries or keys `[B, heads, (T,) D]` in the coordinates that the store holds."""
        return states

    def summary(self) -> Tensor | None:
        """Page summaries that the append must update, `[B, H, P, 2, D]`."""
        return None

    def appended(self, store: RaggedStore, key: Tensor, value: Tensor) -> None:
        """One token per row was stored in the last slot of every segment: `key`, `value` `[B, H, D]`."""

    @abstractmethod
    def select(self, query: Tensor, store: RaggedStore, call: AttentionCall) -> Selection:
        """What the query `[B, Hq, D]` reads."""

    def finish(
        self, out: Tensor, lse: Tensor | None, selection: Selection, store: RaggedStore, call: AttentionCall
    ) -> Tensor:
        """The step's output `[B, Hq, Dv]`, from the attention `out` (and its `lse` `[B, Hq]`) over what was selected."""
        return out

    def top(self, scores: Tensor, more: int = 0) -> Tensor:
        """The best `width` pages of `[B, Hs, P]` scores (`limit[b]` where rows differ), and so many more; ascending, -1
        behind the last."""
        if self.limit is None:
            return ops.topk_pages(scores, self.width + more, backend=self.backend)
        return top_ragged(scores, self.width + more, self.limit + more)

    def choose(self, scores: Tensor) -> Selection:
        """What these scores select."""
        return Selection(self.top(scores), wider=self.top(scores, self.spare) if self.spare else None)

    # --- state -----------------------------------------------------------------------------------------------------

    def keep(self, name: str, value: Tensor) -> None:
        """Puts `value` into the state tensor `name`, in place where it fits, so that addresses stay."""
        old = getattr(self, name)
        if old is not None and old.shape == value.shape and old.dtype == value.dtype and old.device == value.device:
            old.copy_(value)
        else:
            setattr(self, name, static_copy(value))

    def room(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None, dim: int = 2) -> None:
        """Gives the state tensor `name` that shape; where only `dim` grew, what it held stays."""
        old = getattr(self, name)
        if old is not None and old.shape == shape and old.device == like.device:
            return
        new = static_zeros(*shape, dtype=dtype or like.dtype, device=like.device)
        others = [i for i in range(len(shape)) if i != dim]
        if old is not None and old.device == like.device and all(old.shape[i] == shape[i] for i in others):
            kept = min(old.shape[dim], shape[dim])
            new.narrow(dim, 0, kept).copy_(old.narrow(dim, 0, kept))
        setattr(self, name, new)

    def select_batch(self, index: Tensor) -> None:
        """Row `i` becomes what row `index[i]` was."""
        for name, tensor in self.tensors().items():
            self.keep(name, tensor[index.to(tensor.device)])

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""
        held = {name: getattr(self, name) for name in self.STATE}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def saved_state(self) -> dict:
        """JSON facts beside `tensors()`."""
        return {"width": self.width}

    def host_bytes(self) -> int:
        """Bytes of an index in host memory."""
        return 0

    def restore(self, tensors: dict[str, Tensor], saved: dict, store: RaggedStore) -> None:
        """Takes over a saved selector, whose layer's `store` is already back."""
        self.width = saved["width"]
        if not (isinstance(self.width, int) and 0 <= self.width <= MOST):
            raise KVSparseError(f"a step cannot read {self.width!r} pages.")
        for name, tensor in tensors.items():
            if name not in self.STATE:
                raise KeyError(f"unknown selector tensor {name!r}")
            self.keep(name, tensor)


def dense_view(store: RaggedStore, rows: Tensor) -> Tensor:
    """`[R, D]` rows of a store whose segments are all alike, as `[B, H, C, D]`."""
    return rows.view(store.batch, store.heads, store.max_capacity, rows.shape[-1])
