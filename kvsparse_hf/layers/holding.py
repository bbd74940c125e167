"""What a layer with several tiers holds, whatever decides who belongs where."""

import torch
from torch import Tensor

from ..errors import KVSparseError
from ..policy.tiers import DEVICE, HOST, Rest, Shares
from .base import SparseLayer
from .host import HostMemory
from .session import Session
from .store import RaggedStore, storage_bytes
from .tiers import Coding, DeviceTier, HostTier, QuantizedTier

_NAMES = ("device", "host", "quantized")
_PREFIXES = ("", "host.", "quantized.")


class TierHolder(SparseLayer):
    """The stores of a `TieredLayer`: their room, their bytes, and Transformers' bookkeeping calls.

    Attributes:
        store, host, quantized: the tiers; None where the split never uses one, or nothing was seen yet.
    """

    def __init__(
        self,
        layer_idx: int,
        session: Session,
        split: Shares | Rest,
        interval: int | None,
        reserve: int,
        memory: HostMemory,
        coding: Coding,
    ):
        super().__init__(layer_idx, session)
        self.split = split
        self.interval = interval
        self.reserve = reserve
        self.memory = memory
        self.coding = coding
        self.host: HostTier | None = None
        self.quantized: QuantizedTier | None = None
        self._ahead = reserve  # tokens for which to allocate ahead
        self._due = 0  # tokens seen, padding included, when the next ranking is due
        self._counts: Tensor | None = None  # [B, H] on the host: entries of the device at the last multi-token forward

    @property
    def is_compileable(self) -> bool:
        """Host memory that the device cannot read in place is copied in each step, outside of any graph."""
        return self.memory.pinned

    @property
    def tiers(self) -> list[DeviceTier | None]:
        """The stores by number of the tier."""
        return [self.store, self.host, self.quantized]

    @property
    def stores(self) -> list[RaggedStore]:
        return [store for store in self.tiers if store is not None]

    @property
    def remembered(self) -> list[str]:
        """What the policy remembers of each entry."""
        return [name for name in self.store.extra if name not in QuantizedTier.RANGES]

    @property
    def appends_turns(self) -> bool:
        """Whether a later multi-token forward stays on the device as it comes: where only prompts are ranked. Its drafts must not
        be ranked with a prompt either; a layer that loses something never sees them here, as it holds them back."""
        drafting = self.session.record_past and self.is_croppable
        return self.interval is None and (self.session.decoding or drafting)

    # --- room ------------------------------------------------------------------------------------------------------

    def make_room(self, needed: Tensor, seen: Tensor, likes: tuple[Tensor, Tensor] | None) -> bool:
        """Lets every tier hold `needed` `[B, H, 3]` entries, and the device what decodes before the next ranking.

        Everything is allocated before anything is changed, so that a refusal (host memory) leaves the layer as it was.

        Args:
            seen: `[B]` real tokens each row has seen, on the host.
            likes: keys and values whose head sizes, dtype and device a first forward takes; None later.

        Returns:
            True when buffers moved.
        """
        needed = needed + torch.tensor([self.interval or 0, 0, 0])
        wanted = torch.maximum(needed, self._wanted(needed, seen)).clamp(min=1)
        tiers = self.tiers
        if likes is not None:
            lacks = [store is None or not store.fits(needed[..., tier], *likes) for tier, store in enumerate(tiers)]
            lacks = [lack and used for lack, used in zip(lacks, self.split.tiers, strict=True)]
            tiers = [None if lack else store for lack, store in zip(lacks, tiers, strict=True)]
            self.store, self.host, self.quantized = tiers  # frees the old buffers before the new ones are allocated
            new = {tier: self._new(tier, wanted[..., tier], *likes) for tier, lack in enumerate(lacks) if lack}
        else:
            lacks = [store is not None and bool((needed[..., tier] > store.allocated).any()) for tier, store in enumerate(tiers)]
            new = {tier: tiers[tier].grown(wanted[..., tier]) for tier, lack in enumerate(lacks) if lack}
            if new:  # tiers fill at different times, small ones often: what was seen bounds the doubling
                self._ahead = min(2 * self._ahead, max(self.reserve, int(seen.max())))
        self.store, self.host, self.quantized = (new.get(tier, store) for tier, store in enumerate(tiers))
        for store in self.stores:
            store.open_all()
        return bool(new)

    def _wanted(self, needed: Tensor, seen: Tensor) -> Tensor:
        """`[B, H, 3]` entries to allocate, for `_ahead` more tokens than a row has seen."""
        if self.interval is None:
            return needed + torch.tensor([self._ahead, 0, 0])
        ahead = max(self._ahead, self.interval)
        return self.split.room(self._counts, seen + ahead) + torch.tensor([self.interval, 0, 0])

    def _new(self, tier: int, allocated: Tensor, keys: Tensor, values: Tensor) -> DeviceTier:
        if tier == DEVICE:
            return DeviceTier(allocated, keys, values)
        if tier == HOST:
            return HostTier(self.memory, allocated, keys, values)
        return QuantizedTier(self.coding, allocated, keys, values)

    def check_turn(self, tokens: int) -> None:
        if self.host is None or self.appends_turns:
            return
        seen = (self.session.clock(self.device).newest.long().cpu() + 1).clamp(min=0) + tokens
        needed = self.split.room(self._counts, seen)
        held = self.host.allocated
        if bool((needed[..., HOST] > held).any()):
            wanted = torch.maximum(needed, self._wanted(needed, seen))[..., HOST]
            old, new = (int(size.sum()) * self.host.entry_bytes for size in (held, wanted.clamp(min=1)))
            layers = sum(isinstance(layer, TierHolder) for layer in self.session.layers)
            self.memory.require(layers * (new - old) + old)  # they grow one after the other, each beside its old buffers

    def open_room(self) -> int | None:
        """With an interval each ranking makes the room until the next."""
        return None if self.interval is not None else int((self.store.capacity - self.store.length).min())

    def grow(self, room: int) -> None:
        self.store = self.store.grown(self.store.allocated + room)
        self.store.open_all()

    # --- Transformers' bookkeeping ---------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not self.is_initialized:
            return
        chosen = [None if store is None else store.select_batch(beam_idx) for store in self.tiers]
        self.store, self.host, self.quantized = chosen
        self._counts = self._counts[beam_idx.cpu()]

    def tensors(self) -> dict[str, Tensor]:
        out = {}
        for prefix, store in zip(_PREFIXES, self.tiers, strict=True):
            out |= {} if store is None else {prefix + name: tensor for name, tensor in store.tensors().items()}
        return out

    def saved_state(self) -> dict:
        allocated = {name: store.allocated.tolist() for name, store in zip(_NAMES, self.tiers, strict=True) if store is not None}
        return {"allocated": allocated, "counts": self._counts.tolist(), "due": self._due, "ahead": self._ahead}

    def restore(self, tensors: dict[str, Tensor], saved: dict, device: torch.device) -> None:
        self.device = device
        likes = tensors["keys"][:0], tensors["values"][:0]
        self.check_saved(torch.tensor(saved["allocated"]["device"]), tensors["keys"], tensors["values"])
        parts: list[dict[str, Tensor]] = [{}, {}, {}]
        for name, tensor in tensors.items():
            tier = next((tier for tier in (2, 1) if name.startswith(_PREFIXES[tier])), 0)
            parts[tier][name.removeprefix(_PREFIXES[tier])] = tensor
        stores: list[DeviceTier | None] = [None, None, None]
        for tier, name in enumerate(_NAMES):
            if name in saved["allocated"]:
                stores[tier] = self._new(tier, torch.tensor(saved["allocated"][name]), *likes)
                stores[tier].load(parts[tier])
        if len({frozenset(store.extra) - set(QuantizedTier.RANGES) for store in stores if store is not None}) != 1:
            raise KVSparseError("the tiers remember unlike facts of their entries.")
        self.store, self.host, self.quantized = stores
        self._counts, self._due = torch.tensor(saved["counts"]), saved["due"]
        seen = int(self.session.clock(device).seen)
        if self.interval is not None and self._due and not seen <= self._due <= seen + self.interval:
            raise KVSparseError(f"the next ranking is due at {self._due} tokens, {seen} were seen.")
        if saved["ahead"] < 1:
            raise KVSparseError(f"room for {saved['ahead']} tokens ahead is none.")
        self._ahead = min(int(saved["ahead"]), max(self.reserve, seen))
        self.is_initialized = True

    # --- what it holds ---------------------------------------------------------------------------------------------

    def kept_entries(self) -> Tensor:
        """`[B, H]` entries held in any tier."""
        return sum(store.length for store in self.stores)

    def tier_entries(self) -> dict[str, int]:
        return {name: int(store.length.sum()) for name, store in zip(_NAMES, self.tiers, strict=True) if store is not None}

    def token_places(self, row: int, seen: int) -> dict[str, Tensor]:
        held = zip(_NAMES, self.tiers, strict=True)
        return {name: store.tokens_held(row, seen) for name, store in held if store is not None}

    def device_bytes(self) -> int:
        return storage_bytes(self.tensors().values()) - self.host_bytes()

    def host_bytes(self) -> int:
        return 0 if self.host is None else storage_bytes(self.host.payload())

    def reserve_bytes(self) -> int:
        facts = 4 + sum(self.store.extra[name].element_size() for name in self.remembered)
        total = 0
        for store in self.stores:
            empty = int((store.allocated - store.length.cpu()).sum())
            total += empty * (facts if store is self.host else facts + store.entry_bytes)
        return total

    def bytes_read_per_step(self) -> int:
        return sum(int(store.length.sum()) * store.entry_bytes for store in self.stores)
