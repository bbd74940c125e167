"""The flat, ragged store of one layer: every (row, key/value head) owns its own segment of any length."""

import math

import torch
from torch import Tensor

from .. import ops
from ..errors import KVSparseError
from ..policy.budgets import distribute


def static_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer that keeps its address: the compiler may read it in place in a CUDA graph.

    It is an ordinary tensor also under `torch.inference_mode()`, so that later forwards outside of it may write to it.
    """
    with torch.inference_mode(False):
        tensor = torch.zeros(*shape, dtype=dtype, device=device)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


def static_like(tensor: Tensor, rows: int | None = None) -> Tensor:
    """`static_zeros` in the shape (or with another first dimension), dtype and device of `tensor`."""
    shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
    return static_zeros(*shape, dtype=tensor.dtype, device=tensor.device)


def static_copy(tensor: Tensor) -> Tensor:
    """A static buffer with the contents of `tensor`."""
    return static_like(tensor).copy_(tensor.detach())


class RaggedStore:
    """Keys, values and true positions of the kept tokens of one layer.

    Head `h` of row `b` owns the rows `start[b, h] … start[b, h] + length[b, h]` of the flat buffers and may fill them up
    to `capacity[b, h]`. The order inside a segment is free, since keys carry their rotary position. A uniform layer is
    the special case that can be viewed as `[B, H, C, D]`.

    Attributes:
        keys: `[R, Dk]`; values: `[R, Dv]`; positions: `[R]` int32, counted from the row's first real token.
        start: `[B, H]` int64; capacity, length, pinned, cursor: `[B, H]` int32. A full segment is overwritten round and
            round from slot `pinned` on; a segment with `pinned == capacity` only grows.
        max_capacity: largest segment that can be allocated in place (a host constant: it fixes kernel grids).
        extra: further `[R, …]` tensors by name (scores, …) that follow every permutation.
    """

    _PER_HEAD = ("capacity", "length", "pinned", "cursor")

    def __init__(self, allocated: Tensor, keys_like: Tensor, values_like: Tensor, grid: int = 1):
        """Allocates segments.

        Args:
            allocated: `[B, H]` int64 on the host, entries per segment (at least 1 each).
            keys_like, values_like: tensors whose last dimension, dtype and device the buffers take.
            grid: `max_capacity` is rounded up to a multiple of this, so that other shares of the same rows seldom change it.
        """
        device = keys_like.device
        self.allocated = allocated
        self.grid = grid
        self.max_capacity = math.ceil(int(allocated.max()) / grid) * grid
        rows = int(allocated.sum())
        start = allocated.flatten().cumsum(0) - allocated.flatten()
        self.keys = self._payload(rows, keys_like)
        self.values = self._payload(rows, values_like)
        self.positions = static_zeros(rows, dtype=torch.int32, device=device)
        self.start = static_copy(start.view_as(allocated).to(device))
        for name in self._PER_HEAD:
            setattr(self, name, self._table(name, allocated, device))
        self.extra: dict[str, Tensor] = {}

    def _table(self, name: str, allocated: Tensor, device: torch.device) -> Tensor:
        """What is kept of every segment under a name of `_PER_HEAD`: `[B, H, …]`."""
        return static_zeros(*allocated.shape, dtype=torch.int32, device=device)

    def _payload(self, rows: int, like: Tensor) -> Tensor:
        """The buffer of the keys or the values."""
        return static_zeros(rows, like.shape[-1], dtype=like.dtype, device=like.device)

    def _empty(self, allocated: Tensor) -> "RaggedStore":
        """A store of the same kind with other segments, nothing in them."""
        return RaggedStore(allocated, self.keys, self.values, self.grid)

    @property
    def batch(self) -> int:
        return self.start.shape[0]

    @property
    def heads(self) -> int:
        return self.start.shape[1]

    def arrange(self, needed: Tensor, keys_like: Tensor, values_like: Tensor) -> bool:
        """Divides the buffers anew where these segments `[B, H]` cannot hold `needed` entries but others could; their
        contents are lost then.

        Returns:
            False when the buffers cannot hold `needed` entries of such keys and values.
        """
        if self.fits(needed, keys_like, values_like):
            return True
        rows, whole = self.keys.shape[0], torch.zeros_like(needed)
        if needed.shape != self.allocated.shape or not self.fits(whole, keys_like, values_like):
            return False
        if int(needed.sum()) > rows or int(needed.max()) > self.max_capacity:
            return False
        spare = distribute(torch.ones(needed.numel()), rows - int(needed.sum()), (self.max_capacity - needed).flatten())
        self.allocated = needed + spare.view_as(needed)
        self.start.copy_((self.allocated.flatten().cumsum(0) - self.allocated.flatten()).view_as(needed))
        return True

    def fits(self, needed: Tensor, keys_like: Tensor, values_like: Tensor) -> bool:
        """Whether this allocation can hold `needed` `[B, H]` entries of such keys and values in place."""
        return (
            self.allocated.shape == needed.shape
            and bool((self.allocated >= needed).all())
            and self.keys.shape[-1] == keys_like.shape[-1]
            and self.values.shape[-1] == values_like.shape[-1]
            and self.keys.dtype == keys_like.dtype
            and self.keys.device == keys_like.device
        )

    def fill(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        index: Tensor,
        capacity: Tensor,
        pinned: Tensor,
        extra: dict[str, Tensor] | None = None,
    ) -> None:
        """Replaces the contents by chosen tokens.

        Args:
            keys, values: `[B, H, N, D]`; positions: `[B, H, N]`.
            index: `[B, H, M]` tokens to keep, in slot order, -1 for none (trailing).
            capacity, pinned: `[B, H]`; capacity at most what is allocated.
            extra: `[B, H, N, …]` further facts of the tokens by name.
        """
        self.length.copy_((index >= 0).sum(-1))
        self.capacity.copy_(capacity)
        self.pinned.copy_(pinned)
        self.cursor.zero_()
        ops.gather_rows(keys, values, index, self.start, self.keys, self.values)
        rows, valid = self.slots(index.shape[-1])
        self.positions[rows[valid]] = positions.gather(2, index.clamp(min=0))[valid].to(torch.int32)
        row, head, _ = valid.nonzero(as_tuple=True)
        for name, facts in (extra or {}).items():
            if name not in self.extra:
                size = (self.keys.shape[0], *facts.shape[3:])
                self.extra[name] = static_zeros(*size, dtype=facts.dtype, device=self.keys.device)
            self.extra[name][rows[valid]] = facts[row, head, index[valid]]

    def slots(self, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Row numbers of the first `width` slots of every segment, and which of them are filled: both `[B, H, width]`."""
        width = self.max_capacity if width is None else width
        slot = torch.arange(width, device=self.start.device)
        valid = slot < self.length.unsqueeze(-1)
        return torch.where(valid, self.start.unsqueeze(-1) + slot, 0), valid

    def span(self, first: int, last: int, row: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, last - first, D]` of those slots, of all rows or of one, where all segments are alike."""
        rows = slice(None) if row is None else slice(row, row + 1)
        shape = (self.batch, self.heads, self.max_capacity, -1)
        return tuple(tensor.view(shape)[rows, :, first:last] for tensor in (self.keys, self.values))

    def tokens_held(self, row: int, seen: int) -> Tensor:
        """`[H, seen]` bool on the host: which of the tokens at positions `0 … seen` of a row are here. Waits for the device."""
        held = torch.zeros(self.heads, seen + 1, dtype=torch.bool)
        positions = self.positions.cpu().long().clamp(0, seen)
        for head, (first, count) in enumerate(zip(self.start[row].tolist(), self.length[row].tolist(), strict=True)):
            held[head, positions[first : first + count]] = True
        return held[:, :seen]

    def export(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The kept tokens in order of position, right-aligned (invalid entries lead).

        Returns:
            keys `[B, H, M, Dk]`, values `[B, H, M, Dv]`, positions `[B, H, M]` int64, pad `[B, H]` invalid leading
            entries, and rows `[B, H, M]` (where each came from; 0 where invalid).
        """
        width = max(int(self.length.max()), 1)
        rows, valid = self.slots(width)
        positions = self.positions[rows].long().masked_fill(~valid, -1)
        order = torch.sort(positions, dim=-1, stable=True)
        rows = rows.gather(2, order.indices)
        pad = width - self.length.long()
        return self.keys[rows], self.values[rows], order.values, pad, rows

    def select_batch(self, index: Tensor) -> "RaggedStore":
        """The store whose row `i` is row `index[i]` of this one; itself, changed in place, where the shapes allow."""
        host = index.cpu()
        allocated = self.allocated[host]
        target = self if torch.equal(allocated, self.allocated) else self._empty(allocated)
        index = index.to(self.start.device)
        chosen = self._rows_of(index, host)
        per_head = {name: getattr(self, name)[index] for name in self._PER_HEAD}
        for name in self.extra:
            target.extra.setdefault(name, static_like(self.extra[name], target.keys.shape[0]))
        for name, value in per_head.items():
            getattr(target, name).copy_(value)
        snapshot = {name: tensor[chosen.to(tensor.device)] for name, tensor in self._row_tensors().items()}
        for name, tensor in target._row_tensors().items():
            tensor.copy_(snapshot[name])
        return target

    def _rows_of(self, index: Tensor, host: Tensor) -> Tensor:
        """Row numbers of all slots of the batch rows `index`, one after the other, filled or not."""
        sizes = self.allocated.sum(1)
        if bool((sizes == sizes[0]).all()):
            size = int(sizes[0])
            return (index.unsqueeze(1) * size + torch.arange(size, device=index.device)).flatten()
        first = sizes.cumsum(0) - sizes
        spans = [torch.arange(int(first[row]), int(first[row] + sizes[row])) for row in host]
        return torch.cat(spans).to(index.device)

    def grown(self, allocated: Tensor) -> "RaggedStore":
        """A copy with larger segments, `allocated` `[B, H]` entries on the host, all of them open."""
        target = self._empty(allocated)
        rows, valid = self.slots()
        for name in self._PER_HEAD:
            getattr(target, name).copy_(getattr(self, name))
        target.capacity.copy_(allocated)
        destination, _ = target.slots(self.max_capacity)
        for name in self.extra:
            target.extra[name] = static_like(self.extra[name], target.keys.shape[0])
        mine = self._row_tensors()
        for name, tensor in target._row_tensors().items():
            tensor[destination[valid].to(tensor.device)] = mine[name][rows[valid].to(tensor.device)]
        return target

    def add_token(
        self, key: Tensor, value: Tensor, newest: Tensor, backend: str, summary: Tensor | None = None, page_size: int = 0
    ) -> None:
        """Stores one token in every segment, in the slot that is its turn (see `ops.store_token`). Static.

        Args:
            key, value: `[B, H, D]`; newest: `[B]` int32 true positions.
        """
        ops.store_token(
            self.keys,
            self.values,
            self.positions,
            key,
            value,
            newest,
            self.start,
            self.capacity,
            self.length,
            self.pinned,
            self.cursor,
            summary=summary,
            page_size=page_size,
            backend=backend,
        )

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, pad: Tensor) -> None:
        """Appends tokens to every segment, in order; the room must exist.

        Args:
            keys, values: `[B, H, T, D]`; positions: `[B, T]`.
            pad: `[B]` leading tokens of each row that are padding and are not stored.
        """
        token = torch.arange(keys.shape[2], device=keys.device)
        real = (token >= pad.unsqueeze(-1)).unsqueeze(1).expand(-1, self.heads, -1)
        slot = self.length.unsqueeze(-1) + (token - pad.unsqueeze(-1)).unsqueeze(1)
        rows = (self.start.unsqueeze(-1) + slot)[real]
        self.keys[rows] = keys[real].to(self.keys.dtype)
        self.values[rows] = values[real].to(self.values.dtype)
        self.positions[rows] = positions.unsqueeze(1).expand(-1, self.heads, -1)[real].to(torch.int32)
        self.length.add_(real.sum(-1).to(torch.int32))

    def truncate(self, first_removed: Tensor) -> None:
        """Forgets entries at positions `first_removed[b]` and later. They must be the last slots of their segments."""
        rows, valid = self.slots()
        kept = valid & (self.positions[rows] < first_removed.view(-1, 1, 1))
        self.length.copy_(kept.sum(-1))

    def _row_tensors(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values, "positions": self.positions, **self.extra}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""
        per_head = {name: getattr(self, name) for name in ("start", *self._PER_HEAD)}
        return {**self._row_tensors(), **per_head}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over saved tensors (as `tensors()` names them) of a store with the same allocation.

        Raises:
            KVSparseError: they cannot be those of such a store.
        """
        for name, tensor in tensors.items():
            if name not in self.tensors():
                if tensor.dim() < 1 or len(tensor) != len(self.positions):
                    raise KVSparseError(f"the tensor {name!r} has another number of entries than there are slots.")
                self.extra[name] = static_like(tensor.to(self.keys.device))
        copy_checked(self.tensors(), tensors)
        length, capacity, pinned, cursor = (getattr(self, name).cpu().long() for name in ("length", "capacity", "pinned", "cursor"))
        starts = (self.allocated.flatten().cumsum(0) - self.allocated.flatten()).view_as(self.allocated)
        fits = (length >= 0) & (length <= capacity) & (capacity <= self.allocated) & (self.start.cpu() == starts)
        if not bool((fits & (pinned >= 0) & (pinned <= capacity) & (cursor >= 0) & (cursor <= capacity)).all()):
            raise KVSparseError("the tables of the segments contradict each other.")


def check_payload(allocated: Tensor, keys: Tensor, values: Tensor) -> None:
    """Saved keys and values `[R, D]` must be those of segments `allocated` `[B, H]`, before anything is allocated for them.

    Raises:
        KVSparseError: they are not.
    """
    shapes = allocated.dim() == 2 and keys.dim() == 2 and values.dim() == 2 and len(keys) == len(values)
    floats = keys.is_floating_point() and keys.dtype == values.dtype
    if not (shapes and floats and not allocated.is_floating_point() and int(allocated.min()) > 0 and int(allocated.sum()) == len(keys)):
        raise KVSparseError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fill the segments that are stated.")


def copy_checked(mine: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Copies saved tensors to their places.

    Raises:
        KVSparseError: one is missing, or has another shape or dtype. Nothing was copied then.
    """
    for name, tensor in mine.items():
        if name not in given:
            raise KVSparseError(f"the tensor {name!r} is missing.")
        if (given[name].shape, given[name].dtype) != (tensor.shape, tensor.dtype):
            found, wanted = ((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in (given[name], tensor))
            raise KVSparseError(f"the tensor {name!r} is {found}, not {wanted}.")
    for name, tensor in mine.items():
        tensor.copy_(given[name])


def storage_bytes(tensors) -> int:
    """Bytes of the distinct storages behind some tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
