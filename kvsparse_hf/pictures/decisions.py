"""What a cache did with each token of one row: where it is, and how often decode steps read it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError
from ..layers.selecting import SelectingLayer
from ..layers.selectors.base import Selection

if TYPE_CHECKING:
    from ..cache import SparseCache


@dataclass(frozen=True)
class Decisions:
    """One row of a cache, token by token. N counts the tokens the row has seen, its padding left out.

    Attributes:
        method: name of the method.
        layers: index of each decoder layer shown; L of them.
        places: `[L, N]` fp32 by place ("device", "host", "quantized"): the share of a layer's key/value heads that hold the
            token there. What is missing to 1 is evicted.
        held: `[L, H]` entries that each key/value head holds, wherever they are.
        read: `[L, N]` fp32, the share of (decode step, key/value head) that read the token, counted from when it was there;
            None where no steps were recorded or nothing selects.
        hits: hits and misses of each recorded step, for a cache that swaps.
        tokens: the text of each token, where it is known.
    """

    method: str
    layers: list[int]
    places: dict[str, Tensor]
    held: Tensor
    read: Tensor | None = None
    hits: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[str] | None = None

    @classmethod
    def of(
        cls, cache: SparseCache, row: int = 0, tokens: list[str] | None = None, recorder: Recorder | None = None
    ) -> Decisions:
        """Reads what `cache` holds of one row. Waits for the device.

        Args:
            tokens: the text of the row's tokens, in order; those beyond the ones given stay without text.
            recorder: of the decode steps since the prompt, for what they read.

        Raises:
            UnsupportedOperationError: the cache has seen nothing, or has no such row.
        """
        layers = [layer for layer in cache.sparse_layers if layer.is_initialized]
        if not layers:
            raise UnsupportedOperationError("the cache has seen nothing yet: generate() with it first.")
        if not 0 <= row < cache.session.batch:
            raise UnsupportedOperationError(f"row {row}: the cache holds {cache.session.batch} row(s).")
        seen = int(cache.session.seen() - cache.session.pad[row])
        found = [layer.token_places(row, seen) for layer in layers]  # each {place: [H, N]}
        names = list(dict.fromkeys(name for places in found for name in places))
        nothing = torch.zeros(1, seen)
        places = {name: torch.stack([p.get(name, nothing).float().mean(0) for p in found]) for name in names}
        heads = max(next(iter(p.values())).shape[0] for p in found)
        held = torch.stack([_spread(sum(t.long() for t in p.values()).clamp(max=1).sum(-1), heads) for p in found])
        indices = [layer.layer_idx for layer in layers]
        read = recorder.shares(indices, row, seen) if recorder is not None else None
        hits = recorder.hits if recorder is not None else []
        if tokens is not None:
            tokens = [*tokens[:seen], *[""] * (seen - len(tokens))]
        return cls(cache.method, indices, places, held, read, hits, tokens)

    @property
    def kept(self) -> Tensor:
        """`[L, N]` share of the heads that can still read the token."""
        return sum(self.places.values()).clamp(max=1)


def _spread(held: Tensor, heads: int) -> Tensor:
    """`[H]` as `[heads]`, for layers with fewer heads than others."""
    return torch.nn.functional.pad(held, (0, heads - len(held)))


class Recorder(AbstractContextManager):
    """Notes what every decode step reads, and its hits and misses, while it is open. For steps in plain Python.

    Args:
        cache: the cache that decodes. A step of a compiled model is not seen: generate with `disable_compile=True`.
    """

    def __init__(self, cache: SparseCache):
        self.cache = cache
        self.hits: list[tuple[int, int]] = []
        self._reads: dict[int, list[Tensor]] = {}  # layer -> per step [B, Hs, N] bool
        self._seen_hits = (0, 0)

    def __enter__(self) -> Recorder:
        self._layers = [layer for layer in self.cache.sparse_layers if isinstance(layer, SelectingLayer)]
        for layer in self._layers:
            self._watch(layer)
        return self

    def __exit__(self, *_) -> None:
        for layer in self._layers:
            del layer.selector.select  # the wrapper: the class's own method is visible again

    def _watch(self, layer: SelectingLayer) -> None:
        original = layer.selector.select

        def select(query, store, call):
            selection = original(query, store, call)
            self._note(layer, selection)
            return selection

        layer.selector.select = select

    def _note(self, layer: SelectingLayer, selection: Selection) -> None:
        size, seen = layer.selector.page_size, int(layer.session.seen())
        pages = selection.pages.long()
        slots = (pages.unsqueeze(-1) * size + torch.arange(size, device=pages.device)).flatten(2)
        ok = (pages >= 0).unsqueeze(-1).expand(-1, -1, -1, size).flatten(2) & (slots < seen)
        read = torch.zeros(*pages.shape[:2], seen + 1, dtype=torch.bool, device=pages.device)
        read.scatter_(2, torch.where(ok, slots, seen), True)
        self._reads.setdefault(layer.layer_idx, []).append(read[..., :seen].cpu())
        if layer is self._layers[-1]:
            report = self.cache.report()
            before, self._seen_hits = self._seen_hits, (report.hits, report.misses)
            self.hits.append((report.hits - before[0], report.misses - before[1]))

    def shares(self, layers: list[int], row: int, seen: int) -> Tensor | None:
        """`[L, N]`, see `Decisions.read`; a layer that selects nothing reads everything."""
        if not self._reads:
            return None
        steps = max(len(reads) for reads in self._reads.values())
        shares = torch.ones(len(layers), seen)
        for at, layer in enumerate(layers):
            if layer not in self._reads:
                continue
            count, possible = torch.zeros(seen), torch.zeros(seen)
            for read in self._reads[layer]:
                there = min(read.shape[-1], seen)
                count[:there] += read[row, :, :there].float().mean(0)
                possible[:there] += 1
            shares[at] = count / possible.clamp(min=1)
        return shares if steps else None
