"""`positions="cache"`: kept tokens are numbered by their place in the cache, not in the text.

Realised on the keys (see `hf.rotary`): a kept key moves forward by the number of evicted tokens that lie after it. The
keys as the model rotated them are held beside the store, so that no key is ever rotated twice.
"""

import torch
from torch import Tensor

from ..hf.rotary import KeyRotation
from .store import RaggedStore, static_copy


class CachePositions:
    """Keeps the leading slots of every segment rotated to their cache positions.

    Bounded decode evicts from the ring behind the pinned slots, so with each eviction the pinned slots move by one;
    ring slots hold the newest tokens without gaps and never move. A growing layer is rotated once, when it compresses.

    Attributes:
        raw: `[B, H, P, D]` keys of the first P slots as the model rotated them.
    """

    def __init__(self, rotation: KeyRotation):
        self.rotation = rotation
        self.raw: Tensor | None = None

    def rebuild(self, store: RaggedStore, width: int) -> None:
        """After a compression: remembers the keys of the first `width` slots and moves them."""
        self.rotation = self.rotation.on(store.keys.device)
        raw = store.keys[self._rows(store, max(width, 1))[1]]
        if self.raw is not None and self.raw.shape == raw.shape:
            self.raw.copy_(raw)
        else:
            self.raw = static_copy(raw)
        rows, valid = store.slots()
        self._move(store, store.positions[rows].masked_fill(~valid, -1).amax(dim=(1, 2)))

    def step(self, store: RaggedStore, newest: Tensor) -> None:
        """After a decoded token was stored. `newest` `[B]` is its position."""
        self._move(store, newest)

    def _move(self, store: RaggedStore, newest: Tensor) -> None:
        slot, rows = self._rows(store, self.raw.shape[2])
        length = store.length.unsqueeze(-1)
        # evicted tokens after slot i = (tokens after i) - (kept entries after i)
        shift = (newest.view(-1, 1, 1) - store.positions[rows]) - (length - 1 - slot)
        pinned = (slot < length) & (slot < store.pinned.unsqueeze(-1))
        moves = (pinned & (shift > 0)).unsqueeze(-1)
        stored = store.keys[rows]
        # Until something was evicted the store holds the model's own keys; remember those of newly filled slots.
        self.raw.copy_(torch.where(moves, self.raw, stored))
        batch, heads = shift.shape[:2]
        moved = self.rotation(self.raw.flatten(0, 1), shift.flatten(0, 1)).view_as(self.raw)
        store.keys[rows.flatten()] = torch.where(moves, moved, stored).flatten(0, 2)

    @staticmethod
    def _rows(store: RaggedStore, width: int) -> tuple[Tensor, Tensor]:
        """The first `width` slots of every segment and their rows. Short segments repeat their last slot, so that every
        write of a row carries the same value."""
        slot = torch.arange(width, device=store.start.device).expand(store.batch, store.heads, -1)
        slot = torch.minimum(slot, (store.capacity.long() - 1).clamp(min=0).unsqueeze(-1))
        return slot, store.start.unsqueeze(-1) + slot

    def unrotate(self, keys: Tensor, rows: Tensor, store: RaggedStore) -> Tensor:
        """Exported keys with the moved ones replaced by the model's own. `keys` `[B, H, M, D]`, `rows` `[B, H, M]`."""
        slot = rows - store.start.unsqueeze(-1)
        width = self.raw.shape[2]
        is_raw = (slot >= 0) & (slot < width)
        raw = self.raw.gather(2, slot.clamp(0, width - 1).unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1]))
        return torch.where(is_raw.unsqueeze(-1), raw, keys)

    def restore(self, raw: Tensor) -> None:
        """Takes over saved keys."""
        self.raw = static_copy(raw)
        self.rotation = self.rotation.on(raw.device)

    def select_batch(self, index: Tensor) -> None:
        selected = self.raw[index.to(self.raw.device)]
        if selected.shape == self.raw.shape:
            self.raw.copy_(selected)
        else:
            self.raw = static_copy(selected)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.raw is None else {"raw_keys": self.raw}
