"""What the two index selectors share: sinks and the newest tokens are always read, an index covers the tokens between."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..store import RaggedStore
from .base import Selector


class Lot(NamedTuple):
    """Tokens that entered a row's index together.

    Attributes:
        made_at: tokens of the row then; a crop to fewer takes the lot back.
        end: the slot where the index ends with it.
        mark: what the index needs to go back to here.
        of_prompt: it was made of a prompt, as a whole.
    """

    made_at: int
    end: int
    mark: int
    of_prompt: bool


class ZonedSelector(Selector):
    """Every row has three zones: sinks `[0, sinks)`, indexed tokens `[sinks, indexed)`, and the rest, up to the newest.

    New tokens are read exactly until `update_every` of them have gathered beyond `recent`; `maintain` then adds them to the
    index between two steps. A step so reads up to `update_every` tokens more than its budget. A crop takes back the lots
    that came later, so that the index is what it was at that length.
    """

    STATE: ClassVar[tuple[str, ...]] = ("limit", "indexed")

    def __init__(self, sinks: int, recent: int, reduce: str, update_every: int, backend: str = "auto"):
        super().__init__(sinks, recent, reduce, backend=backend)
        self.update_every = update_every
        self.indexed: Tensor | None = None  # [B] int32 end of the index, in slots
        self._lots: list[list[Lot]] = []

    def begin(self, batch: int) -> None:
        self._lots = [[] for _ in range(batch)]

    # --- what an index fills in ------------------------------------------------------------------------------------

    def add(self, store: RaggedStore, row: int, first: int, last: int) -> bool:
        """Adds the slots `first … last` of a row to the index. True when buffers moved."""
        raise TypeError(f"{type(self).__name__} must define this.")

    def mark(self, row: int) -> int:
        """A number from which `go_back` knows the present state of a row's index."""
        return 0

    def go_back(self, store: RaggedStore, row: int, end: int, mark: int) -> None:
        """Takes a row's index back to where it ended at `end` and had this `mark` (0: empty)."""
        raise TypeError(f"{type(self).__name__} must define this.")

    # --- outside the step ------------------------------------------------------------------------------------------

    def refresh(self, store: RaggedStore, since: int) -> None:
        for row, length in enumerate(store.length[:, 0].tolist()):
            lots = self._lots[row]
            stale = [lot for lot in lots if lot.made_at > length]
            if stale:
                del lots[-len(stale) :]
                self.go_back(store, row, self._end(row), lots[-1].mark if lots else 0)
            whole = not lots and (since == 0 or any(lot.of_prompt for lot in stale))
            self._extend(store, row, length, whole)
        self._publish(store)

    def _extend(self, store: RaggedStore, row: int, length: int, whole: bool) -> bool:
        """A prompt is indexed as a whole, whatever its length; what comes later waits for a lot."""
        first, last = self._end(row), length - self.recent
        if last - first < (1 if whole else self.update_every):
            return False
        moved = self.add(store, row, first, last)
        self._lots[row].append(Lot(length, last, self.mark(row), whole))
        return moved

    def _end(self, row: int) -> int:
        return self._lots[row][-1].end if self._lots[row] else self.sinks

    def _publish(self, store: RaggedStore) -> None:
        ends = [self._end(row) for row in range(store.batch)]
        self.keep("indexed", torch.tensor(ends, dtype=torch.int32, device=store.length.device))

    def due_in(self, store: RaggedStore) -> int:
        waiting = (store.length[:, 0] - self.indexed).max()
        return max(self.recent + self.update_every - int(waiting), 0)

    def maintain(self, store: RaggedStore) -> bool:
        lengths = store.length[:, 0].tolist()
        moved = [self._extend(store, row, length, False) for row, length in enumerate(lengths)]
        self._publish(store)
        return any(moved)

    def entries_read(self, store: RaggedStore) -> Tensor:
        waiting = (store.length - self.indexed.unsqueeze(1) - self.recent).clamp(min=0)
        return torch.minimum(super().entries_read(store) + waiting, store.length)

    def listed_pages(self, width: int) -> int:
        return width + self.update_every

    # --- in the step -----------------------------------------------------------------------------------------------

    def always_read(self, store: RaggedStore) -> Tensor:
        """`[B, S]` int32 slots of the sinks and of the tokens behind the index, -1 for none."""
        slot = torch.arange(self.sinks + self.recent + self.update_every, device=store.length.device)
        slot = torch.where(slot < self.sinks, slot, slot - self.sinks + self.indexed.unsqueeze(1))
        return torch.where(slot < store.length[:, :1], slot, -1).int()

    def free(self) -> Tensor | int:
        """Indexed tokens that a step may read: one number, or `[B, 1, 1]` where rows differ."""
        tokens = self.width if self.limit is None else self.limit.view(-1, 1, 1)
        return tokens - self.sinks - self.recent

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def select_batch(self, index: Tensor) -> None:
        super().select_batch(index)
        self._lots = [list(self._lots[row]) for row in index.tolist()]

    def saved_state(self) -> dict:
        return {**super().saved_state(), "lots": self._lots}

    def restore(self, tensors: dict[str, Tensor], saved: dict, store: RaggedStore) -> None:
        super().restore(tensors, saved, store)
        self._lots = [[Lot(*lot) for lot in row] for row in saved["lots"]]
