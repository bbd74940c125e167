"""Moves entries between the tiers of one layer. Only what changes its tier (or must close a gap) is copied."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .tiers import DeviceTier

NEW = -2  # the tier of tokens that no store holds yet; NOWHERE that of what is no entry at all
NOWHERE = -1


@dataclass(frozen=True)
class Census:
    """The entries of all tiers in order of position, right-aligned.

    Attributes:
        positions: `[B, H, M]` int64, -1 where there is no entry; pad: `[B, H]` leading ones that are none.
        tier, slot: `[B, H, M]` where each entry is.
    """

    positions: Tensor
    pad: Tensor
    tier: Tensor
    slot: Tensor

    @property
    def length(self) -> int:
        """M."""
        return self.tier.shape[-1]

    @property
    def valid(self) -> Tensor:
        """`[B, H, M]` bool."""
        return self.tier != NOWHERE

    @classmethod
    def of(cls, stores: list[DeviceTier | None]) -> "Census":
        """Waits for the device."""
        held = [(index, store) for index, store in enumerate(stores) if store is not None]
        positions, tiers, slots = [], [], []
        for index, store in held:
            width = int(store.length.max())
            rows, valid = store.slots(width)
            positions.append(store.positions[rows].long().masked_fill(~valid, -1))
            tiers.append(torch.full_like(rows, index).masked_fill(~valid, NOWHERE))
            slots.append(torch.arange(width, device=rows.device).expand_as(rows))
        order = torch.sort(torch.cat(positions, dim=-1), dim=-1, stable=True)
        length = sum(store.length.long() for _, store in held)
        most = max(int(length.max()), 1)
        last = slice(max(order.values.shape[-1] - most, 0), None)
        index = order.indices[..., last]
        tier, slot = (torch.cat(parts, dim=-1).gather(-1, index) for parts in (tiers, slots))
        return cls(order.values[..., last], index.shape[-1] - length, tier, slot)

    @classmethod
    def fresh(cls, positions: Tensor) -> "Census":
        """Tokens at `positions` `[B, H, M]` that no store holds yet; padding is negative and leads."""
        nothing = positions[..., :0]
        return cls(nothing, nothing.sum(-1), nothing, nothing).joined(positions)

    def rows(self, index: int, store: DeviceTier) -> tuple[Tensor, Tensor]:
        """Which entries `[B, H, M]` (bool) tier `index` holds, and the rows `[n]` of its store where they are."""
        mine = self.tier == index
        return mine, (store.start.unsqueeze(-1) + self.slot)[mine]

    def collect(self, stores: list[DeviceTier | None]) -> tuple[Tensor, Tensor]:
        """Keys `[B, H, M, D]` and values `[B, H, M, Dv]` in full precision on the device; zeros where there is no entry."""
        first = next(store for store in stores if store is not None)
        keys, values = (
            torch.zeros(*self.tier.shape, dim, dtype=first.dtype, device=first.device) for dim in first.dims
        )
        for index, store in enumerate(stores):
            if store is not None:
                mine, rows = self.rows(index, store)
                keys[mine], values[mine] = store.fetch(rows)
        return keys, values

    def remembered(self, stores: list[DeviceTier | None], names: list[str]) -> dict[str, Tensor]:
        """What the stores remember of each entry under `names`, `[B, H, M]` each; zeros where there is no entry."""
        out = {}
        for name in names:
            for index, store in enumerate(stores):
                if store is not None:
                    mine, rows = self.rows(index, store)
                    held = store.extra[name]
                    out.setdefault(name, torch.zeros(self.tier.shape, dtype=held.dtype, device=held.device))[mine] = held[rows]
        return out

    def joined(self, positions: Tensor) -> "Census":
        """The same and new tokens at `positions` `[B, H, T]` behind; a new token's slot is its place in the result."""
        tokens, length = positions.shape[-1], self.length
        place = torch.arange(length, length + tokens, device=positions.device).expand_as(positions)
        new = torch.full_like(place, NEW).masked_fill(positions < 0, NOWHERE)
        whole = (torch.cat(pair, dim=-1) for pair in ((self.positions, positions), (self.tier, new), (self.slot, place)))
        positions, tier, slot = whole
        return Census(positions, (tier == NOWHERE).sum(-1), tier, slot)


@dataclass(frozen=True)
class _Arrival:
    """What one store receives, read before anything is written."""

    store: DeviceTier
    rows: Tensor
    keys: Tensor
    values: Tensor


def move(
    stores: list[DeviceTier | None],
    census: Census,
    target: Tensor,
    memory: dict[str, Tensor],
    new: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Makes every store hold exactly the entries whose `target` it is; there must be room.

    An entry that stays keeps its slot unless the segment got shorter; the others fill the gaps in order of position.

    Args:
        census: the entries.
        target: `[B, H, M]` tier of each; a number that is no store's drops the entry.
        memory: `[B, H, M]` facts of the entries by name, written beside them.
        new: keys `[B, H, M, D]` and values of the entries, for those whose tier is NEW.
    """
    placed, arrivals = [], []
    for index, store in enumerate(stores):
        if store is None:
            continue
        member = (target == index) & census.valid
        length = member.sum(-1)
        stays = member & (census.tier == index) & (census.slot < length.unsqueeze(-1))
        comes = member & ~stays
        slot = census.slot.clone()
        slot[comes] = _gaps(stays, slot, length)
        rows = store.start.unsqueeze(-1) + slot
        placed.append((store, member, rows[member], length))
        for source in census.tier[comes].unique().tolist():
            chosen = comes & (census.tier == source)
            keys, values = _payload(stores, census, source, chosen, new)
            arrivals.append(_Arrival(store, rows[chosen], keys, values))
    for arrival in arrivals:
        arrival.store.put(arrival.rows, arrival.keys, arrival.values)
    for store, member, rows, length in placed:
        store.positions[rows] = census.positions[member].to(torch.int32)
        store.length.copy_(length)
        for name, facts in memory.items():
            store.extra[name][rows] = facts[member]


def _gaps(stays: Tensor, slot: Tensor, length: Tensor) -> Tensor:
    """`[n]` free slots below `length`, ascending in each segment: one for each entry that comes, in the same order."""
    width = int(length.max())
    taken = torch.zeros(*length.shape, width + 1, dtype=torch.bool, device=length.device)
    taken.scatter_(-1, torch.where(stays, slot, width), True)
    free = ~taken[..., :width] & (torch.arange(width, device=length.device) < length.unsqueeze(-1))
    return free.nonzero()[:, -1]


def _payload(stores, census: Census, source: int, chosen: Tensor, new: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Keys and values of the chosen entries, all of which are in tier `source`."""
    if source == NEW:
        return new[0][chosen], new[1][chosen]
    store = stores[source]
    return store.fetch((store.start.unsqueeze(-1) + census.slot)[chosen])
